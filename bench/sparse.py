"""Checkpoints of any size on a small disk: real headers and pickles of every rank, holes where the values would be.

Rank files are written by `torch.save` from DTensors on a real DeviceMesh of a fake process group, as in
`merge_stream.benchmark.synthetic`, but without data (`torch.serialization.skip_data`): the file has its true length,
and nothing but its records takes blocks. A Megatron `torch_dist` folder has torch's own pickled Metadata, and each
chunk is a real torch.save file, written once for each shape and put at each of its places.

    python -m bench.sparse OUT --shape llama-405b --ranks 512

Takes about 0.25 ms and 4.5 KB of disk for each tensor of each rank. Reading them back gives zeros.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import pathlib
import struct
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from merge_stream.benchmark.shapes import PLANNED, Model, planned_model
from merge_stream.benchmark.synthetic import as_rank

if TYPE_CHECKING:
    import torch

__all__ = ["make_sparse_megatron", "make_sparse_ranks"]

_TP, _PP, _EP = 8, 16, 32


def make_sparse_ranks(
    folder: pathlib.Path, shape: str, ranks: int, *, layers: int | None = None, processes: int | None = None
) -> Model:
    """Verl rank files (FSDP2, Shard(0), bf16) of the whole model, values left out; the folder must be new."""
    model = planned_model(shape, layers=layers)
    (folder / "huggingface").mkdir(parents=True)
    processes = processes or len(os.sched_getaffinity(0))
    todo = [range(k, ranks, processes) for k in range(min(processes, ranks))]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(len(todo), mp_context=context) as pool:
        jobs = [pool.submit(_write_ranks, str(folder), shape, layers, ranks, list(mine)) for mine in todo]
        for job in jobs:
            job.result()
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
    config = {**model.config, "torch_dtype": "bfloat16"}
    (folder / "huggingface" / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return model


def _write_ranks(folder: str, shape: str, layers: int | None, ranks: int, mine: Sequence[int]) -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    torch.set_num_threads(1)
    model = planned_model(shape, layers=layers)
    for rank in mine:
        with as_rank(rank, ranks):
            mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
            state = {}
            with FakeTensorMode():
                for name, size in model.parameters.items():
                    step = -(-size[0] // ranks)
                    rows = min(size[0], (rank + 1) * step) - min(size[0], rank * step)
                    strides = [1] * len(size)
                    for d in range(len(size) - 2, -1, -1):
                        strides[d] = strides[d + 1] * size[d + 1]
                    meta = TensorMeta(torch.Size(size), tuple(strides), torch.bfloat16)
                    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
                    local = torch.empty((rows, *size[1:]), dtype=torch.bfloat16)
                    state[name] = DTensor(local, spec, requires_grad=False)
                with torch.serialization.skip_data(materialize_fake_tensors=True):
                    torch.save(state, f"{folder}/model_world_size_{ranks}_rank_{rank}.pt")


def make_sparse_megatron(folder: pathlib.Path, *, layers: int = 61) -> int:
    """A `torch_dist` folder of DeepSeek-V3 with TP 8, PP 16, EP 32, and its config.json in `folder`/hf; the chunks.

    Keys, axes and chunks are those of megatron-core 0.19 (tests/data/megatron): one key for each layer, experts
    stacked in one tensor of which each rank writes its own, gate and up apart.
    """
    import pickle

    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    place = folder / "ckpt" / "iter_0000100"
    place.mkdir(parents=True)
    ends: dict[tuple[tuple[int, ...], torch.dtype], tuple[bytes, int, bytes]] = {}
    sizes: dict[str, int] = {}
    entries: dict[str, TensorStorageMetadata] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for key, shape, dtype, pieces in _megatron_tensors(layers):
        listed = []
        for number, (offset, size, rank) in enumerate(pieces):
            if (size, dtype) not in ends:
                ends[size, dtype] = _around(folder, size, dtype)
            head, nbytes, tail = ends[size, dtype]
            name = f"__{rank}_0.distcp"
            at, length = sizes.get(name, 0), len(head) + nbytes + len(tail)
            with (place / name).open("r+b" if at else "wb") as file:
                os.pwrite(file.fileno(), head, at)
                os.pwrite(file.fileno(), tail, at + len(head) + nbytes)
            sizes[name] = at + length
            listed.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(size)))
            stored[MetadataIndex(key, torch.Size(offset), number)] = _StorageInfo(name, at, length)
        entries[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), listed)
    with (place / ".metadata").open("wb") as file:
        pickle.dump(Metadata(entries, {}, stored), file)
    (place / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (folder / "ckpt" / "latest_checkpointed_iteration.txt").write_text("100")
    (folder / "hf").mkdir()
    config = planned_model("deepseek-v3", layers=layers).config
    (folder / "hf" / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}, indent=2) + "\n")
    return len(stored)


def _around(folder: pathlib.Path, size: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, int, bytes]:
    """What torch.save writes before and after the bytes of such a tensor, and how many these are."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    path = folder / "archive"
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(torch.empty(size, dtype=dtype), path)
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        info = archive.getinfo("archive/data/0")
        file.seek(info.header_offset + 26)
        start = info.header_offset + 30 + sum(struct.unpack("<2H", file.read(4)))
        file.seek(0)
        head = file.read(start)
        file.seek(start + info.file_size)
        tail = file.read()
    path.unlink()
    return head, info.file_size, tail


