"""Gemma 1 to 3, text models: norms behind attention and MLP too (2 and 3), norms of heads (3); tied embeddings.

The zero-centred norms are stored alike on both sides (w with 1 + w meant).
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
    gated_mlp,
)
from merge_stream.architectures.megatron_tables.llama import dense
from merge_stream.architectures.rules import Rename
from merge_stream.architectures.tables.base import words

__all__ = ["MEMBER"]

_NORMS = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_proj.post_layernorm": "post_attention_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "mlp.linear_fc2.post_layernorm": "post_feedforward_layernorm",
}


def _sandwich(model: ModelInfo) -> Rules:
    norms = (Rename(f"{LAYER.here}.{old}.weight", f"{LAYER.there}.{new}.weight") for old, new in _NORMS.items())
    return (*attention(model), *gated_mlp(), *norms, *ends())


MEMBER = MegatronTable(
    "gemma",
    (
        MegatronFamily("gemma", words("gemma"), dense, centred=".+"),
        MegatronFamily("gemma 2 and 3", words("gemma2 gemma3_text"), _sandwich, centred=".+"),
    ),
)
