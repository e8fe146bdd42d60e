"""Files whose blocks of zeros take no disk: what is zero is left out where the file is new."""

from __future__ import annotations

import os

import numpy as np

from merge_stream.storage.local import LocalSink

__all__ = ["HolesSink"]

_BLOCK = 64 << 10
"""Bytes that are left out together; file systems allocate in blocks of 4 KiB to 64 KiB."""


class HolesSink(LocalSink):
    """A sink that does not write blocks of zeros into files that it made itself: there a hole reads as zeros.

    A file of an earlier run may hold anything where nothing was noted, so all of it is written.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self._new: set[str] = set()

    def allocate(self, name: str, nbytes: int) -> None:
        """As in `LocalSink`."""
        if not os.path.lexists(self.path(name)):
            self._new.add(name)
        super().allocate(name, nbytes)

    def write_at(self, name: str, offset: int, buffer: memoryview) -> None:
        """Write all of `buffer` but its whole zero blocks; an OSError names the path."""
        if name not in self._new:
            super().write_at(name, offset, buffer)
            return
        data = np.frombuffer(buffer, np.uint8)
        start = 0
        while start < len(data):
            stop = min(start + _BLOCK - (offset + start) % _BLOCK, len(data))
            if not data[start:stop].max():
                start = stop
                continue
            end = stop  # as many blocks as hold something
            while end < len(data) and data[end : end + _BLOCK].max():
                end = min(end + _BLOCK, len(data))
            super().write_at(name, offset + start, buffer[start:end])
            start = end
