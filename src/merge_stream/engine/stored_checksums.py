"""Bit rot: whether the bytes that a plan reads are still those that the trainer wrote.

Containers hold checksums (`Catalog.checksums`). Each record that the plan reads anything of is
read whole, in pieces of a lease, by all workers, and compared; nothing is written before. Records
and files without a checksum are counted, never taken for checked.
"""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import xxhash

from merge_stream.engine.budget import MemoryBudget
from merge_stream.engine.events import Observer, Phase, Progress
from merge_stream.engine.executor import StopFlag, run_workers
from merge_stream.errors import CorruptCheckpointError
from merge_stream.planning.plan import Assembly, LowRank, ResolvedTake
from merge_stream.storage.base import ByteSource
from merge_stream.tensors.ref import Catalog, ShardTable, SourceFile
from merge_stream.tensors.stored_checksum import ChecksumAlgorithm, StoredRecord
from merge_stream.units import format_bytes

__all__ = ["ChecksumFindings", "check_stored", "ranges_ahead", "ranges_read", "refuse_broken"]

_SHOWN = 5
_NAMES_SHOWN = 3
_ROW_NBYTES = 120
_RECORD_NBYTES = 700


@dataclass(slots=True)
class BrokenRecord:
    """A record whose bytes have another checksum than was noted, and the tensors that lie in it."""

    record: StoredRecord
    got: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        r = self.record
        more = f" and {len(self.tensors) - _NAMES_SHOWN} more" if len(self.tensors) > _NAMES_SHOWN else ""
        return (
            f"{r.path}: {r.name} (bytes {r.offset} to {r.offset + r.nbytes}) has {r.algorithm} {self.got}, "
            f"wanted {r.digest}; it holds {', '.join(self.tensors[:_NAMES_SHOWN])}{more}"
        )


@dataclass(slots=True)
class ChecksumFindings:
    """What was checked: `records` of `files` files, `nbytes` long; `bare_records` and `bare_files` hold no checksum."""

    records: int = 0
    files: int = 0
    nbytes: int = 0
    bare_records: int = 0
    bare_files: int = 0
    broken: list[BrokenRecord] = field(default_factory=list)

    @property
    def text(self) -> str:
        """In words, for plan and report."""
        if not self.records:
            return "the files that are read hold no checksums"
        checked = f"{_count(self.records, 'stored checksum')} of {_count(self.files, 'file')}"
        bare = [
            _count(count, word) for count, word in ((self.bare_records, "record"), (self.bare_files, "file")) if count
        ]
        held = f"; {' and '.join(bare)} hold{'s' if self.bare_records + self.bare_files == 1 else ''} none"
        return f"{checked} ({format_bytes(self.nbytes)}) are right{held if bare else ''}"

    def as_json(self) -> dict[str, Any]:
        """Numbers alone."""
        return {key: value for key, value in asdict(self).items() if key != "broken"}


class _Running(Protocol):
    def update(self, data: memoryview, /) -> object: ...

    def hexdigest(self) -> str: ...


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


class _Crc32c:
    def __init__(self) -> None:
        import google_crc32c

        self._extend = google_crc32c.extend
        self._value = 0

    def update(self, data: memoryview, /) -> None:
        self._value = self._extend(self._value, np.frombuffer(data, np.uint8))  # takes no memoryview

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


_ALGORITHMS: dict[ChecksumAlgorithm, Callable[[], _Running]] = {
    "crc32": _Crc32,
    "crc32c": _Crc32c,
    "xxh3-64": xxhash.xxh3_64,
    "sha256": hashlib.sha256,
}


def ranges_ahead(catalog: Catalog, *, replicas: bool) -> int:
    """Bytes that checking takes beside its slabs: the ranges of all shards, and the directory of the fullest file."""
    in_file = np.zeros(max(len(catalog.files), 1), dtype=np.int64)
    for tensor in (*catalog.tensors.values(), *catalog.twins.values()):
        for table in (tensor.shards, tensor.replicas if replicas else None):
            if table is not None:
                in_file += np.bincount(table.file, minlength=len(in_file))
    return int(in_file.sum()) * _ROW_NBYTES + int(in_file.max()) * _RECORD_NBYTES


def ranges_read(sources: Iterable[Assembly]) -> dict[int, np.ndarray]:
    """File number -> int64 [n, 2], start and stop of each stored box that the assemblies read from, sorted."""
    files: list[np.ndarray] = []
    spans: list[np.ndarray] = []

    def add(table: ShardTable, rows: np.ndarray, itemsize: int) -> None:
        nbytes = (table.stop[rows] - table.start[rows]).prod(axis=1) * itemsize
        files.append(table.file[rows])
        spans.append(np.stack([table.offset[rows], table.offset[rows] + nbytes], axis=1))

    def take(one: ResolvedTake, itemsize: int) -> None:
        box, table = one.source_box, one.table
        met = (table.start < np.array(box.stop, dtype=np.int64)) & (table.stop > np.array(box.start, dtype=np.int64))
        add(table, np.flatnonzero(met.all(axis=1)), itemsize)
        fold = one.fold
        if fold is None:
            return
        parts = [fold.a, fold.b] if isinstance(fold, LowRank) else [fold.x]
        for part in parts:
            take(part, (part.stored or fold.dtype).itemsize)
        if isinstance(fold, LowRank) and fold.magnitude is not None:
            take(fold.magnitude.x, (fold.magnitude.x.stored or fold.magnitude.dtype).itemsize)

    for source in sources:
        for one in source.takes:
            take(one, (one.stored or source.dtype).itemsize)
    return _by_file(files, spans)


