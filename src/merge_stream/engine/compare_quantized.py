"""A quantized model against its source: the very bytes that a merge would write, and how far they are from the source.

The source is encoded again, tile by tile as in a merge, and compared with the written bytes; what these
stand for is compared with the source's values, which tells how good the quantization is.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from merge_stream.encodings.base import BLOCK, Scheme, scheme_named
from merge_stream.engine.assembler import Assembler
from merge_stream.engine.budget import MemoryBudget
from merge_stream.engine.events import Observer, Progress, Silent
from merge_stream.engine.executor import StopFlag, assemble_quantized, run_workers
from merge_stream.engine.journal import DoneRanges
from merge_stream.engine.largest import measure_largest
from merge_stream.planning.plan import Plan, QuantizedPart
from merge_stream.planning.segments import Segment, segments_of
from merge_stream.storage.base import ByteSource

__all__ = ["QuantizationError", "compare_quantized"]


@dataclass(slots=True)
class QuantizationError:
    """What quantization did to a weight: largest error, largest error relative to the value, signal to noise in dB.

    `different` counts bytes that are not those which this merge-stream writes.
    """

    name: str
    size: int
    different: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    signal: float = 0.0
    noise: float = 0.0

    @property
    def snr(self) -> float:
        """Signal to noise ratio in dB; infinite without noise."""
        if not self.noise:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf

    def __str__(self) -> str:
        return f"{self.name}: SNR {self.snr:.1f} dB, max abs {self.max_abs:.6g}, max rel {self.max_rel:.6g}"


def compare_quantized(
    plan: Plan,
    paths: Mapping[int, str],
    wanted: Callable[[], Assembler],
    written: ByteSource,
    *,
    budget: MemoryBudget,
    segment_bytes: int,
    observer: Observer,
    stop: StopFlag,
) -> list[QuantizationError]:
    """The quantized parameters of `plan` against what stands at their places in the files `paths` (by output).

    Worst signal to noise ratio first. CorruptCheckpointError for a source that cannot be quantized.
    """
    found: dict[str, QuantizationError] = {}
    tell = threading.Lock()
    known = measure_largest(
        plan, wanted, DoneRanges(), budget=budget, segment_bytes=segment_bytes, observer=Silent(), stop=stop
    )

    def work(segments: Iterator[Segment]) -> None:
        assembler = wanted()
        for segment in segments:
            stop.check()
            parameter = plan.parameters[segment.tiles[0].parameter]
            quantized = parameter.quantized
            assert quantized is not None
            with budget.lease() as lease:
                rows = assemble_quantized(plan, segment, assembler, lease, known.magnitudes)
                read = [lease.take(len(piece.data)) for piece in rows.pieces]
                for piece, there in zip(rows.pieces, read, strict=True):
                    written.read_into(paths[piece.output], piece.start, there.data)
                part = QuantizationError(quantized.name, parameter.elements)
                for piece, there in zip(rows.pieces, read, strict=True):
                    part.different += int(np.count_nonzero(there != np.frombuffer(piece.data, np.uint8)))
                parts = [part_of for part_of in quantized.parts if part_of.per]
                _measure(scheme_named(quantized.scheme), parts, read[: rows.by_rows], rows.values, part, rows.largest)
            with tell:
                _join(found.setdefault(part.name, QuantizationError(part.name, part.size)), part)
                observer(Progress(segment.nbytes))

    run_workers((s for s in segments_of(plan, segment_bytes) if s.quantized), work, budget.slots, stop)
    return sorted(found.values(), key=lambda error: (error.snr, error.name))


def _measure(  # noqa: PLR0917 - what was read and what it stands for
    scheme: Scheme,
    parts: Sequence[QuantizedPart],
    read: Sequence[np.ndarray],
    values: np.ndarray,
    into: QuantizationError,
    largest: float,
) -> None:
    """Add the errors of one tile, some rows at a time: whole bands, or rows of one band."""
    rows, columns = values.shape
    step = max(BLOCK // columns, 1)
    step = step // scheme.rows * scheme.rows or 1 << step.bit_length() - 1  # a power of two divides every band
    with np.errstate(all="ignore"):
        for low in range(0, rows, step):
            high = min(low + step, rows)
            outs = [
                there[low // part.per * part.row_nbytes : -(-high // part.per) * part.row_nbytes]
                for part, there in zip(parts, read, strict=True)
            ]
            source = values[low:high].astype(np.float64)
            error = np.abs(scheme.decode(outs, columns, largest) - source)
            relative = error[source != 0] / np.abs(source[source != 0])
            into.max_abs = max(into.max_abs, _largest(error))
            into.max_rel = max(into.max_rel, _largest(relative))
            into.signal += float(np.square(source).sum())
            into.noise += float(np.square(error).sum())


def _largest(errors: np.ndarray) -> float:
    """The largest; infinite where one is NaN."""
    largest = float(errors.max(initial=0.0))
    return math.inf if math.isnan(largest) else largest


def _join(known: QuantizationError, part: QuantizationError) -> None:
    known.different += part.different
    known.max_abs, known.max_rel = max(known.max_abs, part.max_abs), max(known.max_rel, part.max_rel)
    known.signal += part.signal
    known.noise += part.noise
