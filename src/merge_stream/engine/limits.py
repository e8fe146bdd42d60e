"""Where memory ends: the machine, every cgroup above this process (v1 and v2), and the limits of the process.

psutil tells the machine alone, so the cgroup files are read. A cgroup's path in /proc/self/cgroup may
be that of the host while the container sees its own group as the root of the mount: every folder of
the path that is there counts, up to and with the root of the mount. v1 writes "no limit" as a number
near 2^63, v2 as "max"; `memory.high` (v2) throttles, so it counts as a limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from merge_stream.units import parse_memory

__all__ = ["Bound", "Limit", "address_room", "available_limit", "bound_for", "flush_window", "free_memory"]

_DEFAULT_SHARE = 0.5
_NO_LIMIT = 1 << 60
_PROC = "/proc"
_SYS = "/sys/fs/cgroup"
_M_ARENA_MAX = -8
_LEAST_WINDOW, _MOST_WINDOW = 4 << 20, 64 << 20


@dataclass(frozen=True, slots=True, order=True)
class Limit:
    """`nbytes` of memory, and whose they are: "the host's memory", "the container's limit (FILE)"."""

    nbytes: int
    words: str


@dataclass(frozen=True, slots=True)
class Bound:
    """What a run may use, and whose limit that is, in words; `note` when --max-mem was too large."""

    nbytes: int
    words: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Group:
    """A cgroup with a limit: its files of usage and statistics."""

    limit: Limit
    usage: str
    stat: str


def available_limit() -> Limit:
    """The smallest of the host's memory, every cgroup's limit, and the address space and data limits of the process."""
    limits = [Limit(int(psutil.virtual_memory().total), "the host's memory")]
    limits += [group.limit for group in _groups()]
    for kind, option in ((resource.RLIMIT_AS, "v"), (resource.RLIMIT_DATA, "d")):
        soft = resource.getrlimit(kind)[0]
        if soft != resource.RLIM_INFINITY:
            limits.append(Limit(soft, f"the process's limit (ulimit -{option})"))
    return min(limits)


def bound_for(max_mem: str | None) -> Bound:
    """The bound for `--max-mem`: half of what is available without it; never more than is available."""
    limit = available_limit()
    if max_mem is None:
        return Bound(int(limit.nbytes * _DEFAULT_SHARE), f"half of {limit.words}")
    nbytes = parse_memory(max_mem, total=limit.nbytes)
    if nbytes > limit.nbytes:
        return Bound(limit.nbytes, limit.words, f"--max-mem is above {limit.words}, which is used instead")
    share = f" of {limit.words}" if max_mem.strip().endswith("%") else ""
    return Bound(nbytes, f"--max-mem {max_mem.strip()}{share}")


def free_memory() -> Limit:
    """What can be had now without pushing anybody out: of the host, or of the tightest cgroup.

    Page cache counts as free, for the kernel gives it up; files on tmpfs do not.
    """
    host = psutil.virtual_memory()
    found = [Limit(int(host.available), "the host")]
    for group in _groups():
        usage = _number(group.usage)
        if usage is not None:
            held = max(usage - _cached(group.stat), 0)
            found.append(Limit(max(group.limit.nbytes - held, 0), "the container"))
    return min(found)


def address_room() -> int | None:
    """Bytes that the process may still map (`ulimit -v`, `ulimit -d`); None without such a limit.

    With a limit, glibc is told to keep one arena: each thread's own would reserve 64 MiB of it.
    """
    rooms = []
    for kind, field in ((resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:")):
        soft = resource.getrlimit(kind)[0]
        if soft != resource.RLIM_INFINITY:
            rooms.append(max(soft - _status(field), 0))
    if not rooms:
        return None
    with contextlib.suppress(OSError, AttributeError):  # another libc has no arenas
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    return min(rooms)


def flush_window() -> int:
    """Written bytes after which the disk is waited for: a sixteenth of what is available, 64 MiB at most.

    At most four windows are not yet on the disk: a container counts such pages, and cannot give them up.
    """
    return min(max(available_limit().nbytes // 16, _LEAST_WINDOW), _MOST_WINDOW)


def _groups() -> Iterator[_Group]:
    """The cgroups of this process and above it that have a limit."""
    for folder, names, usage in _folders():
        for name in names:
            path = os.path.join(folder, name)
            nbytes = _number(path)
            if nbytes is not None and nbytes < _NO_LIMIT:
                limit = Limit(nbytes, f"the container's limit ({path})")
                yield _Group(limit, os.path.join(folder, usage), os.path.join(folder, "memory.stat"))


def _folders() -> Iterator[tuple[str, tuple[str, ...], str]]:
    """(folder, names of its limit files, name of its usage file), from the process's own group to the root."""
    try:
        with open(os.path.join(_PROC, "self/cgroup"), encoding="utf-8", errors="replace") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file if line.count(":") >= 2]
    except OSError:
        return
    for _, controllers, path in lines:
        names: tuple[str, ...]
        if controllers == "":
            roots, names, usage = [_SYS, os.path.join(_SYS, "unified")], ("memory.max", "memory.high"), "memory.current"
        elif "memory" in controllers.split(","):
            roots = [os.path.join(_SYS, "memory"), os.path.join(_SYS, controllers)]
            names, usage = ("memory.limit_in_bytes",), "memory.usage_in_bytes"
        else:
            continue
        for root in dict.fromkeys(roots):
            folder = path.strip("/")
            while True:
                yield os.path.join(root, folder), names, usage
                if not folder:
                    break
                folder = os.path.dirname(folder)


def _number(path: str) -> int | None:
    """The number in a file; None when it is not there, or says "max"."""
    try:
        with open(path, encoding="ascii") as file:
            text = file.read().strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdecimal() else None


def _cached(path: str) -> int:
    """Bytes of page cache in a memory.stat: of v2, or with v1's totals over the groups below."""
    table: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
        for line in file:
            key, _, value = line.partition(" ")
            table[key] = int(value)
    return sum(table.get(f"total_{key}", table.get(key, 0)) for key in ("inactive_file", "active_file"))


def _status(field: str) -> int:
    with contextlib.suppress(OSError), open(f"{_PROC}/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return 0
