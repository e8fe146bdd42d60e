"""Verification of a model that was quantized while it was merged, against the source of its weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from merge_stream.encodings.base import (
    Scheme,
    Stored,
    as_rows,
    scheme_that_wrote,
    temporaries,
    weights_in,
    without_suffix,
)
from merge_stream.planning.plan import Assembly, OutputFile, ParameterPlan, Plan
from merge_stream.planning.planner import Becomes, Resolved, joined, transposed
from merge_stream.tensors.ref import Catalog, TensorRef

__all__ = ["band_nbytes", "names_in", "quantized_plan", "room_beside", "scheme_of_folder"]

_WIDEST = 8


def scheme_of_folder(out: str | os.PathLike[str]) -> Scheme | None:
    """The scheme that config.json of a model folder names; None for another one, or none."""
    try:
        with open(os.path.join(out, "config.json"), encoding="utf-8-sig") as file:
            config: Any = json.load(file)
    except (OSError, ValueError):
        return None
    return scheme_that_wrote(config.get("quantization_config")) if isinstance(config, dict) else None


def names_in(scheme: Scheme | None, model: Catalog) -> set[str]:
    """Names of the parameters of a model: quantized ones by the names of their weights, whatever they became."""
    weights = _weights(scheme, model)
    found = set()
    for name in model.tensors:
        weight = without_suffix(scheme, name)
        found.add(weight if weight in weights else name)
    return found


def band_nbytes(scheme: Scheme | None, model: Catalog, reference: Catalog) -> int:
    """Bytes that must be held at once to compare any quantized weight."""
    if scheme is None:
        return 0
    width = max((t.dtype.itemsize for t in reference.tensors.values() if t.dtype.kind == "float"), default=_WIDEST)
    shapes = _weights(scheme, model).values()
    return max((scheme.rows * (shape[-1] * width + 2 * _WIDEST) + 4 * 64 for shape in shapes), default=0)


def room_beside(scheme: Scheme | None, model: Catalog) -> int:
    """Bytes that comparing the longest quantized row takes beside a worker's slab."""
    columns = max((shape[-1] for shape in _weights(scheme, model).values()), default=0)
    return temporaries(columns, compared=True) if columns else 0


def quantized_plan(scheme: Scheme, model: Catalog, reference: Catalog, wanted: Mapping[str, Resolved]) -> Plan:
    """A plan that would write the quantized weights of `model`, from the reference, where they stand in its files.

    Without a parameter when the model holds none, or the reference is quantized itself.
    """
    weights = {}
    placed: list[ParameterPlan] = []
    shapes = _weights(scheme, model)
    for name, want in wanted.items():
        shape = as_rows(scheme, want.parameter.shape)
        if shapes.get(name) != shape or scheme.fits(shape) or want.source.dtype.kind != "float":
            continue
        parts = scheme.parts(name, shape)
        there = [model.tensors.get(part.name) for part in parts]
        if any(
            t is None or (t.dtype, t.shape) != (part.dtype, part.shape) for t, part in zip(there, parts, strict=True)
        ):
            continue
        weights[name] = Becomes(shape, parts)
        source = transposed(want.source) if scheme.transposed else want.source
        placed += [_placed(t, source) for t in there if t is not None]
    outputs = tuple(OutputFile(f.name, b"", f.nbytes, _of_file(placed, k)) for k, f in enumerate(model.files))
    return Plan(tuple(joined(placed, weights, scheme)), outputs, reference.files, {}, scheme=scheme.name)


def _weights(scheme: Scheme | None, model: Catalog) -> dict[str, tuple[int, ...]]:
    tensors: Mapping[str, Stored] = model.tensors
    return {} if scheme is None else weights_in(scheme, tensors)


def _placed(tensor: TensorRef, source: Assembly) -> ParameterPlan:
    _, file, offset = tensor.shards.row(0)
    return ParameterPlan(tensor.name, tensor.shape, source, tensor.dtype, file, offset)


def _of_file(placed: list[ParameterPlan], number: int) -> tuple[int, ...]:
    inside = [k for k, p in enumerate(placed) if p.output == number]
    return tuple(sorted(inside, key=lambda k: placed[k].start))
