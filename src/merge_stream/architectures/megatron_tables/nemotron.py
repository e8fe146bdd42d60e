"""Nemotron (3, 4): LayerNorm with bias, an MLP without gate (squared ReLU).

Its norms mean w as 1 + w on both sides. Facts: Megatron-Bridge 0.6.2.
"""

from __future__ import annotations

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.megatron_tables.base import (
    LAYER,
    MegatronFamily,
    MegatronTable,
    Rules,
    attention,
    ends,
    norms,
)
from merge_stream.architectures.rules import Rename

__all__ = ["MEMBER"]


def _rules(model: ModelInfo) -> Rules:
    return (
        *attention(model),
        Rename(f"{LAYER.here}.mlp.linear_fc1.{{leaf:weight|bias}}", f"{LAYER.there}.mlp.up_proj.{{leaf}}"),
        Rename(f"{LAYER.here}.mlp.linear_fc2.{{leaf:weight|bias}}", f"{LAYER.there}.mlp.down_proj.{{leaf}}"),
        *norms(),
        *ends(),
    )


MEMBER = MegatronTable(
    "nemotron", (MegatronFamily("nemotron", frozenset({"nemotron"}), _rules, centred=".+", gated=False),)
)
