"""Many small extents, read together: one positioned read covers all that lie near each other in a file.

A model can have tens of thousands of small tensors, each cut in as many extents as there were ranks, and a read of
128 bytes costs as much as one of 4 KiB. So the extents of neighbouring tiles are collected, sorted by their place, and
each stretch without a gap larger than `SEEK` is read once and handed out. What it is read into is part of the lease,
and the tables of extents are bounded (`_MOST_EXTENTS`, `_MOST_KEPT`), so memory does not depend on how small the
tensors are, or how many ranks they were cut over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from merge_stream.engine.budget import Lease
from merge_stream.engine.runs import regions_of, runs_in
from merge_stream.planning.plan import ResolvedTake
from merge_stream.tensors.ref import ShardTable

__all__ = ["SEEK", "JointReads"]

SEEK = 4096
"""Reading so many bytes costs as much as another read."""

_MOST_EXTENTS = 8192
_MOST_NBYTES = 512 << 10
_MOST_KEPT = 1 << 20
"""Bytes of layouts that are kept, about."""
_OBJECTS = 1 << 10


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """Rows of a shard table whose regions are runs in shard and parameter alike; places and sizes in elements."""

    rows: np.ndarray | slice
    origin: np.ndarray
    target: np.ndarray
    count: np.ndarray

    @property
    def nbytes(self) -> int:
        rows = 0 if isinstance(self.rows, slice) else self.rows.nbytes
        return rows + self.origin.nbytes + self.target.nbytes + self.count.nbytes


class JointReads:
    """The extents of whole small parameters that wait to be read; one for each worker.

    `apart` are the files (indexes) of which nothing may be read that no tile wants.
    """

    def __init__(self, read: Callable[[int, int, np.ndarray], None], apart: frozenset[int]) -> None:
        self._read = read
        self._apart = apart
        self._layouts: dict[tuple[object, ...], _Layout | None] = {}
        self._kept = 0
        self._waiting: list[tuple[ShardTable, _Layout, int, int]] = []
        self._extents = 0

    @property
    def full(self) -> bool:
        """So many extents wait that they should be read."""
        return self._extents >= _MOST_EXTENTS

    @staticmethod
    def most(lease: Lease) -> int:
        """Bytes of the largest parameter that may wait, when `lease` is what is left for the reads."""
        return min(lease.left // 2, _MOST_NBYTES)

    def add(self, takes: Sequence[ResolvedTake], view: tuple[int, ...], itemsize: int, at: int) -> bool:
        """Let the extents of a whole parameter wait, to be read to byte `at`; False when they are no plain runs."""
        found = []
        for take in takes:
            if take.permute or take.fold is not None or take.stored is not None:
                return False
            layout = self._layout(take, view)
            if layout is None:
                return False
            found.append((take.table, layout, itemsize, at))
        self._waiting += found
        self._extents += sum(len(layout.count) for _, layout, _, _ in found)
        return True

    def read(self, values: np.ndarray, lease: Lease) -> None:
        """Read everything that waits into `values` (uint8)."""
        if not self._waiting:
            return
        file, offset, target, nbytes = self._sorted()
        self._waiting.clear()
        self._extents = 0
        stop = offset + nbytes
        block = offset // self.most(lease)
        cuts = (file[1:] != file[:-1]) | (offset[1:] - stop[:-1] > SEEK) | (block[1:] != block[:-1])
        if self._apart:
            cuts |= np.array([k in self._apart for k in file[1:].tolist()], dtype=bool)
        firsts = np.concatenate(([0], np.flatnonzero(cuts) + 1))
        ends = np.maximum.reduceat(stop, firsts).tolist()
        files, begins = file[firsts].tolist(), offset[firsts].tolist()
        bounds = [*firsts.tolist(), len(file)]
        into = values.data
        targets, sizes, offsets = target.tolist(), nbytes.tolist(), offset.tolist()
        for k, (number, begin, end) in enumerate(zip(files, begins, ends, strict=True)):
            low, high = bounds[k], bounds[k + 1]
            if high - low == 1:
                self._read(number, begin, values[targets[low] : targets[low] + sizes[low]])
                continue
            mark = lease.mark
            stretch = lease.take(end - begin)
            self._read(number, begin, stretch)
            data = stretch.data
            for there, size, place in zip(targets[low:high], sizes[low:high], offsets[low:high], strict=True):
                into[there : there + size] = data[place - begin : place - begin + size]
            lease.rewind(mark)

    def _sorted(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(file, offset, target, nbytes) of all extents, in the order of their places."""
        tables, layouts, itemsizes, ats = zip(*self._waiting, strict=True)
        lengths = [len(layout.count) for layout in layouts]
        itemsize = np.repeat(np.array(itemsizes, dtype=np.int64), lengths)
        file = np.concatenate([table.file[layout.rows] for table, layout in zip(tables, layouts, strict=True)])
        offset = np.concatenate([table.offset[layout.rows] for table, layout in zip(tables, layouts, strict=True)])
        offset = offset + np.concatenate([layout.origin for layout in layouts]) * itemsize
        target = np.concatenate([layout.target for layout in layouts]) * itemsize
        target += np.repeat(np.array(ats, dtype=np.int64), lengths)
        nbytes = np.concatenate([layout.count for layout in layouts]) * itemsize
        order = np.lexsort((offset, file))
        return file[order], offset[order], target[order], nbytes[order]

    def _layout(self, take: ResolvedTake, view: tuple[int, ...]) -> _Layout | None:
        """Parameters with equal boxes have equal places in a parameter: looked up once."""
        table = take.table
        key = (
            table.start.tobytes(),
            table.stop.tobytes(),
            take.source_box.start,
            take.source_box.stop,
            take.dest_box.start,
            view,
        )
        try:
            return self._layouts[key]
        except KeyError:
            layout = _layout_of(take, view)
            nbytes = table.start.nbytes + table.stop.nbytes + (layout.nbytes if layout else 0) + _OBJECTS
            if self._kept + nbytes > _MOST_KEPT:
                self._layouts.clear()
                self._kept = 0
            self._layouts[key] = layout
            self._kept += nbytes
            return layout


def _layout_of(take: ResolvedTake, view: tuple[int, ...]) -> _Layout | None:
    regions = regions_of(take.table, take.source_box)
    moved = [there - here for there, here in zip(take.dest_box.start, take.source_box.start, strict=True)]
    found = runs_in(take.table, regions, moved, view)
    if not found.straight.all():
        return None
    rows = slice(None) if len(regions.rows) == len(take.table) else regions.rows
    return _Layout(rows, found.origin, found.target, found.elements)
