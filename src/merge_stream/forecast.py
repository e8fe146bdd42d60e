"""What `plan` tells: a merge forecast, and what an interrupted run had finished."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from merge_stream.engine.events import Observer
from merge_stream.engine.executor import StopFlag
from merge_stream.engine.journal import read_journal
from merge_stream.engine.staging import belongs_to
from merge_stream.errors import OutputBusyError
from merge_stream.job import Job, card_facts, make_plan
from merge_stream.memory_files import remarks_on_memory_files
from merge_stream.opening import open_checkpoint
from merge_stream.options import MergeOptions, OpenOptions
from merge_stream.output.hugging_face import beside_the_weights
from merge_stream.output.place import OutputPlace, choose_place, interrupted_commit
from merge_stream.planning.plan import Plan
from merge_stream.preflight import free_inodes, needs_of, preflight, writes_of
from merge_stream.report import names_told
from merge_stream.storage.local import LocalSource
from merge_stream.units import counted, format_bytes, format_duration

__all__ = ["Disk", "Forecast", "StoreForecast", "begun", "disk_of", "forecast", "forecast_of", "refuse_busy"]

_SAMPLE_BYTES = 32 << 20
_SAMPLE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Disk:
    """Room on a disk: free bytes and free inodes (None where it has no limit of them)."""

    free: int
    inodes_free: int | None


@dataclass(frozen=True, slots=True)
class StoreForecast:
    """The store that a run would make, or use: all its bytes and files, and the inodes that are still to be made.

    `path` is "" as long as no folder is given; `kept` tells that it stays; `resumed_nbytes` are there already.
    """

    path: str
    state: str
    kept: bool
    nbytes: int
    files: int
    inodes: int
    resumed_nbytes: int
    disk_free: int
    inodes_free: int | None

    def lines(self) -> list[str]:
        """For a person."""
        where = f"  store       {self.state}" if self.state else "  store       in the partial folder of OUT"
        room = "" if self.inodes_free is None else f" of {self.inodes_free:,} that its disk has left"
        return [
            where if self.kept else f"{where}; removed when OUT is there",
            f"              {format_bytes(self.nbytes)} in {counted(self.files, 'file')}, {self.inodes:,} inodes{room}",
            f"              {format_bytes(self.disk_free)} free there",
        ]


@dataclass(slots=True)
class Forecast:
    """What a merge would do: sizes in bytes; `seconds` is a rough estimate from a short read of the source.

    `inodes` are those that are made where OUT goes, of `inodes_free` (None: no limit); `store` is there when
    one is made: `output_files` are the model's all the same, and none for `stage`. `out_state` tells in words what
    becomes of OUT ("" when none was given); `resumed_nbytes`
    are those that an interrupted run had finished; `side_files` maps names to whose they are.
    """

    root: str
    format: str
    architecture: str
    tensors: int
    output_files: Mapping[str, int]
    side_files: Mapping[str, str]
    out_state: str
    resumed_nbytes: int
    read_nbytes: int
    write_nbytes: int
    disk_free: int
    inodes: int
    inodes_free: int | None
    peak_memory: int
    allowed_memory: int
    memory_bound: str
    workers: int
    segment_nbytes: int
    seconds: float
    fingerprint: str
    coverage: str
    dropped: Mapping[str, str]
    ignored: Mapping[str, int]
    warnings: Sequence[str]
    notes: Sequence[str]
    source_checksums: Mapping[str, int] | None = None
    checked: Sequence[str] = ()
    store: StoreForecast | None = None

    def as_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {"ok": True, **asdict(self)}

    def lines(self) -> list[str]:
        """For a person."""
        files = counted(len(self.output_files), "file")
        text = [
            f"{self.root} ({self.format}), {names_told(self.architecture)}",
            *([f"  OUT         {self.out_state}"] if self.out_state else []),
            f"  writes      {format_bytes(self.write_nbytes)}, {counted(self.tensors, 'tensor')}, {files}",
            *(f"              {name}  {format_bytes(size)}" for name, size in list(self.output_files.items())[:10]),
            *([f"              and {len(self.output_files) - 10} more"] if len(self.output_files) > 10 else []),
            *(self.store.lines() if self.store is not None else []),
            *self._disk_lines(),
            f"  side files  {', '.join(self.side_files) or 'none'}",
            f"  reads       {format_bytes(self.read_nbytes)}",
            (
                f"  peak memory {format_bytes(self.peak_memory)} of {format_bytes(self.allowed_memory)} allowed "
                f"({self.memory_bound})"
            ),
            f"  workers     {self.workers}, with segments of {format_bytes(self.segment_nbytes)}",
            f"  time        {_roughly(self.seconds)} (from a short read of the source; rough)",
            f"  coverage    {self.coverage}",
        ]
        text += [f"  checked     {words}" for words in self.checked]
        text += [f"  leaves out  {name}: {why}" for name, why in self.dropped.items()]
        if self.ignored:
            text.append("  ignored     " + ", ".join(f"{count} {kind}" for kind, count in self.ignored.items()))
        text += [f"  warning: {w}" for w in self.warnings] + [f"  note: {n}" for n in self.notes]
        return text

    def _disk_lines(self) -> list[str]:
        if not self.output_files:
            return []
        room = "" if self.inodes_free is None else f", {self.inodes_free:,} inodes ({self.inodes:,} are made)"
        return [f"  disk        {format_bytes(self.disk_free)} free where OUT goes{room}"]


def forecast(
    paths: Sequence[str],
    out: str | None,
    options: MergeOptions,
    *,
    opening: OpenOptions,
    observer: Observer,
    stop: StopFlag,
) -> Forecast:
    """Everything a direct merge does before its first byte; raises where the merge would."""
    moved_only = interrupted_commit(out) if out is not None else None
    place = None
    if out is not None and moved_only is None:
        given = [*paths, *([options.base_model] if options.base_model else [])]
        place = choose_place(out, overwrite=options.overwrite, inputs=tuple(given))
    catalog = open_checkpoint(paths, opening, max_mem=options.max_mem)
    job = make_plan(catalog, options, observer=observer, stop=stop)
    plan = job.plan
    state, done = "", 0
    if place is not None:
        refuse_busy(place)
        state, done = begun(place, plan, options)
        preflight(job, place)
        job.warnings += remarks_on_memory_files(place, plan, job.memory)
    elif moved_only is not None:
        state = "an interrupted run had finished this model: a merge only moves it into place"
        if moved_only != plan.fingerprint:
            state = "an interrupted run had finished another model: a merge moves that into place, and finds OUT taken"
    moved = plan.read_nbytes * (2 if options.verify else 1) + plan.write_nbytes - 2 * done + plan.probe_nbytes
    moved += plan.write_nbytes if options.sha256 else 0
    told = forecast_of(job, plan, disk_of(out or os.getcwd()), place, moved=moved)
    told.out_state, told.resumed_nbytes = state, done
    return told


def disk_of(path: str) -> Disk:
    """Room where `path` is or will be."""
    folder = os.path.abspath(path)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return Disk(shutil.disk_usage(folder).free, free_inodes(folder))


def forecast_of(job: Job, plan: Plan, disk: Disk, place: OutputPlace | None, *, moved: int) -> Forecast:
    """The forecast of a model `plan`, for which `moved` bytes are read and written."""
    writes = writes_of(plan, job.folder, job.memory.segment, sparse=job.options.sparse)
    there = place or OutputPlace(os.path.abspath("OUT"), os.path.abspath("OUT.partial"), inside=False, replaces=False)
    return Forecast(
        root=job.catalog.root,
        format=job.catalog.format,
        architecture=job.named.mapping.architecture,
        tensors=len(plan.parameters),
        output_files={o.name: o.nbytes for o in plan.outputs},
        side_files=beside_the_weights(plan, job.folder, job.named.adapter_config, card_facts(job)),
        out_state="",
        resumed_nbytes=0,
        read_nbytes=plan.read_nbytes + plan.probe_nbytes,
        write_nbytes=plan.write_nbytes + job.folder.side_files.nbytes,
        disk_free=disk.free,
        inodes=needs_of(there, writes).inodes,
        inodes_free=disk.inodes_free,
        peak_memory=job.memory.projected,
        allowed_memory=job.memory.allowed,
        memory_bound=job.memory.bound,
        workers=job.memory.workers,
        segment_nbytes=job.memory.segment,
        seconds=max(moved, 0) / _read_rate(job),
        fingerprint=plan.fingerprint,
        coverage=f"shards tile {counted(len(job.catalog.tensors), 'source tensor')} exactly, and these every output",
        dropped=plan.dropped,
        ignored=dict(job.catalog.ignored),
        warnings=job.warnings,
        notes=plan.notes,
        source_checksums=job.checksums.as_json() if job.checksums is not None else None,
        checked=(job.checksums.text,) if job.checksums is not None else (),
    )


def _roughly(seconds: float) -> str:
    return f"about {format_duration(seconds)}" if seconds >= 1 else "under a second"


def refuse_busy(place: OutputPlace) -> None:
    """OutputBusyError when another run holds the partial folder, as a merge would raise."""
    try:
        fd = os.open(os.path.join(place.work, "lock"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        msg = f"another merge-stream writes {place.work} right now"
        raise OutputBusyError(msg, hint="wait for it to end, or choose another folder") from error
    finally:
        os.close(fd)


def begun(place: OutputPlace, plan: Plan, options: MergeOptions) -> tuple[str, int]:
    """(what becomes of OUT, bytes that an interrupted run had finished); PlanMismatchError as a merge raises it."""
    swap = f"{place.out} is replaced once the new model is whole"
    fresh = swap if place.replaces else f"{place.out} is made"
    if not os.path.lexists(os.path.join(place.work, "plan.json")):
        return fresh, 0
    if options.restart:
        return f"{fresh}; the interrupted run in {place.work} is thrown away (--restart)", 0
    if not belongs_to(place.work, plan):
        return fresh, 0
    journal = read_journal(os.path.join(place.work, "journal"))
    for written in journal.doubtful:
        journal.trusted.add(written)
    there = [number for number, o in enumerate(plan.outputs) if _size(place.model_dir, o.name) == o.nbytes]
    done = sum(journal.trusted.nbytes(number) for number in there)
    whole = plan.write_nbytes - sum(len(o.header) for o in plan.outputs)
    text = f"the run that began in {place.work} is continued: "
    text += f"{format_bytes(done)} of {format_bytes(whole)} ({100 * done // max(whole, 1)} %) are done"
    if journal.damaged:
        text = (
            f"the run that began in {place.work} is continued; its journal is damaged, so all it wrote is checked first"
        )
    elif journal.doubtful:
        text += ", part of it is checked first, for the machine was started anew"
    return f"{text}; then {swap}" if place.replaces else text, done


def _size(folder: str, name: str) -> int:
    try:
        return os.stat(os.path.join(folder, name)).st_size
    except OSError:
        return -1


def _read_rate(job: Job) -> float:
    """Bytes a second of a short read of the largest source file."""
    largest = max(job.plan.files, key=lambda f: f.nbytes, default=None)
    if largest is None:
        return float(1 << 30)
    source = LocalSource(job.options.io, window_bytes=job.memory.segment)
    buffer = memoryview(bytearray(1 << 20))
    began, done = time.perf_counter(), 0
    try:
        while (
            done + len(buffer) <= min(largest.nbytes, _SAMPLE_BYTES) and time.perf_counter() - began < _SAMPLE_SECONDS
        ):
            source.read_into(largest.path, done, buffer)
            done += len(buffer)
    finally:
        source.close()
    seconds = time.perf_counter() - began
    return done / seconds if done and seconds else float(1 << 30)
