"""Is a model equal to what it should be? Names, shapes, element types and values, streamed.

The reference is a Hugging Face folder (compared as it stands) or a checkpoint of any known
format (named as a merge would name it, cast to the model's types). Values must be equal bit
by bit unless a tolerance is given.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.families import TIE_NAMES
from merge_stream.architectures.lora import PREFIX, holds_lora, is_adapter_alone
from merge_stream.architectures.lora_base import beside
from merge_stream.architectures.megatron_adapters import holds_adapters_alone, with_peft_names
from merge_stream.architectures.ties import tied_by_config
from merge_stream.base_weights import refuse_without_base, with_base_weights
from merge_stream.encodings.base import Scheme
from merge_stream.encodings.cast import Cast
from merge_stream.engine.assembler import Assembler
from merge_stream.engine.budget import MemoryBudget
from merge_stream.engine.checked_source import CheckedSource
from merge_stream.engine.compare import Difference, Pair, Tolerance, compare_pairs
from merge_stream.engine.compare_quantized import QuantizationError, compare_quantized
from merge_stream.engine.events import Observer, Phase, Silent
from merge_stream.engine.executor import StopFlag
from merge_stream.engine.fold import fold_bytes
from merge_stream.engine.memory import plan_memory
from merge_stream.engine.probe import Prober
from merge_stream.engine.stored_checksums import ranges_ahead
from merge_stream.errors import CheckpointError, MergeStreamError, UnknownFormatError
from merge_stream.opening import open_checkpoint
from merge_stream.options import IoName, LayoutName, LoraChoice, OpenOptions
from merge_stream.output.model_info import ModelFolder, find_model_folder
from merge_stream.planning.naming import Named, name_parameters
from merge_stream.planning.plan import Assembly, ParameterPlan, ResolvedTake
from merge_stream.planning.planner import Resolved
from merge_stream.planning.resolve import check_shards, resolve
from merge_stream.storage.local import LocalSource
from merge_stream.tensors.box import Box
from merge_stream.tensors.parameter import identity
from merge_stream.tensors.ref import Catalog, ShardTable, TensorRef
from merge_stream.units import counted
from merge_stream.verification.quantized import band_nbytes, names_in, quantized_plan, room_beside, scheme_of_folder

__all__ = ["Verdict", "pair_of", "verify"]

_SHOWN = 5


@dataclass(slots=True)
class Verdict:
    """The result of a verification; `ok` when nothing in it speaks against equality.

    `missing` are in the reference alone, `extra` in the model alone; `mismatched` maps a
    name to what differs in shape or type; `differences` are those of values; `cast` counts
    tensors that were compared after a cast of the reference. `quantized` tells of each weight that the model
    has quantized how far it is from the reference, worst first: its bytes must be those that a merge writes.
    """

    out: str
    against: str
    tensors: int = 0
    nbytes: int = 0
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    mismatched: dict[str, str] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    cast: int = 0
    quantized: list[QuantizationError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True when model and reference are equal."""
        other = any(error.different for error in self.quantized)
        return not (self.missing or self.extra or self.mismatched or self.differences or other)

    def as_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "ok": self.ok,
            "out": self.out,
            "against": self.against,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "missing": self.missing,
            "extra": self.extra,
            "mismatched": self.mismatched,
            "compared_after_cast": self.cast,
            "notes": self.notes,
            "quantized": [
                {
                    "name": e.name,
                    "elements": e.size,
                    "different_bytes": e.different,
                    "max_abs": e.max_abs,
                    "max_rel": e.max_rel,
                    "snr_db": e.snr,
                }
                for e in self.quantized
            ],
            "differences": [
                {
                    "name": d.name,
                    "elements": d.size,
                    "different": d.count,
                    "max_abs": d.max_abs,
                    "max_rel": d.max_rel,
                    "first": list(d.first or ()),
                }
                for d in self.differences
            ],
        }

    def lines(self) -> list[str]:
        """The verdict for a person."""
        verdict = "equal" if self.ok else "NOT EQUAL"
        text = [f"{verdict}: {self.out} against {self.against}, {counted(self.tensors, 'tensor')} compared"]
        if self.cast:
            count = counted(self.cast, "tensor was", "tensors were")
            text.append(f"  {count} compared after casting the reference to the model's type")
        text += self._quantized_lines()
        text += [f"  {note}" for note in self.notes]
        for title, names in (("missing in the model", self.missing), ("only in the model", self.extra)):
            if names:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                text.append(f"  {title} ({len(names)}): {', '.join(names[:_SHOWN])}{more}")
        text += [f"  {name}: {what}" for name, what in list(self.mismatched.items())[:_SHOWN]]
        worst = sorted(self.differences, key=lambda d: -d.max_abs)
        text += [f"  {difference}" for difference in worst[:_SHOWN]]
        if len(worst) > _SHOWN:
            text.append(f"  and {counted(len(worst) - _SHOWN, 'more tensor differs', 'more tensors differ')}")
        return text

    def _quantized_lines(self) -> list[str]:
        if not self.quantized:
            return []
        other = [error for error in self.quantized if error.different]
        text = [f"  {counted(len(self.quantized), 'weight is', 'weights are')} quantized; worst signal to noise first:"]
        text += [f"    {error}" for error in self.quantized[:_SHOWN]]
        text += [
            f"  {e.name}: {e.different} bytes are not those that a merge of the reference writes"
            for e in other[:_SHOWN]
        ]
        return text


