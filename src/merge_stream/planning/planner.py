"""Catalog + names + encoding -> Plan. Pure: reads no tensor bytes."""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from merge_stream.containers.safetensors_file import HeaderEntry, build_header
from merge_stream.encodings.base import Encoding, Part, Scheme, as_rows, row_nbytes, scheme_named
from merge_stream.errors import CorruptCheckpointError, UnsupportedError
from merge_stream.options import MergeOptions
from merge_stream.planning.bands import Bands
from merge_stream.planning.layout import Placed, file_name, split_in_files
from merge_stream.planning.plan import (
    Assembly,
    LowRank,
    OutputFile,
    ParameterPlan,
    Plan,
    Quantized,
    QuantizedPart,
    Scaled,
)
from merge_stream.planning.quantize import QuantizedWeights, shares_scale_with
from merge_stream.tensors.box import Box
from merge_stream.tensors.parameter import Parameter
from merge_stream.tensors.ref import Catalog, ShardTable

__all__ = [
    "ADAPTER_FILE",
    "DATA_ALIGNMENT",
    "PLAN_VERSION",
    "RULE_VERSION",
    "Becomes",
    "Resolved",
    "joined",
    "make_plan",
    "transposed",
]

ADAPTER_FILE = "lora_adapter/adapter_model.safetensors"
PLAN_VERSION = 1
RULE_VERSION = 1
"""Of the arithmetic of all schemes: a run that was begun with another one is not continued."""
_MOST_DIMS = 64
DATA_ALIGNMENT = 4096
"""The data section of each output file starts at a multiple of this: one memory page."""


@dataclass(frozen=True, slots=True, eq=False)
class Resolved:
    """A parameter and where its bytes come from."""

    parameter: Parameter
    source: Assembly


def make_plan(
    catalog: Catalog,
    resolved: Sequence[Resolved],
    encoding: Encoding,
    options: MergeOptions,
    *,
    adapter: Sequence[Resolved] = (),
    keep_wide: frozenset[str] = frozenset(),
    quantized: QuantizedWeights | None = None,
    notes: tuple[str, ...] = (),
    dropped: Mapping[str, str] | None = None,
    broken_ties: tuple[str, ...] = (),
    probe_nbytes: int = 0,
) -> Plan:
    """Place every parameter in an output file and fix all offsets.

    `adapter` goes to a file of its own, in its source types. `keep_wide` names parameters that
    keep their source type whatever the encoding says. Those of `quantized` are written in its scheme.
    `dropped` maps parameters left out to the reason.
    """
    placer = _Placer()
    quantized = quantized or QuantizedWeights()
    dtypes = {
        r.parameter.name: r.source.dtype
        if r.parameter.name in keep_wide
        else encoding.target(r.parameter.name, r.source.dtype)
        for r in resolved
    }
    parts = _parts(resolved, quantized)
    by_name = _by_name([piece for r in resolved for piece in _pieces(r, parts.get(r.parameter.name))])
    dtypes |= {part.name: part.dtype for of in parts.values() for part in of.parts}
    _refuse_more_dims([*resolved, *adapter])
    placed = [
        Placed(name, dtypes[name], math.prod(r.parameter.shape) * dtypes[name].itemsize) for name, r in by_name.items()
    ]
    groups = split_in_files(placed, options.max_shard_size)
    for number, group in enumerate(groups):
        placer.add(file_name(number, len(groups)), group, by_name)
    if adapter:
        own = _by_name(adapter)
        kept = [
            Placed(n, r.source.dtype, math.prod(r.parameter.shape) * r.source.dtype.itemsize) for n, r in own.items()
        ]
        placer.add(ADAPTER_FILE, split_in_files(kept, sum(t.nbytes for t in kept))[0], own)
    outputs = placer.outputs
    parameters = joined(placer.parameters, parts, scheme_named(quantized.scheme)) if parts else placer.parameters
    return Plan(
        tuple(parameters),
        tuple(outputs),
        catalog.files,
        _identity(catalog, parameters, outputs, options, quantized),
        notes,
        dict(dropped or {}),
        broken_ties,
        probe_nbytes,
        scheme=quantized.scheme,
        left_plain=quantized.left_plain,
    )


