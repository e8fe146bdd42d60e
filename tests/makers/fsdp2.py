"""Real FSDP2 checkpoints on gloo ranks, with the trainer's own gather beside them.

    OUT/ckpt/                      what the trainer wrote
        model_world_size_W_rank_R.pt ...   writer `ranks`: verl's actor folder, by the calls verl makes
        .metadata, __R_0.distcp            writer `dcp`: dcp.save({"model": ..., "optim": ...})
    OUT/hf/                        config.json and tokenizer (in OUT/ckpt/huggingface/ for `ranks`)
    OUT/expected.safetensors       every tensor of the state dict, gathered with full_tensor()
    OUT/expected/                  the Hugging Face model a merge must give (a tied lm_head left out)

The ranks train for `steps` steps (none with tensor parallelism), so optimizer state is real too. Without a
step the gather is checked against the parameters before sharding: the truth does not rest on torch alone.

    python -m tests.makers.fsdp2 OUT --world 2 --odd
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import random
import sys
from typing import TYPE_CHECKING, Any, Literal

from tests.makers.ranks import RankEnvironment, rank_job, run_ranks

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from tests.makers.llama import Llama, LlamaShape

__all__ = ["Made", "Recipe", "make"]

LEARNING_RATE = 0.01
SMALLEST_EPS = 1e-4  # the usual 1e-8 is zero in fp16


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """What to make."""

    world: int = 2
    writer: Literal["ranks", "dcp"] = "ranks"
    dtype: Literal["fp32", "bf16", "fp16", "mixed"] = "fp32"
    head: Literal["lm", "tied", "value"] = "lm"
    odd: bool = False
    hsdp: int = 1  # replicas: mesh ("ddp", "fsdp")
    tp: int = 1  # tensor-parallel ranks: mesh ("fsdp", "tp")
    steps: int = 1
    layers: int = 2
    seed: int = 7

    def __post_init__(self) -> None:
        if self.world % (self.hsdp * self.tp):
            raise ValueError(f"world {self.world} is no multiple of hsdp {self.hsdp} x tp {self.tp}")
        if self.writer == "dcp" and self.tp > 1 and self.odd:
            raise ValueError("torch refuses to dcp.save uneven FSDP2 + TP shards (seen with 2.13)")

    def arguments(self) -> list[str]:
        """The command line that gives this recipe again."""
        words: list[str] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is True:
                words.append(f"--{field.name}")
            elif value is not False:
                words += [f"--{field.name}", str(value)]
        return words


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """Where everything lies."""

    ckpt: pathlib.Path
    side_files: pathlib.Path
    gathered: pathlib.Path
    expected: pathlib.Path


def make(out: pathlib.Path, recipe: Recipe | None = None, *, seconds: float = 120) -> Made:
    """Write the checkpoint and its truth under `out`; raises if any rank fails or takes longer than `seconds`."""
    recipe = recipe or Recipe()
    made = _places(out, recipe)
    if made.ckpt.exists():
        raise FileExistsError(f"{made.ckpt} exists already")
    made.ckpt.mkdir(parents=True)
    made.expected.mkdir()
    run_ranks("tests.makers.fsdp2", [str(out.resolve()), *recipe.arguments()], world_size=recipe.world, seconds=seconds)
    return made


def _places(out: pathlib.Path, recipe: Recipe) -> Made:
    ckpt = out / "ckpt"
    return Made(
        ckpt=ckpt,
        side_files=ckpt / "huggingface" if recipe.writer == "ranks" else out / "hf",
        gathered=out / "expected.safetensors",
        expected=out / "expected",
    )


def _rank_main(out: pathlib.Path, recipe: Recipe) -> None:
    """One rank: build, shard, train, save, gather."""
    import torch

    from tests.makers.llama import Llama, LlamaShape

    with rank_job() as (rank, _):
        shape = LlamaShape.of(odd=recipe.odd, head=recipe.head, layers=recipe.layers)
        torch.manual_seed(recipe.seed)  # the same parameters on every rank; FSDP2 keeps its own part of them
        model = Llama(shape)
        _cast(model, recipe.dtype)
        before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        _shard(model, recipe)
        optimizer = _train(model, shape, recipe, rank)
        made = _places(out, recipe)
        if recipe.writer == "ranks":
            _save_ranks(made.ckpt, model, optimizer, recipe, rank)
        else:
            _save_dcp(made.ckpt, model, optimizer)
        gathered = _gather(model)
        if recipe.steps == 0 or recipe.tp > 1:
            _check_gather(gathered, before)
        if rank == 0:
            _save_truth(made, gathered, shape)


def _cast(model: Llama, dtype: str) -> None:
    """The dtype on disk; `mixed` is bf16 with the norms in fp32."""
    import torch

    model.to({"fp32": torch.float32, "fp16": torch.float16}.get(dtype, torch.bfloat16))
    if dtype == "mixed":
        for name, module in model.named_modules():
            if name.endswith("norm"):
                module.to(torch.float32)


def _shard(model: Llama, recipe: Recipe) -> None:
    """TP where asked for, then fully_shard layer by layer, on a mesh with verl's dim names."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dims = {"ddp": recipe.hsdp, "fsdp": recipe.world // (recipe.hsdp * recipe.tp), "tp": recipe.tp}
    dims = {name: size for name, size in dims.items() if size > 1 or name == "fsdp"}
    mesh = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
    if "tp" in dims:
        _parallelize(model, mesh["tp"])
    data_dims = tuple(name for name in dims if name != "tp")
    data_mesh = mesh[data_dims] if "tp" in dims else mesh
    for layer in model.model.layers:
        if recipe.dtype == "mixed":  # one dtype per FSDP unit
            fully_shard(layer.input_layernorm, mesh=data_mesh)
            fully_shard(layer.post_attention_layernorm, mesh=data_mesh)
        fully_shard(layer, mesh=data_mesh)
    if recipe.dtype == "mixed":
        fully_shard(model.model.norm, mesh=data_mesh)
    fully_shard(model, mesh=data_mesh)


