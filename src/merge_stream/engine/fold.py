"""Adding a low-rank product to a tile: W + cast(scale * B @ A), the fold of a LoRA.

The arithmetic is peft's `merge_and_unload` on a CPU (peft 0.21, torch 2.13): factors in
fp32, product times scale, rounded to the adapter's type, added, rounded to W's type. It
runs on a fixed grid of `GRID_ROWS` x `GRID_COLUMNS` blocks of the whole matrix, whatever
the tile is: the result does not depend on the memory bound, the workers or a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from merge_stream.engine.budget import Lease
from merge_stream.planning.plan import LowRank, ResolvedTake
from merge_stream.tensors.box import Box
from merge_stream.tensors.dtype import DType

__all__ = ["GRID_COLUMNS", "GRID_ROWS", "add_low_rank", "fold_bytes"]

GRID_ROWS = 64
GRID_COLUMNS = 1024
_ROOM = 8 << 20
_WIDEST = 8
_TEMPORARIES = 4 * GRID_ROWS * GRID_COLUMNS * 4

Fill = Callable[[tuple[ResolvedTake, ...], Box, DType, np.ndarray, Lease], None]


def fold_bytes(rank: int) -> int:
    """Memory that a lease needs beside the tile for factors of up to `rank`; larger ones are read in column panels."""
    if rank == 0:
        return 0
    least = rank * (GRID_COLUMNS + GRID_ROWS) * (4 + 2 * _WIDEST)
    return max(_ROOM, least) + _TEMPORARIES


def add_low_rank(  # noqa: PLR0917 - what is added, where, and the means
    fold: LowRank, wanted: Box, weights: np.ndarray, dtype: DType, lease: Lease, fill: Fill
) -> None:
    """Add the product's region `wanted` to `weights`.

    `weights` is a 2-D array (any strides) of integers that hold elements of `dtype`;
    `wanted` is its place in the whole matrix. `fill` reads a box of a factor into memory.
    """
    if fold.transposed:
        weights = weights.T
        wanted = Box(wanted.start[::-1], wanted.stop[::-1])
    mark = lease.mark
    rank = fold.a_shape[0]
    width = _panel_columns(rank, fold.dtype.itemsize, lease.left)
    scratch = _Scratch(lease, rank, fold.dtype.itemsize, width)
    first = wanted.start[1] // GRID_COLUMNS * GRID_COLUMNS
    for left in range(first, wanted.stop[1], width):
        right = min(left + width, fold.a_shape[1])
        a = scratch.factor_a(fold, left, right, fill)
        for top, bottom in _grid(wanted.start[0], wanted.stop[0], fold.b_shape[0], GRID_ROWS):
            b = scratch.factor_b(fold, top, bottom, fill)
            for low, high in _grid(
                max(left, wanted.start[1]), min(right, wanted.stop[1]), fold.a_shape[1], GRID_COLUMNS
            ):
                delta = scratch.delta(bottom - top, high - low)
                np.matmul(b, a[:, low - left : high - left], out=delta)
                delta *= np.float32(fold.scale)
                if fold.dtype.name != "F32":
                    delta = delta.astype(fold.dtype.numpy()).astype(np.float32)
                _add_block(delta, (top, low), wanted, weights, dtype)
    lease.rewind(mark)


def _add_block(delta: np.ndarray, at: tuple[int, int], wanted: Box, weights: np.ndarray, dtype: DType) -> None:
    """Add the part of a grid block that lies in `wanted`."""
    block = Box(at, (at[0] + delta.shape[0], at[1] + delta.shape[1]))
    common = block & wanted
    if common is None:
        return
    target = weights[common.slices(wanted.start)]
    values = target.view(dtype.numpy()) if target.strides[-1] == target.itemsize else None
    summed = (target.copy().view(dtype.numpy()) if values is None else values).astype(np.float32)
    summed += delta[common.slices(at)]
    target[...] = summed.astype(dtype.numpy()).view(target.dtype)


class _Scratch:
    """Views of the lease that are reused for every block."""

    def __init__(self, lease: Lease, rank: int, itemsize: int, width: int) -> None:
        self._lease = lease
        self._rank = rank
        self._a = lease.take(rank * width * 4).view(np.float32)
        self._b = lease.take(rank * GRID_ROWS * 4).view(np.float32)
        self._delta = lease.take(GRID_ROWS * GRID_COLUMNS * 4).view(np.float32)
        self._raw = lease.take(rank * max(width, GRID_ROWS) * itemsize)

    def factor_a(self, fold: LowRank, left: int, right: int, fill: Fill) -> np.ndarray:
        """Columns [left, right) of A, fp32."""
        return self._read(fold.a, Box((0, left), (self._rank, right)), fold.dtype, self._a, fill)

    def factor_b(self, fold: LowRank, top: int, bottom: int, fill: Fill) -> np.ndarray:
        """Rows [top, bottom) of B, fp32."""
        return self._read(fold.b, Box((top, 0), (bottom, self._rank)), fold.dtype, self._b, fill)

    def delta(self, rows: int, columns: int) -> np.ndarray:
        """Room for a block of the product."""
        return self._delta[: rows * columns].reshape(rows, columns)

    def _read(self, take: ResolvedTake, box: Box, dtype: DType, into: np.ndarray, fill: Fill) -> np.ndarray:
        raw = self._raw[: box.size * dtype.itemsize]
        fill((take,), box, dtype, raw, self._lease)
        values = into[: box.size]
        np.copyto(values, raw.view(dtype.numpy()), casting="unsafe")
        return values.reshape(box.shape)


def _panel_columns(rank: int, itemsize: int, left: int) -> int:
    """Columns of A held at once: a multiple of the grid, at least one grid column."""
    fixed = GRID_ROWS * (rank * (4 + itemsize) + GRID_COLUMNS * 4) + (64 << 10)
    room = max(left - fixed, 0) // (rank * (4 + 2 * itemsize))  # the factor raw, as fp32, and a bounce to read it
    return max(room // GRID_COLUMNS, 1) * GRID_COLUMNS


def _grid(start: int, stop: int, size: int, step: int) -> Iterator[tuple[int, int]]:
    """Whole grid cells that meet [start, stop); the last one ends at `size`."""
    for low in range(start // step * step, stop, step):
        yield low, min(low + step, size)
