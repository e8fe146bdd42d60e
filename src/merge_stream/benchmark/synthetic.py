"""Synthetic sharded checkpoints: real pickles of the trainers' classes for any world size, made in one process.

Every rank file is written by `torch.save` from DTensors that stand on a real DeviceMesh of a fake process
group, so a reader meets exactly what a trainer's ranks would have left: names, classes, meshes, placements,
padded storages, checksums. Only the values are made up (`benchmark.values`), and they can be made again for any
region, so a merge can be checked without keeping a second copy.

    fsdp2    verl rank files, Shard(0), padded storages as FSDP2 keeps them
    shard1   the same with Shard(1) wherever the ranks divide dim 1 (verl's placement function)
    hsdp     2 replicas x ranks/2 shards, mesh ("ddp", "fsdp")
    tp       ranks/2 x 2, mesh ("fsdp", "tp"): strided shards, row and column parallel, norms on the sub-mesh
    dcp      a torch.distributed.checkpoint folder of the fsdp2 state dict, by torch's own planner and writer
    full     FULL_STATE_DICT: one pytorch_model.bin

Memory: about 350 MB (torch) + one rank's share. `full` is written in place, region by region.

    python -m merge_stream.benchmark.synthetic OUT --shape llama-1b --ranks 8 --layout fsdp2 --dtype float32
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import struct
import sys
import time
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, get_args

import numpy as np

from merge_stream.benchmark.shapes import SHAPES, Model, model_of
from merge_stream.benchmark.values import Raw, Values

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["Layout", "Synthetic", "as_rank", "make_checkpoint"]

Layout = Literal["fsdp2", "shard1", "hsdp", "tp", "dcp", "full"]
_REPLICAS = 2  # of layout hsdp
_TP = 2  # tensor parallel size of layout tp
_PIECE_BYTES = 4 << 20
_SPLIT_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_SPLIT_BY_COLUMNS = ("o_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A checkpoint that was made: what is in it, and the values a merge of it must give."""

    folder: pathlib.Path
    model: Model
    values: Values
    nbytes: int

    def expected(self, name: str) -> np.ndarray[Any, Any]:
        """All of the parameter `name` as raw unsigned integers (a tied one has the values of its other end)."""
        return self.values.whole(self.model.tied.get(name, name), self.model.parameters[name])


