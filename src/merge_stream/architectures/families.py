"""Facts about model types and names: lists, no code.

A trainer's state dict holds the names that transformers uses in memory; the Hub
repository of the family may use others: those families have a table in `tables/`. Read from transformers 5.24.0
(`conversion_mapping.py`, `auto/modeling_auto.py`, the `configuration_*.py` files) and
4.57.6; the names of both versions agree unless a table says otherwise.
"""

from __future__ import annotations

import re

__all__ = [
    "AUDIO_AND_VISION",
    "DENSE",
    "EMBEDDINGS",
    "EXPERTS_OF_INTERMEDIATE_SIZE",
    "FUSED_EXPERTS",
    "HEADS",
    "LLAMA_LIKE",
    "ODD_VOCABULARY",
    "PART_SHAPES",
    "RECOMPUTED",
    "RENAMED_VLM",
    "TIED_BY_DEFAULT",
    "TIE_NAMES",
    "UNIFORM",
]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Text models without an entry in the conversion mapping of 5.24 (nor a key mapping in 4.57): identity.
DENSE = _words(
    """
    apertus arcee bamba biogpt bitnet bloom codegen cohere cohere2 ctrl cwm dbrx diffllama doge ernie4_5 exaone4
    falcon falcon_h1 falcon_mamba gemma gemma2 gemma3_text glm glm4 gpt2 gpt_bigcode gpt_neo gptj granite
    granite_swa helium hunyuan_v1_dense internlm internlm2 internlm3 jais2 jetmoe lfm2 llama mamba mamba2 minicpm3
    ministral ministral3 mistral mpt nanochat nemotron olmo olmo2 olmo3 openai-gpt opt persimmon phi phi3 qwen2 qwen3
    recurrent_gemma rwkv seed_oss smollm3 stablelm starcoder2 vaultgemma xglm xlstm youtu zamba zamba2
    """
)

# Vision and audio families whose names in memory are not (or not known to be) those of the repository, and which have
# no table yet.
RENAMED_VLM = _words(
    """
    deepseek_ocr2 ernie4_5_vl_moe gemma3n gemma4 gemma4_unified hunyuan_vl instructblip internvl_chat
    kimi_k25 kimi_vl minicpmv minicpmo molmo2 paddleocr_vl phi4_multimodal qwen3_5 qwen3_5_moe
    """
)

# Every layer of these has the same parameters, so a name that one layer lacks is lost, not absent.
UNIFORM = _words(
    """
    cohere cohere2 exaone4 gemma gemma2 gemma3_text glm glm4 gpt2 gpt_neox gptj granite llama mistral olmo olmo2 olmo3
    opt phi phi3 qwen2 qwen3 seed_oss smollm3 stablelm starcoder2
    """
)

# Those of them with `norm` beside `layers` and `embed_tokens` (olmo's norm has no weights), and the parts of a layer
# of llama: rows and columns, each a number of the config.
LLAMA_LIKE = UNIFORM - _words("gpt2 gpt_neox gptj olmo opt phi")
PART_SHAPES: dict[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("hidden",),
    "post_attention_layernorm.weight": ("hidden",),
    "self_attn.q_proj.weight": ("heads", "hidden"),
    "self_attn.k_proj.weight": ("key_value_heads", "hidden"),
    "self_attn.v_proj.weight": ("key_value_heads", "hidden"),
    "self_attn.o_proj.weight": ("hidden", "heads"),
    "mlp.gate_proj.weight": ("intermediate", "hidden"),
    "mlp.up_proj.weight": ("intermediate", "hidden"),
    "mlp.down_proj.weight": ("hidden", "intermediate"),
}

# Mixtures whose experts are `intermediate_size` wide; a `moe_intermediate_size` in their config is read by no loader.
EXPERTS_OF_INTERMEDIATE_SIZE = _words("cohere2_moe flex_olmo hunyuan_v1_moe jamba olmoe")

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
    ("text_model.lm_head.weight", "text_model.model.embed_tokens.weight"),
    ("thinker.lm_head.weight", "thinker.model.embed_tokens.weight"),
    ("model.lm_head.weight", "model.language_model.embed_tokens.weight"),
    ("output_projection.weight", "biogpt.embed_tokens.weight"),
)

EMBEDDINGS = frozenset(twin for _, twin in TIE_NAMES) | {"embed_tokens.weight", "wte.weight", "tok_embeddings.weight"}

# The embedding has other rows than vocab_size by design (mllama: vocab_size + 8; idefics: additional_vocab_size).
ODD_VOCABULARY = frozenset({"idefics", "mllama"})

# Heads that stand in for lm_head: classification, reward and value models (trl: v_head; verl: score).
HEADS = re.compile(
    r"(?:(?:language_model|text_model|thinker)\.)?"
    r"(lm_head|embed_out|score|v_head|value_head|reward_head|classifier|regression_head)(\..+)?"
)

# Buffers that every loader computes again; in a state dict of an old trainer they are only in the way.
RECOMPUTED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|freqs_cis|embeddings\.position_ids)")

# 3-D expert weights without an expert number: E x 2I x H and E x H x I (or transposed).
FUSED_EXPERTS = re.compile(r".*\.experts\.(gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3)")

# Path segments that only vision and audio models have.
AUDIO_AND_VISION = re.compile(
    r"(^|\.)(visual|vision_tower|vision_model|vision_encoder|vision_embed_tokens|vision_backbone|audio_tower"
    r"|audio_model|multi_modal_projector|mm_projector|embed_vision|embed_audio|image_newline|language_model|mlp1"
    r"|thinker|talker|vpm|apm|resampler)(\.|$)"
)
