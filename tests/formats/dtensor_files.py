"""Rank files with real DTensors of the installed torch, for any mesh, written by one process.

A fake process group gives each rank its device mesh; nothing is communicated. The local tensors are
cut from the whole ones by the test itself, so that the reader is compared with something independent.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["as_rank", "dtensor", "save_ranks", "tensor_mesh"]


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be rank `rank` of a fake process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()


def tensor_mesh(ranks: Any, names: Sequence[str] | None = None) -> DeviceMesh:
    """A mesh with these ranks (nested lists)."""
    return DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=tuple(names) if names else None)


def dtensor(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """A DTensor around `local`, without any check or communication."""
    whole = torch.empty(tuple(shape), dtype=local.dtype, device="meta")
    meta = TensorMeta(torch.Size(shape), whole.stride(), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local.clone(memory_format=torch.contiguous_format), spec, requires_grad=False)


def save_ranks(folder: Path, world_size: int, state: Callable[[int], dict[str, Any]]) -> Path:
    """Write model_world_size_W_rank_R.pt for every rank; `state(rank)` makes its state dict."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(world_size):
        with as_rank(rank, world_size):
            torch.save(state(rank), folder / f"model_world_size_{world_size}_rank_{rank}.pt")
    return folder
