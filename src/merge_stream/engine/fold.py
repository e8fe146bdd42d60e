"""Folding a LoRA into a tile: W + cast(scale * B @ A), and what DoRA and bias adapters do.

The arithmetic is peft's `merge_and_unload` on a CPU (peft 0.21, torch 2.13): factors in
fp32, product times scale, rounded to the adapter's type, added, rounded to W's type. It
runs on a fixed grid of `GRID_ROWS` x `GRID_COLUMNS` blocks of the whole matrix, whatever
the tile is: the result does not depend on the memory bound, the workers or a resume.

DoRA looks at every block twice, once for the norms of the rows, once to scale them, so it
needs no more memory than plain LoRA (see `fold_norms`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from merge_stream.engine.budget import Lease
from merge_stream.engine.fold_norms import (
    CHUNK,
    RowNorms,
    cast_through,
    column_norms,
    factors_of,
    wide_values,
)
from merge_stream.planning.plan import LowRank, ResolvedTake, Scaled
from merge_stream.tensors.box import Box
from merge_stream.tensors.dtype import DType

__all__ = ["GRID_COLUMNS", "GRID_ROWS", "FoldBytes", "FoldPlace", "apply_fold", "fold_bytes"]

GRID_ROWS = 64
GRID_COLUMNS = 1024
_GROUP = 16 * GRID_ROWS
_DEPTH = 192
"""Factors are multiplied in runs of so many products (MKL of torch 2.13, AVX-512)."""
_ROOM = 8 << 20
_MOST_ROOM = 128 << 20
_LEFT = 64 << 10
_BLOCK = GRID_ROWS * GRID_COLUMNS * 4
_TEMPORARIES = 4 * _BLOCK
_TEMPORARIES_OF_NORMS = 6 * _BLOCK

Fill = Callable[[tuple[ResolvedTake, ...], Box, DType, np.ndarray, Lease], None]


@dataclass(frozen=True, slots=True)
class FoldPlace:
    """What a fold works with: the source it belongs to, the lease, `fill` (reads a box of a take), kept norms."""

    take: ResolvedTake
    dtype: DType
    lease: Lease
    fill: Fill
    norms: dict[int, tuple[LowRank, np.ndarray]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FoldBytes:
    """Memory that folding takes beside the tile: with `least` a large A is read in panels, with `most` at once."""

    least: int = 0
    most: int = 0


def fold_bytes(folds: Iterable[LowRank | Scaled]) -> FoldBytes:
    """Memory that a lease needs beside the tile, and numpy beside the lease, for any of the folds."""
    folds = tuple(folds)
    least = max((_fold_bytes(fold, _ROOM) for fold in folds), default=0)
    return FoldBytes(least, max((_fold_bytes(fold, _MOST_ROOM) for fold in folds), default=0))


def _fold_bytes(fold: LowRank | Scaled, most: int) -> int:
    """The same for one fold, with at most `most` bytes for a panel of A (one grid column at least)."""
    if isinstance(fold, Scaled):
        return _TEMPORARIES
    size, rank = fold.dtype.itemsize, fold.rank
    fixed = _fixed_bytes(fold)
    panel = rank * GRID_COLUMNS * (4 + 2 * size)
    whole = rank * -(-fold.a_shape[1] // GRID_COLUMNS) * GRID_COLUMNS * (4 + 2 * size)
    room = fixed + max(panel, min(whole, most)) + _TEMPORARIES
    if fold.magnitude is not None:
        room += _TEMPORARIES_OF_NORMS + 8 * (CHUNK + 4) * fold.b_shape[0] * fold.transposed
    return room


def apply_fold(fold: LowRank | Scaled, wanted: Box, weights: np.ndarray, place: FoldPlace) -> None:
    """Fold the region `wanted` of the source into `weights`.

    `weights` is an array (any strides) of integers that hold elements of the source's
    type, `wanted` its place in the source.
    """
    if isinstance(fold, Scaled):
        _add_scaled(fold, wanted, weights, place)
    elif fold.experts:
        for expert in range(wanted.start[0], wanted.stop[0]):
            part = Box(wanted.start[1:], wanted.stop[1:])
            _fold_matrix(fold, expert, part, weights[expert - wanted.start[0]], place)
    else:
        _fold_matrix(fold, 0, wanted, weights, place)


def _fold_matrix(fold: LowRank, expert: int, wanted: Box, weights: np.ndarray, place: FoldPlace) -> None:
    if fold.transposed:
        weights, wanted = weights.T, _turned(wanted)
    mark = place.lease.mark
    product = _Product(fold, expert, place)
    if fold.magnitude is None:
        for at, delta in product.blocks(wanted):
            _add_block(delta, at, wanted, weights, place.dtype)
    else:
        for low in range(wanted.start[0] // _GROUP * _GROUP, wanted.stop[0], _GROUP):
            rows = Box(
                (max(low, wanted.start[0]), wanted.start[1]), (min(low + _GROUP, wanted.stop[0]), wanted.stop[1])
            )
            factors = _dora_factors(fold, product, rows, wanted, weights, place)
            for at, delta in product.blocks(rows):
                _scale_block(delta, at, (rows, factors), (wanted, weights), place.dtype, fold)
    place.lease.rewind(mark)


def _add_scaled(fold: Scaled, wanted: Box, weights: np.ndarray, place: FoldPlace) -> None:
    """Bias + cast(scale * B.bias), in pieces that fit the grid's temporaries."""
    mark = place.lease.mark
    raw = place.lease.take(GRID_COLUMNS * fold.dtype.itemsize)
    for low in range(wanted.start[0], wanted.stop[0], GRID_COLUMNS):
        part = Box((low,), (min(low + GRID_COLUMNS, wanted.stop[0]),))
        data = raw[: part.size * fold.dtype.itemsize]
        place.fill((fold.x,), part, fold.dtype, data, place.lease)
        delta = data.view(fold.dtype.numpy()).astype(np.float32) * np.float32(fold.scale)
        target = weights[part.slices(wanted.start)]
        summed = wide_values(target, place.dtype) + cast_through(delta, fold.dtype)
        target[...] = summed.astype(place.dtype.numpy()).view(target.dtype)
    place.lease.rewind(mark)


