"""Mixtures of experts with the names of Qwen: Qwen2-MoE (a gated shared expert), Qwen3-MoE, OLMoE."""

from __future__ import annotations

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.megatron_tables.base import (
    LAYER,
    MegatronFamily,
    MegatronTable,
    Rules,
    attention,
    ends,
    experts,
    gated_mlp,
    norms,
)
from merge_stream.architectures.rules import Rename
from merge_stream.architectures.tables.base import words

__all__ = ["MEMBER"]


def _rules(model: ModelInfo) -> Rules:
    return (
        *attention(model),
        *experts(),
        *gated_mlp(here="mlp.shared_experts", there="mlp.shared_expert"),
        Rename(f"{LAYER.here}.mlp.shared_experts.gate_weight", f"{LAYER.there}.mlp.shared_expert_gate.weight"),
        *gated_mlp(),  # layers of `mlp_only_layers`
        *norms(),
        *ends(),
    )


MEMBER = MegatronTable("qwen_moe", (MegatronFamily("qwen_moe", words("qwen2_moe qwen3_moe olmoe"), _rules),))
