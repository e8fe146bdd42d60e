"""The device mesh inside a DTensor's pickle, of every torch that wrote one.

Facts (fsdp_formats.md section 2; seen in torch 2.1, 2.3, 2.4, 2.6, 2.9, 2.10, 2.13, read in 2.12):

    2.1 - 2.9   `mesh`: an int tensor with the ranks, a view with strides when the mesh is a slice
    2.10, 2.12  `_layout` {shape, stride} over `_flatten_rank_map`, a tuple of ints
    2.13        `_layout` {axes: ({shape, stride}, ...)}, and `_rank`

A sliced mesh keeps the whole rank map, and its layout covers a part of it; the translate that
holds the file's own rank is meant. Names of mesh dims are labels and decide nothing.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from merge_stream.containers.pickle_reader import Recorder, described
from merge_stream.containers.torch_tensor import PlainTensor, plain_tensor
from merge_stream.errors import CorruptCheckpointError

__all__ = ["Mesh", "decode_mesh"]

_MOST_RANKS = 1 << 20
_DAMAGED = "the file is damaged, or was written by a torch newer than this program knows"


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks of a mesh, row-major.

    `writer` is the range of torch versions whose pickles look like this, `order_unrecorded` true
    for those (2.1 to 2.3) that lose which of two splits of one dim came first.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    names: tuple[str, ...] = ()
    writer: str = ""
    order_unrecorded: bool = False

    def coordinates(self) -> np.ndarray:
        """Int [n, ndim]: which piece along each mesh dim the k-th rank holds.

        Pieces go by ascending rank within the group of a mesh dim (process groups are sorted), which
        is the place in the mesh but for meshes made by hand (seen: a mesh [3, 1, 0, 2] under FSDP2).
        """
        ranks = np.array(self.ranks, dtype=np.int64).reshape(self.shape)
        order = [ranks.argsort(axis=dim, kind="stable").argsort(axis=dim).reshape(-1) for dim in range(ranks.ndim)]
        return np.stack(order, axis=1)

    def __str__(self) -> str:
        sizes = " x ".join(map(str, self.shape))
        return f"{sizes} ({', '.join(self.names)})" if self.names else sizes


def decode_mesh(record: Any, rank: int, where: str, read_ints: Callable[[PlainTensor], list[int]]) -> Mesh:  # noqa: ANN401
    """The mesh that a DeviceMesh record means in the file of `rank`.

    `read_ints` reads the elements of a small int tensor of the same file (only the old forms need
    it). CorruptCheckpointError when the mesh contradicts itself or does not hold `rank` where it
    says it does, so that renamed rank files are found.
    """
    state = record.state if isinstance(record, Recorder) else None
    if not isinstance(state, dict):
        raise _damaged(where, "it has no state")
    if "_layout" in state:
        mesh = _from_layout(state, rank, where, read_ints)
    elif "mesh" in state:
        mesh = _from_tensor(state, where, read_ints)
    else:
        raise _damaged(where, f"it has neither `mesh` nor `_layout`, but {len(state)} other fields")
    if math.prod(mesh.shape) != len(mesh.ranks) or len(set(mesh.ranks)) != len(mesh.ranks) or min(mesh.ranks) < 0:
        raise _damaged(where, f"shape {mesh.shape} with ranks {mesh.ranks[:16]}")
    _check_own_place(state, mesh, rank, where)
    return mesh


def _from_tensor(state: dict[str, Any], where: str, read_ints: Callable[[PlainTensor], list[int]]) -> Mesh:
    view = plain_tensor(state["mesh"], "device mesh", where)
    if view is None or view.dtype.kind != "int" or not view.shape or not 0 < math.prod(view.shape) <= _MOST_RANKS:
        raise _damaged(where, "its ranks are no int tensor")
    if "_dim_group_names" in state:
        writer = "2.7 - 2.9"
    elif "_thread_id" in state:
        writer = "2.4" if "_parent_mesh" in state else "2.5 - 2.8"
    else:
        writer = "2.2 - 2.3" if "_flatten_mesh_list" in state else "2.1"
    ranks = tuple(read_ints(view))
    return Mesh(view.shape, ranks, _names(state.get("mesh_dim_names")), writer, "_thread_id" not in state)


def _from_layout(state: dict[str, Any], rank: int, where: str, read_ints: Callable[[PlainTensor], list[int]]) -> Mesh:
    layout = state["_layout"].state if isinstance(state["_layout"], Recorder) else None
    if not isinstance(layout, dict):
        raise _damaged(where, "its layout has no state")
    if "axes" in layout:
        parts = [axis.state for axis in layout["axes"] if isinstance(axis, Recorder) and isinstance(axis.state, dict)]
        axes = [(_flat(part.get("shape")), _flat(part.get("stride"))) for part in parts]
        writer = ">= 2.13"
    else:
        shape, stride = layout.get("shape"), layout.get("stride")
        if isinstance(shape, int):
            shape, stride = (shape,), (stride,)
        if not isinstance(shape, tuple) or not isinstance(stride, tuple) or len(shape) != len(stride):
            raise _damaged(where, f"layout {described(shape)} : {described(stride)}")
        axes = [(_flat(a), _flat(b)) for a, b in zip(shape, stride, strict=True)]
        writer = "2.10 - 2.12"
    sizes = tuple(math.prod(axis[0]) for axis in axes)
    # an axis of size one has no levels in torch 2.13: shape () and stride ()
    if not axes or any(len(a) != len(b) for a, b in axes) or not 0 < math.prod(sizes) <= _MOST_RANKS:
        raise _damaged(where, f"layout of sizes {sizes[:8]}")
    rank_map = _rank_map(state, where, read_ints)
    own = state.get("_rank")
    own = own if isinstance(own, int) else rank
    if own not in rank_map:
        raise _damaged(where, f"rank {own} is not among its ranks {rank_map[:16]}")
    place = rank_map.index(own)
    for size, stride in ((n, s) for a, b in axes for n, s in zip(a, b, strict=True)):
        if size < 1 or stride < 0:
            raise _damaged(where, f"layout of sizes {sizes[:8]}")
        place -= (place // stride % size) * stride if stride else 0
    ranks = [place + sum(offsets) for offsets in itertools.product(*(_offsets(a, b) for a, b in axes))]
    if min(ranks) < 0 or max(ranks) >= len(rank_map):
        raise _damaged(where, f"layout of sizes {sizes[:8]} reaches beyond {len(rank_map)} ranks")
    return Mesh(sizes, tuple(rank_map[k] for k in ranks), _names(state.get("_mesh_dim_names")), writer)


def _rank_map(state: dict[str, Any], where: str, read_ints: Callable[[PlainTensor], list[int]]) -> tuple[int, ...]:
    flat = state.get("_flatten_rank_map")
    if isinstance(flat, (tuple, list)) and flat and all(type(n) is int for n in flat):
        return tuple(flat)
    view = plain_tensor(state.get("_rank_map"), "device mesh", where)
    if view is None or view.dtype.kind != "int" or not 0 < math.prod(view.shape) <= _MOST_RANKS:
        raise _damaged(where, "it has no rank map")
    return tuple(read_ints(view))


@functools.lru_cache(maxsize=8)  # every rank's file has the same mesh
def _offsets(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    places = itertools.product(*map(range, shape))
    return tuple(sum(i * s for i, s in zip(index, stride, strict=True)) for index in places)


def _flat(value: object) -> tuple[int, ...]:
    """An int or (nested) tuple of ints, flattened."""
    if isinstance(value, tuple):
        return tuple(itertools.chain.from_iterable(map(_flat, value)))
    return (value,) if type(value) is int else ()


def _names(value: object) -> tuple[str, ...]:
    return tuple(n for n in value if isinstance(n, str)) if isinstance(value, (tuple, list)) else ()


def _check_own_place(state: dict[str, Any], mesh: Mesh, rank: int, where: str) -> None:
    own = state.get("_rank")
    if isinstance(own, int) and own != rank:
        msg = f"{where}: the file is named rank {rank}, but rank {own} wrote it"
        raise CorruptCheckpointError(msg, hint="rank files were renamed or mixed up; restore their names")
    if rank not in mesh.ranks:
        msg = f"{where}: rank {rank} is not in its device mesh of ranks {list(mesh.ranks)[:16]}"
        raise CorruptCheckpointError(msg, hint="rank files were renamed or come from two runs; restore their names")
    place = state.get("_coordinate_on_dim")
    if isinstance(place, (tuple, list)) and [type(k) for k in place] == [int] * len(mesh.shape):
        wanted = [int(k) for k in np.unravel_index(mesh.ranks.index(rank), mesh.shape)]
        if list(place) != wanted:
            msg = (
                f"{where}: rank {rank} stands at {wanted} of its device mesh, but the file was written at {list(place)}"
            )
            raise CorruptCheckpointError(msg, hint="rank files were renamed or mixed up; restore their names")


def _damaged(where: str, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{where}: the device mesh cannot be read: {what}", hint=_DAMAGED)
