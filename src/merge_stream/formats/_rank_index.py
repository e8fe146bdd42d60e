"""Index of all rank files: for each tensor, who holds which box at which offset, in numbers.

Files come one after another; of each only numbers are kept. Ranks that hold a tensor in the same
way (same mesh, placements, shape, dtype) make one `Group`; what several groups of one name mean is
decided later (`_mesh_groups`).

    name -> Holders -> Group(layout, ranks, offsets)      layout: Layout on a mesh, or None (a whole copy)
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from merge_stream.containers.pickle_reader import Recorder, described, dotted_name
from merge_stream.containers.torch_file import TorchFile
from merge_stream.containers.torch_tensor import PlainTensor, locate, plain_tensor
from merge_stream.errors import CorruptCheckpointError, UnsupportedError
from merge_stream.formats._device_mesh import Mesh, decode_mesh
from merge_stream.formats._hidden_tensors import IN_LISTS, HiddenTensor, hidden_tensors, refuse_hidden_weights
from merge_stream.formats._placements import Boxes, Placement, ShardOrder, boxes_on, decode_placements, execution_order
from merge_stream.formats._sharded_tensor import all_boxes, global_shape, local_shards
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.box import Box
from merge_stream.tensors.dtype import DType, dtype_of_torch

__all__ = ["Addition", "Group", "Layout", "RankFile", "RankIndex"]

_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
_WRAPPER = "torch._utils._rebuild_wrapper_subclass"
_PARAMETER = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_DAMAGED = "the file is damaged, or was written by an unknown torch: copy it again"


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A way to place a tensor of `shape` on `mesh`: the box of each rank."""

    mesh: Mesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    boxes: Boxes
    place: dict[int, int]
    extents: list[tuple[int, ...]]

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.placements))}] on {self.mesh}"


@dataclass(slots=True, eq=False)
class Group:
    """Ranks that hold a tensor in the same way; parallel columns.

    `boxes` is set for ShardedTensors only (one box for each row), and `wanted` then has the boxes
    that all ranks together must hold. `crcs` are checksums of exactly the local bytes, or 0.
    """

    dtype: DType
    shape: tuple[int, ...]
    layout: Layout | None
    ranks: array[int] = field(default_factory=lambda: array("i"))
    offsets: array[int] = field(default_factory=lambda: array("q"))
    crcs: array[int] = field(default_factory=lambda: array("q"))
    boxes: list[Box] | None = None
    wanted: list[Box] = field(default_factory=list)

    def add(self, rank: int, offset: int, crc: int) -> None:
        """One more holder."""
        self.ranks.append(rank)
        self.offsets.append(offset)
        self.crcs.append(crc)


class Addition(NamedTuple):
    """A tensor that a file added to a group: byte offset, local shape, the storage that is exactly it (or None)."""

    group: Group
    offset: int
    local: tuple[int, ...]
    storage: str | None
    stored_as: str


@dataclass(frozen=True, slots=True, eq=False)
class RankFile:
    """An opened file of a rank: its `name` in the tree; `meshes` decoded so far, by record."""

    rank: int
    name: str
    file: TorchFile
    meshes: dict[int, Mesh] = field(default_factory=dict)


