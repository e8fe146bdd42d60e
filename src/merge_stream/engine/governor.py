"""The governor: watches memory and lowers the number of slabs in use under pressure.

A safety net and a source of numbers, never the guarantee: the bound is the budget's. It
parks slabs when the process comes near its bound or the machine runs out of memory, and
gives them back when the pressure is gone. It never ends a run: one slab stays in use.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Self

import psutil

from merge_stream.engine.budget import MemoryBudget

__all__ = ["Governor", "MemorySample"]

_EVERY_SECONDS = 0.25
_NEAR = 0.97
_SCARCE_SHARE = 0.02
_MOST_SAMPLES = 2000


@dataclass(frozen=True, slots=True)
class MemorySample:
    """`rss` bytes of this process `seconds` after the start, with `slabs` allowed."""

    seconds: float
    rss: int
    slabs: int


class Governor:
    """Samples memory in a thread of its own while the `with` block runs."""

    def __init__(self, budget: MemoryBudget, *, allowed: int) -> None:
        self._budget = budget
        self._allowed = allowed
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="governor", daemon=True)
        self._process = psutil.Process()
        self.samples: list[MemorySample] = []
        self.peak = 0
        self.parked = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        seconds, every = 0.0, _EVERY_SECONDS
        while True:
            self._sample(seconds)
            if self._end.wait(every):
                return
            seconds += every
            if len(self.samples) >= _MOST_SAMPLES:  # half the samples, half the rate: bounded for any length of run
                del self.samples[::2]
                every *= 2

    def _sample(self, seconds: float) -> None:
        rss = int(self._process.memory_info().rss)
        machine = psutil.virtual_memory()
        scarce = machine.available < machine.total * _SCARCE_SHARE
        before = self._budget.allowed
        if rss > self._allowed * _NEAR or scarce:
            self._budget.allow(before - 1)
        elif before < self._budget.slots:
            self._budget.allow(before + 1)
        if self._budget.allowed < before:
            self.parked += 1
        self.peak = max(self.peak, rss)
        self.samples.append(MemorySample(seconds, rss, self._budget.allowed))
