"""`mxfp8`: float8 e4m3 weights with a power of two for each 32 neighbours in a row (compressed-tensors MXFP8A16).

`NAME.weight` [out, in] becomes `NAME.weight` F8_E4M3 [out, in] and `NAME.weight_scale` U8 [out, in / 32], the
exponents of the scales plus 127 (rule: `_mx`); activations stay as they are. Rows must be made of whole groups. Dense
models load in transformers 5.24; vLLM 0.33 reads all of them, SGLang 0.5.23 and llama.cpp's converter none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from merge_stream.encodings._compressed import CompressedTensors, arithmetic, count_bad, in_blocks
from merge_stream.encodings._e4m3 import decode_e4m3, encode_e4m3
from merge_stream.encodings._mx import GROUP, decode_scales, may_be_bad, scale_groups
from merge_stream.encodings.base import Ints, Part
from merge_stream.tensors.dtype import F8_E4M3, U8

if TYPE_CHECKING:
    import numpy as np

__all__ = ["MEMBER"]

_EXPONENT = 8
"""Of the largest code, 448."""


class Mxfp8(CompressedTensors):
    """A power of two for each group of 32 in a row."""

    name = "mxfp8"
    format = "mxfp8-quantized"
    weights: ClassVar = {
        "num_bits": 8,
        "type": "float",
        "strategy": "group",
        "group_size": GROUP,
        "scale_dtype": "torch.uint8",
    }
    group = GROUP

    def remark(self, *, experts: bool) -> str:
        """Who does not read it."""
        who = "transformers 5.24 (experts), SGLang 0.5.23" if experts else "SGLang 0.5.23"
        return f"mxfp8 is not read by {who} and llama.cpp's converter"

    def parts(self, name: str, shape: Ints) -> tuple[Part, ...]:
        """The weight and the exponents of its scales."""
        return Part(name, F8_E4M3, shape), Part(f"{name}_scale", U8, (shape[0], -(-shape[1] // GROUP)))

    def encode(self, values: np.ndarray, outs: Sequence[np.ndarray], largest: float) -> int:  # noqa: ARG002
        """Fill codes and exponents of whole rows; returns how many values are NaN or infinite."""
        codes, exponents = outs[0].reshape(values.shape), outs[1].reshape(len(values), -1)
        with arithmetic(values.shape[1]):
            for block in in_blocks(values):
                rows, magnitudes = block.rows, block.magnitudes
                scale_groups(magnitudes, _EXPONENT, exponents[rows])
                encode_e4m3(magnitudes, block.x, block.scratch, codes[rows])
            return count_bad(values) if may_be_bad(exponents, _EXPONENT) else 0

    def decode(self, outs: Sequence[np.ndarray], columns: int, largest: float) -> np.ndarray:  # noqa: ARG002
        """The float32 values that engines compute with."""
        groups = decode_e4m3(outs[0]).reshape(-1, GROUP)
        groups *= decode_scales(outs[1])[:, None]
        return groups.reshape(-1, columns)


MEMBER = Mxfp8()
