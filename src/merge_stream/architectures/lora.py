"""LoRA inside a full state dict: which tensors are the model, which the adapter, and its scale.

    base_model.model.<module>.base_layer.weight     the model's weight           -> <module>.weight
    base_model.model.<module>.lora_A.<adapter>.weight   A [r, in]   of the
    base_model.model.<module>.lora_B.<adapter>.weight   B [out, r]  adapter
    base_model.model.<module>.modules_to_save.<adapter>.weight   trained copy, used instead of
    base_model.model.<module>.original_module.weight             the original one
    base_model.model.<anything else>                             -> <anything else>

The scale alpha/r (alpha/sqrt(r) with rsLoRA) is nowhere in the tensors: it is read from
`lora_adapter/adapter_config.json`, `adapter_config.json` or `lora_train_meta.json` beside
them, or given by `--lora-alpha`; it is never guessed.

Facts: peft 0.21 (`LoraLayer`, `ModulesToSaveWrapper`, save names), verl 0.9.1
(`lora_train_meta.json` {"r", "lora_alpha", "task_type"}, `lora_adapter/`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from merge_stream.errors import CheckpointError, CorruptCheckpointError, UnsupportedError
from merge_stream.tensors.ref import Catalog, TensorRef

__all__ = [
    "SETTINGS_FILES",
    "LoraModule",
    "LoraSettings",
    "Unwrapped",
    "adapter_config",
    "holds_lora",
    "read_settings",
    "unwrap",
]

_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.(?P<adapter>[^.]+))?\.weight")
_SAVED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)")
_ORIGINAL = re.compile(r"(?P<module>.+)\.original_module\.(?P<rest>.+)")
_OTHER = re.compile(
    r".*\.(lora_magnitude_vector|lora_embedding_[AB]|lora_[AB](\.[^.]+)?\.bias|lora_E|lora_ranknum|hada_.*)(\..*)?"
)
_LIMIT = 1 << 20
SETTINGS_FILES = ("lora_adapter/adapter_config.json", "adapter_config.json", "lora_train_meta.json")


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapted module: `weight` is the model's tensor name, `a` and `b` names in the given catalog."""

    module: str
    weight: str
    a: TensorRef
    b: TensorRef

    @property
    def rank(self) -> int:
        """Rows of A."""
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """How strong the adapter is. `origin` names the file or option; `config` is peft's config when there is one."""

    alpha: float
    origin: str
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    rank: int | None = None
    rslora: bool = False
    fan_in_fan_out: bool = False
    config: bytes | None = None
    task_type: str | None = None

    def scale(self, module: LoraModule) -> float:
        """Factor of B @ A for one module (peft: `LoraLayer.update_layer`; patterns match name ends)."""
        alpha = self.alpha
        for key, value in self.alpha_pattern.items():
            if re.fullmatch(rf"(.*\.)?({key})", module.module):
                alpha = value
                break
        return alpha / math.sqrt(module.rank) if self.rslora else alpha / module.rank


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """A state dict taken apart.

    trained  the model with trained copies of `modules_to_save`; original the model without
    adapter  name in a peft adapter file -> tensor
    """

    trained: Catalog
    original: Catalog
    modules: tuple[LoraModule, ...]
    adapter: Mapping[str, TensorRef]


def holds_lora(catalog: Catalog) -> bool:
    """True when a tensor is a LoRA factor or stands in a peft wrapper."""
    return any(".lora_" in name or ".base_layer." in name or name.startswith(_PREFIX) for name in catalog.tensors)


def unwrap(catalog: Catalog) -> Unwrapped:
    """Sort the tensors.

    UnsupportedError for adapters that are not plain LoRA, CheckpointError for a lone factor.
    """
    other = [name for name in catalog.tensors if _OTHER.fullmatch(name)]
    if other:
        msg = f"the checkpoint holds {len(other)} adapter tensors that are not plain LoRA (for example {other[0]})"
        raise UnsupportedError(
            msg, hint="DoRA, embedding and bias adapters are not folded; --layout as-is writes them as they are"
        )
    plain: dict[str, TensorRef] = {}
    trained: dict[str, TensorRef] = {}
    original: dict[str, TensorRef] = {}
    adapter: dict[str, TensorRef] = {}
    factors: dict[str, dict[str, TensorRef]] = {}
    adapters: set[str] = set()
    for name, tensor in catalog.tensors.items():
        short = name.removeprefix(_PREFIX)
        if match := _FACTOR.fullmatch(short):
            adapters.add(match["adapter"] or "default")
            factors.setdefault(match["module"], {})[match["side"]] = tensor
            adapter[f"{_PREFIX}{match['module']}.lora_{match['side']}.weight"] = tensor
        elif match := _SAVED.fullmatch(short):
            adapters.add(match["adapter"])
            target = f"{match['module']}.{match['rest']}"
            trained[target] = _named(tensor, target)
            adapter[f"{_PREFIX}{target}"] = tensor
        elif match := _ORIGINAL.fullmatch(short):
            target = f"{match['module']}.{match['rest']}"
            original[target] = _named(tensor, target)
        else:
            target = short.replace(".base_layer.", ".")
            if target in plain:
                msg = f"two tensors are {target} without peft's wrapper"
                raise CorruptCheckpointError(msg, hint="the checkpoint mixes two models")
            plain[target] = _named(tensor, target)
    if len(adapters) > 1:
        msg = f"the checkpoint holds {len(adapters)} adapters: {', '.join(sorted(adapters))}"
        raise UnsupportedError(msg, hint="only one adapter can be folded; save the model with one active adapter")
    return Unwrapped(
        dataclasses.replace(catalog, tensors={**plain, **original, **trained}),
        dataclasses.replace(catalog, tensors={**plain, **trained, **original}),
        tuple(_modules(factors)),
        adapter,
    )


