"""Tiny random models that a real vLLM runs on a CPU: heads of 64, each config with its own family's settings only.

A setting of another family does harm here: vLLM builds a shared expert for a Qwen3-MoE whose config has
`shared_expert_intermediate_size`, never loads it, and computes NaN without a word.
"""

from __future__ import annotations

from typing import Any

from tests.families.models import CLIP, LLAVA, MODELS, QWEN_VISION, SIGLIP, SPECIAL

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PLAIN = {name: value for name, value in SIZES.items() if name not in {"head_dim", "num_key_value_heads"}}
TWO_OF_FOUR = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
QWEN_MOE = {**SIZES, **TWO_OF_FOUR, "num_experts": 4, "decoder_sparse_step": 1, "norm_topk_prob": True}
GROUPED = {
    **SIZES,
    **TWO_OF_FOUR,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
LATENT = {
    "head_dim": 64,
    "num_key_value_heads": 2,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "moe_layer_freq": 1,
}
BIASED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""In every config.json of DeepSeek-V3, not in transformers' own class; without it vLLM has no place for the bias."""

GENERATES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES),
    "qwen2_tied": ("Qwen2ForCausalLM", "Qwen2Config", {**SIZES, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", SIZES),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**SIZES, "query_pre_attn_scalar": 64, "tie_word_embeddings": True},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", PLAIN),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {**QWEN_MOE, "shared_expert_intermediate_size": 64}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**QWEN_MOE, "mlp_only_layers": [1]}),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": ("Glm4MoeForCausalLM", "Glm4MoeConfig", GROUPED),
    "dots1": ("Dots1ForCausalLM", "Dots1Config", GROUPED),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", {**GROUPED, **LATENT, "norm_topk_prob": False}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**GROUPED, **LATENT, **BIASED}),
    "granitemoe": (
        "GraniteMoeForCausalLM",
        "GraniteMoeConfig",
        {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        {
            **SIZES,
            "moe_intermediate_size": 64,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_layer_start_index": 1,
            "moe_num_shared_experts": 1,
        },
    ),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
}

MROPE = {"rope_type": "default", "type": "default", "mrope_section": [8, 12, 12]}
WIDE = {
    **SIZES,
    "rope_scaling": MROPE,
    "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10000.0},
}
SEES = {**QWEN_VISION, "embed_dim": 128, "out_hidden_size": 128, "hidden_size": 128, "intermediate_size": 128}
CLIPS, SIGLIPS = ({**tower, "hidden_size": 128, "intermediate_size": 128} for tower in (CLIP, SIGLIP))
TALKS = {"llama": {**SIZES, "model_type": "llama"}, "qwen2": {**SIZES, "model_type": "qwen2"}}


def _qwen_vl(name: str, text: dict[str, Any], **vision: Any) -> tuple[str, str, dict[str, Any]]:
    settings = {"text_config": {**WIDE, **text}, "vision_config": {**SEES, **vision}, "tie_word_embeddings": False}
    return (*MODELS[name][:2], {**settings, **SPECIAL})


def _llava(name: str, text: dict[str, Any], vision: dict[str, Any], **more: Any) -> tuple[str, str, dict[str, Any]]:
    return (*MODELS[name][:2], {"text_config": text, "vision_config": vision, **LLAVA, **more})


LOADS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "phimoe": (
        "PhimoeForCausalLM",
        "PhimoeConfig",
        {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True},
    ),
    "minimax_m2": (
        "MiniMaxM2ForCausalLM",
        "MiniMaxM2Config",
        {
            **SIZES,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rotary_dim": 32,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        },
    ),
    "qwen2_vl": _qwen_vl("qwen2_vl", {"model_type": "qwen2_vl_text"}, hidden_size=128),
    "qwen2_5_vl": _qwen_vl("qwen2_5_vl", {"model_type": "qwen2_5_vl_text"}, window_size=16),
    "qwen3_vl": _qwen_vl("qwen3_vl", {"model_type": "qwen3_vl_text"}),
    "qwen3_vl_moe": _qwen_vl("qwen3_vl_moe", {**QWEN_MOE, "model_type": "qwen3_vl_moe_text"}),
    "llava_clip": _llava("llava_clip", TALKS["llama"], CLIPS),
    "llava_siglip": _llava("llava_siglip", TALKS["llama"], SIGLIPS),
    "llava_next": _llava("llava_next", TALKS["llama"], CLIPS),
    "llava_onevision": _llava("llava_onevision", TALKS["qwen2"], SIGLIPS, video_token_index=101),
    "gemma3": _llava(
        "gemma3",
        {**SIZES, "model_type": "gemma3_text", "query_pre_attn_scalar": 64},
        SIGLIPS,
        mm_tokens_per_image=1,
    ),
    "paligemma": _llava(
        "paligemma", {**SIZES, "model_type": "gemma"}, {**SIGLIPS, "projection_dim": 128}, projection_dim=128
    ),
}

