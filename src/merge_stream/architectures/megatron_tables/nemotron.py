"""Nemotron (3, 4): LayerNorm with bias, an MLP without gate (squared ReLU).

Its norms mean w as 1 + w on both sides. Facts: Megatron-Bridge 0.6.2.
"""

from __future__ import annotations

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.megatron_tables.base import (
    MegatronFamily,
    MegatronTable,
    Rules,
    attention,
    ends,
    norms,
    plain_mlp,
)

__all__ = ["MEMBER"]


def _rules(model: ModelInfo) -> Rules:
    return (
        *attention(model),
        *plain_mlp("up_proj", "down_proj"),
        *norms(),
        *ends(),
    )


MEMBER = MegatronTable(
    "nemotron", (MegatronFamily("nemotron", frozenset({"nemotron"}), _rules, centred=".+", gated=False),)
)
