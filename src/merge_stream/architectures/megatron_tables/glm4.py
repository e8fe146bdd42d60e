"""GLM-4 (0414): norms behind attention and MLP too, gate and up in one tensor, rotary pairs of neighbours.

The names of the two further norms are those of trainers that have GLM-4 (slime's plugins for mbridge); Megatron itself
lacks them.
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
    norms,
)
from merge_stream.architectures.rules import Rename

__all__ = ["MEMBER"]


def _rules(model: ModelInfo) -> Rules:
    further = ("post_self_attn_layernorm", "post_mlp_layernorm")
    return (
        *attention(model),
        Rename(f"{LAYER.here}.mlp.linear_fc1.weight", f"{LAYER.there}.mlp.gate_up_proj.weight"),
        Rename(f"{LAYER.here}.mlp.linear_fc2.weight", f"{LAYER.there}.mlp.down_proj.weight"),
        *(Rename(f"{LAYER.here}.{name}.weight", f"{LAYER.there}.{name}.weight") for name in further),
        *norms(),
        *ends(),
    )


MEMBER = MegatronTable("glm4", (MegatronFamily("glm4", frozenset({"glm4"}), _rules, neighbours=True, proof=False),))
