"""Qwen2.5-VL and Qwen3-VL, dense and mixture: a language model below `language_model.`, and the vision tower.

    visual.                          Qwen2.5-VL of Megatron-Bridge: the tower of transformers, as it is
    vision_model.decoder.layers.{i}  mbridge's (Qwen2.5-VL) and Megatron-Bridge's (Qwen3-VL): layers of Megatron

Facts: Megatron-Bridge 0.6.2, mbridge 0.15.1. The repositories keep query, key and value of the tower one below the
other.
"""

from __future__ import annotations

from collections.abc import Mapping

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.megatron_qkv import Heads, QkvConcat
from merge_stream.architectures.megatron_tables.base import (
    MegatronFamily,
    MegatronTable,
    Place,
    Rules,
    attention,
    ends,
    gated_mlp,
    norms,
)
from merge_stream.architectures.rules import Rename, Transpose
from merge_stream.errors import UnsupportedError

__all__ = ["MEMBER"]

_TEXT = "language_model.decoder.layers.{i}"
_VISION = "vision_model.decoder.layers.{i}"


def _tower(model: ModelInfo, there: str) -> Rules:
    """Attention and norms of a tower of Megatron's layers."""
    nest = (model.config or {}).get("vision_config")
    heads, hidden = (nest.get("num_heads"), nest.get("hidden_size")) if isinstance(nest, Mapping) else (None, None)
    if type(heads) is not int or type(hidden) is not int or heads < 1 or hidden % heads:
        msg = f"{model.config_path or 'config.json'} does not tell the heads of the vision tower"
        raise UnsupportedError(msg, hint="pass the --base-model that was trained")
    here = f"{_VISION}.self_attention"
    return (
        QkvConcat(f"{here}.linear_qkv.{{leaf}}", f"{there}.attn.qkv.{{leaf}}", Heads(heads, heads, hidden // heads)),
        Rename(f"{here}.linear_proj.{{leaf:weight|bias}}", f"{there}.attn.proj.{{leaf}}"),
        Rename(f"{_VISION}.input_layernorm.{{leaf}}", f"{there}.norm1.{{leaf}}"),
        Rename(f"{_VISION}.pre_mlp_layernorm.{{leaf}}", f"{there}.norm2.{{leaf}}"),
    )


def _qwen2_5(model: ModelInfo) -> Rules:
    text, blocks = Place(_TEXT, "model.layers.{i}"), "visual.blocks.{i}"
    projection = {"linear_fc1": "0", "linear_fc2": "2"}
    return (
        *_tower(model, blocks),
        *gated_mlp(Place(_VISION, blocks)),
        Rename("vision_model.patch_embed.{rest}", "visual.patch_embed.{rest}"),
        Rename("vision_model.decoder.final_layernorm.{leaf}", "visual.merger.ln_q.{leaf}"),
        *(
            Rename(f"vision_model.projection.encoder.{old}.{{leaf}}", f"visual.merger.mlp.{new}.{{leaf}}")
            for old, new in projection.items()
        ),
        *attention(model, text),
        *gated_mlp(text),
        *norms(text),
        *ends("language_model."),
    )


def _qwen3(model: ModelInfo) -> Rules:
    text, visual = Place(_TEXT, "model.language_model.layers.{i}"), "model.visual"
    merger = {"patch_norm": "norm", "linear_fc1": "linear_fc1", "linear_fc2": "linear_fc2"}
    places = (
        ("vision_model.decoder.deepstack_merger_list.{i}", f"{visual}.deepstack_merger_list.{{i}}"),
        ("vision_model.merger", f"{visual}.merger"),
    )
    experts, into = f"{text.here}.mlp.experts", f"{text.there}.mlp.experts"
    return (
        *_tower(model, f"{visual}.blocks.{{i}}"),
        Rename(f"{_VISION}.mlp.{{rest}}", f"{visual}.blocks.{{i}}.mlp.{{rest}}"),
        *(
            Rename(f"{here}.{old}.{{leaf}}", f"{there}.{new}.{{leaf}}")
            for here, there in places
            for old, new in merger.items()
        ),
        Rename("vision_model.patch_embed.{rest}", f"{visual}.patch_embed.{{rest}}"),
        Rename("vision_model.pos_embed.weight", f"{visual}.pos_embed.weight"),
        *attention(model, text),
        *gated_mlp(text),
        Rename(f"{text.here}.mlp.router.weight", f"{text.there}.mlp.gate.weight"),
        Transpose(f"{experts}.linear_fc1.weight", f"{into}.gate_up_proj", (0, 2, 1)),
        Transpose(f"{experts}.linear_fc2.weight", f"{into}.down_proj", (0, 2, 1)),
        *norms(text),
        *ends("language_model.", "model.language_model."),
    )


MEMBER = MegatronTable(
    "qwen_vl",
    (
        MegatronFamily("qwen2.5-vl", frozenset({"qwen2_5_vl"}), _qwen2_5),
        MegatronFamily("qwen3-vl", frozenset({"qwen3_vl", "qwen3_vl_moe"}), _qwen3),
    ),
)
