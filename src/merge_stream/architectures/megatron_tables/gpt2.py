"""GPT-2: Conv1D weights [in, out], query, key and value side by side, learned positions, LayerNorm with bias."""

from __future__ import annotations

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.megatron_qkv import QkvConcat, heads_of
from merge_stream.architectures.megatron_tables.base import LAYER, MegatronFamily, MegatronTable, Rules
from merge_stream.architectures.rules import Rename, Transpose

__all__ = ["MEMBER"]

_AT = "transformer.h.{i}"


def _rules(model: ModelInfo) -> Rules:
    linear = {
        "self_attention.linear_proj": "attn.c_proj",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    }
    return (
        QkvConcat(
            f"{LAYER.here}.self_attention.linear_qkv.{{leaf}}",
            f"{_AT}.attn.c_attn.{{leaf}}",
            heads_of(model),
            transposed=True,
        ),
        *(Transpose(f"{LAYER.here}.{old}.weight", f"{_AT}.{new}.weight") for old, new in linear.items()),
        *(Rename(f"{LAYER.here}.{old}.bias", f"{_AT}.{new}.bias") for old, new in linear.items()),
        Rename(f"{LAYER.here}.input_layernorm.{{leaf}}", f"{_AT}.ln_1.{{leaf}}"),
        Rename(f"{LAYER.here}.pre_mlp_layernorm.{{leaf}}", f"{_AT}.ln_2.{{leaf}}"),
        Rename("decoder.final_layernorm.{leaf}", "transformer.ln_f.{leaf}"),
        Rename("embedding.word_embeddings.weight", "transformer.wte.weight"),
        Rename("embedding.position_embeddings.weight", "transformer.wpe.weight"),
        Rename("output_layer.weight", "lm_head.weight"),
    )


MEMBER = MegatronTable("gpt2", (MegatronFamily("gpt2", frozenset({"gpt2"}), _rules, gated=False),))
