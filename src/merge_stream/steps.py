"""The steps that move bytes: `execute` and `finalize`, and `merge_directly`, which takes all of them in a row.

What is written is decided by then (`job`); whether it goes through a store is decided above (`api`, `through_store`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from merge_stream.engine.assembler import Assembler
from merge_stream.engine.budget import MemoryBudget
from merge_stream.engine.checked_source import CheckedSource
from merge_stream.engine.events import Noted, Observer, Phase, Silent, Warned
from merge_stream.engine.executor import Executed, StopFlag
from merge_stream.engine.executor import execute as run_plan
from merge_stream.engine.file_checksums import crc32c_of_outputs, sha256_of_files
from merge_stream.engine.governor import Governor
from merge_stream.engine.largest import measure_largest
from merge_stream.engine.limits import flush_window
from merge_stream.engine.memory import MemoryPlan
from merge_stream.engine.staging import DirectStaging, SparseStaging
from merge_stream.engine.unchanged import sources_unchanged
from merge_stream.job import Job, card_facts, make_plan, memory_for
from merge_stream.memory_files import remarks_on_memory_files
from merge_stream.opening import open_checkpoint
from merge_stream.options import MergeOptions, OpenOptions
from merge_stream.output.hugging_face import beside_the_weights, finish_folder
from merge_stream.output.place import (
    MODEL,
    OutputKind,
    OutputPlace,
    choose_place,
    commit,
    confirm_place,
    finish_interrupted_commit,
    interrupted_commit,
)
from merge_stream.planning.plan import Plan
from merge_stream.preflight import preflight
from merge_stream.report import Report
from merge_stream.storage.local import LocalSource
from merge_stream.verification.written import compare_with_plan

__all__ = ["Staged", "execute", "finalize", "merge_directly", "report_of_moved"]


@dataclass(slots=True)
class Staged:
    """A job whose bytes are all written and synced in the partial folder, not yet visible."""

    job: Job
    place: OutputPlace
    staging: DirectStaging
    executed: Executed
    mapped_nbytes: int
    budget: MemoryBudget
    memory: MemoryPlan
    governor: Governor
    started: float


def execute(
    job: Job,
    out: str | os.PathLike[str],
    *,
    inputs: Sequence[str] = (),
    observer: Observer | None = None,
    stop: StopFlag | None = None,
    area: type[DirectStaging] = DirectStaging,
    kind: OutputKind = MODEL,
) -> Staged:
    """Write all output bytes into the partial folder of `out`, going on where an earlier run ended.

    The returned `Staged` holds the lock of the partial folder: give it to `finalize`. `area` is the kind of
    staging area, `kind` what `out` becomes.
    """
    observer, stop = observer or Silent(), stop or StopFlag()
    started = time.monotonic()
    place = choose_place(
        out, overwrite=job.options.overwrite, inputs=(*inputs, job.catalog.root, *job.catalog.config_dirs), kind=kind
    )
    preflight(job, place)
    memory = memory_for(job.options, job.named, least_segment=job.least_segment, columns=job.columns)
    for text in remarks_on_memory_files(place, job.plan, memory):
        job.warnings.append(text)
        observer(Warned(text))
    budget = MemoryBudget(slots=memory.workers, slab_bytes=memory.slab)
    staging = area(place.work, job.plan, restart=job.options.restart, flush_bytes=flush_window())
    source = LocalSource(job.options.io, window_bytes=memory.segment)
    try:
        confirm_place(place, begun=staging.resumed)
        if staging.resumed:
            observer(Noted(f"continuing the run that began in {place.work}"))
        with Governor(budget, memory, observer) as governor, sources_unchanged(job.plan):
            checked = CheckedSource(source, job.plan.chunk_sums)
            largest = measure_largest(
                job.plan,
                lambda: Assembler(checked, job.plan.files, job.encoding),
                staging.done,
                budget=budget,
                segment_bytes=memory.segment,
                observer=observer,
                stop=stop,
            )
            observer(Phase("merging", job.plan.write_nbytes - sum(len(o.header) for o in job.plan.outputs)))
            executed = run_plan(
                job.plan,
                staging,
                checked,
                job.encoding,
                budget=budget,
                segment_bytes=memory.segment,
                observer=governor.counted,
                stop=stop,
                largest=largest.magnitudes,
            )
            executed.read_nbytes += largest.read_nbytes
    except BaseException:
        staging.close()
        raise
    finally:
        source.close()
    return Staged(job, place, staging, executed, source.mapped_nbytes, budget, memory, governor, started)


def finalize(staged: Staged, *, observer: Observer | None = None, stop: StopFlag | None = None) -> Report:
    """Check what was written, add config, side files and index, and make OUT visible."""
    observer, stop = observer or Silent(), stop or StopFlag()
    job, staging, place = staged.job, staged.staging, staged.place
    try:
        verified = ["every output byte has a known source range", "each written range is journaled with its checksum"]
        if job.checksums is not None and job.checksums.records:
            verified.append(job.checksums.text)
        if job.options.check_replicas:
            verified.append("stored copies of the same data were compared")
        observer(Phase("finishing"))
        written = finish_folder(job.plan, staging, job.folder, job.named.adapter_config, card_facts(job))
        verified.append("headers, index and sizes were read back")
        checksums = _checksums(staged, observer, stop)
        if job.options.verify:
            with sources_unchanged(job.plan):
                errors = compare_with_plan(
                    job.plan,
                    place.model_dir,
                    job.encoding,
                    staged.budget,
                    staged.memory.segment,
                    observer,
                    stop,
                    job.options.io,
                )
            verified.append("all values were read back and compared with the source")
            if errors:
                verified.append(f"quantized weights are near the source; worst: {errors[0]}")
        left_over = commit(place)
    finally:
        staging.close()
    memory = staged.memory
    return Report(
        out=place.out,
        format=job.catalog.format,
        architecture=job.named.mapping.architecture,
        fingerprint=job.plan.fingerprint,
        dtype=job.options.dtype,
        layout=job.options.layout,
        tensors=len(job.plan.parameters),
        files=[o.name for o in job.plan.outputs],
        read_nbytes=staged.executed.read_nbytes + job.plan.probe_nbytes,
        io=_ways(staged),
        written_nbytes=staged.executed.written_nbytes,
        resumed_nbytes=staged.executed.resumed_nbytes,
        output_nbytes=job.plan.write_nbytes,
        seconds=time.monotonic() - staged.started,
        workers=memory.workers,
        segment_nbytes=memory.segment,
        memory={
            **memory.figures(),
            "parked": staged.governor.parked,
            "parked_milliseconds": round(staged.governor.parked_seconds * 1000),
        },
        memory_bound=memory.bound,
        memory_pressure=staged.governor.text,
        timeline=[(s.seconds, s.rss, s.slabs, s.done) for s in staged.governor.samples],
        verified=verified,
        warnings=job.warnings,
        notes=(*job.plan.notes, *written.notes, *left_over),
        dropped=job.plan.dropped,
        ignored=job.catalog.ignored,
        overflows=staged.executed.overflows,
        side_files=written.side_files,
        checksums=checksums,
        source_checksums=job.checksums.as_json() if job.checksums is not None else None,
    )


def merge_directly(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    options: MergeOptions,
    *,
    opening: OpenOptions,
    observer: Observer,
    stop: StopFlag | None = None,
) -> Report:
    """Merge into the model's own files: no store, and no second pass over the data."""
    before = _committed_before(paths, out, options, opening=opening, observer=observer, stop=stop)
    if before is not None:
        return before
    given = [*(os.fspath(p) for p in paths), *([options.base_model] if options.base_model else [])]
    choose_place(out, overwrite=options.overwrite, inputs=tuple(given))
    observer(Phase("reading metadata"))
    catalog = open_checkpoint(paths, opening, max_mem=options.max_mem)
    job = make_plan(catalog, options, observer=observer, stop=stop)
    for text in job.warnings:
        observer(Warned(text))
    area = SparseStaging if job.options.sparse else DirectStaging
    staged = execute(job, out, inputs=given, observer=observer, stop=stop, area=area)
    return finalize(staged, observer=observer, stop=stop)


