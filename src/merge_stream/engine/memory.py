"""How much memory this process may use, does use, and will use.

What it may use is `--max-mem` or, without it, a share of what there is (`engine.limits`). The
projection is made before the run:

    projected = max(peak so far, resident now + workers * (slab + window) + headroom + ahead)

`window` is what a worker may have mapped of a source file (`--io mmap`), and what quantization takes beside the slab.
`ahead` is what metadata will still take: each tensor costs when its place is planned, when
the written headers are read back, and when a whole model is opened for a comparison. Where the
address space is limited (`ulimit -v`), slabs, windows and the stacks of threads must fit in that too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

from merge_stream.engine.assembler import slab_bytes
from merge_stream.engine.fold import FoldBytes
from merge_stream.engine.limits import address_room
from merge_stream.errors import MemoryLimitTooSmallError
from merge_stream.options import IoName
from merge_stream.storage.mapped import window_room
from merge_stream.units import format_bytes

__all__ = ["MemoryPlan", "metadata_ahead", "peak_rss", "plan_memory", "resident"]

_HEADROOM = 12 << 20
# Bytes a tensor, measured with 12 000 and 46 000 tensors (names of 50 characters), rounded up.
_TO_PLAN = 1200
_TO_FINISH = 1600
_TO_COMPARE = 1200
_SEGMENTS = (4 << 20, 2 << 20, 1 << 20, 512 << 10, 256 << 10, 64 << 10)
_WORKERS_LIMIT = 16
_STACK = 9 << 20  # of a thread, in a limited address space
_OTHER_THREADS = 3


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The bound of a run in bytes: `workers` slabs of `slab` bytes, segments of `segment` bytes.

    `reserved` is what is resident before any slab is touched, `projected` the highest
    value the run will reach, `allowed` the bound it was fitted in, `bound` whose limit that is.
    """

    workers: int
    segment: int
    slab: int
    reserved: int
    projected: int
    allowed: int
    bound: str

    def figures(self) -> dict[str, int]:
        """What a report tells: bytes allowed, projected, reserved, and the peak of the process so far."""
        return {
            "allowed": self.allowed,
            "projected": self.projected,
            "reserved": self.reserved,
            "peak": peak_rss(),
        }


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
    bound: str = "--max-mem",
    least_segment: int = 0,
    beside: int = 0,
) -> MemoryPlan:
    """Fit workers and segments in `allowed` bytes; MemoryLimitTooSmallError names the smallest value that works.

    `fold` is what folding a LoRA takes beside the tile (`engine.fold.fold_bytes`): more than the least
    only where room is left. `ahead` is what metadata will still take (see `metadata_ahead`).
    Segments hold at least `least_segment` bytes; `beside` is what numpy takes for each worker beside its slab.
    With `io` "mmap" each worker maps a window of a segment's size beside its slab. `bound` says in words
    where `allowed` comes from.
    """
    fold = fold or FoldBytes()
    reserved, peak = resident(), peak_rss()
    fixed = reserved + _HEADROOM + ahead
    room = address_room()
    wanted = min(workers or _cores(), _WORKERS_LIMIT)
    segments = [size for size in _SEGMENTS if size >= least_segment] or [least_segment]
    for segment in segments:
        for count in sorted({wanted, max(wanted // 2, 1), 1}, reverse=True):
            if count == 1 and segment > segments[max(len(segments) - 2, 0)] and wanted > 1:
                continue  # two workers with smaller segments overlap reading and writing; one cannot
            slab = slab_bytes(segment, compare=compare, fold_bytes=fold.least)
            window = beside + (window_room(segment) if io == "mmap" else 0)
            mapped = _HEADROOM + ahead + count * (slab + window + _STACK) + _OTHER_THREADS * _STACK
            if max(peak, fixed + count * (slab + window)) <= allowed and (room is None or mapped <= room):
                slab += min(fold.most - fold.least, (allowed - fixed) // count - slab - window)
                projected = max(peak, fixed + count * (slab + window))
                return MemoryPlan(count, segment, slab, reserved, projected, allowed, bound)
    window = beside + (window_room(segments[-1]) if io == "mmap" else 0)
    slab = slab_bytes(segments[-1], compare=compare, fold_bytes=fold.least)
    least = max(peak, fixed + slab + window)
    mapped = _HEADROOM + ahead + slab + window + (1 + _OTHER_THREADS) * _STACK
    if room is not None and mapped > room:
        missing = -(-(mapped - room) // 1_000_000) + 1
        msg = f"the address space of this process has {format_bytes(room)} left (ulimit -v, ulimit -d)"
        msg += f"; the smallest plan needs {format_bytes(mapped)}"
        raise MemoryLimitTooSmallError(msg, hint=f"raise these limits by {missing} MB or more, or lift them")
    rounded = -(-least // 1_000_000) + 4
    msg = f"{_words(bound, allowed)} is too small: the smallest plan needs {format_bytes(least)}"
    msg += f" ({format_bytes(max(peak, reserved + ahead))} of it are Python, its packages and the plan)"
    raise MemoryLimitTooSmallError(msg, hint=_hint(bound, rounded))


def _words(bound: str, allowed: int) -> str:
    """The bound in a sentence, with its size."""
    if bound.startswith("--max-mem"):
        return f"--max-mem {format_bytes(allowed)}"
    return f"the bound of {format_bytes(allowed)} ({bound})"


def _hint(bound: str, megabytes: int) -> str:
    if bound.startswith(("--max-mem", "half of")):
        return f"give --max-mem {megabytes}M or more"
    return f"{bound} must be {megabytes} MB or more"


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


def _cores() -> int:
    return len(os.sched_getaffinity(0))
