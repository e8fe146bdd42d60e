"""Tensors of a DCP folder: the chunks that the metadata lists, checked against files and tensor."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from merge_stream.errors import CorruptCheckpointError, IncompleteShardsError, TruncatedFileError
from merge_stream.formats._catalog import FileTable, listed
from merge_stream.formats._dcp_chunks import ChunkReader
from merge_stream.formats._dcp_metadata import DcpMetadata, StoredChunk
from merge_stream.formats._stored_checksums import ChunkRecords
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.ref import ShardTable, TensorRef

__all__ = ["ModelChunks"]

Ints = tuple[int, ...]
_Row = tuple[Ints, Ints, int, int]  # offset and size of the box, file, byte offset

_NODES = "With node-local disks give every node's folder: --input A --input B; else copy the file again"


class ModelChunks:
    """The chunks of the model's tensors: checked against files and tensor, read in the order of the disk."""

    def __init__(self, tree: ByteTree, meta: DcpMetadata, keys: Iterable[str], table: FileTable) -> None:
        self._tree = tree
        self._table = table
        self._entries = {key: meta.tensors[key] for key in keys}
        self._stored = {key: self._checked(key, meta.stored.get(key, ())) for key in self._entries}
        wanted = [(chunk, key) for key, chunks in self._stored.items() for chunk in chunks]
        _check_files(tree, [chunk for chunk, _ in wanted])
        wanted.sort(key=lambda item: (item[0].file, item[0].start))
        reader = ChunkReader(tree)
        self._places = {(c.file, c.start): reader.place(c.file, c.start, c.nbytes, tensor=key) for c, key in wanted}
        self.count = len(wanted)
        self.read_nbytes = reader.read_nbytes
        names = tuple(dict.fromkeys(chunk.file for chunk, _ in wanted))
        number = {name: k for k, name in enumerate(names)}
        self.checksums = ChunkRecords(
            tree,
            names,
            np.array([number[chunk.file] for chunk, _ in wanted], dtype=np.int32),
            np.array([chunk.start for chunk, _ in wanted], dtype=np.int64),
            np.array([chunk.nbytes for chunk, _ in wanted], dtype=np.int64),
        )

    def _checked(self, key: str, stored: Iterable[StoredChunk]) -> list[StoredChunk]:
        """The stored chunks that hold elements; every chunk of the tensor must be among them."""
        entry, result = self._entries[key], []
        found: set[Ints] = set()
        for chunk in stored:
            if chunk.offsets in entry.chunks:
                found.add(chunk.offsets)
                result.append(chunk)
            elif chunk.offsets not in entry.empty:
                raise CorruptCheckpointError(
                    f"{self._tree.label}: a chunk of {key!r} is stored at {list(chunk.offsets)} in {chunk.file!r}, "
                    "but the metadata lists no chunk there"
                )
        if len(found) < len(entry.chunks):
            lost = [list(offsets) for offsets in entry.chunks if offsets not in found]
            raise IncompleteShardsError(
                f"{self._tree.label}: the metadata does not say where {len(lost)} chunks of {key!r} are stored, "
                f"the first at {lost[0]}",
                hint="a metadata file is missing or damaged",
            )
        return result

    def tensor(self, key: str, name: str) -> TensorRef:
        """The tensor; the first stored copy of a chunk is a shard, further ones are replicas."""
        entry = self._entries[key]
        shards: list[_Row] = []
        replicas: list[_Row] = []
        seen: set[Ints] = set()
        for chunk in self._stored[key]:
            place, size = self._places[chunk.file, chunk.start], entry.chunks[chunk.offsets]
            if place.shape != size or place.dtype is not entry.dtype:
                if chunk.offsets in entry.empty and 0 in place.shape:
                    continue  # a chunk of size zero at the same offset
                raise CorruptCheckpointError(
                    f"{self._tree.label}/{chunk.file}: the chunk of {key!r} at byte {chunk.start} is "
                    f"{place.dtype} {list(place.shape)}, the metadata says {entry.dtype} {list(size)}",
                    hint="metadata and data are of two different saves",
                )
            rows = replicas if chunk.offsets in seen else shards
            rows.append((chunk.offsets, size, self._table.index(chunk.file), place.offset))
            seen.add(chunk.offsets)
        ndim = len(entry.size)
        return TensorRef(
            name, entry.dtype, entry.size, _table_of(shards, ndim), _table_of(replicas, ndim) if replicas else None
        )


def _table_of(rows: list[_Row], ndim: int) -> ShardTable:
    start = np.array([row[0] for row in rows], dtype=np.int64).reshape(len(rows), ndim)
    size = np.array([row[1] for row in rows], dtype=np.int64).reshape(len(rows), ndim)
    return ShardTable(
        start,
        start + size,
        np.array([row[2] for row in rows], dtype=np.int32),
        np.array([row[3] for row in rows], dtype=np.int64),
    )


def _check_files(tree: ByteTree, chunks: Iterable[StoredChunk]) -> None:
    """Every file is in the folder and long enough."""
    ends: dict[str, int] = {}
    for chunk in chunks:
        ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.nbytes)
    missing = sorted(name for name in ends if name not in tree.files)
    if outside := [name for name in missing if name.startswith("/") or ".." in name.split("/")]:
        raise CorruptCheckpointError(
            f"{tree.label}: the metadata points out of the folder, to {listed(map(repr, outside))}",
            hint="this is no trainer's file; do not load it with torch",
        )
    if missing:
        raise IncompleteShardsError(
            f"{tree.label} lacks {len(missing)} of {len(ends)} files that the metadata names: {listed(missing)}",
            hint=_NODES,
        )
    for name, end in ends.items():
        if end > tree.files[name].nbytes:
            raise TruncatedFileError(
                f"{tree.label}/{name} has {tree.files[name].nbytes} bytes, its chunks end at byte {end}",
                hint="the file is cut or was not copied whole: copy it again",
            )