class RankIndex:
    """Accumulates rank files.

    `tensors` maps a name to its groups, in the order of first appearance; `ignored` counts by kind,
    `hidden` are tensors that have no name. Of the last file: `added` are its DTensors and plain tensors, `decoded` its
    mesh records, and `is_plain` is false when it held something else too.
    """

    def __init__(self, tree: ByteTree, *, tp_first: bool) -> None:
        self.tensors: dict[str, list[Group]] = {}
        self.ignored: Counter[str] = Counter()
        self.hidden: list[HiddenTensor] = []
        self.kinds: Counter[str] = Counter()
        self.meshes: dict[Mesh, Mesh] = {}
        self.added: list[Addition] = []
        self.decoded: list[tuple[Any, Mesh]] = []
        self.is_plain = True
        self._tree = tree
        self._tp_first = tp_first
        self._layouts: dict[Any, Layout] = {}

    def add_file(self, source: RankFile, values: Iterable[tuple[str, Any]]) -> None:
        """Take in one rank's file: (tensor name, value) pairs."""
        where = source.file.where
        tensor = ""
        self.added, self.decoded, self.is_plain = [], [], True
        try:
            for tensor, value in values:
                self._add(source, tensor, value)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            msg = f"{where}: the record of {tensor} is malformed ({type(error).__name__})"
            raise CorruptCheckpointError(msg, hint=_DAMAGED) from error

    def _add(self, source: RankFile, tensor: str, value: Any) -> None:  # noqa: ANN401 - any unpickled value
        where = source.file.where
        record = value
        while isinstance(record, Recorder) and record.dotted in _PARAMETER and record.args:
            record = record.args[0]
        wrapped = isinstance(record, Recorder) and record.dotted == _FROM_TYPE and len(record.args) == 4
        if wrapped and dotted_name(record.args[0]) == _WRAPPER:
            kind = dotted_name(record.args[1]).rpartition(".")[2]
            if kind == "DTensor":
                self._add_dtensor(source, tensor, record)
            elif kind == "ShardedTensor":
                self.is_plain = False
                self._add_sharded(source, tensor, record)
            else:
                msg = f"{where}: {tensor} is a {dotted_name(record.args[1])}, a tensor subclass without a reader"
                raise UnsupportedError(msg, hint="turn it into a plain tensor or DTensor before saving")
            self.kinds[kind] += 1
            return
        plain = plain_tensor(record, tensor, where)
        if plain is not None:
            self._take(self._group(tensor, plain.dtype, plain.shape, None), source, plain, tensor, "plain")
            self.kinds["plain"] += 1
        elif isinstance(record, Recorder):
            msg = f"{where}: {tensor} is a {record.dotted}, not a tensor"
            raise UnsupportedError(msg, hint="leave it out of the state dict, or save it as a plain tensor")
        else:
            self.add_hidden(value, tensor, where)

    def add_hidden(self, value: Any, at: str, where: str) -> None:  # noqa: ANN401 - any unpickled value
        """Count a value that is no tensor; UnsupportedError when weights lie inside it."""
        self.is_plain = False
        found = hidden_tensors(value, at, where)
        refuse_hidden_weights(found, where)
        self.hidden += (tensor for tensor in found if tensor not in self.hidden)
        self.ignored[IN_LISTS if found else "values that are no tensors"] += len(found) or 1

    def _group(self, tensor: str, dtype: DType, shape: tuple[int, ...], layout: Layout | None) -> Group:
        groups = self.tensors.setdefault(tensor, [])
        for group in groups:
            if group.layout is layout and group.dtype is dtype and group.shape == shape and group.boxes is None:
                return group
        groups.append(Group(dtype, shape, layout))
        return groups[-1]

    def _add_dtensor(self, source: RankFile, tensor: str, record: Recorder) -> None:
        _, _, args, state = record.args
        file, rank = source.file, source.rank
        if type(state) is tuple and len(state) == 2:
            state = state[1]
        if type(state) is not dict or type(args) is not tuple or len(args) < 3 or type(args[2]) is not tuple:
            raise CorruptCheckpointError(f"{file.where}: the DTensor {tensor} is malformed", hint=_DAMAGED)
        shape: tuple[int, ...] = args[2]
        if any(type(n) is not int or n < 0 for n in shape):
            msg = f"{file.where}: the DTensor {tensor} has the shape {described(shape)}"
            raise CorruptCheckpointError(msg, hint=_DAMAGED)
        local = plain_tensor(state.get("_local_tensor"), tensor, file.where)
        spec = state.get("_spec")
        fields = spec.state if isinstance(spec, Recorder) else None
        if local is None or type(fields) is not dict:
            raise CorruptCheckpointError(f"{file.where}: the DTensor {tensor} is malformed", hint=_DAMAGED)
        named = fields.get("mesh")
        mesh = source.meshes.get(id(named))
        if mesh is None:
            mesh = source.meshes[id(named)] = self.mesh_of(source, named)
            self.decoded.append((named, mesh))
        placements = decode_placements(fields.get("placements"), mesh, len(shape), tensor, file.where)
        shard_order = _shard_order(fields.get("shard_order"))
        key = (id(mesh), placements, shard_order, shape)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._new_layout(mesh, placements, shard_order, shape, f"{file.where}: {tensor}")
            self._layouts[key] = layout
        wanted = layout.extents[layout.place[rank]]
        if local.shape != wanted:
            msg = (
                f"{file.where}: rank {rank} holds {list(local.shape)} of {tensor} {list(shape)}, "
                f"but {layout} gives it {list(wanted)}"
            )
            hint = "the order of the splits is not what this program takes it for; please report the torch version"
            raise CorruptCheckpointError(msg, hint=hint)
        self._take(self._group(tensor, local.dtype, shape, layout), source, local, tensor, "DTensor")

    def _take(self, group: Group, source: RankFile, local: PlainTensor, tensor: str, stored_as: str) -> None:
        offset, sum_of = locate(local, source.file, tensor), _whole_storage(local, source.file)
        group.add(source.rank, offset, source.file.storages[sum_of].crc32 if sum_of is not None else 0)
        self.added.append(Addition(group, offset, local.shape, sum_of, stored_as))

    def mesh_of(self, source: RankFile, record: Any) -> Mesh:  # noqa: ANN401 - any unpickled value
        """The mesh that a record in the file means, the same object for equal ones; the errors of `decode_mesh`."""
        mesh = decode_mesh(record, source.rank, source.file.where, _int_reader(self._tree, source))
        return self.meshes.setdefault(mesh, mesh)

    def _new_layout(
        self,
        mesh: Mesh,
        placements: tuple[Placement, ...],
        shard_order: ShardOrder | None,
        shape: tuple[int, ...],
        subject: str,
    ) -> Layout:
        split = [p.dim for p, n in zip(placements, mesh.shape, strict=True) if p.dim >= 0 and n > 1]
        twice = mesh.order_unrecorded and shard_order is None and len(set(split)) < len(split)
        if twice and not self._tp_first:
            msg = (
                f"{subject} is split twice on dim {max(split, key=split.count)} by a torch before 2.4, which does not "
                "record that tensor parallelism split first; read as it stands, rows would be silently permuted"
            )
            raise UnsupportedError(msg, hint="for FSDP2 + tensor parallelism of torch 2.2 and 2.3 add --tp-first")
        order = execution_order(placements, mesh.shape, shard_order, last_first=twice)
        if order is None:
            text = f"[{', '.join(map(str, placements))}] on {mesh}, shard order {shard_order}"
            msg = f"{subject}: the order of its splits cannot be told: {text}"
            raise UnsupportedError(msg, hint="save it as a full state dict, or with plain Shard placements")
        boxes = boxes_on(mesh, shape, order)
        extents = [tuple(row) for row in (boxes.stop - boxes.start).tolist()]
        return Layout(mesh, placements, shape, boxes, {rank: k for k, rank in enumerate(mesh.ranks)}, extents)

    def _add_sharded(self, source: RankFile, tensor: str, record: Recorder) -> None:
        state, file, rank = record.args[3], source.file, source.rank
        if type(state) is not tuple:
            raise CorruptCheckpointError(f"{file.where}: the ShardedTensor {tensor} is malformed", hint=_DAMAGED)
        shards = local_shards(state, tensor, file.where)
        shape = global_shape(state, tensor, file.where)
        groups = self.tensors.setdefault(tensor, [])
        group = next((g for g in groups if g.boxes is not None and g.shape == shape), None)
        if group is None:
            dtype = shards[0].tensor.dtype if shards else _sharded_dtype(record, tensor, file.where)
            group = Group(dtype, shape, None, boxes=[], wanted=all_boxes(state, tensor, file.where))
            groups.append(group)
        for box, local in shards:
            if local.dtype != group.dtype:
                msg = f"{file.where}: {tensor} is {local.dtype} on rank {rank}, but {group.dtype} on another rank"
                raise CorruptCheckpointError(msg, hint="the rank files are of different runs")
            if box.size and group.boxes is not None:
                group.boxes.append(box)
                group.add(rank, locate(local, file, tensor), _crc(local, file))


