"""Float32 -> float4 e2m1, two codes in a byte, and back.

The magnitudes are 0, .5, 1, 1.5, 2, 3, 4 and 6, bit 3 is the sign. Rounds to nearest even and saturates at 6; a
negative value that rounds to zero keeps its sign, as in compressed-tensors 0.20 (`cast_to_fp4`), where -0.0 alone
becomes 0.
"""

from __future__ import annotations

import functools

import numpy as np

from merge_stream.encodings._e4m3 import encode_by

__all__ = ["LARGEST_E2M1", "decode_e2m1", "encode_e2m1"]

LARGEST_E2M1 = np.float32(6)
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_SIGN = 8


def encode_e2m1(values: np.ndarray, scratch: np.ndarray, out: np.ndarray) -> None:
    """Encode float32 `values` (used up) into the bytes `out`, the earlier of two codes in the lower half.

    `scratch` is uint32, of the shape of `values`, whose last dim is even; `out` has half of that.
    """
    codes = np.empty(values.shape, np.uint8)
    encode_by(_codes(), values, scratch, codes)
    pairs = codes.view("<u2")
    pairs |= pairs >> 4
    np.copyto(out, pairs, casting="unsafe")


def decode_e2m1(packed: np.ndarray) -> np.ndarray:
    """The float32 values of flat bytes, two for each."""
    values = np.empty((len(packed), 2), np.float32)
    values[:, 0] = _values()[packed & 15]
    values[:, 1] = _values()[packed >> 4]
    return values.reshape(-1)


@functools.cache
def _codes() -> np.ndarray:
    """The code of each float32 whose lower half is zero, or set somewhere in its last bit."""
    values = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    magnitudes = np.nan_to_num(np.abs(values), nan=0.0)
    middles = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2
    codes = np.searchsorted(middles, magnitudes)  # a middle belongs to the lower neighbour ...
    odd = (codes % 2 == 1) & (codes < len(middles))
    codes += odd & (magnitudes == middles[np.minimum(codes, len(middles) - 1)])  # ... unless that one is odd
    table: np.ndarray = (codes + _SIGN * (values < 0)).astype(np.uint8)
    return table


@functools.cache
def _values() -> np.ndarray:
    return np.concatenate([_MAGNITUDES, -_MAGNITUDES])
