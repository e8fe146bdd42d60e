"""A planned merge: from a catalog to everything that is decided before the first byte.

The second of the five steps of `api`: names, ties, element types, places, memory; and the
checks of the target that need them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from merge_stream import __version__
from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.lora import is_adapter_alone
from merge_stream.architectures.megatron_adapters import holds_adapters_alone, with_peft_names
from merge_stream.architectures.precision import names_kept_wide
from merge_stream.architectures.ties import absent_head
from merge_stream.base_weights import refuse_without_base, with_base_weights
from merge_stream.collector import without_collector
from merge_stream.containers.zarr_array import ADAPTER_GROUP
from merge_stream.encodings.base import scheme_named, temporaries
from merge_stream.encodings.cast import Cast, encoding_for
from merge_stream.engine.budget import MemoryBudget
from merge_stream.engine.checked_source import CheckedSource
from merge_stream.engine.events import Observer, Silent
from merge_stream.engine.executor import StopFlag
from merge_stream.engine.fold import fold_bytes
from merge_stream.engine.memory import MemoryPlan, metadata_ahead, plan_memory
from merge_stream.engine.probe import Prober
from merge_stream.engine.stored_checksums import ChecksumFindings, ranges_ahead
from merge_stream.engine.twins import as_stored
from merge_stream.errors import CheckpointError, CorruptCheckpointError, UnsupportedError, UsageError
from merge_stream.options import DtypeName, MergeOptions
from merge_stream.output.hugging_face import planned_config
from merge_stream.output.model_card import CardFacts, config_names, hub_id_of, step_of
from merge_stream.output.model_info import ModelFolder, find_model_folder
from merge_stream.output.store_folder import FP32_REMARK, as_staged
from merge_stream.planning.naming import Named, name_parameters
from merge_stream.planning.plan import Plan
from merge_stream.planning.planner import Resolved
from merge_stream.planning.planner import make_plan as place_parameters
from merge_stream.planning.quantize import QuantizedWeights, choose_weights
from merge_stream.planning.resolve import check_shards, resolve
from merge_stream.planning.segments import largest_band, most_columns
from merge_stream.planning.store_layout import in_bands
from merge_stream.prediction import with_true_prediction
from merge_stream.storage.allowance import MetadataAllowance
from merge_stream.storage.local import LocalSource
from merge_stream.tensors.dtype import F32
from merge_stream.tensors.parameter import Mapping
from merge_stream.tensors.ref import Catalog
from merge_stream.units import counted, format_bytes
from merge_stream.verification.check_engines import Headers, engine_warnings
from merge_stream.vocabulary import with_true_vocabulary

__all__ = ["Job", "card_facts", "dtype_of", "lora_note", "make_plan", "memory_for", "quantized_weights"]

_HUB_LARGEST = 50_000_000_000


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
    checksums: ChecksumFindings | None = None
    """What `--check-crc` found; None without it."""
    least_segment: int = 0
    """Bytes that a segment must hold: the largest band."""
    columns: int = 0
    """Elements in the longest row that is quantized; 0 without --quantize."""


@without_collector
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
    if holds_adapters_alone(catalog):
        info = find_model_folder(catalog.config_dirs, options.base_model, write_config=True).info
        catalog = with_peft_names(catalog, info)
    adapter_alone = is_adapter_alone(catalog)
    if (adapter_alone and options.lora.mode == "keep") or _is_kept_alone(catalog):
        folder = ModelFolder(ModelInfo(None))  # OUT is nothing but the adapter
    else:
        if adapter_alone:
            refuse_without_base(catalog, options.base_model)
        allowance = MetadataAllowance(options.max_mem)
        folder = find_model_folder(
            catalog.config_dirs, options.base_model, write_config=options.write_config, allowance=allowance
        )
        catalog, folder = with_true_vocabulary(catalog, folder)
        folder = with_true_prediction(catalog, folder)
        if adapter_alone:
            catalog = with_base_weights(
                catalog, options.base_model, folder.base_folder, folder.info, max_mem=options.max_mem
            )
    options, folder = as_staged(catalog, options, folder)
    if adapter_alone:
        catalog = replace(catalog, partial="")  # an adapter is whole without the weights it belongs to
    elif catalog.partial and options.write_config:
        msg = f"{catalog.partial}, and what is left is no whole model that a config.json could describe"
        raise CheckpointError(msg, hint="add --no-config to write these weights alone, or leave --exclude-frozen out")
    check_shards(catalog, catalog.tensors)
    check_shards(replace(catalog, tensors=catalog.twins), catalog.twins)
    named = name_parameters(catalog, folder.info, options.layout, options.lora)
    catalog = replace(catalog, files=(*catalog.files, *named.files))
    resolved = named.parameters
    quantized = quantized_weights(catalog, folder, named, options)
    encoding = encoding_for(dtype_of(catalog, folder, options))
    memory = plan_memory(
        options.max_mem,
        workers=options.workers,
        compare=True,
        fold=fold_bytes(named.folds),
        ahead=_ahead(options, named) + metadata_ahead(planned=len(resolved)) + _checksums_ahead(options, catalog),
        io=options.io,
        bound=options.max_mem_origin,
    )
    budget = MemoryBudget(slots=memory.workers, slab_bytes=memory.slab)
    warnings: list[str] = []
    with ExitStack() as stack:
        source = LocalSource(options.io, window_bytes=memory.segment)
        stack.callback(source.close)
        checked = CheckedSource(source, catalog.chunk_sums)
        prober = Prober(catalog, checked, encoding, budget, memory.segment, observer, stop)
        narrows = encoding.name in {"bf16", "fp16"}
        wide = names_kept_wide(list(resolved), folder.info) if narrows else frozenset[str]()
        narrow = _read_narrow(catalog, named, encoding, wide | quantized.names)
        checksums = _probe_checksums([*narrow.values(), *named.adapter], prober, options, warnings)
        prober.check_twins()
        resolved = narrow
        dropped, broken = _probe_ties(named.mapping, resolved, prober, warnings)
        written_heads = _materialize(resolved, dropped, folder, options)
        if options.check_replicas:
            _probe_replicas(catalog, prober, options, warnings)
    if broken and options.strict:
        raise CorruptCheckpointError(
            warnings[0], hint="without --strict both tensors are written and the tie is undone"
        )
    kept = [name for name in resolved if name not in dropped]
    wide &= set(kept)
    plan = place_parameters(
        catalog,
        [resolved[name] for name in kept],
        encoding,
        options,
        adapter=named.adapter,
        keep_wide=wide,
        quantized=quantized,
        notes=(
            *catalog.notes,
            *named.mapping.notes,
            *named.notes,
            *folder.notes,
            *quantized.notes,
            *_remarks({name: r for name, r in resolved.items() if name not in quantized.names}, options),
            *_wide_remark(wide, options),
            *written_heads,
        ),
        dropped=dropped,
        broken_ties=broken,
        probe_nbytes=prober.read_nbytes,
    )
    del budget
    least, columns = largest_band(plan), most_columns(plan)
    memory = memory_for(options, named, least_segment=least, columns=columns)
    warnings += [text for text in (_hub_remark(plan),) if text]
    warnings += _engine_warnings(plan, folder)
    return Job(
        catalog, folder, named, in_bands(plan, catalog), options, encoding, memory, warnings, checksums, least, columns
    )


def _is_kept_alone(catalog: Catalog) -> bool:
    """True for a store of nothing but an adapter."""
    every = list(catalog.tensors)
    return catalog.staged is not None and bool(every) and all(n.startswith(f"{ADAPTER_GROUP}/") for n in every)


def quantized_weights(catalog: Catalog, folder: ModelFolder, named: Named, options: MergeOptions) -> QuantizedWeights:
    """What `--quantize` means for this model; nothing without it."""
    if options.quantize is None:
        return QuantizedWeights()
    if not options.write_config:
        msg = f"--quantize {options.quantize} with --no-config: without config.json nobody can read the weights"
        raise UsageError(msg, hint="leave one of them out")
    tensors = {name: (r.parameter.shape, r.source.dtype) for name, r in named.parameters.items()}
    model_type = str((folder.info.config or {}).get("model_type", ""))
    chosen = choose_weights(
        options.quantize, tensors, model_type=model_type, ignore=options.quantize_ignore, force=options.force
    )
    if scheme_named(chosen.scheme).transposed and (catalog.chunk_sums or options.staging == "zarr"):
        msg = f"--quantize {options.quantize}: transposed experts would read each chunk of a staging store many times"
        raise UnsupportedError(msg, hint="merge from the checkpoint itself, with --staging direct")
    return chosen


def dtype_of(catalog: Catalog, folder: ModelFolder, options: MergeOptions) -> DtypeName:
    """`--dtype`; under `keep`, masters that stand for the weights of a 16-bit model get the type of its config."""
    if options.dtype == "keep" and catalog.module_dtype == "config":
        told = str((folder.info.config or {}).get("dtype") or (folder.info.config or {}).get("torch_dtype"))
        names: dict[str, DtypeName] = {"bfloat16": "bf16", "float16": "fp16"}
        return names.get(told.removeprefix("torch."), "keep")
    return options.dtype


def _read_narrow(catalog: Catalog, named: Named, encoding: Cast, wide: frozenset[str]) -> dict[str, Resolved]:
    """Parameters that are written in a type which the checkpoint holds too: half the bytes are read, none is cast."""
    if named.folds or not (catalog.twins or any(tensor.stored for tensor in catalog.tensors.values())):
        return named.parameters
    narrow = as_stored(catalog, encoding.target("", F32))
    other = replace(catalog, tensors={**catalog.tensors, **narrow})
    resolved = dict(named.parameters)
    for parameter in named.mapping.parameters:
        sources = {take.source for take in parameter.takes}
        if sources and sources <= narrow.keys() and parameter.name in resolved and parameter.name not in wide:
            resolved[parameter.name] = Resolved(parameter, resolve(other, parameter))
    return resolved


def memory_for(options: MergeOptions, named: Named, *, least_segment: int = 0, columns: int = 0) -> MemoryPlan:
    """The bound of the run itself, once everything is planned."""
    return plan_memory(
        options.max_mem,
        workers=options.workers,
        compare=options.verify,
        fold=fold_bytes(named.folds),
        ahead=_ahead(options, named),
        least_segment=least_segment,
        beside=temporaries(columns, compared=options.verify) if columns else 0,
        io=options.io,
        bound=options.max_mem_origin,
    )


def _ahead(options: MergeOptions, named: Named) -> int:
    """What the finalizer's metadata will take once everything is planned."""
    count = len(named.parameters)
    return metadata_ahead(finished=count, compared=count if options.verify else 0)


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


