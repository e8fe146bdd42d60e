"""From a catalog to named, resolved parameters: unwrap LoRA, map the names, join them with the shards.

catalog --unwrap--> model tensors --map_names--> parameters --resolve (+ fold)--> Resolved
               and adapter tensors -------------------------------------------> Resolved
"""

from __future__ import annotations

from collections.abc import Mapping as MappingABC
from dataclasses import dataclass

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.lora import (
    LoraModule,
    LoraSettings,
    Unwrapped,
    adapter_config,
    holds_lora,
    read_settings,
    unwrap,
)
from merge_stream.architectures.naming import map_names
from merge_stream.errors import CheckpointError, UnsupportedError
from merge_stream.options import LayoutName, LoraChoice
from merge_stream.planning.plan import LowRank, ResolvedTake
from merge_stream.planning.planner import Resolved
from merge_stream.planning.resolve import resolve
from merge_stream.tensors.box import Box
from merge_stream.tensors.parameter import Mapping, identity
from merge_stream.tensors.ref import Catalog, TensorRef

__all__ = ["Named", "name_parameters"]


@dataclass(frozen=True, slots=True)
class Named:
    """Parameters of the model by name, those of an adapter kept beside it, and its adapter_config.json."""

    mapping: Mapping
    parameters: dict[str, Resolved]
    adapter: tuple[Resolved, ...] = ()
    adapter_config: bytes | None = None
    notes: tuple[str, ...] = ()
    largest_rank: int = 0


def name_parameters(catalog: Catalog, model: ModelInfo, layout: LayoutName, lora: LoraChoice) -> Named:
    """Name and resolve everything that is written.

    With LoRA in the checkpoint: "merge" folds it, "keep" writes the plain model and the
    adapter, "both" folds and writes the adapter too; None folds (layout as-is: leaves
    everything as it is). CheckpointError when the scale is needed and not known.
    """
    if not holds_lora(catalog):
        if lora.mode is not None or lora.alpha is not None:
            msg = "the checkpoint holds no LoRA tensors, but --lora or --lora-alpha was given"
            raise CheckpointError(msg, hint="leave the option out")
        return _plain(catalog, model, layout)
    if lora.mode is None and layout == "as-is":
        return _plain(catalog, model, layout)
    parts = unwrap(catalog)
    settings = read_settings(catalog.beside, lora.alpha)
    if settings is None:
        msg = f"the checkpoint holds {len(parts.modules)} LoRA modules, and lora_alpha is nowhere beside them"
        raise CheckpointError(
            msg, hint="give --lora-alpha N as in training (r is in the tensors), or put adapter_config.json beside them"
        )
    mode = lora.mode or "merge"
    base = parts.original if mode == "keep" else parts.trained
    if parts.modules and not any(m.weight in base.tensors for m in parts.modules):
        return _adapter_alone(parts, settings, mode, catalog)
    folds = {} if mode == "keep" else _folds(parts, base, settings, catalog)
    mapping = map_names(base, model, layout)
    parameters = {p.name: Resolved(p, resolve(base, p, folds)) for p in mapping.parameters}
    note = f"LoRA ({len(parts.modules)} modules, alpha {settings.alpha:g} from {settings.origin}) is "
    note += {"merge": "folded into the weights", "keep": "kept as OUT/lora_adapter", "both": "folded, and kept too"}[
        mode
    ]
    rank = max((m.rank for m in parts.modules), default=0) if folds else 0
    if mode == "merge":
        return Named(mapping, parameters, notes=(note,), largest_rank=rank)
    return Named(mapping, parameters, _adapter(parts, catalog), adapter_config(settings, parts.modules), (note,), rank)


def _plain(catalog: Catalog, model: ModelInfo, layout: LayoutName) -> Named:
    mapping = map_names(catalog, model, layout)
    return Named(mapping, {p.name: Resolved(p, resolve(catalog, p)) for p in mapping.parameters})


def _adapter(parts: Unwrapped, catalog: Catalog) -> tuple[Resolved, ...]:
    return tuple(
        Resolved(p, resolve(catalog, p))
        for p in (identity(name, tensor.shape, tensor.name) for name, tensor in parts.adapter.items())
    )


def _adapter_alone(parts: Unwrapped, settings: LoraSettings, mode: str, catalog: Catalog) -> Named:
    """A checkpoint of LoRA tensors only."""
    if mode != "keep":
        msg = f"the checkpoint holds {len(parts.modules)} LoRA modules and none of the weights they belong to"
        raise UnsupportedError(msg, hint="--lora keep writes the adapter; load it with peft on the base model")
    note = "the checkpoint holds only LoRA tensors: OUT is nothing but the adapter"
    config = adapter_config(settings, parts.modules)
    return Named(Mapping("lora adapter", ()), {}, _adapter(parts, catalog), config, (note,))


def _folds(parts: Unwrapped, base: Catalog, settings: LoraSettings, catalog: Catalog) -> MappingABC[str, LowRank]:
    """The product to be added to each adapted weight; every module must have one of fitting shape."""
    folds = {}
    for module in parts.modules:
        weight = base.tensors.get(module.weight)
        if weight is None:
            msg = f"LoRA factors of {module.module} have no weight {module.weight} in the checkpoint"
            raise CheckpointError(
                msg, hint="the checkpoint is incomplete, or adapts a layer whose kind is not known here"
            )
        wanted = (module.b.shape[0], module.a.shape[1])
        transposed = settings.fan_in_fan_out
        if weight.shape != (wanted[::-1] if transposed else wanted):
            msg = (
                f"{module.weight} {list(weight.shape)} does not fit its LoRA factors "
                f"B {list(module.b.shape)} @ A {list(module.a.shape)}"
            )
            raise CheckpointError(msg, hint="fan_in_fan_out in adapter_config.json may be wrong")
        if settings.rank is not None and not settings.alpha_pattern and module.rank != settings.rank:
            _check_rank(settings, module)
        a, b = _whole(catalog.tensors[module.a.name]), _whole(catalog.tensors[module.b.name])
        a_shape, b_shape = (module.rank, wanted[1]), (wanted[0], module.rank)
        folds[module.weight] = LowRank(a, a_shape, b, b_shape, module.a.dtype, settings.scale(module), transposed)
    return folds


def _check_rank(settings: LoraSettings, module: LoraModule) -> None:
    """A rank that the settings do not explain makes alpha doubtful."""
    pattern = b"rank_pattern" in (settings.config or b"")
    if not pattern:
        msg = f"{module.module} has LoRA rank {module.rank}, {settings.origin} says {settings.rank}"
        raise CheckpointError(msg, hint="the file may belong to another run; give --lora-alpha and remove it")


def _whole(tensor: TensorRef) -> ResolvedTake:
    box = Box.whole(tensor.shape)
    return ResolvedTake(tensor.shards, box, box)
