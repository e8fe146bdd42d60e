"""Verification of a model that was quantized while it was merged, against the source of its weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from merge_stream.encodings.base import Scheme, schemes, temporaries
from merge_stream.planning.plan import OutputFile, ParameterPlan, Plan
from merge_stream.planning.planner import Resolved, joined
from merge_stream.tensors.ref import Catalog, TensorRef

__all__ = ["band_nbytes", "quantized_plan", "room_beside", "scales_of", "scheme_of_folder"]


def scheme_of_folder(out: str | os.PathLike[str]) -> Scheme | None:
    """The scheme that config.json of a model folder names; None for another one, or none."""
    try:
        with open(os.path.join(out, "config.json"), encoding="utf-8-sig") as file:
            config: Any = json.load(file)
    except (OSError, ValueError):
        return None
    settings = config.get("quantization_config") if isinstance(config, dict) else None
    if not isinstance(settings, dict):
        return None
    return next((scheme for scheme in schemes() if scheme.wrote(settings)), None)


def scales_of(scheme: Scheme | None, model: Catalog) -> set[str]:
    """Names of the tensors that stand beside quantized weights."""
    if scheme is None:
        return set()
    weights = [t for t in model.tensors.values() if t.dtype.kind == "quantized" and len(t.shape) == 2]
    return {part.name for t in weights for part in scheme.parts(t.name, t.shape)[1:]} & model.tensors.keys()


def band_nbytes(scheme: Scheme | None, model: Catalog, reference: Catalog) -> int:
    """Source bytes that must be read at once to compare any quantized weight."""
    if scheme is None:
        return 0
    width = max((t.dtype.itemsize for t in reference.tensors.values() if t.dtype.kind == "float"), default=0)
    weights = [t for t in model.tensors.values() if t.dtype.kind == "quantized" and len(t.shape) == 2]
    return max((min(scheme.rows, t.shape[0]) * t.shape[1] * width for t in weights), default=0)


def room_beside(scheme: Scheme | None, model: Catalog) -> int:
    """Bytes that comparing the longest quantized row takes beside a worker's slab."""
    rows = [t.shape[1] for t in model.tensors.values() if t.dtype.kind == "quantized" and len(t.shape) == 2]
    return temporaries(max(rows), compared=True) if scheme is not None and rows else 0


def quantized_plan(scheme: Scheme, model: Catalog, reference: Catalog, wanted: Mapping[str, Resolved]) -> Plan:
    """A plan that would write the quantized weights of `model`, from the reference, where they stand in its files.

    Without a parameter when the model holds none, or the reference is quantized itself.
    """
    parts = {}
    placed: list[ParameterPlan] = []
    for name, want in wanted.items():
        tensor = model.tensors.get(name)
        if tensor is None or tensor.dtype.kind != "quantized" or want.source.dtype.kind != "float":
            continue
        if len(tensor.shape) != 2 or tensor.shape != want.parameter.shape:
            continue
        of = scheme.parts(name, tensor.shape)
        there = [model.tensors.get(part.name) for part in of]
        if any(t is None or (t.dtype, t.shape) != (part.dtype, part.shape) for t, part in zip(there, of, strict=True)):
            continue
        parts[name] = of
        placed += [_placed(t, want) for t in there if t is not None]
    outputs = tuple(OutputFile(f.name, b"", f.nbytes, _of_file(placed, k)) for k, f in enumerate(model.files))
    return Plan(tuple(joined(placed, parts, scheme)), outputs, reference.files, {}, scheme=scheme.name)


def _placed(tensor: TensorRef, want: Resolved) -> ParameterPlan:
    _, file, offset = tensor.shards.row(0)
    return ParameterPlan(tensor.name, tensor.shape, want.source, tensor.dtype, file, offset)


def _of_file(placed: list[ParameterPlan], number: int) -> tuple[int, ...]:
    inside = [k for k, p in enumerate(placed) if p.output == number]
    return tuple(sorted(inside, key=lambda k: placed[k].start))
