"""Assembling a tile: from the extents of shard files into one contiguous, encoded piece.

For a tile and a row-major shard the common region is one contiguous extent of the file
(a tile has leading dims of extent one, one ranged dim, whole trailing dims), so it is one
positioned read; if the region is contiguous in the tile too, the read lands where the
bytes belong. Otherwise it goes through a bounce buffer and one strided copy. Takes that
slice or permute dims may need several reads: a region is then read as its bounding extent
while that fits the bounce buffer, else split along its outermost dim.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np

from merge_stream.encodings.base import Encoding, scheme_named
from merge_stream.engine.budget import Lease
from merge_stream.engine.fold import FoldPlace, apply_fold
from merge_stream.engine.joint_reads import SEEK, JointReads
from merge_stream.engine.runs import FewRows, Regions, regions_of, runs_in
from merge_stream.errors import CorruptCheckpointError
from merge_stream.planning.plan import LowRank, ParameterPlan, ResolvedTake
from merge_stream.planning.segments import Tile, tiles_of
from merge_stream.storage.base import ByteSource
from merge_stream.tensors.box import Box, row_major_strides
from merge_stream.tensors.dtype import DType
from merge_stream.tensors.ref import ShardTable, SourceFile

__all__ = ["Assembler", "not_finite", "slab_bytes"]

Ints = tuple[int, ...]
_BOUNCE_FLOOR = 64 << 10
_SLACK = 4096


def slab_bytes(segment_bytes: int, *, compare: bool = False, fold_bytes: int = 0) -> int:
    """Memory of one lease: encoded output, source values, bounce buffer (and what is compared, and folded)."""
    parts = 4 if compare else 3
    return parts * (max(segment_bytes, _BOUNCE_FLOOR) + _SLACK) + fold_bytes


class Assembler:
    """Reads tiles of parameters; one for each worker, over a shared source.

    `read_nbytes` counts bytes asked of the source, `overflows` finite values that an
    encoding made infinite, by parameter name. Of files whose paths are in `apart` no byte is read that no tile wants.
    """

    def __init__(
        self, source: ByteSource, files: Sequence[SourceFile], encoding: Encoding, apart: Container[str] = ()
    ) -> None:
        self._source = source
        self._paths = [f.path for f in files]
        self._encoding = encoding
        self.read_nbytes = 0
        self.overflows: dict[str, int] = {}
        self._norms: dict[int, tuple[LowRank, np.ndarray]] = {}
        self._few = FewRows(ShardTable.of([], 0))
        self._joint = JointReads(self._read, frozenset(k for k, file in enumerate(files) if file.path in apart))

    def tile(self, parameter: ParameterPlan, box: Box, out: np.ndarray, lease: Lease) -> None:
        """Fill `out` (uint8) with the encoded bytes of `box` (a contiguous box of the parameter's view)."""
        source = parameter.source
        mark = lease.mark
        if parameter.dtype == source.dtype:
            self._fill(source.takes, box, source.dtype, out, lease)
        else:
            values = lease.take(box.size * source.dtype.itemsize)
            self._fill(source.takes, box, source.dtype, values, lease)
            lost = self._encoding.encode(values.view(source.dtype.numpy()), out.view(parameter.dtype.numpy()))
            if lost:
                self.overflows[parameter.name] = self.overflows.get(parameter.name, 0) + lost
        lease.rewind(mark)

    def tiles(self, parameters: Sequence[ParameterPlan], tiles: Sequence[Tile], out: np.ndarray, lease: Lease) -> None:
        """Fill `out` (uint8) with the encoded bytes of neighbouring tiles, and zeros where none has its place.

        Small parameters in a row are read together (`engine.joint_reads`) and encoded as one.
        """
        start = tiles[0].start
        first = 0
        while first < len(tiles):
            parameter, stop = parameters[tiles[first].parameter], first + 1
            while stop < len(tiles) and _alike(tiles[stop - 1], parameter, parameters[tiles[stop].parameter]):
                stop += 1
            run = tiles[first:stop]
            at, end = run[0].start - start, run[-1].start + run[-1].nbytes - start
            if len(run) == 1:
                self.tile(parameter, run[0].box, out[at:end], lease)
            else:
                self._together(parameters, run, out[at:end], lease)
            out[end : end + run[-1].room - run[-1].nbytes] = 0
            first = stop

    def _together(
        self, parameters: Sequence[ParameterPlan], tiles: Sequence[Tile], out: np.ndarray, lease: Lease
    ) -> None:
        """Fill `out` with tiles of equal element types, one after another."""
        source, target = parameters[tiles[0].parameter].source.dtype, parameters[tiles[0].parameter].dtype
        mark = lease.mark
        values = out
        if source != target:
            values = lease.take(len(out) // target.itemsize * source.itemsize)
        most = self._joint.most(lease)
        at = 0
        for tile in tiles:
            parts = parameters[tile.parameter].source
            nbytes = tile.nbytes // target.itemsize * source.itemsize
            whole = tile.box.stop == parts.view and not any(tile.box.start)
            if not (whole and nbytes <= most and self._joint.add(parts.takes, parts.view, source.itemsize, at)):
                self._fill(parts.takes, tile.box, source, values[at : at + nbytes], lease)
            if self._joint.full:
                self._joint.read(values, lease)
            at += nbytes
        self._joint.read(values, lease)
        if source != target and self._encoding.encode(values.view(source.numpy()), out.view(target.numpy())):
            self._count_overflows(parameters, tiles, values.view(source.numpy()), out.view(target.numpy()))
        lease.rewind(mark)

    def _count_overflows(
        self, parameters: Sequence[ParameterPlan], tiles: Sequence[Tile], values: np.ndarray, out: np.ndarray
    ) -> None:
        """Encode tiles one by one, to tell of which a value became infinite."""
        at = 0
        for tile in tiles:
            name, size = parameters[tile.parameter].name, tile.box.size
            lost = self._encoding.encode(values[at : at + size], out[at : at + size])
            if lost:
                self.overflows[name] = self.overflows.get(name, 0) + lost
            at += size

    def quantized(
        self,
        parameter: ParameterPlan,
        boxes: Sequence[Box],
        outs: Sequence[np.ndarray],
        lease: Lease,
        largest: float,
    ) -> np.ndarray:
        """Fill `outs` (uint8: codes, scales) with the encoded rows that `boxes` make up, one after another.

        Returns the rows as the source has them, in the lease. CorruptCheckpointError when a value is NaN or infinite.
        `largest` is the magnitude that a scheme looks up before (see `Scheme`).
        """
        assert parameter.quantized is not None
        rows = self.rows(parameter, boxes, lease)
        bad = scheme_named(parameter.quantized.scheme).encode(rows, outs, largest)
        if bad:
            raise not_finite(parameter.quantized.name, bad)
        return rows

    def rows(self, parameter: ParameterPlan, boxes: Sequence[Box], lease: Lease) -> np.ndarray:
        """The rows of a quantized parameter that `boxes` make up, one after another, as the source has them."""
        assert parameter.quantized is not None
        source = parameter.source
        values = lease.take(sum(box.size for box in boxes) * source.dtype.itemsize)
        at = 0
        for box in boxes:
            stop = at + box.size * source.dtype.itemsize
            self._fill(source.takes, box, source.dtype, values[at:stop], lease)
            at = stop
        return values.view(source.dtype.numpy()).reshape(-1, parameter.quantized.columns)

    def _fill(self, takes: Sequence[ResolvedTake], box: Box, dtype: DType, values: np.ndarray, lease: Lease) -> None:
        """Read every take's part of `box` into `values` (uint8), and add its fold."""
        for take in takes:
            part = take.dest_box & box
            if part is None:
                continue
            wanted = _wanted(take, part)
            if take.stored is None:
                self._read_take(take, part, box, dtype.itemsize, values, lease)
            else:
                self._read_narrow(take, part, take.stored, _view(take, part, box, dtype.itemsize, values), dtype, lease)
            if take.fold is not None:
                view = _view(take, part, box, dtype.itemsize, values)
                apply_fold(take.fold, wanted, view, FoldPlace(take, dtype, lease, self._fill, self._norms))

    def _read_take(  # noqa: PLR0917 - one take's part of one tile
        self, take: ResolvedTake, part: Box, box: Box, itemsize: int, values: np.ndarray, lease: Lease
    ) -> None:
        """Read `part` of a take (in the parameter's view) into the values of tile `box`, as it is on disk."""
        wanted = _wanted(take, part)
        moved = tuple([a - b - c for a, b, c in zip(part.start, wanted.start, box.start, strict=True)])
        if not take.permute and FewRows.can(take.table):
            if take.table is not self._few.table:
                self._few = FewRows(take.table)
            runs = self._few.runs(wanted, moved, box.shape, itemsize)
            if runs is not None:
                for file, offset, at, count in runs:
                    self._read(file, offset, values[at : at + count])
                return
        regions = regions_of(take.table, wanted)
        if not take.permute:
            regions = self._read_runs(take.table, regions, moved, box, itemsize, values)
        if len(regions.rows):
            view = _view(take, part, box, itemsize, values)
            for k, start, stop in zip(*(column.tolist() for column in regions), strict=True):
                held, file, offset = take.table.row(k)
                region = Box(tuple(start), tuple(stop))
                there = view[region.slices(wanted.start)]
                self._read_region(file, offset, held, region, itemsize, there, lease)

    def _read_narrow(  # noqa: PLR0917 - one take's part of one tile
        self, take: ResolvedTake, part: Box, stored: DType, view: np.ndarray, dtype: DType, lease: Lease
    ) -> None:
        """Read `part` of a take whose elements are of the narrower type `stored`, and widen them into `view`.

        `view` has the axes of the take's source; the narrow elements pass through what is left of the lease.
        """
        wide = view.transpose(take.permute) if take.permute else view
        most = max(lease.left // 2 // stored.itemsize, 1)
        for piece in tiles_of(part.shape, most):
            there = piece.shifted(part.start)
            mark = lease.mark
            narrow = lease.take(there.size * stored.itemsize)
            self._read_take(take, there, there, stored.itemsize, narrow, lease)
            into = wide[piece.slices((0,) * len(part.shape))].view(dtype.numpy())
            np.copyto(into, narrow.view(stored.numpy()).reshape(there.shape), casting="unsafe")
            lease.rewind(mark)

    def _read_runs(  # noqa: PLR0917 - regions, and where they go
        self, table: ShardTable, regions: Regions, moved: Ints, box: Box, itemsize: int, values: np.ndarray
    ) -> Regions:
        """Read each region that is one run in its shard and in the tile where it belongs; returns the others.

        `moved` leads from a region's place in the source to that in the tile.
        """
        met = slice(None) if len(regions.rows) == len(table) else regions.rows
        runs = runs_in(table, regions, moved, box.shape)
        for straight, file, offset, at, count in zip(
            runs.straight.tolist(),
            table.file[met].tolist(),
            (table.offset[met] + runs.origin * itemsize).tolist(),
            (runs.target * itemsize).tolist(),
            (runs.elements * itemsize).tolist(),
            strict=True,
        ):
            if straight:
                self._read(file, offset, values[at : at + count])
        return regions.only(~runs.straight)

    def _read_region(  # noqa: PLR0917 - one region of one shard into one view
        self, file: int, offset: int, held: Box, region: Box, itemsize: int, view: np.ndarray, lease: Lease
    ) -> None:
        """Read a region of a row-major shard into a strided view of the region's shape."""
        first, stop = _bounds(region, held)
        nbytes = (stop - first) * itemsize
        apart = nbytes > 2 * view.nbytes and view.nbytes >= 2 * SEEK  # most of it would be read for nothing
        if nbytes <= lease.left and not apart:
            mark = lease.mark
            bounce = lease.take(nbytes)
            self._read(file, offset + first * itemsize, bounce)
            strides = [s * itemsize for s in row_major_strides(held.shape)]
            view[...] = np.ndarray(region.shape, view.dtype, bounce, strides=strides)
            lease.rewind(mark)
            return
        axis = next(k for k, extent in enumerate(region.shape) if extent > 1)
        middle = (region.start[axis] + region.stop[axis]) // 2
        cut = middle - region.start[axis]
        lower = Box(region.start, (*region.stop[:axis], middle, *region.stop[axis + 1 :]))
        upper = Box((*region.start[:axis], middle, *region.start[axis + 1 :]), region.stop)
        head = (slice(None),) * axis
        self._read_region(file, offset, held, lower, itemsize, view[(*head, slice(None, cut))], lease)
        self._read_region(file, offset, held, upper, itemsize, view[(*head, slice(cut, None))], lease)

    def _read(self, file: int, offset: int, into: np.ndarray) -> None:
        self._source.read_into(self._paths[file], offset, into.data)
        self.read_nbytes += len(into)


def not_finite(name: str, count: int) -> CorruptCheckpointError:
    """What is raised for a weight with values that are NaN or infinite."""
    msg = f"{name} holds {count} values that are NaN or infinite (perhaps more): it cannot be quantized"
    hint = "such a model is broken; merge it without --quantize to look at it, or leave the tensor plain"
    return CorruptCheckpointError(msg, hint=f"{hint} (--quantize-ignore {name})")


def _alike(before: Tile, parameter: ParameterPlan, after: ParameterPlan) -> bool:
    """True when the tile behind `before` can be read and encoded with it."""
    return (
        before.room == before.nbytes and parameter.dtype == after.dtype and parameter.source.dtype == after.source.dtype
    )


def _wanted(take: ResolvedTake, part: Box) -> Box:
    """The box of the take's source that becomes `part` of the parameter's view."""
    if not take.permute:
        return part.shifted(_minus(take.source_box.start, take.dest_box.start))
    moved = [0] * len(take.permute)
    for axis, source_axis in enumerate(take.permute):
        moved[source_axis] = axis
    local = part.shifted(tuple(-a for a in take.dest_box.start))
    return Box(
        tuple(local.start[a] + o for a, o in zip(moved, take.source_box.start, strict=True)),
        tuple(local.stop[a] + o for a, o in zip(moved, take.source_box.start, strict=True)),
    )


def _view(take: ResolvedTake, part: Box, box: Box, itemsize: int, values: np.ndarray) -> np.ndarray:
    """The elements of `part` in the values of tile `box`, with the axes of the take's source."""
    view = values.view(_unit(itemsize)).reshape(box.shape)[part.slices(box.start)]
    if take.permute:
        view = view.transpose([take.permute.index(axis) for axis in range(len(take.permute))])
    return view


def _unit(itemsize: int) -> np.dtype:
    """An integer type of that size: elements are moved, never interpreted."""
    return np.dtype(f"u{itemsize}")


def _minus(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def _bounds(region: Box, held: Box) -> tuple[int, int]:
    """Element range [first, stop) of a row-major array over `held` that bounds `region`."""
    strides = row_major_strides(held.shape)
    first = sum((a - o) * s for a, o, s in zip(region.start, held.start, strides, strict=True))
    last = sum((b - 1 - o) * s for b, o, s in zip(region.stop, held.start, strides, strict=True))
    return first, last + 1
