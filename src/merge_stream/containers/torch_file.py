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
from merge_stream.containers.pickle_source import PickleSource
from merge_stream.containers.torch_legacy import LEGACY_START, read_stream
from merge_stream.containers.torch_zip import Record, ZipDirectory, read_directory
from merge_stream.errors import CorruptCheckpointError, TruncatedFileError, UnsupportedError
from merge_stream.storage.base import ByteTree

__all__ = ["StorageExtent", "TorchFile", "open_torch_file"]

_SMALL_GAP = 4096
_ONE_READ = 1 << 20
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
    record = records["data.pkl"]
    pickled, order, read = _pickle_and_order(tree, name, directory, where)
    if order not in (b"", b"little"):
        msg = f"{where} has byte order {order[:20]!r}, wanted little"
        raise UnsupportedError(msg, hint="load and save it again with torch on a little-endian machine")
    at_once = pickled.whole  # a long one is read as the scan allows it
    if at_once:
        _check_sum(pickled, record, where)
    root, end, needed = read_pickle(pickled, where)
    if not at_once and end == len(pickled.data) == record.nbytes:
        _check_sum(pickled, record, where)
    storages = {
        key[5:]: StorageExtent(*record) for key, record in records.items() if key.startswith("data/") and key != "data/"
    }
    for key in needed:
        if key not in storages:
            msg = f"{where}: its pickle uses storage {key}, but there is no record data/{key}"
            raise CorruptCheckpointError(msg, hint=_RETRY)
    producer = {"form": "zip"} | ({"writer": "torch >= 2.9"} if ".format_version" in records else {})
    return TorchFile(where, root, storages, directory.metadata_nbytes + read, producer)


def _check_sum(pickled: PickleSource, record: Record, where: str) -> None:
    if record.crc32 and zlib.crc32(pickled.data) != record.crc32:
        msg = f"{where}: data.pkl has checksum {zlib.crc32(pickled.data):08x}, wanted {record.crc32:08x}"
        raise CorruptCheckpointError(msg, hint=_RETRY)


def _pickle_and_order(
    tree: ByteTree, name: str, directory: ZipDirectory, where: str
) -> tuple[PickleSource, bytes, int]:
    """(data.pkl, content of byteorder or b"", bytes read): one read where they are neighbours, and not long."""
    data: Record = directory.records["data.pkl"]
    order = directory.records.get("byteorder")
    end = data.offset + data.nbytes
    if order and data.nbytes <= _ONE_READ and end <= order.offset <= end + _SMALL_GAP and order.nbytes <= _SMALL_GAP:
        wanted = order.offset + order.nbytes - data.offset
        tree.allowance.require(wanted, where)
        both = tree.read(name, data.offset, wanted)
        source = PickleSource(lambda at, n: both[at : at + n], data.nbytes, where, tree.allowance)
        return source, both[order.offset - data.offset :], wanted
    text = tree.read(name, order.offset, min(order.nbytes, _SMALL_GAP)) if order else b""
    source = PickleSource(lambda at, n: tree.read(name, data.offset + at, n), data.nbytes, where, tree.allowance)
    return source, text, data.nbytes + len(text)
