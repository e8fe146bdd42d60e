"""`mxfp4`: float4 e2m1 weights with a power of two for each 32 neighbours in a row (compressed-tensors MXFP4A16).

`NAME.weight` [out, in] becomes `NAME.weight_packed` U8 [out, in / 2], the earlier of two codes in the lower half, and
`NAME.weight_scale` U8 [out, in / 32], the exponents of the scales plus 127 (rule: `_mx`); activations stay as they
are. Rows must be made of whole groups. Loads in transformers 5.24 and vLLM 0.33; SGLang 0.5.23 reads experts alone,
llama.cpp's converter none. gpt-oss has a layout of its own (`mxfp4_gpt_oss`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from merge_stream.encodings._compressed import CompressedTensors, arithmetic, count_bad, in_blocks
from merge_stream.encodings._e2m1 import decode_e2m1, encode_e2m1
from merge_stream.encodings._mx import GROUP, decode_scales, may_be_bad, scale_groups
from merge_stream.encodings.base import Ints, Part
from merge_stream.tensors.dtype import U8

if TYPE_CHECKING:
    import numpy as np

__all__ = ["MEMBER"]

_EXPONENT = 2
"""Of the largest code, 6."""


class Mxfp4(CompressedTensors):
    """A power of two for each group of 32 in a row."""

    name = "mxfp4"
    suffixes = ("_packed", "_scale")
    format = "mxfp4-pack-quantized"
    weights: ClassVar = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": GROUP,
        "scale_dtype": "torch.uint8",
    }
    group = GROUP

    def remark(self, *, experts: bool) -> str:  # noqa: ARG002 - part of the protocol
        """Who does not read it."""
        return "mxfp4 is not read by SGLang 0.5.23 (linear layers) and llama.cpp's converter"

    def parts(self, name: str, shape: Ints) -> tuple[Part, ...]:
        """Pairs of codes and the exponents of their scales."""
        packed = Part(f"{name}_packed", U8, (shape[0], -(-shape[1] // 2)))
        return packed, Part(f"{name}_scale", U8, (shape[0], -(-shape[1] // GROUP)))

    def unpacked(self, shape: Ints) -> Ints:
        """Two codes in a byte."""
        return (shape[0], shape[1] * 2) if len(shape) == 2 else ()

    def encode(self, values: np.ndarray, outs: Sequence[np.ndarray], largest: float) -> int:  # noqa: ARG002
        """Fill codes and exponents of whole rows; returns how many values are NaN or infinite."""
        codes, exponents = (out.reshape(len(values), -1) for out in outs)
        with arithmetic(values.shape[1]):
            for block in in_blocks(values):
                rows, magnitudes = block.rows, block.magnitudes
                scale_groups(magnitudes, _EXPONENT, exponents[rows])
                encode_e2m1(magnitudes, block.x, block.scratch, codes[rows])
            return count_bad(values) if may_be_bad(exponents, _EXPONENT) else 0

    def decode(self, outs: Sequence[np.ndarray], columns: int, largest: float) -> np.ndarray:  # noqa: ARG002
        """The float32 values that engines compute with."""
        groups = decode_e2m1(outs[0]).reshape(-1, GROUP)
        groups *= decode_scales(outs[1])[:, None]
        return groups.reshape(-1, columns)


MEMBER = Mxfp4()
