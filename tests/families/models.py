"""Tiny random models of each family, built with whichever transformers is on the path.

`MODELS` maps a golden's name to (class, config class, settings). Settings of nested configs
are dictionaries; what only one version understands is ignored by the other.
"""

from __future__ import annotations

from typing import Any

MOE = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {**TEXT, **MOE, "moe_intermediate_size": 24, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 40}
MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_hidden_layers": 2,
}
CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "projection_dim": 16,
}
SIGLIP = {**CLIP, "model_type": "siglip_vision_model"}
MROPE = {"rope_type": "default", "type": "default", "mrope_section": [1, 1, 2]}
ROPED = {
    "rope_scaling": MROPE,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
}
QWEN2 = {**TEXT, "model_type": "qwen2"}
LLAMA = {**TEXT, "model_type": "llama"}
QWEN_VISION = {
    "depth": 2,
    "embed_dim": 16,
    "hidden_size": 32,
    "out_hidden_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "intermediate_size": 24,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [1],
    "mlp_ratio": 2,
}
SPECIAL = {"image_token_id": 100, "video_token_id": 101, "vision_start_token_id": 102, "vision_end_token_id": 103}
LLAVA = {"image_token_id": 100, "image_token_index": 100, "tie_word_embeddings": False, "pad_token_id": 0}
WHISPER = {
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "num_mel_bins": 8,
    "max_source_positions": 8,
    "output_dim": 32,
    "n_window": 4,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "downsample_hidden_size": 8,
}
CAUSAL = "ForCausalLM"

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**EXPERTS}),
    "minimax": (
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        {**EXPERTS, "layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    ),
    "minimax_m2": ("MiniMaxM2ForCausalLM", "MiniMaxM2Config", {**EXPERTS, "rotary_dim": 4}),
    "phimoe": ("PhimoeForCausalLM", "PhimoeConfig", {**EXPERTS}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {**EXPERTS}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**EXPERTS, "mlp_only_layers": [1]}),
    "qwen3_moe_value": ("Qwen3MoeForTokenClassification", "Qwen3MoeConfig", {**EXPERTS, "num_labels": 1}),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **EXPERTS,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", {**EXPERTS, **MLA}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**EXPERTS, **MLA}),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        {**EXPERTS, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    ),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {**EXPERTS}),
    "flex_olmo": ("FlexOlmoForCausalLM", "FlexOlmoConfig", {**EXPERTS}),
    "dots1": (
        "Dots1ForCausalLM",
        "Dots1Config",
        {**EXPERTS, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        {**EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1, "moe_num_shared_experts": 1},
    ),
    "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Config", {**EXPERTS, "moe_topk": 2}),
    "longcat_flash": (
        "LongcatFlashForCausalLM",
        "LongcatFlashConfig",
        {
            **EXPERTS,
            **MLA,
            "num_layers": 1,
            "num_hidden_layers": 2,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 24,
            "moe_topk": 2,
            "zero_expert_num": 2,
        },
    ),
    "deepseek_v32": ("DeepseekV32ForCausalLM", "DeepseekV32Config", {**EXPERTS, **MLA, "index_topk": 4}),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", {**EXPERTS, **MLA, "index_topk": 4}),
    "mellum": ("MellumForCausalLM", "MellumConfig", {**EXPERTS, "layer_types": ["full_attention"] * 2}),
    "sarvam_mla": ("DeepseekV3ForCausalLM", "SarvamMLAConfig", {**EXPERTS, **MLA}),
    "idefics3": (
        "Idefics3ForConditionalGeneration",
        "Idefics3Config",
        {"text_config": LLAMA, "vision_config": {**SIGLIP, "model_type": "idefics3_vision"}, **LLAVA},
    ),
    "idefics2": (
        "Idefics2ForConditionalGeneration",
        "Idefics2Config",
        {
            "text_config": {**TEXT, "model_type": "mistral"},
            "vision_config": {**SIGLIP, "model_type": "idefics2_vision"},
            "perceiver_config": {
                "resampler_n_latents": 2,
                "resampler_depth": 1,
                "num_key_value_heads": 2,
                "resampler_n_heads": 2,
            },
            **LLAVA,
        },
    ),
    "smolvlm": (
        "SmolVLMForConditionalGeneration",
        "SmolVLMConfig",
        {"text_config": LLAMA, "vision_config": {**SIGLIP, "model_type": "smolvlm_vision"}, **LLAVA},
    ),
    "granite_speech": (
        "GraniteSpeechForConditionalGeneration",
        "GraniteSpeechConfig",
        {
            "text_config": {**TEXT, "model_type": "granite"},
            "encoder_config": {"num_layers": 1, "hidden_dim": 16, "input_dim": 8, "num_heads": 2, "dim_head": 8},
            "projector_config": {
                "model_type": "blip_2_qformer",
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 24,
                "encoder_hidden_size": 16,
            },
            "has_lora_adapter": False,
        },
    ),
    "emu3": (
        "Emu3ForConditionalGeneration",
        "Emu3Config",
        {
            "text_config": {**TEXT, "model_type": "emu3_text_model"},
            "vq_config": {
                "codebook_size": 8,
                "embed_dim": 4,
                "latent_channels": 4,
                "base_channels": 32,
                "channel_multiplier": [1],
                "num_res_blocks": 1,
                "attn_resolutions": [2],
                "hidden_size": 32,
                "num_attention_heads": 1,
            },
            "vocabulary_map": {"<image>": 100},
            "tie_word_embeddings": False,
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", {**EXPERTS, **MLA}),
    "afmoe": ("AfmoeForCausalLM", "AfmoeConfig", {**EXPERTS, "num_dense_layers": 1, "num_shared_experts": 1}),
    "exaone_moe": (
        "ExaoneMoeForCausalLM",
        "ExaoneMoeConfig",
        {**EXPERTS, "first_k_dense_replace": 1, "num_shared_experts": 1, "layer_types": ["full_attention"] * 2},
    ),
    "solar_open": ("SolarOpenForCausalLM", "SolarOpenConfig", {**EXPERTS, "n_shared_experts": 1, "n_group": 1}),
    "cohere2_moe": ("Cohere2MoeForCausalLM", "Cohere2MoeConfig", {**EXPERTS}),
    "jamba": (
        "JambaForCausalLM",
        "JambaConfig",
        {
            **EXPERTS,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "use_mamba_kernels": False,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
    ),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **EXPERTS,
            "hybrid_override_pattern": "ME",
            "layers_block_type": ["mamba", "moe"],
            "layer_types": ["mamba", "moe"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "ssm_state_size": 4,
            "moe_shared_expert_intermediate_size": 24,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "granitemoe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", {**EXPERTS}),
    "granitemoeshared": (
        "GraniteMoeSharedForCausalLM",
        "GraniteMoeSharedConfig",
        {**EXPERTS, "shared_intermediate_size": 24},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            **EXPERTS,
            "shared_intermediate_size": 24,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 4,
        },
    ),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**EXPERTS}),
    "llama4_text": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**EXPERTS, "intermediate_size_mlp": 40, "interleave_moe_layer_step": 1},
    ),
    "llama4": (
        "Llama4ForConditionalGeneration",
        "Llama4Config",
        {
            "text_config": {**EXPERTS, "intermediate_size_mlp": 40, "model_type": "llama4_text"},
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 8,
                "patch_size": 4,
                "vision_output_dim": 16,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
            },
        },
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**TEXT}),
    "gpt_neox_value": ("GPTNeoXForTokenClassification", "GPTNeoXConfig", {**TEXT, "num_labels": 1}),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {
            "text_config": {**TEXT, **ROPED, "model_type": "qwen2_vl_text"},
            "vision_config": {**QWEN_VISION},
            "tie_word_embeddings": False,
            **SPECIAL,
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        {
            "text_config": {**TEXT, **ROPED, "model_type": "qwen2_5_vl_text"},
            "vision_config": {**QWEN_VISION, "window_size": 16},
            "tie_word_embeddings": False,
            **SPECIAL,
        },
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        {
            "text_config": {**TEXT, **ROPED, "model_type": "qwen3_vl_text"},
            "vision_config": {**QWEN_VISION},
            "tie_word_embeddings": False,
            **SPECIAL,
        },
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3VLMoeConfig",
        {
            "text_config": {**EXPERTS, **ROPED, "model_type": "qwen3_vl_moe_text"},
            "vision_config": {**QWEN_VISION},
            "tie_word_embeddings": False,
            **SPECIAL,
        },
    ),
    "glm4v": (
        "Glm4vForConditionalGeneration",
        "Glm4vConfig",
        {
            "text_config": {**TEXT, **ROPED, "model_type": "glm4v_text", "partial_rotary_factor": 1.0},
            "vision_config": {**QWEN_VISION, "image_size": 16},
            "tie_word_embeddings": False,
            **SPECIAL,
        },
    ),
    "glm4v_moe": (
        "Glm4vMoeForConditionalGeneration",
        "Glm4vMoeConfig",
        {
            "text_config": {
                **EXPERTS,
                **ROPED,
                "model_type": "glm4v_moe_text",
                "n_group": 1,
                "topk_group": 1,
                "n_shared_experts": 1,
                "partial_rotary_factor": 1.0,
            },
            "vision_config": {**QWEN_VISION, "image_size": 16},
            "tie_word_embeddings": False,
            **SPECIAL,
        },
    ),
    "qwen2_5_omni_thinker": (
        "Qwen2_5OmniThinkerForConditionalGeneration",
        "Qwen2_5OmniThinkerConfig",
        {
            "text_config": {**TEXT, **ROPED, "model_type": "qwen2_5_omni_text"},
            "vision_config": {**QWEN_VISION, "window_size": 16},
            "audio_config": {**WHISPER},
            "audio_token_index": 104,
            "image_token_index": 100,
            "video_token_index": 101,
        },
    ),
    "qwen3_omni_moe_thinker": (
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        "Qwen3OmniMoeThinkerConfig",
        {
            "text_config": {**EXPERTS, **ROPED, "model_type": "qwen3_omni_moe_text"},
            "vision_config": {**QWEN_VISION},
            "audio_config": {**WHISPER},
            "audio_token_id": 104,
            "image_token_id": 100,
            "video_token_id": 101,
        },
    ),
    "llava_clip": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {"text_config": LLAMA, "vision_config": CLIP, **LLAVA},
    ),
    "llava_siglip": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {"text_config": LLAMA, "vision_config": SIGLIP, **LLAVA},
    ),
    "llava_pixtral": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": LLAMA,
            "vision_config": {**CLIP, "model_type": "pixtral", "head_dim": 8},
            **LLAVA,
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": -1,
        },
    ),
    "llava_next": (
        "LlavaNextForConditionalGeneration",
        "LlavaNextConfig",
        {"text_config": LLAMA, "vision_config": CLIP, **LLAVA},
    ),
    "llava_next_video": (
        "LlavaNextVideoForConditionalGeneration",
        "LlavaNextVideoConfig",
        {"text_config": LLAMA, "vision_config": CLIP, **LLAVA, "video_token_index": 101},
    ),
    "llava_onevision": (
        "LlavaOnevisionForConditionalGeneration",
        "LlavaOnevisionConfig",
        {"text_config": QWEN2, "vision_config": SIGLIP, **LLAVA, "video_token_index": 101},
    ),
    "vipllava": (
        "VipLlavaForConditionalGeneration",
        "VipLlavaConfig",
        {"text_config": LLAMA, "vision_config": CLIP, **LLAVA, "vision_feature_layers": [-1, -2]},
    ),
    "video_llava": (
        "VideoLlavaForConditionalGeneration",
        "VideoLlavaConfig",
        {"text_config": LLAMA, "vision_config": CLIP, **LLAVA, "video_token_index": 101},
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {
            "text_config": {**TEXT, "model_type": "gemma3_text", "query_pre_attn_scalar": 8},
            "vision_config": SIGLIP,
            **LLAVA,
            "mm_tokens_per_image": 1,
        },
    ),
    "gemma3_value": (
        "Gemma3ForSequenceClassification",
        "Gemma3Config",
        {
            "text_config": {**TEXT, "model_type": "gemma3_text", "query_pre_attn_scalar": 8},
            "vision_config": SIGLIP,
            **LLAVA,
            "mm_tokens_per_image": 1,
            "num_labels": 2,
        },
    ),
    "paligemma": (
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        {
            "text_config": {**TEXT, "model_type": "gemma"},
            "vision_config": {**SIGLIP, "projection_dim": 32},
            **LLAVA,
            "projection_dim": 32,
        },
    ),
    "internvl": (
        "InternVLForConditionalGeneration",
        "InternVLConfig",
        {
            "text_config": QWEN2,
            "vision_config": {**CLIP, "model_type": "internvl_vision", "image_size": [8, 8], "patch_size": [4, 4]},
            **LLAVA,
        },
    ),
    "internvl_moe": (
        "InternVLForConditionalGeneration",
        "InternVLConfig",
        {
            "text_config": {**EXPERTS, "model_type": "qwen3_moe"},
            "vision_config": {**CLIP, "model_type": "internvl_vision", "image_size": [8, 8], "patch_size": [4, 4]},
            **LLAVA,
        },
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        {
            "text_config": {**TEXT, "model_type": "mistral"},
            "vision_config": {**CLIP, "model_type": "pixtral", "head_dim": 8},
            **LLAVA,
        },
    ),
    "aya_vision": (
        "AyaVisionForConditionalGeneration",
        "AyaVisionConfig",
        {"text_config": {**TEXT, "model_type": "cohere2"}, "vision_config": SIGLIP, **LLAVA},
    ),
    "got_ocr2": (
        "GotOcr2ForConditionalGeneration",
        "GotOcr2Config",
        {
            "text_config": QWEN2,
            "vision_config": {
                "hidden_size": 16,
                "output_channels": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 4,
                "window_size": 2,
                "mlp_dim": 24,
                "global_attn_indexes": [0],
            },
            **LLAVA,
        },
    ),
    "fuyu": ("FuyuForCausalLM", "FuyuConfig", {**TEXT, "text_config": {**TEXT, "model_type": "persimmon"}}),
    "mllama": (
        "MllamaForConditionalGeneration",
        "MllamaConfig",
        {
            "text_config": {
                **TEXT,
                "model_type": "mllama_text_model",
                "rope_scaling": {"rope_type": "default"},
                "cross_attention_layers": [1],
            },
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "attention_heads": 2,
                "image_size": 8,
                "patch_size": 4,
                "num_channels": 3,
                "vision_output_dim": 32,
                "intermediate_layers_indices": [0],
                "supported_aspect_ratios": [[1, 1]],
                "max_num_tiles": 1,
            },
        },
    ),
    "aria": (
        "AriaForConditionalGeneration",
        "AriaConfig",
        {
            "text_config": {**TEXT, "model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2},
            "vision_config": {**SIGLIP, "model_type": "idefics3_vision"},
            "projector_patch_to_query_dict": {4: 2},
            **LLAVA,
        },
    ),
    "cohere2_vision": (
        "Cohere2VisionForConditionalGeneration",
        "Cohere2VisionConfig",
        {"text_config": {**TEXT, "model_type": "cohere2"}, "vision_config": SIGLIP, **LLAVA},
    ),
    "lfm2_vl": (
        "Lfm2VlForConditionalGeneration",
        "Lfm2VlConfig",
        {
            "text_config": {**TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
            "vision_config": {**SIGLIP, "model_type": "siglip2_vision_model", "num_patches": 4},
            **LLAVA,
        },
    ),
    "qwen2_audio": (
        "Qwen2AudioForConditionalGeneration",
        "Qwen2AudioConfig",
        {"text_config": QWEN2, "audio_config": {**WHISPER, "model_type": "qwen2_audio_encoder"}},
    ),
    "voxtral": (
        "VoxtralForConditionalGeneration",
        "VoxtralConfig",
        {"text_config": LLAMA, "audio_config": {**WHISPER, "model_type": "voxtral_encoder"}},
    ),
    "audioflamingo3": (
        "AudioFlamingo3ForConditionalGeneration",
        "AudioFlamingo3Config",
        {"text_config": QWEN2, "audio_config": {**WHISPER, "model_type": "audioflamingo3_encoder"}},
    ),
}


def build(name: str) -> Any:
    """The tiny model of that name; AttributeError when this transformers does not know the class."""
    import torch
    import transformers

    model_class, config_class, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**settings)
    return getattr(transformers, model_class)(config).eval()
