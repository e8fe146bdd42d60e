"""Region algebra: half-open boxes of an n-d tensor, pure and exact.

One concept serves every layout. A shard of a device mesh is a box; a flat range of a
flattened parameter (FSDP1, ZeRO) splits into at most 2n-1 boxes; a piece of work is a
box that is contiguous in the row-major order of its tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Box", "boxes_of_range", "row_major_strides"]

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """Half-open region `start[k] <= i_k < stop[k]`; zero dims is the one element of a scalar."""

    start: Ints
    stop: Ints

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """The box of a whole tensor of `shape`."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> Ints:
        """Extent in each dim, never negative."""
        return tuple([b - a if b > a else 0 for a, b in zip(self.start, self.stop, strict=True)])

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __and__(self, other: Box) -> Box | None:
        """The common region, or None when there is none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return None if any(a >= b for a, b in zip(start, stop, strict=True)) else Box(start, stop)

    def shifted(self, by: Sequence[int]) -> Box:
        """The box moved by `by` (negative moves towards the origin)."""
        return Box(
            tuple(a + d for a, d in zip(self.start, by, strict=True)),
            tuple(b + d for b, d in zip(self.stop, by, strict=True)),
        )

    def slices(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """Index of this box in an array whose element 0 stands at `origin`."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, origin, strict=True))


def row_major_strides(shape: Sequence[int]) -> Ints:
    """Element strides of a contiguous array of `shape`."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cut the flat row-major range [start, stop) of a tensor into boxes, in order.

    Each box is contiguous in the tensor, the boxes follow one another without a gap, and
    there are at most 2n-1 of them. An empty range gives none.

    >>> [b.start + b.stop for b in boxes_of_range((3, 4), 2, 9)]
    [(0, 2, 1, 4), (1, 0, 2, 4), (2, 0, 3, 1)]
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    if first == last:
        for box in boxes_of_range(shape[1:], start - first * inner, stop - first * inner):
            yield Box((first, *box.start), (first + 1, *box.stop))
        return
    if start > first * inner:
        yield from boxes_of_range(shape, start, (first + 1) * inner)
        first += 1
    whole_stop = stop // inner
    if whole_stop > first:
        yield Box((first, *(0,) * (len(shape) - 1)), (whole_stop, *shape[1:]))
    if stop > whole_stop * inner:
        yield from boxes_of_range(shape, whole_stop * inner, stop)
