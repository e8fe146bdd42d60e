"""Norms of rows for DoRA, summed in the order in which torch sums them.

Facts (torch 2.13 CPU, measured): `torch.linalg.norm(w, dim=1)` of rows that lie together
adds squares in 8 lanes, adds the lanes in order, then the rest of the row one by one (the
last three or less with fused multiply-add, as the compiler made it); each step is rounded to
fp32. 16-bit rows take 16 columns a step in the same 8 lanes. Columns of a matrix that is
stored transposed are summed one row after the other.
"""

from __future__ import annotations

import numpy as np

from merge_stream.planning.plan import LowRank
from merge_stream.tensors.dtype import DType

__all__ = ["CHUNK", "RowNorms", "cast_through", "column_norms", "factors_of", "wide_values"]

CHUNK = 16
"""Stored rows that are looked at together where the matrix is stored transposed."""
_LANES = 8


class RowNorms:
    """Norms of `rows` rows of `width` values, given block by block, columns in order for each row."""

    def __init__(self, rows: int, width: int, dtype: DType) -> None:
        self.dtype = dtype
        step = _LANES if dtype.itemsize == 4 else 2 * _LANES
        self._lanes_stop = width - width % step
        self._lanes = np.zeros((_LANES, rows), np.float32)
        self._tail: list[tuple[int, np.ndarray]] = []

    def add(self, values: np.ndarray, row: int, column: int) -> None:
        """Squares of fp32 `values` that stand at (row, column)."""
        stop = row + values.shape[0]
        columns = np.ascontiguousarray(values.T)
        inside = min(max(self._lanes_stop - column, 0), len(columns))
        if inside < len(columns):
            self._tail.append((row, columns[inside:].copy()))
        if inside:
            squares = columns[:inside]
            squares *= squares
            steps = squares.reshape(inside // _LANES, _LANES, values.shape[0])
            lanes = self._lanes[:, row:stop]
            lanes[...] = _sum_in_order(lanes, steps)

    def norms(self) -> np.ndarray:
        """The norms, rounded to the type of the values."""
        total = self._lanes[0].copy()
        for lane in self._lanes[1:]:
            total += lane
        for row, columns in self._tail:
            part = total[row : row + columns.shape[1]]
            four = len(columns) // 4 * 4
            for line in columns[:four]:
                part += line * line
            for line in columns[four:].astype(np.float64):
                part[...] = line * line + part
        return cast_through(np.sqrt(total), self.dtype)


def column_norms(sums: np.ndarray, values: np.ndarray) -> None:
    """Add the squares of stored rows to the sums of their columns, one row after the other."""
    values *= values
    for line in values:
        sums += line


def factors_of(  # noqa: PLR0917 - numbers of some rows
    fold: LowRank, norms: np.ndarray, first: int, stop: int, dtype: DType, magnitude: np.ndarray
) -> np.ndarray:
    """Magnitude / norm, rounded as torch rounds it."""
    assert len(norms) == stop - first
    with np.errstate(divide="ignore", invalid="ignore"):
        return cast_through(magnitude / norms, fold.scaled(dtype))


def cast_through(values: np.ndarray, dtype: DType) -> np.ndarray:
    """fp32 values, rounded to `dtype` and back; wider ones as they are."""
    if dtype.itemsize >= values.dtype.itemsize:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(dtype.numpy()).astype(np.float32)


def wide_values(stored: np.ndarray, dtype: DType) -> np.ndarray:
    """Integers that hold elements of `dtype`, any strides, as a new fp32 array (fp64 for fp64)."""
    return stored.view(dtype.numpy()).astype(np.float64 if dtype.itemsize == 8 else np.float32)


def _sum_in_order(first: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """First + rest[0] + rest[1] ..., element by element, rounded at each step."""
    total: np.ndarray = np.add.reduce(np.concatenate((first[None], rest)), axis=0)
    return total
