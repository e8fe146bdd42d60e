"""The usual way to merge rank files: load them all, concatenate, save. The contender that merge-stream replaces.

Not slowed: files are loaded by several threads (as verl's merger does), shards are cast before they are
concatenated, and every tensor is let go as soon as it is not needed. It needs the whole model in memory all the same.

    python bench/baseline_in_memory.py CKPT OUT --dtype bf16|keep
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import pathlib
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, Shard

__all__ = ["merge"]


def merge(ckpt: pathlib.Path, out: pathlib.Path, *, dtype: torch.dtype | None) -> None:
    """Merge the rank files of a one-dimensional mesh; `dtype` None keeps what is there."""
    files = sorted(ckpt.glob("model_world_size_*_rank_*.pt"), key=lambda f: int(re.findall(r"\d+", f.name)[-1]))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        states = list(pool.map(lambda f: torch.load(f, map_location="cpu", weights_only=False), files))
    config = json.loads((ckpt / "huggingface" / "config.json").read_text())
    merged = {}
    for name in list(states[0]):
        shards = [state.pop(name) for state in states]
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        merged[name] = _whole(shards, dtype)
    out.mkdir(parents=True)
    save_file(merged, out / "model.safetensors", metadata={"format": "pt"})
    for side in (ckpt / "huggingface").iterdir():
        shutil.copy(side, out)


def _whole(shards: list[torch.Tensor], dtype: torch.dtype | None) -> torch.Tensor:
    first = shards[0]
    if not isinstance(first, DTensor):
        return first if dtype is None else first.to(dtype)
    (placement,) = first.placements
    if not isinstance(placement, Shard):
        msg = f"only sharded tensors on a one-dimensional mesh, not {placement}"
        raise TypeError(msg)
    local = [shard._local_tensor for shard in shards]  # noqa: SLF001  (to_local() wants a process group)
    return torch.cat([x if dtype is None else x.to(dtype) for x in local], dim=placement.dim)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ckpt", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--dtype", choices=("bf16", "keep"), default="keep")
    given = parser.parse_args()
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    merge(given.ckpt, given.out, dtype=torch.bfloat16 if given.dtype == "bf16" else None)


if __name__ == "__main__":
    main()
