"""Megatron's many spellings of one model, made one: a name for each layer, a stack for the experts of a layer.

    decoder.layers.self_attention.linear_qkv.weight [L, ...]    layer stack              one tensor for each layer
    mlp.experts.experts.linear_fc1.weight [E, 2F, h]            expert stack             mlp.experts.linear_fc1.weight
    mlp.experts.experts.7.linear_fc1.weight_w, _v               an expert, gate and up   rows of the expert stack
    mlp.experts.linear_fc1.weight7, local_experts.7.linear_fc1  an expert                the same
    mlp.linear_fc1.weight_w, weight_v                           gate and up              mlp.linear_fc1.weight
    self_attention.linear_qkv.layer_norm_weight                 norm fused with linear   input_layernorm.weight
    self_attention.in_proj.weight.query, .key, ...              a delta net's parts      self_attention.in_proj.weight
    mtp.layers.0.mtp_model_layer                                in memory since 0.17     mtp.layers.0.transformer_layer
    decoder.layers.0 attention, decoder.layers.1 mlp            HybridModel              decoder.layers.0
    module., model., model.module., model0.                     wrappers                 nothing

Facts: megatron-core 0.9 to 0.19 (real files; see docs/formats/megatron.md). Only places change here, never values.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from merge_stream.errors import CorruptCheckpointError, IncompleteShardsError, UnsupportedError
from merge_stream.tensors.ref import ShardTable, TensorRef
from merge_stream.tensors.tables import deeper, moved, rows_of, stacked

__all__ = ["Canonical", "canonical", "is_megatron_name", "noise_of"]

_PREFIX = re.compile(
    r"\A(?:model\d*\.|module\.)+(?=(?:module\.)*(?:embedding|decoder|output_layer|mtp|language_model|vision_model)\b)"
)
_STACKED = re.compile(r"((?:language_model\.|vision_model\.)?decoder\.layers)\.(?!\d)(.+)")
_EXPERT = re.compile(
    r"(?P<at>.+\.mlp\.experts)\.(?:experts\.|local_experts\.)(?P<e>\d{1,6})\.(?P<part>linear_fc[12])\.(?P<leaf>weight|bias)(?P<half>_[wv])?"
    r"|(?P<at2>.+\.mlp\.experts)\.(?P<part2>linear_fc[12])\.(?P<leaf2>weight|bias)(?P<e2>\d{1,6})(?P<half2>_[wv])?"
)
_HALF = re.compile(r"(?P<whole>.+\.linear_fc1\.(?:weight|bias))_(?P<half>[wv])")
_NORMS = (
    (re.compile(r"(.+)\.self_attention\.linear_qkv\.layer_norm_(weight|bias)"), r"\1.input_layernorm.\2"),
    (re.compile(r"(.+)\.self_attention\.in_proj\.layer_norm_(weight|bias)"), r"\1.input_layernorm.\2"),
    (re.compile(r"(.+)\.mlp\.linear_fc1\.layer_norm_(weight|bias)"), r"\1.pre_mlp_layernorm.\2"),
    (
        re.compile(r"(.+)\.self_attention\.linear_q_up_proj\.layer_norm_(weight|bias)"),
        r"\1.self_attention.q_layernorm.\2",
    ),
    (
        re.compile(r"(.+)\.self_attention\.linear_kv_up_proj\.layer_norm_(weight|bias)"),
        r"\1.self_attention.kv_layernorm.\2",
    ),
    (re.compile(r"(.+)\.mlp\.experts\.experts\.(linear_fc[12]\..+)"), r"\1.mlp.experts.\2"),
    (re.compile(r"(.*decoder)\.final_norm\.(weight|bias)"), r"\1.final_layernorm.\2"),
)
_MTP = re.compile(r"(mtp\.layers\.\d+)\.mtp_model_layer\.(.+)")
_SECTION = re.compile(r"(?P<whole>.+\.self_attention\.(?P<what>in_proj|conv1d)\.(?:weight|bias))\.(?P<part>[a-z]+)")
_SECTIONS = {"in_proj": ("query", "key", "value", "z", "beta", "alpha"), "conv1d": ("query", "key", "value")}
_NOISE = (
    (re.compile(r"(chained_\d+\.)?optimizer\..*|chained_\d+\..*"), "optimizer state"),
    (re.compile(r".*\._extra_state.*|.*_extra_state"), "extra state"),
    (re.compile(r"rng_state.*"), "random state"),
    (re.compile(r".*\.local_tokens_per_expert|.*\.(rotary|rotary_pos)_emb\..*|.*inv_freq"), "buffer computed again"),
)
_KNOWN = re.compile(
    r"(self_attention\.linear_qkv|mlp\.linear_fc1|mlp\.experts\.|embedding\.word_embeddings|linear_kv_down_proj)\b"
)
_LAYER = re.compile(r"(decoder\.layers)\.(\d{1,6})\.(.+)")
_EXPERT_STACK = re.compile(r".+\.mlp\.experts\.(experts\.)?\w+(\.(weight|bias))?")
_MOST_LAYERS, _MOST_EXPERTS = 1 << 12, 1 << 14
_MIXED = "files of two saves are mixed, or a save did not finish"


@dataclass(slots=True)
class Canonical:
    """Tensors under one spelling; what was left out, by kind; remarks."""

    tensors: dict[str, TensorRef] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)


def is_megatron_name(name: str) -> bool:
    """True for a name that only Megatron gives."""
    return _KNOWN.search(name) is not None


def noise_of(name: str) -> str | None:
    """What kind of training state a key is, or None for a weight."""
    return next((kind for pattern, kind in _NOISE if pattern.fullmatch(name)), None)


def canonical(tensors: Mapping[str, TensorRef]) -> Canonical:
    """One spelling for all tensors; errors name what does not fit together."""
    result = Canonical()
    plain: dict[str, TensorRef] = {}
    for name, tensor in tensors.items():
        if kind := noise_of(name):
            result.ignored[kind] += 1
            continue
        short = _PREFIX.sub("", name, count=1)
        short = short.removeprefix("module.")
        for key, one in _layers_of(short, tensor):
            if _EXPERT_STACK.fullmatch(key) and one.shape and one.shape[0] > _MOST_EXPERTS and len(one.shape) > 2:
                msg = f"{name} {list(tensor.shape)} is a stack of more experts than a model has"
                raise CorruptCheckpointError(msg, hint=_MIXED)
            plain[_once(plain, key)] = one
    joined = _joined_experts(_joined_halves(_joined_sections(plain)))
    renamed: dict[str, TensorRef] = {}
    for name, tensor in joined.items():
        renamed[_once(renamed, _plain_name(name))] = tensor
    result.tensors = _paired_layers(renamed, result.notes)
    return result


def _plain_name(name: str) -> str:
    name = _MTP.sub(r"\1.transformer_layer.\2", name)
    for pattern, to in _NORMS:
        if pattern.fullmatch(name):
            return pattern.sub(to, name)
    return name


def _once(names: Mapping[str, object], name: str) -> str:
    if name in names:
        raise CorruptCheckpointError(f"two tensors of the checkpoint are {name}", hint=_MIXED)
    return name


def _layers_of(name: str, tensor: TensorRef) -> list[tuple[str, TensorRef]]:
    """The tensor itself, or one for each layer of a stack."""
    match = _STACKED.fullmatch(name)
    if match is None:
        return [(name, tensor)]
    if not tensor.shape:
        raise CorruptCheckpointError(f"{name} is a scalar, wanted a stack over the layers", hint=_MIXED)
    if tensor.shape[0] > _MOST_LAYERS:
        raise CorruptCheckpointError(
            f"{name} {list(tensor.shape)} is a stack of more layers than a model has", hint=_MIXED
        )
    return [(f"{match[1]}.{layer}.{match[2]}", _row(tensor, layer)) for layer in range(tensor.shape[0])]


def _row(tensor: TensorRef, index: int) -> TensorRef:
    """One element of the leading dim, without that dim."""
    size = tensor.on_disk.itemsize

    def cut(table: ShardTable) -> ShardTable:
        rows = rows_of(table, index, index + 1, size)
        return ShardTable(rows.start[:, 1:], rows.stop[:, 1:], rows.file, rows.offset)

    copies = cut(tensor.replicas) if tensor.replicas is not None else None
    copies = copies if copies is not None and len(copies) else None
    return TensorRef(tensor.name, tensor.dtype, tensor.shape[1:], cut(tensor.shards), copies, tensor.stored)


def _joined_halves(tensors: dict[str, TensorRef]) -> dict[str, TensorRef]:
    """`weight_w` (gate) and `weight_v` (up) become one tensor [gate; up]; those of experts too."""
    halves: dict[str, dict[str, TensorRef]] = {}
    result: dict[str, TensorRef] = {}
    for name, tensor in tensors.items():
        match = _HALF.fullmatch(name) or re.fullmatch(
            r"(?P<whole>.+\.linear_fc1\.(?:weight|bias)\d+)_(?P<half>[wv])", name
        )
        if match is None:
            result[name] = tensor
        else:
            halves.setdefault(match["whole"], {})[match["half"]] = tensor
    for whole, parts in halves.items():
        if set(parts) != {"w", "v"}:
            msg = f"{whole}_{'v' if 'w' in parts else 'w'} is missing, though {whole}_{min(parts)} is there"
            raise IncompleteShardsError(msg, hint=_MIXED)
        result[_once(result, whole)] = _below(whole, [parts["w"], parts["v"]])
    return result


def _joined_sections(tensors: dict[str, TensorRef]) -> dict[str, TensorRef]:
    """Parts of a gated delta net's in_proj and conv1d, saved each for itself, become one tensor again, in order."""
    found: dict[str, dict[str, TensorRef]] = {}
    result: dict[str, TensorRef] = {}
    orders: dict[str, tuple[str, ...]] = {}
    for name, tensor in tensors.items():
        match = _SECTION.fullmatch(name)
        if match is None:
            result[name] = tensor
        else:
            found.setdefault(match["whole"], {})[match["part"]] = tensor
            orders[match["whole"]] = _SECTIONS[match["what"]]
    for whole, parts in found.items():
        order = orders[whole]
        if lost := [part for part in order if part not in parts]:
            msg = f"{whole}.{lost[0]} is missing, though {whole}.{next(iter(parts))} is there"
            raise IncompleteShardsError(msg, hint=_MIXED)
        if odd := [part for part in parts if part not in order]:
            msg = f"{whole} has a part {odd[0]!r}, known are {', '.join(order)}"
            raise UnsupportedError(msg, hint="a delta net of a kind that is not known here")
        result[_once(result, whole)] = _below(whole, [parts[part] for part in order])
    return result


