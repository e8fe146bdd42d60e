"""The governor: watches memory and lowers the number of slabs in use under pressure.

A safety net and a source of numbers, never the guarantee: the bound is the budget's. It
parks slabs when the process passes what was projected or when machine or container run out
of memory, tells it, and gives them back when the pressure is gone. It never ends a run,
whoever takes the memory: one slab stays in use.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Self

import psutil

from merge_stream.engine.budget import MemoryBudget
from merge_stream.engine.events import Event, Observer, Parked, Progress
from merge_stream.engine.limits import available_limit, free_memory
from merge_stream.engine.memory import MemoryPlan
from merge_stream.units import format_duration

__all__ = ["Governor", "MemorySample"]

_EVERY_SECONDS = 0.25
_NEAR = 0.97
_SCARCE_SHARE, _MOST_SHARE = 0.02, 0.1
_LEAST_SCARCE, _MOST_SCARCE = 32 << 20, 1 << 30
_MOST_SAMPLES = 2000


@dataclass(frozen=True, slots=True)
class MemorySample:
    """`rss` bytes of this process `seconds` after the start, with `slabs` allowed and `done` bytes written."""

    seconds: float
    rss: int
    slabs: int
    done: int = 0


class Governor:
    """Samples memory in a thread of its own while the `with` block runs.

    `parked` counts how often a slab was parked, `parked_seconds` for how long any was, `fewest`
    is the lowest number of slabs in use; `why` says who was short of memory.
    """

    def __init__(self, budget: MemoryBudget, memory: MemoryPlan, observer: Observer) -> None:
        self._budget = budget
        self._most = max(memory.projected, int(memory.allowed * _NEAR))
        self._scarce = _scarce(available_limit().nbytes)
        self._observer = observer
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="governor", daemon=True)
        self._process = psutil.Process()
        self.samples: list[MemorySample] = []
        self._done = 0
        self.peak = 0
        self.parked = 0
        self.parked_seconds = 0.0
        self.fewest = budget.slots
        self.why = ""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._budget.allow(self._budget.slots)  # what comes after the block is watched by nobody

    @property
    def text(self) -> str:
        """What happened, in words; empty when nothing did."""
        if not self.parked:
            return ""
        fewest = f"{self.fewest} of {self._budget.slots} slabs in use at the least"
        return f"{self.why} was short of memory for {format_duration(self.parked_seconds)}: {fewest}"

    def counted(self, event: Event) -> None:
        """An observer that counts what is written, and passes on."""
        if isinstance(event, Progress) and not event.resumed:
            self._done += event.nbytes
        self._observer(event)

    def _watch(self) -> None:
        seconds, every = 0.0, _EVERY_SECONDS
        while True:
            self._sample(seconds)
            if self._budget.allowed < self._budget.slots:
                self.parked_seconds += every
            if self._end.wait(every):
                return
            seconds += every
            if len(self.samples) >= _MOST_SAMPLES:  # half the samples, half the rate: bounded for any length of run
                del self.samples[::2]
                every *= 2

    def _sample(self, seconds: float) -> None:
        rss = int(self._process.memory_info().rss)
        free = free_memory()
        before = self._budget.allowed
        why = "this process" if rss > self._most else free.words if free.nbytes < self._scarce else ""
        self._budget.allow(before - 1 if why else before + 1)
        now = self._budget.allowed
        if now < before:
            self.parked += 1
            self.fewest = min(self.fewest, now)
            self.why = why
        if now != before:
            self._observer(Parked(now, self._budget.slots, why or self.why))
        self.peak = max(self.peak, rss)
        self.samples.append(MemorySample(seconds, rss, now, self._done))


def _scarce(total: int) -> int:
    """Free bytes below which memory is short: 2 %, at least 32 MiB (a tenth of a small container), at most 1 GiB."""
    return int(min(max(total * _SCARCE_SHARE, _LEAST_SCARCE), total * _MOST_SHARE, _MOST_SCARCE))
