"""Flat ranges of tensors as shard tables: ZeRO partitions, vectorised.

A partition of a flattened tensor holds the elements [lo, hi) in row-major order. Such a range is
at most 2n-1 boxes, each contiguous in the tensor (`boxes_of_range` says the same for one range);
here all ranges of a tensor are cut at once, since 512 ranks times 1000 tensors is too many for
Python objects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from merge_stream.tensors.ref import ShardTable

__all__ = ["Ranges", "table_of_ranges"]

Ints = np.ndarray


class Ranges:
    """Parallel columns: elements [lo, hi) of a tensor lie in `file` from byte `offset`."""

    __slots__ = ("file", "hi", "lo", "offset")

    def __init__(
        self,
        lo: Sequence[int] | Ints,
        hi: Sequence[int] | Ints,
        file: Sequence[int] | Ints,
        offset: Sequence[int] | Ints,
    ) -> None:
        self.lo, self.hi, self.offset = (np.asarray(column, dtype=np.int64) for column in (lo, hi, offset))
        self.file = np.asarray(file, dtype=np.int32)


def table_of_ranges(shape: tuple[int, ...], ranges: Ranges, itemsize: int) -> ShardTable:
    """The shard table of a tensor that is stored in flat ranges; empty ranges give no row."""
    kept = np.flatnonzero(ranges.hi > ranges.lo)
    parts: list[tuple[Ints, ...]] = []
    none = np.zeros((len(kept), 0), dtype=np.int64)
    _cut(shape, ranges.lo[kept], ranges.hi[kept], none, np.zeros(len(kept), dtype=np.int64), kept, parts)
    if not parts:
        return ShardTable.of([], len(shape))
    start, stop, skipped, row = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((skipped, row))
    row = row[order]
    return ShardTable(start[order], stop[order], ranges.file[row], ranges.offset[row] + skipped[order] * itemsize)


def _cut(  # noqa: PLR0917 - parallel columns
    shape: tuple[int, ...], lo: Ints, hi: Ints, lead: Ints, skipped: Ints, row: Ints, parts: list[tuple[Ints, ...]]
) -> None:
    """Cut ranges [lo, hi) of `shape` below the index `lead`; `skipped` elements of the range came before."""
    if not len(lo):
        return
    if len(shape) < 2:
        column = (slice(None), None)
        start = np.hstack([lead, lo[column]]) if shape else lead
        stop = np.hstack([lead + 1, hi[column]]) if shape else lead + 1
        parts.append((start, stop, skipped, row))
        return
    inner = math.prod(shape[1:])
    first, last = lo // inner, (hi - 1) // inner
    base = first * inner
    one = first == last
    heads = ~one & (lo > base)
    for chosen, stops in ((one, hi - base), (heads, np.full_like(hi, inner))):
        _cut(
            shape[1:], (lo - base)[chosen], stops[chosen], np.hstack([lead, first[:, None]])[chosen], skipped[chosen],
            row[chosen], parts,
        )  # fmt: skip
    first = first + heads
    whole = hi // inner
    bodies = ~one & (whole > first)
    tail_shape = np.broadcast_to(np.array(shape[1:], dtype=np.int64), (len(lo), len(shape) - 1))
    parts.append(
        (
            np.hstack([lead, first[:, None], np.zeros_like(tail_shape)])[bodies],
            np.hstack([lead + 1, whole[:, None], tail_shape])[bodies],
            (skipped + first * inner - lo)[bodies],
            row[bodies],
        )
    )
    tails = ~one & (hi > whole * inner)
    _cut(
        shape[1:], np.zeros_like(lo)[tails], (hi - whole * inner)[tails], np.hstack([lead, whole[:, None]])[tails],
        (skipped + whole * inner - lo)[tails], row[tails], parts,
    )  # fmt: skip