@dataclass(frozen=True, slots=True)
class Becomes:
    """The tensors that a quantized weight of that shape is written as."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def _parts(resolved: Sequence[Resolved], quantized: QuantizedWeights) -> dict[str, Becomes]:
    """The tensors that each quantized weight becomes."""
    if not quantized.names:
        return {}
    scheme = scheme_named(quantized.scheme)
    shapes = {r.parameter.name: r.parameter.shape for r in resolved if r.parameter.name in quantized.names}
    seen = {name: as_rows(scheme, shape) for name, shape in shapes.items()}
    return {name: Becomes(shape, scheme.parts(name, shape)) for name, shape in seen.items()}


def _pieces(resolved: Resolved, becomes: Becomes | None) -> list[Resolved]:
    """What is written for a parameter: itself or, quantized, its codes with its source, and scales without one."""
    if becomes is None:
        return [resolved]
    codes, *scales = becomes.parts
    parameter, source = replace(resolved.parameter, name=codes.name, shape=codes.shape), resolved.source
    if becomes.shape != resolved.parameter.shape:
        if source.view != resolved.parameter.shape:
            msg = (
                f"{resolved.parameter.name}: its source {list(source.view)} cannot be read in the order of {codes.name}"
            )
            raise UnsupportedError(msg, hint="merge it without --quantize, and quantize what was merged")
        source = transposed(source)
    found = [Resolved(replace(parameter, view=source.view), source)]
    for part in scales:
        empty = Parameter(part.name, part.shape, part.shape, ())
        found.append(Resolved(empty, Assembly(part.shape, part.dtype, ())))
    return found


def transposed(source: Assembly) -> Assembly:
    """The same elements with the last two dims of the view in the other order."""
    order = (*range(len(source.view) - 2), len(source.view) - 1, len(source.view) - 2)
    takes = []
    for take in source.takes:
        there = Box(*(tuple(side[k] for k in order) for side in (take.dest_box.start, take.dest_box.stop)))
        permute = tuple((take.permute or range(len(order)))[k] for k in order)
        takes.append(replace(take, dest_box=there, permute=() if permute == tuple(range(len(order))) else permute))
    return replace(source, view=tuple(source.view[k] for k in order), takes=tuple(takes))


def joined(parameters: Iterable[ParameterPlan], weights: Mapping[str, Becomes], scheme: Scheme) -> list[ParameterPlan]:
    """Parameters that know of each other: codes where their scales stand, scales whose they are.

    `weights` are those that are quantized, by name.
    """
    found = list(parameters)
    places = {p.name: k for k, p in enumerate(found)}
    for name, becomes in weights.items():
        shape = becomes.shape
        at, *scales = (places[part.name] for part in becomes.parts)
        parts = tuple(
            QuantizedPart(places[part.name], part.per, row_nbytes(part, shape) if part.per else 0)
            for part in becomes.parts
        )
        together = shares_scale_with(name, weights) if scheme.shares else name
        quantized = Quantized(scheme.name, name, shape, parts, together if scheme.measured else "")
        bands = Bands(scheme.rows * shape[-1], max(math.prod(shape), 1))
        found[at] = replace(found[at], bands=bands, quantized=quantized)
        for k in scales:
            found[k] = replace(found[k], part_of=name)
    return found


class _Placer:
    """Output files one after another, each with its final header."""

    def __init__(self) -> None:
        self.parameters: list[ParameterPlan] = []
        self.outputs: list[OutputFile] = []

    def add(self, name: str, group: Sequence[Placed], by_name: Mapping[str, Resolved]) -> None:
        entries = []
        data_stop = 0
        for t in group:
            shape = by_name[t.name].parameter.shape
            entries.append(HeaderEntry(t.name, t.dtype, shape, data_stop, data_stop + t.nbytes))
            data_stop += t.nbytes
        header = build_header(entries, align=DATA_ALIGNMENT)
        indices = range(len(self.parameters), len(self.parameters) + len(group))
        for tensor, entry in zip(group, entries, strict=True):
            source, start = by_name[tensor.name].source, len(header) + entry.start
            plan = ParameterPlan(tensor.name, entry.shape, source, tensor.dtype, len(self.outputs), start)
            self.parameters.append(plan)
        self.outputs.append(OutputFile(name, header, len(header) + data_stop, tuple(indices)))


def _refuse_more_dims(resolved: Sequence[Resolved]) -> None:
    """UnsupportedError for what neither numpy nor a loader of safetensors files can view."""
    for r in resolved:
        dims = max(len(r.parameter.shape), len(r.source.view))
        if dims > _MOST_DIMS:
            msg = f"{r.parameter.name} has {dims} dims, and no loader takes more than {_MOST_DIMS}"
            raise UnsupportedError(msg, hint="reshape it in the trainer, or leave it out of the state dict")


def _by_name(resolved: Sequence[Resolved]) -> dict[str, Resolved]:
    by_name = {r.parameter.name: r for r in resolved}
    if len(by_name) != len(resolved):
        names = [r.parameter.name for r in resolved]
        twice = next(n for n in names if names.count(n) > 1)
        msg = f"two sources would be written as {twice}"
        raise CorruptCheckpointError(
            msg, hint="the naming rules do not fit this model; --layout as-is merges it unnamed"
        )
    return by_name


def _identity(
    catalog: Catalog,
    parameters: Sequence[ParameterPlan],
    outputs: Sequence[OutputFile],
    options: MergeOptions,
    quantized: QuantizedWeights,
) -> dict[str, str]:
    """What decides the bytes, named so that a mismatch can be told."""
    files = hashlib.sha256()
    for f in catalog.files:
        files.update(os.fsencode(f"{f.name}\0{f.nbytes}\0{f.mtime_ns}\n"))
    sources = hashlib.sha256()
    digests: dict[int, bytes] = {}  # experts of one fused tensor share its table
    told_box = functools.lru_cache(maxsize=1 << 10)(Box.__str__)
    for p in parameters:
        sources.update(f"{p.name}\0{p.source.view}\0{p.source.dtype}\n".encode())
        for take in p.source.takes:
            sources.update(f"{told_box(take.source_box)}{told_box(take.dest_box)}{take.permute}".encode())
            tables = [take.table]
            if take.fold is not None:
                told, factors = _fold_identity(take.fold)
                sources.update(told.encode())
                tables += factors
            for table in tables:
                if id(table) not in digests:
                    columns = (table.start, table.stop, table.file, table.offset)
                    digests[id(table)] = hashlib.sha256(b"".join(c.tobytes() for c in columns)).digest()
                sources.update(digests[id(table)])
    headers = hashlib.sha256()
    for o in outputs:
        headers.update(f"{o.name}\0{o.nbytes}\n".encode())
        headers.update(o.header)
    return {
        **({"--quantize": f"{quantized.scheme}, rule {RULE_VERSION}"} if quantized.scheme else {}),
        "plan version": str(PLAN_VERSION),
        "source files (name, size, time of change)": files.hexdigest()[:32],
        "places of the source tensors": sources.hexdigest()[:32],
        "output files (names, tensors, types, offsets)": headers.hexdigest()[:32],
        "--dtype": options.dtype,
        "--layout": options.layout,
        "--max-shard-size": str(options.max_shard_size),
        "--lora": f"{options.lora.mode or 'merge'}, alpha {options.lora.alpha or 'as found'}",
    }


def _fold_identity(fold: LowRank | Scaled) -> tuple[str, list[ShardTable]]:
    """What decides the bytes of a fold: its settings, and where its factors lie."""
    if isinstance(fold, Scaled):
        return f"{fold.scale!r}{fold.dtype}", [fold.x.table]
    told = f"{fold.scale!r}{fold.transposed}{fold.dtype}{fold.experts}{fold.casts_delta}"
    tables = [fold.a.table, fold.b.table]
    if fold.magnitude is not None:
        of_magnitude, more = _fold_identity(fold.magnitude)
        return f"{told}{of_magnitude}", tables + more
    return told, tables
