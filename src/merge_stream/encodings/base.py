"""What an output encoding is: which tensors a parameter becomes, and how a tile of values is encoded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from merge_stream.tensors.dtype import DType

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Encoding"]


class Encoding(Protocol):
    """Element type of the output, decided parameter by parameter.

    Called in this order:

    1. `target(name, source)` at plan time, once for each parameter.
    2. `encode(values, out)` for each tile, from several threads at once. `values` is a flat
       array of the source type (numpy, ml_dtypes where numpy has none), `out` a flat array of
       the target type; both are views of a lease. The result must not depend on how the
       parameter was cut in tiles. Returns how many finite values left the target's range.
    """

    name: str

    def target(self, name: str, source: DType) -> DType:
        """Element type that parameter `name` of type `source` is written in."""
        ...

    def encode(self, values: np.ndarray, out: np.ndarray) -> int:
        """Fill `out`; returns the number of finite values that became infinite."""
        ...