_Piece = tuple[tuple[int, ...], tuple[int, ...], int]
"""Offset, size, rank that writes it."""


def _megatron_tensors(layers: int) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, list[_Piece]]]:
    """(key, shape, type, pieces) of all tensors."""
    import torch

    h, heads, experts, inner, dense, vocab = 7168, 128, 256, 2048, 3, 129_280
    bf16 = torch.bfloat16

    def split(shape: tuple[int, ...], stage: int, dim: int | None, halves: int = 1) -> list[_Piece]:
        """By tensor parallelism along `dim`; each rank has a piece of each half (gate and up)."""
        if dim is None:
            return [((0,) * len(shape), shape, stage * _EP)]
        step = shape[dim] // (_TP * halves)
        pieces = []
        for k in range(_TP * halves):
            offset = tuple(k * step if d == dim else 0 for d in range(len(shape)))
            pieces.append((offset, tuple(step if d == dim else n for d, n in enumerate(shape)), stage * _EP + k % _TP))
        return pieces

    def of_experts(shape: tuple[int, ...], stage: int, halves: int) -> list[_Piece]:
        step = shape[1] // halves
        return [
            ((e, k * step, 0), (1, step, shape[2]), stage * _EP + e * _EP // experts)
            for e in range(experts)
            for k in range(halves)
        ]

    yield "embedding.word_embeddings.weight", (vocab, h), bf16, split((vocab, h), 0, 0)
    for i in range(layers):
        stage, p = i * _PP // layers, f"decoder.layers.{i}."
        attention = f"{p}self_attention."
        tables: list[tuple[str, tuple[int, ...], int | None, int]] = [
            (f"{p}input_layernorm.weight", (h,), None, 1),
            (f"{attention}linear_proj.weight", (h, heads * 128), 1, 1),
            (f"{attention}linear_q_down_proj.weight", (1536, h), None, 1),
            (f"{attention}linear_q_up_proj.weight", (heads * 192, 1536), 0, 1),
            (f"{attention}linear_q_up_proj.layer_norm_weight", (1536,), None, 1),
            (f"{attention}linear_kv_down_proj.weight", (576, h), None, 1),
            (f"{attention}linear_kv_up_proj.weight", (heads * 256, 512), 0, 1),
            (f"{attention}linear_kv_up_proj.layer_norm_weight", (512,), None, 1),
        ]
        if i < dense:
            tables += [
                (f"{p}mlp.linear_fc1.weight", (2 * 18_432, h), 0, 2),
                (f"{p}mlp.linear_fc1.layer_norm_weight", (h,), None, 1),
                (f"{p}mlp.linear_fc2.weight", (h, 18_432), 1, 1),
            ]
        else:
            tables += [
                (f"{p}pre_mlp_layernorm.weight", (h,), None, 1),
                (f"{p}mlp.router.weight", (experts, h), None, 1),
                (f"{p}mlp.shared_experts.linear_fc1.weight", (2 * inner, h), 0, 2),
                (f"{p}mlp.shared_experts.linear_fc2.weight", (h, inner), 1, 1),
            ]
            bias = f"{p}mlp.router.expert_bias"
            yield bias, (experts,), torch.float32, split((experts,), stage, None)
            for name, shape, halves in (("fc1", (experts, 2 * inner, h), 2), ("fc2", (experts, h, inner), 1)):
                key = f"{p}mlp.experts.experts.linear_{name}.weight"
                yield key, shape, bf16, of_experts(shape, stage, halves)
        for key, size, dim, halves in tables:
            yield key, size, bf16, split(size, stage, dim, halves)
    yield "decoder.final_layernorm.weight", (h,), bf16, split((h,), _PP - 1, None)
    yield "output_layer.weight", (vocab, h), bf16, split((vocab, h), _PP - 1, 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.sparse", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path, help="new folder")
    parser.add_argument("--shape", choices=PLANNED, default="llama-405b")
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    given = parser.parse_args(arguments)
    began = time.perf_counter()
    try:
        model = make_sparse_ranks(given.out, given.shape, given.ranks, layers=given.layers)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    files = [f.stat() for f in given.out.rglob("*") if f.is_file()]
    size, used = sum(f.st_size for f in files) / 1e12, sum(f.st_blocks for f in files) * 512 / 1e9
    print(
        f"{given.out}: {len(model.parameters)} parameters x {given.ranks} ranks, {size:.2f} TB, {used:.1f} GB on disk, "
        f"in {time.perf_counter() - began:.0f} s"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
