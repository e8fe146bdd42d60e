"""From a catalog to the parameters of the output: the one entry to all model families.

    catalog + model folder --the responsible member--> parameters --checks--> Mapping

The checks are the same for every family: each tensor of the checkpoint is used exactly
once, no two parameters share a name, the shapes fit the config, tied pairs are found.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from merge_stream.architectures.base import Architecture, ModelInfo, Named
from merge_stream.architectures.base_match import form_is_known, packed
from merge_stream.architectures.biases import check_biases
from merge_stream.architectures.families import HEADS, RECOMPUTED
from merge_stream.architectures.lookup import family_of
from merge_stream.architectures.parts import check_parts
from merge_stream.architectures.rules import convert
from merge_stream.architectures.structure import check_structure
from merge_stream.architectures.ties import find_ties
from merge_stream.discovery import members_of
from merge_stream.errors import CheckpointError, UnsupportedError
from merge_stream.options import LayoutName
from merge_stream.tensors.parameter import Mapping
from merge_stream.tensors.ref import Catalog

__all__ = ["map_names"]

_FALLBACK = "hugging_face"


def map_names(catalog: Catalog, model: ModelInfo, layout: LayoutName) -> Mapping:
    """Every parameter of the output, its possible ties and remarks for the user.

    layout "upstream" gives the names of the original repository, "as-is" the trainer's.
    UnsupportedError when the names cannot be told; CheckpointError when names or shapes
    contradict the config or the base model; IncompleteShardsError when something is missing (not asked of a part
    of a model that the user wanted).
    """
    if not catalog.tensors:
        msg = f"{catalog.root} holds no model tensors ({sum(catalog.ignored.values())} other entries were left out)"
        raise CheckpointError(msg, hint="pass the model's own folder, not that of the optimizer")
    mapping = _responsible(catalog, model).parameters(catalog, model, layout)
    _check_use(catalog, mapping)
    shapes = {parameter.name: parameter.shape for parameter in mapping.parameters}
    notes = () if catalog.partial else check_structure(shapes, model) + _check_parts(shapes, model, layout)
    ties = mapping.ties or find_ties(shapes, model)
    notes = (*mapping.notes, *notes)
    if isinstance(mapping, Named):
        return replace(mapping, ties=ties, notes=notes)
    return Mapping(mapping.architecture, mapping.parameters, ties, notes)


def _check_parts(shapes: dict[str, tuple[int, ...]], model: ModelInfo, layout: LayoutName) -> tuple[str, ...]:
    """Parts that every layer lacks; under the trainer's names only where they lead to those of the repository."""
    adapter_or_quantized = any("lora_" in name or packed(name) for name in shapes)
    if model.config is None or model.base_tensors or adapter_or_quantized or not form_is_known(model.config):
        return ()
    names: Iterable[str] = shapes
    family = family_of(model)
    if layout == "as-is" and family is not None:
        try:
            names = convert(family.rules, shapes).shapes
        except CheckpointError:  # experts in a layout of their own
            return ()
        if family.strangers(name for name in names if not HEADS.fullmatch(name)):
            return ()
    check_biases(frozenset(names), model)
    return check_parts(names, model)


def _responsible(catalog: Catalog, model: ModelInfo) -> Architecture:
    members: tuple[Architecture, ...] = members_of("architectures")
    claimants = [member for member in members if member.claims(catalog, model)]
    special = [member for member in claimants if member.name != _FALLBACK]
    if len(special) > 1:
        names = ", ".join(member.name for member in special)
        msg = f"several architectures claim model_type {model.model_type!r}: {names}"
        raise UnsupportedError(msg, hint="uninstall the plug-in that should not")
    if not claimants:
        msg = f"no architecture knows the naming {catalog.naming!r} of the format {catalog.format}"
        raise UnsupportedError(msg)
    return (special or claimants)[0]


def _check_use(catalog: Catalog, mapping: Mapping) -> None:
    """Names are unique, and each tensor's elements are used once (recomputed buffers may be left out)."""
    names = Counter(parameter.name for parameter in mapping.parameters)
    double = [name for name, count in names.items() if count > 1]
    if double:
        sources = sorted({t.source for p in mapping.parameters if p.name == double[0] for t in p.takes})
        msg = f"several tensors become {double[0]}: {', '.join(sources)}"
        raise CheckpointError(msg, hint="the checkpoint holds one tensor under two names")
    dropped = mapping.dropped if isinstance(mapping, Named) else {}
    repeated = mapping.repeated if isinstance(mapping, Named) else frozenset()
    used: Counter[str] = Counter()
    for parameter in mapping.parameters:
        if math.prod(parameter.view) != math.prod(parameter.shape):
            msg = (
                f"{mapping.architecture}: view {parameter.view} of {parameter.name} is not its shape {parameter.shape}"
            )
            raise UnsupportedError(msg)
        for take in parameter.takes:
            used[take.source] += take.source_box.size
    for name, tensor in catalog.tensors.items():
        got = used.pop(name, 0)
        if name in repeated and tensor.size and got > tensor.size and got % tensor.size == 0:
            continue
        if got != tensor.size and not (got == 0 and (name in dropped or RECOMPUTED.fullmatch(name))):
            msg = f"{mapping.architecture} uses {got} of the {tensor.size} elements of {name}"
            raise UnsupportedError(msg, hint="`--layout as-is` writes every tensor under the trainer's name")
    if used:
        msg = f"{mapping.architecture} takes from {next(iter(used))}, which the checkpoint does not hold"
        raise UnsupportedError(msg)
