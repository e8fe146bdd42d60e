"""Reading and writing at an offset: the protocols every storage speaks.

A *tree* is what a format looks at: a closed list of files, made once by listing the
input folders. Names that stand inside checkpoint files can only select from that list,
so a hostile checkpoint cannot make us open anything else.

A *source* is what the engine reads bulk bytes from, a *sink* what it writes to. Reads
and writes are exact: all bytes or an exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from merge_stream.storage.allowance import MetadataAllowance

__all__ = ["ByteSink", "ByteSource", "ByteTree", "FileEntry", "Writable"]

Writable = memoryview | bytearray


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a tree: absolute `path`, size in bytes, modification time in ns."""

    path: str
    nbytes: int
    mtime_ns: int


class ByteTree(Protocol):
    """A closed set of files below one or several input folders.

    Names are relative, with "/" between folders. `allowance` bounds what readers of metadata build.
    """

    label: str
    files: Mapping[str, FileEntry]
    allowance: MetadataAllowance

    def subtree(self, folder: str) -> ByteTree:
        """The same files seen from `folder` (relative; "" is the tree itself)."""
        ...

    def folders(self) -> Iterable[str]:
        """Names of the folders directly below, sorted naturally."""
        ...

    def entry(self, name: str) -> FileEntry:
        """The file, after a check that its copies in other input folders are equal to it."""
        ...

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Exact bytes of a file; TruncatedFileError when it is shorter. For metadata, not for bulk."""
        ...


class ByteSource(Protocol):
    """Positioned reads of source files."""

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`; TruncatedFileError when the file ends before."""
        ...

    def close(self) -> None:
        """Close what is open."""
        ...


class ByteSink(Protocol):
    """Positioned writes below one output folder; names are relative to it."""

    def allocate(self, name: str, nbytes: int) -> None:
        """Create the file at its full size, or accept the one of that size."""
        ...

    def write_at(self, name: str, offset: int, buffer: memoryview) -> None:
        """Write all of `buffer` at `offset`."""
        ...

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from what was written; exact."""
        ...

    def sync(self, name: str) -> None:
        """Return when the data of the file is on stable storage."""
        ...

    def close(self) -> None:
        """Close what is open."""
        ...
