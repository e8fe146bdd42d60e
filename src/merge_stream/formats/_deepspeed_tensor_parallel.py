"""Joining what tensor-parallel ranks hold: which dim a parameter was cut along, and where each part goes.

    affine_map      0.19: exact places of every piece (uneven parts, fused parameters)
    pattern lists   0.14 on: concatenate on dim 0, dim 1, in halves; replicated; vocabulary with padding
    Megatron names  no list at all: the rules of Megatron-DeepSpeed's own layers

Facts: DeepSpeed 0.14.4, 0.16.9, 0.19.8 (checkpoint/constants.py, ds_to_universal.py, module_inject/auto_tp.py);
`source` of a piece indexes the whole tensor and `dest` the rank's part, whatever the names say. A piece may be scaled
(`scale`, checkpoint/affine.py of 0.19.8), which no layer of DeepSpeed does so far and is refused. A parameter that no
rule places is refused: shapes alone cannot tell a replica from a part.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from merge_stream.errors import CorruptCheckpointError, UnsupportedError
from merge_stream.formats._catalog import listed
from merge_stream.formats._deepspeed_patterns import NamePatterns
from merge_stream.tensors.box import row_major_strides
from merge_stream.tensors.ref import ShardTable, TensorRef
from merge_stream.tensors.tables import first_rows, moved, rows_of, stacked

__all__ = ["TensorParallelRules"]

Shape = tuple[int, ...]
Kind = Literal["replicated", "average", "columns", "rows", "halves"]

_UNKNOWN = (
    "convert it with DeepSpeed's ds_to_universal, or save it with DeepSpeed 0.19 or newer, which writes where each "
    "part belongs"
)
_MEGATRON: tuple[tuple[re.Pattern[str], Kind], ...] = (
    (re.compile(r".*(layernorm|layer_norm|norm)[^.]*\.(weight|bias)"), "replicated"),
    (re.compile(r".*(attention\.dense|dense_4h_to_h|out_proj)\.weight"), "columns"),
    (re.compile(r".*(attention\.dense|dense_4h_to_h|out_proj)\.bias"), "replicated"),
    (re.compile(r".*(query_key_value|query|key_value|dense_h_to_4h)\.(weight|bias)"), "rows"),
    (re.compile(r".*(word_embeddings|lm_head|output_layer|embed)\.weight"), "rows"),
    (re.compile(r".*position_embeddings\.weight"), "replicated"),
)
"""Last resort: names of Megatron-DeepSpeed's layers (ds_to_universal's defaults for GPT and Llama)."""
_WHOLE = re.compile(r".*(\.deepspeed_moe\.gate\.wg|\.coefficient)\.weight|.*\.coefficient\.bias")
"""Modules of deepspeed.moe (moe/layer.py, sharded_moe.py), which every tensor-parallel rank holds whole."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Box `shape` of a rank's part at `dest` is the box of the whole tensor at `source`."""

    shape: Shape
    source: Shape
    dest: Shape


