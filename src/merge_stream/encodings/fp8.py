"""`fp8`: float8 e4m3 weights with one scale for each weight (compressed-tensors, strategy `tensor`).

`NAME.weight` [out, in] becomes `NAME.weight` F8_E4M3 [out, in] and `NAME.weight_scale` F32 [1]; the value is their
product, and engines quantize activations themselves, token by token. Rule of compressed-tensors 0.20: scale = largest
magnitude of the weight / 448; code = float8 of value / scale clamped to +-448. The magnitude is looked up before
anything is written, so weights are read twice. Any shape will do. Loads in transformers 5.24, vLLM (which rounds fused
layers again, to the largest of their scales) and SGLang; llama.cpp's converter asserts a scale for each channel or
block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from merge_stream.encodings._compressed import EPSILON, CompressedTensors, arithmetic, dynamic, in_blocks
from merge_stream.encodings._e4m3 import LARGEST, decode_e4m3, encode_e4m3
from merge_stream.encodings.base import Ints, Part
from merge_stream.tensors.dtype import F8_E4M3, F32

__all__ = ["MEMBER"]


class Fp8(CompressedTensors):
    """One scale for each weight."""

    name = "fp8"
    measured = True
    format = "float-quantized"
    weights: ClassVar = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    activations: ClassVar = dynamic("float", 8, "token")

    def remark(self, *, experts: bool) -> str:  # noqa: ARG002 - part of the protocol
        """What engines do with one scale for a weight."""
        return (
            "one scale for a weight: vLLM rounds fused layers again, llama.cpp's converter refuses it; "
            "fp8-dynamic is as small and nearer to the source"
        )

    def parts(self, name: str, shape: Ints) -> tuple[Part, ...]:
        """The weight and its scale."""
        return Part(name, F8_E4M3, shape), Part(f"{name}_scale", F32, (1,), 0)

    def encode(self, values: np.ndarray, outs: Sequence[np.ndarray], largest: float) -> int:
        """Fill the codes of whole rows; the pass before has found every value finite."""
        codes, scale = outs[0].reshape(values.shape), _scale(largest)
        with arithmetic(values.shape[1]):
            for block in in_blocks(values):
                rows, magnitudes = block.rows, block.magnitudes
                magnitudes /= scale
                encode_e4m3(magnitudes, block.x, block.scratch, codes[rows])
        return 0

    def whole(self, shape: Ints, largest: float) -> tuple[bytes, ...]:  # noqa: ARG002 - part of the protocol
        """The scale."""
        return (_scale(largest).tobytes(),)

    def decode(self, outs: Sequence[np.ndarray], columns: int, largest: float) -> np.ndarray:
        """The float32 values that engines compute with."""
        return decode_e4m3(outs[0]).reshape(-1, columns) * _scale(largest)


def _scale(largest: float) -> np.float32:
    return np.float32(np.float32(largest) / LARGEST or EPSILON)


MEMBER = Fp8()
