"""Names of transformers models: from those in a trainer's memory to those of the original repository.

    base model given?   its names decide: unchanged, by the family's rules, or matched with its index
    family has a table? its rules; a name that no repository of the family has is an error
    plain text family?  every name stays
    no config at all?   accepted when every name is that of a plain text model
    otherwise           transformers' own conversion where it is installed, else refused with the ways out

Names are never guessed from the version of a library: the same model has per-expert names
under transformers 4.57 and fused ones under 5.x, so the names and shapes decide. LoRA names
are refused here (folding is another step).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from merge_stream.architectures._dry_run import dry_run
from merge_stream.architectures.base import ModelInfo, Named
from merge_stream.architectures.base_index import match_base_index
from merge_stream.architectures.base_match import BaseMatch, compare_with_base
from merge_stream.architectures.families import DENSE, HEADS, RECOMPUTED, RENAMED_VLM
from merge_stream.architectures.lookup import family_of
from merge_stream.architectures.refusals import (
    notes_without_config,
    other_model_error,
    refuse_fused,
    refuse_lora,
    refuse_vision,
    renamed_vlm_error,
    strangers_error,
    unknown_family_error,
    unknown_layers_error,
)
from merge_stream.architectures.rules import Converted, convert
from merge_stream.architectures.structure import layer_of
from merge_stream.architectures.tables.base import Family
from merge_stream.options import LayoutName
from merge_stream.tensors.parameter import Parameter
from merge_stream.tensors.ref import Catalog
from merge_stream.units import counted

__all__ = ["MEMBER", "HuggingFace"]

Ints = tuple[int, ...]
Shapes = Mapping[str, Ints]


class HuggingFace:
    """The names of the original repository, for every transformers model that can be told."""

    name = "hugging_face"

    def claims(self, catalog: Catalog, model: ModelInfo) -> bool:
        """Responsible for all transformers names that no other member claims."""
        del model
        return catalog.naming == "hf"

    def parameters(self, catalog: Catalog, model: ModelInfo, layout: LayoutName) -> Named:
        """Every parameter of the repository, or a refusal that says why its names cannot be told."""
        shapes = {name: tensor.shape for name, tensor in catalog.tensors.items()}
        if layout == "as-is":
            return Named("identity", convert((), shapes).parameters)
        refuse_lora(shapes)
        base = model.base_tensors or {}
        buffers = {name for name in shapes if RECOMPUTED.fullmatch(name) and name not in base}
        kept = {name: shape for name, shape in shapes.items() if name not in buffers}
        found = _by_base(kept, model) if base else _by_family(kept, model)
        notes = list(found.notes)
        if buffers:
            notes.append(
                f"{counted(len(buffers), 'buffer')} left out that every loader computes again ({min(buffers)})"
            )
        for reason in dict.fromkeys(found.converted.dropped.values()):
            names = [name for name, why in found.converted.dropped.items() if why == reason]
            notes.append(f"{counted(len(names), 'tensor is', 'tensors are')} left out ({names[0]}): {reason}")
        dropped = dict.fromkeys(buffers, "computed again by every loader") | dict(found.converted.dropped)
        return Named(found.how, found.converted.parameters, (), tuple(notes), dropped)


MEMBER = HuggingFace()


@dataclass(frozen=True, slots=True)
class _Found:
    how: str
    converted: Converted
    notes: tuple[str, ...] = ()


def _by_base(shapes: Shapes, model: ModelInfo) -> _Found:
    """The first way of naming that gives the base model's names and shapes."""
    family = family_of(model)
    failed: list[BaseMatch] = []
    for how, converted, notes in _ways(shapes, model, family):
        match = compare_with_base(converted.shapes, model)
        if match.fits:
            return _Found(how, converted, (_told(how, converted), *notes, *match.notes))
        failed.append(match)
    match = min(failed, key=lambda m: len(m.missing) + len(m.extra) + len(m.reshaped))
    if family is None and model.model_type not in DENSE and model.config is not None:
        raise unknown_family_error(model, match)
    raise other_model_error(match)


