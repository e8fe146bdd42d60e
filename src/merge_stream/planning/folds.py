"""Which product is added to which tensor of the model: LoRA modules joined with the weights they adapt.

Shapes decide wherever they can: whether a layer is stored [in, out] (Conv1D of GPT-2),
which parameter of a module a pair of factors belongs to, and which way round peft made the
factors of experts (up to 0.18 always [E, in, out]; since 0.19 [E, out, in] unless the module
says `is_transposed`). What shapes leave open is told by peft's configuration, or refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from merge_stream.architectures.lora import LoraModule, Unwrapped
from merge_stream.architectures.lora_settings import Adapted, LoraSettings
from merge_stream.errors import CheckpointError, CorruptCheckpointError, UnsupportedError
from merge_stream.planning.plan import LowRank, ResolvedTake, Scaled
from merge_stream.tensors.box import Box
from merge_stream.tensors.ref import TensorRef

__all__ = ["Target", "folds_of", "targets_of"]

_CONV1D = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"}
_TRANSPOSED_EXPERTS = {"gpt_oss", "aria", "aria_text", "openai_privacy_filter"}
_KEEP = "--lora keep writes model and adapter apart"


@dataclass(frozen=True, slots=True)
class Target:
    """A LoRA module and the tensor it adapts; `turned` says that the tensor is [..., in, out]."""

    module: LoraModule
    weight: TensorRef
    turned: bool
    experts: int = 0
    parameter: bool = False

    @property
    def rank(self) -> int:
        """Rows of A (of one expert)."""
        return self.module.a.shape[0] // max(self.experts, 1)

    @property
    def adapted(self) -> Adapted:
        """What a configuration tells of it."""
        return Adapted(self.module, self.rank, self.weight.name if self.parameter else None)


def targets_of(
    parts: Unwrapped, base: Mapping[str, TensorRef], settings: LoraSettings, model_type: str
) -> list[Target]:
    """The tensor that each module adapts.

    CheckpointError when there is none that fits, UnsupportedError when several do.
    """
    groups: dict[str, list[LoraModule]] = {}
    for module in parts.modules:
        groups.setdefault(module.module, []).append(module)
    children: dict[str, list[TensorRef]] = {}
    for name, tensor in base.items():
        children.setdefault(name.rpartition(".")[0], []).append(tensor)
    choices = [_ways(name, group, children.get(name, []), settings, base) for name, group in groups.items()]
    told = _orientation([ways[0] for ways in choices if len(ways) == 1], settings, model_type)
    return [target for ways in choices for target in (ways[0] if len(ways) == 1 else _decided(ways, told))]


@dataclass(frozen=True, slots=True)
class _Orientation:
    """Which way round square weights are stored, by kind; None when nothing tells."""

    layers: bool | None
    experts: bool | None


def _orientation(known: Sequence[tuple[Target, ...]], settings: LoraSettings, model_type: str) -> _Orientation:
    """What the weights that are not square, the model or the configuration say."""
    every = [target for way in known for target in way if not target.module.embedding]
    layers = {t.turned for t in every if not t.parameter}
    experts = {t.turned for t in every if t.experts}
    stored: bool | None = settings.fan_in_fan_out
    if model_type in _CONV1D:
        stored = True
    elif len(layers) == 1:
        stored = next(iter(layers))
    elif layers and not stored:
        stored = None
    made: bool | None = None
    if len(experts) == 1:
        made = next(iter(experts))
    elif model_type in _TRANSPOSED_EXPERTS:
        made = True
    elif settings.peft_version is not None and model_type:
        made = settings.peft_version < (0, 19)
    return _Orientation(stored, made)


def _ways(
    name: str,
    group: Sequence[LoraModule],
    children: Sequence[TensorRef],
    settings: LoraSettings,
    base: Mapping[str, TensorRef],
) -> list[tuple[Target, ...]]:
    """Every way in which the factors on one module fit its tensors; at least one."""
    weight = base.get(f"{name}.weight")
    if len(group) == 1 and weight is not None and not settings.targets(weight.name):
        ways: list[tuple[Target, ...]] = [(t,) for t in _layer(group[0], weight)]
        offered = [weight]
    else:
        named = [t for t in children if settings.targets(t.name)]
        offered = named or [t for t in children if len(t.shape) in {2, 3}]
        ways = [
            way
            for order in itertools.permutations(offered, len(group))
            for way in itertools.product(*(tuple(_parameter(m, t)) for m, t in zip(group, order, strict=True)))
        ]
    if settings.rank is not None:
        fitting = [way for way in ways if all(t.rank == settings.rank_of(name) for t in way)]
        if ways and not fitting:
            msg = f"{name} has LoRA rank {ways[0][0].rank}, {settings.origin} says {settings.rank_of(name)}"
            raise CheckpointError(msg, hint="the file may belong to another run; give --lora-alpha and remove it")
        ways = fitting
    if not ways:
        factors = " and ".join(f"B {list(m.b.shape)} @ A {list(m.a.shape)}" for m in group)
        there = ", ".join(f"{t.name} {list(t.shape)}" for t in offered) or "none"
        msg = f"the LoRA factors of {name}, {factors}, fit no tensor of the model there: {there}"
        raise CheckpointError(
            msg, hint="the checkpoint is incomplete, the names are those of another model, or this kind is not known"
        )
    return ways


def _layer(module: LoraModule, weight: TensorRef) -> Iterator[Target]:
    wanted = (module.b.shape[0], module.a.shape[1])
    if module.embedding:
        if weight.shape == wanted[::-1]:
            yield Target(module, weight, turned=True)
        return
    if weight.shape == wanted:
        yield Target(module, weight, turned=False)
    if weight.shape == wanted[::-1]:
        yield Target(module, weight, turned=True)


def _parameter(module: LoraModule, weight: TensorRef) -> Iterator[Target]:
    """Ways in which factors fit a tensor named by `target_parameters`."""
    wanted = (module.b.shape[0], module.a.shape[1])
    if module.embedding:
        return
    if len(weight.shape) == 2 and weight.shape == wanted:
        yield Target(module, weight, turned=False, parameter=True)
    elif len(weight.shape) == 3 and weight.shape[0] > 1 and module.a.shape[0] % weight.shape[0] == 0:
        for turned in (False, True):
            if weight.shape[1:] == (wanted[::-1] if turned else wanted):
                yield Target(module, weight, turned, experts=weight.shape[0], parameter=True)


def _decided(ways: Sequence[tuple[Target, ...]], told: _Orientation) -> tuple[Target, ...]:
    """The one way that is left; UnsupportedError when there is none."""

    def fits(target: Target) -> bool:
        if target.experts:
            return target.turned == told.experts
        return target.parameter or target.turned == told.layers

    left = [way for way in ways if all(map(fits, way))]
    if len(left) != 1:
        msg = f"the LoRA factors of {ways[0][0].module.module} fit its tensors in {len(ways)} ways"
        raise UnsupportedError(
            msg, hint=f"adapter_config.json (peft_version, target_parameters) and config.json tell which; {_KEEP}"
        )
    return left[0]


def folds_of(
    targets: Sequence[Target], base: Mapping[str, TensorRef], settings: LoraSettings
) -> dict[str, LowRank | Scaled]:
    """What is added to each adapted tensor of `base`."""
    folds: dict[str, LowRank | Scaled] = {}
    for target in targets:
        module, weight = target.module, target.weight
        _check_types(target, settings)
        scale = settings.scale(module.module, target.rank)
        magnitude = None
        if module.magnitude is not None:
            if module.magnitude.shape != (module.b.shape[0],) or target.experts:
                msg = f"{module.path}: a DoRA magnitude {list(module.magnitude.shape)} does not fit"
                raise UnsupportedError(msg, hint=f"only linear layers and embeddings have one; {_KEEP}")
            magnitude = Scaled(_whole(module.magnitude), module.magnitude.dtype)
        if weight.name in folds:
            msg = f"two LoRA modules adapt {weight.name}"
            raise CorruptCheckpointError(msg, hint="the checkpoint mixes two models")
        folds[weight.name] = LowRank(
            _whole(module.a),
            (module.a.shape[0], module.a.shape[1]),
            _whole(module.b),
            (module.b.shape[0], module.b.shape[1]),
            module.a.dtype,
            scale,
            transposed=target.turned,
            experts=target.experts,
            casts_delta=(module.embedding or target.parameter) and magnitude is None,
            magnitude=magnitude,
        )
        if module.bias is not None:
            name = f"{module.module}.bias"
            bias = base.get(name)
            if bias is None or bias.shape != module.bias.shape:
                msg = f"{module.path}: the LoRA has a bias {list(module.bias.shape)}, and the layer has none like it"
                raise UnsupportedError(msg, hint=f"peft cannot fold it either; {_KEEP}")
            folds[name] = Scaled(_whole(module.bias), module.bias.dtype, scale)
    return folds


def _check_types(target: Target, settings: LoraSettings) -> None:
    module, weight = target.module, target.weight
    if weight.dtype.kind != "float":
        msg = f"{weight.name} is {weight.dtype}: a LoRA cannot be folded into a quantized weight"
        raise UnsupportedError(msg, hint=f"fold into the model before it was quantized (--base-model), or {_KEEP}")
    if settings.config is not None and settings.dora != (module.magnitude is not None) and not target.parameter:
        msg = f"{settings.origin} says use_dora {settings.dora}, and {module.path} has "
        msg += "no magnitude" if module.magnitude is None else f"the magnitude {module.magnitude.name}"
        raise CorruptCheckpointError(msg, hint="the file belongs to another run: remove it and give --lora-alpha")
    types = [weight.dtype, *(t.dtype for t in (module.magnitude, module.bias) if t is not None)]
    if module.magnitude is not None and any(t.name not in {"F32", "BF16", "F16"} for t in types):
        raise UnsupportedError(f"{module.path}: DoRA in {types[0]}, {types[1]} is not known here", hint=_KEEP)


def _whole(tensor: TensorRef) -> ResolvedTake:
    box = Box.whole(tensor.shape)
    return ResolvedTake(tensor.shards, box, box, stored=tensor.stored)
