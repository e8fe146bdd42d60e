"""How much memory this process may use, does use, and will use.

The limit is the smallest of the host's memory, every cgroup ancestor's limit (v1 and v2;
psutil reports the host alone) and `--max-mem`. The projection is made before the run:

    projected = max(peak so far, resident now + workers * (slab + window) + headroom + ahead)

`window` is what a worker may have mapped of a source file (`--io mmap`; else nothing).
`ahead` is what metadata will still take: each tensor costs when its place is planned, when
the written headers are read back, and when a whole model is opened for a comparison.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

from merge_stream.engine.assembler import slab_bytes
from merge_stream.engine.fold import FoldBytes
from merge_stream.errors import MemoryLimitTooSmallError
from merge_stream.options import IoName
from merge_stream.storage.mapped import window_room
from merge_stream.units import format_bytes

__all__ = ["MemoryPlan", "available_limit", "metadata_ahead", "peak_rss", "plan_memory", "resident"]

_HEADROOM = 12 << 20
# Bytes a tensor, measured with 12 000 and 46 000 tensors (names of 50 characters), rounded up.
_TO_PLAN = 1200
_TO_FINISH = 1600
_TO_COMPARE = 1200
_SEGMENTS = (4 << 20, 2 << 20, 1 << 20, 512 << 10, 256 << 10, 64 << 10)
_WORKERS_LIMIT = 16
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The bound of a run in bytes: `workers` slabs of `slab` bytes, segments of `segment` bytes.

    `reserved` is what is resident before any slab is touched, `projected` the highest
    value the run will reach, `allowed` the bound it was fitted in.
    """

    workers: int
    segment: int
    slab: int
    reserved: int
    projected: int
    allowed: int


def metadata_ahead(*, planned: int = 0, finished: int = 0, compared: int = 0) -> int:
    """Bytes that metadata of so many tensors will still take: to be planned, read back, opened to be compared."""
    return planned * _TO_PLAN + finished * _TO_FINISH + compared * _TO_COMPARE


def plan_memory(
    allowed: int,
    *,
    workers: int | None = None,
    compare: bool = False,
    fold: FoldBytes | None = None,
    ahead: int = 0,
    io: IoName = "auto",
) -> MemoryPlan:
    """Fit workers and segments in `allowed` bytes; MemoryLimitTooSmallError names the smallest value that works.

    `fold` is what folding a LoRA takes beside the tile (`engine.fold.fold_bytes`): more than the least
    only where room is left. `ahead` is what metadata will still take (see `metadata_ahead`).
    With `io` "mmap" each worker maps a window of a segment's size beside its slab.
    """
    fold = fold or FoldBytes()
    reserved, peak = resident(), peak_rss()
    fixed = reserved + _HEADROOM + ahead
    wanted = min(workers or _cores(), _WORKERS_LIMIT)
    for segment in _SEGMENTS:
        for count in sorted({wanted, max(wanted // 2, 1), 1}, reverse=True):
            if count == 1 and segment > _SEGMENTS[-2] and wanted > 1:
                continue  # two workers with smaller segments overlap reading and writing; one cannot
            slab = slab_bytes(segment, compare=compare, fold_bytes=fold.least)
            window = window_room(segment) if io == "mmap" else 0
            if max(peak, fixed + count * (slab + window)) <= allowed:
                slab += min(fold.most - fold.least, (allowed - fixed) // count - slab - window)
                projected = max(peak, fixed + count * (slab + window))
                return MemoryPlan(count, segment, slab, reserved, projected, allowed)
    window = window_room(_SEGMENTS[-1]) if io == "mmap" else 0
    least = max(peak, fixed + slab_bytes(_SEGMENTS[-1], compare=compare, fold_bytes=fold.least) + window)
    rounded = -(-least // 1_000_000) + 4
    msg = f"--max-mem {format_bytes(allowed)} is too small: the smallest plan needs {format_bytes(least)}"
    msg += f" ({format_bytes(max(peak, reserved + ahead))} of it are Python, its packages and the plan)"
    raise MemoryLimitTooSmallError(msg, hint=f"give --max-mem {rounded}M or more")


def resident() -> int:
    """Resident bytes of this process now."""
    return int(psutil.Process().memory_info().rss)


def peak_rss() -> int:
    """Highest resident bytes of this process so far (VmHWM; not inherited from the parent as ru_maxrss is)."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resident()


def available_limit() -> tuple[int, str]:
    """(bytes, which limit it is): the host's memory or the tightest cgroup of this process."""
    limits = [(int(psutil.virtual_memory().total), "the host's memory")]
    for path in _cgroup_files():
        try:
            with open(path, encoding="ascii") as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdecimal() and int(text) < _NO_LIMIT:
            limits.append((int(text), f"the container's limit ({path})"))
    return min(limits)


def _cgroup_files() -> list[str]:
    """Limit files of this process's cgroups and all their ancestors, v1 and v2."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
            lines = [line.strip().split(":", 2) for line in file if line.count(":") >= 2]
    except OSError:
        return []
    files = []
    for _, controllers, path in lines:
        if controllers == "":
            root, names = "/sys/fs/cgroup", ["memory.max", "memory.high"]
        elif "memory" in controllers.split(","):
            root, names = "/sys/fs/cgroup/memory", ["memory.limit_in_bytes"]
        else:
            continue
        folder = path.strip("/")
        while True:
            files += [os.path.join(root, folder, name) for name in names]
            if not folder:
                break
            folder = os.path.dirname(folder)
    return files


def _cores() -> int:
    return len(os.sched_getaffinity(0))
