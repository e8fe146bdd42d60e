"""Where the containers of the PyTorch family keep checksums of tensor bytes.

Facts (torch 2.1 to 2.13): `torch.save` notes a CRC-32 of each record in the zip's directory. After
`torch.serialization.set_crc32_options(False)` all of them are zero, `data.pkl` too; so zero means
that none was computed (one true CRC in 2^32 is zero: that record counts as one without). The older
stream and safetensors have none. A chunk of a DCP file is a whole torch.save zip.

Facts (Megatron-core 0.19 and 0.20, `save(..., verify_integrity=True)`): `integrity.json` beside the
files, `{"algorithm": "sha256", "files": {name: hex digits of the whole file}}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from merge_stream.containers.json_file import read_json
from merge_stream.containers.torch_zip import Record, read_directory
from merge_stream.errors import CorruptCheckpointError, UnsupportedError
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.stored_checksum import StoredRecord

__all__ = ["INTEGRITY_FILE", "ChunkRecords", "IntegrityFile", "ZipRecords"]

INTEGRITY_FILE = "integrity.json"
_LARGEST = 64 << 20
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True, eq=False)
class ZipRecords:
    """Records of whole torch.save files, `names` in `tree`; a file of the older stream has none."""

    tree: ByteTree
    names: tuple[str, ...]

    def __call__(self, paths: frozenset[str]) -> Iterator[StoredRecord]:
        """The storages of each file."""
        for name in self.names:
            entry = self.tree.files[name]
            if entry.path in paths and self.tree.read(name, 0, min(2, entry.nbytes)) == b"PK":
                yield from _storages(self.tree, name, 0, entry.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRecords:
    """Records of torch.save zips inside larger files: zip k is bytes [start[k], start[k] + nbytes[k]) of a file.

    `file` indexes `names`; rows stand in the order of the disk.
    """

    tree: ByteTree
    names: tuple[str, ...]
    file: np.ndarray
    start: np.ndarray
    nbytes: np.ndarray

    def __call__(self, paths: frozenset[str]) -> Iterator[StoredRecord]:
        """The storages of each chunk."""
        wanted = np.array([self.tree.files[name].path in paths for name in self.names], dtype=bool)
        for k in wanted[self.file].nonzero()[0]:
            name = self.names[self.file[k]]
            yield from _storages(self.tree, name, int(self.start[k]), int(self.nbytes[k]))


@dataclass(frozen=True, slots=True, eq=False)
class IntegrityFile:
    """Checksums of whole files, as `integrity.json` in `tree` states them."""

    tree: ByteTree

    def __call__(self, paths: frozenset[str]) -> Iterator[StoredRecord]:
        """One record for each file that is named; UnsupportedError for another algorithm than SHA-256."""
        where = f"{self.tree.label}/{INTEGRITY_FILE}"
        document = read_json(self.tree, INTEGRITY_FILE, _LARGEST)
        algorithm = document.get("algorithm", "sha256")
        stated = document.get("files")
        if algorithm != "sha256":
            msg = f"{where} holds checksums of the kind {str(algorithm)[:40]!a}, known is sha256"
            raise UnsupportedError(msg, hint="leave out --check-crc, or check the files with the trainer's own tools")
        if not isinstance(stated, dict):
            msg = f"{where} has no table `files` of names and checksums"
            raise CorruptCheckpointError(msg, hint="the file is damaged: copy it again, or leave out --check-crc")
        for name, entry in self.tree.files.items():
            if entry.path not in paths or name not in stated:
                continue
            digest = stated[name]
            if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
                msg = f"{where}: the checksum of {name} is {str(digest)[:80]!a}, wanted 64 hex digits"
                raise CorruptCheckpointError(msg, hint="the file is damaged: copy it again, or leave out --check-crc")
            yield StoredRecord(entry.path, "the whole file", 0, entry.nbytes, "sha256", digest.lower())


def _storages(tree: ByteTree, name: str, start: int, nbytes: int) -> Iterator[StoredRecord]:
    path = tree.files[name].path
    record: Record
    for key, record in read_directory(tree, name, start=start, nbytes=nbytes).records.items():
        if key.startswith("data/") and record.nbytes:
            digest = f"{record.crc32:08x}" if record.crc32 else ""
            yield StoredRecord(path, key, record.offset, record.nbytes, "crc32", digest)
