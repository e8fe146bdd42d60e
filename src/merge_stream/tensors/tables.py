"""Moving and cutting shard tables: what joining parts of a tensor comes down to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from merge_stream.tensors.ref import ShardTable, TensorRef

__all__ = ["deeper", "first_rows", "moved", "rows_of", "stacked"]


def moved(table: ShardTable, by: Sequence[int] | np.ndarray) -> ShardTable:
    """The same shards, `by` further along each dim."""
    shift = np.array(by, dtype=np.int64)
    return ShardTable(table.start + shift, table.stop + shift, table.file, table.offset)


def deeper(table: ShardTable, index: int) -> ShardTable:
    """The same shards one dim deeper, at `index` of the new leading dim."""
    lead = np.full((len(table), 1), index, dtype=np.int64)
    return ShardTable(np.hstack([lead, table.start]), np.hstack([lead + 1, table.stop]), table.file, table.offset)


def rows_of(table: ShardTable, start: int, stop: int, itemsize: int) -> ShardTable:
    """What the table holds of rows [start, stop) of the leading dim, which becomes rows [0, stop - start).

    Rows are the outermost dim of every shard, so a part of them is contiguous again.
    """
    low = np.maximum(table.start[:, 0], start)
    high = np.minimum(table.stop[:, 0], stop)
    met = low < high
    inner = np.prod(table.stop[met, 1:] - table.start[met, 1:], axis=1, dtype=np.int64)
    skipped = (low[met] - table.start[met, 0]) * inner * itemsize
    begin, end = table.start[met].copy(), table.stop[met].copy()
    begin[:, 0], end[:, 0] = low[met] - start, high[met] - start
    return ShardTable(begin, end, table.file[met], table.offset[met] + skipped)


def stacked(tables: Sequence[ShardTable], ndim: int) -> ShardTable:
    """All rows of the tables."""
    if not tables:
        return ShardTable.of([], ndim)
    return ShardTable(
        np.concatenate([table.start for table in tables]),
        np.concatenate([table.stop for table in tables]),
        np.concatenate([table.file for table in tables]),
        np.concatenate([table.offset for table in tables]),
    )


def first_rows(tensor: TensorRef, rows: int) -> TensorRef:
    """The tensor without the rows behind the first `rows`: the padding of a vocabulary."""
    if tensor.shape[0] <= rows:
        return tensor
    size = tensor.on_disk.itemsize
    copies = rows_of(tensor.replicas, 0, rows, size) if tensor.replicas is not None else None
    shape = (rows, *tensor.shape[1:])
    return TensorRef(tensor.name, tensor.dtype, shape, rows_of(tensor.shards, 0, rows, size), copies, tensor.stored)