def _add_block(delta: np.ndarray, at: tuple[int, int], wanted: Box, weights: np.ndarray, dtype: DType) -> None:
    """Add the part of a grid block that lies in `wanted`."""
    common = Box(at, (at[0] + delta.shape[0], at[1] + delta.shape[1])) & wanted
    if common is None:
        return
    target = weights[common.slices(wanted.start)]
    summed = wide_values(target, dtype)
    summed += delta[common.slices(at)]
    target[...] = summed.astype(dtype.numpy()).view(target.dtype)


def _scale_block(  # noqa: PLR0917 - a block, its factors and where it goes
    delta: np.ndarray,
    at: tuple[int, int],
    norms: tuple[Box, np.ndarray],
    tile: tuple[Box, np.ndarray],
    dtype: DType,
    fold: LowRank,
) -> None:
    """Factor * (W + delta) for the part of a grid block that lies in the rows of `norms`."""
    (rows, factors), (wanted, weights) = norms, tile
    common = Box(at, (at[0] + delta.shape[0], at[1] + delta.shape[1])) & rows
    if common is None:
        return
    target = weights[common.slices(wanted.start)]
    summed = cast_through(wide_values(target, dtype) + delta[common.slices(at)], fold.summed(dtype))
    summed *= factors[common.start[0] - rows.start[0] : common.stop[0] - rows.start[0], None]
    target[...] = cast_through(summed, fold.scaled(dtype)).astype(dtype.numpy()).view(target.dtype)


def _dora_factors(  # noqa: PLR0917 - rows of one matrix
    fold: LowRank, product: _Product, rows: Box, wanted: Box, weights: np.ndarray, place: FoldPlace
) -> np.ndarray:
    """M / |row of W + delta|, fp32, for the rows of a region."""
    first, stop = rows.start[0], rows.stop[0]
    if fold.transposed:  # norms of columns as stored: one pass over the matrix gives them all
        known = place.norms.get(id(fold))
        if known is None:
            place.norms.clear()
            known = place.norms[id(fold)] = (fold, _norms_of_columns(fold, product, place))
        norms = known[1][first:stop]
    else:
        whole = Box((first, 0), (stop, fold.a_shape[1]))
        sums = RowNorms(stop - first, fold.a_shape[1], fold.summed(place.dtype))
        inside = wanted.start[1] == 0 and wanted.stop[1] == fold.a_shape[1]
        for at, delta in product.blocks(whole):
            common = Box(at, (at[0] + delta.shape[0], at[1] + delta.shape[1])) & whole
            if common is None:
                continue
            stored = weights[common.slices(wanted.start)] if inside else product.stored(common)
            summed = wide_values(stored, place.dtype) + delta[common.slices(at)]
            sums.add(cast_through(summed, sums.dtype), common.start[0] - first, common.start[1])
        norms = sums.norms()
    return factors_of(fold, norms, first, stop, place.dtype, product.read_magnitude(first, stop))


