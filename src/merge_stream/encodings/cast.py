"""Plain element types: keep the source's, or cast floating tensors to bf16, fp16 or fp32.

Rounds to nearest even, once, from the source type; integers, bools and 8-bit floats are
never cast. The values equal torch's `Tensor.to` (tested); NaN stays NaN, its payload is
not specified. Values beyond the range of fp16 become infinite, as in torch, and are
counted so that the report can say so.
"""

from __future__ import annotations

import numpy as np

from merge_stream.options import DtypeName
from merge_stream.tensors.dtype import DType, dtype_named

__all__ = ["Cast", "encoding_for"]

_TARGETS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


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
        with np.errstate(over="ignore", invalid="ignore"):
            if values.dtype.itemsize == 8 and out.dtype.itemsize == 2:
                values = values.astype(np.float32)
            np.copyto(out, values, casting="unsafe")
            if out.dtype == np.float16 and values.dtype != np.float16:
                infinite = np.isinf(out)
                if infinite.any():
                    return int(np.count_nonzero(infinite & np.isfinite(values)))
        return 0


def encoding_for(name: DtypeName) -> Cast:
    """The encoding that `--dtype name` asks for."""
    return Cast(name)
