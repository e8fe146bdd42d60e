"""From a catalog to named, resolved parameters: unwrap LoRA, map the names, join them with the shards.

catalog --unwrap--> model tensors --map_names--> parameters --resolve (+ fold)--> Resolved
               and adapter tensors -------------------------------------------> Resolved
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.base import Named as MappingOfFamily
from merge_stream.architectures.lora import PREFIX, Unwrapped, holds_lora, is_adapter_alone, unwrap
from merge_stream.architectures.lora_base import JOINED
from merge_stream.architectures.lora_settings import (
    Adapted,
    LoraSettings,
    adapter_config,
    read_settings,
)
from merge_stream.architectures.naming import map_names
from merge_stream.containers.zarr_array import ADAPTER_GROUP
from merge_stream.errors import CheckpointError, UnsupportedError, UsageError
from merge_stream.options import LayoutName, LoraChoice
from merge_stream.planning.folds import Target, folds_of, targets_of
from merge_stream.planning.ones import ones_file, ones_table
from merge_stream.planning.plan import LowRank, ResolvedTake, Scaled
from merge_stream.planning.planner import Resolved
from merge_stream.planning.resolve import resolve
from merge_stream.tensors.box import Box
from merge_stream.tensors.dtype import F32
from merge_stream.tensors.parameter import Mapping, identity
from merge_stream.tensors.ref import Catalog, SourceFile
from merge_stream.units import counted

__all__ = ["Named", "name_parameters"]


@dataclass(frozen=True, slots=True)
class Named:
    """Parameters of the model by name, those of an adapter kept beside it, and its adapter_config.json.

    `folds` are all products that are added to the parameters, `files` the source files that they need beside those
    of the catalog, numbered on from them.
    """

    mapping: Mapping
    parameters: dict[str, Resolved]
    adapter: tuple[Resolved, ...] = ()
    adapter_config: bytes | None = None
    notes: tuple[str, ...] = ()
    folds: tuple[LowRank | Scaled, ...] = ()
    files: tuple[SourceFile, ...] = ()


def name_parameters(catalog: Catalog, model: ModelInfo, layout: LayoutName, lora: LoraChoice) -> Named:
    """Name and resolve everything that is written.

    With LoRA in the checkpoint: "merge" folds it, "keep" writes the plain model and the
    adapter, "both" folds and writes the adapter too; None folds (layout as-is: leaves
    everything as it is). CheckpointError when the scale is needed and not known.
    """
    if catalog.staged is not None:
        return _staged(catalog, model, layout, lora)
    if not holds_lora(catalog):
        if lora.mode is not None or lora.alpha is not None:
            msg = "the checkpoint holds no LoRA tensors, but --lora or --lora-alpha was given"
            raise CheckpointError(msg, hint="leave the option out")
        return _plain(catalog, model, layout)
    if lora.mode is None and layout == "as-is":
        return _plain(catalog, model, layout)
    parts = unwrap(catalog)
    settings = read_settings(catalog.beside, lora.alpha, scale_needed=lora.mode != "keep")
    if settings is None:
        msg = f"the checkpoint holds {len(parts.modules)} LoRA modules, and lora_alpha is nowhere beside them"
        raise CheckpointError(
            msg, hint="give --lora-alpha N as in training (r is in the tensors), or put adapter_config.json beside them"
        )
    mode = lora.mode or "merge"
    if is_adapter_alone(catalog):
        return _adapter_alone(parts, settings, mode, catalog)
    base = parts.original if mode == "keep" else parts.trained
    targets = targets_of(parts, parts.trained.tensors, settings, model.model_type)
    folds = {} if mode == "keep" else folds_of(targets, base.tensors, settings)
    if mode != "keep":
        _check_tied_head(folds, base, model, targets)
        _check_start(catalog, settings)
    mapping = map_names(base, model, layout)
    parameters = {p.name: Resolved(p, resolve(base, p, folds)) for p in mapping.parameters}
    note = f"LoRA ({counted(len(parts.modules), 'module')}, {_alpha(settings)}) is "
    words = {"merge": "folded into the weights", "keep": "kept as OUT/lora_adapter", "both": "folded, and kept too"}
    notes, products = (note + words[mode],), tuple(folds.values())
    if mode == "merge":
        return Named(mapping, parameters, notes=notes, folds=products)
    layers = [name.rpartition(".")[0] for name in base.tensors]
    config = adapter_config(settings, [t.adapted for t in targets], parts.saved, layers)
    return Named(mapping, parameters, _adapter(parts, catalog), config, notes, products)


def _staged(catalog: Catalog, model: ModelInfo, layout: LayoutName, lora: LoraChoice) -> Named:
    """Tensors of a staging store: the model, and an adapter that was kept beside it."""
    if lora.mode is not None or lora.alpha is not None:
        msg = f"--lora was decided when {catalog.root} was staged"
        raise UsageError(msg, hint="leave it out, or stage the checkpoint anew with --lora")
    start = f"{ADAPTER_GROUP}/"
    kept = {name: tensor for name, tensor in catalog.tensors.items() if name.startswith(start)}
    plain = replace(catalog, tensors={n: t for n, t in catalog.tensors.items() if n not in kept})
    alone = Named(Mapping(catalog.staged.architecture if catalog.staged else "", ()), {})
    named = _plain(plain, model, layout) if plain.tensors or not kept else alone
    if not kept:
        return named
    own = (identity(name.removeprefix(start), tensor.shape, name) for name, tensor in kept.items())
    adapter = tuple(Resolved(p, resolve(catalog, p)) for p in own)
    config = catalog.staged.adapter_config if catalog.staged is not None else ""
    return replace(named, adapter=adapter, adapter_config=config.encode())


def _alpha(settings: LoraSettings) -> str:
    if settings.alpha:
        return f"alpha {settings.alpha:g} from {settings.origin}"
    return (
        "alpha unknown: write it into lora_adapter/adapter_config.json, where it is null, before the adapter is loaded"
    )


def _plain(catalog: Catalog, model: ModelInfo, layout: LayoutName) -> Named:
    mapping = map_names(catalog, model, layout)
    folds = _shifts(catalog, mapping)
    parameters = {p.name: Resolved(p, resolve(catalog, p, folds)) for p in mapping.parameters}
    return Named(mapping, parameters, folds=tuple(folds.values()), files=(ones_file(),) if folds else ())


def _shifts(catalog: Catalog, mapping: Mapping) -> dict[str, LowRank | Scaled]:
    """Numbers that are added to vectors, in fp32: number times the file of ones, which comes behind the catalog's."""
    folds: dict[str, LowRank | Scaled] = {}
    for name, number in mapping.shifted.items() if isinstance(mapping, MappingOfFamily) else ():
        whole = Box.whole(catalog.tensors[name].shape)
        table = ones_table(whole.size, len(catalog.files))
        folds[name] = Scaled(ResolvedTake(table, whole, whole), F32, number)
    return folds