def _named(tensor: TensorRef, name: str) -> TensorRef:
    return dataclasses.replace(tensor, name=name)


def _modules(factors: Mapping[str, Mapping[str, TensorRef]]) -> list[LoraModule]:
    modules = []
    for module, sides in factors.items():
        if len(sides) != 2:
            have = next(iter(sides.values()))
            msg = f"{module} has only one of its two LoRA factors: {have.name}"
            raise CheckpointError(msg, hint="the checkpoint is incomplete: pass all of its files")
        a, b = sides["A"], sides["B"]
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or a.dtype != b.dtype:
            msg = f"{module}: LoRA factors A {list(a.shape)} {a.dtype} and B {list(b.shape)} {b.dtype} do not fit"
            raise UnsupportedError(msg, hint="only linear layers with factors A [r, in] and B [out, r] are folded")
        modules.append(LoraModule(module, f"{module}.weight", a, b))
    return modules


def read_settings(beside: Mapping[str, str], alpha: float | None) -> LoraSettings | None:
    """The adapter's settings from the files beside it (name -> absolute path), or `--lora-alpha`; None when unknown.

    CorruptCheckpointError when two of them contradict each other.
    """
    found = [_settings(name, beside[name]) for name in SETTINGS_FILES if name in beside]
    if alpha is not None:
        known = found[0] if found else None
        if known is not None and known.alpha not in {alpha, 0.0}:
            msg = f"--lora-alpha {alpha:g} contradicts {known.origin}, which says {known.alpha:g}"
            raise CheckpointError(msg, hint="leave the option out, or correct the file")
        return dataclasses.replace(known, alpha=alpha) if known else LoraSettings(alpha, "--lora-alpha")
    told = [s for s in found if s.alpha]
    if len({s.alpha for s in told}) > 1:
        msg = ", ".join(f"{s.origin} says lora_alpha {s.alpha:g}" for s in told)
        raise CorruptCheckpointError(
            msg, hint="the files belong to two runs; give --lora-alpha and remove the wrong one"
        )
    return told[0] if told else None


def _settings(name: str, path: str) -> LoraSettings:
    with open(path, "rb") as file:
        data = file.read(_LIMIT + 1)
    try:
        value = json.loads(data) if len(data) <= _LIMIT else None
        if isinstance(value, dict):
            return _checked(name, value, data if name.endswith("adapter_config.json") else None)
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass
    msg = f"{path} is not a readable adapter configuration"
    raise CorruptCheckpointError(msg, hint="restore the file, or remove it and give --lora-alpha")


def _checked(name: str, value: Mapping[str, Any], config: bytes | None) -> LoraSettings:
    if value.get("use_dora"):
        msg = f"{name} says use_dora: DoRA adapters are not folded in this version"
        raise UnsupportedError(msg, hint="--layout as-is writes the tensors as they are")
    rank = value.get("r")
    return LoraSettings(
        alpha=float(value.get("lora_alpha") or 0),
        origin=name,
        alpha_pattern={str(k): float(v) for k, v in (value.get("alpha_pattern") or {}).items()},
        rank=int(rank) if rank is not None else None,
        rslora=bool(value.get("use_rslora")),
        fan_in_fan_out=bool(value.get("fan_in_fan_out")),
        config=config,
        task_type=value.get("task_type"),
    )


def adapter_config(settings: LoraSettings, modules: tuple[LoraModule, ...]) -> bytes:
    """`adapter_config.json` for a kept adapter: the trainer's own bytes, else one made from what is known."""
    if settings.config is not None and settings.alpha == _alpha_of(settings.config):
        return settings.config
    ranks = {m.module: m.rank for m in modules}
    common = max(set(ranks.values()), key=list(ranks.values()).count) if ranks else (settings.rank or 0)
    document = {
        "peft_type": "LORA",
        "task_type": settings.task_type or "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": common,
        "lora_alpha": int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": settings.fan_in_fan_out,
        "inference_mode": True,
        "use_rslora": settings.rslora,
        "target_modules": sorted({m.module.rpartition(".")[2] for m in modules}),
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != common},
        "alpha_pattern": dict(settings.alpha_pattern),
        "modules_to_save": None,
    }
    return (json.dumps(document, indent=2) + "\n").encode()


def _alpha_of(config: bytes) -> float:
    return float(json.loads(config).get("lora_alpha") or 0)
