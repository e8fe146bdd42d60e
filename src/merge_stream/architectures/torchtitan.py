"""torchtitan's own llama-style names -> the Hugging Face names of the family.

    tok_embeddings.weight                     model.embed_tokens.weight
    layers.N.attention.wq (qkv_linear.wq)     model.layers.N.self_attn.q_proj    rows permuted
    layers.N.feed_forward.w1 / w3 / w2        model.layers.N.mlp.gate_proj / up_proj / down_proj
    norm.weight, output (lm_head)             model.norm.weight, lm_head.weight

torchtitan's llama rotates neighbouring rows of q and k, transformers the two halves of a
head: rows seen as (heads, head_dim / 2, 2) become (heads, 2, head_dim / 2), which is one
take. Its qwen3 (with q_norm and k_norm) rotates halves itself and is not permuted. Seen in
torchtitan of 2025 (`attention.wq`, `output`) and 2026 (`attention.qkv_linear.wq`, `lm_head`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping as MappingABC

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.families import RECOMPUTED
from merge_stream.architectures.structure import text_value
from merge_stream.errors import CheckpointError, UnsupportedError
from merge_stream.options import LayoutName
from merge_stream.tensors.box import Box
from merge_stream.tensors.parameter import Mapping, Parameter, Take, identity
from merge_stream.tensors.ref import Catalog
from merge_stream.units import counted

__all__ = ["MEMBER", "Torchtitan"]

Ints = tuple[int, ...]

_PERMUTED_TYPES = frozenset({"llama", "mistral"})
_PLAIN_TYPES = frozenset({"qwen3"})
_TOP = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head", "lm_head": "lm_head"}
_IN_LAYER = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_HEADS_OF = {
    "self_attn.q_proj": ("num_attention_heads",),
    "self_attn.k_proj": ("num_key_value_heads", "num_attention_heads"),
}
_LAYER = re.compile(r"layers\.(?P<number>\d+)\.(?P<module>.+)\.(?P<leaf>weight|bias)")
_AS_IS = "`--layout as-is` writes the tensors under torchtitan's names"


class Torchtitan:
    """Names of torchtitan's dense llama and qwen3 models."""

    name = "torchtitan"

    def claims(self, catalog: Catalog, model: ModelInfo) -> bool:
        """Responsible when the format found torchtitan's names."""
        del model
        return catalog.naming == "torchtitan"

    def parameters(self, catalog: Catalog, model: ModelInfo, layout: LayoutName) -> Mapping:
        """HF parameters, q and k permuted where the family needs it; UnsupportedError names what has no place."""
        shapes = {name: tensor.shape for name, tensor in catalog.tensors.items()}
        if layout == "as-is":
            return Mapping(self.name, tuple(identity(name, shape) for name, shape in shapes.items()))
        permuted = _is_permuted(shapes, model)
        parameters, unknown, dropped = [], [], 0
        for name, shape in shapes.items():
            if RECOMPUTED.fullmatch(name):
                dropped += 1
                continue
            target = _target(name)
            if target is None:
                unknown.append(name)
                continue
            module = target.rpartition(".")[0].split(".", 3)[-1]
            if permuted and module in _HEADS_OF:
                parameters.append(_half_rotated(target, name, shape, _head_count(name, shape, module, model)))
            else:
                parameters.append(identity(target, shape, name))
        if unknown:
            _refuse(unknown)
        notes = [f"names of torchtitan mapped to those of {model.model_type}"]
        if permuted:
            notes.append("rows of q_proj and k_proj permuted from torchtitan's rotary order")
        if dropped:
            notes.append(f"{dropped} buffers that every loader computes again are left out")
        return Mapping(self.name, tuple(parameters), (), tuple(notes))


MEMBER = Torchtitan()


def _is_permuted(shapes: MappingABC[str, Ints], model: ModelInfo) -> bool:
    if model.config is None:
        msg = "torchtitan's rows of q and k are permuted by head, and without config.json the heads are not known"
        raise UnsupportedError(msg, hint=f"pass `--base-model DIR` with a config.json, or {_AS_IS}")
    kind = model.model_type
    if kind not in _PERMUTED_TYPES | _PLAIN_TYPES:
        known = ", ".join(sorted(_PERMUTED_TYPES | _PLAIN_TYPES))
        msg = f"torchtitan names of model_type {kind!r} ({model.config_path}) are not known, only those of {known}"
        raise UnsupportedError(msg, hint=_AS_IS)
    normed = next(
        (name for name in shapes if name.endswith(("attention.q_norm.weight", "attention.k_norm.weight"))), ""
    )
    if bool(normed) != (kind in _PLAIN_TYPES):
        has = f"has {normed}" if normed else "has no attention.q_norm.weight"
        msg = f"the checkpoint {has}, which does not fit model_type {kind!r} ({model.config_path})"
        raise CheckpointError(msg, hint="pass the `--base-model` whose config.json belongs to this checkpoint")
    return kind in _PERMUTED_TYPES


def _target(name: str) -> str | None:
    match = _LAYER.fullmatch(name)
    if match is not None:
        module = _IN_LAYER.get(match["module"].replace("attention.qkv_linear.", "attention."))
        return f"model.layers.{match['number']}.{module}.{match['leaf']}" if module else None
    module, _, leaf = name.rpartition(".")
    return f"{_TOP[module]}.{leaf}" if module in _TOP and leaf in {"weight", "bias"} else None


def _head_count(name: str, shape: Ints, module: str, model: ModelInfo) -> int:
    keys = _HEADS_OF[module]
    heads = text_value(model.config, *keys)
    if heads is None or heads < 1:
        msg = f"{name}: {model.config_path or 'config.json'} has no {' or '.join(keys)}, so its rows cannot be permuted"
        raise CheckpointError(msg, hint=f"complete config.json, or {_AS_IS}")
    width = text_value(model.config, "head_dim")
    if width is None:
        hidden, queries = text_value(model.config, "hidden_size"), text_value(model.config, "num_attention_heads")
        width = hidden // queries if hidden and queries else shape[0] // heads
    if shape[0] != heads * width or width % 2:
        msg = f"{name} has {shape[0]} rows, but the config says {heads} heads of {width} rows"
        raise CheckpointError(msg, hint=f"config.json belongs to another model: {model.config_path}")
    return heads


def _half_rotated(target: str, source: str, shape: Ints, heads: int) -> Parameter:
    half = shape[0] // heads // 2
    before, after = (heads, half, 2, *shape[1:]), (heads, 2, half, *shape[1:])
    permute = (0, 2, 1, *range(3, len(before)))
    take = Take(source, Box.whole(before), Box.whole(after), split=before[:3], permute=permute)
    return Parameter(target, shape, after, (take,))


def _refuse(unknown: list[str]) -> None:
    first = ", ".join(unknown[:5])
    more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
    if any(".moe." in name or ".experts." in name for name in unknown):
        msg = f"torchtitan's mixture-of-experts names are not mapped by this version: {first}{more}"
    elif any(name.endswith("wqkv.weight") for name in unknown):
        msg = f"torchtitan's fused query-key-value rows are not split by this version: {first}{more}"
    else:
        msg = f"{counted(len(unknown), 'name has', 'names have')} no place in a dense torchtitan model: {first}{more}"
    raise UnsupportedError(msg, hint=_AS_IS)
