"""Checksums that a checkpoint holds about itself: what a container knows of the bytes it stores.

A format puts a reader in `Catalog.checksums` for each kind of container with checksums; what
that reader yields is all that `--check-crc` knows. Nothing is read before it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, Protocol

__all__ = ["ChecksumAlgorithm", "ChecksumReader", "StoredRecord"]

ChecksumAlgorithm = Literal["crc32", "crc32c", "xxh3-64", "sha256"]


class StoredRecord(NamedTuple):
    """Bytes [offset, offset + nbytes) of the file `path` had the checksum `digest` when they were written.

    `name` is what the container calls them ("data/7"), for messages; `digest` is lower-case hex,
    most significant digit first, or "" where the writer left it out.
    """

    path: str
    name: str
    offset: int
    nbytes: int
    algorithm: ChecksumAlgorithm
    digest: str


class ChecksumReader(Protocol):
    """Yields the records of files: for each of `paths` that it knows, all of them that hold tensors.

    Reads directories and the like, never the bytes of tensors. A file that it does not know, or that
    has no checksums at all, yields nothing.
    """

    def __call__(self, paths: frozenset[str]) -> Iterator[StoredRecord]:
        """Records of the files in `paths` (absolute), file by file."""
        ...
