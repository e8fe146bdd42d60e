"""StarCoder2: LayerNorm with bias, biases in all linear layers (`use_bias`), groups of heads, an MLP without gate.

Facts: names and shapes of transformers 4.57.6 (Starcoder2ForCausalLM); NeMo's importer (NVIDIA/NeMo 7894f2c,
`llm/gpt/model/starcoder2.py`) gives Megatron the same names. It ties nothing: where Megatron kept a head of its own,
that is `lm_head`, whatever the config says.
"""

from __future__ import annotations

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.megatron_tables.base import (
    MegatronFamily,
    MegatronTable,
    Rules,
    attention,
    ends,
    norms,
    plain_mlp,
)

__all__ = ["MEMBER"]


def _rules(model: ModelInfo) -> Rules:
    return (*attention(model), *plain_mlp("c_fc", "c_proj"), *norms(), *ends())


MEMBER = MegatronTable(
    "starcoder2", (MegatronFamily("starcoder2", frozenset({"starcoder2"}), _rules, gated=False, proof=False),)
)
