"""The plan cut in units of work.

A *tile* is a contiguous box of one parameter: leading dims of extent one, one dim with a
range, all further dims whole. A *segment* is a run of neighbouring tiles of one output
file, at most `segment_bytes` of source (and of output) bytes, so it is read, encoded and
written as one. Segments tile the data section of every file; the journal speaks of byte
ranges, never of segments, so a resumed run may cut differently. A parameter with bands is cut
between bands only; a band of rows that is no box of the parameter's view is several tiles. A
quantized parameter has segments of its own, which fill the spans of its scales as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from merge_stream.planning.plan import OutputFile, ParameterPlan, Plan
from merge_stream.tensors.box import Box, boxes_of_range

__all__ = ["Segment", "Span", "Tile", "largest_band", "most_columns", "segments_of", "tiles_of"]


@dataclass(frozen=True, slots=True)
class Tile:
    """A contiguous box of parameter `parameter` (index), in the coordinates of its view.

    `start` is its byte offset in the output file, `room` the bytes there that belong to it:
    its own `nbytes`, and behind them what whoever writes it adds (zeros so far). Tiles of a
    quantized parameter, whose codes may be packed, all have the place of their segment.
    """

    parameter: int
    box: Box
    start: int
    nbytes: int
    room: int


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [start, stop) of output file `output`."""

    output: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes [start, stop) of output file `output`, made of neighbouring tiles.

    Of a `quantized` parameter they hold codes; `scales` are then the spans of the scales of the same rows, `whole`
    those of what stands for the whole weight, with its first segment.
    """

    output: int
    start: int
    stop: int
    tiles: tuple[Tile, ...]
    quantized: bool = False
    scales: tuple[Span, ...] = ()
    whole: tuple[Span, ...] = ()

    @property
    def by_rows(self) -> tuple[Span, ...]:
        """What is encoded from its rows: codes (or plain elements), scales."""
        return Span(self.output, self.start, self.stop), *self.scales

    @property
    def spans(self) -> tuple[Span, ...]:
        """Everything that is written by it."""
        return *self.by_rows, *self.whole

    @property
    def nbytes(self) -> int:
        """Bytes of all spans."""
        return sum(span.stop - span.start for span in self.spans)


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
    """All segments, each of at most `segment_bytes` of source and of output bytes; one output file after another.

    Within a file they come in the order of their sources: trainers store tensors in module
    order, and reading the shard files forwards is what the kernel's read-ahead is made for
    (in output order a merge of 3.6 GB read a third more from the disk). Any order is right.
    """
    for number, output in enumerate(plan.outputs):
        for run in sorted(_runs(plan, output, segment_bytes), key=lambda run: _source_place(plan.parameters[run[0]])):
            tiles: list[Tile] = []
            cost = 0
            if plan.parameters[run[0]].quantized is not None:
                yield from _quantized(plan, run[0], segment_bytes)
                continue
            if len(run) > 1 and all(plan.parameters[index].bands is None for index in run):
                tiles = [_whole(index, plan.parameters[index]) for index in run if plan.parameters[index].size]
                if tiles:  # all fit, see `_runs`
                    yield _segment(number, tiles)
                continue
            for index in run:
                for together in _tiles(index, plan.parameters[index], segment_bytes):
                    price = _price(plan.parameters[index], together)
                    if tiles and cost + price > segment_bytes:
                        yield _segment(number, tiles)
                        tiles, cost = [], 0
                    tiles += together
                    cost += price
            if tiles:
                yield _segment(number, tiles)


def _runs(plan: Plan, output: OutputFile, segment_bytes: int) -> Iterator[list[int]]:
    """Neighbouring parameters that fit one segment together; one that does not fit, or is quantized, stands alone."""
    run: list[int] = []
    cost = 0
    for index in output.parameters:
        parameter = plan.parameters[index]
        alone = parameter.quantized is not None or parameter.part_of is not None
        price = _whole_cost(parameter)
        if run and (alone or cost + price > segment_bytes):
            yield run
            run, cost = [], 0
        if alone:
            if parameter.part_of is None:
                yield [index]
            continue
        run.append(index)
        cost += price
    if run:
        yield run


def _source_place(parameter: ParameterPlan) -> tuple[int, int]:
    """(file, offset) of the parameter's first shard."""
    for take in parameter.source.takes:
        if len(take.table):
            return int(take.table.file[0]), int(take.table.offset[0])
    return -1, 0


def _whole(index: int, parameter: ParameterPlan) -> Tile:
    """The tile that is all of a parameter without bands."""
    nbytes = parameter.nbytes
    return Tile(index, Box.whole(parameter.source.view), parameter.start, nbytes, nbytes)