def _below(name: str, parts: list[TensorRef]) -> TensorRef:
    """The parts one below the other."""
    first = parts[0]
    tables, copies, at = [], [], 0
    rest = (0,) * (len(first.shape) - 1)
    for part in parts:
        if (part.dtype, part.shape[1:]) != (first.dtype, first.shape[1:]):
            msg = f"{name}: its parts are {first.dtype} {list(first.shape)} and {part.dtype} {list(part.shape)}"
            raise CorruptCheckpointError(msg, hint=_MIXED)
        tables.append(moved(part.shards, (at, *rest)))
        if part.replicas is not None:
            copies.append(moved(part.replicas, (at, *rest)))
        at += part.shape[0]
    shape = (at, *first.shape[1:])
    replicas = stacked(copies, len(shape)) if copies else None
    return TensorRef(name, first.dtype, shape, stacked(tables, len(shape)), replicas, first.stored)


def _joined_experts(tensors: dict[str, TensorRef]) -> dict[str, TensorRef]:
    """Experts under names of their own become a stack [E, ...]."""
    stacks: dict[str, dict[int, TensorRef]] = {}
    result: dict[str, TensorRef] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            result[name] = tensor
            continue
        at, part, leaf = (match[key] or match[f"{key}2"] for key in ("at", "part", "leaf"))
        stacks.setdefault(f"{at}.{part}.{leaf}", {})[int(match["e"] or match["e2"])] = tensor
    for name, experts in stacks.items():
        missing = [k for k in range(max(experts) + 1) if k not in experts]
        if missing:
            msg = f"{name}: experts {missing[:8]} are missing, {len(experts)} are there"
            raise IncompleteShardsError(msg, hint="copy the files of all expert-parallel ranks")
        result[_once(result, name)] = _stack(name, [experts[k] for k in sorted(experts)])
    return result


