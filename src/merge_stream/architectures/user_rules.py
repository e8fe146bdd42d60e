"""`--rules FILE.toml`: a user's own table of names, in the vocabulary of `rules`.

    [[rule]]                                  # numbers may be shifted in `to`
    rename = "{i}.{rest}"
    to = "model.layers.{i-1}.{rest}"

    [[rule]]                                  # one below the other
    concat = ["{at}.q.weight", "{at}.k.weight", "{at}.v.weight"]
    to = "{at}.qkv.weight"

    [[rule]]
    transpose = "{at}.c_fc.weight"
    to = "{at}.fc.weight"

    [[rule]]                                  # [E, rows, columns] -> a matrix for each expert {e}
    unstack = "{at}.experts.w2"
    to = "{at}.experts.{e}.down_proj.weight"

    [[rule]]                                  # {at}.gate_up_proj and {at}.down_proj -> three matrices
    split_experts = "{at}.experts"
    gate = "{at}.experts.{e}.gate_proj.weight"
    up = "{at}.experts.{e}.up_proj.weight"
    down = "{at}.experts.{e}.down_proj.weight"

    [[rule]]                                  # fused rows by group: heads / groups queries, a key, a value
    split_qkv = "{at}.linear_qkv.weight"
    q = "{at}.q.weight"
    k = "{at}.k.weight"
    v = "{at}.v.weight"
    heads = 32
    groups = 8
    width = 128

    [[rule]]                                  # the rows' first half, their second; of each expert with {e}
    split_halves = "{at}.linear_fc1.weight"
    first = "{at}.gate.weight"
    second = "{at}.up.weight"

    [[rule]]
    drop = "{at}.inv_freq"
    reason = "computed again by every loader"

Rules on whole tensors come first, then renames, in the order of the file; names that no rule is about stay. The
result must be the base model's, where there is one, and use every tensor exactly once.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

from merge_stream.architectures.base import ModelInfo, Named
from merge_stream.architectures.base_match import compare_with_base
from merge_stream.architectures.megatron_qkv import Heads, QkvGroups
from merge_stream.architectures.megatron_rules import ExpertHalves, Halves
from merge_stream.architectures.refusals import other_model_error
from merge_stream.architectures.rules import (
    Concat,
    Drop,
    Rename,
    Rule,
    SplitExperts,
    Transpose,
    Unstack,
    convert,
    holes_of,
    pattern_of,
)
from merge_stream.errors import UsageError
from merge_stream.formats._megatron_raw import NORMS, ROTARY
from merge_stream.options import LayoutName
from merge_stream.tensors.parameter import Mapping as Mapped
from merge_stream.tensors.ref import Catalog
from merge_stream.units import counted

__all__ = ["MEMBER", "NAMING", "UserRules", "read_rules"]

NAMING = "user_rules"
"""The naming of a catalog whose names a user's table explains; `Catalog.beside` has the table's path under this key."""
_LIMIT = 1 << 20


class UserRules:
    """Names by the table that the user gave."""

    name = NAMING

    def claims(self, catalog: Catalog, model: ModelInfo) -> bool:
        """Responsible when a table was given."""
        del model
        return catalog.naming == NAMING

    def parameters(self, catalog: Catalog, model: ModelInfo, layout: LayoutName) -> Mapped:
        """What the table makes of the tensors; an error when that is not the base model."""
        path = catalog.beside[NAMING]
        if layout == "as-is":
            msg = f"--rules {path} gives names, --layout as-is keeps the trainer's"
            raise UsageError(msg, hint="leave one of the two out")
        shapes = {name: tensor.shape for name, tensor in catalog.tensors.items()}
        converted = convert(read_rules(path), shapes)
        notes = [f"{counted(len(converted.parameters), 'name is', 'names are')} told by {path}"]
        if model.base_tensors:
            match = compare_with_base(converted.shapes, model)
            if not match.fits:
                raise other_model_error(match)
            notes += match.notes
        if settings := [f"{key} {catalog.facts[key]}" for key in (NORMS, ROTARY) if key in catalog.facts]:
            notes.append(f"a table of yours decides, so numbers stay as the trainer means them: {', '.join(settings)}")
        for reason in dict.fromkeys(converted.dropped.values()):
            names = [name for name, why in converted.dropped.items() if why == reason]
            notes.append(f"{counted(len(names), 'tensor is', 'tensors are')} left out ({names[0]}): {reason}")
        return Named(self.name, converted.parameters, (), tuple(notes), converted.dropped)


MEMBER = UserRules()


def read_rules(path: str) -> tuple[Rule | Rename, ...]:
    """The rules of a file; UsageError names the rule that is none, and what it lacks."""
    try:
        with open(path, "rb") as file:
            data = file.read(_LIMIT + 1)
        table = tomllib.loads(data.decode()) if len(data) <= _LIMIT else {}
    except OSError as error:
        raise UsageError(f"--rules {path} cannot be read: {error.strerror}", hint="pass a TOML file") from None
    except ValueError as error:
        raise UsageError(
            f"--rules {path} is no TOML: {error}", hint="see docs/architectures.md, Your own rules"
        ) from None
    entries = table.get("rule")
    if not isinstance(entries, list) or not entries or set(table) != {"rule"}:
        raise UsageError(f"--rules {path} must hold [[rule]] tables and nothing else", hint=_SEE)
    return tuple(_rule(entry, f"rule {number} of {path}") for number, entry in enumerate(entries, 1))


_SEE = "see docs/architectures.md, Your own rules"


def _rename(entry: Mapping[str, Any]) -> Rename:
    return Rename(entry["rename"], entry["to"])


def _concat(entry: Mapping[str, Any]) -> Concat:
    return Concat(tuple(entry["concat"]), entry["to"], entry.get("axis", 0))


def _transpose(entry: Mapping[str, Any]) -> Transpose:
    return Transpose(entry["transpose"], entry["to"], tuple(entry.get("permute", (1, 0))))


def _unstack(entry: Mapping[str, Any]) -> Unstack:
    return Unstack(entry["unstack"], entry["to"])


def _split_experts(entry: Mapping[str, Any]) -> SplitExperts:
    return SplitExperts(entry["split_experts"], entry["gate"], entry["up"], entry["down"])


def _split_qkv(entry: Mapping[str, Any]) -> QkvGroups:
    heads = Heads(entry["heads"], entry["groups"], entry["width"])
    return QkvGroups(entry["split_qkv"], entry["q"], entry["k"], entry["v"], heads)


def _split_halves(entry: Mapping[str, Any]) -> Halves | ExpertHalves:
    of_experts = "e" in holes_of(entry["first"]) - holes_of(entry["split_halves"])
    return (ExpertHalves if of_experts else Halves)(entry["split_halves"], entry["first"], entry["second"])


def _drop(entry: Mapping[str, Any]) -> Drop:
    return Drop(entry["drop"], entry["reason"])


_COUNTS = ("heads", "groups", "width")
_EXPERTS = {"unstack", "split_experts", "split_halves"}
"""Kinds that may fill {e}, the number of an expert, themselves."""
_KINDS: dict[str, tuple[set[str], set[str], Callable[[Mapping[str, Any]], Rule | Rename]]] = {
    "rename": ({"to"}, set(), _rename),
    "concat": ({"to"}, {"axis"}, _concat),
    "transpose": ({"to"}, {"permute"}, _transpose),
    "unstack": ({"to"}, set(), _unstack),
    "split_experts": ({"gate", "up", "down"}, set(), _split_experts),
    "split_qkv": ({"q", "k", "v", *_COUNTS}, set(), _split_qkv),
    "split_halves": ({"first", "second"}, set(), _split_halves),
    "drop": ({"reason"}, set(), _drop),
}
"""Kind of a rule -> keys it needs, keys it may have, how it is made."""


def _rule(entry: object, where: str) -> Rule | Rename:
    """One rule, its keys and templates checked."""
    if not isinstance(entry, dict):
        raise UsageError(f"{where} is no table", hint=_SEE)
    kinds = [kind for kind in _KINDS if kind in entry]
    if len(kinds) != 1:
        msg = f"{where} has {', '.join(kinds) or 'none'} of {', '.join(_KINDS)}, wanted exactly one"
        raise UsageError(msg, hint=_SEE)
    needed, optional, made = _KINDS[kinds[0]]
    missing = needed - entry.keys()
    unknown = entry.keys() - needed - optional - {kinds[0]}
    if missing or unknown:
        what = f"lacks {min(missing)!r}" if missing else f"has {min(unknown)!r}, which means nothing there"
        raise UsageError(f"{where} ({kinds[0]}) {what}", hint=_SEE)
    _check_types(entry, where)
    patterns = entry["concat"] if kinds[0] == "concat" else [entry[kinds[0]]]
    known: set[str] = {"e"} if kinds[0] in _EXPERTS else set()
    try:
        for pattern in patterns:
            if holes_of(pattern, shifted=True):
                raise UsageError(f"{where}: numbers are shifted in what a name becomes, not in {pattern!r}", hint=_SEE)
            known |= pattern_of(pattern).groupindex.keys()
    except re.error as error:
        raise UsageError(f"{where} ({kinds[0]}) is no pattern: {error}", hint=_SEE) from None
    for key in needed - {"reason", *_COUNTS}:
        if holes_of(entry[key], shifted=True) - {"i", "e"}:
            raise UsageError(f"{where}: only {{i}} and {{e}} are numbers that can be shifted", hint=_SEE)
        lost = holes_of(entry[key]) - known
        if lost:
            msg = f"{where}: {key} has the hole {{{min(lost)}}}, which {kinds[0]} does not have"
            raise UsageError(msg, hint=_SEE)
    if kinds[0] == "split_qkv" and entry["heads"] % entry["groups"]:
        raise UsageError(f"{where}: {entry['heads']} heads are no multiple of {entry['groups']} groups", hint=_SEE)
    return made(entry)


def _check_types(entry: Mapping[str, Any], where: str) -> None:
    for key, value in entry.items():
        if key == "concat":
            right = isinstance(value, list) and len(value) > 1 and all(isinstance(part, str) for part in value)
        elif key == "permute":
            right = isinstance(value, list) and sorted(value, key=str) == list(range(len(value)))
        elif key == "axis":
            right = type(value) is int and value >= 0
        elif key in _COUNTS:
            right = type(value) is int and value > 0
        else:
            right = isinstance(value, str) and bool(value)
        if not right:
            raise UsageError(f"{where}: {key} is {value!r}, which cannot be meant", hint=_SEE)
