"""Mixtures of experts with the names of Qwen: Qwen2-MoE (a gated shared expert), Qwen3-MoE, OLMoE."""

from __future__ import annotations

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.megatron_tables.base import (
    LAYER,
    MegatronFamily,
    MegatronTable,
    Place,
    Rules,
    attention,
    ends,
    experts,
    gated_mlp,
    norms,
)
from merge_stream.architectures.rules import Rename
from merge_stream.architectures.tables.base import words

__all__ = ["MEMBER", "sparse_layer"]


def sparse_layer(place: Place) -> Rules:
    """Norms, router, experts, the shared expert with its gate, and the dense MLP of layers in `mlp_only_layers`."""
    return (
        *experts(place),
        *gated_mlp(place, here="mlp.shared_experts", there="mlp.shared_expert"),
        Rename(f"{place.here}.mlp.shared_experts.gate_weight", f"{place.there}.mlp.shared_expert_gate.weight"),
        *gated_mlp(place),
        *norms(place),
    )


def _rules(model: ModelInfo) -> Rules:
    return (
        *attention(model, norms_over_all=model.model_type == "olmoe"),
        *sparse_layer(LAYER),
        *ends(),
    )


MEMBER = MegatronTable("qwen_moe", (MegatronFamily("qwen_moe", words("qwen2_moe qwen3_moe olmoe"), _rules),))
