"""Checkpoints of any mesh in one process: real DTensors under a fake process group, real torch.save files.

`write_ranks` writes verl's rank files, `write_dcp` a DCP folder, `write_bin` one whole state dict, `write_hub`
safetensors files. What a rank holds is found here by the definition of sharding (indices of each dim, cut again
and again), not by torch's own arithmetic and not by the code under test.

With `sparse` the tensors have their full size on disk but hold no data: the files are sparse, and read as zeros.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import pathlib
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

__all__ = [
    "Spread",
    "fake_group",
    "local_indices",
    "write_bin",
    "write_config",
    "write_dcp",
    "write_hub",
    "write_ranks",
]


@dataclasses.dataclass(frozen=True)
class Spread:
    """A tensor on a mesh: one placement for each mesh dim.

    `order` lists the mesh dims in the order in which they split the tensor, outermost first (left to right unless
    said otherwise; FSDP2 over TP splits by the tp dim first, which torch writes as a strided shard).
    """

    value: torch.Tensor
    placements: Sequence[Any]
    order: Sequence[int] | None = None


@contextlib.contextmanager
def fake_group(rank: int, world: int) -> Iterator[None]:
    """This process is `rank` of a group of `world` that never speaks."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()


def local_indices(spread: Spread, mesh: Sequence[int], coordinate: Sequence[int]) -> list[np.ndarray]:
    """The indices of each tensor dim that the rank at `coordinate` holds."""
    indices = [np.arange(n) for n in spread.value.shape]
    for axis in spread.order or range(len(mesh)):
        dim = getattr(spread.placements[axis], "dim", None)
        if dim is None:
            continue
        size = -(-len(indices[dim]) // mesh[axis])
        indices[dim] = indices[dim][coordinate[axis] * size : (coordinate[axis] + 1) * size]
    return indices


def write_ranks(
    folder: pathlib.Path,
    mesh: Sequence[int],
    tensors: Mapping[str, Spread | torch.Tensor],
    *,
    names: Sequence[str] | None = ("fsdp", "tp"),
    config: Mapping[str, Any] | None = None,
    sparse: bool = False,
    fsdp_config: bool = True,
    changed: Mapping[int, Mapping[str, torch.Tensor]] | None = None,
) -> pathlib.Path:
    """`model_world_size_W_rank_R.pt` for each rank; plain tensors are saved whole by every rank.

    `changed` replaces plain tensors, or the local part of spread ones, on single ranks.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    folder.mkdir(parents=True, exist_ok=True)
    world = math.prod(mesh)
    for rank, coordinate in enumerate(itertools.product(*map(range, mesh))):
        mine = (changed or {}).get(rank, {})
        with fake_group(rank, world):
            layout = torch.arange(world).reshape(tuple(mesh))
            device_mesh = DeviceMesh("cpu", layout, mesh_dim_names=tuple(names[: len(mesh)]) if names else None)
            with _skipping(sparse):
                state: dict[str, torch.Tensor] = {}
                for name, entry in tensors.items():
                    if isinstance(entry, torch.Tensor):
                        state[name] = mine.get(name, entry)
                        continue
                    local = _part(entry.value, local_indices(entry, mesh, coordinate), sparse=sparse)
                    state[name] = DTensor.from_local(
                        mine.get(name, local),
                        device_mesh,
                        list(entry.placements),
                        run_check=False,
                        shape=entry.value.shape,
                        stride=_strides(entry.value.shape),
                    )
                torch.save(state, folder / f"model_world_size_{world}_rank_{rank}.pt")
    if fsdp_config:
        (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world}))
    if config is not None:
        write_config(folder / "huggingface", config)
    return folder


def write_dcp(
    folder: pathlib.Path, world: int, tensors: Mapping[str, torch.Tensor], *, dim: int = 0, sparse: bool = False
) -> pathlib.Path:
    """A DCP folder as FSDP2 ranks write it: each tensor cut along `dim` (vectors along 0), one file a shard."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    folder.mkdir(parents=True, exist_ok=True)
    entries, places = {}, {}
    for number, (name, value) in enumerate(tensors.items()):
        axis = min(dim, value.ndim - 1)
        size = -(-value.shape[axis] // world)
        chunks = []
        for rank in range(world):
            low, high = min(rank * size, value.shape[axis]), min((rank + 1) * size, value.shape[axis])
            if low == high:
                continue
            start = torch.Size([low if k == axis else 0 for k in range(value.ndim)])
            indices = [np.arange(low, high) if k == axis else np.arange(n) for k, n in enumerate(value.shape)]
            file = f"__{rank}_{number}.distcp"
            with _skipping(sparse):
                torch.save(_part(value, indices, sparse=sparse), folder / file)
            sizes = torch.Size([len(i) for i in indices])
            chunks.append(ChunkStorageMetadata(start, sizes))
            nbytes = (folder / file).stat().st_size
            places[MetadataIndex(name, start, len(chunks) - 1)] = _StorageInfo(file, 0, nbytes)
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.shape, chunks)
    with (folder / ".metadata").open("wb") as file_object:
        pickle.dump(Metadata(entries, storage_data=places), file_object)
    return folder


def write_bin(
    path: pathlib.Path, tensors: Mapping[str, torch.Tensor], *, sparse: bool = False, legacy: bool = False
) -> pathlib.Path:
    """One whole state dict."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _skipping(sparse):
        state = {
            name: _part(value, [np.arange(n) for n in value.shape], sparse=sparse) for name, value in tensors.items()
        }
        torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    return path.parent


def write_hub(
    folder: pathlib.Path, tensors: Mapping[str, torch.Tensor], *, config: Mapping[str, Any] | None = None
) -> pathlib.Path:
    """model.safetensors; tensors on the meta device become holes."""
    words = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, value in tensors.items():
        nbytes = value.numel() * value.element_size()
        header[name] = {"dtype": words[value.dtype], "shape": list(value.shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, value in tensors.items():
            file.seek(8 + len(text) + header[name]["data_offsets"][0])
            if value.device.type != "meta":
                file.write(value.contiguous().view(torch.uint8).numpy().tobytes())
        file.truncate(8 + len(text) + at)
    if config is not None:
        write_config(folder, config)
    return folder


def write_config(folder: pathlib.Path, config: Mapping[str, Any]) -> None:
    """config.json and a tokenizer stub."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE"}}\n')


@contextlib.contextmanager
def _skipping(sparse: bool) -> Iterator[None]:
    """With `sparse`: tensors made inside are fake, and torch.save leaves holes for their data."""
    if not sparse:
        yield
        return
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        yield


def _part(value: torch.Tensor, indices: Sequence[np.ndarray], *, sparse: bool) -> torch.Tensor:
    """The region of `value` at `indices`, with a storage of its own."""
    if sparse:
        return torch.empty([len(i) for i in indices], dtype=value.dtype)
    for dim, wanted in enumerate(indices):
        value = value.index_select(dim, torch.from_numpy(wanted))
    return value.clone(memory_format=torch.contiguous_format)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))
