"""What `stage --dry-run` and `plan --staging zarr` tell: a store, and the model that is made from it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from merge_stream.engine.events import Observer
from merge_stream.engine.executor import StopFlag
from merge_stream.engine.staging import STORE
from merge_stream.forecast import Forecast, StoreForecast, begun, disk_of, forecast_of, refuse_busy
from merge_stream.job import Job, make_plan, memory_for
from merge_stream.memory_files import remarks_on_memory_files
from merge_stream.opening import open_checkpoint
from merge_stream.options import MergeOptions, OpenOptions
from merge_stream.output.place import (
    INNER_STORE,
    KEPT_STORE,
    STORE_OF_STAGE,
    OutputKind,
    OutputPlace,
    choose_place,
    interrupted_commit,
    interrupted_identity,
)
from merge_stream.output.store_files import store_files
from merge_stream.output.store_folder import fingerprint_of_store
from merge_stream.planning.plan import Plan
from merge_stream.planning.store_layout import LEAST_SEGMENT
from merge_stream.preflight import check_together, needs_of, preflight, writes_of
from merge_stream.store_job import inputs_of, model_of_store, plan_store
from merge_stream.through_store import is_that_model, other_store, refuse_other_run, second_options, targets_of

__all__ = ["forecast_stage", "forecast_through_store"]


def forecast_stage(
    paths: Sequence[str],
    store: str,
    options: MergeOptions,
    *,
    opening: OpenOptions,
    observer: Observer,
    stop: StopFlag,
) -> Forecast:
    """Everything `stage` does before its first byte; raises where it would."""
    moved_only, given = interrupted_commit(store), inputs_of(paths, options)
    if moved_only is None and not fingerprint_of_store(store):
        choose_place(store, overwrite=False, inputs=given, kind=STORE_OF_STAGE)
    job = plan_store(paths, options, opening, observer, stop)
    if moved_only is None:
        found = _store(job, store, STORE_OF_STAGE, given, options)
    elif moved_only == job.plan.fingerprint:
        state = "an interrupted run had finished this store: `stage` only moves it into place"
        found = _forecast_of_store(job, store, state, None, job.plan.write_nbytes, kept=True)
    else:
        raise other_store(store, STORE_OF_STAGE)
    moved = job.plan.read_nbytes + job.plan.write_nbytes - 2 * found.resumed_nbytes + job.plan.probe_nbytes
    told = forecast_of(job, job.plan, disk_of(store), None, moved=moved)
    told.output_files = {}
    told.side_files = {f.name: f.origin for f in job.folder.side_files.files}
    told.write_nbytes, told.resumed_nbytes = found.nbytes, found.resumed_nbytes
    told.inodes, told.store = found.inodes, found
    told.peak_memory = memory_for(job.options, job.named, least_segment=LEAST_SEGMENT).projected
    return told


def forecast_through_store(
    paths: Sequence[str],
    out: str | None,
    options: MergeOptions,
    *,
    opening: OpenOptions,
    observer: Observer,
    stop: StopFlag,
) -> Forecast:
    """Everything `--staging zarr` does before its first byte; raises where the merge would."""
    identity, given = interrupted_identity(out) if out is not None else None, inputs_of(paths, options)
    place = None
    if out is not None and identity is None:
        place = choose_place(out, overwrite=options.overwrite, inputs=given)
    job = plan_store(paths, options, opening, observer, stop)
    model = model_of_store(job, options)
    disk = disk_of(out or os.getcwd())
    if identity is not None:
        told = forecast_of(job, model, disk, None, moved=0)
        this = "this model: a merge only moves it into place"
        other = "another model: a merge moves that into place, and finds OUT taken"
        told.out_state = f"an interrupted run had finished {this if is_that_model(identity, job, model) else other}"
        told.inodes = told.read_nbytes = 0
        return told
    path = options.keep_store or (os.path.join(place.work, STORE) if place is not None else "")
    kind = KEPT_STORE if options.keep_store else INNER_STORE
    found = _store(job, path, kind, given, options, place)
    state, done = _out_state(job, model, place, path, options) if place is not None else ("", 0)
    left = job.plan.write_nbytes - found.resumed_nbytes
    moved = 2 * left + job.plan.probe_nbytes + model.read_nbytes * (1 + options.verify) + model.write_nbytes - 2 * done
    told = forecast_of(job, model, disk, place, moved=moved + options.sha256 * model.write_nbytes)
    told.out_state, told.resumed_nbytes, told.store = state, done, found
    told.read_nbytes += job.plan.read_nbytes
    told.write_nbytes += found.nbytes
    alone = replace(job.named, folds=())
    halves = (
        memory_for(job.options, job.named, least_segment=LEAST_SEGMENT),
        memory_for(options, alone, least_segment=LEAST_SEGMENT),
    )
    told.peak_memory = max(memory.projected for memory in halves)
    return told


def _store(  # noqa: PLR0917 - the facts of one store
    job: Job,
    path: str,
    kind: OutputKind,
    given: tuple[str, ...],
    options: MergeOptions,
    out: OutputPlace | None = None,
) -> StoreForecast:
    """What becomes of the store; the errors of the run, whose `out` is checked together with it."""
    kept = kind is not INNER_STORE
    if not path:
        return _forecast_of_store(job, "", "", None, 0, kept=kept)
    before = "" if options.restart and kind is INNER_STORE else fingerprint_of_store(path)
    if before == job.plan.fingerprint:
        state = f"{path} holds this checkpoint already"
        return _forecast_of_store(job, path, state, None, job.plan.write_nbytes, kept=kept)
    if before:
        raise other_store(path, kind)
    place = choose_place(path, overwrite=False, inputs=given, kind=kind)
    refuse_busy(place)
    state, done = begun(place, job.plan, options)
    if out is None:
        preflight(job, place)
    job.warnings += remarks_on_memory_files(place, job.plan, job.memory)
    return _forecast_of_store(job, path, state, place, done, kept=kept)


def _out_state(job: Job, model: Plan, place: OutputPlace, store: str, options: MergeOptions) -> tuple[str, int]:
    """(what becomes of OUT, bytes that an interrupted second half had finished); raises as the merge would."""
    refuse_busy(place)
    if fingerprint_of_store(store) == job.plan.fingerprint:
        rest = replace(second_options(options), staging="direct", keep_store=None)
        catalog = open_checkpoint([store], OpenOptions(format="zarr_store"), max_mem=options.max_mem)
        model = make_plan(catalog, rest).plan
    else:
        refuse_other_run(place, options)
    state = begun(place, model, options)
    given = (job.catalog.root, *job.catalog.config_dirs)
    kind = KEPT_STORE if options.keep_store else INNER_STORE
    check_together(targets_of(job, place, store, kind, given, options))
    job.warnings += remarks_on_memory_files(place, model, job.memory)
    return state


def _forecast_of_store(
    job: Job, path: str, state: str, place: OutputPlace | None, done: int, *, kept: bool
) -> StoreForecast:
    files = store_files(job.plan, job.folder)
    disk = disk_of(path or os.getcwd())
    at = place or OutputPlace(os.path.abspath("STORE"), os.path.abspath("STORE.partial"), inside=False, replaces=False)
    needs = needs_of(at, writes_of(job.plan, job.folder, job.memory.segment))
    there = place is None and bool(path)
    return StoreForecast(
        path=path,
        state=state,
        kept=kept,
        nbytes=sum(files.values()),
        files=len(files),
        inodes=0 if there else needs.inodes,
        resumed_nbytes=done,
        disk_free=disk.free,
        inodes_free=disk.inodes_free,
    )
