"""From names to bytes: a parameter's takes joined with the shard tables of the catalog.

Here every source tensor used is proved to be tiled by its shards, and every parameter by
its takes, before anything is planned on top of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from merge_stream.errors import CorruptCheckpointError, IncompleteShardsError, UnsupportedError
from merge_stream.planning.coverage import tiling_fault
from merge_stream.planning.plan import Assembly, LowRank, ResolvedTake, Scaled
from merge_stream.tensors.box import Box, boxes_of_range
from merge_stream.tensors.parameter import Parameter, Take
from merge_stream.tensors.ref import Catalog, ShardTable, TensorRef

__all__ = ["check_shards", "resolve", "split_leading_dim"]

_AT_ONCE = 1 << 16  # rows of tables that are looked at together
_LARGEST_OF_NOTHING = 1 << 24
"""Rules that unstack a tensor look at each index of a dim, so an empty tensor may not claim 10**18 of them."""


def check_shards(catalog: Catalog, names: Iterable[str]) -> None:
    """Raise unless the shards of each named tensor tile it exactly and lie inside their files.

    IncompleteShardsError when a region is in no shard, CorruptCheckpointError when shards
    overlap, leave the tensor, or reach beyond the end of a file.
    """
    sizes = np.array([f.nbytes for f in catalog.files], dtype=np.int64)
    tiled: set[tuple[int, int, tuple[int, ...]]] = set()  # tensors of one layout share the arrays of their boxes
    alike: dict[tuple[int, int, int], list[tuple[TensorRef, ShardTable]]] = {}
    for name in names:
        tensor = catalog.tensors[name]
        table = tensor.shards
        if not tensor.size and max(tensor.shape, default=0) > _LARGEST_OF_NOTHING:
            msg = f"{name} has the shape {list(tensor.shape)}: no elements, and a dim that no model has"
            raise CorruptCheckpointError(msg, hint="the file is damaged: copy it again")
        boxes = (id(table.start), id(table.stop), tensor.shape)
        fault = None if boxes in tiled else tiling_fault(tensor.shape, table.start, table.stop)
        tiled.add(boxes)
        if fault is not None:
            where = f"{name} {list(tensor.shape)} {tensor.dtype}: {fault}; {_holders(catalog, tensor)}"
            if "in no shard" in fault or "cover" in fault or "no shard holds" in fault:
                raise IncompleteShardsError(
                    where, hint="a shard file is missing or stale: pass all files of one save (several --input folders)"
                )
            raise CorruptCheckpointError(
                where, hint="the shards contradict each other; files of two saves may be mixed"
            )
        for part in (table, tensor.replicas):
            if part is not None and len(part):
                key = (id(part.start), id(part.stop), tensor.on_disk.itemsize)
                together = alike.setdefault(key, [])
                together.append((tensor, part))
                if len(together) * len(part) >= _AT_ONCE:
                    _check_alike(catalog, together, sizes)
                    together.clear()
    for together in alike.values():
        _check_alike(catalog, together, sizes)


def _check_alike(catalog: Catalog, tables: list[tuple[TensorRef, ShardTable]], sizes: np.ndarray) -> None:
    """Raise unless the extents of tables with the same boxes and item size lie inside their files."""
    if not tables:
        return
    tensor, table = tables[0]
    counts = np.prod(table.stop - table.start, axis=1, dtype=np.int64)
    offset = np.stack([other.offset for _, other in tables])
    room = (sizes[np.stack([other.file for _, other in tables])] - offset) // tensor.on_disk.itemsize
    if ((offset < 0) | (counts > room)).any():
        for tensor, table in tables:
            _check_extents(catalog, tensor, table, sizes)


def _check_extents(catalog: Catalog, tensor: TensorRef, table: ShardTable, sizes: np.ndarray) -> None:
    counts = np.prod(table.stop - table.start, axis=1, dtype=np.int64)
    room = (sizes[table.file] - table.offset) // tensor.on_disk.itemsize  # counts * itemsize could leave int64
    late = np.flatnonzero((table.offset < 0) | (counts > room))
    if len(late):
        k = int(late[0])
        file = catalog.files[int(table.file[k])]
        end = int(table.offset[k]) + int(counts[k]) * tensor.on_disk.itemsize
        msg = f"{tensor.name}: its shard in {file.name} ends at byte {end}, but the file has {file.nbytes}"
        raise CorruptCheckpointError(msg, hint="the file is cut: copy it again")


def _holders(catalog: Catalog, tensor: TensorRef) -> str:
    names = sorted({catalog.files[k].name for k in np.unique(tensor.shards.file).tolist()})
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"shards are in {shown}" if names else "no file holds a shard"


def resolve(catalog: Catalog, parameter: Parameter, folds: Mapping[str, LowRank | Scaled] | None = None) -> Assembly:
    """The parameter's takes over shard tables; raises when they do not tile it or mix element types.

    `folds` maps names of source tensors to the product that is added to them.
    """
    folds = folds or {}
    dtypes = {catalog.tensors[take.source].dtype for take in parameter.takes}
    if len(dtypes) != 1:
        names = ", ".join(f"{t.source} is {catalog.tensors[t.source].dtype}" for t in parameter.takes[:4])
        msg = f"{parameter.name} would be made of tensors of different types: {names or 'none at all'}"
        raise UnsupportedError(msg, hint="merge with --layout as-is, or save the model in one type")
    takes = tuple(
        _resolved(catalog.tensors[take.source], take, parameter, folds.get(take.source)) for take in parameter.takes
    )
    takes = tuple(take for take in takes if take.dest_box.size)  # a source without elements adds none
    fault = None
    if math.prod(parameter.view) != math.prod(parameter.shape):
        fault = f"its view {list(parameter.view)} has another number of elements"
    elif math.prod(parameter.shape) and not (len(takes) == 1 and takes[0].dest_box == Box.whole(parameter.view)):
        start = np.array([t.dest_box.start for t in takes], dtype=np.int64).reshape(len(takes), len(parameter.view))
        stop = np.array([t.dest_box.stop for t in takes], dtype=np.int64).reshape(len(takes), len(parameter.view))
        fault = tiling_fault(parameter.view, start, stop)
    if fault is not None:
        msg = f"{parameter.name} {list(parameter.shape)} is not made of its sources exactly once: {fault}"
        raise CorruptCheckpointError(
            msg, hint="the naming rules do not fit this model; --layout as-is merges it unnamed"
        )
    return Assembly(parameter.view, dtypes.pop(), takes)


def _resolved(tensor: TensorRef, take: Take, parameter: Parameter, fold: LowRank | Scaled | None) -> ResolvedTake:
    box = take.source_box
    plain = fold is None and not take.split and not take.permute
    if plain and box == take.dest_box and box.stop == tensor.shape and not any(box.start):  # nearly all of them
        return ResolvedTake(tensor.shards, box, box, (), None, tensor.stored)
    shape = (*take.split, *tensor.shape[1:]) if take.split else tensor.shape
    axes = take.permute or tuple(range(len(shape)))
    inside = (
        len(box.start) == len(shape)
        and sorted(axes) == list(range(len(shape)))
        and (not take.split or math.prod(take.split) == math.prod(tensor.shape[:1]))
        and all(0 <= a <= b <= n for a, b, n in zip(box.start, box.stop, shape, strict=True))
    )
    if not inside or tuple(box.shape[a] for a in axes) != take.dest_box.shape:
        msg = f"{parameter.name}: the rule takes {box} of {tensor.name} {list(tensor.shape)} for {take.dest_box}"
        raise CorruptCheckpointError(msg, hint="config.json and the tensors' shapes contradict each other")
    table = split_leading_dim(tensor.shards, take.split, tensor.on_disk.itemsize) if take.split else tensor.shards
    if fold is not None and take.split:
        msg = f"{parameter.name}: LoRA on a tensor whose rows are reordered cannot be folded"
        raise UnsupportedError(msg, hint="--lora keep writes model and adapter apart")
    return ResolvedTake(table, box, take.dest_box, take.permute, fold, tensor.stored)


def split_leading_dim(table: ShardTable, factors: tuple[int, ...], itemsize: int) -> ShardTable:
    """The same shards in the coordinates of a view that splits the leading dim in `factors`.

    A run of rows becomes at most 2n-1 boxes of the factors; each is again row-major from
    one offset, because rows are the outermost dim of the shard.
    """
    rows: list[tuple[Box, int, int]] = []
    for k in range(len(table)):
        box, file, offset = table.row(k)
        row_nbytes = math.prod(box.shape[1:]) * itemsize
        for part in boxes_of_range(factors, box.start[0], box.stop[0]):
            rows.append((Box((*part.start, *box.start[1:]), (*part.stop, *box.stop[1:])), file, offset))
            offset += part.size * row_nbytes
    return ShardTable.of(rows, len(factors) + table.start.shape[1] - 1)
