"""N workers over the segments of a plan, one output file after another.

Each worker takes the next segment, leases a slab, assembles the tiles into one contiguous
buffer and writes it as one range. Reads, copies, casts, checksums and writes release the
GIL, so workers in different phases overlap reading and writing by themselves. There are
no queues: what is in flight is what is leased.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from merge_stream.encodings.base import Encoding, scheme_named
from merge_stream.engine.assembler import Assembler
from merge_stream.engine.budget import Lease, MemoryBudget
from merge_stream.engine.events import Observer, Progress
from merge_stream.engine.staging import PlacedBytes, StagingArea
from merge_stream.errors import InterruptedRunError
from merge_stream.planning.plan import Plan
from merge_stream.planning.segments import Segment, segments_of
from merge_stream.storage.base import ByteSource

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Executed", "QuantizedRows", "StopFlag", "assemble_quantized", "execute", "run_workers"]

T = TypeVar("T")


class StopFlag:
    """Set from a signal handler to end a run at the next segment border."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.reason = ""
        self.working = False
        """Workers are running and will look at the flag; otherwise nobody does."""

    def set(self, reason: str) -> None:
        """Ask for the end."""
        self.reason = reason
        self._event.set()

    def check(self) -> None:
        """InterruptedRunError when the end was asked for."""
        if self._event.is_set():
            msg = f"stopped by {self.reason or 'request'}"
            raise InterruptedRunError(msg, hint="the partial folder is kept; the same command continues it")


@dataclass(slots=True)
class Executed:
    """Numbers of an execution: bytes read, written and found done; values lost to an encoding's range."""

    read_nbytes: int = 0
    written_nbytes: int = 0
    resumed_nbytes: int = 0
    overflows: dict[str, int] = field(default_factory=dict)


def execute(
    plan: Plan,
    staging: StagingArea,
    source: ByteSource,
    encoding: Encoding,
    *,
    budget: MemoryBudget,
    segment_bytes: int,
    observer: Observer,
    stop: StopFlag,
    largest: Mapping[str, float] = MappingProxyType({}),
) -> Executed:
    """Write every segment that is not done; returns when all are written and synced.

    `largest` are the magnitudes that the scheme of the plan looks up before (`engine.largest`).
    On any error the first one is raised after all workers have ended; what was written
    stays journaled.
    """
    result = Executed()
    done = staging.done
    tell = threading.Lock()

    def pending() -> Iterator[Segment]:
        resumes = bool(done.outputs)
        for segment in segments_of(plan, segment_bytes):
            if resumes and all(done.covers(span.output, span.start, span.stop) for span in segment.spans):
                result.resumed_nbytes += segment.nbytes
                with tell:
                    observer(Progress(segment.nbytes, resumed=True))
            else:
                yield segment

    def worker(segments: Iterator[Segment]) -> None:
        assembler = Assembler(source, plan.files, encoding, apart=plan.chunk_sums)
        for segment in segments:
            stop.check()
            with budget.lease() as lease:
                if segment.quantized:
                    staging.write_together(assemble_quantized(plan, segment, assembler, lease, largest).pieces)
                else:
                    staging.write(segment.output, segment.start, assemble_segment(plan, segment, assembler, lease))
            with tell:
                result.written_nbytes += segment.nbytes
                observer(Progress(segment.nbytes))
        with tell:
            result.read_nbytes += assembler.read_nbytes
            for name, count in assembler.overflows.items():
                result.overflows[name] = result.overflows.get(name, 0) + count

    run_workers(pending(), worker, budget.slots, stop)
    staging.sync()
    return result


def assemble_segment(plan: Plan, segment: Segment, assembler: Assembler, lease: Lease) -> memoryview:
    """The encoded bytes of a segment, in the lease."""
    out = lease.take(segment.stop - segment.start, phase=segment.start)
    assembler.tiles(plan.parameters, segment.tiles, out, lease)
    return out.data


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedRows:
    """Rows of a quantized parameter: what they become and where that goes, and the source's `values` of them.

    The first `by_rows` of the `pieces` are codes and scales; others stand for the whole weight. `largest` is the
    magnitude that the scales were made of, 0 where the scheme looks at none.
    """

    pieces: list[PlacedBytes]
    by_rows: int
    values: np.ndarray
    largest: float


def assemble_quantized(
    plan: Plan, segment: Segment, assembler: Assembler, lease: Lease, largest: Mapping[str, float]
) -> QuantizedRows:
    """The encoded bytes of a segment of a quantized parameter and of its scales, in the lease."""
    parameter = plan.parameters[segment.tiles[0].parameter]
    quantized = parameter.quantized
    assert quantized is not None
    top = largest[quantized.together] if quantized.together else 0.0
    outs = [lease.take(span.stop - span.start, phase=span.start) for span in segment.by_rows]
    values = assembler.quantized(parameter, [tile.box for tile in segment.tiles], outs, lease, top)
    pieces = [PlacedBytes(span.output, span.start, out.data) for span, out in zip(segment.by_rows, outs, strict=True)]
    if segment.whole:
        contents = scheme_named(quantized.scheme).whole(quantized.shape, top)
        for span, content in zip(segment.whole, contents, strict=True):
            pieces.append(PlacedBytes(span.output, span.start, memoryview(content)))
    return QuantizedRows(pieces, len(outs), values, top)


def run_workers(items: Iterable[T], worker: Callable[[Iterator[T]], None], count: int, stop: StopFlag) -> None:
    """Run `worker` in `count` threads over one shared iterator; the first error ends all and is raised."""
    stop.working = True
    try:
        _run_workers(items, worker, count)
    finally:
        stop.working = False
    stop.check()


def _run_workers(items: Iterable[T], worker: Callable[[Iterator[T]], None], count: int) -> None:
    lock = threading.Lock()
    source = iter(items)
    failures: list[BaseException] = []

    def shared() -> Iterator[T]:
        while True:
            with lock:
                if failures:
                    return
                try:
                    item = next(source)
                except StopIteration:
                    return
            yield item

    def run() -> None:
        try:
            worker(shared())
        except BaseException as error:  # noqa: BLE001 - carried to the caller's thread
            failures.append(error)

    threads = [threading.Thread(target=run, name=f"worker-{k}", daemon=True) for k in range(count)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        try:
            for thread in threads:
                thread.join(0.2)  # short waits, so that signal handlers run in the main thread
        except BaseException as error:  # noqa: BLE001 - KeyboardInterrupt: no worker may outlive the call
            failures.append(error)
    if failures:
        raise failures[0]
