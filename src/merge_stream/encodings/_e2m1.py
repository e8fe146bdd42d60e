"""Float32 -> float4 e2m1, two codes in a byte, and back.

The magnitudes are 0, .5, 1, 1.5, 2, 3, 4 and 6, bit 3 is the sign. Rounds to nearest even and saturates at 6; a
negative value that rounds to zero keeps its sign, as in compressed-tensors 0.20 (`cast_to_fp4`), where zero alone,
-0.0 too, has none.
"""

from __future__ import annotations

import functools

import numpy as np

from merge_stream.encodings._small_floats import SmallFloat, encode_magnitudes

__all__ = ["LARGEST_E2M1", "decode_e2m1", "encode_e2m1"]

LARGEST_E2M1 = np.float32(6)
_FORM = SmallFloat(mantissa=1, least=127, last=7)
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_SIGN = np.uint8(8)


def encode_e2m1(magnitudes: np.ndarray, signed: np.ndarray, scratch: np.ndarray, out: np.ndarray) -> None:
    """Encode float32 `magnitudes` (used up) with the signs of `signed` into bytes, the earlier of two codes below.

    `scratch` is uint32, of the same shape, whose last dim is even; `out` is uint8 and has half of that.
    """
    signs, there = np.empty(signed.shape, np.bool_), np.empty(signed.shape, np.bool_)
    np.less(signed, np.float32(0), out=signs)
    np.not_equal(magnitudes, np.float32(0), out=there)
    signs &= there
    codes = there.view(np.uint8)
    encode_magnitudes(_FORM, magnitudes, scratch, codes)
    negative = signs.view(np.uint8)
    negative *= _SIGN
    codes |= negative
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
def _values() -> np.ndarray:
    return np.concatenate([_MAGNITUDES, -_MAGNITUDES])