def _checksums_ahead(options: MergeOptions, catalog: Catalog) -> int:
    return ranges_ahead(catalog, replicas=options.check_replicas) if options.check_crc else 0


def _probe_checksums(
    read: list[Resolved], prober: Prober, options: MergeOptions, warnings: list[str]
) -> ChecksumFindings | None:
    """`--check-crc`: everything that is read, before anything else is."""
    if not options.check_crc:
        return None
    findings = prober.stored_checksums((r.source for r in read), replicas=options.check_replicas)
    if not findings.records:
        warnings.append(f"--check-crc could check nothing: {findings.text}")
    return findings


def _probe_replicas(catalog: Catalog, prober: Prober, options: MergeOptions, warnings: list[str]) -> None:
    for difference in prober.replica_differences(catalog.tensors):
        text = f"replicas differ: {difference}; the copy of the lowest rank is written"
        if options.strict:
            raise CorruptCheckpointError(
                f"replicas differ: {difference}", hint="without --strict the copy of the lowest rank is written"
            )
        warnings.append(text)


def _remarks(resolved: dict[str, Resolved], options: MergeOptions) -> list[str]:
    wide = sum(math.prod(r.parameter.shape) * 4 for r in resolved.values() if r.source.dtype.name == "F32")
    whole = sum(math.prod(r.parameter.shape) * r.source.dtype.itemsize for r in resolved.values())
    if options.dtype == "keep" and wide > whole // 2:
        return [
            (
                f"{FP32_REMARK}; --dtype bf16 would write {format_bytes(whole - wide // 2)} "
                f"instead of {format_bytes(whole)}"
            )
        ]
    return []