def _ways(shapes: Shapes, model: ModelInfo, family: Family | None) -> Iterator[tuple[str, Converted, tuple[str, ...]]]:
    """(how, result, notes): unchanged, by the rules, each also without a wrapper's prefix; then by the base's index."""
    for seen, origin, notes in _with_fewer_prefixes(shapes):
        yield "identity", _from_origin(convert((), seen), origin), notes
        if family is not None and family.rules:
            yield family.name, _from_origin(convert(family.rules, seen), origin), notes
    yield "base-index", match_base_index(shapes, model.base_tensors or {}), ()


def _told(how: str, converted: Converted) -> str:
    count = len(converted.parameters)
    if how == "identity":
        return f"all names are those of the base model ({counted(count, 'tensor')})"
    by = "matched with the base model's" if how == "base-index" else f"mapped by the rules of {how} to the base model's"
    return f"names {by} ({counted(count, 'tensor')})"


def _by_family(shapes: Shapes, model: ModelInfo) -> _Found:
    """Without a base model: the family's table, or what is known about plain text models."""
    kind, family = model.model_type, family_of(model)
    if family is not None:
        return _by_table(shapes, kind, family)
    if kind in RENAMED_VLM or (kind not in DENSE and model.config is not None):
        dry = dry_run(shapes, model)
        if dry is not None:
            return _Found("transformers", dry, ("names told by the installed transformers' own conversion",))
    if kind in RENAMED_VLM:
        raise renamed_vlm_error(shapes, kind)
    refuse_fused(shapes, kind)
    if model.config is None:
        return _Found("identity", convert((), shapes), notes_without_config(shapes))
    if kind not in DENSE:
        raise unknown_family_error(model, None)
    refuse_vision(shapes, kind)
    for seen, origin, notes in _with_fewer_prefixes(shapes):
        if not seen or any(layer_of(name) for name in seen):
            return _Found("identity", _from_origin(convert((), seen), origin), notes)
    raise unknown_layers_error(shapes, kind)


def _by_table(shapes: Shapes, kind: str, family: Family) -> _Found:
    for seen, origin, notes in _with_fewer_prefixes(shapes):
        converted = convert(family.rules, seen)
        if not _strangers(converted.shapes, family):
            changed = [p for p in converted.parameters if any(take.source != p.name for take in p.takes)]
            how = family.name if changed else "identity"
            count = counted(len(changed), "name is", "names are")
            told = (f"{count} mapped to those of the original repository ({family.name})",)
            return _Found(how, _from_origin(converted, origin), (*(told if changed else ()), *notes))
    converted = convert(family.rules, shapes)
    raise strangers_error(_strangers(converted.shapes, family), converted.shapes, kind)


def _strangers(shapes: Shapes, family: Family) -> list[str]:
    return family.strangers(name for name in shapes if not HEADS.fullmatch(name))


def _with_fewer_prefixes(shapes: Shapes) -> Iterator[tuple[Shapes, Mapping[str, str], tuple[str, ...]]]:
    """The names as they are, then without a leading segment that all share (heads may lack it), twice at most.

    Yields (names and shapes, source of each name, notes). A wrapper module puts such a
    segment before every name: `model.model.layers.0`.
    """
    yield shapes, {}, ()
    seen, origin, taken = dict(shapes), {name: name for name in shapes}, ""
    for _ in range(2):
        body = [name for name in seen if not HEADS.fullmatch(name)]
        segments = {name.partition(".")[0] for name in body}
        if len(segments) != 1 or any("." not in name for name in body):
            return
        prefix = segments.pop() + "."
        origin = {name.removeprefix(prefix): source for name, source in origin.items()}
        if len(origin) != len(seen):
            return
        seen = {name: shapes[source] for name, source in origin.items()}
        taken += prefix
        yield seen, origin, (f"every name began with {taken!r} once too often; it is left out",)


def _from_origin(converted: Converted, origin: Mapping[str, str]) -> Converted:
    if not origin:
        return converted

    def sourced(parameter: Parameter) -> Parameter:
        return replace(parameter, takes=tuple(replace(t, source=origin[t.source]) for t in parameter.takes))

    return Converted(
        tuple(sourced(parameter) for parameter in converted.parameters),
        {origin[name]: reason for name, reason in converted.dropped.items()},
    )
