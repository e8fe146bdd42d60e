"""The five steps of a merge, and `merge`, which takes them in a row. Read this file first.

    open_checkpoint(paths)   -> Catalog   which trainer wrote this, and what does it hold?
    make_plan(catalog)       -> Job       what is written, where does each byte come from?
    execute(job, out)        -> Staged    move the bytes, within the memory bound
    finalize(staged)         -> Report    check, add config and side files, make it visible
    verify(out, against)     -> Verdict   is a model equal to a reference or a checkpoint?

`inspect` on the command line stops after the first, `plan` after the second.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from merge_stream import __version__
from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.lora import is_adapter_alone
from merge_stream.architectures.precision import names_kept_wide
from merge_stream.architectures.ties import absent_head
from merge_stream.base_weights import refuse_without_base, with_base_weights
from merge_stream.encodings.cast import Cast, encoding_for
from merge_stream.engine.budget import MemoryBudget
from merge_stream.engine.events import Observer, Phase, Silent, Warned
from merge_stream.engine.executor import Executed, StopFlag
from merge_stream.engine.executor import execute as run_plan
from merge_stream.engine.fold import fold_bytes
from merge_stream.engine.governor import Governor
from merge_stream.engine.memory import MemoryPlan, peak_rss, plan_memory
from merge_stream.engine.probe import Prober
from merge_stream.engine.staging import DirectStaging
from merge_stream.errors import (
    CorruptCheckpointError,
    DiskSpaceError,
    MergeStreamError,
    SourceChangedError,
    VerificationError,
)
from merge_stream.opening import open_checkpoint
from merge_stream.options import MergeOptions, OpenOptions
from merge_stream.output.hugging_face import finish_folder
from merge_stream.output.model_card import CardFacts, config_names, hub_id_of, step_of
from merge_stream.output.model_info import ModelFolder, find_model_folder
from merge_stream.output.place import OutputPlace, choose_place, commit, finish_interrupted_commit
from merge_stream.planning.naming import Named, name_parameters
from merge_stream.planning.plan import Plan
from merge_stream.planning.planner import Resolved
from merge_stream.planning.planner import make_plan as place_parameters
from merge_stream.planning.resolve import check_shards
from merge_stream.report import Report
from merge_stream.storage.local import LocalSource
from merge_stream.tensors.parameter import Mapping
from merge_stream.tensors.ref import Catalog
from merge_stream.units import format_bytes
from merge_stream.verification.verdict import compare_with_plan, verify

if TYPE_CHECKING:
    from merge_stream.output.hub import Pushed, PushTarget

__all__ = [
    "Job",
    "Staged",
    "check_disk",
    "execute",
    "finalize",
    "make_plan",
    "merge",
    "open_checkpoint",
    "push",
    "verify",
]


@dataclass(slots=True)
class Job:
    """A planned merge: the plan, the model folder around it, and the options it was made with."""

    catalog: Catalog
    folder: ModelFolder
    named: Named
    plan: Plan
    options: MergeOptions
    encoding: Cast
    memory: MemoryPlan
    warnings: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Staged:
    """A job whose bytes are all written and synced in the partial folder, not yet visible."""

    job: Job
    place: OutputPlace
    staging: DirectStaging
    executed: Executed
    budget: MemoryBudget
    memory: MemoryPlan
    governor: Governor
    started: float


def make_plan(
    catalog: Catalog,
    options: MergeOptions | None = None,
    *,
    observer: Observer | None = None,
    stop: StopFlag | None = None,
) -> Job:
    """Decide everything: names, ties, element types, places, memory. Reads tensor bytes only for the probe.

    Raises what a merge would raise: an incomplete tensor, an unmapped name, a missing
    config.json, a memory bound that is too small.
    """
    options, observer, stop = options or MergeOptions(), observer or Silent(), stop or StopFlag()
    adapter_alone = is_adapter_alone(catalog)
    if adapter_alone and options.lora.mode == "keep":
        folder = ModelFolder(ModelInfo(None))  # OUT is nothing but the adapter
    else:
        if adapter_alone:
            refuse_without_base(catalog, options.base_model)
        folder = find_model_folder(catalog.config_dirs, options.base_model, write_config=options.write_config)
        if adapter_alone:
            catalog = with_base_weights(catalog, options.base_model, folder.info)
    check_shards(catalog, catalog.tensors)
    named = name_parameters(catalog, folder.info, options.layout, options.lora)
    resolved = named.parameters
    encoding = encoding_for(options.dtype)
    memory = plan_memory(options.max_mem, workers=options.workers, compare=True, fold=fold_bytes(named.folds))
    budget = MemoryBudget(slots=memory.workers, slab_bytes=memory.slab)
    warnings: list[str] = []
    with ExitStack() as stack:
        source = LocalSource()
        stack.callback(source.close)
        prober = Prober(catalog, source, encoding, budget, memory.segment, observer, stop)
        dropped, broken = _probe_ties(named.mapping, resolved, prober, warnings)
        written_heads = _materialize(resolved, dropped, folder, options)
        if options.check_replicas:
            _probe_replicas(catalog, prober, options, warnings)
    if broken and options.strict:
        raise CorruptCheckpointError(
            warnings[0], hint="without --strict both tensors are written and the tie is undone"
        )
    kept = [name for name in resolved if name not in dropped]
    wide = names_kept_wide(kept, folder.info) if options.dtype in {"bf16", "fp16"} else frozenset[str]()
    plan = place_parameters(
        catalog,
        [resolved[name] for name in kept],
        encoding,
        options,
        adapter=named.adapter,
        keep_wide=wide,
        notes=(
            *catalog.notes,
            *named.mapping.notes,
            *named.notes,
            *folder.notes,
            *_remarks(resolved, options),
            *_wide_remark(wide, options),
            *written_heads,
        ),
        dropped=dropped,
        broken_ties=broken,
        probe_nbytes=prober.read_nbytes,
    )
    del budget
    memory = _memory_for(options, named)
    return Job(catalog, folder, named, plan, options, encoding, memory, warnings)


def _memory_for(options: MergeOptions, named: Named) -> MemoryPlan:
    return plan_memory(options.max_mem, workers=options.workers, compare=options.verify, fold=fold_bytes(named.folds))


def _probe_ties(
    mapping: Mapping, resolved: dict[str, Resolved], prober: Prober, warnings: list[str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """(parameters to leave out with the reason, ties that config declares and the bytes deny)."""
    dropped: dict[str, str] = {}
    broken: list[str] = []
    for tie in mapping.ties:
        if not tie.by_config:
            continue
        if prober.same(tie.name, resolved[tie.name].source, resolved[tie.twin].source):
            dropped[tie.name] = f"equal to {tie.twin}, and config.json ties them"
        else:
            broken.append(tie.name)
            warnings.append(
                f"config.json ties {tie.name} to {tie.twin}, but their values differ: both are written, "
                "and tie_word_embeddings becomes false"
            )
    return dropped, tuple(broken)


def _materialize(
    resolved: dict[str, Resolved], dropped: dict[str, str], folder: ModelFolder, options: MergeOptions
) -> list[str]:
    """`--materialize-tied`: heads that would be left out, or are not there, are written; remarks about it."""
    if not options.materialize_tied:
        return []
    if dropped:
        heads = sorted(dropped)
        dropped.clear()
        return [f"{', '.join(heads)} is written although it is tied to the embedding (--materialize-tied)"]
    pair = absent_head(resolved, folder.info)
    if pair is None:
        return ["--materialize-tied has no effect: no output head is tied to the embedding"]
    head, twin = pair
    resolved[head] = Resolved(replace(resolved[twin].parameter, name=head), resolved[twin].source)
    return [f"{head} is written equal to {twin}, to which config.json ties it (--materialize-tied)"]


def _probe_replicas(catalog: Catalog, prober: Prober, options: MergeOptions, warnings: list[str]) -> None:
    for difference in prober.replica_differences(catalog.tensors):
        text = f"replicas differ: {difference}; the copy of the lowest rank is written"
        if options.strict:
            raise CorruptCheckpointError(text, hint="without --strict the copy of the lowest rank is written")
        warnings.append(text)


def _remarks(resolved: dict[str, Resolved], options: MergeOptions) -> list[str]:
    wide = sum(math.prod(r.parameter.shape) * 4 for r in resolved.values() if r.source.dtype.name == "F32")
    whole = sum(math.prod(r.parameter.shape) * r.source.dtype.itemsize for r in resolved.values())
    if options.dtype == "keep" and wide > whole // 2:
        return [
            (
                f"the source is fp32; --dtype bf16 would write {format_bytes(whole - wide // 2)} "
                f"instead of {format_bytes(whole)}"
            )
        ]
    return []


def _wide_remark(wide: frozenset[str], options: MergeOptions) -> list[str]:
    return [f"{len(wide)} tensors keep their type under --dtype {options.dtype}: {min(wide)} ..."] if wide else []


def execute(
    job: Job,
    out: str | os.PathLike[str],
    *,
    inputs: Sequence[str] = (),
    observer: Observer | None = None,
    stop: StopFlag | None = None,
) -> Staged:
    """Write all output bytes into the partial folder of `out`, going on where an earlier run ended.

    The returned `Staged` holds the lock of the partial folder: give it to `finalize`.
    """
    observer, stop = observer or Silent(), stop or StopFlag()
    started = time.monotonic()
    place = choose_place(out, overwrite=job.options.overwrite, inputs=(*inputs, job.catalog.root))
    check_disk(job, place)
    memory = _memory_for(job.options, job.named)
    budget = MemoryBudget(slots=memory.workers, slab_bytes=memory.slab)
    staging = DirectStaging(place.work, job.plan, restart=job.options.restart)
    source = LocalSource()
    try:
        if staging.resumed:
            observer(Warned(f"continuing the run that began in {place.work}"))
        observer(Phase("merging", job.plan.write_nbytes - sum(len(o.header) for o in job.plan.outputs)))
        with Governor(budget, allowed=memory.allowed) as governor:
            executed = run_plan(
                job.plan,
                staging,
                source,
                job.encoding,
                budget=budget,
                segment_bytes=memory.segment,
                observer=observer,
                stop=stop,
            )
        _check_sources(job.plan)
    except BaseException:
        staging.close()
        raise
    finally:
        source.close()
    return Staged(job, place, staging, executed, budget, memory, governor, started)


def finalize(staged: Staged, *, observer: Observer | None = None, stop: StopFlag | None = None) -> Report:
    """Check what was written, add config, side files and index, and make OUT visible."""
    observer, stop = observer or Silent(), stop or StopFlag()
    job, staging, place = staged.job, staged.staging, staged.place
    try:
        verified = ["every output byte has a known source range", "each written range is journaled with its checksum"]
        observer(Phase("finishing"))
        written = finish_folder(job.plan, staging, job.folder, job.named.adapter_config, _card_facts(job))
        verified.append("headers, index and sizes were read back")
        if job.options.verify:
            compare_with_plan(
                job.plan, place.model_dir, job.encoding, staged.budget, staged.memory.segment, observer, stop
            )
            verified.append("all values were read back and compared with the source")
        commit(place)
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
        written_nbytes=staged.executed.written_nbytes,
        resumed_nbytes=staged.executed.resumed_nbytes,
        output_nbytes=job.plan.write_nbytes,
        seconds=time.monotonic() - staged.started,
        workers=memory.workers,
        segment_nbytes=memory.segment,
        memory={
            "allowed": memory.allowed,
            "projected": memory.projected,
            "reserved": memory.reserved,
            "peak": peak_rss(),
            "parked": staged.governor.parked,
        },
        timeline=[(s.seconds, s.rss, s.slabs) for s in staged.governor.samples],
        verified=verified,
        warnings=job.warnings,
        notes=(*job.plan.notes, *written.notes),
        dropped=job.plan.dropped,
        ignored=job.catalog.ignored,
        overflows=staged.executed.overflows,
        side_files=written.side_files,
    )


def _card_facts(job: Job) -> CardFacts | None:
    """What a model card may tell; None when none is wanted."""
    if not (job.options.model_card and job.options.write_config):
        return None
    plan, catalog, folder = job.plan, job.catalog, job.folder
    model = [p for p in plan.parameters if plan.outputs[p.output].in_model]
    return CardFacts(
        format=catalog.format,
        facts=catalog.facts,
        step=step_of(catalog.root),
        fingerprint=plan.fingerprint,
        version=__version__,
        dtype=job.options.dtype,
        dtypes=dict(sorted(Counter(p.dtype.name for p in plan.parameters).items())),
        layout=job.options.layout,
        lora=next((note for note in job.named.notes if "LoRA" in note), ""),
        tensors=len(plan.parameters),
        parameters=sum(p.size for p in plan.parameters),
        nbytes=sum(p.nbytes for p in plan.parameters),
        files=len(plan.outputs),
        base_id=hub_id_of(folder.base_id, *config_names(folder.info.config, catalog.beside)),
        base_readme=folder.base_readme,
        adapter_only=not model,
    )


def merge(
    checkpoint: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    options: MergeOptions | None = None,
    *,
    opening: OpenOptions | None = None,
    observer: Observer | None = None,
    stop: StopFlag | None = None,
) -> Report:
    """Merge a sharded checkpoint (a folder, or node-local parts of one) into the Hugging Face folder `out`."""
    paths = [checkpoint] if isinstance(checkpoint, (str, os.PathLike)) else list(checkpoint)
    options = options or MergeOptions()
    observer = observer or Silent()
    if finish_interrupted_commit(out):
        observer(
            Warned(
                f"an earlier run was interrupted while it moved the finished model to {os.fspath(out)}; it is there now"
            )
        )
    choose_place(out, overwrite=options.overwrite, inputs=tuple(os.fspath(p) for p in paths))
    observer(Phase("reading metadata"))
    catalog = open_checkpoint(paths, opening)
    job = make_plan(catalog, options, observer=observer, stop=stop)
    for text in job.warnings:
        observer(Warned(text))
    staged = execute(job, out, inputs=[os.fspath(p) for p in paths], observer=observer, stop=stop)
    return finalize(staged, observer=observer, stop=stop)


def push(out: str | os.PathLike[str], target: PushTarget, *, quiet: bool = False) -> Pushed:
    """Upload the finished model folder `out`; VerificationError when its files do not make a whole model.

    HubError tells how to go on when the upload fails; `out` is never changed.
    """
    from merge_stream.output.hub import push_folder
    from merge_stream.verification.check import check_folder

    found = check_folder(out)
    broken = [finding for finding in found.findings if finding.severity == "error" and finding.about == "files"]
    if broken:
        msg = f"{os.fspath(out)} is no whole model: {broken[0].text}"
        raise VerificationError(msg, hint="`merge-stream check OUT` tells everything; nothing was uploaded")
    return push_folder(out, target, quiet=quiet)


def check_disk(job: Job, place: OutputPlace) -> None:
    """Refuse before the first byte when the disk has no room for what is still to be written."""
    parent = place.out if place.inside else os.path.dirname(place.out)
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent):
        msg = f"{parent} is a file, so {place.out} cannot be made below it"
        raise MergeStreamError(msg, hint="choose another OUT")
    usage = shutil.disk_usage(parent)
    if not os.access(parent, os.W_OK | os.X_OK):
        msg = f"{parent} is not writable for this user"
        raise MergeStreamError(msg, hint="choose an OUT on a disk you may write to")
    there = 0
    for output in job.plan.outputs:
        path = os.path.join(place.model_dir, output.name)
        if os.path.exists(path):
            there += os.stat(path).st_blocks * 512
    needed = job.plan.write_nbytes + job.folder.side_files.nbytes - there
    if needed > usage.free:
        msg = f"{parent} has {format_bytes(usage.free)} free, the output needs {format_bytes(needed)}"
        fewer = (
            ", or write fewer bytes (--dtype bf16)" if any(p.dtype.itemsize > 2 for p in job.plan.parameters) else ""
        )
        raise DiskSpaceError(msg, hint=f"free some space, or choose another disk{fewer}")


def _check_sources(plan: Plan) -> None:
    """Raise when a source file is no longer the one that was planned with."""
    for file in plan.files:
        try:
            info = os.stat(file.path)
            same = (info.st_size, info.st_mtime_ns) == (file.nbytes, file.mtime_ns)
        except OSError:
            same = False
        if not same:
            msg = f"{file.name} changed while it was merged (size or time of change differ from the start)"
            raise SourceChangedError(msg, hint="let the trainer finish, then run again with --restart")
