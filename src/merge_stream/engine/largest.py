"""The largest magnitude of weights whose scale stands for all of it: a bounded pass before the first byte is written.

Only weights of schemes that want it are read (`Quantized.together`), with the segments, workers and slabs of the run
that follows; a maximum depends on none of them. Nothing of it is kept on the disk: a run that continues looks again at
those weights that are not wholly written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from merge_stream.encodings.base import BLOCK
from merge_stream.engine.assembler import Assembler, not_finite
from merge_stream.engine.budget import MemoryBudget
from merge_stream.engine.events import Observer, Phase, Progress
from merge_stream.engine.executor import StopFlag, run_workers
from merge_stream.engine.journal import DoneRanges
from merge_stream.planning.plan import Plan, Quantized
from merge_stream.planning.segments import Segment, segments_of

__all__ = ["Largest", "largest_of", "measure_largest"]


@dataclass(slots=True)
class Largest:
    """The largest magnitude by `Quantized.together`, and the bytes that were read for it."""

    magnitudes: dict[str, float] = field(default_factory=dict)
    read_nbytes: int = 0


def measure_largest(
    plan: Plan,
    assembler_of: Callable[[], Assembler],
    done: DoneRanges,
    *,
    budget: MemoryBudget,
    segment_bytes: int,
    observer: Observer,
    stop: StopFlag,
) -> Largest:
    """Look at all weights of `plan` that want it, without those of which everything is `done`.

    CorruptCheckpointError when one of them holds NaN or an infinity.
    """
    found = Largest()
    wanted = {
        quantized.together
        for segment, quantized in _measured(plan, segment_bytes)
        if not all(done.covers(span.output, span.start, span.stop) for span in segment.spans)
    }
    if not wanted:
        return found
    tell = threading.Lock()
    parameters = [p for p in plan.parameters if p.quantized is not None and p.quantized.together in wanted]
    observer(Phase("measuring", sum(p.source_nbytes for p in parameters)))

    def work(segments: Iterator[tuple[Segment, Quantized]]) -> None:
        assembler = assembler_of()
        for segment, quantized in segments:
            stop.check()
            parameter = plan.parameters[segment.tiles[0].parameter]
            with budget.lease() as lease:
                rows = assembler.rows(parameter, [tile.box for tile in segment.tiles], lease)
                top, nbytes = largest_of(rows), rows.nbytes
                if not np.isfinite(top):
                    raise not_finite(quantized.name, int(rows.size - np.count_nonzero(np.isfinite(rows))))
            with tell:
                found.magnitudes[quantized.together] = max(found.magnitudes.get(quantized.together, 0.0), top)
                observer(Progress(nbytes))
        with tell:
            found.read_nbytes += assembler.read_nbytes

    run_workers(
        (item for item in _measured(plan, segment_bytes) if item[1].together in wanted), work, budget.slots, stop
    )
    return found


def _measured(plan: Plan, segment_bytes: int) -> Iterator[tuple[Segment, Quantized]]:
    """Segments of the weights that are looked at before they are written."""
    if not any(p.quantized is not None and p.quantized.together for p in plan.parameters):
        return
    for segment in segments_of(plan, segment_bytes):
        quantized = plan.parameters[segment.tiles[0].parameter].quantized
        if quantized is not None and quantized.together:
            yield segment, quantized


def largest_of(rows: np.ndarray) -> float:
    """The largest magnitude in float32; NaN or infinity when there is one."""
    flat, top = rows.reshape(-1), np.float32(0)
    with np.errstate(all="ignore"):
        for low in range(0, len(flat), BLOCK):
            part = flat[low : low + BLOCK].astype(np.float32)
            top = np.maximum(top, np.abs(part, out=part).max())
    return float(top)
