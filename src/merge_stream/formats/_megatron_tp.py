"""How Megatron cuts a parameter over tensor-parallel ranks: rules by name, checked by shape.

    rows         embedding, head, query-key-value, MLA's up projections, fc1 (its halves apart), eh_proj
    columns      linear_proj.weight, linear_fc2.weight, out_proj.weight of a delta net
    sections     in_proj and conv1d of a delta net, by the arguments
    whole        norms, router, biases of row-parallel layers, positions, value heads
    vision towers  `visual.` (transformers' inside) whole; fc1 of layers of Megatron with halves only in mbridge's
                   Qwen2.5-VL, which is told by its `vision_model.projection`; projections and mergers have none
    rows or whole  MLA's down projections: cut without Transformer Engine, whole with it; the rank's rows tell,
                 with q_lora_rank and kv_lora_rank of the arguments

Facts: megatron-core 0.5 to 0.19, source and real files; towers: Megatron-Bridge 0.6.2 (`modelling_qwen3_vl`), mbridge
0.15.1 (`qwen2_5_vl`), sources. Query-key-value is joined by plain concatenation and taken
apart afterwards, since a rank's part may end inside a group; where ranks share a group and each has a copy of its
key and value, the number of rows tells so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from merge_stream.errors import CorruptCheckpointError, UnsupportedError
from merge_stream.tensors.box import Box
from merge_stream.tensors.ref import ShardTable, TensorRef
from merge_stream.tensors.tables import moved, rows_of, stacked

__all__ = ["TOWER", "grouped_stack", "has_gates", "join_parts", "tower_of"]

TOWER = "vision tower"
"""Key beside the arguments: "gated" or "plain" layers of Megatron, or "" where nothing tells."""

_ROWS = re.compile(
    r".*(word_embeddings\.weight|output_layer\.(weight|bias)|linear_qkv\.(weight|bias)|linear_(q|q_up|kv_up)_proj\.(weight|bias)"
    r"|eh_proj\.weight|softmax_offset|A_log|dt_bias)"
)
_HALVES = re.compile(r".*linear_fc1\.(weight|bias)\d*")
_COLUMNS = re.compile(r".*(linear_proj\.weight|linear_fc2\.weight\d*|self_attention\.out_proj\.weight)")
_WHOLE = re.compile(
    r".*(norm[^.]*\.(weight|bias)|layer_norm_(weight|bias)|router\.(weight|bias|expert_bias)|gate_weight"
    r"|linear_proj\.bias|linear_fc2\.bias\d*|position_embeddings\.weight|post_layernorm\.(weight|bias)"
    r"|vision_model\.(patch_embed\..+|pos_embed\.weight))"
)
_HEAD_NORM = re.compile(r".*\.self_attention\.(?P<x>[qk])_layernorm\.(weight|bias)")
_PACKED = re.compile(r".*\.self_attention\.(?P<what>in_proj|conv1d)\.(weight|bias)")
_DOWN = re.compile(r".*linear_(?P<what>q|kv)_down_proj\.weight")
_QKV = re.compile(r"(?!vision_model\.).*\.linear_qkv\.(weight|bias)")
_GATES = ("swiglu", "gated_linear_unit", "quick_geglu", "geglu")
_MIXED = "files of two saves are mixed"


def join_parts(name: str, parts: Sequence[TensorRef], arguments: Mapping[str, Any], where: str) -> TensorRef:
    """The whole tensor; UnsupportedError when no rule knows the name."""
    first = parts[0]
    if len(parts) == 1:
        return _named(name, first)
    for part in parts[1:]:
        if part.dtype != first.dtype or len(part.shape) != len(first.shape):
            two = f"{first.dtype} {list(first.shape)} on rank 0, {part.dtype} {list(part.shape)} elsewhere"
            msg = f"{where}: {name} is {two}"
            raise CorruptCheckpointError(msg, hint=_MIXED)
    if name.startswith("visual."):
        return _whole(name, parts, where)  # the tower of transformers, the same on all ranks
    if _HALVES.fullmatch(name):
        if name.startswith("vision_model."):
            return _of_tower(name, parts, arguments, where)
        return _halves(name, parts) if _is_gated(name, parts, arguments) else _along(name, parts, 0, where)
    if name.endswith("output_layer.weight") and first.shape[0] == 1:
        return _whole(name, parts, where)  # a value head is not cut
    if _ROWS.fullmatch(name):
        repeated = _repeated_groups(name, parts, arguments) if _QKV.fullmatch(name) else None
        return repeated or _along(name, parts, 0, where)
    if _COLUMNS.fullmatch(name):
        return _along(name, parts, 1, where)
    if (match := _HEAD_NORM.fullmatch(name)) and _is_over_all_heads(match["x"], parts, arguments):
        return _along(name, parts, 0, where)
    if match := _PACKED.fullmatch(name):
        return _sections(name, match["what"], parts, arguments, where)
    if _WHOLE.fullmatch(name):
        return _whole(name, parts, where)
    if match := _DOWN.fullmatch(name):
        return _down(name, match["what"], parts, arguments, where)
    msg = f"{where}: how {name} is cut over {len(parts)} tensor-parallel ranks is not known"
    raise UnsupportedError(msg, hint="save a distributed checkpoint (--ckpt-format torch_dist), which tells by itself")


def tower_of(names: Iterable[str]) -> str:
    """What kind of vision tower the names are of, for `TOWER`."""
    for name in names:
        if "vision_model.projection." in name:
            return "gated"
        if "vision_model.merger." in name:
            return "plain"
    return ""


def _of_tower(name: str, parts: Sequence[TensorRef], arguments: Mapping[str, Any], where: str) -> TensorRef:
    """linear_fc1 of a layer, a merger or a projection."""
    kind = arguments.get(TOWER)
    if not kind:
        msg = f"{where}: whether {name} of {len(parts)} tensor-parallel ranks has a gate is not known"
        raise UnsupportedError(
            msg, hint="save a distributed checkpoint (--ckpt-format torch_dist), which tells by itself"
        )
    if kind == "gated" and name.startswith("vision_model.decoder.layers."):
        if any(part.shape[0] % 2 for part in parts):
            raise CorruptCheckpointError(f"{name} has an odd number of rows on a rank", hint=_MIXED)
        return _halves(name, parts)
    return _along(name, parts, 0, where)


def _named(name: str, tensor: TensorRef) -> TensorRef:
    return TensorRef(name, tensor.dtype, tensor.shape, tensor.shards, tensor.replicas, tensor.stored)


def _whole(name: str, parts: Sequence[TensorRef], where: str) -> TensorRef:
    first = parts[0]
    if any(part.shape != first.shape for part in parts):
        msg = f"{where}: {name} should be whole on every rank, but has shapes {sorted({part.shape for part in parts})}"
        raise CorruptCheckpointError(msg, hint=_MIXED)
    copies = stacked([part.shards for part in parts[1:]], len(first.shape))
    return TensorRef(name, first.dtype, first.shape, first.shards, copies)


def _along(name: str, parts: Sequence[TensorRef], dim: int, where: str) -> TensorRef:
    first = parts[0]
    if len(first.shape) <= dim:
        raise CorruptCheckpointError(f"{where}: {name} {list(first.shape)} has no dim {dim}", hint=_MIXED)
    tables, at = [], 0
    for part in parts:
        if any(k != dim and n != m for k, (n, m) in enumerate(zip(part.shape, first.shape, strict=True))):
            msg = f"{where}: {name} is {list(first.shape)} on rank 0 and {list(part.shape)} elsewhere"
            raise CorruptCheckpointError(msg, hint=_MIXED)
        by = [0] * len(first.shape)
        by[dim] = at
        tables.append(moved(part.shards, by))
        at += part.shape[dim]
    shape = (*first.shape[:dim], at, *first.shape[dim + 1 :])
    return TensorRef(name, first.dtype, shape, stacked(tables, len(shape)))


def _repeated_groups(name: str, parts: Sequence[TensorRef], arguments: Mapping[str, Any]) -> TensorRef | None:
    """More ranks than groups, each with its queries and a copy of its group's key and value; None for any other cut.

    The rows tell: `heads + 2 * ranks` heads rather than `heads + 2 * groups`.
    """
    heads, groups, width = (arguments.get(key) for key in ("num_attention_heads", "num_query_groups", "kv_channels"))
    if type(heads) is not int or type(groups) is not int or type(width) is not int or min(heads, groups, width) < 1:
        return None
    ranks, first = len(parts), parts[0]
    each = (heads // ranks + 2) * width
    if ranks <= groups or ranks % groups or heads % ranks or any(part.shape[:1] != (each,) for part in parts):
        return None
    if any(part.shape != first.shape for part in parts):
        raise CorruptCheckpointError(f"{name} has other columns on some ranks", hint=_MIXED)
    share, sharing = heads // ranks * width, ranks // groups
    rest = (0,) * (len(first.shape) - 1)
    tables: list[ShardTable] = []
    copies: list[ShardTable] = []
    for rank, part in enumerate(parts):
        group, own = divmod(rank, sharing)
        at = group * (heads // groups + 2) * width
        size, end = part.dtype.itemsize, at + (heads // groups + 2) * width
        tables.append(moved(rows_of(part.shards, 0, share, size), (at + own * share, *rest)))
        both = moved(rows_of(part.shards, share, each, size), (end - 2 * width, *rest))
        (copies if own else tables).append(both)
    shape = ((heads + 2 * groups) * width, *first.shape[1:])
    return TensorRef(name, first.dtype, shape, stacked(tables, len(shape)), stacked(copies, len(shape)))


def _is_over_all_heads(x: str, parts: Sequence[TensorRef], arguments: Mapping[str, Any]) -> bool:
    """A norm over all heads at once (MiniMax-M2) is cut; one of a head is whole everywhere."""
    heads = arguments.get("num_attention_heads" if x == "q" else "num_query_groups")
    width = arguments.get("kv_channels")
    if type(heads) is not int or type(width) is not int:
        return False
    held = parts[0].shape[0] if parts[0].shape else 0
    return held != width and held * len(parts) == heads * width


def _sections(name: str, what: str, parts: Sequence[TensorRef], arguments: Mapping[str, Any], where: str) -> TensorRef:
    """A gated delta net's in_proj or conv1d: queries, keys, values ... of each rank, joined section by section."""
    keys = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    sizes = [arguments.get(key) for key in keys]
    ranks, first = len(parts), parts[0]
    key_heads, value_heads, key_width, value_width = (n if type(n) is int and n > 0 else 0 for n in sizes)
    rows = [key_heads * key_width, key_heads * key_width, value_heads * value_width]
    rows += [value_heads * value_width, value_heads, value_heads] if what == "in_proj" else []
    if not all(rows) or any(n % ranks for n in rows) or any(part.shape[0] * ranks != sum(rows) for part in parts):
        msg = f"{where}: {name} {list(first.shape)} of {ranks} ranks is packed, and the arguments do not tell how"
        raise UnsupportedError(
            f"{msg} ({', '.join(keys)})", hint="save with --ckpt-format torch_dist, which names them"
        )
    rest = (0,) * (len(first.shape) - 1)
    tables, start, local = [], 0, 0
    for count in rows:
        each = count // ranks
        for rank, part in enumerate(parts):
            table = rows_of(part.shards, local, local + each, part.dtype.itemsize)
            tables.append(moved(table, (start + rank * each, *rest)))
        start, local = start + count, local + each
    return TensorRef(name, first.dtype, (start, *first.shape[1:]), stacked(tables, len(first.shape)))


