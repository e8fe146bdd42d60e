"""`nvfp4`: float4 e2m1 weights with a float8 scale for each 16 neighbours in a row, and one for all (NVFP4A16).

`NAME.weight` [out, in] becomes `NAME.weight_packed` U8 [out, in / 2], the earlier of two codes in the lower half,
`NAME.weight_scale` F8_E4M3 [out, in / 16] and `NAME.weight_global_scale` F32 [1], which divides: the value is code x
scale / global scale. Activations stay as they are. Rule of compressed-tensors 0.20: global scale = 448 * 6 / largest
magnitude of the weight, 1 where that is none or too large for float32; scale = float8 of global scale * largest
magnitude of the group / 6, where that is zero 0.125; code = e2m1 of value / (scale / global scale).

vLLM 0.33 makes one layer of q/k/v, gate/up and w1/w3 and wants one global scale for it (it warns and takes the
largest, for experts it refuses), so these share the largest magnitude of all of them. It is looked up before anything
is written: weights are read twice. Rows must be made of whole groups. Loads in transformers 5.24 (not experts) and
vLLM on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from merge_stream.encodings._compressed import CompressedTensors, arithmetic, group_magnitudes, in_blocks
from merge_stream.encodings._e2m1 import LARGEST_E2M1, decode_e2m1, encode_e2m1
from merge_stream.encodings._e4m3 import LARGEST, decode_e4m3, encode_e4m3
from merge_stream.encodings.base import Ints, Part
from merge_stream.tensors.dtype import F8_E4M3, F32, U8

__all__ = ["MEMBER"]

_GROUP = 16
_LEAST = np.float32(0.125)


class Nvfp4(CompressedTensors):
    """A scale for each group of 16 in a row, and one for the weight."""

    name = "nvfp4"
    measured = True
    shares = True
    suffixes = ("_packed", "_scale", "_global_scale")
    format = "nvfp4-pack-quantized"
    weights: ClassVar = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": _GROUP,
        "scale_dtype": "torch.float8_e4m3fn",
    }
    group = _GROUP

    def objection(self, *, experts: bool) -> str:
        """Experts are read wrongly."""
        return "transformers 5.24 ignores the global scales of experts: wrong values, no error" if experts else ""

    def remark(self, *, experts: bool) -> str:  # noqa: ARG002 - part of the protocol
        """Who does not read it."""
        return "nvfp4 is not read by llama.cpp's converter and TGI, and vLLM has kernels for GPUs alone"

    def parts(self, name: str, shape: Ints) -> tuple[Part, ...]:
        """Pairs of codes, their scales, and the scale of all."""
        return (
            Part(f"{name}_packed", U8, (shape[0], -(-shape[1] // 2))),
            Part(f"{name}_scale", F8_E4M3, (shape[0], -(-shape[1] // _GROUP))),
            Part(f"{name}_global_scale", F32, (1,), 0),
        )

    def unpacked(self, shape: Ints) -> Ints:
        """Two codes in a byte."""
        return (shape[0], shape[1] * 2) if len(shape) == 2 else ()

    def encode(self, values: np.ndarray, outs: Sequence[np.ndarray], largest: float) -> int:
        """Fill codes and scales of whole rows; the pass before has found every value finite."""
        codes, scales = (out.reshape(len(values), -1) for out in outs)
        of_all = _global_scale(largest)
        with arithmetic(values.shape[1]):
            for block in in_blocks(values):
                rows, magnitudes = block.rows, block.magnitudes
                scale = group_magnitudes(magnitudes, _GROUP)
                scale /= LARGEST_E2M1
                scale *= of_all
                encode_e4m3(scale, scale, np.empty(scale.shape, np.uint32), scales[rows])
                scale = decode_e4m3(scales[rows])
                none = scale == 0
                scale[none] = _LEAST
                scales[rows][none] = _code_of_least()
                scale /= of_all
                groups = magnitudes.reshape(len(magnitudes), -1, _GROUP)
                groups /= scale[:, :, None]
                encode_e2m1(magnitudes, block.x, block.scratch, codes[rows])
        return 0

    def whole(self, shape: Ints, largest: float) -> tuple[bytes, ...]:  # noqa: ARG002 - part of the protocol
        """The global scale."""
        return (_global_scale(largest).tobytes(),)

    def decode(self, outs: Sequence[np.ndarray], columns: int, largest: float) -> np.ndarray:
        """The float32 values that engines compute with."""
        groups = decode_e2m1(outs[0]).reshape(-1, _GROUP)
        groups *= (decode_e4m3(outs[1]) / _global_scale(largest))[:, None]
        return groups.reshape(-1, columns)


def _global_scale(largest: float) -> np.float32:
    with np.errstate(all="ignore"):
        inverse = np.float32(1) / np.maximum(np.float32(largest), np.finfo(np.float32).tiny)
        scale = inverse * (LARGEST * LARGEST_E2M1)  # as torch divides a number by a tensor
    return np.float32(scale if np.isfinite(scale) else 1)


def _code_of_least() -> np.uint8:
    code = np.empty(1, np.uint8)
    encode_e4m3(np.array([_LEAST]), np.array([_LEAST]), np.empty(1, np.uint32), code)
    return np.uint8(code[0])


MEMBER = Nvfp4()