@dataclass(frozen=True, slots=True)
class _Split:
    """One cut of a parameter: `tensor_dim` in `ways` parts, of which `index` is ours."""

    tensor_dim: int
    ways: int
    index: int


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where one rank's part of a parameter lies: the mesh, its placements, and the cuts in the order they were made."""

    mesh: Any
    placements: tuple[Any, ...]
    cuts: tuple[_Split, ...]

    def region(self, shape: Sequence[int]) -> tuple[list[int], list[int]]:
        start, stop = [0] * len(shape), list(shape)
        for cut in self.cuts:
            d, length = cut.tensor_dim, stop[cut.tensor_dim] - start[cut.tensor_dim]
            step = -(-length // cut.ways)  # torch.chunk's rule
            start[d], stop[d] = (
                start[d] + min(cut.index * step, length),
                start[d] + min((cut.index + 1) * step, length),
            )
        return start, stop


def make_checkpoint(
    out: str | pathlib.Path,
    *,
    shape: str,
    ranks: int,
    layout: Layout,
    dtype: str = "float32",
    scale: float = 1.0,
    root: str = "",
) -> Synthetic:
    """Write a checkpoint into the new folder `out`; ValueError when the layout does not go with the ranks.

    `root` of layout dcp: the key that holds the model ("model" as accelerate saves it); without, it is the top.
    """
    values = Values(dtype)
    model = model_of(shape, scale=scale, itemsize=values.itemsize)
    if layout in ("hsdp", "tp") and (ranks % 2 or ranks < 2):
        msg = f"layout {layout} needs an even number of ranks, not {ranks}"
        raise ValueError(msg)
    folder = pathlib.Path(out)
    folder.mkdir(parents=True)
    if layout == "full":
        _write_full(folder / "pytorch_model.bin", model, values, dtype)
        side = folder
    elif layout == "dcp":
        _write_dcp(folder, model, values, dtype=dtype, ranks=ranks, root=root)
        side = folder / "huggingface"
    else:
        _write_rank_files(folder, model, values, dtype=dtype, ranks=ranks, layout=layout)
        (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}, indent=4))
        side = folder / "huggingface"
    side.mkdir(exist_ok=True)
    config = {**model.config, "torch_dtype": dtype}
    (side / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    nbytes = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    return Synthetic(folder, model, values, nbytes)


def _write_rank_files(
    folder: pathlib.Path, model: Model, values: Values, *, dtype: str, ranks: int, layout: str
) -> None:
    import torch

    for rank in range(ranks):
        with as_rank(rank, ranks):
            place = _placer(layout, ranks)
            state: OrderedDict[str, torch.Tensor] = OrderedDict()
            for name, shape in model.parameters.items():
                if name in model.tied:
                    state[name] = state[model.tied[name]]
                    continue
                placed = place(name, shape)
                local = _local_tensor(name, shape, placed, values, dtype)
                state[name] = _dtensor(local, shape, placed)
            torch.save(state, folder / f"model_world_size_{ranks}_rank_{rank}.pt")


def _local_tensor(name: str, shape: tuple[int, ...], placed: _Placed, values: Values, dtype: str) -> torch.Tensor:
    """The rank's values; a short last shard is a view of a padded storage, as FSDP2 keeps it."""
    import torch

    start, stop = placed.region(shape)
    box = values.box(name, shape, start, stop)
    if len(placed.cuts) == 1 and placed.cuts[0].tensor_dim == 0:
        rows = -(-shape[0] // placed.cuts[0].ways)
        if rows > box.shape[0]:
            padded = np.zeros((rows, *shape[1:]), box.dtype)
            padded[: box.shape[0]] = box
            return _as_torch(padded, dtype)[: box.shape[0]]
    return _as_torch(box, dtype).view(torch.Size(box.shape))


def _as_torch(raw: np.ndarray[Any, Any], dtype: str) -> torch.Tensor:
    import torch

    signed = raw.view(np.int32 if raw.itemsize == 4 else np.int16)
    tensor = torch.from_numpy(signed.reshape(-1)).view(getattr(torch, dtype))
    return tensor.view(raw.shape)


def _dtensor(local: torch.Tensor, shape: tuple[int, ...], placed: _Placed) -> torch.Tensor:
    """A DTensor as FSDP2 and TP build it, from a spec; no communication."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    meta = TensorMeta(torch.Size(shape), tuple(strides), local.dtype)
    spec = DTensorSpec(placed.mesh, placed.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[None]:
    """Be one rank of a process group that talks to nobody."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _placer(layout: str, ranks: int) -> Callable[[str, tuple[int, ...]], _Placed]:
    """How the current rank's parameters are placed."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if layout in ("fsdp2", "dcp", "shard1"):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        rank = mesh.get_local_rank()

        def one_dim(_name: str, shape: tuple[int, ...]) -> _Placed:
            d = 1 if layout == "shard1" and len(shape) > 1 and shape[1] % ranks == 0 else 0
            return _Placed(mesh, (Shard(d),), (_Split(d, ranks, rank),))

        return one_dim
    if layout == "hsdp":
        per_replica = ranks // _REPLICAS
        mesh = init_device_mesh("cpu", (_REPLICAS, per_replica), mesh_dim_names=("ddp", "fsdp"))
        index = mesh.get_local_rank("fsdp")

        def replicated(_name: str, _shape: tuple[int, ...]) -> _Placed:
            return _Placed(mesh, (Replicate(), Shard(0)), (_Split(0, per_replica, index),))

        return replicated
    fsdp = ranks // _TP
    mesh = init_device_mesh("cpu", (fsdp, _TP), mesh_dim_names=("fsdp", "tp"))
    sub = mesh["fsdp"]
    f, t = mesh.get_local_rank("fsdp"), mesh.get_local_rank("tp")

    def two_dims(name: str, shape: tuple[int, ...]) -> _Placed:
        owner = name.split(".")[-2]
        if owner in _SPLIT_BY_ROWS and shape[0] % _TP == 0:
            # Both cuts on dim 0: tensor parallelism cut first, which the placement says by its split factor.
            placements = (_StridedShard(0, split_factor=_TP), Shard(0))
            return _Placed(mesh, placements, (_Split(0, _TP, t), _Split(0, fsdp, f)))
        if owner in _SPLIT_BY_COLUMNS and len(shape) > 1 and shape[1] % _TP == 0:
            return _Placed(mesh, (Shard(0), Shard(1)), (_Split(1, _TP, t), _Split(0, fsdp, f)))
        return _Placed(sub, (Shard(0),), (_Split(0, fsdp, f),))

    return two_dims


def _write_dcp(folder: pathlib.Path, model: Model, values: Values, *, dtype: str, ranks: int, root: str) -> None:
    """What `dcp.save` does on `ranks` ranks, each step for all ranks in turn; data is made when it is written."""
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    class LazyPlanner(DefaultSavePlanner):
        """Plans on tensors without data, and makes the data of a chunk when the writer asks for it."""

        def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
            assert write_item.tensor_data is not None
            chunk, name = write_item.tensor_data.chunk, write_item.index.fqn.removeprefix(f"{root}." if root else "")
            start, stop = chunk.offsets, [o + s for o, s in zip(chunk.offsets, chunk.sizes, strict=True)]
            box = values.box(model.tied.get(name, name), model.parameters[name], start, stop)
            return _as_torch(box, dtype)

    def state_of() -> dict[str, Any]:
        place = _placer("dcp", ranks)
        state = {}
        for name, shape in model.parameters.items():
            placed = place(name, shape)
            start, stop = placed.region(shape)
            size = [b - a for a, b in zip(start, stop, strict=True)]
            local = torch.empty(size, dtype=getattr(torch, dtype), device="meta")
            state[name] = _dtensor(local, shape, placed)
        return {root: state} if root else state

    writer = FileSystemWriter(folder, sync_files=False)
    planners, plans = [], []
    for rank in range(ranks):
        with as_rank(rank, ranks):
            planner = LazyPlanner()
            planner.set_up_planner(state_of(), writer.storage_meta(), is_coordinator=rank == 0)
            writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
            plans.append(writer.prepare_local_plan(planner.create_local_plan()))
            planners.append(planner)
    with as_rank(0, ranks):
        plans, metadata = planners[0].create_global_plan(plans)
        plans = writer.prepare_global_plan(plans)
    results = []
    for rank, (planner, plan) in enumerate(zip(planners, plans, strict=True)):
        with as_rank(rank, ranks):
            results.append(writer.write_data(planner.finish_plan(plan), planner).wait())
    writer.finish(metadata, results)


def _write_full(path: pathlib.Path, model: Model, values: Values, dtype: str) -> None:
    """Save tensors without data, then write the data where torch left room for it, then the checksums."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    state: OrderedDict[str, torch.Tensor] = OrderedDict()
    with FakeTensorMode():
        for name, shape in model.parameters.items():
            tied = model.tied.get(name)
            state[name] = state[tied] if tied else torch.empty(shape, dtype=getattr(torch, dtype))
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(state, path)
    with path.open("r+b") as file:
        records = _records(path)
        names = [name for name in model.parameters if name not in model.tied]
        if len(records) != len(names):
            msg = f"torch wrote {len(records)} storages for {len(names)} parameters"
            raise RuntimeError(msg)
        for key, name in enumerate(names):
            _fill(file, records[key], name, model.parameters[name], values)


@dataclass(frozen=True, slots=True)
class _Record:
    """A member of a torch zip: where its data is, and where its checksum stands in the zip's directory."""

    offset: int
    nbytes: int
    checksum_offset: int


def _records(path: pathlib.Path) -> Mapping[int, _Record]:
    """The storages by their key."""
    found = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        at = archive.start_dir
        for info in archive.infolist():
            file.seek(at)
            sizes = struct.unpack("<3H", file.read(46)[28:34])
            file.seek(info.header_offset)
            name_length, extra_length = struct.unpack("<2H", file.read(30)[26:30])
            offset = info.header_offset + 30 + name_length + extra_length
            folder, _, key = info.filename.rpartition("/")
            if folder.endswith("/data"):
                found[int(key)] = _Record(offset, info.file_size, at + 16)
            at += 46 + sum(sizes)
    return found


def _fill(file: BinaryIO, record: _Record, name: str, shape: tuple[int, ...], values: Values) -> None:
    total = int(np.prod(shape, dtype=np.int64))
    if total * values.itemsize != record.nbytes:
        msg = f"{name}: torch left room for {record.nbytes} bytes, {total * values.itemsize} are needed"
        raise RuntimeError(msg)
    step = _PIECE_BYTES // values.itemsize
    piece: Raw = np.empty(step, np.uint32) if values.itemsize == 4 else np.empty(step, np.uint16)
    checksum = 0
    file.seek(record.offset)
    for start in range(0, total, step):
        part = piece[: min(step, total - start)]
        values.flat(name, start, part)
        checksum = zlib.crc32(part.data, checksum)
        file.write(part.data)
    descriptor = file.tell()
    if file.read(4) == b"PK\x07\x08":
        file.seek(descriptor + 4)
        file.write(struct.pack("<I", checksum))
    file.seek(record.checksum_offset)
    file.write(struct.pack("<I", checksum))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", help="new folder")
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layout", choices=get_args(Layout), default="fsdp2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--scale", type=float, default=1.0, help="layers and vocabulary, or bytes, times this")
    given = parser.parse_args(arguments)
    began = time.perf_counter()
    try:
        made = make_checkpoint(
            given.out,
            shape=given.shape,
            ranks=given.ranks,
            layout=given.layout,
            dtype=given.dtype,
            scale=given.scale,
        )
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"{made.folder}: {given.layout}, {given.ranks} ranks, {len(made.model.parameters)} parameters, "
        f"{made.nbytes / 1e9:.3f} GB in {time.perf_counter() - began:.1f} s"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