def _committed_before(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    options: MergeOptions,
    *,
    opening: OpenOptions,
    observer: Observer,
    stop: StopFlag | None,
) -> Report | None:
    """The report of this merge when an earlier run was killed with only renames left: they are made now.

    None when there is no such run, or when it was another merge than this one.
    """
    fingerprint = interrupted_commit(out)
    if not fingerprint:
        return None
    left_over = finish_interrupted_commit(out) or ()
    observer(Noted(f"an earlier run was ended while it moved the finished model to {os.fspath(out)}; it is there now"))
    job = make_plan(open_checkpoint(paths, opening, max_mem=options.max_mem), options, observer=observer, stop=stop)
    if job.plan.fingerprint != fingerprint:
        return None
    return report_of_moved(job, job.plan, out, left_over)


def report_of_moved(job: Job, plan: Plan, out: str | os.PathLike[str], left_over: tuple[str, ...]) -> Report:
    """Of the model of `plan` that an earlier run had finished, and that was only moved now."""
    return Report(
        out=os.path.abspath(out),
        format=job.catalog.format,
        architecture=job.named.mapping.architecture,
        fingerprint=plan.fingerprint,
        dtype=job.options.dtype,
        layout=job.options.layout,
        tensors=len(plan.parameters),
        files=[o.name for o in plan.outputs],
        resumed_nbytes=plan.write_nbytes - sum(len(o.header) for o in plan.outputs),
        output_nbytes=plan.write_nbytes,
        memory=job.memory.figures(),
        verified=["the run that wrote it had checked everything and was ended while it moved the model"],
        warnings=job.warnings,
        notes=(*plan.notes, *left_over),
        dropped=plan.dropped,
        ignored=job.catalog.ignored,
        side_files=beside_the_weights(plan, job.folder, job.named.adapter_config, card_facts(job)),
    )


def _checksums(staged: Staged, observer: Observer, stop: StopFlag) -> dict[str, dict[str, str]]:
    """Output file -> name of a checksum -> hex digits."""
    outputs, staging, budget = staged.job.plan.outputs, staged.staging, staged.budget
    kinds = {"crc32c": crc32c_of_outputs(outputs, staging.noted(), staging.sink, budget)}
    if staged.job.options.sha256:
        source = LocalSource(window_bytes=staged.memory.segment)
        try:
            kinds["sha256"] = sha256_of_files(
                staged.place.model_dir,
                outputs,
                source,
                budget=budget,
                segment_bytes=staged.memory.segment,
                observer=observer,
                stop=stop,
            )
        finally:
            source.close()
    return {o.name: {kind: values[o.name] for kind, values in kinds.items() if o.name in values} for o in outputs}


def _ways(staged: Staged) -> dict[str, int]:
    """Bytes by the way in which workers read them; what a window could not give was read by pread."""
    mapped = staged.mapped_nbytes
    ways = {"mmap": mapped, "pread": staged.executed.read_nbytes - mapped}
    return {way: nbytes for way, nbytes in ways.items() if nbytes}
