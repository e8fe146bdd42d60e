"""What is planned when a checkpoint is staged: the store, and the model that is finalized from it.

plan_store(checkpoint)          -> Job    tensors in their source types, in the files of a store
model_of_store(job, options)    -> Plan   the files of the model, before the store is there
inputs_of(checkpoint, options)  the folders that nothing may be written over
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

from merge_stream.architectures.precision import names_kept_wide
from merge_stream.containers.zarr_array import ADAPTER_GROUP
from merge_stream.encodings.cast import encoding_for
from merge_stream.engine.events import Observer, Phase, Warned
from merge_stream.engine.executor import StopFlag
from merge_stream.job import Job, dtype_of, make_plan, quantized_weights
from merge_stream.opening import open_checkpoint
from merge_stream.options import MergeOptions, OpenOptions
from merge_stream.planning.plan import ParameterPlan, Plan
from merge_stream.planning.planner import Resolved
from merge_stream.planning.planner import make_plan as place_parameters
from merge_stream.planning.store_layout import LEAST_SEGMENT, store_plan
from merge_stream.tensors.parameter import Parameter

__all__ = ["Checkpoint", "inputs_of", "model_of_store", "plan_store"]

Checkpoint = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def plan_store(
    checkpoint: Checkpoint,
    options: MergeOptions,
    opening: OpenOptions | None,
    observer: Observer,
    stop: StopFlag,
) -> Job:
    """The job that stages `checkpoint`; what `options` say of the model is left for later."""
    paths = [checkpoint] if isinstance(checkpoint, (str, os.PathLike)) else list(checkpoint)
    observer(Phase("reading metadata"))
    kept = replace(options, dtype="keep", quantize=None, overwrite=False, verify=False, sha256=False)
    catalog = open_checkpoint(paths, opening, max_mem=options.max_mem)
    # a store holds what is in the checkpoint: masters stay masters, and become the config's type with the model
    job = make_plan(replace(catalog, module_dtype=""), kept, observer=observer, stop=stop)
    job.catalog = replace(job.catalog, module_dtype=catalog.module_dtype)
    for text in job.warnings:
        observer(Warned(text))
    job.plan = store_plan(job.plan)
    job.least_segment = LEAST_SEGMENT
    return job


def model_of_store(job: Job, options: MergeOptions) -> Plan:
    """The plan of the model that `options` make of the store of `job`; raises what cannot be quantized.

    Its output files are those to come, headers included; its sources are still the checkpoint's.
    """
    encoding = encoding_for(dtype_of(job.catalog, job.folder, options))
    start = f"{ADAPTER_GROUP}/"
    model = [_resolved(p, p.name) for p in job.plan.parameters if not p.name.startswith(start)]
    kept = [_resolved(p, p.name.removeprefix(start)) for p in job.plan.parameters if p.name.startswith(start)]
    names = [r.parameter.name for r in model]
    narrows = encoding.name in {"bf16", "fp16"}
    return place_parameters(
        job.catalog,
        model,
        encoding,
        options,
        adapter=kept,
        keep_wide=names_kept_wide(names, job.folder.info) if narrows else frozenset(),
        quantized=quantized_weights(job.catalog, job.folder, job.named, options),
        notes=job.plan.notes,
        dropped=job.plan.dropped,
        broken_ties=job.plan.broken_ties,
    )


def inputs_of(checkpoint: Checkpoint, options: MergeOptions) -> tuple[str, ...]:
    """The folders that are read."""
    return tuple(_folders(checkpoint, options))


def _folders(checkpoint: Checkpoint, options: MergeOptions) -> Iterator[str]:
    paths = [checkpoint] if isinstance(checkpoint, (str, os.PathLike)) else checkpoint
    yield from (os.fspath(path) for path in paths)
    if options.base_model:
        yield options.base_model


def _resolved(p: ParameterPlan, name: str) -> Resolved:
    return Resolved(Parameter(name, p.shape, p.source.view, ()), p.source)
