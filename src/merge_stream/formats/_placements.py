"""From placements on a device mesh to the box of each rank: pure geometry.

Facts (fsdp_formats.md section 4, checked against real saves of torch 2.1 to 2.13):

- One split follows torch.chunk: pieces of ceil(L / n) rows, the last ones short or empty.
- Several splits of one tensor dim are applied one after another, in this order: `shard_order` of the
  spec where it is written (2.10 and later); else the mesh dims are walked from the right, a plain
  `Shard` goes to the front, a `_StridedShard(dim, split_factor=k)` behind the shortest prefix whose
  mesh sizes multiply to k. [_StridedShard(0, 2), Shard(0)] on (fsdp 4, tp 2): tp splits first.
- Replaying placements from left to right is right only where everything divides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from merge_stream.containers.pickle_reader import Recorder, described, dotted_name
from merge_stream.errors import CorruptCheckpointError, UnsupportedError
from merge_stream.formats._device_mesh import Mesh

__all__ = ["REPLICATE", "Boxes", "Placement", "ShardOrder", "boxes_on", "decode_placements", "execution_order"]


class Placement(NamedTuple):
    """`dim` that is split, or -1 for Replicate; `factor` of a strided split, or 0."""

    dim: int
    factor: int = 0

    def __str__(self) -> str:
        if self.dim < 0:
            return "Replicate()"
        return f"_StridedShard({self.dim}, {self.factor})" if self.factor else f"Shard({self.dim})"


REPLICATE = Placement(-1)
ShardOrder = tuple[tuple[int, tuple[int, ...]], ...]


class Boxes(NamedTuple):
    """Row k: the box that the k-th rank of the mesh holds; `first` is false for further copies."""

    start: np.ndarray
    stop: np.ndarray
    first: np.ndarray


def decode_placements(records: Any, mesh: Mesh, ndim: int, tensor: str, where: str) -> tuple[Placement, ...]:  # noqa: ANN401
    """Placements of a DTensorSpec, one for each mesh dim.

    UnsupportedError names tensor and placement for what is no split (Partial over several ranks).
    """
    if not isinstance(records, (tuple, list)) or len(records) > len(mesh.shape):
        msg = f"{where}: {tensor} has placements {described(records)} on a mesh of {len(mesh.shape)} dims"
        raise CorruptCheckpointError(msg, hint="the file is damaged: copy it again")
    # torch 2.3's FSDP2 on a 2-D mesh (HSDP) writes only the placement of the last mesh dim
    missing = len(mesh.shape) - len(records)
    if missing and not mesh.order_unrecorded:
        msg = f"{where}: {tensor} has {len(records)} placements on a mesh of {len(mesh.shape)} dims"
        raise CorruptCheckpointError(msg, hint="the file is damaged: copy it again")
    sizes = mesh.shape[missing:]
    found = [_placement(r, n, ndim, tensor, where) for r, n in zip(records, sizes, strict=True)]
    return (*(REPLICATE,) * missing, *found)


def _placement(record: object, size: int, ndim: int, tensor: str, where: str) -> Placement:
    kind = dotted_name(record).rpartition(".")[2]
    state = record.state if isinstance(record, Recorder) else None
    args = record.args if isinstance(record, Recorder) else ()
    fields = state if isinstance(state, dict) else dict(zip(("dim", "split_factor"), args, strict=False))
    dim, factor = fields.get("dim"), fields.get("split_factor", 0)
    if kind == "Replicate" or (size == 1 and kind not in ("Shard", "_StridedShard")):
        return REPLICATE
    if kind in ("Shard", "_StridedShard") and type(dim) is int and -ndim <= dim < ndim and type(factor) is int:
        return Placement(dim % ndim, factor if kind == "_StridedShard" else 0)
    detail = f"{kind}({', '.join(f'{k}={described(v)}' for k, v in list(fields.items())[:4] if v is not None)})"
    if "Partial" in kind:
        msg = f"{where}: {tensor} has the placement {detail}: each of {size} ranks holds a summand, not a part"
        raise UnsupportedError(msg, hint="reduce it before saving: tensor.redistribute(placements=[Replicate()])")
    msg = f"{where}: {tensor} has the placement {detail} on a tensor of {ndim} dims, which is not known"
    raise UnsupportedError(msg, hint="save with FSDP2, FSDP1 or parallelize_module, which write Shard and Replicate")


def execution_order(
    placements: Sequence[Placement], sizes: Sequence[int], shard_order: ShardOrder | None, *, last_first: bool = False
) -> dict[int, tuple[int, ...]] | None:
    """Tensor dim -> mesh dims in the order their splits were applied; None when it cannot be told.

    `last_first` reads several plain splits of one dim from the right (torch 2.3's FSDP2 + TP).
    """
    order: dict[int, list[int]] = {}
    for mesh_dim in range(len(placements) - 1, -1, -1):
        dim, factor = placements[mesh_dim]
        if dim < 0:
            continue
        line = order.setdefault(dim, [])
        if not factor:
            line.insert(len(line) if last_first else 0, mesh_dim)
            continue
        at, product = 0, 1
        while product != factor and at < len(line):
            product *= sizes[line[at]]
            at += 1
        if product != factor:
            return None
        line.insert(at, mesh_dim)
    if shard_order is not None:
        stated = {dim: mesh_dims for dim, mesh_dims in shard_order if mesh_dims}
        same = stated.keys() == order.keys() and all(sorted(stated[d]) == sorted(order[d]) for d in order)
        return stated if same else None
    return {dim: tuple(line) for dim, line in order.items()}


def boxes_on(mesh: Mesh, shape: Sequence[int], order: dict[int, tuple[int, ...]]) -> Boxes:
    """The boxes of all ranks of a mesh, row k for `mesh.ranks[k]`."""
    n = math.prod(mesh.shape)
    place = mesh.coordinates()
    start = np.zeros((n, len(shape)), dtype=np.int64)
    stop = np.broadcast_to(np.array(shape, dtype=np.int64), (n, len(shape))).copy()
    for dim, mesh_dims in order.items():
        low, high = start[:, dim], stop[:, dim]
        for mesh_dim in mesh_dims:
            piece = -(-(high - low) // mesh.shape[mesh_dim])
            low, high = (
                np.minimum(low + place[:, mesh_dim] * piece, high),
                np.minimum(low + (place[:, mesh_dim] + 1) * piece, high),
            )
        start[:, dim], stop[:, dim] = low, high
    split = {mesh_dim for mesh_dims in order.values() for mesh_dim in mesh_dims}
    others = [mesh_dim for mesh_dim in range(len(mesh.shape)) if mesh_dim not in split]
    return Boxes(start, stop, np.asarray(place[:, others].sum(axis=1) == 0))
