"""Where a box of a tensor lies in the boxes that its shards hold, for all rows of a shard table at once.

A *run* is a region whose elements stand one after another, both in the shard that holds it and in the tile that
it goes to, so that one read puts it where it belongs. A model has hundreds of thousands of small ones: this is numpy
arithmetic over rows, not Python for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from merge_stream.tensors.box import Box
from merge_stream.tensors.ref import ShardTable

__all__ = ["FewRows", "Regions", "Run", "Runs", "regions_of", "runs_in"]

Ints = tuple[int, ...]
_FEW = 16


class Regions(NamedTuple):
    """Rows of a shard table, and [start, stop) of a part of each (int64 [n, ndim])."""

    rows: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    def only(self, these: np.ndarray) -> Regions:
        """Those that a mask names."""
        return Regions(self.rows[these], self.start[these], self.stop[these])


class Runs(NamedTuple):
    """For each region: is it a run, its first element in the shard and in the tile, its elements."""

    straight: np.ndarray
    origin: np.ndarray
    target: np.ndarray
    elements: np.ndarray


class Run(NamedTuple):
    """A region that is one run: its file, and byte offset there; its first byte in the tile, its bytes."""

    file: int
    offset: int
    target: int
    nbytes: int


class FewRows:
    """A shard table of few rows as plain numbers: for those, a dozen calls of numpy take longer than the numbers."""

    __slots__ = ("_rows", "table")

    def __init__(self, table: ShardTable) -> None:
        self.table = table
        columns = (table.start.tolist(), table.stop.tolist(), table.file.tolist(), table.offset.tolist())
        self._rows = list(zip(*columns, strict=True))

    @staticmethod
    def can(table: ShardTable) -> bool:
        """True when the table is small enough to gain from it."""
        return len(table) <= _FEW

    def runs(self, wanted: Box, moved: Ints, shape: Ints, itemsize: int) -> list[Run] | None:
        """What the rows have in common with `wanted`; None unless all of it are runs (see `runs_in`)."""
        found = []
        dims = range(len(shape) - 1, -1, -1)
        low, high = wanted.start, wanted.stop
        for held_start, held_stop, file, offset in self._rows:
            origin = target = last = last_there = 0
            size = step = step_there = 1
            for k in dims:
                start, stop = max(low[k], held_start[k]), min(high[k], held_stop[k])
                extent = stop - start
                if extent <= 0:
                    break
                origin += (start - held_start[k]) * step
                target += (start + moved[k]) * step_there
                last += (extent - 1) * step
                last_there += (extent - 1) * step_there
                size *= extent
                step *= held_stop[k] - held_start[k]
                step_there *= shape[k]
            else:
                if not last + 1 == size == last_there + 1:
                    return None
                found.append(Run(file, offset + origin * itemsize, target * itemsize, size * itemsize))
        return found


def regions_of(table: ShardTable, wanted: Box) -> Regions:
    """The rows of the table that meet `wanted`, and what each has in common with it."""
    start = np.maximum(table.start, np.array(wanted.start, dtype=np.int64))
    stop = np.minimum(table.stop, np.array(wanted.stop, dtype=np.int64))
    rows = (start < stop).all(axis=1).nonzero()[0]
    return Regions(rows, start, stop) if len(rows) == len(start) else Regions(rows, start[rows], stop[rows])


def runs_in(table: ShardTable, regions: Regions, moved: Sequence[int], shape: tuple[int, ...]) -> Runs:
    """How the regions lie in their shards, and in a tile of `shape`; `moved` leads from the source to the tile."""
    rows, start, stop = regions
    met = slice(None) if len(rows) == len(table) else rows
    held_start, held_stop = table.start[met], table.stop[met]
    by = np.array(moved, dtype=np.int64)
    origin, in_shard = _places(start, stop, held_start, held_stop - held_start)
    target, in_tile = _places(start + by, stop + by, 0, np.array([shape], dtype=np.int64))
    return Runs(in_shard & in_tile, origin, target, (stop - start).prod(axis=1))


def _places(
    start: np.ndarray, stop: np.ndarray, origin: np.ndarray | int, shape: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The first element of each region in a row-major array of `shape` at `origin`, and whether it is one run there."""
    strides = np.ones_like(shape)
    np.cumprod(shape[:, :0:-1], axis=1, out=strides[:, -2::-1])
    first = ((start - origin) * strides).sum(axis=1)
    span = ((stop - start - 1) * strides).sum(axis=1) + 1
    return first, span == (stop - start).prod(axis=1)
