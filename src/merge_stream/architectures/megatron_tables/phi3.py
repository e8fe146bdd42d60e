"""Phi-3 and Phi-4: query, key and value one below the other in one tensor, gate and up too."""

from __future__ import annotations

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.megatron_qkv import QkvConcat, heads_of
from merge_stream.architectures.megatron_tables.base import LAYER, MegatronFamily, MegatronTable, Rules, ends, norms
from merge_stream.architectures.rules import Rename

__all__ = ["MEMBER"]


def _rules(model: ModelInfo) -> Rules:
    qkv = f"{LAYER.here}.self_attention.linear_qkv.{{leaf}}"
    return (
        QkvConcat(qkv, f"{LAYER.there}.self_attn.qkv_proj.{{leaf}}", heads_of(model)),
        Rename(f"{LAYER.here}.self_attention.linear_proj.{{leaf}}", f"{LAYER.there}.self_attn.o_proj.{{leaf}}"),
        Rename(f"{LAYER.here}.mlp.linear_fc1.{{leaf}}", f"{LAYER.there}.mlp.gate_up_proj.{{leaf}}"),
        Rename(f"{LAYER.here}.mlp.linear_fc2.{{leaf}}", f"{LAYER.there}.mlp.down_proj.{{leaf}}"),
        *norms(),
        *ends(),
    )


MEMBER = MegatronTable("phi3", (MegatronFamily("phi3", frozenset({"phi3"}), _rules, proof=False),))