def _norms_of_columns(fold: LowRank, product: _Product, place: FoldPlace) -> np.ndarray:
    """Norm over the stored rows of every stored column, in chunks of `CHUNK` stored rows."""
    mark = place.lease.mark
    size, out = place.dtype.itemsize, fold.b_shape[0]
    raw = place.lease.take(CHUNK * out * size)
    sums = np.zeros(out, np.float32)
    for low in range(0, fold.a_shape[1], CHUNK):
        high = min(low + CHUNK, fold.a_shape[1])
        box = Box((low, 0), (high, out))
        data = raw[: box.size * size]
        place.fill((_unfolded(place.take),), box, place.dtype, data, place.lease)
        values = data.view(f"u{size}").reshape(box.shape)
        for top in range(0, out, GRID_ROWS):
            bottom = min(top + GRID_ROWS, out)
            delta = product.narrow(top, bottom, low, high)
            summed = wide_values(values[:, top:bottom], place.dtype) + delta.T
            column_norms(sums[top:bottom], cast_through(summed, fold.summed(place.dtype)))
    place.lease.rewind(mark)
    return cast_through(np.sqrt(sums), fold.summed(place.dtype))


class _Product:
    """Grid blocks of cast(scale * B @ A); scratch is views of the lease, used again for every block."""

    def __init__(self, fold: LowRank, expert: int, place: FoldPlace) -> None:
        self._fold, self._expert, self._place = fold, expert, place
        self._size, self._rank = fold.dtype.itemsize, fold.rank
        lease, rank = place.lease, self._rank
        room = max(lease.left - _fixed_bytes(fold), 0) // (rank * (4 + 2 * self._size))
        most = -(-fold.a_shape[1] // GRID_COLUMNS)
        self._width = min(max(room // GRID_COLUMNS, 1), most) * GRID_COLUMNS
        self._a = lease.take(rank * self._width * 4).view(np.float32)
        self._b = lease.take(rank * GRID_ROWS * 4).view(np.float32)
        self._delta = lease.take(_BLOCK).view(np.float32)
        self._raw = lease.take(max(rank * self._width, rank * GRID_ROWS, fold.b_shape[1]) * self._size)
        self._stored = lease.take(GRID_ROWS * GRID_COLUMNS * place.dtype.itemsize) if fold.magnitude else None
        self._held: dict[str, tuple[int, int]] = {}

    def blocks(self, region: Box) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
        """(place, values) of all grid blocks that meet `region`; for each row, columns come in order."""
        out, width = self._fold.b_shape[0], self._fold.a_shape[1]
        for left in range(region.start[1] // GRID_COLUMNS * GRID_COLUMNS, region.stop[1], self._width):
            right = min(left + self._width, width)
            a = self._columns_of_a(left, right)
            for top, bottom in _grid(region.start[0], region.stop[0], out, GRID_ROWS):
                b = self._rows_of_b(top, bottom)
                for low, high in _grid(max(left, region.start[1]), min(right, region.stop[1]), width, GRID_COLUMNS):
                    yield (top, low), self._block(b, a[:, low - left : high - left])

    def narrow(self, top: int, bottom: int, low: int, high: int) -> np.ndarray:
        """The product for one band of rows and a few columns."""
        return self._block(self._rows_of_b(top, bottom), self._columns_of_a(low, high))

    def stored(self, region: Box) -> np.ndarray:
        """W itself, as integers, for a region of at most one block."""
        assert self._stored is not None
        data = self._stored[: region.size * self._place.dtype.itemsize]
        self._place.fill((_unfolded(self._place.take),), region, self._place.dtype, data, self._place.lease)
        return data.view(f"u{self._place.dtype.itemsize}").reshape(region.shape)

    def read_magnitude(self, first: int, stop: int) -> np.ndarray:
        """The magnitudes of rows [first, stop), fp32."""
        magnitude = self._fold.magnitude
        assert magnitude is not None
        mark = self._place.lease.mark
        raw = self._place.lease.take((stop - first) * magnitude.dtype.itemsize)
        self._place.fill((magnitude.x,), Box((first,), (stop,)), magnitude.dtype, raw, self._place.lease)
        values = raw.view(magnitude.dtype.numpy()).astype(np.float32)
        self._place.lease.rewind(mark)
        return values

    def _block(self, b: np.ndarray, a: np.ndarray) -> np.ndarray:
        fold = self._fold
        delta = self._delta[: b.shape[0] * a.shape[1]].reshape(b.shape[0], a.shape[1])
        _multiply(b, a, delta)
        if fold.experts:
            delta = cast_through(delta, fold.dtype)
        delta *= np.float32(fold.scale)
        delta = cast_through(delta, fold.dtype)
        return cast_through(delta, self._place.dtype) if fold.casts_delta else delta

    def _columns_of_a(self, left: int, right: int) -> np.ndarray:
        """Columns [left, right) of A, fp32."""
        shape = (self._rank, right - left)
        values = self._a[: shape[0] * shape[1]]
        if self._held.get("a") != (left, right):
            row = self._expert * self._rank
            self._read(self._fold.a, Box((row, left), (row + self._rank, right)), values)
            self._held["a"] = (left, right)
        return values.reshape(shape)

    def _rows_of_b(self, top: int, bottom: int) -> np.ndarray:
        """Rows [top, bottom) of B, fp32; of an expert: its columns, which stand `experts` apart."""
        shape = (bottom - top, self._rank)
        values = self._b[: shape[0] * shape[1]]
        if self._held.get("b") != (top, bottom):
            if self._fold.experts:
                self._expert_rows(top, bottom, values.reshape(shape))
            else:
                self._read(self._fold.b, Box((top, 0), (bottom, self._rank)), values)
            self._held["b"] = (top, bottom)
        return values.reshape(shape)

    def _expert_rows(self, top: int, bottom: int, into: np.ndarray) -> None:
        count = self._fold.b_shape[1]
        step = max(len(self._raw) // (count * self._size), 1)
        for low in range(top, bottom, step):
            high = min(low + step, bottom)
            raw = self._raw[: (high - low) * count * self._size]
            self._place.fill((self._fold.b,), Box((low, 0), (high, count)), self._fold.dtype, raw, self._place.lease)
            rows = raw.view(self._fold.dtype.numpy()).reshape(high - low, self._rank, self._fold.experts)
            np.copyto(into[low - top : high - top], rows[:, :, self._expert], casting="unsafe")

    def _read(self, take: ResolvedTake, box: Box, into: np.ndarray) -> None:
        raw = self._raw[: box.size * self._size]
        self._place.fill((take,), box, self._fold.dtype, raw, self._place.lease)
        np.copyto(into, raw.view(self._fold.dtype.numpy()), casting="unsafe")


def _multiply(b: np.ndarray, a: np.ndarray, out: np.ndarray) -> None:
    """B @ A with the sums of torch's BLAS: in runs of `_DEPTH` products, two equal ones below twice that."""
    rank = len(a)
    step = rank if rank <= _DEPTH else -(-rank // 2) if rank < 2 * _DEPTH else _DEPTH
    np.matmul(b[:, :step], a[:step], out=out)
    for low in range(step, rank, step):
        out += b[:, low : low + step] @ a[low : low + step]


def _fixed_bytes(fold: LowRank) -> int:
    """Scratch that does not grow with the width of a panel."""
    size, rank = fold.dtype.itemsize, fold.rank
    fixed = GRID_ROWS * rank * (4 + 2 * size) + fold.b_shape[1] * size * 2 + _BLOCK + _LEFT + 4096
    if fold.magnitude is not None:
        fixed += 2 * _BLOCK + _GROUP * 4
        fixed += CHUNK * fold.b_shape[0] * 8 * 2 if fold.transposed else 0
    return fixed


def _unfolded(take: ResolvedTake) -> ResolvedTake:
    """The whole source as it is stored."""
    shape = tuple(take.table.stop.max(axis=0).tolist())
    return ResolvedTake(take.table, Box.whole(shape), Box.whole(shape), stored=take.stored)


def _turned(box: Box) -> Box:
    return Box(box.start[::-1], box.stop[::-1])


def _grid(start: int, stop: int, size: int, step: int) -> Iterator[tuple[int, int]]:
    """Whole grid cells that meet [start, stop); the last one ends at `size`."""
    for low in range(start // step * step, stop, step):
        yield low, min(low + step, size)
