"""A staging store as a source: what `merge-stream stage` wrote.

    STORE/zarr.json            root group: every array's metadata (consolidated), what was decided
    STORE/merge_stream.json    SHA-256 of zarr.json and of each side file: the seal, written last but one
    STORE/NAME/c.0.0           an array (see `containers.zarr_array`), and perhaps NAME/zarr.json
    STORE/lora_adapter/        the group of an adapter that was kept: NAME/c.0.0 in it, and its zarr.json
    STORE/side_files/          config.json, tokenizer and the like, as they were beside the checkpoint

A zarr reader fills what is not there with zeros. Here every file must be there at its full
size, every index must be the one that was written, and each chunk is compared with its CRC-32C
when it is read; other zarr stores are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from merge_stream.containers.json_file import read_json
from merge_stream.containers.zarr_array import (
    ADAPTER_GROUP,
    CHECKSUM_NBYTES,
    StoredArray,
    array_metadata,
    index_of,
    read_array,
)
from merge_stream.errors import CorruptCheckpointError, IncompleteShardsError, TruncatedFileError, UnsupportedError
from merge_stream.formats._catalog import FileTable
from merge_stream.formats.base import CheckpointFormat, Detection
from merge_stream.options import OpenOptions
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.ref import Catalog, ShardTable, TensorRef
from merge_stream.tensors.staged import ChunkSums, StagedFacts
from merge_stream.tensors.stored_checksum import StoredRecord

__all__ = ["GROUP", "MEMBER", "ROOT", "SEAL", "SIDE_FILES", "STORE_VERSION", "ZarrStore", "metadata_bytes"]

ROOT = "zarr.json"
SEAL = "merge_stream.json"
SIDE_FILES = "side_files"
STORE_VERSION = 1
GROUP: Mapping[str, Any] = {"zarr_format": 3, "node_type": "group", "attributes": {}}
"""Metadata of the group `ADAPTER_GROUP`."""
_ADDED_LATER: Mapping[str, Any] = {"partial": "", "module_dtype": "", "adapter_config": "", "fingerprint": ""}
_LARGEST = 1 << 30
_BLOCK = 1 << 20
_HINT = "copy the store again from where it is whole, or stage the checkpoint anew"


class ZarrStore:
    """A folder with `merge_stream.json` and `zarr.json`."""

    name = "zarr_store"
    summary = "a staging store (merge_stream.json and zarr.json, written by `merge-stream stage`)"

    def detect(self, tree: ByteTree) -> Detection | None:
        """By the seal; a store without its root metadata is refused when it is opened."""
        return Detection(f"{SEAL} of a staging store", rank=90) if SEAL in tree.files else None

    def open(self, tree: ByteTree, options: OpenOptions) -> Catalog:  # noqa: ARG002  (nothing to override here)
        """Every tensor, after seal, metadata, sizes and indexes were compared with one another."""
        seal = read_json(tree, SEAL, _LARGEST)
        _check_seal(tree, seal)
        facts, stated = _root(tree, seal)
        table = FileTable(tree)
        tensors: dict[str, TensorRef] = {}
        sums: dict[str, ChunkSums] = {}
        files: list[tuple[str, StoredArray]] = []
        for name, metadata in _arrays(tree, stated).items():
            array = read_array(name, metadata, f"{tree.label}/{ROOT}")
            rows = ShardTable.of([], len(array.shape))
            if array.chunks:
                _check_file(tree, array)
                rows = _rows(array, table.index(array.file))
                path = tree.files[array.file].path
                sums[path] = ChunkSums(name, array.data_start, array.stride, array.chunk_nbytes, array.grid)
                files.append((array.file, array))
            own = f"{name}/{ROOT}"
            if own in tree.files and tree.read(own) != metadata_bytes(array_metadata(array)):
                raise _damaged(f"{tree.label}/{own} differs from what {ROOT} says of this tensor")
            tensors[name] = TensorRef(name, array.dtype, array.shape, rows)
        side = next((e.path for n, e in tree.files.items() if n.startswith(f"{SIDE_FILES}/") and n.count("/") == 1), "")
        return Catalog(
            format=self.name,
            root=tree.label,
            tensors=tensors,
            files=table.files,
            facts=facts.facts,
            notes=facts.notes,
            naming="staged",
            config_dirs=(side.rpartition("/")[0],) if side else (),
            metadata_nbytes=tree.files[ROOT].nbytes,
            checksums=(_ChunkRecords(tree, tuple(files)),),
            staged=facts,
            chunk_sums=sums,
            module_dtype=facts.module_dtype,
            partial=facts.partial,
        )


MEMBER: CheckpointFormat = ZarrStore()


def metadata_bytes(metadata: Mapping[str, Any]) -> bytes:
    """Zarr metadata as it is written: without spaces, since small arrays are hardly larger than it."""
    return json.dumps(metadata, separators=(",", ":"), ensure_ascii=False).encode()


@dataclass(frozen=True, slots=True, eq=False)
class _ChunkRecords:
    """The checksum of each chunk, for `--check-crc`."""

    tree: ByteTree
    arrays: tuple[tuple[str, StoredArray], ...]

    def __call__(self, paths: frozenset[str]) -> Iterator[StoredRecord]:
        """One record for each chunk."""
        for file, array in self.arrays:
            path = self.tree.files[file].path
            if path not in paths:
                continue
            sums = ChunkSums(array.name, array.data_start, array.stride, array.chunk_nbytes, array.grid)
            for number in range(array.chunks):
                offset = array.data_start + number * array.stride
                digest = self.tree.read(file, offset + array.chunk_nbytes, CHECKSUM_NBYTES)[::-1].hex()
                name = f"chunk {sums.place(number)}"
                yield StoredRecord(path, name, offset, array.chunk_nbytes, "crc32c", digest)


def _check_seal(tree: ByteTree, seal: Mapping[str, Any]) -> None:
    """The files that the seal names are there, unchanged."""
    if seal.get("version") != STORE_VERSION:
        msg = f"{tree.label} is a store of version {str(seal.get('version'))[:40]}, known is {STORE_VERSION}"
        raise UnsupportedError(msg, hint="finalize it with the version of merge-stream that staged it, or stage anew")
    stated = seal.get("sha256")
    if not isinstance(stated, dict) or ROOT not in stated:
        raise _damaged(f"{tree.label}/{SEAL} names no checksums")
    for name, digest in stated.items():
        if name != ROOT and not name.startswith(f"{SIDE_FILES}/"):
            raise _damaged(f"{tree.label}/{SEAL} names the file {name[:200]!a}")
        if name not in tree.files:
            msg = f"{tree.label}/{name} is missing"
            raise IncompleteShardsError(msg, hint=_HINT)
        if _sha256(tree, name) != digest:
            raise _damaged(f"{tree.label}/{name} changed after the store was written (SHA-256 differs)")
    strange = [n for n in tree.files if n.startswith(f"{SIDE_FILES}/") and n not in stated]
    if strange:
        raise _damaged(f"{tree.label}/{strange[0]} was added after the store was written")


def _sha256(tree: ByteTree, name: str) -> str:
    digest, at, end = hashlib.sha256(), 0, tree.files[name].nbytes
    while at < end:
        block = tree.read(name, at, min(_BLOCK, end - at))
        digest.update(block)
        at += len(block)
    return digest.hexdigest()


def _root(tree: ByteTree, seal: Mapping[str, Any]) -> tuple[StagedFacts, Mapping[str, Any]]:
    """What was decided, and the metadata of every array, from the root group."""
    document = read_json(tree, ROOT, _LARGEST)
    try:
        attributes = document["attributes"]["merge_stream"]
        stated = document["consolidated_metadata"]["metadata"]
        same = attributes["fingerprint"] == seal["fingerprint"]
        held = {**_ADDED_LATER, **attributes["facts"], "fingerprint": attributes["fingerprint"]}
        told = {f.name: held[f.name] for f in fields(StagedFacts)}
        tuples = {name: tuple(value) for name, value in told.items() if isinstance(value, list)}
        facts = StagedFacts(**{**told, **tuples})
    except (KeyError, TypeError, ValueError):
        facts, stated, same = None, None, False
    if facts is None or not same or not isinstance(stated, dict):
        raise _damaged(f"{tree.label}/{ROOT} is not the root of a staging store, or of another than {SEAL}")
    return facts, stated


def _arrays(tree: ByteTree, stated: Mapping[str, Any]) -> Mapping[str, Any]:
    """Metadata of the arrays, without that of the adapter's group, which is there when one of its arrays is."""
    grouped = any(name.startswith(f"{ADAPTER_GROUP}/") for name in stated)
    if (GROUP if grouped else None) != stated.get(ADAPTER_GROUP):
        raise _damaged(f"{tree.label}/{ROOT} and its group {ADAPTER_GROUP} contradict each other")
    return {name: metadata for name, metadata in stated.items() if name != ADAPTER_GROUP}