def _parallelize(model: Llama, tp_mesh: DeviceMesh) -> None:
    """The usual plan: columns in, rows out; norms are left alone (so they sit on the fsdp dim only)."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    tied = hasattr(model, "lm_head") and model.lm_head.weight is model.model.embed_tokens.weight
    plan: dict[str, Any] = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    plan |= {f"model.layers.*.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"model.layers.*.*.{name}": RowwiseParallel() for name in rows}
    if hasattr(model, "lm_head") and not tied:
        plan["lm_head"] = ColwiseParallel()
    parallelize_module(model, tp_mesh, plan)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight


def _train(model: Llama, shape: LlamaShape, recipe: Recipe, rank: int) -> torch.optim.Optimizer:
    """Some steps on random tokens; without any, a step of size zero that only makes the optimizer's state."""
    import torch

    steps = 0 if recipe.tp > 1 else recipe.steps
    rate = LEARNING_RATE if steps else 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, eps=SMALLEST_EPS, foreach=False)
    generator = torch.Generator().manual_seed(1000 + rank)
    for _ in range(steps):
        tokens = torch.randint(shape.vocab, (2, 16), generator=generator)
        model(tokens).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if not steps:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return optimizer


def _save_ranks(ckpt: pathlib.Path, model: Llama, optimizer: torch.optim.Optimizer, recipe: Recipe, rank: int) -> None:
    """The files of verl's FSDPCheckpointManager (names and content as of verl 0.9)."""
    import numpy as np
    import torch

    place = f"world_size_{recipe.world}_rank_{rank}.pt"
    rng = {"cpu": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}  # noqa: NPY002 (as verl)
    torch.save(model.state_dict(), ckpt / f"model_{place}")
    torch.save(optimizer.state_dict(), ckpt / f"optim_{place}")
    torch.save({"lr_scheduler": {"last_epoch": recipe.steps}, "rng": rng}, ckpt / f"extra_state_{place}")
    if rank == 0:
        (ckpt / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": recipe.world}, indent=4))


def _save_dcp(ckpt: pathlib.Path, model: Llama, optimizer: torch.optim.Optimizer) -> None:
    """One DCP folder with the model and the optimizer in it, the container style of most trainers."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optim": moments}, checkpoint_id=ckpt)


def _gather(model: Llama) -> dict[str, torch.Tensor]:
    """The whole tensors, by DTensor's own gather. A collective: every rank calls it."""
    from torch.distributed.tensor import DTensor

    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in model.state_dict().items()
    }


def _check_gather(gathered: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
    """Nothing was trained, so the gather must be what was sharded."""
    import torch

    wrong = [name for name, tensor in before.items() if not torch.equal(gathered[name], tensor)]
    if gathered.keys() != before.keys() or wrong:
        raise RuntimeError(f"torch's gather is not what was sharded: {wrong or gathered.keys() ^ before.keys()}")


def _save_truth(made: Made, gathered: dict[str, torch.Tensor], shape: LlamaShape) -> None:
    """The gather, and the Hugging Face model it must become."""
    from safetensors.torch import save_file

    from tests.makers.llama import write_side_files

    dtype = gathered["model.embed_tokens.weight"].dtype
    write_side_files(made.side_files, shape, dtype)
    write_side_files(made.expected, shape, dtype)
    save_file(gathered, made.gathered)
    dropped = {"lm_head.weight"} if shape.head == "tied" else set()
    kept = {name: tensor for name, tensor in gathered.items() if name not in dropped}
    save_file(kept, made.expected / "model.safetensors", metadata={"format": "pt"})


def main(words: list[str]) -> int:
    """The command line, and the entry of each rank."""
    parser = argparse.ArgumentParser(prog="python -m tests.makers.fsdp2", description="Make a real FSDP2 checkpoint.")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--writer", choices=["ranks", "dcp"], default="ranks")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16", "mixed"], default="fp32")
    parser.add_argument("--head", choices=["lm", "tied", "value"], default="lm")
    parser.add_argument("--odd", action="store_true", help="sizes that no world size divides")
    parser.add_argument("--hsdp", type=int, default=1, help="replicas")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--steps", type=int, default=1, help="training steps")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    parsed = vars(parser.parse_args(words))
    out = parsed.pop("out")
    recipe = Recipe(**parsed)
    if RankEnvironment.RANK in os.environ:
        _rank_main(out, recipe)
    else:
        print(make(out, recipe).ckpt)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
