"""The plan: plain data that says where every output byte comes from and goes to.

    Plan ── outputs     output files with their final headers
         ── parameters  one entry a tensor: its place in a file, its takes, its element types
         ── files       source files
         ── identity    named digests of all that decides the bytes; their digest is the fingerprint

Nothing in a plan knows ranks or trainers. A parameter's source is an `Assembly`: takes
with resolved shard tables, each with at most one product to be added (`LowRank`, `Scaled`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from merge_stream.planning.bands import Bands
from merge_stream.tensors.box import Box
from merge_stream.tensors.dtype import DType, promoted
from merge_stream.tensors.ref import ShardTable, SourceFile
from merge_stream.tensors.staged import ChunkSums

__all__ = [
    "Assembly",
    "LowRank",
    "OutputFile",
    "ParameterPlan",
    "Plan",
    "Quantized",
    "QuantizedPart",
    "ResolvedTake",
    "Scaled",
    "fingerprint_of",
]


@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """`scale * x`, to be added to a 1-D source tensor (the bias of a LoRA); also the magnitudes of a DoRA."""

    x: ResolvedTake
    dtype: DType
    scale: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """`scale * B @ A`, to be added to a 2-D source tensor (a LoRA that is folded).

    a, b         A [r, in] and B [out, r], both of `dtype`
    transposed   the source is stored [in, out] (Conv1D of GPT-2, embeddings)
    experts      0, or the length of the source's leading dim: expert e has rows e*r ... of
                 A [experts * r, in] and columns e, e + experts ... of B [out, r * experts]
    casts_delta  the product is rounded to the source's type before it is added
    magnitude    DoRA: each row of the sum is scaled to this length
    """

    a: ResolvedTake
    a_shape: tuple[int, int]
    b: ResolvedTake
    b_shape: tuple[int, int]
    dtype: DType
    scale: float
    transposed: bool = False
    experts: int = 0
    casts_delta: bool = False
    magnitude: Scaled | None = None

    @property
    def rank(self) -> int:
        """Rows of A (of one expert)."""
        return self.a_shape[0] // max(self.experts, 1)

    def summed(self, source: DType) -> DType:
        """Element type of source + product."""
        return promoted(source, self.dtype)

    def scaled(self, source: DType) -> DType:
        """Element type of magnitude / norm, and of the rows that are scaled with it."""
        return promoted(self.summed(source), self.magnitude.dtype) if self.magnitude else self.summed(source)


@dataclass(frozen=True, slots=True, eq=False)
class ResolvedTake:
    """A take whose source is a shard table in the coordinates of `source_box`.

    Axis k of `dest_box` is axis `permute[k]` of `source_box`; an empty permute is the
    same order. `fold` is added to the source, in the source's coordinates, before it is
    taken. `stored` is the narrower type of the elements on disk, which are widened when
    they are read.
    """

    table: ShardTable
    source_box: Box
    dest_box: Box
    permute: tuple[int, ...] = ()
    fold: LowRank | Scaled | None = None
    stored: DType | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Assembly:
    """Takes that tile `view` exactly once; `dtype` is the element type on disk."""

    view: tuple[int, ...]
    dtype: DType
    takes: tuple[ResolvedTake, ...]


@dataclass(frozen=True, slots=True)
class QuantizedPart:
    """A parameter that holds a part of a quantized weight; one row of it stands for `per` rows of the weight.

    `per` is 0 for a part that stands for the whole weight: it is written with its first rows.
    """

    parameter: int
    per: int
    row_nbytes: int


@dataclass(frozen=True, slots=True)
class Quantized:
    """The form in which a weight is written: a scheme of `encodings`, and the parameters that hold its parts.

    `name` and `shape` are the weight's, whose codes may be packed; `parts` begin with those codes. Weights with the
    same `together` share the largest magnitude that their scales are made of; "": the scheme looks at none.
    """

    scheme: str
    name: str
    shape: tuple[int, ...]
    parts: tuple[QuantizedPart, ...]
    together: str = ""

    @property
    def columns(self) -> int:
        """Elements in a row."""
        return self.shape[-1]


@dataclass(frozen=True, slots=True, eq=False)
class ParameterPlan:
    """One output tensor: `nbytes` bytes at byte `start` of output file `output`.

    `bands` tell where it may be cut, in elements of its source; None: anywhere, and its bytes stand without a gap. A
    `quantized` parameter is cut in whole bands of rows, and each piece fills the same rows of its scales too; those
    are parameters of their own, `part_of` it, with a source that holds nothing.
    """

    name: str
    shape: tuple[int, ...]
    source: Assembly
    dtype: DType
    output: int
    start: int
    bands: Bands | None = None
    quantized: Quantized | None = None
    part_of: str | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the output file."""
        return self.size * self.dtype.itemsize

    @property
    def elements(self) -> int:
        """Number of elements of the model that it holds: packed codes hold several each, scales none."""
        return 0 if self.part_of is not None else math.prod(self.source.view)

    @property
    def source_nbytes(self) -> int:
        """Bytes of the source that it is made of."""
        return self.elements * self.source.dtype.itemsize


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A safetensors file to be written: final header bytes, total size, the parameters in data order."""

    name: str
    header: bytes
    nbytes: int
    parameters: tuple[int, ...]

    @property
    def in_model(self) -> bool:
        """False for files in a sub-folder (an adapter kept beside the model): no index names them."""
        return "/" not in self.name


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """All decisions of a merge, made before the first data byte is read.

    `identity` maps a name ("source files", "--dtype", "tensor layout" ...) to a digest or
    value; two plans write the same bytes when their identities are equal. `notes` are
    remarks for the user, `facts` numbers for `plan` and the report. `chunk_sums` are checksums
    that every read of a source file is compared with, by its path. `scheme` is the quantization of
    the model ("" without one), `left_plain` the modules of which its config must say that they are not.
    """

    parameters: tuple[ParameterPlan, ...]
    outputs: tuple[OutputFile, ...]
    files: tuple[SourceFile, ...]
    identity: Mapping[str, str]
    notes: tuple[str, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    broken_ties: tuple[str, ...] = ()
    probe_nbytes: int = 0
    chunk_sums: Mapping[str, ChunkSums] = field(default_factory=dict)
    scheme: str = ""
    left_plain: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """Identity of the bytes this plan writes."""
        return fingerprint_of(self.identity)

    @property
    def read_nbytes(self) -> int:
        """Tensor bytes that a merge reads; those of weights that are looked at before they are written count twice."""
        return sum(p.source_nbytes * (1 + bool(p.quantized and p.quantized.together)) for p in self.parameters)

    @property
    def write_nbytes(self) -> int:
        """Bytes of all weight files, headers included."""
        return sum(o.nbytes for o in self.outputs)


def fingerprint_of(identity: Mapping[str, str]) -> str:
    """Digest of an identity, independent of the order of its entries."""
    return hashlib.sha256(json.dumps(dict(sorted(identity.items()))).encode()).hexdigest()[:32]