def _check_file(tree: ByteTree, array: StoredArray) -> None:
    """The file of an array is there, whole, and begins with the index that was written."""
    entry = tree.files.get(array.file)
    sums = ChunkSums(array.name, array.data_start, array.stride, array.chunk_nbytes, array.grid)
    if entry is None:
        msg = f"{array.name}: {tree.label}/{array.file} is missing, with chunks {sums.place(0)} to "
        msg += f"{sums.place(array.chunks - 1)}"
        raise IncompleteShardsError(msg, hint=_HINT)
    if entry.nbytes != array.file_nbytes:
        msg = f"{array.name}: {tree.label}/{array.file} has {entry.nbytes} bytes, wanted {array.file_nbytes}"
        if entry.nbytes < array.file_nbytes:
            number = min(max(entry.nbytes - array.data_start, 0) // array.stride, array.chunks - 1)
            raise TruncatedFileError(f"{msg}: it is cut in chunk {sums.place(number)}", hint=_HINT)
        raise _damaged(msg)
    if array.data_start:
        wanted, found = index_of(array), tree.read(array.file, 0, array.data_start)
        if wanted != found:
            at = next(k for k, (a, b) in enumerate(zip(wanted, found, strict=True)) if a != b)
            chunk = f"chunk {sums.place(at // 16)}" if at // 16 < array.chunks else "its checksum"
            raise _damaged(f"{array.name}: the index of {tree.label}/{array.file} is damaged at byte {at} ({chunk})")


def _rows(array: StoredArray, file: int) -> ShardTable:
    """One shard for each chunk, without its padding."""
    dims = len(array.shape)
    number = np.indices(array.grid, dtype=np.int64).reshape(dims, array.chunks).T
    start = number * np.array(array.chunk, dtype=np.int64)
    stop = np.minimum(start + np.array(array.chunk, dtype=np.int64), np.array(array.shape, dtype=np.int64))
    count = array.chunks
    return ShardTable(
        start.reshape(count, dims),
        stop.reshape(count, dims),
        np.full(count, file, dtype=np.int32),
        array.data_start + np.arange(count, dtype=np.int64) * array.stride,
    )


def _damaged(what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(what, hint=_HINT)