def _hub_remark(plan: Plan) -> str:
    large = max(plan.outputs, key=lambda o: o.nbytes, default=None)
    if large is None or large.nbytes <= _HUB_LARGEST:
        return ""
    limit = format_bytes(_HUB_LARGEST)
    return f"{large.name} has {format_bytes(large.nbytes)}, and the Hub asks for files up to {limit} (--max-shard-size)"


def _engine_warnings(plan: Plan, folder: ModelFolder) -> list[str]:
    """What `check` would say of engines about the folder that is going to be written."""
    config = planned_config(plan, folder)
    if config is None:
        return []
    inside = {p.name: p for p in plan.parameters if plan.outputs[p.output].in_model}
    return engine_warnings(Headers(json.loads(config.data), inside))


def _wide_remark(wide: frozenset[str], options: MergeOptions) -> list[str]:
    if not wide:
        return []
    count = counted(len(wide), "tensor keeps its", "tensors keep their")
    return [f"{count} type under --dtype {options.dtype}: {min(wide)}{' ...' if len(wide) > 1 else ''}"]


def lora_note(named: Named) -> str:
    """What became of a LoRA, in a sentence; "" without one."""
    return next((note for note in named.notes if "LoRA" in note), "")


def card_facts(job: Job) -> CardFacts | None:
    """What a model card may tell; None when none is wanted."""
    if not (job.options.model_card and job.options.write_config):
        return None
    plan, catalog, folder = job.plan, job.catalog, job.folder
    model = [p for p in plan.parameters if plan.outputs[p.output].in_model]
    return CardFacts(
        format=catalog.staged.format if catalog.staged else catalog.format,
        facts=catalog.facts,
        step=catalog.staged.step if catalog.staged else step_of(catalog.root),
        fingerprint=plan.fingerprint,
        version=__version__,
        dtype=job.options.dtype,
        dtypes=dict(sorted(Counter(p.dtype.name for p in plan.parameters).items())),
        layout=job.options.layout,
        lora=catalog.staged.lora if catalog.staged else lora_note(job.named),
        tensors=len(plan.parameters),
        parameters=sum(p.elements for p in plan.parameters),
        nbytes=sum(p.nbytes for p in plan.parameters),
        files=len(plan.outputs),
        base_id=hub_id_of(folder.base_id, *config_names(folder.info.config, catalog.beside)),
        base_readme=folder.base_readme,
        quantized=_quantized_words(plan),
        adapter_only=not model,
    )


def _quantized_words(plan: Plan) -> str:
    """The scheme and how many weights are written in it; "" without one."""
    count = sum(p.quantized is not None for p in plan.parameters)
    return f"{plan.scheme}: {counted(count, 'linear layer')}; the rest plain" if plan.scheme else ""
