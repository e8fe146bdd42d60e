"""Values of synthetic parameters: reproducible, cheap, and different in every row.

A parameter is the row-major repetition of one block of random numbers, begun at a place that depends on its
name. The block's length is a prime, so no two rows of a matrix begin at the same place of it, and rows or shards
that changed places are found by comparing bytes. Making values costs a memory copy.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["Raw", "Values"]

_BLOCK = 1_000_003
_BAND_BYTES = 4 << 20

Raw = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class Values:
    """The values of all parameters in one dtype ("float32" or "bfloat16"), as raw unsigned integers."""

    def __init__(self, dtype: str) -> None:
        numbers = np.random.default_rng(20_240_607).standard_normal(_BLOCK, dtype=np.float32)
        numbers *= np.float32(0.02)
        if dtype == "float32":
            self._block: Raw = numbers.view(np.uint32)
        elif dtype == "bfloat16":
            import ml_dtypes

            self._block = numbers.astype(ml_dtypes.bfloat16).view(np.uint16)
        else:
            msg = f"synthetic values come in float32 and bfloat16, not {dtype}"
            raise ValueError(msg)
        self.itemsize = self._block.itemsize

    def flat(self, name: str, start: int, out: Raw) -> None:
        """Fill the 1-D `out` with the elements of `name` from the row-major position `start` on."""
        done = 0
        while done < out.size:
            at = (zlib.crc32(name.encode()) + start + done) % _BLOCK
            count = min(_BLOCK - at, out.size - done)
            out[done : done + count] = self._block[at : at + count]
            done += count

    def box(self, name: str, shape: Sequence[int], start: Sequence[int], stop: Sequence[int]) -> Raw:
        """The region [start, stop) of the parameter `name` of `shape`, as a new row-major array."""
        out = np.empty([b - a for a, b in zip(start, stop, strict=True)], self._block.dtype)
        if not out.size:
            return out
        row = math.prod(shape[1:])
        if tuple(stop[1:]) == tuple(shape[1:]) and not any(start[1:]):
            self.flat(name, (start[0] if shape else 0) * row, out.reshape(-1))
            return out
        inner = tuple(slice(a, b) for a, b in zip(start[1:], stop[1:], strict=True))
        rows_at_once = max(1, _BAND_BYTES // max(1, row * self.itemsize))
        for first in range(start[0], stop[0], rows_at_once):
            last = min(first + rows_at_once, stop[0])
            band = np.empty((last - first, *shape[1:]), self._block.dtype)
            self.flat(name, first * row, band.reshape(-1))
            out[first - start[0] : last - start[0]] = band[:, *inner]
        return out

    def whole(self, name: str, shape: Sequence[int]) -> Raw:
        """All of the parameter: what a merge must give."""
        return self.box(name, shape, [0] * len(shape), shape)
