"""torch.save's older form: a stream of pickles, then the raw storages.

Facts (torch 1.x, and torch 2.13 with `_use_new_zipfile_serialization=False`):

    pickle 0x1950A86A20F9469CFC6C | pickle 1001 | pickle {"little_endian": True, ...}
    pickle of the object | pickle of the list of storage keys
    for each key in that order: int64 number of elements, raw bytes

There is no index: sizes come from the persistent ids of the object, offsets are a running sum.
The counts are read and compared, so a cut or shifted file is found before any data is used.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from merge_stream.containers.pickle_reader import StorageRecord, described, read_pickle
from merge_stream.containers.pickle_source import PickleSource
from merge_stream.errors import CorruptCheckpointError, TruncatedFileError, UnsupportedError
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.dtype import dtype_of_storage

__all__ = ["LEGACY_START", "LegacyStream", "read_stream"]

LEGACY_START = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
_RETRY = "the file is cut or damaged: copy it again from where it was saved"


class LegacyStream(NamedTuple):
    """The object, (key, absolute offset, bytes) of each storage, bytes of metadata read."""

    root: Any
    storages: list[tuple[str, int, int]]
    metadata_nbytes: int


def read_stream(tree: ByteTree, name: str, *, start: int, nbytes: int) -> LegacyStream:
    """Read the stream at [start, start + nbytes) of a file; bulk bytes are not read."""
    where = tree.files[name].path
    root, storages, keys, end, read = _pickles(tree, name, start, nbytes, where)
    if (
        not isinstance(keys, list)
        or any(type(key) is not str for key in keys)
        or not set(keys) <= set(storages)
        or len(set(keys)) != len(keys)
    ):
        msg = f"{where}: the list of storages of this legacy torch file does not match its tensors"
        raise CorruptCheckpointError(msg, hint=_RETRY)
    position = end
    found: list[tuple[str, int, int]] = []
    for key in keys:
        record = storages[key]
        dtype = dtype_of_storage(record.kind)
        itemsize = 1 if record.kind == "UntypedStorage" else dtype.itemsize if dtype else 0
        if not itemsize:
            msg = f"{where}: storage {key} is a torch.{record.kind}, whose element size is not known"
            raise UnsupportedError(msg, hint="save the file again with a current torch (zip form)")
        if position + 8 + record.numel * itemsize > nbytes:
            msg = f"{where}: storage {key} needs {record.numel * itemsize} bytes at {start + position + 8}, "
            raise TruncatedFileError(f"{msg}but the file ends at {start + nbytes}", hint=_RETRY)
        (numel,) = struct.unpack("<q", tree.read(name, start + position, 8))
        if numel != record.numel:
            msg = f"{where}: storage {key} has {numel} elements in the stream, but its tensors say {record.numel}"
            raise CorruptCheckpointError(msg, hint=_RETRY)
        found.append((key, start + position + 8, numel * itemsize))
        position += 8 + numel * itemsize
    return LegacyStream(root, found, read + 8 * len(keys))


def _pickles(
    tree: ByteTree, name: str, start: int, nbytes: int, where: str
) -> tuple[Any, dict[str, StorageRecord], Any, int, int]:
    """(object, its storages, keys, position after the pickles, bytes read).

    The length of the pickles is not known before they are read: the source reads on until they end.
    """
    source = PickleSource(lambda at, n: tree.read(name, start + at, n), nbytes, where, tree.allowance)
    _, at, _ = read_pickle(source, where)
    protocol, at, _ = read_pickle(source, where, start=at)
    system, at, _ = read_pickle(source, where, start=at)
    _check(protocol, system, where)
    root, at, storages = read_pickle(source, where, start=at)
    keys, at, _ = read_pickle(source, where, start=at)
    return root, storages, keys, at, len(source.data)


def _check(protocol: object, system: object, where: str) -> None:
    if type(protocol) is not int or protocol != 1001 or not isinstance(system, dict):
        msg = f"{where}: this legacy torch file has protocol {described(protocol)}, wanted 1001"
        raise UnsupportedError(msg, hint="save the file again with a current torch (zip form)")
    if system.get("little_endian") is not True:
        msg = f"{where}: the file was saved on a big-endian machine"
        raise UnsupportedError(msg, hint="load and save it again with torch on a little-endian machine")
