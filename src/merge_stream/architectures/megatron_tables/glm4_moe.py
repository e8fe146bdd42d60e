"""GLM-4.5: query-key-value with bias, norms of heads in some sizes, the experts of DeepSeek, MTP layers."""

from __future__ import annotations

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.megatron_tables.base import LAYER, MegatronFamily, MegatronTable, Rules, attention, ends
from merge_stream.architectures.megatron_tables.deepseek import mtp, sparse_layer

__all__ = ["MEMBER"]


def _rules(model: ModelInfo) -> Rules:
    place, around = mtp(model)
    return (
        *around,
        *attention(model),
        *sparse_layer(LAYER),
        *attention(model, place),
        *sparse_layer(place),
        *ends(),
    )


MEMBER = MegatronTable("glm4_moe", (MegatronFamily("glm4_moe", frozenset({"glm4_moe"}), _rules),))
