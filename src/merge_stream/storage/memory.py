"""Storage in a dict, for tests and for small examples: the same protocols, no disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from merge_stream.errors import TruncatedFileError
from merge_stream.storage.allowance import MetadataAllowance
from merge_stream.storage.base import FileEntry

__all__ = ["MemorySink", "MemorySource", "MemoryTree"]


class MemoryTree:
    """A `ByteTree` over {name: bytes}."""

    def __init__(
        self, contents: Mapping[str, bytes], label: str = "memory", allowance: MetadataAllowance | None = None
    ) -> None:
        self.allowance = allowance or MetadataAllowance()
        self.label = label
        self._contents = contents
        self.files = {name: FileEntry(name, len(data), 0) for name, data in contents.items()}

    def subtree(self, folder: str) -> MemoryTree:
        """The same files seen from `folder`."""
        prefix = folder.rstrip("/") + "/" if folder else ""
        below = {k[len(prefix) :]: v for k, v in self._contents.items() if k.startswith(prefix)}
        return MemoryTree(below, f"{self.label}/{folder}", self.allowance)

    def folders(self) -> Iterable[str]:
        """Names of the folders directly below."""
        return sorted({name.split("/", 1)[0] for name in self.files if "/" in name})

    def entry(self, name: str) -> FileEntry:
        """The file's entry."""
        return self.files[name]

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Exact bytes of a file."""
        data = self._contents[name]
        stop = len(data) if nbytes is None else offset + nbytes
        if stop > len(data) or offset > stop:
            msg = f"{name} has {len(data)} bytes, wanted up to {stop}"
            raise TruncatedFileError(msg)
        return data[offset:stop]


class MemorySource:
    """A `ByteSource` over {path: bytes}."""

    def __init__(self, contents: Mapping[str, bytes | bytearray]) -> None:
        self.contents = contents
        self.reads: list[tuple[str, int, int]] = []

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`."""
        data = self.contents[path]
        self.reads.append((path, offset, len(buffer)))
        if offset + len(buffer) > len(data):
            msg = f"{path} has {len(data)} bytes, wanted up to {offset + len(buffer)}"
            raise TruncatedFileError(msg)
        buffer[:] = data[offset : offset + len(buffer)]

    def close(self) -> None:
        """Nothing to do."""


class MemorySink:
    """A `ByteSink` into {name: bytearray}."""

    def __init__(self) -> None:
        self.contents: dict[str, bytearray] = {}
        self.syncs: list[str] = []

    def allocate(self, name: str, nbytes: int) -> None:
        """Create the file at its full size."""
        if len(self.contents.get(name, b"")) != nbytes or name not in self.contents:
            self.contents[name] = bytearray(nbytes)

    def write_at(self, name: str, offset: int, buffer: memoryview) -> None:
        """Write all of `buffer`; beyond the allocated size is an error."""
        if offset + len(buffer) > len(self.contents[name]):
            msg = f"write beyond the end of {name}"
            raise ValueError(msg)
        self.contents[name][offset : offset + len(buffer)] = buffer

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from what was written."""
        buffer[:] = self.contents[name][offset : offset + len(buffer)]

    def sync(self, name: str) -> None:
        """Record the call."""
        self.syncs.append(name)

    def close(self) -> None:
        """Nothing to do."""