def _sharded_dtype(record: Recorder, tensor: str, where: str) -> DType:
    args = record.args[2]
    name = dotted_name(args[1]) if type(args) is tuple and len(args) > 1 else ""
    dtype = dtype_of_torch(name.removeprefix("torch."))
    if dtype is None:
        raise UnsupportedError(f"{where}: {tensor} has the type {name}, which safetensors cannot hold")
    return dtype


def _whole_storage(view: PlainTensor, file: TorchFile) -> str | None:
    """The storage whose bytes are exactly the view's, or None."""
    storage = file.storages.get(view.storage)
    if storage is None or view.offset:
        return None
    size = view.dtype.itemsize
    for extent in view.shape:
        size *= extent
    return view.storage if size == storage.nbytes else None


def _crc(view: PlainTensor, file: TorchFile) -> int:
    """Checksum of exactly the view's bytes where the file has it, else 0."""
    whole = _whole_storage(view, file)
    return file.storages[whole].crc32 if whole is not None else 0


def _shard_order(value: Any) -> ShardOrder | None:  # noqa: ANN401
    """Entries (tensor dim, mesh dims) of a spec's shard_order, or None where it is not written."""
    if not isinstance(value, (tuple, list)):
        return None
    entries = []
    for entry in value:
        pair = entry.args if isinstance(entry, Recorder) else entry
        if type(pair) is not tuple or len(pair) != 2 or type(pair[1]) is not tuple:
            raise TypeError("shard_order")
        if any(type(n) is not int for n in (pair[0], *pair[1])):
            raise TypeError("shard_order")
        entries.append((pair[0], pair[1]))
    return tuple(entries)


def _int_reader(tree: ByteTree, source: RankFile) -> Callable[[PlainTensor], list[int]]:
    file = source.file

    def read(view: PlainTensor) -> list[int]:
        storage = file.storages.get(view.storage)
        if storage is None or storage.nbytes > 1 << 23:
            raise CorruptCheckpointError(f"{file.where}: the ranks of a device mesh are missing", hint=_DAMAGED)
        kind = np.dtype(view.dtype.torch_name)
        flat = np.frombuffer(tree.read(source.name, storage.offset, storage.nbytes), kind)
        last = view.offset + sum((n - 1) * s for n, s in zip(view.shape, view.stride, strict=True))
        if last >= len(flat):
            raise CorruptCheckpointError(f"{file.where}: the ranks of a device mesh are cut", hint=_DAMAGED)
        strides = [s * kind.itemsize for s in view.stride]
        ranks = np.lib.stride_tricks.as_strided(flat[view.offset :], view.shape, strides)
        return [int(n) for n in ranks.reshape(-1)]

    return read
