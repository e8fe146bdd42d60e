"""Adapters alone that Megatron-Bridge saved, as peft names and cuts them.

    <module>.adapter.linear_in.weight   A [r, in]     lora_A of each of the repository's modules that <module> is
    <module>.adapter.linear_out.weight  B [out, r]    rows of it: lora_B of each

The rows go where the family's rules put those of the module's weight: a fused query-key-value of Megatron becomes three
modules with one A and their own rows of B. The scale, alpha / r, is the same in both. What is left after that is an
adapter like any other: folded into a base model, or written beside it.

Facts: Megatron-Bridge 0.6.2 (`peft/lora.py`, `peft/utils.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.lora import PREFIX
from merge_stream.architectures.megatron import NAMING, check_heads, megatron_families
from merge_stream.architectures.megatron_tables.base import Rules
from merge_stream.architectures.rules import convert
from merge_stream.errors import CheckpointError, CorruptCheckpointError, UnsupportedError
from merge_stream.tensors.parameter import Parameter
from merge_stream.tensors.ref import Catalog, TensorRef
from merge_stream.tensors.tables import moved, rows_of, stacked
from merge_stream.units import counted

__all__ = ["holds_adapters_alone", "with_peft_names"]

_FACTOR = re.compile(r"(?P<module>.+)\.adapter\.linear_(?P<side>in|out)\.weight")
_BRIDGE = "export it with Megatron-Bridge (export_adapter_ckpt), or fold it there (merge_lora)"


def holds_adapters_alone(catalog: Catalog) -> bool:
    """True for a checkpoint under Megatron's names that holds adapters and nothing else."""
    return catalog.naming == NAMING and bool(catalog.tensors) and all(".adapter." in name for name in catalog.tensors)


def with_peft_names(catalog: Catalog, model: ModelInfo) -> Catalog:
    """The same adapter under peft's names; UnsupportedError for other kinds of adapters and unknown families."""
    family = megatron_families().get(model.model_type)
    if family is None:
        where = model.config_path or "a config.json"
        msg = f"what Megatron's modules are called in a {model.model_type or 'model of no known type'} ({where})"
        raise UnsupportedError(f"{msg} is not known", hint="pass the --base-model that was trained")
    rules = family.rules(model)
    check_heads(rules, catalog, model.config_path or "config.json")
    tensors: dict[str, TensorRef] = {}
    modules = 0
    for module, a, b in _pairs(catalog):
        modules += 1
        for parameter in _parts(module, a, b, rules):
            stem = PREFIX + parameter.name.removesuffix(".weight")
            for name, tensor in ((f"{stem}.lora_A.weight", a), (f"{stem}.lora_B.weight", _rows(parameter, b))):
                tensors[name] = replace(tensor, name=name)
    note = f"{counted(modules, 'adapter')} of Megatron-Bridge are {len(tensors) // 2} of {family.name}"
    return replace(catalog, tensors=tensors, naming="hf", padded_vocabulary="", notes=(*catalog.notes, note))


def _pairs(catalog: Catalog) -> Iterator[tuple[str, TensorRef, TensorRef]]:
    found: dict[str, dict[str, TensorRef]] = {}
    for name, tensor in catalog.tensors.items():
        match = _FACTOR.fullmatch(name)
        if match is None or ".mlp.experts." in name or len(tensor.shape) != 2:
            msg = f"{name} {list(tensor.shape)} is of an adapter of a kind that is not known here"
            raise UnsupportedError(msg, hint=_BRIDGE)
        found.setdefault(match["module"], {})[match["side"]] = tensor
    for module, sides in found.items():
        if len(sides) < 2:
            lost = "out" if "in" in sides else "in"
            raise CheckpointError(
                f"{module}.adapter.linear_{lost}.weight is missing", hint="copy the files of all ranks"
            )
        a, b = sides["in"], sides["out"]
        if a.shape[0] != b.shape[1]:
            msg = f"{module}: linear_in is {list(a.shape)}, linear_out {list(b.shape)}, which are no two factors"
            raise CorruptCheckpointError(msg, hint="files of two saves are mixed")
        yield module, a, b


def _parts(module: str, a: TensorRef, b: TensorRef, rules: Rules) -> tuple[Parameter, ...]:
    """What the module's weight becomes in the repository: whole rows of it, in some order."""
    weight, (out, width) = f"{module}.weight", (b.shape[0], a.shape[1])
    made = convert(rules, {weight: (out, width)}).parameters
    for parameter in made:
        whole = parameter.name != weight and parameter.name.endswith(".weight") and parameter.shape[1:] == (width,)
        if not whole or any(take.permute or take.source_box.shape[-1] != width for take in parameter.takes):
            msg = f"{module} has an adapter, and its weight is no rows of {parameter.name} in the repository"
            raise UnsupportedError(msg, hint=_BRIDGE)
    return made


def _rows(parameter: Parameter, b: TensorRef) -> TensorRef:
    """The rows of B that belong to the parameter, in its order."""
    order = []
    for take in sorted(parameter.takes, key=lambda take: take.dest_box.start):
        rows = np.arange(b.shape[0]).reshape(take.split or (b.shape[0],))
        inside = zip(take.source_box.start, take.source_box.stop, strict=True)
        order.append(rows[tuple(slice(low, high) for low, high in inside)[: rows.ndim]].reshape(-1))
    numbers = np.concatenate(order)
    starts = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 2) != 1)
    tables, at = [], 0
    for first, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(numbers)], strict=True):
        low, high = int(numbers[first]), int(numbers[stop - 1]) + 1
        tables.append(moved(rows_of(b.shards, low, high, b.on_disk.itemsize), (at, 0)))
        at += high - low
    return TensorRef(b.name, b.dtype, (at, b.shape[1]), stacked(tables, 2), None, b.stored)
