"""The journal: which byte ranges of the output are done, with the checksum of each.

A text file, one line for each group of ranges written together:

    r <output> <start> <stop> <checksum> [<output> <start> <stop> <checksum> ...] <check>
    s <count> <check>         of the first `count` r-lines, those of this run are on stable storage
    b <boot id> <check>       a run began on this boot of the machine
    x <output> <check>        what was noted so far about this output file holds no more

`checksum` is the xxh3-64 of the range and its CRC-32C (of which the CRC of the whole file is made),
24 hex digits. `check` is the xxh3-64 of the line before it. A line is appended after its ranges were
written, so after `kill -9` every line is true (the page cache survives the process). After
a power failure lines that no `s` of their own run covers may not be: on another boot they
are believed only when the bytes on disk have the noted checksum. (An `s` of a later run
says nothing about them: that run may have found them false, or not have synced their file.)
A torn tail is cut off; so is, when a sync fails, what was noted since the last one that
did not: the kernel may have dropped those pages. A line that no kill can leave (whole and
with a wrong check, or with valid lines behind it) means that the file itself is damaged:
an `x` may be lost, so no range is believed unless the bytes on disk have its checksum.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import google_crc32c
import numpy as np
import xxhash

from merge_stream.errors import CorruptCheckpointError

__all__ = [
    "DoneRanges",
    "Journal",
    "JournalContent",
    "JournalMark",
    "WrittenRange",
    "checksum",
    "crc32c",
    "noted_crc",
    "noted_ranges",
    "read_journal",
]

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_UNKNOWN_BOOT = "unknown"
_FIELDS = 4
_XXH3_DIGITS = 16


@dataclass(frozen=True, slots=True)
class WrittenRange:
    """Bytes [start, stop) of output file `output` (index) were written with this checksum."""

    output: int
    start: int
    stop: int
    checksum: str


def checksum(data: memoryview) -> str:
    """xxh3-64 of the bytes, 16 hex digits, and CRC-32C, 8 hex digits, where this Python has a fast one."""
    crc = crc32c(data)
    return xxhash.xxh3_64_hexdigest(data) + (f"{crc:08x}" if crc is not None else "")


def crc32c(data: memoryview) -> int | None:
    """CRC-32C of the bytes; None when google-crc32c was built without its C part (some 1000 times slower)."""
    if google_crc32c.implementation != "c":
        return None
    return int(google_crc32c.value(np.frombuffer(data, np.uint8)))  # it takes no memoryview


def noted_crc(noted: str) -> int | None:
    """The CRC-32C in a range's checksum, or None when it was left out."""
    return int(noted[_XXH3_DIGITS:], 16) if len(noted) > _XXH3_DIGITS else None


class DoneRanges:
    """Finished byte ranges of each output file, merged: a few spans however many ranges were noted."""

    def __init__(self, ranges: Iterable[WrittenRange] = ()) -> None:
        self._spans: dict[int, list[tuple[int, int]]] = {}
        for r in ranges:
            self.add(r)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DoneRanges) and self._spans == other._spans

    __hash__ = None  # type: ignore[assignment]

    def add(self, written: WrittenRange) -> None:
        """One more range is done."""
        spans = self._spans.setdefault(written.output, [])
        start, stop = written.start, written.stop
        low = bisect.bisect_left(spans, start, key=itemgetter(1))  # the first span that ends at or behind start
        high = bisect.bisect_right(spans, stop, key=itemgetter(0))  # behind the last that begins at or before stop
        if low < high:
            start, stop = min(start, spans[low][0]), max(stop, spans[high - 1][1])
        spans[low:high] = [(start, stop)]

    def forget(self, output: int) -> None:
        """Nothing of this file is done."""
        self._spans.pop(output, None)

    @property
    def outputs(self) -> frozenset[int]:
        """Files of which something is done."""
        return frozenset(self._spans)

    def nbytes(self, output: int) -> int:
        """Bytes of a file that are done."""
        return sum(b - a for a, b in self._spans.get(output, ()))

    def covers(self, output: int, start: int, stop: int) -> bool:
        """True when every byte of [start, stop) is done."""
        spans = self._spans.get(output, [])
        k = bisect.bisect_right(spans, start, key=itemgetter(0)) - 1
        return k >= 0 and stop <= spans[k][1]

    def missing(self, output: int, start: int, stop: int) -> tuple[int, int] | None:
        """The first gap within [start, stop), or None."""
        at = start
        for a, b in self._spans.get(output, ()):
            if b <= at:
                continue
            if a > at:
                return at, min(a, stop)
            at = b
            if at >= stop:
                return None
        return None if at >= stop else (at, stop)


@dataclass(frozen=True, slots=True)
class JournalContent:
    """What a journal file says: `trusted` ranges are done, `doubtful` ones only if their checksum still holds.

    `lines` counts r-lines, `nbytes` is the length of the part that is whole. Only what no
    sync covers is kept line by line: the journal of a terabyte stays small in memory. Of a
    `damaged` file nothing is trusted and nothing kept; `Journal.noted` reads its ranges again.
    """

    trusted: DoneRanges
    doubtful: tuple[WrittenRange, ...]
    lines: int
    nbytes: int
    damaged: bool = False


