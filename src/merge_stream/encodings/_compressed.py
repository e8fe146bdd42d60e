"""What the schemes of compressed-tensors 0.20 have in common: settings in config.json, and how numbers are handled.

Its arithmetic is float32 (`calculate_qparams`, `quantize`): a scale is the largest magnitude of a row, block or group
divided by the largest code; where that is zero it is the epsilon of float32, 2^-23; a code is value / scale.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from merge_stream.encodings.base import Ints

__all__ = [
    "ELEMENTS",
    "EPSILON",
    "Block",
    "CompressedTensors",
    "arithmetic",
    "count_not_finite",
    "dynamic",
    "group_magnitudes",
    "in_blocks",
]

EPSILON = np.finfo(np.float32).eps
"""The scale of nothing but zeros."""
ELEMENTS = 64 << 10
"""What is encoded at a time (or one row, where that has more): calls of numpy cost little beside it, caches hold it."""
_LONG_GROUP = 64
_BUFFERS = (1024, 8192)


def dynamic(kind: str, bits: int, strategy: str, **more: int) -> dict[str, Any]:
    """Settings of activations that an engine quantizes itself, with scales found as it goes."""
    return {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": True, "strategy": strategy, **more}


class Block(NamedTuple):
    """Some rows as float32 `x`, not to be changed (the source itself, where that is float32), and memory of that shape.

    `magnitudes` are those of `x`, `scratch` is uint32; both may be used up.
    """

    rows: slice
    x: np.ndarray
    magnitudes: np.ndarray
    scratch: np.ndarray


def in_blocks(values: np.ndarray) -> Iterator[Block]:
    """Rows of a tile, some after others."""
    columns = values.shape[1]
    step = max(ELEMENTS // columns, 1)
    plain = values.dtype == np.float32
    wide = values if plain else np.empty((step, columns), np.float32)
    magnitudes, scratch = np.empty((step, columns), np.float32), np.empty((step, columns), np.uint32)
    for low in range(0, len(values), step):
        part = values[low : low + step]
        if not plain:
            np.copyto(wide[: len(part)], part, casting="unsafe")
        x = part if plain else wide[: len(part)]
        np.abs(x, out=magnitudes[: len(part)])
        yield Block(slice(low, low + len(part)), x, magnitudes[: len(part)], scratch[: len(part)])


@contextlib.contextmanager
def arithmetic(columns: int) -> Iterator[None]:
    """No warnings, and buffers no longer than a row: into longer ones numpy copies what a row shares."""
    before = np.setbufsize(min(max(columns // 16 * 16, _BUFFERS[0]), _BUFFERS[1]))
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        np.setbufsize(before)


def group_magnitudes(magnitudes: np.ndarray, size: int) -> np.ndarray:
    """The largest of each `size` neighbours (a power of two) in rows of float32 >= 0, [rows, groups].

    Positive floats are in the order of their bits. numpy reduces long groups quickly; short ones take less time where
    integers with a stride are halved.
    """
    bits = magnitudes.view(np.uint32).reshape(-1)
    if size >= _LONG_GROUP:
        bits = np.maximum.reduceat(bits, np.arange(0, len(bits), size))
    else:
        while size > 1:
            bits = np.maximum(bits[0::2], bits[1::2])
            size //= 2
    tops: np.ndarray = bits.view(np.float32).reshape(len(magnitudes), -1)
    return tops


def count_not_finite(values: np.ndarray, scales: np.ndarray) -> int:
    """How many of `values` are NaN or infinite as float32; looked at only when one of their scales is."""
    return 0 if np.isfinite(scales).all() else count_bad(values)


def count_bad(values: np.ndarray) -> int:
    """How many of `values` are NaN or infinite as float32."""
    return sum(int(b.x.size - np.count_nonzero(np.isfinite(b.x))) for b in in_blocks(values))


class CompressedTensors:
    """Defaults of a scheme with one scale for each row or group of a row, and nothing shared between rows."""

    name: str
    rows = 1
    measured = False
    shares = False
    transposed = False
    suffixes: tuple[str, ...] = ("", "_scale")
    method = "compressed-tensors"
    format: str
    """The form's name in compressed-tensors."""
    weights: ClassVar[Mapping[str, Any]]
    """Settings of the weights: `num_bits`, `type`, `strategy` and, where there are groups, their size."""
    activations: ClassVar[Mapping[str, Any] | None] = None
    group = 1
    """A row must have a multiple of so many elements."""

    def fits(self, shape: Ints) -> str:
        """Rows must be made of whole groups: engines have no kernel for the rest of one."""
        if shape[-1] % self.group:
            return f"rows of {shape[-1]} elements are not made of groups of {self.group}"
        return ""

    def objection(self, *, experts: bool) -> str:  # noqa: ARG002 - part of the protocol
        """No loader is known to read it wrongly."""
        return ""

    def remark(self, *, experts: bool) -> str:  # noqa: ARG002 - part of the protocol
        """Every loader that is looked at reads it."""
        return ""

    def unpacked(self, shape: Ints) -> Ints:
        """Codes have the weight's shape."""
        return shape if len(shape) == 2 else ()

    def whole(self, shape: Ints, largest: float) -> tuple[bytes, ...]:  # noqa: ARG002 - part of the protocol
        """No part stands for the whole weight."""
        return ()

    def settings(self, ignored: Sequence[str]) -> dict[str, Any]:
        """`quantization_config` of config.json; `ignored` are the modules that stay plain."""
        group = {
            "targets": ["Linear"],
            "format": self.format,
            "weights": {**self.weights, "symmetric": True, "dynamic": False},
            "input_activations": None if self.activations is None else dict(self.activations),
            "output_activations": None,
        }
        return {
            "quant_method": self.method,
            "format": self.format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(ignored),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }

    def wrote(self, settings: dict[str, Any]) -> bool:
        """True when `quantization_config` describes weights of this scheme."""
        groups = settings.get("config_groups")
        if settings.get("quant_method") != self.method or not isinstance(groups, dict) or len(groups) != 1:
            return False
        group = next(iter(groups.values()))
        found = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(found, dict):
            return False
        wanted = {**self.weights, "symmetric": True, "dynamic": False}
        wanted.pop("scale_dtype", None)
        return all(found.get(key) == value for key, value in wanted.items())
