"""State files as DeepSpeed's ZeRO writes them, from plain arrays: one process plays all ranks.

Follows the writer, not the reader: stage 1 and 2 flatten a group, align it to 2 * W and cut it in equal
partitions (runtime/zero/stage_1_and_2.py, 0.19); stage 3 pads each parameter to a multiple of W
(runtime/zero/stage3.py). Adam's moments stand beside the masters, so that files look like real ones.
"""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["ZeroRun", "write_zero"]

Tensors = Mapping[str, torch.Tensor]


@dataclass
class ZeroRun:
    """What is saved: fp32 `groups` of trained parameters, `frozen` ones, `buffers`, `shared` (alias -> owner)."""

    groups: Sequence[Tensors]
    stage: int = 2
    ranks: int = 2
    dtype: torch.dtype = torch.bfloat16
    frozen: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    lost: Sequence[str] = ()
    steps: Sequence[int] | None = None
    whole_padding: bool = False
    tag: str = "global_step7"

    @property
    def prefix(self) -> str:
        """`bf16_` before the optimizer files of bf16 runs."""
        return "bf16_" if self.dtype == torch.bfloat16 else ""


def write_zero(folder: pathlib.Path, run: ZeroRun) -> pathlib.Path:
    """Write `folder`/TAG and `folder`/latest; returns `folder`."""
    place = folder / run.tag
    place.mkdir(parents=True)
    (folder / "latest").write_text(run.tag)
    for rank in range(run.ranks):
        flats, paddings = [], []
        for group in run.groups:
            flat, padding = _stage3_part(group, run, rank) if run.stage == 3 else _partition(group, run, rank)
            flats.append(flat)
            paddings.append(padding)
        step = run.steps[rank] if run.steps else 7
        state = _optimizer(run, flats, paddings, step)
        torch.save(
            {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"},
            place / f"{run.prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
        if run.stage == 3:
            torch.save(_model_states(run, rank), place / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    if run.stage != 3:
        torch.save(_model_states(run, 0), place / "mp_rank_00_model_states.pt")
    return folder


def _partition(group: Tensors, run: ZeroRun, rank: int) -> tuple[torch.Tensor, int]:
    """(what the rank saves, elements of padding that it does not save)."""
    flat = torch.cat([tensor.reshape(-1).float() for tensor in group.values()])
    used = len(flat)
    total = -(-used // (2 * run.ranks)) * 2 * run.ranks
    flat = torch.cat([flat, torch.zeros(total - used)])
    share = total // run.ranks
    part = flat[rank * share : (rank + 1) * share]
    padding = 0 if run.whole_padding else min(max((rank + 1) * share - used, 0), share)
    return part[: share - padding].clone(), padding


def _stage3_part(group: Tensors, run: ZeroRun, rank: int) -> tuple[torch.Tensor, int]:
    """The rank's part of each parameter, padded with a value that must never be read."""
    return torch.cat([_cut(tensor.float(), run.ranks, rank) for tensor in group.values()]), 0


def _cut(tensor: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    share = -(-tensor.numel() // ranks)
    own = tensor.reshape(-1)[rank * share : (rank + 1) * share]
    return torch.cat([own, torch.full((share - len(own),), -777.0, dtype=tensor.dtype)])


def _optimizer(run: ZeroRun, flats: list[torch.Tensor], paddings: list[int], step: int) -> dict[str, object]:
    moments = {
        k: {"step": torch.tensor(float(step)), "exp_avg": torch.full_like(flat, 9e9), "exp_avg_sq": -flat}
        for k, flat in enumerate(flats)
    }
    base = {"state": moments, "param_groups": [{"lr": 1e-3, "params": [k]} for k in range(len(flats))]}
    if run.stage == 3:
        return {
            "zero_stage": 3,
            "partition_count": run.ranks,
            "optimizer_state_dict": base,
            "fp32_flat_groups": flats,
        }
    return {
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": flats,
        "zero_stage": run.stage,
        "group_paddings": paddings,
        "partition_count": [run.ranks] * len(flats),
        "ds_version": "0.19.8",
    }


def _model_states(run: ZeroRun, rank: int) -> dict[str, object]:
    trained = {name: tensor for group in run.groups for name, tensor in group.items()}
    module: dict[str, torch.Tensor] = collections.OrderedDict()
    for name, tensor in {**trained, **run.frozen}.items():
        module[name] = torch.zeros(0, dtype=run.dtype) if run.stage == 3 else tensor.to(run.dtype)
    module |= run.buffers
    for alias, owner in run.shared.items():
        module[alias] = module[owner]
    for name in run.lost:
        module[name] = torch.zeros(0, dtype=run.dtype)
    fragments = {
        name: _cut(tensor.to(run.dtype), run.ranks, rank) if run.stage == 3 else tensor.to(run.dtype)
        for name, tensor in run.frozen.items()
    }
    return {
        "module": module,
        "buffer_names": list(run.buffers),
        "optimizer": None,
        "param_shapes": [collections.OrderedDict((n, t.shape) for n, t in group.items()) for group in run.groups],
        "frozen_param_shapes": {name: tensor.shape for name, tensor in run.frozen.items()} if run.stage > 1 else {},
        "frozen_param_fragments": fragments if run.stage > 1 else {},
        "shared_params": dict(run.shared),
        "dp_world_size": run.ranks,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": run.stage}},
        "ds_version": "0.19.8",
    }
