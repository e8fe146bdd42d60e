"""Staging in a store: assemble a checkpoint once, then write models from the store without it.

    stage(paths, store)            -> Report   checkpoint to store: names and source types are decided
    finalize_store(store, out)     -> Report   store to model: element type and size of files are decided
    merge_through_store(...)       -> Report   both (`--staging zarr`); the store is removed unless it is kept

A store is a checkpoint format like any other (`formats.zarr_store`), and staging is a merge whose
output is not a model: planning, memory bound, resume and commit are those of `api`.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace

from merge_stream.api import Staged, execute, merge
from merge_stream.encodings.cast import encoding_for
from merge_stream.engine.events import Noted, Observer, Phase, Silent, Warned
from merge_stream.engine.executor import StopFlag
from merge_stream.engine.memory import peak_rss
from merge_stream.engine.staging import STORE, STORE_ENTRIES, locked
from merge_stream.engine.zarr_staging import ZarrStaging
from merge_stream.errors import DiskSpaceError, OutputExistsError
from merge_stream.job import Job, lora_note, make_plan
from merge_stream.opening import open_checkpoint
from merge_stream.options import LoraChoice, MergeOptions, OpenOptions
from merge_stream.output.place import (
    OutputPlace,
    choose_place,
    commit,
    finish_interrupted_commit,
    interrupted_commit,
)
from merge_stream.output.store_folder import fingerprint_of_store, finish_store, staged_facts
from merge_stream.planning.store_layout import LEAST_SEGMENT, store_plan
from merge_stream.report import Report
from merge_stream.units import format_bytes

__all__ = ["finalize_store", "merge_through_store", "stage"]


def stage(
    checkpoint: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    store: str | os.PathLike[str],
    options: MergeOptions | None = None,
    *,
    opening: OpenOptions | None = None,
    observer: Observer | None = None,
    stop: StopFlag | None = None,
) -> Report:
    """Assemble a checkpoint in the new folder `store`, in its own element types.

    A store that this very checkpoint was staged in stays as it is. OutputExistsError when
    `store` holds anything else.
    """
    options, observer, stop = options or MergeOptions(), observer or Silent(), stop or StopFlag()
    path = os.fspath(store)
    _finish_commit(path, observer)
    given = _inputs(checkpoint, options)
    if not fingerprint_of_store(path):
        _free_place(path, given)
    job = _planned(checkpoint, options, opening, observer, stop)
    return _stage(job, path, given, observer, stop)


def finalize_store(
    store: str | os.PathLike[str],
    out: str | os.PathLike[str],
    options: MergeOptions | None = None,
    *,
    observer: Observer | None = None,
    stop: StopFlag | None = None,
) -> Report:
    """Write the model `out` from a store; names, ties and LoRA are those that it was staged with."""
    options = replace(options or MergeOptions(), staging="direct", keep_store=None)
    return merge([store], out, options, opening=OpenOptions(format="zarr_store"), observer=observer, stop=stop)


def merge_through_store(
    checkpoint: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    options: MergeOptions,
    *,
    opening: OpenOptions | None = None,
    observer: Observer | None = None,
    stop: StopFlag | None = None,
) -> Report:
    """Stage, then finalize: in `options.keep_store`, or in the partial folder of `out`, which goes with success."""
    observer, stop = observer or Silent(), stop or StopFlag()
    _finish_commit(os.fspath(out), observer)
    given = _inputs(checkpoint, options)
    place = choose_place(out, overwrite=options.overwrite, inputs=given)
    store = options.keep_store or os.path.join(place.work, STORE)
    job = _planned(checkpoint, options, opening, observer, stop)
    _check_room(job, place, store, options)
    lock = locked(place.work)
    try:
        if options.keep_store:
            _finish_commit(store, observer)
        elif options.restart:
            shutil.rmtree(store, ignore_errors=True)
        first = _stage(job, store, given, observer, stop)
    finally:
        os.close(lock)
    second = finalize_store(
        store,
        out,
        replace(
            options, base_model=None, lora=LoraChoice(), check_crc=False, check_replicas=False, materialize_tied=False
        ),
        observer=observer,
        stop=stop,
    )
    second.format = first.format
    second.read_nbytes += first.read_nbytes
    second.written_nbytes += first.written_nbytes
    second.resumed_nbytes += first.resumed_nbytes
    second.seconds += first.seconds
    second.verified = list(dict.fromkeys([*first.verified, *second.verified]))
    second.warnings = list(dict.fromkeys([*first.warnings, *second.warnings]))
    second.source_checksums = first.source_checksums
    second.memory_pressure = first.memory_pressure or second.memory_pressure
    second.ignored = first.ignored
    second.dropped = {**first.dropped, **second.dropped}
    if options.keep_store:
        second.notes = (*second.notes, f"the store is kept in {store}")
    return second


def _planned(
    checkpoint: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    options: MergeOptions,
    opening: OpenOptions | None,
    observer: Observer,
    stop: StopFlag,
) -> Job:
    """The job that stages: tensors in their source types, in the files of a store."""
    paths = [checkpoint] if isinstance(checkpoint, (str, os.PathLike)) else list(checkpoint)
    observer(Phase("reading metadata"))
    kept = replace(options, dtype="keep", overwrite=False, verify=False, sha256=False)
    job = make_plan(open_checkpoint(paths, opening, max_mem=options.max_mem), kept, observer=observer, stop=stop)
    for text in job.warnings:
        observer(Warned(text))
    job.plan = store_plan(job.plan)
    job.least_segment = LEAST_SEGMENT
    return job


def _stage(job: Job, store: str, given: tuple[str, ...], observer: Observer, stop: StopFlag) -> Report:
    before = fingerprint_of_store(store)
    if before == job.plan.fingerprint:
        observer(Noted(f"{store} holds this checkpoint already"))
        return _report(job, store, None)
    if before:
        msg = f"{store} is the store of another checkpoint, or of this one staged with other options"
        raise OutputExistsError(msg, hint="choose another STORE, or remove that one yourself")
    _free_place(store, given)
    staged = execute(job, store, inputs=given, observer=observer, stop=stop, area=ZarrStaging)
    staging = staged.staging
    try:
        observer(Phase("finishing the store"))
        facts = staged_facts(
            job.catalog,
            job.folder,
            job.plan,
            job.options,
            architecture=job.named.mapping.architecture,
            lora=lora_note(job.named),
        )
        finish_store(job.plan, staging, job.folder, facts)
        commit(staged.place)
    finally:
        staging.close()
    return _report(job, store, staged)


def _report(job: Job, store: str, staged: Staged | None) -> Report:
    """What was staged; nothing moved when the store was there."""
    plan, checks = job.plan, job.checksums
    report = Report(
        out=os.path.abspath(store),
        format=job.catalog.format,
        architecture=job.named.mapping.architecture,
        fingerprint=plan.fingerprint,
        dtype="keep",
        layout=job.options.layout,
        tensors=len(plan.parameters),
        files=[output.name for output in plan.outputs],
        output_nbytes=plan.write_nbytes,
        verified=["every byte of the store has a known source range", "each chunk has its CRC-32C"],
        warnings=job.warnings,
        notes=plan.notes,
        dropped=plan.dropped,
        ignored=job.catalog.ignored,
        side_files={f.name: f.origin for f in job.folder.side_files.files},
        source_checksums=checks.as_json() if checks is not None else None,
    )
    memory = staged.memory if staged is not None else job.memory
    report.memory = {
        "allowed": memory.allowed,
        "projected": memory.projected,
        "reserved": memory.reserved,
        "peak": peak_rss(),
    }
    report.workers, report.segment_nbytes = memory.workers, memory.segment
    if staged is None:
        report.resumed_nbytes = plan.write_nbytes
        return report
    report.read_nbytes = staged.executed.read_nbytes + plan.probe_nbytes
    report.written_nbytes = staged.executed.written_nbytes
    report.resumed_nbytes = staged.executed.resumed_nbytes
    report.seconds = time.monotonic() - staged.started
    report.timeline = [(s.seconds, s.rss, s.slabs, s.done) for s in staged.governor.samples]
    return report


def _inputs(
    checkpoint: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], options: MergeOptions
) -> tuple[str, ...]:
    paths = [checkpoint] if isinstance(checkpoint, (str, os.PathLike)) else list(checkpoint)
    return (*(os.fspath(p) for p in paths), *([options.base_model] if options.base_model else []))


def _finish_commit(path: str, observer: Observer) -> None:
    """Make the renames that an earlier run was killed before."""
    if interrupted_commit(path):
        finish_interrupted_commit(path)
        observer(Noted(f"an earlier run was ended while it moved what it had finished to {path}; it is there now"))


def _free_place(store: str, given: tuple[str, ...]) -> None:
    """OutputExistsError unless `store` is free; a store is never replaced."""
    try:
        choose_place(store, overwrite=False, inputs=given)
    except OutputExistsError as error:
        hint = "choose another STORE, or remove that one yourself" if "--overwrite" in error.hint else error.hint
        raise OutputExistsError(error.message, hint=hint) from None


def _check_room(job: Job, place: OutputPlace, store: str, options: MergeOptions) -> None:
    """DiskSpaceError when store and model together do not fit on the disk of OUT (they stand there at one time)."""
    encoding = encoding_for(options.dtype)
    model = sum(p.size * encoding.target(p.name, p.dtype).itemsize for p in job.plan.parameters)
    work, folder = place.work, place.out
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    staged = 0 if options.keep_store or fingerprint_of_store(store) else job.plan.write_nbytes
    there = _nbytes_below(place.model_dir) + sum(_nbytes_below(os.path.join(work, name)) for name in STORE_ENTRIES)
    needed, free = model + staged - there, shutil.disk_usage(folder).free
    if needed > free:
        msg = f"{folder} has {format_bytes(free)} free, the store and the model need {format_bytes(needed)}"
        raise DiskSpaceError(msg, hint="free some space, put the store on another disk (--keep-store), or stage direct")


def _nbytes_below(folder: str) -> int:
    return sum(os.lstat(os.path.join(at, name)).st_blocks * 512 for at, _, names in os.walk(folder) for name in names)
