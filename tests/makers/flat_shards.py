"""Flat shards with metadata, written by fairscale and torch_xla themselves; the model before sharding is the truth.

    OUT/CASE/ckpt/                         the rank files
    OUT/CASE/expected_state.safetensors    the state dict of the module before it was wrapped; of torch_xla without the
                                           second names of ties, which it does not save
    OUT/CASE/check.json                    what the case is for, and the writer

fairscale (0.4.13) runs on gloo ranks. torch_xla needs no ranks to shard: each FSDP module is built once for each
ordinal from a checkout of pytorch/xla, with the runtime (devices, collectives) replaced by the CPU.
Where the library's own consolidation can read a case, its answer is compared with the truth.

    python -m tests.makers.flat_shards OUT --xla-source CHECKOUT     (in an environment with torch and fairscale)
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING
from unittest import mock

import torch
from torch import nn

from tests.makers.ranks import rank_job, run_ranks

if TYPE_CHECKING:
    from types import ModuleType

WIDE, NARROW, VOCAB = 6, 5, 11
LAST = "checkpoint_last-shard{rank}.pt"


class Module(nn.Module):
    """torch_xla wraps only what has a forward; it is never called."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Nothing."""
        return values


class Layer(Module):
    """A decoder layer with odd sizes, a tie between names that end differently, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDE, NARROW)
        self.fc2 = nn.Linear(NARROW, WIDE)
        self.norm = nn.LayerNorm(WIDE)
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.fc1.register_buffer("steps", torch.tensor(7))
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.norm.twin = self.fc2.bias


class Decoder(Module):
    """Tied embedding and output (both called weight), a buffer, two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.embed_tokens = nn.Embedding(VOCAB, WIDE)
        self.decoder.layers = nn.ModuleList([Layer(), Layer()])
        self.decoder.output_projection = nn.Linear(WIDE, VOCAB, bias=False)
        self.decoder.output_projection.weight = self.decoder.embed_tokens.weight
        self.decoder.register_buffer("version", torch.tensor([3.0]))


class Norms(Module):
    """Batch norms, which vision recipes wrap in a process group of one rank each."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2)
        self.bn = nn.BatchNorm2d(3)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """The same parameters on every rank."""
    torch.manual_seed(5)
    return make()


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the plain state dict: the truth."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def save_truth(folder: pathlib.Path, state: dict[str, torch.Tensor], why: str, writer: str) -> None:
    """The expected tensors and the note on the case."""
    from safetensors.torch import save_file

    copies = {name: tensor.clone().contiguous() for name, tensor in state.items()}
    save_file(copies, folder / "expected_state.safetensors")
    text = json.dumps({"why": why, "writer": writer}, indent=1)
    (folder / "check.json").write_text(text + "\n")


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    """Whether a consolidation gives the truth."""
    return got.keys() == want.keys() and all(
        (got[name].dtype, got[name].shape) == (want[name].dtype, want[name].shape)
        and torch.equal(got[name], want[name])
        for name in want
    )


# ---- fairscale


def _nested(wrap: Callable[..., nn.Module]) -> nn.Module:
    model = seeded(Decoder)
    layers = model.decoder.layers
    for index in range(len(layers)):
        layers[index] = wrap(layers[index])
    return wrap(model)


def _unflat(wrap: Callable[..., nn.Module]) -> nn.Module:
    model = seeded(Decoder).half()
    model.decoder.layers[0] = wrap(model.decoder.layers[0], flatten_parameters=False, compute_dtype=torch.float16)
    return wrap(model, compute_dtype=torch.float16)


def _norms(wrap: Callable[..., nn.Module]) -> nn.Module:
    import torch.distributed as dist

    model = seeded(Norms)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    model.bn = wrap(model.bn, process_group=alone, flatten_parameters=False)
    return wrap(model)


FAIRSCALE: dict[str, tuple[int, Callable[..., nn.Module], Callable[[], nn.Module], str]] = {
    "fairscale_w3_nested": (3, _nested, lambda: seeded(Decoder), "nested, ties, buffers, uneven; metaseq's files"),
    "fairscale_w2_unflat_fp16": (2, _unflat, lambda: seeded(Decoder).half(), "a unit without flattening; fp16"),
    "fairscale_w1_unflat": (1, _unflat, lambda: seeded(Decoder).half(), "one rank: nothing is sharded"),
    "fairscale_w7_nested": (7, _nested, lambda: seeded(Decoder), "more ranks than there are parts: shards of padding"),
    "fairscale_w2_norms": (2, _norms, lambda: seeded(Norms), "batch norms in groups of one rank: each has a copy"),
}


def fairscale_rank(out: pathlib.Path, case: str) -> None:
    """One rank: wrap, save as metaseq's trainer does."""
    import fairscale
    from fairscale.nn import FullyShardedDataParallel

    _, build, plain, why = FAIRSCALE[case]
    cpu = torch.device("cpu")
    with rank_job() as (rank, _):
        model = build(lambda module, **more: FullyShardedDataParallel(module, compute_device=cpu, **more))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        saved = {
            "cfg": {"common": {"model_parallel_size": 1}, "task": {"_name": "streaming_language_modeling"}},
            "model": model.local_state_dict(),
            "optimizer_history": [{"optimizer_name": "FusedAdam", "num_updates": 1}],
            "extra_state": {"epoch": 1},
            "last_optimizer_state": optimizer.state_dict(),
            "shard_metadata": model.local_metadata_dict(),
        }
        torch.save(saved, out / case / "ckpt" / LAST.format(rank=rank))
        torch.distributed.barrier()
        if rank == 0:
            state = state_of(plain())
            save_truth(out / case, state, why, f"fairscale {fairscale.__version__}, torch {torch.__version__}")


