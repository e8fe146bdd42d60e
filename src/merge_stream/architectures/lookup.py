"""Which family table a config asks for, and what a plain text model's names look like."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.rules import Rename, Rule
from merge_stream.architectures.structure import TEXT_NESTS
from merge_stream.architectures.tables.base import Family, Table
from merge_stream.discovery import members_of

__all__ = ["families", "family_of"]


@functools.cache
def families() -> dict[str, Family]:
    """All shipped and installed families by model type."""
    tables: tuple[Table, ...] = members_of("architectures.tables")
    return {kind: family for table in tables for family in table.families for kind in family.model_types}


def family_of(model: ModelInfo) -> Family | None:
    """The family of the config's model_type; of a vision model with the rules of its text model in front."""
    family = families().get(model.model_type)
    if family is None:
        return None
    inner = _text_rules(model.config or {}, family)
    return Family(family.name, family.model_types, (*inner, *family.rules), family.upstream) if inner else family


def _text_rules(config: Mapping[str, Any], family: Family) -> tuple[Rule | Rename, ...]:
    for key in TEXT_NESTS:
        nest = config.get(key)
        if isinstance(nest, Mapping):
            text = families().get(str(nest.get("model_type") or ""))
            if text is not None and text is not family:
                return tuple(rule for rule in text.rules if rule not in family.rules)
            return _text_rules(nest, family)
    return ()