class TensorParallelRules:
    """The rules of one checkpoint."""

    def __init__(self, state: Mapping[Any, Any], ranks: int, where: str) -> None:
        info = state.get("universal_checkpoint_info")
        self._info: Mapping[Any, Any] = info if isinstance(info, dict) and not _RULES.isdisjoint(info) else {}
        self._ranks = ranks
        self._where = where
        affine = self._info.get("affine_map")
        params = affine.get("params") if isinstance(affine, dict) else None
        version = affine.get("version", _AFFINE_VERSION) if isinstance(affine, dict) else _AFFINE_VERSION
        if version != _AFFINE_VERSION:
            msg = f"{where}: its affine_map is of version {version!r:.40}, known is {_AFFINE_VERSION}"
            raise UnsupportedError(msg, hint="convert it with DeepSpeed's ds_to_universal")
        self._affine = NamePatterns.of(params, where)
        self._lists = {name: NamePatterns.of(self._info.get(key), where) for name, key in _LISTS.items()}
        self._unsupported = NamePatterns.of(self._info.get("autotp_unsupported_parameter_patterns"), where)
        self._sub_params = NamePatterns.of(_sub_params(self._info.get("parameter_with_sub_params"), where), where)
        vocabulary = self._info.get("original_vocab_size")
        self._vocabulary = vocabulary if type(vocabulary) is int and vocabulary > 0 else 0

    def join(self, name: str, parts: Sequence[TensorRef]) -> TensorRef:
        """The whole tensor of what each rank holds under `name`."""
        first = parts[0]
        for part in parts[1:]:
            if part.dtype != first.dtype or len(part.shape) != len(first.shape):
                two = f"{first.dtype} {list(first.shape)} and {part.dtype} {list(part.shape)}"
                msg = f"{name} is {two} on two ranks of tensor parallelism"
                raise CorruptCheckpointError(msg, hint="files of two runs are mixed")
        placed = self._affine.find(name)
        if placed is not None:
            return self._placed(name, parts, placed)
        kind = self._kind(name)
        if kind in {"replicated", "average"}:
            return self._replicated(name, parts, averaged=kind == "average")
        if kind == "halves":
            return self._halves(name, parts)
        joined = _concatenated(name, parts, 1 if kind == "columns" else 0)
        if self._vocabulary and self._matches("vocabulary", name):
            return first_rows(joined, self._vocabulary)
        return joined

    def _matches(self, kind: str, name: str) -> bool:
        return self._lists[kind].find(name) is not None

    def _kind(self, name: str) -> Kind:
        if _WHOLE.fullmatch(name):
            return "replicated"
        if not self._info:
            for pattern, kind in _MEGATRON:
                if pattern.fullmatch(name):
                    return kind
            msg = (
                f"{self._where}: nothing tells how {name} was cut over {self._ranks} tensor-parallel ranks "
                "(universal_checkpoint_info is missing or says nothing of it, "
                "and the name is none of Megatron-DeepSpeed's)"
            )
            raise UnsupportedError(msg, hint=_UNKNOWN)
        if self._sub_params.find(name) is not None:
            msg = f"{self._where}: {name} is made of sub-parameters that were cut one by one"
            raise UnsupportedError(msg, hint=_UNKNOWN)
        if self._unsupported.find(name) is not None:
            msg = f"{self._where}: DeepSpeed itself says that the parts of {name} cannot be joined"
            raise UnsupportedError(msg, hint="export the model from the training script")
        for kind in ("replicated", "average", "halves", "columns"):
            if self._matches(kind, name):
                return kind
        return "rows"

    def _placed(self, name: str, parts: Sequence[TensorRef], value: object) -> TensorRef:
        placed = value if isinstance(value, dict) else {}
        shape = _shape(placed.get("logical_shape"))
        ranks = placed.get("ranks")
        if shape is None or not isinstance(ranks, dict):
            raise self._malformed(name)
        tables: list[ShardTable] = []
        for rank, part in enumerate(parts):
            entry = ranks.get(rank, ranks.get(str(rank)))
            if not isinstance(entry, dict) or _shape(entry.get("shard_shape")) != part.shape:
                raise self._malformed(name)
            pieces = entry.get("pieces")
            for record in pieces if isinstance(pieces, (list, tuple)) else ():
                if isinstance(record, dict) and (more := set(record) - _PIECE_KEYS):
                    msg = f"{self._where}: a part of {name} is described with {listed(sorted(map(str, more)), most=3)}"
                    raise UnsupportedError(
                        f"{msg} (a rank holds it scaled, perhaps)", hint="convert it with DeepSpeed's ds_to_universal"
                    )
                piece = _piece(record, shape, part.shape)
                locations = _shape(record.get("locations")) if isinstance(record, dict) else None
                if piece is None or locations is None:
                    raise self._malformed(name)
                if not locations or min(locations) == rank:
                    tables.append(self._cut(name, part, piece))
        return TensorRef(name, parts[0].dtype, shape, stacked(tables, len(shape)), stored=parts[0].stored)

    def _cut(self, name: str, part: TensorRef, piece: _Piece) -> ShardTable:
        """The piece of a rank's part, at its place in the whole tensor."""
        whole = all(d == 0 and n == m for d, n, m in zip(piece.dest[1:], piece.shape[1:], part.shape[1:], strict=True))
        if not piece.shape:
            return part.shards
        if not whole:
            msg = f"{self._where}: the part of {name} on a rank is put together from columns, which is not known here"
            raise UnsupportedError(msg, hint="convert it with DeepSpeed's ds_to_universal")
        rows = rows_of(part.shards, piece.dest[0], piece.dest[0] + piece.shape[0], part.on_disk.itemsize)
        return moved(rows, piece.source)

    def _replicated(self, name: str, parts: Sequence[TensorRef], *, averaged: bool) -> TensorRef:
        first = parts[0]
        for part in parts[1:]:
            if part.shape != first.shape:
                two = f"{list(first.shape)} and {list(part.shape)}"
                msg = f"{name} has the shapes {two} on two ranks, but each should hold it whole"
                raise CorruptCheckpointError(msg, hint="files of two runs are mixed")
        if averaged:
            msg = f"{self._where}: {name} is to be averaged over the tensor-parallel ranks"
            raise UnsupportedError(msg, hint="convert it with DeepSpeed's ds_to_universal")
        copies = stacked([part.shards for part in parts[1:]], len(first.shape))
        return TensorRef(name, first.dtype, first.shape, first.shards, copies if len(copies) else None, first.stored)

    def _halves(self, name: str, parts: Sequence[TensorRef]) -> TensorRef:
        """Each rank holds [a_r; b_r]: first all of a, then all of b."""
        tables: list[ShardTable] = []
        total = sum(part.shape[0] for part in parts)
        if any(part.shape[0] % 2 for part in parts):
            raise self._malformed(name)
        at = 0
        for part in parts:
            half, size = part.shape[0] // 2, part.on_disk.itemsize
            rest = (0,) * (len(part.shape) - 1)
            tables.append(moved(rows_of(part.shards, 0, half, size), (at, *rest)))
            tables.append(moved(rows_of(part.shards, half, 2 * half, size), (total // 2 + at, *rest)))
            at += half
        shape = (total, *parts[0].shape[1:])
        return TensorRef(name, parts[0].dtype, shape, stacked(tables, len(shape)), stored=parts[0].stored)

    def _malformed(self, name: str) -> CorruptCheckpointError:
        msg = f"{self._where}: what it says about the places of {name} contradicts the tensors"
        return CorruptCheckpointError(msg, hint="files of two runs are mixed, or the file is damaged")


_LISTS = {
    "replicated": "tp_replicated_parameter_patterns",
    "average": "parameter_to_average_patterns",
    "columns": "parameter_with_row_parallelism_patterns",
    "halves": "parameter_with_2_sub_params_cat_dim_0",
    "vocabulary": "vocabulary_parameter_patterns",
}
_RULES = {"affine_map", *_LISTS.values()}
_AFFINE_VERSION = 1
_PIECE_KEYS = {"shape", "source", "dest", "locations"}


def _sub_params(described: object, where: str) -> list[object]:
    """All patterns of parameters that are made of several: [{"patterns": [...], ...}, ...]."""
    entries = described if isinstance(described, (list, tuple)) else [] if described is None else [described]
    found: list[object] = []
    for entry in entries:
        patterns = entry.get("patterns") if isinstance(entry, dict) else None
        if not isinstance(patterns, (list, tuple)):
            msg = f"{where}: an entry of parameter_with_sub_params is {repr(entry)[:60]}"
            raise CorruptCheckpointError(msg, hint="the file is damaged, or was written by an unknown DeepSpeed")
        found += patterns
    return found


def _shape(value: object) -> Shape | None:
    if isinstance(value, (list, tuple)) and all(type(n) is int and n >= 0 for n in value):
        return tuple(value)
    return None


def _piece(record: object, whole: Shape, part: Shape) -> _Piece | None:
    if not isinstance(record, dict):
        return None
    shape = _shape(record.get("shape"))
    source, dest = _start(record.get("source"), whole), _start(record.get("dest"), part)
    if shape is None or source is None or dest is None or len(shape) != len(whole):
        return None
    for start, room in ((source, whole), (dest, part)):
        if any(a + n > m for a, n, m in zip(start, shape, room, strict=True)):
            return None
    return _Piece(shape, source, dest)


def _start(value: object, shape: Shape) -> Shape | None:
    """The index of an element offset with row-major strides."""
    if not isinstance(value, (list, tuple)) or len(value) != 2 or type(value[0]) is not int:
        return None
    strides = _shape(value[1])
    if strides != row_major_strides(shape) or not 0 <= value[0] < max(math.prod(shape), 1):
        return None
    rest, index = value[0], []
    for stride in strides:
        index.append(rest // stride if stride else 0)
        rest -= index[-1] * stride
    return tuple(index)


def _concatenated(name: str, parts: Sequence[TensorRef], dim: int) -> TensorRef:
    first = parts[0]
    if len(first.shape) <= dim:
        msg = f"{name} {list(first.shape)} should be cut along dim {dim}, which it does not have"
        raise CorruptCheckpointError(msg, hint="files of two runs are mixed")
    tables: list[ShardTable] = []
    at = 0
    for part in parts:
        others = [k for k in range(len(first.shape)) if k != dim and part.shape[k] != first.shape[k]]
        if others:
            msg = (
                f"{name}: ranks hold {list(first.shape)} and {list(part.shape)}, which cannot be joined along dim {dim}"
            )
            raise CorruptCheckpointError(msg, hint="files of two runs are mixed")
        by = [0] * len(first.shape)
        by[dim] = at
        tables.append(moved(part.shards, by))
        at += part.shape[dim]
    shape = (*first.shape[:dim], at, *first.shape[dim + 1 :])
    return TensorRef(name, first.dtype, shape, stacked(tables, len(shape)), stored=first.stored)
