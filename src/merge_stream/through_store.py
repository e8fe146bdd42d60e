"""Staging in a store: assemble a checkpoint once, then write models from the store without it.

    stage(paths, store)            -> Report   checkpoint to store: names and source types are decided
    finalize_store(store, out)     -> Report   store to model: element type and size of files are decided
    merge_through_store(...)       -> Report   both (`--staging zarr`); the store is removed unless it is kept

A store is a checkpoint format like any other (`formats.zarr_store`), and staging is a merge whose
output is not a model: planning, memory bound, resume and commit are those of `steps`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace

from merge_stream.engine.events import Noted, Observer, Phase, Silent
from merge_stream.engine.executor import StopFlag
from merge_stream.engine.staging import STORE, locked
from merge_stream.engine.zarr_staging import ZarrStaging
from merge_stream.errors import OutputExistsError, PlanMismatchError
from merge_stream.job import Job, lora_note
from merge_stream.options import LoraChoice, MergeOptions, OpenOptions
from merge_stream.output.place import (
    INNER_STORE,
    KEPT_STORE,
    STORE_OF_STAGE,
    OutputKind,
    OutputPlace,
    choose_place,
    commit,
    finish_interrupted_commit,
    interrupted_commit,
    interrupted_identity,
)
from merge_stream.output.store_folder import fingerprint_of_store, finish_store, staged_facts
from merge_stream.planning.plan import Plan
from merge_stream.planning.store_layout import STORE_IDENTITY
from merge_stream.preflight import Target, check_together, writes_of
from merge_stream.report import Report
from merge_stream.steps import Staged, execute, merge_directly, report_of_moved
from merge_stream.store_job import Checkpoint, inputs_of, model_of_store, plan_store

__all__ = [
    "finalize_store",
    "is_that_model",
    "merge_through_store",
    "other_store",
    "refuse_other_run",
    "second_options",
    "stage",
    "targets_of",
]


def stage(
    checkpoint: Checkpoint,
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
    given = inputs_of(checkpoint, options)
    if not fingerprint_of_store(path):
        choose_place(path, overwrite=False, inputs=given, kind=STORE_OF_STAGE)
    job = plan_store(checkpoint, options, opening, observer, stop)
    return _stage(job, path, given, observer, stop, STORE_OF_STAGE)


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
    opening = OpenOptions(format="zarr_store")
    return merge_directly([store], out, options, opening=opening, observer=observer or Silent(), stop=stop)


def merge_through_store(
    checkpoint: Checkpoint,
    out: str | os.PathLike[str],
    options: MergeOptions,
    *,
    opening: OpenOptions | None = None,
    observer: Observer | None = None,
    stop: StopFlag | None = None,
) -> Report:
    """Stage, then finalize: in `options.keep_store`, or in the partial folder of `out`, which goes with success."""
    observer, stop = observer or Silent(), stop or StopFlag()
    given, job = inputs_of(checkpoint, options), None
    identity = interrupted_identity(out)
    left = _finish_commit(os.fspath(out), observer)
    if identity is not None:
        job = plan_store(checkpoint, options, opening, observer, stop)
        before = _committed_before(job, identity, out, options, left)
        if before is not None:
            return before
    place = choose_place(out, overwrite=options.overwrite, inputs=given)
    store = options.keep_store or os.path.join(place.work, STORE)
    kind = KEPT_STORE if options.keep_store else INNER_STORE
    job = job or plan_store(checkpoint, options, opening, observer, stop)
    if fingerprint_of_store(store) != job.plan.fingerprint:
        refuse_other_run(place, options)
    check_together(targets_of(job, place, store, kind, given, options))
    lock = locked(place.work)
    try:
        if options.restart and kind is INNER_STORE:
            _begin_anew(store)
        _finish_commit(store, observer)
        first = _stage(job, store, given, observer, stop, kind)
    finally:
        os.close(lock)
    second = finalize_store(store, out, second_options(options), observer=observer, stop=stop)
    second.format = first.format
    second.read_nbytes += first.read_nbytes
    second.written_nbytes += first.written_nbytes
    second.resumed_nbytes += first.resumed_nbytes
    second.seconds += first.seconds
    second.memory = {key: max(first.memory.get(key, 0), value) for key, value in second.memory.items()}
    second.verified = list(dict.fromkeys([*first.verified, *second.verified]))
    second.warnings = list(dict.fromkeys([*first.warnings, *second.warnings]))
    second.source_checksums = first.source_checksums
    second.memory_pressure = first.memory_pressure or second.memory_pressure
    second.ignored = first.ignored
    second.dropped = {**first.dropped, **second.dropped}
    if options.keep_store:
        second.notes = (*second.notes, f"the store is kept in {store}")
    return second


def targets_of(  # noqa: PLR0917 - the facts of one merge
    job: Job, place: OutputPlace, store: str, kind: OutputKind, given: tuple[str, ...], options: MergeOptions
) -> list[Target]:
    """What stands on the disks at one time: the store, unless it is there already, and the model."""
    targets = [
        Target(place, writes_of(model_of_store(job, options), job.folder, job.memory.segment, sparse=options.sparse))
    ]
    before = "" if options.restart and kind is INNER_STORE else fingerprint_of_store(store)
    if before not in {"", job.plan.fingerprint}:
        raise other_store(store, kind)
    if not before and not fingerprint_of_store(store):
        at = choose_place(store, overwrite=False, inputs=given, kind=kind)
        targets.insert(0, Target(at, writes_of(job.plan, job.folder, job.memory.segment)))
    return targets


def _stage(  # noqa: PLR0917 - the facts of one run
    job: Job, store: str, given: tuple[str, ...], observer: Observer, stop: StopFlag, kind: OutputKind
) -> Report:
    before = fingerprint_of_store(store)
    if before == job.plan.fingerprint:
        observer(Noted(f"{store} holds this checkpoint already"))
        return _report(job, store, None)
    if before:
        raise other_store(store, kind)
    choose_place(store, overwrite=False, inputs=given, kind=kind)
    staged = execute(job, store, inputs=given, observer=observer, stop=stop, area=ZarrStaging, kind=kind)
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
            adapter_config=job.named.adapter_config,
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
    report.memory = memory.figures()
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


def _finish_commit(path: str, observer: Observer) -> tuple[str, ...]:
    """Make the renames that an earlier run was killed before; what could not be removed then."""
    if not interrupted_commit(path):
        return ()
    left = finish_interrupted_commit(path) or ()
    observer(Noted(f"an earlier run was ended while it moved what it had finished to {path}; it is there now"))
    return left


def _committed_before(
    job: Job, identity: Mapping[str, str], out: str | os.PathLike[str], options: MergeOptions, left: tuple[str, ...]
) -> Report | None:
    """The report when the model that an earlier run was moving to OUT is the one that is asked for.

    The store may be gone with that run, so the model is known by what was staged and by its own files.
    """
    model = model_of_store(job, options)
    if not is_that_model(identity, job, model):
        return None
    return report_of_moved(job, replace(model, identity=identity), out, left)


def is_that_model(identity: Mapping[str, str], job: Job, model: Plan) -> bool:
    """True when `identity` is that of `model`, made from the store of `job`."""
    told = {**{name: model.identity[name] for name in _OF_MODEL}, STORE_IDENTITY: job.plan.fingerprint}
    return all(identity.get(name) == value for name, value in told.items())


_OF_MODEL = ("--dtype", "--max-shard-size", "output files (names, tensors, types, offsets)")


def other_store(store: str, kind: OutputKind) -> OutputExistsError:
    """The error for a store that holds something else; a store is never replaced."""
    msg = f"{store} is the store of another checkpoint, or of this one staged with other options"
    if kind is INNER_STORE:
        return OutputExistsError(msg, hint="give the same options to continue it, or --restart to begin anew")
    return OutputExistsError(msg, hint=f"choose another {kind.word}, or remove that one yourself")


def second_options(options: MergeOptions) -> MergeOptions:
    """What is left to decide once the store is there."""
    return replace(
        options, base_model=None, lora=LoraChoice(), check_crc=False, check_replicas=False, materialize_tied=False
    )


def refuse_other_run(place: OutputPlace, options: MergeOptions) -> None:
    """PlanMismatchError, before anything is staged, when the partial folder of OUT belongs to another merge."""
    if os.path.lexists(os.path.join(place.work, "plan.json")) and not options.restart:
        msg = f"{place.work} belongs to another run: it was begun without this store"
        raise PlanMismatchError(msg, hint="give the same options to continue it, or --restart to begin anew")


def _begin_anew(store: str) -> None:
    """Remove the store in a partial folder, whole or begun."""
    for end in ("", ".partial"):
        shutil.rmtree(store + end, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{store}.partial.committing")
