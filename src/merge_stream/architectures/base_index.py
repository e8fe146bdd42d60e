"""Names told by the base model alone, for families without a table: a rename, or a stack of experts.

Both sides are brought to one spelling by leaving out the segments in which layouts differ
(`model`, `language_model`, `vision_model` ...) and by common words for the same thing
(`block_sparse_moe` is `mlp`, `w1` is `gate_proj`). A spelling that two names of one side share
tells nothing. Nothing is believed because of a spelling: the caller compares the result
with the base, and every element of the checkpoint must be used once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from merge_stream.architectures.base import BaseTensor
from merge_stream.architectures.base_match import plain_weights
from merge_stream.architectures.rules import (
    Converted,
    HiddenFirstExperts,
    Rule,
    SplitExperts,
    Unstack,
    convert,
)
from merge_stream.errors import CheckpointError
from merge_stream.tensors.parameter import Parameter

__all__ = ["match_base_index"]

Ints = tuple[int, ...]

_SILENT = frozenset({"model", "language_model", "text_model"})
_SILENT_FIRST = frozenset({"thinker", "transformer", "backbone"})
_INSIDE_A_TOWER = re.compile(r"(?<=_tower)\.vision_model(?=\.)")
_WORDS = {
    "block_sparse_moe": "mlp",
    "feed_forward": "mlp",
    "router": "gate",
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
    "embed_out": "lm_head",
    "input_linear": "experts.gate_up_proj",
    "output_linear": "experts.down_proj",
}
_EXPERTS = "{at}.experts"
_SPLIT: tuple[Rule, ...] = (
    SplitExperts(
        _EXPERTS,
        _EXPERTS + ".{e}.gate_proj.weight",
        _EXPERTS + ".{e}.up_proj.weight",
        _EXPERTS + ".{e}.down_proj.weight",
    ),
    Unstack("{at}.experts.{k:gate_proj|up_proj|down_proj}{w:(?:\\.weight)?}", "{at}.experts.{e}.{k}.weight"),
)
_FUSED: tuple[Rule, ...] = (HiddenFirstExperts(_EXPERTS),)
_ONE_EXPERT = re.compile(r".*\.experts\.\d+\..+")


def match_base_index(shapes: Mapping[str, Ints], base: Mapping[str, BaseTensor]) -> Converted:
    """The checkpoint under the names of the base, as far as they can be told; the rest keeps its name."""
    wanted = plain_weights(base)
    try:
        converted = _experts_like(wanted, shapes)
    except CheckpointError:  # two tensors that are called experts and are no pair
        converted = convert((), shapes)
    return Converted(tuple(_renamed(converted.parameters, wanted)), converted.dropped)


def _experts_like(wanted: Mapping[str, Ints | None], shapes: Mapping[str, Ints]) -> Converted:
    if any(_ONE_EXPERT.fullmatch(name) for name in wanted):
        return convert(_SPLIT, shapes)
    by_name = _by_spelling(wanted)

    def hits(converted: Converted) -> int:
        return sum(wanted.get(by_name.get(_spelling(n), "")) == s for n, s in converted.shapes.items())

    plain, hidden_first = convert((), shapes), convert(_FUSED, shapes)
    return hidden_first if hits(hidden_first) > hits(plain) else plain


def _renamed(parameters: Iterable[Parameter], wanted: Mapping[str, Ints | None]) -> list[Parameter]:
    ours = list(parameters)
    theirs = _by_spelling(name for name in wanted if name not in {p.name for p in ours})
    once = _by_spelling(p.name for p in ours if p.name not in wanted)
    named = []
    for parameter in ours:
        spelling = _spelling(parameter.name)
        if once.get(spelling) == parameter.name and spelling in theirs:
            named.append(replace(parameter, name=theirs[spelling]))
        else:
            named.append(parameter)
    return named


def _by_spelling(names: Iterable[str]) -> dict[str, str]:
    """Spelling -> name, where only one name has it."""
    found: dict[str, str] = {}
    double = set()
    for name in names:
        spelling = _spelling(name)
        if spelling in found:
            double.add(spelling)
        found[spelling] = name
    return {spelling: name for spelling, name in found.items() if spelling not in double}


def _spelling(name: str) -> str:
    parts = _INSIDE_A_TOWER.sub("", name).split(".")
    kept = (part for k, part in enumerate(parts) if part not in _SILENT and not (k == 0 and part in _SILENT_FIRST))
    spelled = ".".join(_WORDS.get(part, part) for part in kept)
    return spelled.removesuffix(".weight") if ".experts." in f".{spelled}" else spelled
