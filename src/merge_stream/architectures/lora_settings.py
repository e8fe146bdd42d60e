"""How strong an adapter is, and how it was made: read from the files beside it, never guessed.

The scale alpha/r (alpha/sqrt(r) with rsLoRA) is nowhere in the tensors. In this order:

    lora_adapter/adapter_config.json, adapter_config.json    peft's configuration
    lora_train_meta.json                                     verl: {"r", "lora_alpha", "task_type"}
    run_config.yaml                                          Megatron-Bridge (`lora_run_config`)
    --lora-alpha

An alpha of 0 is never believed: verl's model merger writes it for "unknown" (verl#1821).
Then only alpha comes from the next source; peft's configuration still says everything else.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from merge_stream.architectures.lora import LoraModule
from merge_stream.architectures.lora_run_config import RUN_CONFIG, run_config_settings
from merge_stream.errors import CheckpointError, CorruptCheckpointError, UnsupportedError, UsageError

__all__ = ["SETTINGS_FILES", "LoraSettings", "adapter_config", "read_settings"]

_LIMIT = 1 << 20
T = TypeVar("T")
SETTINGS_FILES = ("lora_adapter/adapter_config.json", "adapter_config.json", "lora_train_meta.json")
_VARIANTS = (
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "velora_config",
    "monteclora_config",
    "kasa_config",
    "alora_invocation_tokens",
    "layer_replication",
    "trainable_token_indices",
    "megatron_config",
)
_LARGEST = 3.4028234663852886e38  # of float32: a larger alpha makes an infinite factor
_TOKEN = re.compile(
    r"(?P<plain>\\.|\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<open>\((?:\?(?:[:=!]|<[=!]))?)|(?P<close>\))|(?P<bar>\|)"
    r"|(?P<repeat>(?:[*+?]|\{(?:\d+|\d*,\d*)\})[?+]?)|.",
    re.DOTALL,
)
_MOST_STEPS = 4_000_000
_MUST_AGREE = {
    "rank": "r",
    "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern",
    "rslora": "use_rslora",
    "dora": "use_dora",
    "fan_in_fan_out": "fan_in_fan_out",
    "changes_base": "init_lora_weights that changes the base",
}
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga", "mica")


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """peft's settings, as far as they decide what a folded weight is.

    `origin` names the file or option; `config` is peft's configuration as it stands, None
    when there is none; `peft_version` is (major, minor) of who wrote it.
    """

    alpha: float
    origin: str
    rank: int | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    rslora: bool = False
    dora: bool = False
    fan_in_fan_out: bool = False
    target_parameters: tuple[str, ...] = ()
    init: str = ""
    peft_version: tuple[int, int] | None = None
    config: bytes | None = None
    task_type: str | None = None
    target_modules: tuple[str, ...] | None = None
    """The list of names; None when the file has none, or an expression (or "all-linear") instead."""

    def rank_of(self, module: str) -> int | None:
        """The rank that the settings say, None when they say nothing."""
        return _matched(self.rank_pattern, module, self.rank)

    def scale(self, module: str, rank: int) -> float:
        """Factor of B @ A for one module (peft: `LoraLayer.update_layer`)."""
        alpha = _matched(self.alpha_pattern, module, self.alpha)
        if rank < 1:
            raise CorruptCheckpointError(f"{module} has LoRA rank {rank}", hint="its factors are empty")
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def targets(self, parameter: str) -> bool:
        """True when `target_parameters` names this tensor."""
        return any(parameter == t or parameter.endswith(f".{t}") for t in self.target_parameters)

    def leaves_out(self, module: str) -> bool:
        """True when peft, asked to load factors of this module, would not know it (`check_target_module_exists`)."""
        holders = [t.rpartition(".")[0] for t in self.target_parameters]
        named = (*self.target_modules, *holders) if self.target_modules is not None else None
        return named is not None and not any(module == name or module.endswith(f".{name}") for name in named)

    @property
    def changes_base(self) -> bool:
        """True when training began by changing the base weights (PiSSA and its kind)."""
        return self.init.lower().startswith(_CHANGES_BASE)


def _matched(pattern: Mapping[str, T], module: str, otherwise: T) -> T:
    """The value of the first key that is the end of the module's name (peft: `get_pattern_key`)."""
    for key, value in pattern.items():
        if _compiled(key).match(module):
            return value
    return otherwise


@functools.cache
def _compiled(key: str) -> re.Pattern[str]:
    """One key of a pattern as peft reads it.

    CorruptCheckpointError when it is no regular expression, UnsupportedError when matching
    it could take for ever.
    """
    try:
        re.compile(key)
        found = re.compile(rf"(.*\.)?({key})$")
    except (re.error, OverflowError, RecursionError) as error:
        msg = f"the key {key[:200]!r} of rank_pattern or alpha_pattern is no regular expression: {error}"
        raise CorruptCheckpointError(msg, hint="correct it in adapter_config.json") from None
    if not _is_quick(key):
        msg = f"the key {key[:200]!r} of rank_pattern or alpha_pattern is a regular expression that may never end"
        raise UnsupportedError(msg, hint="write the names of the modules in adapter_config.json instead")
    return found