def check_stored(
    catalog: Catalog,
    ranges: dict[int, np.ndarray],
    *,
    source: ByteSource,
    budget: MemoryBudget,
    segment_bytes: int,
    observer: Observer,
    stop: StopFlag,
) -> ChecksumFindings:
    """Compare every stored checksum of a record that meets `ranges`; broken ones are in the findings."""
    findings = _counted(catalog, ranges)
    observer(Phase("checking stored checksums", findings.nbytes))
    tell = threading.Lock()

    def worker(records: Iterator[StoredRecord]) -> None:
        for record in records:
            if not record.digest:
                continue
            running = _ALGORITHMS[record.algorithm]()
            at, end = record.offset, record.offset + record.nbytes
            while at < end:
                stop.check()
                with budget.lease() as lease:
                    data = lease.take(min(segment_bytes, end - at)).data
                    source.read_into(record.path, at, data)
                    running.update(data)
                at += len(data)
                with tell:
                    observer(Progress(len(data)))
            got = running.hexdigest()
            if got != record.digest:
                with tell:
                    findings.broken.append(BrokenRecord(record, got))

    run_workers(_records(catalog, ranges), worker, budget.slots, stop)
    findings.broken.sort(key=lambda b: (b.record.path, b.record.offset))
    for broken in findings.broken:
        broken.tensors = _tensors_in(catalog, broken.record)
    return findings


def refuse_broken(findings: ChecksumFindings) -> None:
    """CorruptCheckpointError that names file, record, tensors and both checksums, when a record is broken."""
    broken = findings.broken
    if not broken:
        return
    lines = "".join(f"\n  {b}" for b in broken[:_SHOWN])
    more = f"\n  and {len(broken) - _SHOWN} more" if len(broken) > _SHOWN else ""
    files = len({b.record.path for b in broken})
    msg = (
        f"{len(broken)} of {_count(findings.records, 'stored checksum')} do not fit the bytes, in "
        f"{_count(files, 'file')}; the data changed after it was written:{lines}{more}"
    )
    raise CorruptCheckpointError(
        msg, hint="copy these files again from where they were saved; if they are broken there too, take another step"
    )


def _counted(catalog: Catalog, ranges: dict[int, np.ndarray]) -> ChecksumFindings:
    """How much there is to check. The directories are read for it, and read again for the work: none is kept."""
    findings = ChecksumFindings()
    known: set[str] = set()
    held: set[str] = set()
    for record in _records(catalog, ranges):
        known.add(record.path)
        if record.digest:
            held.add(record.path)
            findings.records += 1
            findings.nbytes += record.nbytes
        else:
            findings.bare_records += 1
    findings.files, findings.bare_files = len(held), len(ranges) - len(known)
    return findings


def _records(catalog: Catalog, ranges: dict[int, np.ndarray]) -> Iterator[StoredRecord]:
    """Records that meet the ranges, those without a checksum too."""
    paths = {catalog.files[number].path: number for number in ranges}
    for reader in catalog.checksums:
        for record in reader(frozenset(paths)):
            number = paths.get(record.path)
            if number is not None and _meets(ranges[number], record):
                yield record


def _meets(spans: np.ndarray, record: StoredRecord) -> bool:
    """True when a span has a byte in common with the record; spans are sorted by start and do not overlap."""
    k = int(np.searchsorted(spans[:, 0], record.offset + record.nbytes, side="left")) - 1
    return k >= 0 and int(spans[k, 1]) > record.offset


def _by_file(files: Sequence[np.ndarray], spans: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
    if not files:
        return {}
    number, span = np.concatenate(files), np.concatenate(spans)
    order = np.lexsort((span[:, 0], number))
    number, span = number[order], span[order]
    cuts = np.flatnonzero(np.diff(number)) + 1
    return {int(n[0]): _joined(s) for n, s in zip(np.split(number, cuts), np.split(span, cuts), strict=True) if len(n)}


def _joined(span: np.ndarray) -> np.ndarray:
    """Sorted spans with those that overlap made one."""
    reach = np.maximum.accumulate(span[:, 1])
    first = np.concatenate([[True], span[1:, 0] > reach[:-1]])
    begins = first.nonzero()[0]
    ends = np.concatenate([begins[1:], [len(span)]]) - 1
    return np.stack([span[begins, 0], reach[ends]], axis=1)


def _tensors_in(catalog: Catalog, record: StoredRecord) -> tuple[str, ...]:
    """Names of the tensors of which a part lies in the record."""
    numbers = [k for k, file in enumerate(catalog.files) if _is(file, record)]
    found = []
    for name, tensor in catalog.tensors.items():
        for table in (tensor.shards, tensor.replicas):
            if table is None or not len(table):
                continue
            nbytes = (table.stop - table.start).prod(axis=1) * tensor.on_disk.itemsize
            inside = (table.offset < record.offset + record.nbytes) & (table.offset + nbytes > record.offset)
            if (inside & np.isin(table.file, numbers)).any():
                found.append(name)
                break
    return tuple(found)


def _is(file: SourceFile, record: StoredRecord) -> bool:
    return file.path == record.path


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number != 1 else ''}"