def verify(
    out: str | os.PathLike[str],
    against: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    max_mem: int = 8_000_000_000,
    max_mem_origin: str = "--max-mem",
    workers: int | None = None,
    tolerance: Tolerance | None = None,
    opening: OpenOptions | None = None,
    base_model: str | None = None,
    lora: LoraChoice | None = None,
    io: IoName = "auto",
    check_crc: bool = False,
    observer: Observer | None = None,
    stop: StopFlag | None = None,
) -> Verdict:
    """Compare the model folder `out` with a reference folder or a checkpoint, within `max_mem` bytes.

    With `check_crc` the checksums that the reference's files hold are compared first (CorruptCheckpointError).
    """
    observer, stop = observer or Silent(), stop or StopFlag()
    observer(Phase("reading metadata"))
    model, has_adapter = _opened(out, max_mem)
    paths = [against] if isinstance(against, (str, os.PathLike)) else list(against)
    reference = open_checkpoint(paths, opening, max_mem=max_mem)
    verdict = Verdict(os.fspath(out), os.fspath(paths[0]))
    lora = lora or LoraChoice()
    if holds_adapters_alone(reference):
        reference = with_peft_names(reference, _model_info(model, reference, base_model))
    if has_adapter and lora.mode is None and holds_lora(reference):
        lora = LoraChoice("keep", lora.alpha)
        verdict.notes.append("compared as kept, for the model has a lora_adapter; if it is folded too: --lora both")
    if is_adapter_alone(reference) and lora.mode != "keep":
        refuse_without_base(reference, base_model)
        folder = _model_folder(model, reference, base_model)
        reference = with_base_weights(reference, base_model, folder.base_folder, folder.info, max_mem=max_mem)
    for catalog in (model, reference):
        check_shards(catalog, catalog.tensors)
    scheme = scheme_of_folder(out)
    named = _named(model, reference, base_model, lora, verdict, scheme)
    if named is not None:
        reference = replace(reference, files=(*reference.files, *named.files))
    fold = fold_bytes(named.folds if named is not None else ())
    ahead = ranges_ahead(reference, replicas=False) if check_crc else 0
    memory = plan_memory(
        max_mem,
        workers=workers,
        compare=True,
        fold=fold,
        ahead=ahead,
        io=io,
        bound=max_mem_origin,
        least_segment=band_nbytes(scheme, model, reference),
        beside=room_beside(scheme, model),
    )
    budget = MemoryBudget(slots=memory.workers, slab_bytes=memory.slab)
    encoding = Cast("keep")
    with_source = LocalSource(io, window_bytes=memory.segment)
    try:
        prober = Prober(
            reference,
            CheckedSource(with_source, reference.chunk_sums),
            encoding,
            budget,
            memory.segment,
            observer,
            stop,
        )
        wanted = _wanted(model, reference, named, prober, verdict)
        if check_crc:
            verdict.notes.append(prober.stored_checksums((r.source for r in wanted.values()), replicas=False).text)
        encoded = quantized_plan(scheme, model, reference, wanted) if scheme is not None else None
        quantized = encoded.parameters if encoded is not None else ()
        pairs = _pairs(model, reference, wanted, verdict, quantized)
        verdict.tensors = len(pairs) + len(quantized)
        verdict.nbytes = sum(p.got.nbytes for p in pairs) + sum(p.nbytes for p in quantized)
        observer(Phase("comparing", verdict.nbytes))
        if encoded is not None and quantized:
            verdict.quantized = compare_quantized(
                encoded,
                {k: f.path for k, f in enumerate(model.files)},
                lambda: Assembler(CheckedSource(with_source, reference.chunk_sums), reference.files, encoding),
                with_source,
                budget=budget,
                segment_bytes=memory.segment,
                observer=observer,
                stop=stop,
            )
        verdict.differences = compare_pairs(
            pairs,
            lambda: Assembler(CheckedSource(with_source, reference.chunk_sums), reference.files, encoding),
            lambda: Assembler(with_source, model.files, encoding),
            budget=budget,
            segment_bytes=memory.segment,
            observer=observer,
            stop=stop,
            tolerance=tolerance or Tolerance(),
        )
    finally:
        with_source.close()
    return verdict


