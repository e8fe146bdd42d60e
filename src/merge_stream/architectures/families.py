"""Which model types keep their upstream names in memory: tables, no code.

A trainer's state dict holds the names that transformers uses in memory; the Hub
repository of the family may use others. Read from transformers 5.24.0
(`conversion_mapping.py`, `auto/modeling_auto.py`, the `configuration_*.py` files) and
4.57.6; the names of both versions agree unless a table says otherwise.
"""

from __future__ import annotations

import re

__all__ = [
    "AUDIO_AND_VISION",
    "DENSE",
    "EMBEDDINGS",
    "FUSED_EXPERTS",
    "HEADS",
    "MEMORY_IS_UPSTREAM",
    "ODD_VOCABULARY",
    "PER_EXPERT",
    "RECOMPUTED",
    "RENAMED_HEAD",
    "RENAMED_VLM",
    "TIED_BY_DEFAULT",
    "TIE_NAMES",
    "UNIFORM",
    "UPSTREAM_VLM_PREFIXES",
]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Text models without an entry in the conversion mapping of 5.24 (nor a key mapping in 4.57): identity.
DENSE = _words(
    """
    apertus arcee bamba biogpt bitnet bloom codegen cohere cohere2 ctrl cwm dbrx diffllama doge ernie4_5 exaone4
    falcon falcon_h1 falcon_mamba gemma gemma2 gemma3_text glm glm4 gpt2 gpt_bigcode gpt_neo gpt_neox gptj granite
    granite_swa helium hunyuan_v1_dense internlm internlm2 internlm3 jais2 jetmoe lfm2 llama mamba mamba2 minicpm3
    ministral ministral3 mistral mpt nanochat nemotron olmo olmo2 olmo3 openai-gpt opt persimmon phi phi3 qwen2 qwen3
    recurrent_gemma rwkv seed_oss smollm3 stablelm starcoder2 vaultgemma xglm xlstm youtu zamba zamba2
    """
)

# Families that 5.x holds with fused experts, 4.57 (and custom code) with one tensor for each expert and projection,
# as the repository has them: identity as long as nothing is fused.
PER_EXPERT = _words(
    """
    afmoe cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5_moe exaone_moe flex_olmo glm4_moe
    glm4_moe_lite glm_moe_dsa granitemoe granitemoehybrid granitemoeshared hunyuan_v1_moe jamba lfm2_moe
    longcat_flash mellum minimax minimax_m2 mixtral olmoe phimoe qwen2_moe qwen3_moe qwen3_next sarvam_mla solar_open
    """
)

# Fused experts or vision prefixes that are the repository's own layout, in 4.57 and 5.24 alike.
MEMORY_IS_UPSTREAM = frozenset({"glm4v", "gpt_oss", "llama4", "llama4_text", "qwen3_vl"})

# Vision and audio families whose names in memory are not those of the repository: 5.x and 4.52+ put everything
# below `model.`; before 4.52 the names were the upstream ones.
RENAMED_VLM = _words(
    """
    aria audioflamingo3 aya_vision cohere2_vision deepseek_ocr2 emu3 ernie4_5_vl_moe fuyu gemma3 gemma3n gemma4
    gemma4_unified glm4v_moe glmasr got_ocr2 granite_speech hunyuan_vl idefics2 idefics3 instructblip internvl
    internvl_chat kimi_k25 kimi_vl llava llava_next llava_next_video llava_onevision minicpmv minicpmo mistral3 mllama
    molmo2 musicflamingo paddleocr_vl paligemma phi4_multimodal qwen2_5_omni qwen2_5_omni_thinker qwen2_5_vl
    qwen2_audio qwen2_vl qwen3_5 qwen3_5_moe qwen3_omni_moe qwen3_omni_moe_thinker qwen3_vl_moe shieldgemma2 smolvlm
    video_llava vipllava voxtral voxtral_realtime
    """
)