def _stack(name: str, parts: list[TensorRef]) -> TensorRef:
    first = parts[0]
    tables, copies = [], []
    for k, part in enumerate(parts):
        if (part.dtype, part.shape) != (first.dtype, first.shape):
            msg = f"{name}: expert 0 is {first.dtype} {list(first.shape)}, expert {k} {part.dtype} {list(part.shape)}"
            raise CorruptCheckpointError(msg, hint=_MIXED)
        tables.append(deeper(part.shards, k))
        if part.replicas is not None:
            copies.append(deeper(part.replicas, k))
    shape = (len(parts), *first.shape)
    replicas = stacked(copies, len(shape)) if copies else None
    return TensorRef(name, first.dtype, shape, stacked(tables, len(shape)), replicas, first.stored)


def _paired_layers(tensors: dict[str, TensorRef], notes: list[str]) -> dict[str, TensorRef]:
    """HybridModel's attention and MLP layers, which have numbers of their own, become layers of both."""
    layers: dict[int, set[str]] = {}
    for name in tensors:
        if match := _LAYER.fullmatch(name):
            layers.setdefault(int(match[2]), set()).add(match[3].partition(".")[0])
    attention = [n for n, parts in sorted(layers.items()) if "self_attention" in parts]
    mlp = [n for n, parts in sorted(layers.items()) if "mlp" in parts]
    if not attention or not mlp or set(attention) & set(mlp):
        return tensors
    if len(attention) != len(mlp) or len(layers) != len(attention) + len(mlp):
        other = sorted({part for parts in layers.values() for part in parts})
        msg = f"a hybrid model of {len(attention)} attention, {len(mlp)} MLP and other layers ({', '.join(other)})"
        raise UnsupportedError(msg, hint="only models of attention and MLP layers, in pairs, are known")
    pairs = list(zip(attention, mlp, strict=True))
    if pairs != [(2 * k, 2 * k + 1) for k in range(len(pairs))]:
        odd = next(k for k, pair in enumerate(pairs) if pair != (2 * k, 2 * k + 1))
        msg = f"a hybrid model whose layers are no pairs of attention and MLP: {attention[odd]} and {mlp[odd]} are"
        raise UnsupportedError(f"{msg} attention and MLP number {odd}", hint="only models of such pairs are known")
    number = {old: k for order in (attention, mlp) for k, old in enumerate(order)}
    notes.append(f"{len(layers)} layers of a hybrid model are {len(attention)} pairs of attention and MLP")
    renamed: dict[str, TensorRef] = {}
    for name, tensor in tensors.items():
        match = _LAYER.fullmatch(name)
        new = f"{match[1]}.{number[int(match[2])]}.{match[3]}" if match else name
        renamed[_once(renamed, new)] = tensor
    return renamed
