"""Granite-MoE: experts stay fused, under other names."""

from __future__ import annotations

from merge_stream.architectures.rules import Rename
from merge_stream.architectures.tables.base import TEXT_NAMES, Family, Table, words

__all__ = ["MEMBER"]

_MOE = "{at}.block_sparse_moe."

MEMBER = Table(
    "granite-moe",
    (
        Family(
            "granite-moe",
            words("granitemoe granitemoehybrid granitemoeshared"),
            (
                Rename(_MOE + "experts.gate_up_proj", _MOE + "input_linear.weight"),
                Rename(_MOE + "experts.down_proj", _MOE + "output_linear.weight"),
                Rename(_MOE + "router.weight", _MOE + "router.layer.weight"),
            ),
            TEXT_NAMES,
        ),
    ),
)
