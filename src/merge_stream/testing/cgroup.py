"""A memory cgroup of one's own, below that of this process: what a container is to the kernel.

    with memory_cgroup(200_000_000) as group:
        ended = subprocess.run(group.command(["merge-stream", ...]))
    group.oom_kills, group.peak

v1 and v2. `unavailable()` says why none can be made here (no root, a read-only mount, v2 groups
that hold processes of their own). All limits above stay in force.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["MemoryCgroup", "memory_cgroup", "unavailable"]

_SYS = "/sys/fs/cgroup"
_JOIN = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); os.execvp(sys.argv[2], sys.argv[2:])"


@dataclass(slots=True)
class MemoryCgroup:
    """The group at `path`; numbers are filled in when its block ends."""

    path: str
    unified: bool
    oom_kills: int = 0
    peak: int = 0

    def command(self, words: Sequence[str]) -> list[str]:
        """A command that enters the group and then becomes `words`."""
        return [sys.executable, "-S", "-E", "-c", _JOIN, os.path.join(self.path, "cgroup.procs"), *words]

    def limit(self, nbytes: int) -> None:
        """Set the limit; swap is not to help."""
        swap = ("memory.swap.max", "0") if self.unified else ("memory.memsw.limit_in_bytes", str(nbytes))
        with contextlib.suppress(
            OSError
        ):  # no swap accounting; v1: never below the limit, so raised first, lowered last
            _write(os.path.join(self.path, swap[0]), swap[1])
        name = "memory.max" if self.unified else "memory.limit_in_bytes"
        _write(os.path.join(self.path, name), str(nbytes))
        with contextlib.suppress(OSError):
            _write(os.path.join(self.path, swap[0]), swap[1])

    def usage(self) -> int:
        """Bytes charged now, page cache included."""
        name = "memory.current" if self.unified else "memory.usage_in_bytes"
        return int(_read(os.path.join(self.path, name)))

    def note(self) -> None:
        """Read how often something was killed for memory, and the highest charge."""
        events = "memory.events" if self.unified else "memory.oom_control"
        table = dict(line.split() for line in _read(os.path.join(self.path, events)).splitlines())
        self.oom_kills = int(table.get("oom_kill", 0))
        with contextlib.suppress(OSError):  # memory.peak is younger than v2
            name = "memory.peak" if self.unified else "memory.max_usage_in_bytes"
            self.peak = int(_read(os.path.join(self.path, name)))


def unavailable() -> str:
    """Why no memory cgroup can be made here; empty when one can."""
    try:
        with memory_cgroup(1 << 30):
            return ""
    except OSError as error:
        return f"no memory cgroup can be made here: {error}"


@contextlib.contextmanager
def memory_cgroup(nbytes: int) -> Iterator[MemoryCgroup]:
    """A group with that limit, removed at the end; OSError when the system does not let us."""
    parent, unified = _parent()
    path = os.path.join(parent, f"merge-stream-{os.getpid()}-{time.monotonic_ns()}")
    os.mkdir(path)
    group = MemoryCgroup(path, unified)
    try:
        group.limit(nbytes)
        yield group
        group.note()
    finally:
        for _ in range(100):
            try:
                os.rmdir(path)
                break
            except OSError:
                time.sleep(0.05)  # a process that has ended leaves its group a moment later


def _parent() -> tuple[str, bool]:
    """(folder to make a group in, whether it is of v2)."""
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        lines = [line.rstrip("\n").split(":", 2) for line in file]
    for _, controllers, own in lines:
        if "memory" in controllers.split(","):
            folder = os.path.join(_SYS, "memory", own.strip("/"))
            return (folder if os.path.isdir(folder) else os.path.join(_SYS, "memory")), False
    for _, controllers, own in lines:
        folder = own.strip("/")
        while controllers == "":
            here = os.path.join(_SYS, folder)
            with contextlib.suppress(OSError):
                if "memory" in _read(os.path.join(here, "cgroup.subtree_control")).split():
                    return here, True
            if not folder:
                break
            folder = os.path.dirname(folder)
    raise OSError("no group here hands the memory controller down")


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
