"""Memory budget: the pool of slabs that is the memory bound.

A run owns `slots` slabs of equal size, mapped on demand and reused. Whoever wants to hold
tensor bytes takes a lease; a lease gives views of its slab, and nothing else in the engine
allocates by size of data. So peak memory is `slots * slab_bytes` by construction, and
tests read it from the process instead of trusting a counter.

Not bounded here: the interpreter, imports and the plan (`reserved`, measured before the
run) and the kernel's page cache.

    worker --lease()--> MemoryBudget --slab--> Lease --take(nbytes)--> memory view

The governor may lower the number of slabs in use (`allow`); it never raises the bound.
"""

from __future__ import annotations

import mmap
import threading

import numpy as np

__all__ = ["Lease", "MemoryBudget"]

_ALIGN = 64


class Lease:
    """One slab, for as long as one unit of work needs it."""

    def __init__(self, slab: np.ndarray) -> None:
        self._slab = slab
        self._used = 0

    def take(self, nbytes: int, phase: int = 0) -> np.ndarray:
        """`nbytes` of the slab as uint8, 64-byte aligned plus `phase` bytes.

        `phase` (taken modulo 64) gives the view the alignment that its bytes have in a
        file. Asking for more than is left is an error of the caller's arithmetic.
        """
        start = -(-self._used // _ALIGN) * _ALIGN + phase % _ALIGN
        stop = start + nbytes
        if stop > len(self._slab):
            msg = f"a lease of {len(self._slab)} bytes cannot give {nbytes} more after {self._used}"
            raise ValueError(msg)
        self._used = stop
        return self._slab[start:stop]

    @property
    def mark(self) -> int:
        """How much is taken; give it to `rewind` to hand back what was taken since."""
        return self._used

    def rewind(self, mark: int) -> None:
        """Give back everything taken since `mark`."""
        self._used = mark

    @property
    def left(self) -> int:
        """Bytes that one `take` of phase 0 can still give."""
        return max(len(self._slab) - -(-self._used // _ALIGN) * _ALIGN, 0)


class _Slab:
    def __init__(self, nbytes: int) -> None:
        self.area = mmap.mmap(-1, nbytes)
        self.memory = np.frombuffer(self.area, dtype=np.uint8)


class MemoryBudget:
    """`slots` slabs of `slab_bytes`; at most `allowed` of them are out at any time."""

    def __init__(self, *, slots: int, slab_bytes: int) -> None:
        self.slots = slots
        self.slab_bytes = slab_bytes
        self._idle: list[_Slab] = []
        self._out = 0
        self._allowed = slots
        self._change = threading.Condition()

    @property
    def allowed(self) -> int:
        """Slabs that may be in use now."""
        return self._allowed

    def allow(self, slabs: int) -> None:
        """Let `slabs` be in use (between 1 and `slots`); idle ones beyond that give their pages back."""
        with self._change:
            self._allowed = min(max(slabs, 1), self.slots)
            spare = self._out + len(self._idle) - self._allowed
            for slab in self._idle[: max(spare, 0)]:
                slab.area.madvise(mmap.MADV_DONTNEED)
            self._change.notify_all()

    def lease(self) -> _Leasing:
        """A slab, for a `with` block; waits while all allowed ones are out."""
        return _Leasing(self)

    def _taken(self) -> _Slab:
        with self._change:
            while self._out >= self._allowed:
                self._change.wait()
            slab = self._idle.pop() if self._idle else _Slab(self.slab_bytes)
            self._out += 1
        return slab

    def _returned(self, slab: _Slab) -> None:
        with self._change:
            self._out -= 1
            self._idle.append(slab)
            self._change.notify()


class _Leasing:
    """The `with` block of a lease; a class, since a generator takes longer, and each segment has one."""

    __slots__ = ("_budget", "_slab")

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget

    def __enter__(self) -> Lease:
        self._slab = self._budget._taken()  # noqa: SLF001 - the two are one
        return Lease(self._slab.memory)

    def __exit__(self, *_: object) -> None:
        self._budget._returned(self._slab)  # noqa: SLF001
