"""The bytes of pickles in a range of a file: read as the scan goes on, and only as far as memory allows.

Up to 4 MiB are read at once, more in blocks of 1 MiB, each when the scan has passed the one before it. So
a bomb ends where it becomes too large, a sparse file of zeros at its first byte, and an honest file is
read once: what was scanned is what is unpickled, even when the file is changed meanwhile.

    scan of pickle_guard --passed(start, at)--> cost of what was scanned: fits?  --window(at)--> next block: fits?
"""

from __future__ import annotations

import io
from collections.abc import Callable

from merge_stream.containers.pickle_cost import PickleCost
from merge_stream.storage.allowance import MetadataAllowance

__all__ = ["PickleSource"]

_WHOLE = 4 << 20
_BLOCK = 1 << 20
_AHEAD = 4096  # no opcode but a counted value is longer
_SMALL = 1 << 18  # what this builds needs no look at the process
_UNBOUNDED = 1 << 62


class PickleSource:
    """`data` holds the first bytes of the range, or all; `where` names the file for messages.

    `read(at, nbytes)` gives bytes of the range; without an allowance nothing is bounded here.
    """

    def __init__(
        self, read: Callable[[int, int], bytes], nbytes: int, where: str, allowance: MetadataAllowance | None
    ) -> None:
        self.data: bytes | bytearray = b""
        self.where = where
        self.nbytes = nbytes
        self._read, self._allowance = read, allowance
        self._room = _UNBOUNDED if allowance is None else 0
        self._cost = PickleCost(-1)
        self._built = 0
        first = nbytes if nbytes <= _WHOLE else _BLOCK
        self._fit(first)
        self.data = read(0, first) if first == nbytes else bytearray(read(0, first))

    @classmethod
    def of(cls, data: bytes, where: str) -> PickleSource:
        """Bytes that are in memory already."""
        return cls(lambda at, nbytes: data[at : at + nbytes], len(data), where, None)

    @property
    def whole(self) -> bool:
        """True when all bytes of the range were read."""
        return len(self.data) >= self.nbytes

    def window(self, at: int) -> int:
        """How far the scan may go from `at` before it calls `passed`; the bytes for that are read."""
        if at < self.nbytes:
            self._fit(at + self._built)
        while not self.whole and len(self.data) < at + _BLOCK and at < self.nbytes:
            have = len(self.data)
            self._fit(have + have // 8 + _BLOCK + self._built)
            self.data += self._read(have, min(_BLOCK, self.nbytes - have))
        return min(at + _BLOCK, len(self.data) if self.whole else len(self.data) - _AHEAD)

    def passed(self, start: int, at: int, known: int) -> None:
        """The pickle at `start` was scanned up to `at`; `known` bytes of memory are those the scan counted itself.

        MemoryLimitTooSmallError when what it builds does not fit.
        """
        if self._allowance is None:
            return
        if start != self._cost.start:
            self._cost = PickleCost(start)
        self._built = self._cost.rough(self.data, at) + known
        held = len(self.data) + len(self.data) // 8
        if self._built + held > _SMALL and self._built + held > self._limit():
            self._built = self._cost.exact(self.data, at) + known
            if self._built + held > self._limit():
                share = (at - start) / max(self.nbytes - start, 1)
                self._allowance.refuse(int(self._built / share) + self.nbytes, self.where)

    def stream(self, start: int, stop: int) -> io.BufferedReader:
        """The bytes of a scanned pickle, for the unpickler (whose C code reads ahead with peek)."""
        if stop - start <= _BLOCK:
            return io.BufferedReader(io.BytesIO(self.data[start:stop]), min(max(stop - start, 64), 1 << 17))
        return io.BufferedReader(_Slice(memoryview(self.data)[start:stop]), 1 << 17)

    def _fit(self, nbytes: int) -> None:
        if self._allowance is not None and nbytes > _SMALL and nbytes > self._limit():
            self._allowance.refuse(max(nbytes, self.nbytes), self.where)

    def _limit(self) -> int:
        """Room there was before anything was read."""
        if not self._room and self._allowance is not None:
            self._room = max(self._allowance.room(), 1) + len(self.data)
        return self._room


class _Slice(io.RawIOBase):
    """A part of a buffer as a file, without a copy of it."""

    def __init__(self, view: memoryview) -> None:
        super().__init__()
        self._view = view
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """The next bytes."""
        n = min(len(buffer), len(self._view) - self._at)
        buffer[:n] = self._view[self._at : self._at + n]
        self._at += n
        return n

    def close(self) -> None:
        """Let the buffer go."""
        self._view.release()
        super().close()
