"""Biases that a setting of the config gives or takes: there where it says so, and nowhere else.

`parts.json` cannot ask for them, since a setting takes them away, and layers that all lack one look alike. A loader
would make up those that are missing and leave out those that it does not expect.

`biases.json` says for each `model_type`, of a whole model or of one inside it, which flag of its config is about the
biases of which modules (`module_of`), and what the class takes where a file does not say. Seen in models of
transformers 4.57.6 and 5.24.0, each built with every flag on and off (`tests/families/make_biases.py`); what the two
versions disagree about is not in it.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.structure import layer_of
from merge_stream.errors import CheckpointError, IncompleteShardsError, MergeStreamError

__all__ = ["check_biases", "module_of"]

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class _Setting:
    """A flag of config.json, the modules that it is about, and its value where it is not there (None: not known)."""

    key: str
    default: bool | None
    modules: frozenset[str]


@functools.cache
def _tables() -> dict[str, tuple[_Setting, ...]]:
    text = importlib.resources.files(__package__ or "").joinpath("biases.json").read_text("utf-8")
    return {
        kind: tuple(_Setting(key, told["default"], frozenset(told["modules"])) for key, told in settings.items())
        for kind, settings in json.loads(text).items()
    }


def check_biases(names: Collection[str], model: ModelInfo) -> None:
    """Compare the biases beside the weights with the config, and with the configs inside it.

    `names` are those of the repository. IncompleteShardsError for biases that are missing, CheckpointError for those
    that the config denies. A model with code of its own (`auto_map`) may have others and is not asked.
    """
    config = model.config or {}
    if "auto_map" in config:
        return
    biases: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(".weight"):
            bias = name.removesuffix("weight") + "bias"
            biases.setdefault(module_of(bias), []).append(bias)
    for at, part in _configs(config):
        for setting in _tables().get(str(part.get("model_type")), ()):
            told = part.get(setting.key, setting.default)
            if told is not None:
                beside = [bias for module in sorted(setting.modules) for bias in biases.get(module, ())]
                wrong = [bias for bias in beside if (bias in names) != bool(told)]
                if wrong:
                    where = (
                        f"{model.config_path or 'config.json'} {'says' if setting.key in part else 'has by default'}"
                    )
                    raise _error(wrong, where, at + setting.key, told=bool(told))


def module_of(name: str) -> str:
    """The module of a tensor with its numbers left open; inside a text layer without what stands before the layers.

    `model.layers.3.self_attn.q_proj.bias` and `language_model.model.layers.3.self_attn.q_proj.bias` both are
    of `layers.#.self_attn.q_proj`.
    """
    layer = layer_of(name)
    rest = f"layers.{layer[1]}.{layer[2]}" if layer else name
    return _NUMBER.sub("#", "." + rest)[1:].rpartition(".")[0]


def _error(wrong: list[str], where: str, key: str, *, told: bool) -> MergeStreamError:
    first = wrong[0] + (f" and {len(wrong) - 1} more" if len(wrong) > 1 else "")
    where = f"{where} {key} {str(told).lower()}"
    other = f"set {key} to {str(not told).lower()} in config.json if the model was trained so, or write the "
    other += "weights alone with `--no-config`"
    if told:
        msg = f"{first} {'are' if len(wrong) > 1 else 'is'} missing: {where}"
        return IncompleteShardsError(msg, hint=f"pass the folder that holds all shards; {other}")
    return CheckpointError(
        f"the checkpoint holds {first}, but {where}: loaders would leave out what was trained", hint=other
    )


def _configs(config: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """("", config), then those inside it with the keys that lead there: ("text_config.", ...)."""
    yield at, config
    for key, inside in config.items():
        if isinstance(inside, Mapping) and "model_type" in inside:
            yield from _configs(inside, f"{at}{key}.")