def _adapter(parts: Unwrapped, catalog: Catalog) -> tuple[Resolved, ...]:
    return tuple(
        Resolved(p, resolve(catalog, p))
        for p in (identity(name, tensor.shape, tensor.name) for name, tensor in parts.adapter.items())
    )


def _adapter_alone(parts: Unwrapped, settings: LoraSettings, mode: str, catalog: Catalog) -> Named:
    """A checkpoint of LoRA tensors only: what stands beside the factors belongs to the adapter too."""
    if mode != "keep":
        msg = f"the checkpoint holds {len(parts.modules)} LoRA modules and none of the weights they belong to"
        raise UnsupportedError(msg, hint="--base-model DIR folds them into its weights, --lora keep writes the adapter")
    beside = tuple(
        Resolved(p, resolve(catalog, p))
        for name, tensor in catalog.tensors.items()
        if ".lora_" not in name and ".modules_to_save." not in name and ".original_module." not in name
        for p in (identity(PREFIX + name.removeprefix(PREFIX), tensor.shape, tensor.name),)
    )
    note = f"the checkpoint holds only LoRA tensors ({_alpha(settings)}): OUT is nothing but the adapter"
    adapted = [Adapted(m, m.a.shape[0], None) for m in parts.modules]
    if settings.config is None and len({m.module for m in parts.modules}) < len(parts.modules):
        msg = "the adapter has factors of expert parameters, and adapter_config.json is not beside them"
        raise UnsupportedError(msg, hint="put the trainer's adapter_config.json beside the checkpoint")
    config = adapter_config(settings, adapted, parts.saved, ())
    return Named(Mapping("lora adapter", ()), {}, (*_adapter(parts, catalog), *beside), config, (note,))


def _check_start(catalog: Catalog, settings: LoraSettings) -> None:
    """PiSSA and its kind change the base weights before training: the repository's are the wrong ones."""
    if settings.changes_base and JOINED in catalog.facts:
        msg = f"{settings.origin} says init_lora_weights {settings.init}: training began by changing the base weights"
        raise UnsupportedError(
            msg, hint="fold with peft, or convert the adapter there (path_initial_model_for_weight_conversion)"
        )


def _check_tied_head(
    folds: dict[str, LowRank | Scaled], base: Catalog, model: ModelInfo, targets: list[Target]
) -> None:
    """A head that is tied to a folded embedding, and not in the checkpoint, would change with it."""
    embedded = [t.weight.name for t in targets if t.module.embedding and t.weight.name in folds]
    if embedded and (model.config or {}).get("tie_word_embeddings") and "lm_head.weight" not in base.tensors:
        msg = f"{embedded[0]} is adapted, config.json ties the head to it, and the head is not in the checkpoint"
        raise UnsupportedError(msg, hint="folding would change the head too; --lora keep writes both apart")
