"""Qwen3-Next: three gated delta nets to each attention with gates, experts and a gated shared expert, one MTP layer.

All norms but one mean their weight w as 1 + w, here and in the repository; the exception is the norm behind a delta
net, which the repository means as it stands: one is added. Facts: Megatron-Bridge 0.6.2, megatron-core 0.19
(`in_proj` and `conv1d` of a delta net are saved part by part; `formats/_megatron_names` joins them in order).
"""

from __future__ import annotations

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.megatron_rules import DeltaNet
from merge_stream.architectures.megatron_tables.base import (
    LAYER,
    MegatronFamily,
    MegatronTable,
    Place,
    Rules,
    attention,
    ends,
)
from merge_stream.architectures.megatron_tables.qwen_moe import sparse_layer
from merge_stream.architectures.rules import Rename
from merge_stream.architectures.structure import text_value
from merge_stream.errors import UnsupportedError

__all__ = ["MEMBER"]

_SIZES = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
_MTP = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "final_layernorm": "norm",
}


def _delta_net(model: ModelInfo) -> Rules:
    here, there = f"{LAYER.here}.self_attention", f"{LAYER.there}.linear_attn"
    key_heads, value_heads, key_width, value_width = (text_value(model.config, key) or 0 for key in _SIZES)
    if not key_heads or not key_width or not value_width or value_heads % key_heads:
        msg = f"{model.config_path or 'config.json'} does not tell the heads of the delta nets ({', '.join(_SIZES)})"
        raise UnsupportedError(msg, hint="pass the --base-model that was trained")
    plain = {
        "conv1d.weight": "conv1d.weight",
        "A_log": "A_log",
        "dt_bias": "dt_bias",
        "out_norm.weight": "norm.weight",
        "out_proj.weight": "out_proj.weight",
    }
    return (
        DeltaNet(
            f"{here}.in_proj.weight",
            f"{there}.in_proj_qkvz.weight",
            f"{there}.in_proj_ba.weight",
            key_heads,
            value_heads,
            key_width,
            value_width,
        ),
        *(Rename(f"{here}.{old}", f"{there}.{new}") for old, new in plain.items()),
    )


def _rules(model: ModelInfo) -> Rules:
    inner = Place("mtp.layers.{i}.transformer_layer", "mtp.layers.{i}")
    return (
        *_delta_net(model),
        *attention(model, gated=True),
        *sparse_layer(LAYER),
        *(Rename(f"mtp.layers.0.{old}.weight", f"mtp.{new}.weight") for old, new in _MTP.items()),
        *attention(model, inner, gated=True),
        *sparse_layer(inner),
        *ends(),
    )


MEMBER = MegatronTable(
    "qwen3_next",
    (MegatronFamily("qwen3_next", frozenset({"qwen3_next"}), _rules, centred=r"(?!.*\.out_norm\.).+"),),
)
