"""Float32 -> float8 e4m3fn in numpy, by a table of the upper 16 bits.

Rounds to nearest even and saturates at 448, as torch does on a clamped tensor; NaN stays NaN. Three bits of mantissa
are kept, so seven bits of the float32 with the rest folded into the last one ("round to odd") decide the same. The
table is made by ml_dtypes, whose own cast of a whole tensor takes several times as long.
"""

from __future__ import annotations

import functools

import numpy as np

__all__ = ["LARGEST", "decode_e4m3", "encode_by", "encode_e4m3"]

LARGEST = np.float32(448)


def encode_e4m3(values: np.ndarray, scratch: np.ndarray, out: np.ndarray) -> None:
    """Encode float32 `values` (which is used up) into `out` (uint8); `scratch` is uint32, all of one shape."""
    encode_by(_codes(), values, scratch, out)


def encode_by(table: np.ndarray, values: np.ndarray, scratch: np.ndarray, out: np.ndarray) -> None:
    """The same by the codes of another type, of at most five bits of mantissa."""
    bits = values.view(np.uint32)
    np.bitwise_and(bits, np.uint32(0xFFFF), out=scratch)
    scratch += np.uint32(0xFFFF)  # carries into bit 16 unless the lower half is zero
    np.bitwise_or(bits, scratch, out=bits)
    np.right_shift(bits, np.uint32(16), out=bits)
    np.take(table, bits, out=out, mode="clip")


def decode_e4m3(codes: np.ndarray) -> np.ndarray:
    """The float32 values of uint8 codes."""
    values: np.ndarray = _values()[codes]
    return values


@functools.cache
def _codes() -> np.ndarray:
    """The code of each float32 whose lower half is zero."""
    import ml_dtypes

    with np.errstate(invalid="ignore"):
        values = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
        table: np.ndarray = np.clip(values, -LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return table


@functools.cache
def _values() -> np.ndarray:
    import ml_dtypes

    with np.errstate(invalid="ignore"):
        table: np.ndarray = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return table