def _is_quick(key: str) -> bool:
    """True when a valid expression surely needs few steps: no choice within a repeated group, few choices in all."""
    groups, closed = [[0, 0]], False  # per open group: "|" and repeats; was the last token a group with any?
    steps, unbounded = 1, 0
    for token in _TOKEN.finditer(key):
        kind, text = token.lastgroup, token[0]
        if kind == "open":
            if text == "(" and key.startswith("?", token.end()):
                return False  # flags, names, comments, conditions
            groups.append([0, 0])
        elif kind == "bar":
            groups[-1][0] += 1
        elif kind == "repeat":
            if text.startswith("?"):
                steps *= 2
            elif closed or any(len(digits) > 3 for digits in re.findall(r"\d+", text)):
                return False
            else:
                unbounded += 1
            groups[-1][1] += 1
        elif kind == "close":
            bars, repeats = groups.pop()
            steps *= bars + 1
            closed = bool(bars or repeats)
            groups[-1][1] += closed
        if kind != "close":
            closed = False
        if unbounded > 3 or steps > _MOST_STEPS:
            return False
    return steps * (groups[0][0] + 1) * (1 << 6 * unbounded) <= _MOST_STEPS * math.factorial(unbounded)


def read_settings(beside: Mapping[str, str], alpha: float | None, *, scale_needed: bool = True) -> LoraSettings | None:
    """The adapter's settings from the files beside it (name -> absolute path), or `--lora-alpha`; None when unknown.

    Without `scale_needed` (an adapter that is kept, not folded) an unknown alpha is 0. Where
    adapter_config.json has no alpha, only alpha comes from elsewhere. UsageError when
    `alpha` is no finite number, CorruptCheckpointError when two of the files contradict each
    other, UnsupportedError for a kind of LoRA that is not known here.
    """
    if alpha is not None and (isinstance(alpha, bool) or not abs(alpha) <= _LARGEST):
        raise UsageError(f"--lora-alpha {alpha} is no number to scale by", hint="give the alpha of the training")
    found = [_settings(name, beside[name]) for name in SETTINGS_FILES if name in beside]
    if RUN_CONFIG in beside:
        found.append(_checked(RUN_CONFIG, run_config_settings(beside[RUN_CONFIG]), None))
    _check_agreement(found)
    told = [s for s in found if s.alpha]
    source = told[0].origin if told else "--lora-alpha"
    if alpha is not None:
        if not alpha:
            raise CheckpointError("--lora-alpha 0 would leave the adapter out", hint="give the alpha of the training")
        wrong = next((s for s in told if s.alpha != alpha), None)
        if wrong is not None:
            msg = f"--lora-alpha {alpha:g} contradicts {wrong.origin}, which says {wrong.alpha:g}"
            raise CheckpointError(msg, hint="leave the option out, or correct the file")
    elif not told:
        if scale_needed:
            return None
        alpha, source = 0.0, "nowhere"
    else:
        alpha = told[0].alpha
    if len({s.alpha for s in told}) > 1:
        msg = ", ".join(f"{s.origin} says lora_alpha {s.alpha:g}" for s in told)
        raise CorruptCheckpointError(
            msg, hint="the files belong to two runs; give --lora-alpha and remove the wrong one"
        )
    if not found:
        return LoraSettings(alpha, source)
    first = next((s for s in found if s.config is not None), found[0])
    return first if first.alpha else _with_alpha(first, alpha, source)


def _check_agreement(found: list[LoraSettings]) -> None:
    """CorruptCheckpointError when two files say different things (lora_train_meta.json says only r)."""
    for attribute, key in _MUST_AGREE.items():
        said = [
            (s.origin, getattr(s, attribute))
            for s in found
            if getattr(s, attribute) is not None and (s.config is not None or attribute == "rank")
        ]
        if any(value != said[0][1] for _, value in said):
            msg = ", ".join(f"{origin} says {key} {value}" for origin, value in said)
            raise CorruptCheckpointError(msg, hint="the files belong to two runs: remove the wrong one")


def _with_alpha(settings: LoraSettings, alpha: float, source: str) -> LoraSettings:
    """The same settings with the alpha of another source, in the configuration too."""
    config = settings.config
    if config is not None:
        document = {**json.loads(config), "lora_alpha": _written(alpha)}
        config = (json.dumps(document, indent=2) + "\n").encode()
    origin = source if config is None else f"{settings.origin} with {source}"
    return dataclasses.replace(settings, alpha=alpha, origin=origin, config=config)


def _written(alpha: float) -> float | None:
    """An alpha for adapter_config.json; null, which peft cannot load, when it is not known."""
    return (int(alpha) if alpha == int(alpha) else alpha) if alpha else None