# Prefixes of the upstream names of the families above where they are known.
_LLAVA = ("language_model.", "vision_tower.", "multi_modal_projector.", "image_newline")
UPSTREAM_VLM_PREFIXES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl"), ("visual.", "model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
    ),
    **dict.fromkeys(
        _words(
            "aya_vision gemma3 internvl llava llava_next llava_next_video llava_onevision mistral3 paligemma vipllava"
        ),
        _LLAVA,
    ),
    **dict.fromkeys(("qwen2_audio", "voxtral"), ("language_model.", "audio_tower.", "multi_modal_projector.")),
}

# 5.x renamed the head (GPTNeoXForCausalLM: `^embed_out\.` -> `lm_head.`); 4.57 has the repository's name.
RENAMED_HEAD = {"gpt_neox": "lm_head.weight"}

# Every layer of these has the same parameters, so a name that one layer lacks is lost, not absent.
UNIFORM = _words(
    """
    cohere cohere2 exaone4 gemma gemma2 gemma3_text glm glm4 gpt2 gpt_neox gptj granite llama mistral olmo olmo2 olmo3
    opt phi phi3 qwen2 qwen3 seed_oss smollm3 stablelm starcoder2
    """
)

# `tie_word_embeddings` when the config does not say: true in both 4.57.6 and 5.24.0. Where they disagree, or where
# the family is unknown, nothing is tied (both tensors are then written, which loads everywhere).
TIED_BY_DEFAULT = _words(
    """
    biogpt bloom cohere cohere2 cohere2_moe ctrl ernie4_5 ernie4_5_moe falcon falcon_mamba gemma gemma2 gemma3
    gemma3_text gemma3n gemma3n_text gemma4_text got_ocr2 gpt2 gpt_bigcode gpt_neo gpt_neox_japanese granite_swa
    jetmoe lfm2 lfm2_moe mamba minicpm3 mpt openai-gpt opt recurrent_gemma smollm3 starcoder2 vaultgemma xglm youtu
    zamba zamba2
    """
)

# (head, embedding): pairs that transformers ties, in its order of likelihood.
TIE_NAMES: tuple[tuple[str, str], ...] = (
    ("lm_head.weight", "model.embed_tokens.weight"),
    ("lm_head.weight", "model.language_model.embed_tokens.weight"),
    ("lm_head.weight", "transformer.wte.weight"),
    ("lm_head.weight", "transformer.word_embeddings.weight"),
    ("lm_head.weight", "model.decoder.embed_tokens.weight"),
    ("lm_head.weight", "backbone.embeddings.weight"),
    ("lm_head.weight", "gpt_neox.embed_in.weight"),
    ("embed_out.weight", "gpt_neox.embed_in.weight"),
    ("language_model.lm_head.weight", "language_model.model.embed_tokens.weight"),
    ("model.lm_head.weight", "model.language_model.embed_tokens.weight"),
    ("output_projection.weight", "biogpt.embed_tokens.weight"),
)

EMBEDDINGS = frozenset(twin for _, twin in TIE_NAMES) | {"embed_tokens.weight", "wte.weight", "tok_embeddings.weight"}

# The embedding has other rows than vocab_size by design (mllama: vocab_size + 8; idefics: additional_vocab_size).
ODD_VOCABULARY = frozenset({"idefics", "mllama"})

# Heads that stand in for lm_head: classification, reward and value models (trl: v_head; verl: score).
HEADS = re.compile(r"(lm_head|embed_out|score|v_head|value_head|reward_head|classifier|regression_head)(\..+)?")

# Buffers that every loader computes again; in a state dict of an old trainer they are only in the way.
RECOMPUTED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|freqs_cis)")

# 3-D expert weights without an expert number: E x 2I x H and E x H x I (or transposed).
FUSED_EXPERTS = re.compile(r".*\.experts\.(gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3)")

# Path segments that only vision and audio models have.
AUDIO_AND_VISION = re.compile(
    r"(^|\.)(visual|vision_tower|vision_model|vision_encoder|vision_embed_tokens|vision_backbone|audio_tower"
    r"|audio_model|multi_modal_projector|mm_projector|embed_vision|embed_audio|image_newline|language_model|mlp1"
    r"|thinker|talker|vpm|apm|resampler)(\.|$)"
)
