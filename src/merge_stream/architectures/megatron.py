"""Names of Megatron-core models: canonical names to those of the repository, by the table of the config's family.

    table of the family -> rules for this config -> parameters

What the rules leave over is an error that lists it: a family is known or it is not. `--rules` gives a user's own
table. A head of other rows than the vocabulary is that of a value or reward model (`score`).
"""

from __future__ import annotations

import functools
import re

from merge_stream.architectures.base import ModelInfo, Named, class_names
from merge_stream.architectures.megatron_rules import Copies
from merge_stream.architectures.megatron_tables.base import MegatronFamily, MegatronTable
from merge_stream.architectures.rules import Drop, Rename, convert
from merge_stream.architectures.structure import text_value
from merge_stream.discovery import members_of
from merge_stream.errors import UnsupportedError
from merge_stream.options import LayoutName
from merge_stream.tensors.parameter import Mapping, identity
from merge_stream.tensors.ref import Catalog
from merge_stream.units import counted

__all__ = ["MEMBER", "NAMING", "Megatron", "megatron_families"]

NAMING = "megatron"
_OURS = re.compile(r"(decoder|embedding|output_layer|mtp|vision_model|language_model)\..*")
_TRIED = frozenset(["llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt2"])
_HINT = (
    "docs/adding.md tells how a family is added; --rules FILE.toml takes a table of yours, --layout as-is writes "
    "the tensors under Megatron's names"
)


@functools.cache
def megatron_families() -> dict[str, MegatronFamily]:
    """All families by model type."""
    tables: tuple[MegatronTable, ...] = members_of("architectures.megatron_tables")
    return {kind: family for table in tables for family in table.families for kind in family.model_types}


class Megatron:
    """Megatron's names, whatever layout they were saved in."""

    name = "megatron"

    def claims(self, catalog: Catalog, model: ModelInfo) -> bool:
        """Responsible when the format found Megatron's names."""
        del model
        return catalog.naming == NAMING

    def parameters(self, catalog: Catalog, model: ModelInfo, layout: LayoutName) -> Mapping:
        """The repository's parameters; UnsupportedError names the family, or what its table leaves over."""
        shapes = {name: tensor.shape for name, tensor in catalog.tensors.items()}
        if layout == "as-is":
            return Mapping(self.name, tuple(identity(name, shape) for name, shape in shapes.items()))
        if model.config is None:
            msg = "Megatron's names are those of no repository, and without config.json the family is not known"
            raise UnsupportedError(msg, hint=f"pass --base-model DIR with a config.json; {_HINT}")
        family = megatron_families().get(model.model_type)
        if family is None:
            known = ", ".join(sorted(megatron_families()))
            msg = (
                f"Megatron's names of model_type {model.model_type!r} ({model.config_path}) are not known, only {known}"
            )
            raise UnsupportedError(msg, hint=_HINT)
        rules = family.rules(model)
        head = _value_head(shapes, model)
        converted = convert((*head, *rules), shapes)
        left = [parameter.name for parameter in converted.parameters if _OURS.fullmatch(parameter.name)]
        if left:
            named = ", ".join(left[:6]) + (f" and {len(left) - 6} more" if len(left) > 6 else "")
            count = counted(len(left), "name has", "names have")
            msg = f"{count} no place in {family.name} ({model.model_type}): {named}"
            raise UnsupportedError(msg, hint=_HINT)
        copies = tuple(copy for rule in rules if isinstance(rule, Copies) for copy in rule.added(shapes))
        notes = [f"names of Megatron mapped to those of {model.model_type} ({counted(len(shapes), 'tensor')})"]
        if model.model_type not in _TRIED:
            notes.append(
                f"no real Megatron checkpoint of {model.model_type} was merged by the tests: its names are from the "
                "trainers' sources, so compare the model with what the trainer gives"
            )
        for reason in dict.fromkeys(converted.dropped.values()):
            names = [name for name, why in converted.dropped.items() if why == reason]
            notes.append(f"{', '.join(names)} is left out: {reason}")
        return Named(
            f"{self.name}, {family.name}",
            (*converted.parameters, *copies),
            (),
            tuple(notes),
            converted.dropped,
            frozenset(take.source for copy in copies for take in copy.takes),
        )


MEMBER = Megatron()


def _value_head(shapes: dict[str, tuple[int, ...]], model: ModelInfo) -> tuple[Rename | Drop, ...]:
    """What becomes of output_layer when it is no head over the vocabulary, or one that the config ties."""
    shape = shapes.get("output_layer.weight")
    if not shape:
        return ()
    rows = text_value(model.config, "vocab_size")
    classes = class_names(model.config)
    classifies = any(name.endswith(("ForTokenClassification", "ForSequenceClassification")) for name in classes)
    if rows is not None and shape[0] < rows and (classifies or shape[0] == 1):
        return (Rename("output_layer.{leaf}", "score.{leaf}"),)
    return ()
