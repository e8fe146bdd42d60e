"""DeepSeek-V2, V3 and what has their names: Kimi-K2, Moonlight; latent attention, shared experts, MTP layers.

Facts (real files of megatron-core 0.16 and 0.19): all of MLA is direct, without a permutation. An MTP layer k is
layer L + k of the repository, which has copies of embedding and head there.
"""

from __future__ import annotations

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.megatron_rules import Copies
from merge_stream.architectures.megatron_tables.base import (
    LAYER,
    MegatronFamily,
    MegatronTable,
    Place,
    Rules,
    ends,
    experts,
    gated_mlp,
    norms,
)
from merge_stream.architectures.rules import Rename
from merge_stream.architectures.structure import text_value
from merge_stream.architectures.tables.base import words

__all__ = ["MEMBER", "mtp", "sparse_layer"]

_LATENT = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
    "q_layernorm": "q_a_layernorm",
    "kv_layernorm": "kv_a_layernorm",
}


def _latent_attention(place: Place) -> Rules:
    return tuple(
        Rename(f"{place.here}.self_attention.{here}.{{leaf:weight|bias}}", f"{place.there}.self_attn.{there}.{{leaf}}")
        for here, there in _LATENT.items()
    )


def sparse_layer(place: Place) -> Rules:
    """Norms, router, experts, shared experts, and the dense MLP of the first layers."""
    return (
        *experts(place),
        *gated_mlp(place, here="mlp.shared_experts", there="mlp.shared_experts"),
        *gated_mlp(place),
        *norms(place),
    )


def mtp(model: ModelInfo) -> tuple[Place, Rules]:
    """Where MTP layers go, and the rules for what stands around them."""
    layers = text_value(model.config, "num_hidden_layers") or 0
    there = f"model.layers.{{i+{layers}}}"
    around = {
        "enorm": "enorm",
        "hnorm": "hnorm",
        "eh_proj": "eh_proj",
        "final_layernorm": "shared_head.norm",
    }
    rules = tuple(
        Rename(f"mtp.layers.{{i}}.{old}.{{leaf:weight|bias}}", f"{there}.{new}.{{leaf}}") for old, new in around.items()
    )
    copies = Copies(
        "mtp.layers.{i}.enorm.weight",
        {
            "embedding.word_embeddings.weight": f"{there}.embed_tokens.weight",
            "output_layer.weight": f"{there}.shared_head.head.weight",
        },
    )
    return Place("mtp.layers.{i}.transformer_layer", there), (copies, *rules)


def _rules(model: ModelInfo) -> Rules:
    place, around = mtp(model)
    return (
        *around,
        *_latent_attention(LAYER),
        *sparse_layer(LAYER),
        *_latent_attention(place),
        *sparse_layer(place),
        *ends(),
    )


MEMBER = MegatronTable("deepseek", (MegatronFamily("deepseek", words("deepseek_v2 deepseek_v3 kimi_k2"), _rules),))
