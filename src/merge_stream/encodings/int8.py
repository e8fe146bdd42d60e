"""`int8`: 8-bit integer weights with one scale for each output channel (compressed-tensors W8A8).

`NAME.weight` [out, in] becomes `NAME.weight` I8 [out, in] and `NAME.weight_scale` F32 [out, 1]; the value is their
product, and engines quantize activations themselves, token by token. Rule of compressed-tensors 0.20: scale = largest
magnitude of the row / 127.5; code = value / scale clamped to -128 ... 127 and rounded to nearest even. Any shape will
do. Dense models load in transformers 5.24, vLLM, SGLang and llama.cpp's converter, experts in vLLM and SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from merge_stream.encodings._compressed import (
    EPSILON,
    CompressedTensors,
    arithmetic,
    count_not_finite,
    dynamic,
    in_blocks,
)
from merge_stream.encodings.base import Part
from merge_stream.tensors.dtype import F32, I8

__all__ = ["MEMBER"]

_HALF = np.float32(127.5)
_LOWEST, _HIGHEST = np.float32(-128), np.float32(127)


class Int8(CompressedTensors):
    """One scale for each row."""

    name = "int8"
    format = "int-quantized"
    weights: ClassVar = {"num_bits": 8, "type": "int", "strategy": "channel"}
    activations: ClassVar = dynamic("int", 8, "token")

    def remark(self, *, experts: bool) -> str:
        """Experts do not load in transformers 5.24."""
        return "transformers 5.24 cannot load experts in int8; vLLM and SGLang do" if experts else ""

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """The weight and its scales."""
        return Part(name, I8, shape), Part(f"{name}_scale", F32, (shape[0], 1))

    def encode(self, values: np.ndarray, outs: Sequence[np.ndarray], largest: float) -> int:  # noqa: ARG002
        """Fill codes and scales of whole rows; returns how many values are NaN or infinite."""
        codes, scales = outs[0].view(np.int8).reshape(values.shape), outs[1].view(np.float32)
        with arithmetic(values.shape[1]):
            for block in in_blocks(values):
                rows, magnitudes = block.rows, block.magnitudes
                scale = magnitudes.max(axis=1)
                scale /= _HALF
                scale[scale == 0] = EPSILON
                scales[rows] = scale
                x = np.divide(block.x, scale[:, None], out=magnitudes)
                x.clip(_LOWEST, _HIGHEST, out=x)
                np.rint(x, out=x)
                np.copyto(codes[rows], x, casting="unsafe")
            return count_not_finite(values, scales)

    def decode(self, outs: Sequence[np.ndarray], columns: int, largest: float) -> np.ndarray:  # noqa: ARG002
        """The float32 values that engines compute with."""
        codes = outs[0].view(np.int8).reshape(-1, columns)
        return codes.astype(np.float32) * outs[1].view(np.float32)[:, None]


MEMBER = Int8()
