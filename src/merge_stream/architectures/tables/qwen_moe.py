"""Experts as Qwen2-MoE has them: one gate_proj, up_proj and down_proj for each expert, all other names unchanged.

transformers 5 fuses them to `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`; 4.57
and custom code have the names of the repository. Read from `conversion_mapping.py` of
5.24.0 (the entries that point to "qwen2_moe").
"""

from __future__ import annotations

from merge_stream.architectures.rules import Rename, SplitExperts
from merge_stream.architectures.tables.base import EXPERTS_OF_QWEN, TEXT_NAMES, Family, Table, words

__all__ = ["MEMBER"]

MEMBER = Table(
    "qwen-moe",
    (
        Family(
            "qwen-moe",
            words("""
            afmoe cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 dots1 flex_olmo glm4_moe glm4_moe_lite
            glm_moe_dsa hunyuan_v1_moe longcat_flash mellum olmoe qwen2_moe qwen3_moe qwen3_next qwen3_omni_moe_text
            sarvam_mla solar_open
            """),
            (SplitExperts("{at}.mlp.experts", *EXPERTS_OF_QWEN),),
            TEXT_NAMES,
        ),
        Family(
            "ernie4.5-moe",
            words("ernie4_5_moe"),
            (
                SplitExperts("{at}.mlp.experts", *EXPERTS_OF_QWEN),
                Rename("{at}.mlp.gate.moe_statics.{rest}", "{at}.mlp.moe_statics.{rest}"),
            ),
            TEXT_NAMES,
        ),
        Family(
            "exaone-moe",
            words("exaone_moe"),
            (
                SplitExperts("{at}.mlp.experts", *EXPERTS_OF_QWEN),
                Rename("{at}.mlp.gate.e_score_correction_bias", "{at}.mlp.e_score_correction_bias"),
            ),
            TEXT_NAMES,
        ),
        Family(
            "glm4v-moe",
            words("glm4v_moe"),
            (SplitExperts("{at}.mlp.experts", *EXPERTS_OF_QWEN),),
            ("model.language_model.{rest}", "model.visual.{rest}"),
        ),
    ),
)