def fairscale_check(folder: pathlib.Path, world: int, state: dict[str, torch.Tensor]) -> None:
    """Tell what fairscale's own consolidation makes of the files."""
    from fairscale.nn import FullyShardedDataParallel

    files = [torch.load(folder / LAST.format(rank=rank), weights_only=False) for rank in range(world)]
    weights, metadata = [file["model"] for file in files], [file["shard_metadata"] for file in files]
    try:
        got = FullyShardedDataParallel.consolidate_shard_weights(weights, metadata, strict=False)
    except (AssertionError, KeyError, RuntimeError) as error:
        print(f"{folder}: fairscale's own consolidation fails: {type(error).__name__} {error}")
    else:
        tell(folder, got, state)


def tell(folder: pathlib.Path, got: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    """One line: how a library's consolidation compares with the truth."""
    both = got.keys() & state.keys()
    unequal = [name for name in both if not same({name: got[name]}, {name: state[name]})]
    lacks, more = sorted(state.keys() - both), sorted(got.keys() - both)
    print(f"{folder}: lacks {lacks}, has more {more}, unequal {sorted(unequal)}")


# ---- torch_xla


def _xla_nested(wrap: Callable[..., nn.Module]) -> nn.Module:
    model = seeded(Decoder)
    model.decoder.layers[1].fc2.requires_grad_(False)
    for index, layer in enumerate(model.decoder.layers):
        model.decoder.layers[index] = wrap(layer, flatten_parameters=True)
    return wrap(model, flatten_parameters=True)


def _xla_unflat(wrap: Callable[..., nn.Module]) -> nn.Module:
    model = seeded(Decoder)
    model.decoder.layers[0] = wrap(model.decoder.layers[0])
    return wrap(model)


def _xla_rows(wrap: Callable[..., nn.Module]) -> nn.Module:
    return wrap(seeded(Norms), shard_param_on_dim_0=True)


HF_NAMES = "rank{rank}-of-{world}-pytorch_model.bin"
XLA_NAMES = "rank-{rank}-of-{world}.pth"
EXAMPLE_NAMES = "final_ckpt_rank-{rank:08d}-of-{world:08d}.pth"
XLA: dict[str, tuple[int, Callable[..., nn.Module], Callable[[], nn.Module], str, str]] = {
    "xla_w2_nested": (2, _xla_nested, lambda: seeded(Decoder), EXAMPLE_NAMES, "nested units, frozen parameters"),
    "xla_w3_unflat": (3, _xla_unflat, lambda: seeded(Decoder), HF_NAMES, "no flattening; the HF Trainer's names"),
    "xla_w2_rows": (2, _xla_rows, lambda: seeded(Norms), XLA_NAMES, "shard_param_on_dim_0"),
    "xla_w1": (1, _xla_nested, lambda: seeded(Decoder), XLA_NAMES, "one rank"),
}
LOST = {"decoder.output_projection.weight", "decoder.layers.0.norm.twin", "decoder.layers.1.norm.twin"}


def xla_library(source: pathlib.Path, place: dict[str, int]) -> ModuleType:
    """torch_xla's own FSDP code out of a checkout, over a runtime that is the CPU."""
    for name in ("torch_xla", "torch_xla.core", "torch_xla.utils", "torch_xla.distributed"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(source / name.replace(".", "/"))] if name.endswith("distributed") else []
    for name in ("torch_xla.runtime", "torch_xla.core.xla_model", "torch_xla.utils.checkpoint"):
        sys.modules[name] = mock.MagicMock()
    runtime = sys.modules["torch_xla.runtime"]
    runtime.global_ordinal = lambda: place["rank"]
    runtime.world_size = lambda: place["world"]
    top = sys.modules["torch_xla"]
    top.runtime, top.core, top.device = runtime, sys.modules["torch_xla.core"], lambda: torch.device("cpu")
    top.core.xla_model = sys.modules["torch_xla.core.xla_model"]
    top.sync, top._XLAC = (lambda: None), mock.MagicMock()
    return importlib.import_module("torch_xla.distributed.fsdp")


def make_xla(out: pathlib.Path, source: pathlib.Path) -> None:
    """All torch_xla cases."""
    place = {"rank": 0, "world": 1}
    library = xla_library(source, place)
    for case, (world, build, plain, name, why) in XLA.items():
        folder = out / case / "ckpt"
        folder.mkdir(parents=True)
        for rank in range(world):
            place |= {"rank": rank, "world": world}
            model = build(library.XlaFullyShardedDataParallel)
            saved = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}
            torch.save({**saved, "optimizer": {"state": {}}}, folder / name.format(rank=rank, world=world))
        state = {name: tensor for name, tensor in state_of(plain()).items() if name not in LOST}
        save_truth(out / case, state, why, f"torch_xla's FSDP of {source.name}, torch {torch.__version__}")
        try:
            got, _ = library.consolidate_sharded_model_checkpoints(f"{folder}/", "*", save_model=False)
        except TypeError as error:
            print(f"{folder}: torch_xla's own consolidation fails: {error}")
        else:
            tell(folder, got, state)


def main() -> None:
    """Make every case below OUT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--xla-source", type=pathlib.Path)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        fairscale_rank(given.out, given.rank_of)
        return
    for case, (world, _, plain, _) in FAIRSCALE.items():
        (given.out / case / "ckpt").mkdir(parents=True)
        arguments = [str(given.out.resolve()), "--rank-of", case]
        run_ranks("tests.makers.flat_shards", arguments, world_size=world, seconds=240)
        fairscale_check(given.out / case / "ckpt", world, state_of(plain()))
    if given.xla_source:
        make_xla(given.out, given.xla_source)


if __name__ == "__main__":
    main()
