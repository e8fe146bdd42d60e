"""Lazy tensors: what a checkpoint holds, known from metadata alone.

A `TensorRef` is a global tensor and a `ShardTable` of the boxes that hold its bytes. The
rows of the table are numbers in numpy arrays, not objects: a checkpoint of 405B
parameters on 512 ranks has 580 000 of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from merge_stream.tensors.box import Box
from merge_stream.tensors.dtype import DType
from merge_stream.tensors.staged import ChunkSums, StagedFacts
from merge_stream.tensors.stored_checksum import ChecksumReader

__all__ = ["Catalog", "ShardTable", "SourceFile", "TensorRef", "Vocabulary"]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that bulk bytes are read from.

    `path` is absolute, `name` relative to the input folder (for messages), `nbytes` and
    `mtime_ns` are those seen at planning and compared again when the run ends.
    """

    path: str
    name: str
    nbytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class ShardTable:
    """Where a tensor's bytes lie: row k says box k is stored row-major from one file offset.

    start, stop: int64 [n, ndim], half-open, in the tensor's own coordinates
    file:        int32 [n], index into `Catalog.files`
    offset:      int64 [n], byte offset in that file of the box's first element
    Empty boxes are never stored.
    """

    start: np.ndarray
    stop: np.ndarray
    file: np.ndarray
    offset: np.ndarray

    @staticmethod
    def of(rows: Sequence[tuple[Box, int, int]], ndim: int) -> ShardTable:
        """Table of (box, file index, byte offset) rows; empty boxes are dropped."""
        rows = [row for row in rows if row[0].size]
        n = len(rows)
        return ShardTable(
            np.array([r[0].start for r in rows], dtype=np.int64).reshape(n, ndim),
            np.array([r[0].stop for r in rows], dtype=np.int64).reshape(n, ndim),
            np.array([r[1] for r in rows], dtype=np.int32),
            np.array([r[2] for r in rows], dtype=np.int64),
        )

    @staticmethod
    def whole(shape: tuple[int, ...], file: int, offset: int) -> ShardTable:
        """Table of a tensor that stands whole in one file, as `of` makes it, for files of a million tensors."""
        if 0 in shape:
            return ShardTable.of([], len(shape))
        return ShardTable(_origin(len(shape)), _extent(shape), _only(file), np.array((offset,), dtype=np.int64))

    def __len__(self) -> int:
        return len(self.file)

    def row(self, k: int) -> tuple[Box, int, int]:
        """(box, file index, byte offset) of row k."""
        return (
            Box(tuple(self.start[k].tolist()), tuple(self.stop[k].tolist())),
            int(self.file[k]),
            int(self.offset[k]),
        )

    def same_bytes(self, other: ShardTable) -> bool:
        """True when both tables read the very same file ranges for the same boxes."""
        return len(self) == len(other) and all(
            np.array_equal(a, b)
            for a, b in (
                (self.start, other.start),
                (self.stop, other.stop),
                (self.file, other.file),
                (self.offset, other.offset),
            )
        )


@functools.cache
def _origin(ndim: int) -> np.ndarray:
    """The start of a whole tensor, shared and not to be written."""
    start = np.zeros((1, ndim), dtype=np.int64)
    start.flags.writeable = False
    return start


@functools.lru_cache(maxsize=1 << 12)
def _extent(shape: tuple[int, ...]) -> np.ndarray:
    """The stop of a whole tensor, shared and not to be written."""
    stop = np.array((shape,), dtype=np.int64)
    stop.flags.writeable = False
    return stop


@functools.lru_cache(maxsize=1 << 12)
def _only(file: int) -> np.ndarray:
    """One file index, shared and not to be written."""
    files = np.array((file,), dtype=np.int32)
    files.flags.writeable = False
    return files


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """A whole source tensor without its data.

    `shards` tile it exactly once (the planner checks); `replicas` are further stored
    copies of parts of it, dropped by placement and read only by `--check-replicas`. `stored`
    is the narrower type of its elements on disk, where they are widened when read.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    shards: ShardTable
    replicas: ShardTable | None = None
    stored: DType | None = None

    @property
    def on_disk(self) -> DType:
        """Type of the elements in the files."""
        return self.stored or self.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.size * self.dtype.itemsize


class Vocabulary(NamedTuple):
    """Tokens that a trainer tells, and the multiple that it pads rows to; 0 where it does not tell."""

    tokens: int = 0
    multiple: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Catalog:
    """What a checkpoint holds.

    format     name of the format that opened it
    root       the folder the checkpoint was found in
    tensors    trainer's FQN (wrapper prefixes removed) -> TensorRef
    files      source files; `ShardTable.file` indexes them
    facts      what `inspect` tells: trainer, torch version, world size, mesh ...
    ignored    framework noise left out, counted by kind ("optimizer state": 42)
    notes      remarks for the user, one sentence each
    naming     "hf" when names are transformers state-dict names, else the trainer's scheme
               ("torchtitan")
    config_dirs folders beside the checkpoint that may hold config.json and tokenizer
    beside     small files of the checkpoint that say more about it: name -> absolute path
    metadata_nbytes  bytes of metadata that were parsed (feeds the memory projection)
    checksums  readers of the checksums that the containers hold (`--check-crc`)
    twins      the trainer's copies of fp32 masters, by name: each master must round to its twin
    staged     of a staging store: what it tells beside its tensors
    chunk_sums checksums that every read is compared with, by absolute path of the file
    padded_vocabulary  the trainer may have added rows to embedding and head: "base" when only a base model's
               config tells the true number, "any" when every config does
    vocabulary what the trainer tells of those rows: tokens, and the multiple that they were padded to (0 where unknown)
    module_dtype  "config" when fp32 masters stand for the weights of a model whose config tells its type
    no_prediction  the layers of multi-token prediction were left out on request: the config must not count them
    partial    what the user left out on purpose, in words: the tensors are then no whole model
    """

    format: str
    root: str
    tensors: Mapping[str, TensorRef]
    files: tuple[SourceFile, ...]
    facts: Mapping[str, str | int] = field(default_factory=dict)
    ignored: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    naming: str = "hf"
    config_dirs: tuple[str, ...] = ()
    beside: Mapping[str, str] = field(default_factory=dict)
    metadata_nbytes: int = 0
    checksums: tuple[ChecksumReader, ...] = ()
    twins: Mapping[str, TensorRef] = field(default_factory=dict)
    staged: StagedFacts | None = None
    chunk_sums: Mapping[str, ChunkSums] = field(default_factory=dict)
    padded_vocabulary: Literal["", "base", "any"] = ""
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    module_dtype: Literal["", "config"] = ""
    no_prediction: bool = False
    partial: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())
