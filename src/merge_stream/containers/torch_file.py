"""A torch.save file as plain data and byte ranges: no torch, no code run, no bulk bytes read.

    open_torch_file(tree, "model_world_size_2_rank_0.pt")
        .root       {"model.norm.weight": <record of _rebuild_tensor_v2>, ...}
        .storages   {"0": StorageExtent(offset=8128, nbytes=8192, crc32=...), ...}

Both forms are read, the zip (`torch_zip`) and the older stream (`torch_legacy`); so is a zip
inside a larger file (each chunk of a DCP `.distcp` file is one), with offsets of that file.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from merge_stream.containers.pickle_reader import read_pickle
from merge_stream.containers.torch_legacy import LEGACY_START, read_stream
from merge_stream.containers.torch_zip import Record, ZipDirectory, read_directory
from merge_stream.errors import CorruptCheckpointError, TruncatedFileError, UnsupportedError
from merge_stream.storage.base import ByteTree

__all__ = ["StorageExtent", "TorchFile", "open_torch_file"]

_SMALL_GAP = 4096
_RETRY = "the file is cut or damaged: copy it again from where it was saved"


class StorageExtent(NamedTuple):
    """Where a storage lies in the file. `crc32` of its bytes, or 0 when the writer gave none."""

    offset: int
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True, eq=False)
class TorchFile:
    """An opened torch.save file.

    `where` is the path for messages, `root` the unpickled plain object (see `pickle_reader`),
    `storages` by key with absolute offsets, `metadata_nbytes` the bytes that were read for it.
    `producer` tells what the container shows: "form" ("zip" or "legacy"), and "writer" ("torch >= 2.9",
    where the records that came with 2.9 are present).
    """

    where: str
    root: Any
    storages: Mapping[str, StorageExtent]
    metadata_nbytes: int
    producer: Mapping[str, str] = field(default_factory=dict)


def open_torch_file(tree: ByteTree, name: str, *, offset: int = 0, nbytes: int | None = None) -> TorchFile:
    """Open a whole file, or the torch.save file at [offset, offset + nbytes) of a larger one.

    TruncatedFileError when it is empty or cut, CorruptCheckpointError when it is no torch file or
    contradicts itself, UnsafePickleError when it asks for code, UnsupportedError for big-endian
    bytes, compressed records and the tar form of torch 0.1.
    """
    entry = tree.entry(name)
    length = entry.nbytes - offset if nbytes is None else nbytes
    if offset < 0 or length < 0 or offset + length > entry.nbytes:
        msg = f"{entry.path} has {entry.nbytes} bytes, but {length} at offset {offset} are needed"
        raise TruncatedFileError(msg, hint=_RETRY)
    if not length:
        msg = f"{entry.path} is empty (0 bytes), wanted a torch.save file"
        raise TruncatedFileError(msg, hint="the save or the copy of it did not finish: copy the file again")
    start = tree.read(name, offset, min(length, len(LEGACY_START)))
    if start.startswith(b"PK\x03\x04"):
        return _open_zip(tree, name, offset, length)
    if start == LEGACY_START:
        stream = read_stream(tree, name, start=offset, nbytes=length)
        storages = {key: StorageExtent(at, size, 0) for key, at, size in stream.storages}
        return TorchFile(entry.path, stream.root, storages, stream.metadata_nbytes, {"form": "legacy"})
    if LEGACY_START.startswith(start) or b"PK\x03\x04".startswith(start):
        msg = f"{entry.path} has only {length} bytes; it is the beginning of a torch.save file"
        raise TruncatedFileError(msg, hint=_RETRY)
    raise _foreign(entry.path, start)


def _foreign(path: str, start: bytes) -> CorruptCheckpointError:
    kinds = {
        b"version https": "it is a Git LFS pointer, not the file itself",
        b"\x1f\x8b": "it is gzip-compressed",
        b"\x28\xb5\x2f\xfd": "it is zstd-compressed",
        b"\x89HDF": "it is an HDF5 file",
        b"<": "it looks like a web page",
        b"\x00" * 8: "it begins with zeros",
    }
    kind = next((text for magic, text in kinds.items() if start.startswith(magic)), "")
    msg = f"{path} is not a torch.save file: {kind or 'it begins with other bytes'} ({start[:8].hex(' ')} ...)"
    return CorruptCheckpointError(msg, hint="copy the file again (`git lfs pull` for a pointer), or unpack it")


def _open_zip(tree: ByteTree, name: str, start: int, nbytes: int) -> TorchFile:
    directory = read_directory(tree, name, start=start, nbytes=nbytes)
    records = directory.records
    where = tree.files[name].path if start == 0 else f"{tree.files[name].path} at byte {start}"
    if "data.pkl" not in records:
        what = "a TorchScript archive" if "constants.pkl" in records else "a zip, but not one of torch.save"
        msg = f"{where} is {what}: it holds no data.pkl"
        raise CorruptCheckpointError(msg, hint="wanted a state dict saved with torch.save")
    pickled, order, read = _read_pickle_bytes(tree, name, directory)
    if order not in (b"", b"little"):
        msg = f"{where} has byte order {order[:20]!r}, wanted little"
        raise UnsupportedError(msg, hint="load and save it again with torch on a little-endian machine")
    wanted = records["data.pkl"].crc32
    if wanted and zlib.crc32(pickled) != wanted:
        msg = f"{where}: data.pkl has checksum {zlib.crc32(pickled):08x}, wanted {wanted:08x}"
        raise CorruptCheckpointError(msg, hint=_RETRY)
    root, _, needed = read_pickle(pickled, where)
    storages = {
        key[5:]: StorageExtent(*record) for key, record in records.items() if key.startswith("data/") and key != "data/"
    }
    for key in needed:
        if key not in storages:
            msg = f"{where}: its pickle uses storage {key}, but there is no record data/{key}"
            raise CorruptCheckpointError(msg, hint=_RETRY)
    producer = {"form": "zip"} | ({"writer": "torch >= 2.9"} if ".format_version" in records else {})
    return TorchFile(where, root, storages, directory.metadata_nbytes + read, producer)


def _read_pickle_bytes(tree: ByteTree, name: str, directory: ZipDirectory) -> tuple[bytes, bytes, int]:
    """(data.pkl, content of byteorder or b"", bytes read): one read where they are neighbours."""
    data: Record = directory.records["data.pkl"]
    order = directory.records.get("byteorder")
    end = data.offset + data.nbytes
    if order is None:
        return tree.read(name, data.offset, data.nbytes), b"", data.nbytes
    if end <= order.offset <= end + _SMALL_GAP and order.nbytes <= _SMALL_GAP:
        wanted = order.offset + order.nbytes - data.offset
        both = tree.read(name, data.offset, wanted)
        return both[: data.nbytes], both[order.offset - data.offset :], wanted
    text = tree.read(name, order.offset, min(order.nbytes, _SMALL_GAP))
    return tree.read(name, data.offset, data.nbytes), text, data.nbytes + len(text)
