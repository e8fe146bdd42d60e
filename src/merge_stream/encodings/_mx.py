"""Microscaling: one power of two for each 32 neighbours in a row, stored as its exponent plus 127 (OCP MX, E8M0).

Rule of compressed-tensors 0.20 (`generate_mx_scales`): the exponent of the largest magnitude of the group, one more
where its mantissa is 1.75 or above, less that of the largest code (2 for e2m1, 8 for e4m3); never below 0. Value /
scale is exact, so only the rounding to codes loses anything. Magnitudes of 1.75 * 2^127 and above, for which
compressed-tensors writes the code of NaN, have the exponent 255 minus that of the largest code here.
"""

from __future__ import annotations

import numpy as np

from merge_stream.encodings._compressed import group_magnitudes

__all__ = ["GROUP", "decode_scales", "may_be_bad", "scale_groups"]

GROUP = 32
_MANTISSA = np.uint32(23)
_ROUND_UP_FROM = np.uint32(1 << 21)
"""Added to a mantissa of 1.75 or above it carries into the exponent."""
_BIAS = 127
_LAST = 255


def scale_groups(magnitudes: np.ndarray, offset: int, exponents: np.ndarray) -> None:
    """Divide rows of float32 >= 0 by the scales of their groups, which go to `exponents` (uint8, [rows, groups]).

    `offset` is the exponent of the largest code.
    """
    tops = group_magnitudes(magnitudes, GROUP)
    powers = (tops.view(np.uint32) + _ROUND_UP_FROM) >> _MANTISSA
    np.copyto(exponents, np.maximum(powers, np.uint32(offset)) - np.uint32(offset), casting="unsafe")
    inverse = ((np.uint32(2 * _BIAS) - exponents.astype(np.uint32)) << _MANTISSA).view(np.float32)
    groups = magnitudes.reshape(len(magnitudes), -1, GROUP)
    groups *= inverse[:, :, None]


def may_be_bad(exponents: np.ndarray, offset: int) -> bool:
    """True when a group of NaN, infinite or the very largest values is among those that have these exponents."""
    return bool(exponents.max(initial=0) >= _LAST - offset)


def decode_scales(exponents: np.ndarray) -> np.ndarray:
    """The float32 scales of stored exponents."""
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS)
