"""A staging area in memory: what a run wrote can be looked at, and the next run can resume from it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from merge_stream.engine.journal import DoneRanges, WrittenRange, checksum
from merge_stream.engine.staging import PlacedBytes
from merge_stream.planning.plan import Plan
from merge_stream.storage.base import ByteSink
from merge_stream.storage.memory import MemorySink

__all__ = ["MemoryStaging"]


class MemoryStaging:
    """A `StagingArea` over a `MemorySink`.

    `ranges` are what is journaled, `writes` what this run has written, in order. Give the
    `sink` and the `ranges` of a broken run to a new one to resume it.
    """

    def __init__(self, plan: Plan, sink: ByteSink | None = None, ranges: tuple[WrittenRange, ...] = ()) -> None:
        self.sink: ByteSink = sink if sink is not None else MemorySink()
        self.ranges = list(ranges)
        self.writes: list[WrittenRange] = []
        self._plan = plan
        self._done = DoneRanges(ranges)
        self._lock = threading.Lock()
        for output in plan.outputs:
            self.sink.allocate(output.name, output.nbytes)
            self.sink.write_at(output.name, 0, memoryview(output.header))

    @property
    def done(self) -> DoneRanges:
        """Ranges that the run before finished."""
        return self._done

    def write(self, output: int, start: int, data: memoryview) -> None:
        """Write and note a range."""
        self.write_together([PlacedBytes(output, start, data)])

    def write_together(self, pieces: Sequence[PlacedBytes]) -> None:
        """Write several ranges, then note all of them."""
        for piece in pieces:
            self.sink.write_at(self._plan.outputs[piece.output].name, piece.start, piece.data)
        noted = [WrittenRange(p.output, p.start, p.start + len(p.data), checksum(p.data)) for p in pieces]
        with self._lock:
            self.writes += noted
            self.ranges += noted

    def sync(self) -> None:
        """Sync all files."""
        for output in self._plan.outputs:
            self.sink.sync(output.name)

    def close(self) -> None:
        """Nothing to let go of."""