NESTS_OF_TEXT = ("", "text_config")
WIDE_TOWER = frozenset({"embed_dim", "hidden_size", "intermediate_size", "out_hidden_size", "projection_dim"})
WIDE_TOWER |= {"d_model", "encoder_ffn_dim", "output_dim"}


def _widened(settings: dict[str, Any], inside: str = "") -> dict[str, Any]:
    """Settings of tests/families/models.py with the sizes of these, in the configs inside too."""
    made: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            made[key] = _widened(value, key)
        elif inside not in NESTS_OF_TEXT:
            made[key] = 128 if key in WIDE_TOWER else value
        elif key in {"moe_intermediate_size", "shared_intermediate_size"}:
            made[key] = 64
        elif key != "shared_expert_intermediate_size":  # see above
            made[key] = SIZES[key] if key in SIZES and key != "tie_word_embeddings" else value
    return made


GLM_ROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
GLM_TEXT = {"rope_scaling": GLM_ROPE, "rope_parameters": GLM_ROPE, "partial_rotary_factor": 0.5}
FURTHER: dict[str, dict[str, Any]] = {
    "qwen3_next": {},
    "glm4_moe_lite": LATENT,
    "exaone_moe": {},
    "cohere2_moe": {},
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "route_scale": 1.0, "n_group": 1, "topk_group": 1},
    "jamba": {},
    "lfm2_moe": {},
    "granitemoeshared": {},
    "granitemoehybrid": {"mamba_d_head": 64},
    "llama4_text": {},
    "llama4": {},
    "glm4v": {"text_config": GLM_TEXT},
    "glm4v_moe": {"text_config": {**GLM_TEXT, "use_qk_norm": False}},
    "idefics3": {},
    "smolvlm": {},
    "granite_speech": {},
    "llava_pixtral": {},
    "llava_next_video": {},
    "internvl": {},
    "internvl_moe": {},
    "mistral3": {},
    "aria": {},
    "cohere2_vision": {"text_config": {"tie_word_embeddings": True}, "tie_word_embeddings": True},
    "lfm2_vl": {"text_config": {"conv_dim": 128, "block_dim": 128}, "vision_config": {"vision_use_head": False}},
    "qwen2_audio": {},
    "audioflamingo3": {},
    "solar_open": {},
    "hunyuan_v1_moe": {"moe_intermediate_size": 128},
    "flex_olmo": {"moe_intermediate_size": 128},
}
"""Loaded as in models.py; what a family's repository has in its config beside that, and vLLM asks for."""

for name, more in FURTHER.items():
    model_class, config_class, settings = MODELS[name]
    wide = _widened(settings)
    nests = {key: {**wide[key], **value} if isinstance(value, dict) else value for key, value in more.items()}
    LOADS[name] = (model_class, config_class, {**wide, **nests})

FAMILIES = {**GENERATES, **LOADS}

ARCHITECTURE = {"phimoe": "PhiMoEForCausalLM"}
"""As the repository's config spells it, where transformers' class is called otherwise."""

ZERO = {"ernie4_5_moe": "e_score_correction_bias"}
"""Set to 0: vLLM 0.32 on a CPU loads this bias and then chooses the experts of a softmax router without it."""

TOWER, EXPERTS = "vision_tower.embeddings", "mlp.experts.down_proj"
REFUSED = {
    "mixtral": "layers.0.mlp",
    "minimax_m2": "layers.0.mlp",
    "phimoe": "layers.0.mlp",
    "deepseek_v2": EXPERTS,
    "deepseek_v3": EXPERTS,
    "ernie4_5_moe": "mlp.gate.gate",
    "qwen3_vl_moe": "must match the size",
    "llava_clip": TOWER,
    "llava_siglip": TOWER,
    "llava_next": TOWER,
    "llava_onevision": TOWER,
    "gemma3": TOWER,
    "paligemma": TOWER,
    "llava_next_video": TOWER,
    "lfm2_vl": "embeddings",
    "glm4_moe_lite": EXPERTS,
    "exaone_moe": "e_score_correction_bias",
    "lfm2_moe": "routed_experts",
    "granitemoehybrid": "block_sparse_moe.experts",
    "granite_speech": "lm_head",
    "qwen2_audio": "lm_head",
    "audioflamingo3": "lm_head",
}
"""Whose names in the memory of transformers 5 vLLM cannot load, and what its error names: the control."""
