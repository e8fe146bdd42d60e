"""Mixtral and MiniMax-M2: `block_sparse_moe`, experts w1 (gate), w3 (up), w2 (down)."""

from __future__ import annotations

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.megatron_tables.base import (
    MegatronFamily,
    MegatronTable,
    Rules,
    attention,
    ends,
    experts,
    norms,
)

__all__ = ["MEMBER"]


def _rules(model: ModelInfo) -> Rules:
    sparse = experts(block="block_sparse_moe", names=("w1", "w3", "w2"), bias="e_score_correction_bias")
    return (*attention(model, norms_over_all=True), *sparse, *norms(), *ends())


MEMBER = MegatronTable("mixtral", (MegatronFamily("mixtral", frozenset({"mixtral", "minimax_m2"}), _rules),))
