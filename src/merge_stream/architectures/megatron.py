"""Names of Megatron-core models: canonical names to those of the repository, by the table of the config's family.

    table of the family -> rules for this config -> parameters

What the rules leave over is an error that lists it: a family is known or it is not. `--rules` gives a user's own
table. A head of other rows than the vocabulary is that of a value or reward model (`score`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from dataclasses import replace

from merge_stream.architectures.base import ModelInfo, Named, class_names
from merge_stream.architectures.base_match import compare_with_base
from merge_stream.architectures.megatron_qkv import HeadNorm, QkvConcat, QkvGroups
from merge_stream.architectures.megatron_rules import Copies, DeltaNet
from merge_stream.architectures.megatron_tables.base import MegatronFamily, MegatronTable, Rules
from merge_stream.architectures.refusals import other_model_error
from merge_stream.architectures.rules import Drop, Rename, Rule, convert
from merge_stream.architectures.structure import text_value
from merge_stream.discovery import members_of
from merge_stream.errors import CheckpointError, UnsupportedError
from merge_stream.formats._megatron_raw import DELTA, GATES, HEADS, NORMS, ROTARY, delta_in_words, heads_in_words
from merge_stream.options import LayoutName
from merge_stream.tensors.parameter import Mapping, identity
from merge_stream.tensors.ref import Catalog
from merge_stream.units import counted

__all__ = ["MEMBER", "NAMING", "Megatron", "check_heads", "megatron_families"]

NAMING = "megatron"
_ALIKE = "visual."
"""Names that are the same on both sides: a vision tower of transformers inside Megatron."""
_NORM = re.compile(r".*(norm|layernorm)\.weight")
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
        if adapters := [name for name in shapes if ".adapter." in name]:
            count = counted(len(adapters), "tensor")
            msg = (
                f"the checkpoint holds adapters of Megatron-Bridge ({count}: {adapters[0]} ...) and weights beside them"
            )
            hint = "fold them with Megatron-Bridge (merge_lora); an adapter alone is folded into a --base-model here"
            raise UnsupportedError(msg, hint=hint)
        if model.config is None:
            msg = "Megatron's names are those of no repository, and without config.json the family is not known"
            raise UnsupportedError(msg, hint=f"pass --base-model DIR with a config.json; {_HINT}")
        family = megatron_families().get(model.model_type)
        if family is None:
            known = ", ".join(sorted(megatron_families()))
            where = f"model_type {model.model_type!r} ({model.config_path})"
            msg = f"Megatron's names of {where} are not known, only {known}; the checkpoint holds {_some(shapes)}"
            raise UnsupportedError(msg, hint=_HINT)
        _check_gates(family, catalog)
        rules = family.rules(model)
        check_heads(rules, catalog, model.config_path or "config.json")
        rules = _turned(family, rules, catalog)
        shifted = _shifted(family, catalog)
        head = _value_head(shapes, model)
        converted = convert((*head, *rules), shapes)
        names = [parameter.name for parameter in converted.parameters]
        left = [name for name in names if name in shapes and not name.startswith(_ALIKE)]
        if left:
            named = _some(left)
            count = counted(len(left), "name has", "names have")
            msg = f"{count} no place in {family.name} ({model.model_type}): {named}"
            raise UnsupportedError(msg, hint=_HINT)
        base = model.base_tensors or {}
        copies = tuple(
            copy
            for rule in rules
            if isinstance(rule, Copies)
            for copy in rule.added(shapes)
            if not base or copy.name in base
        )
        notes = [f"names of Megatron mapped to those of {model.model_type} ({counted(len(shapes), 'tensor')})"]
        if not family.proof:
            notes.append(
                f"no Megatron checkpoint of {model.model_type} that another program made was merged by the tests: its "
                "names are from sources, so compare the model with what the trainer gives"
            )
        if any(isinstance(rule, QkvGroups) and rule.turned for rule in rules):
            notes.append("rows of queries and keys are reordered: Megatron's rotary pairs are neighbours")
        for number in sorted(set(shifted.values())):
            names = [name for name, one in shifted.items() if one == number]
            notes.append(
                f"{number:+g} in {counted(len(names), 'norm')} ({names[0]} ...), as the repository means weights"
            )
        for reason in dict.fromkeys(converted.dropped.values()):
            names = [name for name, why in converted.dropped.items() if why == reason]
            notes.append(f"{', '.join(names)} is left out: {reason}")
        if base:
            match = compare_with_base({p.name: p.shape for p in (*converted.parameters, *copies)}, model)
            if not match.fits:
                raise other_model_error(match)
            notes += match.notes
        return Named(
            f"{self.name}, {family.name}",
            (*converted.parameters, *copies),
            (),
            tuple(notes),
            converted.dropped,
            frozenset(take.source for copy in copies for take in copy.takes),
            shifted,
        )


MEMBER = Megatron()


def _check_gates(family: MegatronFamily, catalog: Catalog) -> None:
    """Tensor-parallel parts of linear_fc1 were joined with or without gates: it must be as the family has it."""
    told = str(catalog.facts.get(GATES, ""))
    if told and (told != "no") != family.gated:
        by = "without arguments it is assumed" if told == "assumed" else "the trainer's arguments say"
        has = "has gates" if family.gated else "has none"
        msg = f"{by} that linear_fc1 has {'no ' if told == 'no' else ''}gates, and {family.name} {has}"
        raise UnsupportedError(
            msg, hint="pass the --base-model that was trained, or save with --ckpt-format torch_dist"
        )


def check_heads(rules: Rules, catalog: Catalog, where: str) -> None:
    """The trainer's heads are the config's: other heads of the same rows in all would be cut elsewhere."""
    for rule in rules:
        if isinstance(rule, (QkvGroups, QkvConcat)) and not rule.pattern.startswith("vision_model."):
            key, has = HEADS, heads_in_words(rule.heads.queries, rule.heads.groups, rule.heads.width)
        elif isinstance(rule, DeltaNet):
            key, has = DELTA, delta_in_words(rule.key_heads, rule.key_width, rule.value_heads, rule.value_width)
        else:
            continue
        told = catalog.facts.get(key, has)
        if told != has:
            msg = f"{key}: {told} by the trainer's arguments, {has} by {where}"
            raise CheckpointError(msg, hint="pass the --base-model that was trained, or correct its config.json")


def _some(names: Collection[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(list(names)[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _shifted(family: MegatronFamily, catalog: Catalog) -> dict[str, float]:
    """Norms that one side stores less one and the other does not: what is added to each.

    Megatron stores all norms of a model alike, as its arguments tell; where they are not there, as the family needs.
    """
    told = catalog.facts.get(NORMS)
    stored_less_one = told == "zero-centred" if told else bool(family.centred)
    shifts: dict[str, float] = {}
    for name in catalog.tensors:
        if _NORM.fullmatch(name) and not name.startswith(("vision_model.", _ALIKE)):
            wanted_less_one = bool(family.centred) and re.fullmatch(family.centred, name) is not None
            if wanted_less_one != stored_less_one:
                shifts[name] = 1.0 if stored_less_one else -1.0
    return shifts


def _turned(family: MegatronFamily, rules: Rules, catalog: Catalog) -> Rules:
    """The rules for rows of queries and keys in Megatron's rotary order, where that is not the repository's."""
    told = str(catalog.facts.get(ROTARY, ""))
    if not told or (told.startswith("neighbours") if family.neighbours else told == "halves"):
        return rules
    if told != "neighbours" or any(isinstance(rule, QkvConcat) for rule in rules):
        pairs = "neighbours" if family.neighbours else "halves of a head"
        msg = f"Megatron's rotary pairs are {told}, those of {family.name} are {pairs}"
        raise UnsupportedError(msg, hint="rows of this family cannot be reordered; --layout as-is leaves them")
    made: list[Rule | Rename] = []
    for rule in rules:
        if isinstance(rule, (QkvGroups, HeadNorm)):
            made.append(replace(rule, turned=True))
        else:
            made.append(rule)
    return tuple(made)


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
