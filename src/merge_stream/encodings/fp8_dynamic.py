"""`fp8-dynamic`: float8 e4m3 weights with one scale for each output channel (compressed-tensors FP8_DYNAMIC).

`NAME.weight` [out, in] becomes `NAME.weight` F8_E4M3 [out, in] and `NAME.weight_scale` F32 [out, 1]; the value is their
product, and engines quantize activations themselves, token by token. Rule of compressed-tensors 0.20: scale = largest
magnitude of the row / 448; code = float8 of value / scale clamped to +-448. Any shape will do. Loads in
transformers 4.57 and 5.24, vLLM and SGLang, and llama.cpp's converter takes it.
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
from merge_stream.encodings._e4m3 import LARGEST, decode_e4m3, encode_e4m3
from merge_stream.encodings.base import Part
from merge_stream.tensors.dtype import F8_E4M3, F32

__all__ = ["MEMBER"]


class Fp8Dynamic(CompressedTensors):
    """One scale for each row."""

    name = "fp8-dynamic"
    format = "float-quantized"
    weights: ClassVar = {"num_bits": 8, "type": "float", "strategy": "channel"}
    activations = dynamic("float", 8, "token")

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """The weight and its scales."""
        return Part(name, F8_E4M3, shape), Part(f"{name}_scale", F32, (shape[0], 1))

    def encode(self, values: np.ndarray, outs: Sequence[np.ndarray], largest: float) -> int:  # noqa: ARG002
        """Fill codes and scales of whole rows; returns how many values are NaN or infinite."""
        codes, scales = outs[0].reshape(values.shape), outs[1].view(np.float32)
        with arithmetic(values.shape[1]):
            for block in in_blocks(values):
                rows, magnitudes = block.rows, block.magnitudes
                scale = magnitudes.max(axis=1)
                scale /= LARGEST
                scale[scale == 0] = EPSILON
                scales[rows] = scale
                magnitudes /= scale[:, None]
                encode_e4m3(magnitudes, block.x, block.scratch, codes[rows])
            return count_not_finite(values, scales)

    def decode(self, outs: Sequence[np.ndarray], columns: int, largest: float) -> np.ndarray:  # noqa: ARG002
        """The float32 values that engines compute with."""
        return decode_e4m3(outs[0]).reshape(-1, columns) * outs[1].view(np.float32)[:, None]


MEMBER = Fp8Dynamic()
