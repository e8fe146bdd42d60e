"""Checkpoints of any size on a small disk: real headers and pickles of every rank, holes where the values would be.

Rank files are written by `torch.save` from DTensors on a real DeviceMesh of a fake process group, as in
`bench.synthetic`, but without data (`torch.serialization.skip_data`): the file has its true length, and nothing
but its records takes blocks. A Megatron `torch_dist` folder has torch's own pickled Metadata, and each chunk is a
real torch.save file, written once for each shape and put at each of its places.

    python -m bench.sparse OUT --shape llama-405b --ranks 512

Takes about 0.25 ms and 600 bytes of disk for each tensor of each rank. Reading them back gives zeros.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import pathlib
import sys
import time
from collections.abc import Sequence

from bench.shapes import PLANNED, Model, planned_model
from bench.synthetic import as_rank

__all__ = ["make_sparse_ranks"]


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
