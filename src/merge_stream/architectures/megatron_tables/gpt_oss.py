"""gpt-oss: sinks, biases everywhere, experts in one tensor with gate and up row by row in turn, hidden size first.

Facts: Megatron-Bridge 0.6.2; `core_attention.softmax_offset` of megatron-core are the sinks.
"""

from __future__ import annotations

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.megatron_rules import InterleavedExperts
from merge_stream.architectures.megatron_tables.base import (
    LAYER,
    MegatronFamily,
    MegatronTable,
    Rules,
    attention,
    ends,
    norms,
)
from merge_stream.architectures.rules import Rename, Transpose

__all__ = ["MEMBER"]


def _rules(model: ModelInfo) -> Rules:
    here, there = f"{LAYER.here}.mlp.experts", f"{LAYER.there}.mlp.experts"
    return (
        *attention(model),
        Rename(f"{LAYER.here}.self_attention.core_attention.softmax_offset", f"{LAYER.there}.self_attn.sinks"),
        Rename(f"{LAYER.here}.mlp.router.{{leaf:weight|bias}}", f"{LAYER.there}.mlp.router.{{leaf}}"),
        InterleavedExperts(f"{here}.linear_fc1.weight", f"{there}.gate_up_proj"),
        InterleavedExperts(f"{here}.linear_fc1.bias", f"{there}.gate_up_proj_bias"),
        Transpose(f"{here}.linear_fc2.weight", f"{there}.down_proj", (0, 2, 1)),
        Rename(f"{here}.linear_fc2.bias", f"{there}.down_proj_bias"),
        *norms(),
        *ends(),
    )


MEMBER = MegatronTable("gpt_oss", (MegatronFamily("gpt_oss", frozenset({"gpt_oss"}), _rules),))
