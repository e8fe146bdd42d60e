"""MiMo: Qwen2 with layers of multi-token prediction of its own names.

Megatron joins embedding and hidden state in that order, MiMo's modeling code the other way round, so the column
halves of `eh_proj` change places (Megatron-Bridge 0.6.2 does the same; mbridge 0.15.1 does not).
"""

from __future__ import annotations

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.megatron_rules import SwappedColumns
from merge_stream.architectures.megatron_tables.base import (
    MegatronFamily,
    MegatronTable,
    Place,
    Rules,
    attention,
    gated_mlp,
    norms,
)
from merge_stream.architectures.megatron_tables.llama import dense
from merge_stream.architectures.rules import Rename

__all__ = ["MEMBER"]

_NORMS = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "final_layernorm": "final_layernorm"}


def _rules(model: ModelInfo) -> Rules:
    there = "model.mtp_layers.{i}"
    place = Place("mtp.layers.{i}.transformer_layer", there)
    return (
        SwappedColumns("mtp.layers.{i}.eh_proj.weight", f"{there}.input_proj.weight"),
        *(Rename(f"mtp.layers.{{i}}.{old}.weight", f"{there}.{new}.weight") for old, new in _NORMS.items()),
        *attention(model, place),
        *gated_mlp(place),
        *norms(place),
        *dense(model),
    )


MEMBER = MegatronTable("mimo", (MegatronFamily("mimo", frozenset({"mimo"}), _rules),))
