"""Open files by path: as many as the process may have, and no more.

A checkpoint of thousands of ranks has thousands of files, and a process may often open no
more than 1024, or 64. Idle files are closed when there are too many; files in use never are.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections import OrderedDict
from itertools import islice

__all__ = ["InUse", "OpenFiles", "open_file_limit"]

_MOST = 32_768


class OpenFiles:
    """Open file descriptors by key: at most `most` idle ones are kept, those in use are never closed."""

    def __init__(self, flags: int, most: int) -> None:
        self._flags = flags
        self._most = most
        self._lock = threading.Lock()
        self._open: OrderedDict[str, InUse] = OrderedDict()

    def using(self, path: str) -> InUse:
        """The open file, for a `with` block; its descriptor is what the block gets."""
        with self._lock:
            slot = self._open.get(path)
            if slot is None:
                slot = self._open[path] = InUse(os.open(path, self._flags | os.O_CLOEXEC), self)
            slot.users += 1
            self._open.move_to_end(path)
        return slot

    def release(self, slot: InUse) -> None:
        """One user less; idle files beyond the limit are closed, the longest idle first."""
        with self._lock:
            slot.users -= 1
            if len(self._open) > self._most:
                idle = (key for key, slot in self._open.items() if slot.users == 0)
                for key in list(islice(idle, len(self._open) - self._most)):
                    os.close(self._open.pop(key).fd)

    def close(self) -> None:
        """Close all; nobody may be reading."""
        with self._lock:
            for slot in self._open.values():
                os.close(slot.fd)
            self._open.clear()


class InUse:
    """An open file and how many use it; leaving the `with` block is one user less.

    A class, since a generator would cost more than the read of a small shard.
    """

    __slots__ = ("_files", "fd", "users")

    def __init__(self, fd: int, files: OpenFiles) -> None:
        self.fd = fd
        self.users = 0
        self._files = files

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *_: object) -> None:
        self._files.release(self)


def open_file_limit() -> int:
    """How many idle files one cache may hold: a quarter of what the process may open, its soft limit raised first.

    A run has two caches, and beside them a file in use for each worker.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return max(8, (_MOST if soft == resource.RLIM_INFINITY else min(soft, _MOST)) // 4)
