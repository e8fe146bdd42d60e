"""What an output encoding is: which tensors a parameter becomes, and how a tile of values is encoded.

An `Encoding` is an element type, tensor by tensor; a `Scheme` is a quantized form: several tensors for one weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from merge_stream.discovery import members_of
from merge_stream.errors import UnsupportedError
from merge_stream.tensors.dtype import DType

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "BLOCK",
    "Encoding",
    "Part",
    "Scheme",
    "Stored",
    "as_rows",
    "row_nbytes",
    "scheme_named",
    "scheme_that_wrote",
    "schemes",
    "temporaries",
    "weights_in",
    "without_suffix",
]

BLOCK = 32 << 10
"""Elements that are looked at or compared at a time (or one row, where that has more)."""

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One of the tensors that a quantized parameter becomes.

    One row of it stands for `per` rows of the weight (the last one perhaps for fewer); 0: it stands for the whole
    weight, and its content follows from the weight's shape and largest magnitude alone.
    """

    name: str
    dtype: DType
    shape: Ints
    per: int = 1


class Stored(Protocol):
    """A tensor in a file, as far as its form goes."""

    @property
    def dtype(self) -> DType:
        """Element type."""
        ...

    @property
    def shape(self) -> Ints:
        """Shape."""
        ...


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
    """A quantized form of a weight: its codes, and scales beside them.

    A weight has rows of `columns` elements: its last dim; all dims before it, taken together, count rows. Where the
    scheme is `transposed`, its last two dims are those of the model's parameter in the other order.

    1. `fits(shape)` and `objection(experts)` at plan time: which weights it can take, and which models it should not.
    2. `parts(name, shape)` at plan time: the codes first, then scales. Their names are `name` with each of `suffixes`.
    3. `encode(values, outs, largest)` for each tile, from several threads at once. A tile is a multiple of `rows` rows
       (or the last ones), 2-D, of the source's type; `outs` are flat uint8 arrays, one for each part that goes
       by rows. Returns how many values are NaN or infinite: such a weight has no quantized form, and the merge is
       refused. Besides `outs` it takes no more memory than `temporaries` tells.
    4. `whole(shape, largest)` for each weight: the content of the parts that stand for the whole of it.
    5. `settings(ignored)` when config.json is written.

    `largest` is the largest magnitude of the weight, or of all those that share a scale (`shares`); it is looked up
    before anything is written where the scheme is `measured`, else it is 0.
    """

    name: str
    rows: int
    measured: bool
    shares: bool
    transposed: bool
    suffixes: tuple[str, ...]

    def fits(self, shape: Ints) -> str:
        """Why a weight of that shape cannot be written so, in words; "" when it can."""
        ...

    def objection(self, *, experts: bool) -> str:
        """Which loader is known to read such a model wrongly, in words; `experts`: some weights are of experts."""
        ...

    def remark(self, *, experts: bool) -> str:
        """Which loader cannot read such a model, in words; "" for none."""
        ...

    def parts(self, name: str, shape: Ints) -> tuple[Part, ...]:
        """The tensors that are written for parameter `name`."""
        ...

    def unpacked(self, shape: Ints) -> Ints:
        """The shape of the weight whose codes have that shape."""
        ...

    def encode(self, values: np.ndarray, outs: Sequence[np.ndarray], largest: float) -> int:
        """Fill `outs`; returns the number of values that are not finite."""
        ...

    def whole(self, shape: Ints, largest: float) -> tuple[bytes, ...]:
        """Content of the parts that stand for the whole weight, in order."""
        ...

    def decode(self, outs: Sequence[np.ndarray], columns: int, largest: float) -> np.ndarray:
        """The float32 values, [rows, columns], that `outs` (of some rows) stand for; see `engine.compare_quantized`."""
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


def scheme_that_wrote(settings: object) -> Scheme | None:
    """The scheme that this `quantization_config` describes; None for another one, or none."""
    if not isinstance(settings, dict):
        return None
    return next((scheme for scheme in schemes() if scheme.wrote(settings)), None)


def as_rows(scheme: Scheme, shape: Ints) -> Ints:
    """The shape of a weight as the scheme sees it, from that of the parameter; and the other way round."""
    return (*shape[:-2], *shape[:-3:-1]) if scheme.transposed else shape


def row_nbytes(part: Part, shape: Ints) -> int:
    """Bytes of one row of a part that goes by rows; `shape` is that of the weight."""
    count = -(-math.prod(shape[:-1]) // part.per)
    return math.prod(part.shape) * part.dtype.itemsize // max(count, 1)


def weights_in(scheme: Scheme, tensors: Mapping[str, Stored]) -> dict[str, Ints]:
    """Names and shapes of the weights that stand in this form among the tensors of a model, by their codes alone."""
    found = {}
    for name, tensor in tensors.items():
        weight = name.removesuffix(scheme.suffixes[0])
        shape = scheme.unpacked(tensor.shape) if name.endswith(scheme.suffixes[0]) else ()
        if shape:
            codes = scheme.parts(weight, shape)[0]
            if (codes.dtype, codes.shape) == (tensor.dtype, tensor.shape):
                found[weight] = shape
    return found


def without_suffix(scheme: Scheme | None, name: str) -> str:
    """The name of the weight whose part has that name; any other name as it is."""
    endings = () if scheme is None else scheme.suffixes
    return next((name.removesuffix(ending) for ending in endings if ending and name.endswith(ending)), name)
