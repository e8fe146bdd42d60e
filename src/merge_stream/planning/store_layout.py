"""The plan of a merge made the plan of a staging store: the same tensors, in the files of zarr arrays.

An array of several chunks is an output file of its own: a shard whose index is its header. All
arrays of one chunk together are one more output, `SMALL_ARRAYS`, in which each has its room; they
are written to a file each, but planned, journaled and resumed as one, so that thousands of them
cost no more than their files. Every array is cut in its chunks and nowhere else. The tensors of an
adapter that is kept beside the model are arrays of a group of their own, `ADAPTER_GROUP`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from merge_stream.containers.zarr_array import ADAPTER_GROUP, StoredArray, index_of, lay_out_array
from merge_stream.planning.bands import Bands
from merge_stream.planning.plan import OutputFile, ParameterPlan, Plan
from merge_stream.tensors.ref import Catalog

__all__ = [
    "LEAST_SEGMENT",
    "SMALL_ARRAYS",
    "STORE_IDENTITY",
    "PlacedArray",
    "arrays_of",
    "in_bands",
    "is_store",
    "store_plan",
]

SMALL_ARRAYS = "small arrays"
LEAST_SEGMENT = 1 << 20
"""Bytes of the largest chunk with its checksum: a segment must hold one."""
STORE_IDENTITY = "staging store"
"""In the identity of a model's plan: the fingerprint of the store that it is made from."""
_ALIGN = 64
_STAGING = "staging"


@dataclass(frozen=True, slots=True)
class PlacedArray:
    """An array and where its first chunk begins in its output."""

    start: int
    array: StoredArray


def store_plan(plan: Plan) -> Plan:
    """The plan that writes the parameters of `plan`, in their source types, to a store.

    UnsupportedError for names that a store cannot hold.
    """
    parameters: list[ParameterPlan] = []
    outputs: list[OutputFile] = []
    small: list[tuple[ParameterPlan, StoredArray]] = []
    for of_plan in plan.parameters:
        kept = not plan.outputs[of_plan.output].in_model
        p = replace(of_plan, name=f"{ADAPTER_GROUP}/{of_plan.name}") if kept else of_plan
        array = lay_out_array(p.name, p.source.dtype, p.shape)
        if array.chunks > 1:
            bands = Bands(array.band, array.run, array.stride)
            placed = replace(p, dtype=array.dtype, output=len(outputs), start=array.data_start, bands=bands)
            outputs.append(OutputFile(array.file, index_of(array), array.file_nbytes, (len(parameters),)))
            parameters.append(placed)
        else:
            small.append((p, array))
    if small:
        at, first = 0, len(parameters)
        for p, array in small:
            room = -(-array.file_nbytes // _ALIGN) * _ALIGN
            bands = Bands(max(array.band, 1), max(p.size, 1), room)
            parameters.append(replace(p, dtype=array.dtype, output=len(outputs), start=at, bands=bands))
            at += room
        outputs.append(OutputFile(SMALL_ARRAYS, b"", at, tuple(range(first, len(parameters)))))
    identity = {name: value for name, value in plan.identity.items() if name != "--max-shard-size"}
    identity["output files (names, tensors, types, offsets)"] = _digest(parameters, outputs)
    identity[_STAGING] = "zarr"
    return replace(plan, parameters=tuple(parameters), outputs=tuple(outputs), identity=identity)


def arrays_of(plan: Plan, output: OutputFile) -> list[PlacedArray]:
    """The arrays of an output of a store's plan, in the order of their places; without those that have no file."""
    placed = [plan.parameters[k] for k in output.parameters]
    return [PlacedArray(p.start, lay_out_array(p.name, p.dtype, p.shape)) for p in placed if p.size]


def in_bands(plan: Plan, catalog: Catalog) -> Plan:
    """The plan of a model made from a store, cut where the store's chunks end, so that nearly each is read once.

    Its identity names the store by what was staged there, which outlives the store's files.
    """

    def banded(p: ParameterPlan) -> ParameterPlan:
        name = p.name if plan.outputs[p.output].in_model else f"{ADAPTER_GROUP}/{p.name}"
        tensor = catalog.tensors.get(name)
        if tensor is None or tensor.shape != p.source.view or p.quantized is not None:
            return p  # rows of a quantized one are encoded whole; a chunk at a border is read twice
        array = lay_out_array(name, tensor.dtype, tensor.shape)
        return replace(p, bands=Bands(array.band, array.run)) if array.chunks > 1 else p

    if catalog.staged is None:
        return plan
    identity = {**plan.identity, STORE_IDENTITY: catalog.staged.fingerprint}
    parameters = tuple(banded(p) for p in plan.parameters)
    return replace(plan, parameters=parameters, chunk_sums=catalog.chunk_sums, identity=identity)


def is_store(plan: Plan) -> bool:
    """True for the plan of a store."""
    return _STAGING in plan.identity


def _digest(parameters: Sequence[ParameterPlan], outputs: Sequence[OutputFile]) -> str:
    digest = hashlib.sha256()
    for p in parameters:
        digest.update(f"{p.name}\0{p.shape}\0{p.dtype}\0{p.output}\0{p.start}\0{p.bands}\n".encode())
    for o in outputs:
        digest.update(f"{o.name}\0{o.nbytes}\n".encode())
        digest.update(o.header)
    return digest.hexdigest()[:32]
