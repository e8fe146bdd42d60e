"""The plan cut in units of work, in output order.

A *tile* is a contiguous box of one parameter: leading dims of extent one, one dim with a
range, all further dims whole. A *segment* is a run of neighbouring tiles of one output
file, at most `segment_bytes` of source (and of output) bytes, so it is read, encoded and
written as one. Segments tile the data section of every file; the journal speaks of byte
ranges, never of segments, so a resumed run may cut differently.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from merge_stream.planning.plan import ParameterPlan, Plan
from merge_stream.tensors.box import Box

__all__ = ["Segment", "Tile", "segments_of", "tiles_of"]


@dataclass(frozen=True, slots=True)
class Tile:
    """A contiguous box of parameter `parameter` (index), in the coordinates of its view.

    `start` is its byte offset in the output file.
    """

    parameter: int
    box: Box
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes [start, stop) of output file `output`, made of neighbouring tiles."""

    output: int
    start: int
    stop: int
    tiles: tuple[Tile, ...]


def tiles_of(view: tuple[int, ...], most: int) -> Iterator[Box]:
    """Cut `view` into contiguous boxes of at most `most` elements (at least one), in row-major order."""
    if math.prod(view) == 0:
        return
    if math.prod(view) <= most:
        yield Box.whole(view)
        return
    axis = len(view) - 1
    inner = 1
    while axis > 0 and inner * view[axis] <= most:
        inner *= view[axis]
        axis -= 1
    rows = max(most // inner, 1)
    rows = -(-view[axis] // -(-view[axis] // rows))  # equal tiles instead of a short last one
    outer = view[:axis]
    tail_start, tail_stop = (0,) * (len(view) - axis - 1), view[axis + 1 :]
    for flat in range(math.prod(outer)):
        index, rest = [], flat
        for extent in reversed(outer):
            rest, k = divmod(rest, extent)
            index.append(k)
        lead = tuple(reversed(index))
        for low in range(0, view[axis], rows):
            high = min(low + rows, view[axis])
            yield Box((*lead, low, *tail_start), (*(k + 1 for k in lead), high, *tail_stop))


def segments_of(plan: Plan, segment_bytes: int) -> Iterator[Segment]:
    """All segments in output order; each costs at most `segment_bytes` of source and of output bytes."""
    for number, output in enumerate(plan.outputs):
        tiles: list[Tile] = []
        cost = 0
        for index in output.parameters:
            parameter = plan.parameters[index]
            for tile in _tiles(index, parameter, segment_bytes):
                price = _cost(parameter, tile)
                if tiles and cost + price > segment_bytes:
                    yield _segment(number, tiles)
                    tiles, cost = [], 0
                tiles.append(tile)
                cost += price
        if tiles:
            yield _segment(number, tiles)


def _tiles(index: int, parameter: ParameterPlan, segment_bytes: int) -> Iterator[Tile]:
    width = max(parameter.dtype.itemsize, parameter.source.dtype.itemsize)
    at = parameter.start
    for box in tiles_of(parameter.source.view, max(segment_bytes // width, 1)):
        nbytes = box.size * parameter.dtype.itemsize
        yield Tile(index, box, at, nbytes)
        at += nbytes


def _cost(parameter: ParameterPlan, tile: Tile) -> int:
    """Bytes of the larger side, rounded up as the lease rounds."""
    width = max(parameter.dtype.itemsize, parameter.source.dtype.itemsize)
    return -(-tile.box.size * width // 64) * 64


def _segment(output: int, tiles: list[Tile]) -> Segment:
    return Segment(output, tiles[0].start, tiles[-1].start + tiles[-1].nbytes, tuple(tiles))
