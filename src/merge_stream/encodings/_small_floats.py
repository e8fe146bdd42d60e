"""Float32 -> floats of eight bits and fewer, by arithmetic that numpy has vector instructions for.

A power of two is added to each magnitude, so large that the last bit of the sum weighs what a step of the small float
does there: the addition itself rounds to nearest even. What stands in the lowest byte of the sum is then the code, once
the exponent is put there too. Each step is as fast as a copy; a look-up in a table
takes as long as ten of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["SmallFloat", "encode_magnitudes"]

_MANTISSA = 23
_TO_EXPONENT = np.uint32(_MANTISSA)
_ANY_EXPONENT = np.uint32(0xFF)
_NONE = np.uint8(0)


@dataclass(frozen=True, slots=True)
class SmallFloat:
    """A type of `mantissa` bits, at most five, and the code `last` of its largest number.

    `least` is the exponent of its smallest normal number as float32 has it, plus 127.
    """

    mantissa: int
    least: int
    last: int


def encode_magnitudes(form: SmallFloat, values: np.ndarray, scratch: np.ndarray, codes: np.ndarray) -> None:
    """Write the codes of float32 `values` >= 0, which are used up, to `codes` (uint8); `scratch` is uint32.

    Rounds to nearest even. What is above the largest number becomes it, to 2^24; beyond and for NaN any code comes.
    """
    bits = values.view(np.uint32)
    step, to_step = 1 << form.mantissa, _MANTISSA - form.mantissa
    np.right_shift(bits, _TO_EXPONENT, out=scratch)
    scratch.clip(np.uint32(form.least), _ANY_EXPONENT, out=scratch)
    scratch *= np.uint32((1 << _MANTISSA) + step)  # the exponent, and how many codes lie below it
    scratch += np.uint32((to_step << _MANTISSA) - form.least * step)
    values += scratch.view(np.float32)
    np.copyto(codes, bits, casting="unsafe")
    codes.clip(_NONE, np.uint8(form.last), out=codes)
