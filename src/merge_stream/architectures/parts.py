"""Which parts a model of a family must have: what is missing everywhere is found too.

`parts.json` says for each `model_type`, under the names of the repository, what stands below a
module: tensors (`q_proj.weight`) and modules (`mlp.`), in one or several sets of which one must be there
whole (a layer is dense or a mixture; an attention has `q_proj` or `q_a_proj`). What some setting of the
config takes away (biases, shared experts, norms of queries) is in no set. Seen in models of transformers
4.57.6 and 5.24.0, each built once more for every setting that adds or takes parts
(`tests/families/make_parts.py`). A model with others inside is known with those alone that were seen in it
(`@text_config` ...). Of plain text models whose layers are alike it has all names that were seen, under `*`.
A base model knows better than this table, so it is not asked then.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
from collections.abc import Iterable, Mapping

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.families import HEADS, RECOMPUTED
from merge_stream.errors import IncompleteShardsError

__all__ = ["check_parts", "known_parts", "strange_names"]

Parts = Mapping[str, list[list[str]]]

_SHOWN = 3
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@functools.cache
def _tables() -> dict[str, Parts]:
    text = importlib.resources.files(__package__ or "").joinpath("parts.json").read_text("utf-8")
    tables: dict[str, Parts] = json.loads(text)
    return tables


def known_parts(model: ModelInfo) -> Parts | None:
    """Module -> sets of parts, one of which it must have; None when the family, or a model inside it, is not known."""
    parts = _tables().get(model.model_type)
    for key, kinds in (parts or {}).items():
        nest = (model.config or {}).get(key[1:]) if key.startswith("@") else None
        inside = nest.get("model_type") if isinstance(nest, Mapping) else None
        if inside and inside != model.model_type and [inside] not in kinds:
            return None
    return parts


def check_parts(names: Iterable[str], model: ModelInfo) -> tuple[str, ...]:
    """Refuse a model that lacks parts which all of its family have; a remark when the family is not known.

    `names` are those of the repository, heads and recomputed buffers or not.
    IncompleteShardsError names the parts, and those alone that would make the nearest set whole.
    """
    parts, kind, where = known_parts(model), model.model_type, model.config_path or "config.json"
    if parts is None:
        return (
            f"which parts a model of type {kind!r} must have is not known: a part that every layer lacks goes unseen",
        )
    there = _with_modules(name for name in names if not (HEADS.fullmatch(name) or RECOMPUTED.fullmatch(name)))
    ends = parts.get("", [])
    if len(ends) == 1 and len(ends[0]) == 1 and ends[0][0] not in there:
        there = {ends[0][0] + name for name in there} | {""}  # the bare model, as transformers' AutoModel saves it
    lost = [
        name for module in sorted(m for m in there if m.endswith(".") or not m) for name in _lost(module, there, parts)
    ]
    if lost:
        first = ", ".join(name.rstrip(".") for name in lost[:_SHOWN])
        more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
        msg = f"{first}{more} {'are' if len(lost) > 1 else 'is'} missing: a {kind} ({where}) has "
        msg += "them" if len(lost) > 1 else "it"
        hint = "pass the folder that holds all shards (all ranks, all pipeline stages)"
        hint += "; if this model has no such part by design, a --base-model that has none decides, or --no-config"
        raise IncompleteShardsError(msg, hint=hint)
    return ()


def strange_names(names: Iterable[str], model: ModelInfo) -> list[str]:
    """Names that no model of the family has, whatever its settings; none where all its names are not known."""
    known = frozenset(_tables().get(model.model_type, {}).get("*", [[]])[0])
    if not known or "auto_map" in (model.config or {}):
        return []
    bare = frozenset(name.partition(".")[2] for name in known)  # as transformers' AutoModel saves it
    return [
        name
        for name in names
        if not (HEADS.fullmatch(name) or RECOMPUTED.fullmatch(name))
        and _NUMBER.sub("#", "." + name)[1:] not in known | bare
    ]


def _lost(module: str, there: set[str], parts: Parts) -> list[str]:
    """Parts that a module lacks for the nearest of its sets."""
    kinds = parts.get(_NUMBER.sub("#", "." + module)[1:])
    if not kinds:
        return []
    lacking = [[module + part for part in kind if module + part not in there] for kind in kinds]
    return min(lacking, key=len)


def _with_modules(names: Iterable[str]) -> set[str]:
    """The names, and every module above them with its dot; "" for the whole."""
    there = {""}
    for name in names:
        at = name
        while at not in there:
            there.add(at)
            at = at[: at.rstrip(".").rfind(".") + 1]
    return there
