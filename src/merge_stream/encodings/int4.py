"""`int4`: 4-bit integer weights with one scale for each 128 neighbours in a row (compressed-tensors W4A16).

`NAME.weight` [out, in] becomes `NAME.weight_packed` I32 [out, in / 8], `NAME.weight_scale` F32 [out, in / 128] and
`NAME.weight_shape` I64 [2]; activations stay as they are. Rule of compressed-tensors 0.20: scale = largest magnitude
of the group / 7.5; code = value / scale clamped to -8 ... 7 and rounded to nearest even; code + 8 of element k stands
in the bits 4 * (k % 8) ... of its word. Plain rounding: calibrated methods (GPTQ, AWQ) lose less with the same bits.
Rows must be made of whole groups, since vLLM 0.33 and compressed-tensors refuse others. Loads in transformers 5.24,
vLLM, SGLang and llama.cpp's converter.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from merge_stream.encodings._compressed import (
    EPSILON,
    CompressedTensors,
    arithmetic,
    count_not_finite,
    group_magnitudes,
    in_blocks,
)
from merge_stream.encodings.base import Ints, Part
from merge_stream.tensors.dtype import F32, I32, I64

__all__ = ["MEMBER"]

_GROUP = 128
_PER_WORD = 8
_HALF = np.float32(7.5)
_LOWEST, _HIGHEST = np.float32(-8), np.float32(7)
_TO_INTEGER = np.float32(3 << 22)
"""Added to a small float it leaves the nearest integer (even in a tie) in the lowest bits."""
_OFFSET = np.float32(8)


class Int4(CompressedTensors):
    """One scale for each group of 128 in a row."""

    name = "int4"
    suffixes = ("_packed", "_scale", "_shape")
    format = "pack-quantized"
    weights: ClassVar = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": _GROUP}
    group = _GROUP

    def remark(self, *, experts: bool) -> str:  # noqa: ARG002 - part of the protocol
        """What it costs."""
        return "int4 is plain rounding, without calibration: compare the quality before you use it"

    def parts(self, name: str, shape: Ints) -> tuple[Part, ...]:
        """Words of eight codes, scales, and the shape."""
        return (
            Part(f"{name}_packed", I32, (shape[0], -(-shape[1] // _PER_WORD))),
            Part(f"{name}_scale", F32, (shape[0], -(-shape[1] // _GROUP))),
            Part(f"{name}_shape", I64, (2,), 0),
        )

    def unpacked(self, shape: Ints) -> Ints:
        """Eight codes in a word."""
        return (shape[0], shape[1] * _PER_WORD) if len(shape) == 2 else ()

    def encode(self, values: np.ndarray, outs: Sequence[np.ndarray], largest: float) -> int:  # noqa: ARG002
        """Fill codes and scales of whole rows; returns how many values are NaN or infinite."""
        codes, scales = outs[0].reshape(len(values), -1), outs[1].view(np.float32).reshape(len(values), -1)
        with arithmetic(values.shape[1]):
            for block in in_blocks(values):
                rows, magnitudes = block.rows, block.magnitudes
                scale = group_magnitudes(magnitudes, _GROUP)
                scale /= _HALF
                scale[scale == 0] = EPSILON
                scales[rows] = scale
                x, grouped = magnitudes, (len(magnitudes), -1, _GROUP)
                np.divide(block.x.reshape(grouped), scale[:, :, None], out=x.reshape(grouped))
                x.clip(_LOWEST, _HIGHEST, out=x)
                x += _TO_INTEGER + _OFFSET
                pairs, shifted = x.view("<u8"), block.scratch.view("<u8")
                np.right_shift(pairs, np.uint64(28), out=shifted)  # the later code comes to stand above the earlier
                shifted += pairs
                shifted -= np.uint64(int(_TO_INTEGER.view(np.uint32)) >> 28)
                np.copyto(codes[rows], shifted, casting="unsafe")
            return count_not_finite(values, scales)

    def whole(self, shape: Ints, largest: float) -> tuple[bytes, ...]:  # noqa: ARG002 - part of the protocol
        """The shape that was packed."""
        return (struct.pack("<2q", *shape),)

    def decode(self, outs: Sequence[np.ndarray], columns: int, largest: float) -> np.ndarray:  # noqa: ARG002
        """The float32 values that engines compute with."""
        packed = outs[0]
        codes = np.empty((len(packed), 2), np.float32)
        codes[:, 0], codes[:, 1] = packed & 15, packed >> 4
        codes -= _OFFSET
        groups = codes.reshape(-1, _GROUP)
        groups *= outs[1].view(np.float32)[:, None]
        return groups.reshape(-1, columns)


MEMBER = Int4()
