"""Checksums of the files that were written.

CRC-32C costs no second look at the bytes: the journal has that of each range, taken while the
range was in memory, and the CRC of a whole file follows from those of its parts in any order
(CRC of AB = CRC of A times x^(8 * length of B), plus CRC of B). So it is the checksum of what
was meant to be written, and a disk that wrote something else is found out. Only bytes whose
range is not noted as a whole (after a resume with other segments) are read again.

SHA-256, by which the Hub names a large file, has no such rule: the files are read once more.
"""

from __future__ import annotations

import hashlib
import os
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from merge_stream.engine.budget import MemoryBudget
from merge_stream.engine.events import Observer, Phase, Progress
from merge_stream.engine.executor import StopFlag, run_workers
from merge_stream.engine.journal import WrittenRange, crc32c, noted_crc
from merge_stream.planning.plan import OutputFile
from merge_stream.storage.base import ByteSink, ByteSource

__all__ = ["crc32c_of_outputs", "joined_crc32c", "sha256_of_files"]

_POLYNOMIAL = 0x82F63B78  # Castagnoli, bit-reversed: the most significant bit is x^0
_ONE = 0x80000000
_X8 = 0x00800000


@dataclass(slots=True)
class _Noted:
    """Ranges of one file in the order of the journal, and the CRC-32C of each."""

    start: array[int] = field(default_factory=lambda: array("q"))
    stop: array[int] = field(default_factory=lambda: array("q"))
    crc: array[int] = field(default_factory=lambda: array("q"))


def crc32c_of_outputs(
    outputs: Sequence[OutputFile], noted: Iterable[WrittenRange], sink: ByteSink, budget: MemoryBudget
) -> dict[str, str]:
    """CRC-32C of each whole file, 8 hex digits; empty when this Python has no fast CRC-32C.

    `noted` are all ranges of the journal; what they do not tile is read from `sink` in the pieces of a lease.
    """
    if crc32c(memoryview(b"")) is None:
        return {}
    table = [_Noted() for _ in outputs]
    for r in noted:
        crc = noted_crc(r.checksum)
        if crc is not None:
            mine = table[r.output]
            mine.start.append(r.start)
            mine.stop.append(r.stop)
            mine.crc.append(crc)
    return {o.name: f"{_whole(o, mine, sink, budget):08x}" for o, mine in zip(outputs, table, strict=True)}


def _whole(output: OutputFile, noted: _Noted, sink: ByteSink, budget: MemoryBudget) -> int:
    crcs, sizes = [crc32c(memoryview(output.header)) or 0], [len(output.header)]
    at = len(output.header)
    start, stop = np.array(noted.start, dtype=np.int64), np.array(noted.stop, dtype=np.int64)
    for k in np.lexsort((-stop, start)).tolist():
        if noted.start[k] < at:
            continue  # overlaps what is counted already
        for crc, nbytes in _read(output.name, at, noted.start[k], sink, budget):
            crcs.append(crc)
            sizes.append(nbytes)
        crcs.append(noted.crc[k])
        sizes.append(noted.stop[k] - noted.start[k])
        at = noted.stop[k]
    for crc, nbytes in _read(output.name, at, output.nbytes, sink, budget):
        crcs.append(crc)
        sizes.append(nbytes)
    return joined_crc32c(crcs, sizes)


def _read(name: str, start: int, stop: int, sink: ByteSink, budget: MemoryBudget) -> Iterator[tuple[int, int]]:
    """(CRC, length) of the pieces of a range that is not noted."""
    while start < stop:
        with budget.lease() as lease:
            data = lease.take(min(lease.left, stop - start)).data
            sink.read_into(name, start, data)
            yield crc32c(data) or 0, len(data)
            start += len(data)


def joined_crc32c(crcs: Sequence[int], sizes: Sequence[int]) -> int:
    """CRC-32C of the parts laid end to end, from the CRC-32C and the length of each."""
    behind = np.cumsum(np.array(sizes[::-1], dtype=np.int64))[::-1] - np.array(sizes, dtype=np.int64)
    moved = _times(np.array(crcs, dtype=np.uint32), _power_of_x8(behind))
    return int(np.bitwise_xor.reduce(moved)) if len(moved) else 0


def _power_of_x8(exponent: np.ndarray) -> np.ndarray:
    """x^(8 * exponent) modulo the polynomial."""
    result = np.full(len(exponent), _ONE, dtype=np.uint32)
    square = np.array([_X8], dtype=np.uint32)
    left = exponent.copy()
    while left.any():
        odd = (left & 1).astype(bool)
        result[odd] = _times(result[odd], square)
        square = _times(square, square)
        left >>= 1
    return result


def _times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Product of polynomials over GF(2) modulo the CRC's, element by element."""
    product = np.zeros(len(a), dtype=np.uint32)
    b = np.broadcast_to(b, a.shape).copy()
    for bit in range(31, -1, -1):
        product ^= np.where(a >> np.uint32(bit) & np.uint32(1), b, np.uint32(0))
        b = (b >> np.uint32(1)) ^ np.where(b & np.uint32(1), np.uint32(_POLYNOMIAL), np.uint32(0))
    return product


def sha256_of_files(
    folder: str,
    outputs: Sequence[OutputFile],
    source: ByteSource,
    *,
    budget: MemoryBudget,
    segment_bytes: int,
    observer: Observer,
    stop: StopFlag,
) -> dict[str, str]:
    """SHA-256 of each file in `folder`, read in the pieces of a lease, several files at a time."""
    digests: dict[str, str] = {}
    tell = threading.Lock()
    observer(Phase("computing SHA-256", sum(o.nbytes for o in outputs)))

    def worker(files: Iterator[OutputFile]) -> None:
        for output in files:
            path, at, running = os.path.join(folder, output.name), 0, hashlib.sha256()
            while at < output.nbytes:
                stop.check()
                with budget.lease() as lease:
                    data = lease.take(min(segment_bytes, output.nbytes - at)).data
                    source.read_into(path, at, data)
                    running.update(data)
                at += len(data)
                with tell:
                    observer(Progress(len(data)))
            with tell:
                digests[output.name] = running.hexdigest()

    run_workers(outputs, worker, budget.slots, stop)
    return {o.name: digests[o.name] for o in outputs}