def _opened(out: str | os.PathLike[str], max_mem: int) -> tuple[Catalog, bool]:
    """The model with the adapter that was kept beside it, and whether there is one."""
    if not os.path.isdir(out):
        msg = f"the model folder {os.fspath(out)} is not there"
        raise UnknownFormatError(msg, hint="verify MODEL_FOLDER --against REFERENCE_OR_CHECKPOINT")
    kept = os.path.join(out, "lora_adapter")
    if not os.path.isfile(os.path.join(kept, "adapter_model.safetensors")):
        return open_checkpoint([out], OpenOptions(format="hugging_face"), max_mem=max_mem), False
    adapter = open_checkpoint([kept], OpenOptions(format="peft_adapter"), max_mem=max_mem)
    try:
        model = open_checkpoint([out], OpenOptions(format="hugging_face"), max_mem=max_mem)
    except UnknownFormatError:
        return adapter, True
    return beside(model, adapter), True


def _named(  # noqa: PLR0917 - both sides and the choices
    model: Catalog,
    reference: Catalog,
    base_model: str | None,
    lora: LoraChoice,
    verdict: Verdict,
    scheme: Scheme | None,
) -> Named | None:
    """What a merge of the reference would write, in the layout that the model has; None for a plain model."""
    if reference.format == "hugging_face" and not holds_lora(reference):
        return None
    folder = _model_info(model, reference, base_model)
    layouts: tuple[LayoutName, ...] = ("upstream", "as-is")
    if holds_lora(reference) and lora.mode is None:
        if holds_lora(model):
            layouts = ("as-is",)  # LoRA tensors were left as they are
        else:
            lora = LoraChoice("merge", lora.alpha)
    named = None
    for layout in layouts:
        try:
            named = name_parameters(reference, folder, layout, lora)
        except MergeStreamError:
            if named is None and layout == layouts[-1]:
                raise
            continue
        if {n for n in names_in(scheme, model) if not n.startswith(PREFIX)} <= named.parameters.keys():
            if layout == "as-is":
                verdict.notes.append("the model has the trainer's names (--layout as-is)")
            break
    return named


def _wanted(
    model: Catalog, reference: Catalog, named: Named | None, prober: Prober, verdict: Verdict
) -> dict[str, Resolved]:
    """What the model should hold, by name; drops a tied head that the model rightly left out."""
    if named is None:
        whole = [identity(name, tensor.shape) for name, tensor in reference.tensors.items()]
        wanted = {p.name: Resolved(p, resolve(reference, p)) for p in whole}
        _allow_tied_head(model, wanted, prober, verdict)
        return wanted
    wanted = dict(named.parameters) | {r.parameter.name: r for r in named.adapter}
    _allow_tied_head(model, wanted, prober, verdict)
    return wanted


