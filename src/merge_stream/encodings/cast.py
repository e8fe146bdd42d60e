"""Plain element types: keep the source's, or cast floating tensors to bf16, fp16 or fp32.

Rounds to nearest even (fp64 to 16 bits by way of fp32); integers, bools and 8-bit floats
are never cast. The values equal torch's `Tensor.to` (tested); NaN stays NaN, its payload
is not specified. Values beyond the range of the target become infinite, as in torch, and
are counted so that the report can say so.

Takes no memory besides the lease, but for blocks where values were lost (or pass through fp32).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from merge_stream.options import DtypeName
from merge_stream.tensors.dtype import DType, dtype_named

__all__ = ["Cast", "encoding_for"]

_TARGETS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
_BLOCK = 64 << 10
_EXPONENT: dict[str, np.unsignedinteger[Any]] = {
    "bfloat16": np.uint16(0x7F80),
    "float16": np.uint16(0x7C00),
    "float32": np.uint32(0x7F800000),
    "float64": np.uint64(0x7FF << 52),
}
"""The exponent bits of each type; all are set in infinities and NaN, and in nothing else."""


class Cast:
    """Cast floating tensors to one type, or keep every source type (`target_name` None)."""

    def __init__(self, name: DtypeName) -> None:
        self.name: str = name
        self._target = dtype_named(_TARGETS[name]) if name != "keep" else None

    def target(self, name: str, source: DType) -> DType:  # noqa: ARG002 - part of the protocol
        """The chosen type for floating tensors, the source's own for others."""
        return self._target if self._target is not None and source.kind == "float" else source

    def encode(self, values: np.ndarray, out: np.ndarray) -> int:
        """Cast into `out`; returns the number of finite values that became infinite."""
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            if values.dtype == np.float64 and out.dtype.itemsize == 2:
                for part in _blocks(len(values)):
                    np.copyto(out[part], values[part].astype(np.float32), casting="unsafe")
            else:
                np.copyto(out, values, casting="unsafe")
            if not _holds_special(out):
                return 0
            lost = (np.count_nonzero(np.isinf(out[part]) & np.isfinite(values[part])) for part in _blocks(len(values)))
            return sum(map(int, lost))


def _blocks(count: int) -> Iterator[slice]:
    return (slice(low, low + _BLOCK) for low in range(0, count, _BLOCK))


def _holds_special(values: np.ndarray) -> bool:
    """True when an infinity or NaN is among them: looked up in the bits, twice, since no memory may be taken."""
    if not len(values):
        return False
    exponent = _EXPONENT[values.dtype.name]
    bits = values.view(exponent.dtype)
    signed = values.view(f"i{values.dtype.itemsize}")  # as such, positive values are above all negative ones
    sign = 1 << (8 * values.dtype.itemsize - 1)
    largest = np.maximum.reduce
    return bool(largest(signed) >= int(exponent) or int(largest(bits)) >= sign | int(exponent))


def encoding_for(name: DtypeName) -> Cast:
    """The encoding that `--dtype name` asks for."""
    return Cast(name)
