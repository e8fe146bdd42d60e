"""The staging area `direct`: final safetensors files in a partial folder, and what makes them resumable.

    OUT.partial/               beside OUT, or OUT/.merge-stream/ when OUT is an empty folder or a mount point
        lock                   held by the run (flock), so two runs cannot share it
        plan.json              identity of the plan: a resume must have the same
        journal                finished byte ranges with checksums
        model/                 the files of the model to be, at their final size, headers written

`model/` holds no config.json and no index until the finalizer has checked everything, and
it is not OUT, so nothing takes it for a model before it is one.

Group commit: a flusher thread syncs written data every `flush_bytes` and then notes it in
the journal, so that dirty pages stay bounded and a power failure costs little.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from merge_stream.engine.journal import DoneRanges, Journal, WrittenRange, checksum, noted_ranges, read_journal
from merge_stream.errors import OutputBusyError, PlanMismatchError
from merge_stream.planning.plan import Plan, fingerprint_of
from merge_stream.storage.base import ByteSink
from merge_stream.storage.holes import HolesSink
from merge_stream.storage.local import LocalSink

__all__ = [
    "STORE",
    "STORE_ENTRIES",
    "DirectStaging",
    "PlacedBytes",
    "SparseStaging",
    "StagingArea",
    "belongs_to",
    "locked",
]

STORE = "store"
"""The store of a merge through a store, in its partial folder; it has a partial folder of its own while it is made."""
STORE_ENTRIES = frozenset({STORE, *(f"{STORE}.partial{end}" for end in ("", ".committing", ".committing.new"))})
_PLAN = "plan.json"
_FLUSH_BYTES = 64 << 20
_MOST_WINDOWS = 4
_LARGEST_RECHECK = 16 << 20


@dataclass(frozen=True, slots=True)
class PlacedBytes:
    """Bytes for byte `start` on of output file `output`."""

    output: int
    start: int
    data: memoryview


class StagingArea(Protocol):
    """Where assembled bytes wait for their commit.

    Called in this order:

    1. `done` says what earlier runs finished.
    2. `write` for each group of ranges, from several threads.
    3. `sync` once, when all ranges are written.
    """

    sink: ByteSink

    @property
    def done(self) -> DoneRanges:
        """Ranges that need not be written again."""
        ...

    def write(self, output: int, start: int, data: memoryview) -> None:
        """Write bytes of an output file and journal them."""
        ...

    def write_together(self, pieces: Sequence[PlacedBytes]) -> None:
        """Write several ranges that make sense together alone, and journal them as one: all of them or none."""
        ...

    def sync(self) -> None:
        """Return when everything written is on stable storage and noted."""
        ...

    def close(self) -> None:
        """Let go of files and locks; everything noted stays for a resume."""
        ...


def belongs_to(work: str, plan: Plan) -> bool:
    """True when the partial folder `work` was begun by this plan, False when by none.

    PlanMismatchError, with the first difference, when it was begun by another one.
    """
    wanted = dict(plan.identity)
    before: list[object] = []
    try:
        with open(os.path.join(work, _PLAN), encoding="utf-8") as file:
            document = json.load(file)
        found = dict(document["identity"])
        before = list(document.get("files", ()))
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError):
        found = {_PLAN: "unreadable"}
    changed = [name for name in _changed_files(plan, before) if found != wanted]
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        msg = f"{work} was begun with other source files: {changed[0]}{more} changed since (size or time of change)"
        raise PlanMismatchError(msg, hint="--restart begins anew with the files as they are now")
    other = [name for name in sorted({*wanted, *found}) if wanted.get(name) != found.get(name)]
    if other:
        was, now = (side.get(other[0], "not there") for side in (found, wanted))
        msg = f"{work} belongs to another run: {other[0]} was {was}, now {now}"
        raise PlanMismatchError(msg, hint="give the same options to continue it, or --restart to begin anew")
    return True


def _changed_files(plan: Plan, before: list[object]) -> list[str]:
    """Names of source files that an earlier run saw with another size or time of change."""
    now = {f.name: (f.nbytes, f.mtime_ns) for f in plan.files}
    known = {str(entry[0]): tuple(entry[1:]) for entry in before if isinstance(entry, list) and entry}
    return sorted(name for name in now if name in known and known[name] != now[name])


class DirectStaging:
    """The partial folder `work` of one plan; `resumed` tells that an earlier run had begun it."""

    def __init__(self, work: str, plan: Plan, *, restart: bool, flush_bytes: int | None = None) -> None:
        self._flush_bytes = flush_bytes or _FLUSH_BYTES
        self.work = work
        self.model_dir = os.path.join(work, "model")
        self._plan = plan
        self._lock_fd = locked(work)
        try:
            if restart:
                self._wipe()
            self.resumed = self._claim()
            self.sink: ByteSink = self._open_sink()
            self._journal = Journal(os.path.join(work, "journal"))
        except BaseException:
            os.close(self._lock_fd)
            raise
        try:
            self._done = self._believed()
            self._lay_out()
        except BaseException:
            self._release()
            raise
        self._unsynced: dict[int, int] = {}
        self._change = threading.Condition()
        self._closing = False
        self._failure: BaseException | None = None
        self._flusher = threading.Thread(target=self._flush, name="flusher", daemon=True)
        self._flusher.start()

    @property
    def done(self) -> DoneRanges:
        """Ranges that earlier runs finished."""
        return self._done

    def write(self, output: int, start: int, data: memoryview) -> None:
        """Write, journal, and wait while too much is not yet on the disk."""
        self.write_together([PlacedBytes(output, start, data)])

    def write_together(self, pieces: Sequence[PlacedBytes]) -> None:
        """Write and wait as `write` does, and journal all of them or none."""
        written = []
        for piece in pieces:
            stop = piece.start + len(piece.data)
            note = checksum(piece.data)  # now, while the bytes are in the CPU's cache
            written.append(WrittenRange(piece.output, piece.start, stop, note))
            self.sink.write_at(self._plan.outputs[piece.output].name, piece.start, piece.data)
        with self._change:
            self._change.wait_for(
                lambda: sum(self._unsynced.values()) < _MOST_WINDOWS * self._flush_bytes or self._failure is not None
            )
            if self._failure is not None:
                raise self._failure
            self._journal.record(written)
            for piece in pieces:
                self._unsynced[piece.output] = self._unsynced.get(piece.output, 0) + len(piece.data)
            if sum(self._unsynced.values()) >= self._flush_bytes:
                self._change.notify_all()

    def sync(self) -> None:
        """Sync what is written and note it."""
        self._stop_flusher()
        mark = self._journal.mark
        try:
            for output in self._plan.outputs:
                self.sink.sync(output.name)
        except Exception:
            self._journal.retract()
            raise
        self._journal.synced(mark)

    def ranges(self) -> DoneRanges:
        """What the journal file holds now, read back from disk."""
        return read_journal(self._journal.path).trusted

    def noted(self) -> Iterator[WrittenRange]:
        """Every range that the journal file names, with its checksum: all are of the bytes that this plan writes."""
        return noted_ranges(self._journal.path, self._journal.mark.nbytes)

    def close(self) -> None:
        """Stop the flusher, close files, release the lock."""
        with contextlib.suppress(Exception):
            self._stop_flusher()
        self._release()

    def _open_sink(self) -> ByteSink:
        return LocalSink(self.model_dir)

    def _is_whole(self, number: int, done: DoneRanges) -> bool:  # noqa: ARG002 - a store asks by range
        """The file is there, at its full size."""
        output = self._plan.outputs[number]
        return _size(os.path.join(self.model_dir, output.name)) == output.nbytes

    def _release(self) -> None:
        self.sink.close()
        self._journal.close()
        with contextlib.suppress(OSError):
            os.close(self._lock_fd)

    def _wipe(self) -> None:
        for name in os.listdir(self.work):
            if name == "lock" or name in STORE_ENTRIES:
                continue
            path = os.path.join(self.work, name)
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)

    def _claim(self) -> bool:
        """Write plan.json, or compare with the one that is there; True when this resumes."""
        path = os.path.join(self.work, _PLAN)
        if belongs_to(self.work, self._plan):
            os.makedirs(self.model_dir, exist_ok=True)
            return True
        self._wipe()  # what is there belongs to no plan: an earlier wipe was cut off
        os.makedirs(self.model_dir, exist_ok=True)
        wanted = dict(self._plan.identity)
        files = [[f.name, f.nbytes, f.mtime_ns] for f in self._plan.files]
        document = {"fingerprint": fingerprint_of(wanted), "identity": wanted, "files": files}
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".new", path)
        return False

    def _believed(self) -> DoneRanges:
        """Ranges that are surely on disk; doubtful ones are read and compared with their checksum.

        What is noted about a file that is gone or has another size is struck out for good,
        before the file is laid out anew: a later run could not tell.
        """
        done, doubtful = self._journal.before.trusted, self._journal.before.doubtful
        present = {number for number in range(len(self._plan.outputs)) if self._is_whole(number, done)}
        for number in sorted((done.outputs | {r.output for r in doubtful}) - present):
            self._journal.forget(number)
            done.forget(number)
        for r in self._journal.noted() if self._journal.before.damaged else doubtful:
            if r.output in present and r.stop - r.start <= _LARGEST_RECHECK:
                buffer = memoryview(bytearray(r.stop - r.start))
                self.sink.read_into(self._plan.outputs[r.output].name, r.start, buffer)
                if checksum(buffer) == r.checksum:
                    self._journal.record([r])
                    done.add(r)
        return done

    def _lay_out(self) -> None:
        for output in self._plan.outputs:
            self.sink.allocate(output.name, output.nbytes)
            self.sink.write_at(output.name, 0, memoryview(output.header))

    def _flush(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._closing or sum(self._unsynced.values()) >= self._flush_bytes)
                if self._closing:
                    return
                batch, mark = dict(self._unsynced), self._journal.mark
            try:
                for output in batch:
                    self.sink.sync(self._plan.outputs[output].name)
                self._journal.synced(mark)
            except Exception as error:  # noqa: BLE001 - carried to whoever writes next
                with self._change:
                    with contextlib.suppress(OSError):
                        self._journal.retract()
                    self._failure = error
                    self._change.notify_all()
                return
            with self._change:
                for output, nbytes in batch.items():
                    self._unsynced[output] -= nbytes
                    if not self._unsynced[output]:
                        del self._unsynced[output]
                self._change.notify_all()

    def _stop_flusher(self) -> None:
        with self._change:
            self._closing = True
            self._change.notify_all()
        self._flusher.join()
        if self._failure is not None:
            raise self._failure


def locked(work: str) -> int:
    """Descriptor of the locked file `lock` in the folder `work`, which is made."""
    path = os.path.join(work, "lock")
    while True:
        os.makedirs(work, exist_ok=True)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # removed by a run that commits right now
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except BlockingIOError as error:
            os.close(fd)
            msg = f"another merge-stream writes {work} right now"
            raise OutputBusyError(msg, hint="wait for it to end, or choose another folder") from error
        except FileNotFoundError:  # the same, between opening and locking: a lock that nobody else can see
            pass
        os.close(fd)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


class SparseStaging(DirectStaging):
    """The same, with holes where the model is zero."""

    def _open_sink(self) -> ByteSink:
        return HolesSink(self.model_dir)
