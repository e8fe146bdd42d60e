"""Float32 -> float8 e4m3fn in numpy, and back.

Rounds to nearest even and saturates at 448, as torch does on a clamped tensor. ml_dtypes' own cast takes eight times as
long and makes NaN of what is too large.
"""

from __future__ import annotations

import functools

import numpy as np

from merge_stream.encodings._small_floats import SmallFloat, encode_magnitudes

__all__ = ["LARGEST", "decode_e4m3", "encode_e4m3"]

LARGEST = np.float32(448)
_FORM = SmallFloat(mantissa=3, least=121, last=0x7E)
_SIGN = np.uint8(0x80)


def encode_e4m3(magnitudes: np.ndarray, signed: np.ndarray, scratch: np.ndarray, out: np.ndarray) -> None:
    """Encode float32 `magnitudes` (used up; to 2^24) with the signs of `signed` into `out` (uint8).

    `scratch` is uint32; all are of one shape.
    """
    encode_magnitudes(_FORM, magnitudes, scratch, out)
    signs = scratch.view(np.uint8).reshape(-1)[: out.size].reshape(out.shape)
    np.signbit(signed, out=signs.view(np.bool_))
    signs *= _SIGN
    out |= signs


def decode_e4m3(codes: np.ndarray) -> np.ndarray:
    """The float32 values of uint8 codes."""
    values: np.ndarray = _values()[codes]
    return values


@functools.cache
def _values() -> np.ndarray:
    import ml_dtypes

    with np.errstate(invalid="ignore"):
        table: np.ndarray = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return table
