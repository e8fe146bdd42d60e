"""What an output encoding is: which tensors a parameter becomes, and how a tile of values is encoded.

An `Encoding` is an element type, tensor by tensor; a `Scheme` is a quantized form: several tensors for one weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from merge_stream.discovery import members_of
from merge_stream.errors import UnsupportedError
from merge_stream.tensors.dtype import DType

if TYPE_CHECKING:
    import numpy as np

__all__ = ["BLOCK", "Encoding", "Part", "Scheme", "scheme_named", "schemes", "temporaries"]

BLOCK = 32 << 10
"""Elements that a scheme works on at a time (or one row, where that has more)."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of the tensors that a quantized parameter becomes."""

    name: str
    dtype: DType
    shape: tuple[int, ...]


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


class Scheme(Protocol):
    """A quantized form of a 2-D weight: its codes, and scales beside them.

    Called in this order:

    1. `parts(name, shape)` at plan time: the weight itself, one byte for each element, then tensors
       with one row for each `rows` rows of the weight.
    2. `encode(values, outs)` for each tile, from several threads at once. A tile is a multiple of `rows` rows (or the
       last ones), 2-D, of the source's type; `outs` are flat uint8 arrays, one for each part. Returns how many
       values are NaN or infinite: such a weight has no quantized form, and the merge is refused.
       Besides `outs` it takes no more memory than `temporaries` tells.
    3. `settings(ignored)` when config.json is written.
    """

    name: str
    rows: int

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """The tensors that are written for parameter `name`; the first bears its name."""
        ...

    def encode(self, values: np.ndarray, outs: Sequence[np.ndarray]) -> int:
        """Fill `outs`; returns the number of values that are not finite."""
        ...

    def decode(self, outs: Sequence[np.ndarray], columns: int) -> np.ndarray:
        """The float32 values, [rows, columns], that `outs` stand for."""
        ...

    def settings(self, ignored: Sequence[str]) -> dict[str, Any]:
        """`quantization_config` of config.json, with the modules that stay plain."""
        ...

    def wrote(self, settings: dict[str, Any]) -> bool:
        """True when this `quantization_config` describes weights of this scheme."""
        ...


def schemes() -> tuple[Scheme, ...]:
    """All quantized forms there are."""
    return members_of("encodings")


def temporaries(columns: int, *, compared: bool) -> int:
    """Bytes that numpy takes beside the lease of a worker for rows of that many columns, measured and rounded up.

    `compared`: codes are decoded too, and their errors taken in float64.
    """
    return max(BLOCK, columns) * (160 if compared else 64) + (512 << 10)


def scheme_named(name: str) -> Scheme:
    """The scheme of that name; UnsupportedError when there is none."""
    for scheme in schemes():
        if scheme.name == name:
            return scheme
    there = ", ".join(scheme.name for scheme in schemes())
    msg = f"there is no quantization {name!r}"
    raise UnsupportedError(msg, hint=f"choose one of: {there}")
