"""Storage that fails on purpose: the n-th call, by an error of your choice, once or from then on.

source = FaultySource(LocalSource(), fail_at=3, error=os_error(errno.EIO))
sink = FaultySink(MemorySink(), on="sync", error=os_error(errno.ENOSPC), stays=True)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Literal

from merge_stream.storage.base import ByteSink, ByteSource

__all__ = ["FaultySink", "FaultySource", "os_error"]


def os_error(number: int) -> Callable[[], OSError]:
    """Makes OSErrors of one errno, as the system would raise them."""
    return lambda: OSError(number, os.strerror(number))


class _Fuse:
    """Raises at call `fail_at` (from 0), and at all later ones when the fault `stays`."""

    def __init__(self, fail_at: int, error: Callable[[], BaseException], *, stays: bool) -> None:
        self.calls = 0
        self._fail_at = fail_at
        self._error = error
        self._stays = stays
        self._lock = threading.Lock()

    def blows(self) -> BaseException | None:
        """The error of this call, if it has one."""
        with self._lock:
            call, self.calls = self.calls, self.calls + 1
        hit = call >= self._fail_at if self._stays else call == self._fail_at
        return self._error() if hit else None


class FaultySource:
    """A `ByteSource` whose n-th read fails; the buffer is half filled by then, as a real one may be."""

    def __init__(
        self, source: ByteSource, *, fail_at: int = 0, error: Callable[[], BaseException], stays: bool = False
    ) -> None:
        self._source = source
        self._fuse = _Fuse(fail_at, error, stays=stays)

    @property
    def calls(self) -> int:
        """Reads so far, failed ones included."""
        return self._fuse.calls

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`, or half of it and raise."""
        error = self._fuse.blows()
        if error is not None:
            self._source.read_into(path, offset, buffer[: len(buffer) // 2])
            raise error
        self._source.read_into(path, offset, buffer)

    def close(self) -> None:
        """Close the source."""
        self._source.close()


class FaultySink:
    """A `ByteSink` whose n-th `write_at` (or `sync`, `read_into`) fails; half of the write is done by then."""

    def __init__(
        self,
        sink: ByteSink,
        *,
        on: Literal["write_at", "sync", "read_into"] = "write_at",
        fail_at: int = 0,
        error: Callable[[], BaseException],
        stays: bool = False,
    ) -> None:
        self._sink = sink
        self._on = on
        self._fuse = _Fuse(fail_at, error, stays=stays)

    @property
    def calls(self) -> int:
        """Calls of the faulty method so far."""
        return self._fuse.calls

    def allocate(self, name: str, nbytes: int) -> None:
        """Create the file at its full size."""
        self._sink.allocate(name, nbytes)

    def write_at(self, name: str, offset: int, buffer: memoryview) -> None:
        """Write all of `buffer`, or half of it and raise."""
        error = self._error("write_at")
        if error is not None:
            self._sink.write_at(name, offset, buffer[: len(buffer) // 2])
            raise error
        self._sink.write_at(name, offset, buffer)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`, or raise."""
        error = self._error("read_into")
        if error is not None:
            raise error
        self._sink.read_into(name, offset, buffer)

    def sync(self, name: str) -> None:
        """Sync, or raise."""
        error = self._error("sync")
        if error is not None:
            raise error
        self._sink.sync(name)

    def close(self) -> None:
        """Close the sink."""
        self._sink.close()

    def _error(self, method: str) -> BaseException | None:
        return self._fuse.blows() if method == self._on else None