def read_journal(path: str) -> JournalContent:
    """Read a journal up to its first torn line; an absent file is an empty one."""
    trusted = DoneRanges()
    doubtful: list[WrittenRange] = []
    waiting: list[tuple[int, WrittenRange]] = []  # (number of the r-line, range) of the run, while no sync covers it
    count = good = 0
    here, this_boot = _boot_id(), False
    lines = _lines(path)
    for raw in lines:
        body = _body(raw)
        if body is None:
            if not _is_torn(raw) or any(_body(later) is not None for later in lines):
                return JournalContent(DoneRanges(), (), count, good, damaged=True)
            break
        good += len(raw)
        kind, *fields = body.decode("ascii").split(" ")
        if kind == "r":
            ranges = [_range(fields[k : k + _FIELDS]) for k in range(0, len(fields), _FIELDS)]
            waiting += [(count, r) for r in ranges]
            count += 1
        elif kind == "b":
            doubtful += [r for _, r in waiting]
            waiting = []
            this_boot = fields == [here] and here != _UNKNOWN_BOOT
        elif kind == "x":
            lost = int(fields[0])
            trusted.forget(lost)
            waiting = [(k, r) for k, r in waiting if r.output != lost]
            doubtful = [r for r in doubtful if r.output != lost]
        durable = count if this_boot else int(fields[0]) if kind == "s" else 0
        for _, r in (entry for entry in waiting if entry[0] < durable):
            trusted.add(r)
        if durable:
            waiting = [entry for entry in waiting if entry[0] >= durable]
    return JournalContent(trusted, (*doubtful, *(r for _, r in waiting)), count, good)


def noted_ranges(path: str, nbytes: int) -> Iterator[WrittenRange]:
    """Every range that the lines in the first `nbytes` bytes of a journal name, true or not."""
    for raw in _lines(path):
        nbytes -= len(raw)
        if nbytes < 0:
            return
        kind, *fields = raw[:-1].rpartition(b" ")[0].decode("ascii").split(" ")
        if kind == "r":
            yield from (_range(fields[k : k + _FIELDS]) for k in range(0, len(fields), _FIELDS))


def _lines(path: str) -> Iterator[bytes]:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        yield from file


def _body(raw: bytes) -> bytes | None:
    """A line without its check; None when the check is wrong or the line has no end."""
    body, _, check = raw[:-1].rpartition(b" ")
    return body if raw.endswith(b"\n") and xxhash.xxh3_64_hexdigest(body).encode() == check else None


def _is_torn(raw: bytes) -> bool:
    """True for what a write that was cut off can have left: part of a line (or holes, after a power failure)."""
    return not raw.endswith(b"\n") and _body(raw[:-1] + b"\n") is None


@dataclass(frozen=True, slots=True)
class JournalMark:
    """A place in a journal: behind `lines` r-lines and `nbytes` bytes."""

    lines: int
    nbytes: int


class Journal:
    """Append-only record of written ranges in the file `path`; opening cuts off a torn tail.

    `before` is what earlier runs noted. Of a damaged file all is struck out for good, and what
    `noted` names must be read and recorded anew to count.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.before = read_journal(path)
        self._retracted = False
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.ftruncate(self._fd, self.before.nbytes)
        self._mark = JournalMark(self.before.lines, self.before.nbytes)
        self._append(f"b {_boot_id()}")
        self._durable = self._mark
        if self.before.damaged:
            self.forget(*sorted({r.output for r in self.noted()}))

    @property
    def mark(self) -> JournalMark:
        """How far the journal is; give it to `synced` after syncing the data of all that was noted before."""
        return self._mark

    def record(self, ranges: Sequence[WrittenRange]) -> None:
        """Note that these ranges are written (one line: all of them or none)."""
        self._append("r " + " ".join(f"{r.output} {r.start} {r.stop} {r.checksum}" for r in ranges), lines=1)

    def synced(self, mark: JournalMark) -> None:
        """Note that all that this run recorded before `mark` is on stable storage."""
        self._append(f"s {mark.lines}")
        os.fdatasync(self._fd)
        self._durable = mark

    def forget(self, *outputs: int) -> None:
        """Note that all ranges of these outputs are lost; returns when that is on stable storage."""
        for output in outputs:
            self._append(f"x {output}")
        os.fdatasync(self._fd)

    def noted(self) -> Iterator[WrittenRange]:
        """Every range that the whole lines of earlier runs name, one after another, true or not."""
        return noted_ranges(self.path, self.before.nbytes)

    def retract(self) -> None:
        """Cut off what was recorded since the last mark that was synced: it may be lost. The journal's last word."""
        with self._lock:
            os.ftruncate(self._fd, self._durable.nbytes)
            self._retracted = True

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            os.close(self._fd)

    def _append(self, line: str, *, lines: int = 0) -> None:
        data = f"{line} {xxhash.xxh3_64_hexdigest(line.encode())}\n".encode()
        with self._lock:
            if self._retracted:
                return
            begin, done = self._mark, 0
            try:
                while done < len(data):
                    done += os.pwrite(self._fd, data[done:], begin.nbytes + done)
            except OSError:  # a full disk: no other worker's line may stand behind half of this one
                self._retracted = True
                os.ftruncate(self._fd, begin.nbytes)
                raise
            self._mark = JournalMark(begin.lines + lines, begin.nbytes + done)


def _range(fields: Sequence[str]) -> WrittenRange:
    try:
        output, start, stop = (int(f) for f in fields[:3])
        return WrittenRange(output, start, stop, fields[3])
    except (ValueError, IndexError) as error:
        msg = f"the journal holds a line that is not one: {' '.join(fields)[:80]}"
        raise CorruptCheckpointError(msg, hint="begin anew with --restart") from error


def _boot_id() -> str:
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return _UNKNOWN_BOOT  # never the same as another: such lines are checked
