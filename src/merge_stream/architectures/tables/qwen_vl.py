"""Vision models of Qwen.

Qwen2-VL, Qwen2.5-VL      model.language_model.X -> model.X, model.visual.X -> visual.X  (4.52 to 5.24 alike)
Qwen3-VL                  the repository has the names of the memory
Qwen3-VL-MoE              the same names; the repository keeps experts fused with the hidden size first, 4.57
                          holds them so, 5.x the other way round (and its save_pretrained writes them so: neither
                          4.57 nor vLLM 0.33 nor SGLang 0.5.23 read that)
Qwen2.5-Omni, Qwen3-Omni  thinker.model, thinker.visual, thinker.audio_tower
"""

from __future__ import annotations

from merge_stream.architectures.rules import HiddenFirstExperts, Rename, SplitExperts
from merge_stream.architectures.tables.base import EXPERTS_OF_QWEN, Family, Table, words

__all__ = ["MEMBER"]

_NESTED = ("model.language_model.{rest}", "model.visual.{rest}")
_UP = (
    Rename("model.{t:visual|audio_tower}.{rest}", "{t}.{rest}"),
    Rename("model.language_model.{rest}", "model.{rest}"),
)
_THINKER = (
    "thinker.{m:model|visual|audio_tower|lm_head}.{rest}",
    "talker.{rest}",
    "token2wav.{rest}",
    "code2wav.{rest}",
)

MEMBER = Table(
    "qwen-vl",
    (
        Family(
            "qwen2-vl",
            words("qwen2_vl qwen2_5_vl"),
            _UP,
            ("visual.{rest}", "model.{m:layers|embed_tokens|norm}.{rest}"),
        ),
        Family("qwen3-vl", words("qwen3_vl"), (), _NESTED),
        Family("qwen3-vl-moe", words("qwen3_vl_moe"), (HiddenFirstExperts("{at}.mlp.experts"),), _NESTED),
        Family(
            "qwen-omni",
            words("qwen2_5_omni qwen2_5_omni_thinker qwen3_omni_moe qwen3_omni_moe_thinker"),
            (
                SplitExperts("{at}.mlp.experts", *EXPERTS_OF_QWEN),
                Rename("{t:thinker\\.}model.{m:visual|audio_tower}.{rest}", "{t}{m}.{rest}"),
                Rename("{t:thinker\\.}model.language_model.{rest}", "{t}model.{rest}"),
                *_UP,
                Rename("{m:model|visual|audio_tower|lm_head}.{rest}", "thinker.{m}.{rest}"),
            ),
            _THINKER,
        ),
    ),
)