def _number(value: object) -> float:
    """A finite number of a file; ValueError or TypeError when it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:
        raise ValueError(value)
    return float(value)


def _rank(value: object) -> int:
    number = _number(value)
    if number != int(number):
        raise ValueError(value)
    return int(number)


def _settings(name: str, path: str) -> LoraSettings:
    with open(path, "rb") as file:
        data = file.read(_LIMIT + 1)
    try:
        value = json.loads(data.decode("utf-8-sig")) if len(data) <= _LIMIT else None
        if isinstance(value, dict):
            return _checked(name, value, data if name.endswith("adapter_config.json") else None)
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        pass
    msg = f"{path} is not a readable adapter configuration"
    raise CorruptCheckpointError(msg, hint="restore the file, or remove it and give --lora-alpha")


def _checked(name: str, value: Mapping[str, Any], config: bytes | None) -> LoraSettings:
    kind = value.get("peft_type") or "LORA"
    variants = [key for key in _VARIANTS if value.get(key)]
    if kind != "LORA" or variants:
        what = f"peft_type {kind}" if kind != "LORA" else f"{variants[0]} {value[variants[0]]}"
        msg = f"{name} says {what}, which is not folded here"
        raise UnsupportedError(msg, hint="fold it with peft; --layout as-is writes the tensors as they are")
    rank, patterns = value.get("r"), [value.get(key) or {} for key in ("rank_pattern", "alpha_pattern")]
    for pattern in (key for mapping in patterns for key in mapping):
        _compiled(pattern)
    alpha, modules = value.get("lora_alpha"), value.get("target_modules")
    version = re.match(r"(\d+)\.(\d+)", str(value.get("peft_version") or ""))
    return LoraSettings(
        alpha=_number(alpha) if alpha is not None else 0.0,
        origin=name,
        rank=_rank(rank) if rank is not None else None,
        rank_pattern={str(k): _rank(v) for k, v in patterns[0].items()},
        alpha_pattern={str(k): _number(v) for k, v in patterns[1].items()},
        rslora=bool(value.get("use_rslora")),
        dora=bool(value.get("use_dora")),
        fan_in_fan_out=bool(value.get("fan_in_fan_out")),
        target_parameters=tuple(str(t) for t in value.get("target_parameters") or ()),
        init=str(value.get("init_lora_weights", "")),
        peft_version=(int(version[1]), int(version[2])) if version else None,
        config=config,
        task_type=value.get("task_type"),
        target_modules=tuple(map(str, modules)) if isinstance(modules, list) else None,
    )


@dataclass(frozen=True, slots=True)
class Adapted:
    """One adapted tensor of the model, as far as a configuration must tell of it."""

    module: LoraModule
    rank: int
    parameter: str | None


def adapter_config(
    settings: LoraSettings, adapted: Iterable[Adapted], saved: Iterable[str], modules: Iterable[str]
) -> bytes:
    """`adapter_config.json` for a kept adapter: the trainer's own bytes, else one made from what is known.

    `saved` are modules that were trained whole, `modules` those of the model that could be
    meant by a short name (none: unknown). CheckpointError when the trainer's own file does not target a module that
    has factors: peft would load the others alone.
    """
    adapted = tuple(adapted)
    if settings.config is not None:
        lost = [a.module.module for a in adapted if a.parameter is None and settings.leaves_out(a.module.module)]
        if lost:
            said = ", ".join(settings.target_modules or ())
            msg = f"{settings.origin} targets {said or 'nothing'}, and {lost[0]} has LoRA factors"
            msg += f" ({len(lost)} of {len(adapted)} modules): peft would leave them out"
            raise CheckpointError(
                msg, hint="the file belongs to another run: correct it, or remove it and give --lora-alpha"
            )
        return settings.config
    layers = {a.module.module: a.rank for a in adapted if a.parameter is None}
    parameters = {a.module.module: a.rank for a in adapted if a.parameter is not None}
    ranks = {**parameters, **layers}
    common = max(set(ranks.values()), key=list(ranks.values()).count) if ranks else (settings.rank or 0)
    document = {
        "peft_type": "LORA",
        "task_type": settings.task_type or "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": common,
        "lora_alpha": _written(settings.alpha),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": settings.fan_in_fan_out,
        "inference_mode": True,
        "use_rslora": settings.rslora,
        "use_dora": any(a.module.magnitude is not None for a in adapted),
        "lora_bias": any(a.module.bias is not None for a in adapted),
        "target_modules": _short_names(layers, modules),
        "target_parameters": list(dict.fromkeys(a.parameter for a in adapted if a.parameter)) or None,
        "rank_pattern": {re.escape(name): rank for name, rank in ranks.items() if rank != common},
        "alpha_pattern": dict(settings.alpha_pattern),
        "modules_to_save": list(saved) or None,
    }
    return (json.dumps(document, indent=2) + "\n").encode()


def _short_names(adapted: Mapping[str, int], modules: Iterable[str]) -> list[str]:
    """Last segments where they mean no other module of the model, else whole names."""
    others = {name.rpartition(".")[2] for name in modules if name not in adapted}
    return sorted({last if (last := name.rpartition(".")[2]) not in others else name for name in adapted})


def without_config(settings: LoraSettings) -> LoraSettings:
    """The same settings, when the trainer's own file does not fit the tensors."""
    return dataclasses.replace(settings, config=None)
