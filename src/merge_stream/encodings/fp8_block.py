"""`fp8-block`: float8 e4m3 weights with one scale for each block of 128 x 128 (DeepSeek's layout, `quant_method: fp8`).

`NAME.weight` [out, in] becomes `NAME.weight` F8_E4M3 [out, in] and `NAME.weight_scale_inv` F32 [out / 128, in / 128];
despite its name it is the factor: the value is code x scale. Rule (DeepSeek-V3's `weight_dequant`, compressed-tensors
0.20 FP8_BLOCK): scale = largest magnitude of the block / 448, code = float8 of value / scale clamped to +-448.

Only weights whose dims are multiples of 128: transformers 5.24 derives the size of a block from the numbers of rows and
dequantizes e.g. 192 rows wrongly without an error, 576 raise; vLLM 0.33 refuses such parts of merged layers.
Loads in transformers 4.57 and 5.24, vLLM and SGLang; llama.cpp's converter takes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from merge_stream.encodings._compressed import ELEMENTS, EPSILON, arithmetic, count_not_finite
from merge_stream.encodings._e4m3 import LARGEST, decode_e4m3, encode_e4m3
from merge_stream.encodings.base import Ints, Part
from merge_stream.tensors.dtype import F8_E4M3, F32

__all__ = ["MEMBER"]

_SIDE = 128
_METHOD = "fp8"


class Fp8Block:
    """One scale for each block of 128 x 128; those at the lower and right edge may be smaller."""

    name = "fp8-block"
    rows = _SIDE
    measured = False
    shares = False
    transposed = False
    suffixes = ("", "_scale_inv")

    def fits(self, shape: Ints) -> str:
        """Dims must be multiples of 128."""
        if any(extent % _SIDE for extent in shape):
            return f"{list(shape)} is not made of whole blocks of 128 x 128"
        return ""

    def objection(self, *, experts: bool) -> str:  # noqa: ARG002 - part of the protocol
        """No loader is known to read whole blocks wrongly."""
        return ""

    def remark(self, *, experts: bool) -> str:  # noqa: ARG002 - part of the protocol
        """Every loader that is looked at reads it."""
        return ""

    def parts(self, name: str, shape: Ints) -> tuple[Part, ...]:
        """The weight and its scales."""
        scales = (-(-shape[0] // _SIDE), -(-shape[1] // _SIDE))
        return Part(name, F8_E4M3, shape), Part(f"{name}_scale_inv", F32, scales, _SIDE)

    def unpacked(self, shape: Ints) -> Ints:
        """Codes have the weight's shape."""
        return shape if len(shape) == 2 else ()

    def encode(self, values: np.ndarray, outs: Sequence[np.ndarray], largest: float) -> int:  # noqa: ARG002
        """Fill codes and scales of whole bands of 128 rows; returns how many values are NaN or infinite."""
        rows, columns = values.shape
        codes = outs[0].reshape(values.shape)
        scales = outs[1].view(np.float32).reshape(-1, -(-columns // _SIDE))
        space, found = np.empty((3, ELEMENTS), np.float32), np.empty(ELEMENTS, np.uint8)
        with arithmetic(_SIDE * _SIDE):
            for low in range(0, rows, _SIDE):
                for left, right, width in _runs_of_blocks(columns):
                    there = (slice(low, low + _SIDE), slice(left, right))
                    tile = _by_blocks(values[there], width)
                    x, magnitudes, free = (part[: tile.size].reshape(len(tile), -1) for part in space)
                    np.copyto(x.reshape(tile.shape), tile, casting="unsafe")
                    np.abs(x, out=magnitudes)
                    scale = magnitudes.max(axis=1)
                    scale /= LARGEST
                    scale[scale == 0] = EPSILON
                    scales[low // _SIDE, left // _SIDE : -(-right // _SIDE)] = scale
                    magnitudes /= scale[:, None]
                    encoded = found[: tile.size].reshape(x.shape)
                    encode_e4m3(magnitudes, x, free.view(np.uint32), encoded)
                    np.copyto(_by_blocks(codes[there], width), encoded.reshape(tile.shape))
            return count_not_finite(values, scales)

    def whole(self, shape: Ints, largest: float) -> tuple[bytes, ...]:  # noqa: ARG002 - part of the protocol
        """No part stands for the whole weight."""
        return ()

    def decode(self, outs: Sequence[np.ndarray], columns: int, largest: float) -> np.ndarray:  # noqa: ARG002
        """The float32 values that engines compute with."""
        codes = decode_e4m3(outs[0]).reshape(-1, columns)
        scales = outs[1].view(np.float32).reshape(-1, -(-columns // _SIDE))
        for band, of_band in enumerate(scales):
            codes[band * _SIDE : (band + 1) * _SIDE] *= np.repeat(of_band, _SIDE)[:columns]
        return codes

    def settings(self, ignored: Sequence[str]) -> dict[str, Any]:
        """`quantization_config` of config.json; vLLM wants the activation scheme, DeepSeek's own has `fmt`."""
        return {
            "quant_method": _METHOD,
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [_SIDE, _SIDE],
            "modules_to_not_convert": list(ignored),
        }

    def wrote(self, settings: dict[str, Any]) -> bool:
        """True when `quantization_config` describes weights of this scheme."""
        block = settings.get("weight_block_size")
        return settings.get("quant_method") == _METHOD and block == [_SIDE, _SIDE] and "scale_fmt" not in settings


def _runs_of_blocks(columns: int) -> Iterator[tuple[int, int, int]]:
    """[left, right) of some neighbouring blocks, and the columns of each: whole ones, then the rest."""
    whole, step = columns // _SIDE * _SIDE, ELEMENTS // _SIDE
    for left in range(0, whole, step):
        yield left, min(left + step, whole), _SIDE
    if whole < columns:
        yield whole, columns, columns - whole


def _by_blocks(band: np.ndarray, width: int) -> np.ndarray:
    """A view of rows as [blocks, rows, width]."""
    return band.reshape(len(band), -1, width).transpose(1, 0, 2)


MEMBER = Fp8Block()