def _halves(name: str, parts: Sequence[TensorRef]) -> TensorRef:
    """Each rank holds [gate_r; up_r]: all gates, then all ups."""
    first = parts[0]
    total = sum(part.shape[0] for part in parts)
    rest = (0,) * (len(first.shape) - 1)
    tables, at = [], 0
    for part in parts:
        half, size = part.shape[0] // 2, part.dtype.itemsize
        tables.append(moved(rows_of(part.shards, 0, half, size), (at, *rest)))
        tables.append(moved(rows_of(part.shards, half, 2 * half, size), (total // 2 + at, *rest)))
        at += half
    return TensorRef(name, first.dtype, (total, *first.shape[1:]), stacked(tables, len(first.shape)))


def has_gates(arguments: Mapping[str, Any]) -> bool | None:
    """Whether linear_fc1 is a gate and an up projection, by the arguments; None where they do not tell (verl)."""
    told = [arguments[key] for key in _GATES if isinstance(arguments.get(key), bool)]
    return any(told) if told else None


def _is_gated(name: str, parts: Sequence[TensorRef], arguments: Mapping[str, Any]) -> bool:
    """By the arguments; without them it is assumed, and compared with the family later."""
    told = has_gates(arguments)
    if told is not None:
        return told
    if any(part.shape[0] % 2 for part in parts):
        raise CorruptCheckpointError(f"{name} has an odd number of rows on a rank", hint=_MIXED)
    return True


def _down(name: str, what: str, parts: Sequence[TensorRef], arguments: Mapping[str, Any], where: str) -> TensorRef:
    if what == "q":
        rows = arguments.get("q_lora_rank")
    else:
        latent, rotary = arguments.get("kv_lora_rank"), arguments.get("qk_pos_emb_head_dim")
        rows = latent + rotary if type(latent) is int and type(rotary) is int else None
    held = [part.shape[0] for part in parts]
    if rows == held[0] and len(set(held)) == 1:
        return _whole(name, parts, where)
    if rows == sum(held):
        return _along(name, parts, 0, where)
    msg = f"{where}: {name} has {held} rows on its ranks, and the arguments' ranks of MLA do not tell whether it is cut"
    raise UnsupportedError(msg, hint="save a distributed checkpoint (--ckpt-format torch_dist)")


def grouped_stack(name: str, parts: Sequence[TensorRef], arguments: Mapping[str, Any], where: str) -> TensorRef:
    """The stack [E, in, out] of old grouped weights, from what each expert-parallel rank holds.

    `weight1` is saved as [h, n * 2F] and `weight2` as [n * F, h], both views of [n, in, out] in memory.
    """
    total = arguments.get("num_experts")
    if type(total) is not int or total < 1 or total % len(parts):
        msg = f"{where}: {name} is a view of {len(parts)} stacks, and the arguments do not tell the number of experts"
        raise UnsupportedError(msg, hint="save a distributed checkpoint (--ckpt-format torch_dist)")
    local = total // len(parts)
    first = parts[0]
    rows, columns = first.shape if len(first.shape) == 2 else (0, 0)
    inner = (rows, columns // local) if name.endswith("weight1") else (rows // local, columns)
    if math.prod(inner) * local != math.prod(first.shape) or any(part.shape != first.shape for part in parts):
        raise CorruptCheckpointError(f"{where}: {name} {list(first.shape)} is no stack of {local} experts", hint=_MIXED)
    table: list[tuple[Box, int, int]] = []
    for rank, part in enumerate(parts):
        if len(part.shards) != 1:
            raise CorruptCheckpointError(f"{where}: {name} is in {len(part.shards)} pieces", hint=_MIXED)
        _, file, offset = part.shards.row(0)
        start = rank * local
        table.append((Box((start, 0, 0), (start + local, *inner)), file, offset))
    return TensorRef(name, first.dtype, (total, *inner), ShardTable.of(table, 3))
