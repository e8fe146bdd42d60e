"""Dense decoders with the names of Llama: Llama 1 to 3, Mistral, Qwen2, Qwen2.5, Qwen3, Seed-OSS."""

from __future__ import annotations

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.megatron_tables.base import (
    MegatronFamily,
    MegatronTable,
    Rules,
    attention,
    ends,
    gated_mlp,
    norms,
)
from merge_stream.architectures.tables.base import words

__all__ = ["MEMBER", "dense"]


def dense(model: ModelInfo) -> Rules:
    """All rules of a dense decoder."""
    return (*attention(model), *gated_mlp(), *norms(), *ends())


MEMBER = MegatronTable(
    "llama",
    (
        MegatronFamily("llama", words("llama mistral qwen2 qwen3"), dense),
        MegatronFamily("seed_oss", words("seed_oss"), dense, proof=False),
    ),
)
