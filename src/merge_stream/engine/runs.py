"""Where a box of a tensor lies in the boxes that its shards hold, for all rows of a shard table at once.

A *run* is a region whose elements stand one after another, both in the shard that holds it and in the tile that
it goes to, so that one read puts it where it belongs. A model has hundreds of thousands of small ones: this is numpy
arithmetic over rows, not Python for each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from merge_stream.tensors.box import Box
from merge_stream.tensors.ref import ShardTable

__all__ = ["Regions", "Runs", "regions_of", "runs_in"]


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


def regions_of(table: ShardTable, wanted: Box) -> Regions:
    """The rows of the table that meet `wanted`, and what each has in common with it."""
    start = np.maximum(table.start, np.array(wanted.start, dtype=np.int64))
    stop = np.minimum(table.stop, np.array(wanted.stop, dtype=np.int64))
    rows = (start < stop).all(axis=1).nonzero()[0]
    return Regions(rows, start, stop) if len(rows) == len(start) else Regions(rows, start[rows], stop[rows])


def runs_in(table: ShardTable, regions: Regions, moved: np.ndarray, shape: tuple[int, ...]) -> Runs:
    """How the regions lie in their shards, and in a tile of `shape`; `moved` leads from the source to the tile."""
    rows, start, stop = regions
    met = slice(None) if len(rows) == len(table) else rows
    held_start, held_stop = table.start[met], table.stop[met]
    origin, straight = _places(start, stop, held_start, held_stop - held_start)
    target, straight_there = _places(start + moved, stop + moved, 0, np.array([shape], dtype=np.int64))
    return Runs(straight & straight_there, origin, target, (stop - start).prod(axis=1))


def _places(
    start: np.ndarray, stop: np.ndarray, origin: np.ndarray | int, shape: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The first element of each region in a row-major array of `shape` at `origin`, and whether it is one run there."""
    strides = np.ones_like(shape)
    np.cumprod(shape[:, :0:-1], axis=1, out=strides[:, -2::-1])
    first = ((start - origin) * strides).sum(axis=1)
    span = ((stop - start - 1) * strides).sum(axis=1) + 1
    return first, span == (stop - start).prod(axis=1)
