"""What the schemes of compressed-tensors 0.20 have in common: settings in config.json, and how numbers are handled.

Its arithmetic is float32 (`calculate_qparams`, `quantize`): a scale is the largest magnitude of a row, block or group
divided by the largest code; where that is zero it is the epsilon of float32, 2^-23; a code is value / scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from merge_stream.encodings.base import BLOCK, Ints

__all__ = ["EPSILON", "CompressedTensors", "count_not_finite", "dynamic", "group_magnitudes", "in_blocks"]

EPSILON = np.finfo(np.float32).eps
"""The scale of nothing but zeros."""


def dynamic(kind: str, bits: int, strategy: str, **more: int) -> dict[str, Any]:
    """Settings of activations that an engine quantizes itself, with scales found as it goes."""
    return {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": True, "strategy": strategy, **more}


def in_blocks(values: np.ndarray) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Some rows after another as float32, which may be used up, and uint32 scratch of the same shape."""
    columns = values.shape[1]
    step = max(BLOCK // columns, 1)
    wide, scratch = np.empty((step, columns), np.float32), np.empty((step, columns), np.uint32)
    for low in range(0, len(values), step):
        part = values[low : low + step]
        np.copyto(wide[: len(part)], part, casting="unsafe")
        yield slice(low, low + len(part)), wide[: len(part)], scratch[: len(part)]


def group_magnitudes(x: np.ndarray, size: int, scratch: np.ndarray) -> np.ndarray:
    """The largest magnitude of each `size` neighbours (a power of two) in rows of float32, [rows, groups].

    Positive floats are in the order of their bits, and numpy halves integers with a stride several times faster
    than it reduces short rows.
    """
    bits = np.bitwise_and(x.view(np.uint32), np.uint32(0x7FFFFFFF), out=scratch).reshape(-1)
    while size > 1:
        bits = np.maximum(bits[0::2], bits[1::2])
        size //= 2
    tops: np.ndarray = bits.view(np.float32).reshape(len(x), -1)
    return tops


def count_not_finite(values: np.ndarray, largest: np.ndarray) -> int:
    """How many of `values` are NaN or infinite; looked at only when one of the largest magnitudes is."""
    if np.isfinite(largest).all():
        return 0
    return int(values.size - np.count_nonzero(np.isfinite(values)))


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
