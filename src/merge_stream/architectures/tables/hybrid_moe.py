"""Mixtures of experts inside hybrid models: Jamba, LFM2-MoE, Nemotron-H."""

from __future__ import annotations

from merge_stream.architectures.rules import Rename, SplitExperts, Unstack
from merge_stream.architectures.tables.base import TEXT_NAMES, Family, Table, words

__all__ = ["MEMBER"]

_AT = "{at}.feed_forward.experts"
_EXPERT = _AT + ".{e}."

MEMBER = Table(
    "hybrid-moe",
    (
        Family(
            "jamba",
            words("jamba"),
            (
                SplitExperts(
                    _AT, _EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight", _EXPERT + "down_proj.weight"
                ),
            ),
            (*TEXT_NAMES, "model.final_layernorm.{rest}"),
        ),
        Family(
            "lfm2-moe",
            words("lfm2_moe"),
            (SplitExperts(_AT, _EXPERT + "w1.weight", _EXPERT + "w3.weight", _EXPERT + "w2.weight"),),
            (*TEXT_NAMES, "model.embedding_norm.{rest}", "model.pos_emb.{rest}"),
        ),
        Family(
            "nemotron-h",
            words("nemotron_h"),
            (
                Unstack("{at}.mixer.experts.up_proj", "{at}.mixer.experts.{e}.up_proj.weight"),
                Unstack("{at}.mixer.experts.down_proj", "{at}.mixer.experts.{e}.down_proj.weight"),
                Rename("model.{rest}", "backbone.{rest}"),
            ),
            ("backbone.{rest}", "mtp.{rest}"),
        ),
    ),
)