def _tiles(index: int, parameter: ParameterPlan, segment_bytes: int) -> Iterator[tuple[Tile, ...]]:
    """Tiles in order; those of one band come together."""
    width = max(parameter.dtype.itemsize, parameter.source.dtype.itemsize)
    most = max(segment_bytes // width, 1)
    at, itemsize, bands = parameter.start, parameter.dtype.itemsize, parameter.bands
    if bands is None or not (bands.stride or bands.fits(most)):
        for box in tiles_of(parameter.source.view, most):
            nbytes = box.size * itemsize
            yield (Tile(index, box, at, nbytes, nbytes),)
            at += nbytes
        return
    for start, stop in bands.cuts(parameter.size, most):
        end = at + (bands.stride or (stop - start) * itemsize)
        together = []
        for box in boxes_of_range(parameter.source.view, start, stop):
            nbytes = box.size * itemsize
            together.append(Tile(index, box, at, nbytes, nbytes))
            at += nbytes
        together[-1] = replace(together[-1], room=end - together[-1].start)
        yield tuple(together)
        at = end


def largest_band(plan: Plan) -> int:
    """Bytes that a segment must hold: those of the largest band of a quantized parameter."""
    return max((_band_cost(p) for p in plan.parameters if p.quantized is not None), default=0)


def most_columns(plan: Plan) -> int:
    """Elements in the longest row of a quantized parameter; 0 when there is none."""
    return max((p.quantized.columns for p in plan.parameters if p.quantized is not None), default=0)


def _band_cost(parameter: ParameterPlan) -> int:
    """Bytes of a band of a quantized parameter, of its source or of all that it becomes: whichever is more."""
    quantized, bands = parameter.quantized, parameter.bands
    assert quantized is not None
    assert bands is not None
    elements = min(bands.band, parameter.elements)
    rows = elements // max(quantized.columns, 1)
    written = sum(_rounded(-(-rows // part.per) * part.row_nbytes) for part in quantized.parts if part.per)
    return max(_rounded(elements * parameter.source.dtype.itemsize), written)


def _quantized(plan: Plan, index: int, segment_bytes: int) -> Iterator[Segment]:
    """Segments of whole bands of rows, each with its part of the scales."""
    parameter = plan.parameters[index]
    quantized, bands = parameter.quantized, parameter.bands
    assert quantized is not None
    assert bands is not None
    most = max(segment_bytes // max(_band_cost(parameter), 1), 1) * bands.band
    whole = [plan.parameters[part.parameter] for part in quantized.parts if not part.per]
    for start, stop in bands.cuts(parameter.elements, most):
        first, last = start // quantized.columns, stop // quantized.columns
        spans = []
        for part in quantized.parts:
            if part.per:
                there = plan.parameters[part.parameter]
                low, high = first // part.per * part.row_nbytes, -(-last // part.per) * part.row_nbytes
                spans.append(Span(there.output, there.start + low, there.start + high))
        codes, *scales = spans
        nbytes = codes.stop - codes.start
        boxes = boxes_of_range(parameter.source.view, start, stop)
        tiles = tuple(Tile(index, box, codes.start, nbytes, nbytes) for box in boxes)
        of_all = tuple(Span(p.output, p.start, p.start + p.nbytes) for p in whole) if start == 0 else ()
        yield Segment(codes.output, codes.start, codes.stop, tiles, True, tuple(scales), of_all)  # noqa: FBT003


def _cost(parameter: ParameterPlan, elements: int) -> int:
    """Bytes of the larger side, rounded up as the lease rounds."""
    width = max(parameter.dtype.itemsize, parameter.source.dtype.itemsize)
    return _rounded(elements * width)


def _rounded(nbytes: int) -> int:
    """As the lease rounds."""
    return -(-nbytes // 64) * 64


def _price(parameter: ParameterPlan, tiles: Sequence[Tile]) -> int:
    return max(_cost(parameter, sum(t.box.size for t in tiles)), sum(t.room for t in tiles))


def _whole_cost(parameter: ParameterPlan) -> int:
    """Cost of all tiles of a parameter."""
    bands = parameter.bands
    if bands is None or not bands.stride:
        return _cost(parameter, parameter.size)
    count = -(-min(bands.run, parameter.size) // bands.band) * -(-parameter.size // max(bands.run, 1))
    return max(_cost(parameter, parameter.size), count * bands.stride)


def _segment(output: int, tiles: list[Tile]) -> Segment:
    return Segment(output, tiles[0].start, tiles[-1].start + tiles[-1].room, tuple(tiles))