def _allow_tied_head(model: Catalog, wanted: dict[str, Resolved], prober: Prober, verdict: Verdict) -> None:
    """A head that only one side has is right when the model's config ties it and it is the embedding."""
    if not tied_by_config(_model_info(model, prober.catalog, None, own_first=True)):
        return
    for head, twin in TIE_NAMES:
        if twin not in model.tensors or twin not in wanted:
            continue
        if head in model.tensors and head not in wanted:  # --materialize-tied
            wanted[head] = replace(wanted[twin], parameter=replace(wanted[twin].parameter, name=head))
            verdict.notes.append(f"{head} is not in the reference; compared with {twin}, to which it is tied")
        elif head in wanted and head not in model.tensors and _equal(head, twin, wanted, prober):
            del wanted[head]
            verdict.notes.append(f"{head} is left out of the model, rightly: it is equal to {twin}")


def _equal(head: str, twin: str, wanted: dict[str, Resolved], prober: Prober) -> bool:
    return prober.same(head, wanted[head].source, wanted[twin].source)


def _model_info(model: Catalog, reference: Catalog, base_model: str | None, *, own_first: bool = False) -> ModelInfo:
    return _model_folder(model, reference, base_model, own_first=own_first).info


def _model_folder(
    model: Catalog, reference: Catalog, base_model: str | None, *, own_first: bool = False
) -> ModelFolder:
    """What is known of the model: from the reference's config or, where it has none, the model's own."""
    order = (model, reference) if own_first else (reference, model)
    for dirs in (catalog.config_dirs for catalog in order):
        try:
            return find_model_folder(dirs, base_model, write_config=True)
        except CheckpointError:
            continue
    return ModelFolder(ModelInfo(None))


def _pairs(
    model: Catalog,
    reference: Catalog,
    wanted: dict[str, Resolved],
    verdict: Verdict,
    quantized: Sequence[ParameterPlan],
) -> list[Pair]:
    """Tensors that must be equal; those of `quantized` are compared in another way."""
    weights = {p.quantized.name for p in quantized if p.quantized is not None}
    parts = {p.name for p in quantized}
    wanted = {name: want for name, want in wanted.items() if name not in weights}
    verdict.missing = [name for name in wanted if name not in model.tensors]
    verdict.extra = [name for name in model.tensors if name not in wanted and name not in parts]
    pairs = []
    for name, want in wanted.items():
        tensor = model.tensors.get(name)
        if tensor is None:
            continue
        source, target = want.source.dtype, tensor.dtype
        plain = reference.format == "hugging_face" and not holds_lora(reference)
        may_cast = not plain and source.kind == target.kind == "float"
        if tensor.shape != want.parameter.shape:
            verdict.mismatched[name] = f"shape {list(tensor.shape)}, wanted {list(want.parameter.shape)}"
        elif source != target and not may_cast:
            verdict.mismatched[name] = f"type {target}, wanted {source}"
        else:
            verdict.cast += source != target
            pairs.append(pair_of(ParameterPlan(name, tensor.shape, want.source, target, 0, 0), tensor))
    return pairs


def pair_of(wanted: ParameterPlan, tensor: TensorRef) -> Pair:
    """The wanted parameter beside the model's tensor, which is one row-major run of its file."""
    whole = Box.whole(wanted.source.view)
    rows = [(whole, file, offset) for _, file, offset in map(tensor.shards.row, range(len(tensor.shards)))]
    take = ResolvedTake(ShardTable.of(rows, len(wanted.source.view)), whole, whole)
    got = Assembly(wanted.source.view, tensor.dtype, (take,))
    return Pair(wanted.name, wanted, ParameterPlan(wanted.name, tensor.shape, got, tensor.dtype, 0, 0))
