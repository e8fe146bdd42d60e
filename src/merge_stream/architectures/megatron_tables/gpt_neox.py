"""GPT-NeoX, Pythia: query, key, value of each head together on both sides, LayerNorm with bias, no gate."""

from __future__ import annotations

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.megatron_qkv import heads_of
from merge_stream.architectures.megatron_tables.base import LAYER, MegatronFamily, MegatronTable, Rules
from merge_stream.architectures.rules import Rename
from merge_stream.errors import UnsupportedError

__all__ = ["MEMBER"]

_AT = "gpt_neox.layers.{i}"
_LAYER = {
    "self_attention.linear_qkv": "attention.query_key_value",
    "self_attention.linear_proj": "attention.dense",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
}


def _rules(model: ModelInfo) -> Rules:
    heads = heads_of(model)
    if heads.queries != heads.groups:
        msg = f"GPT-NeoX has no groups of heads, but {model.config_path or 'config.json'} tells {heads.groups}"
        raise UnsupportedError(msg, hint="pass the --base-model that was trained")
    return (
        *(Rename(f"{LAYER.here}.{old}.{{leaf:weight|bias}}", f"{_AT}.{new}.{{leaf}}") for old, new in _LAYER.items()),
        Rename("decoder.final_layernorm.{leaf}", "gpt_neox.final_layer_norm.{leaf}"),
        Rename("embedding.word_embeddings.weight", "gpt_neox.embed_in.weight"),
        Rename("output_layer.weight", "embed_out.weight"),
    )


MEMBER = MegatronTable(
    "gpt_neox", (MegatronFamily("gpt_neox", frozenset({"gpt_neox"}), _rules, proof=False, gated=False),)
)
