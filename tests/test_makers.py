"""The makers give what they promise. Checked with plain torch on the files, never with our own reader."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.makers.fsdp2 import Made, Recipe, make
from tests.makers.ranks import RanksFailedError, run_ranks

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.real


def _tensors(path: pathlib.Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(path)


def _rank_files(made: Made, world: int) -> list[dict[str, Any]]:
    import torch
    import torch.distributed.tensor  # torch.load knows DTensor only after this import

    names = [f"model_world_size_{world}_rank_{rank}.pt" for rank in range(world)]
    return [torch.load(made.ckpt / name, weights_only=True) for name in names]


def _assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    import torch

    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize(
    ("recipe", "first_row"),
    [
        (Recipe(world=2, odd=True), [0, 1]),
        (Recipe(world=3, odd=True, dtype="fp16", head="value"), [0, 1, 2]),
        (Recipe(world=4, hsdp=2, dtype="bf16", head="tied"), [0, 1]),
    ],
    ids=["uneven", "empty-shards", "hsdp-tied"],
)
def test_rank_files_joined_on_dim_0_are_the_gather(
    tmp_path: pathlib.Path, recipe: Recipe, first_row: list[int]
) -> None:
    import torch

    made = make(tmp_path, recipe)
    ranks = _rank_files(made, recipe.world)
    joined = {name: torch.cat([ranks[rank][name].to_local() for rank in first_row]) for name in ranks[0]}
    gathered = _tensors(made.gathered)
    _assert_same(joined, gathered)
    assert all(tuple(ranks[0][name].shape) == tuple(tensor.shape) for name, tensor in gathered.items())
    if recipe.head == "value":
        assert ranks[2]["score.weight"].to_local().numel() == 0
    if recipe.head == "tied":
        assert torch.equal(gathered["lm_head.weight"], gathered["model.embed_tokens.weight"])
    dropped = {"lm_head.weight"} if recipe.head == "tied" else set()
    _assert_same(
        _tensors(made.expected / "model.safetensors"),
        {name: tensor for name, tensor in gathered.items() if name not in dropped},
    )


def test_verl_folder_has_verls_files(tmp_path: pathlib.Path) -> None:
    made = make(tmp_path, Recipe())
    names = {path.name for path in made.ckpt.iterdir()}
    kinds = ("model", "optim", "extra_state")
    assert names == {f"{kind}_world_size_2_rank_{rank}.pt" for kind in kinds for rank in (0, 1)} | {
        "fsdp_config.json",
        "huggingface",
    }
    assert json.loads((made.ckpt / "fsdp_config.json").read_text()) == {"FSDP_version": 2, "world_size": 2}
    config = json.loads((made.side_files / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (made.side_files / "tokenizer.json").exists()


def test_tp_shards_are_strided_and_complete(tmp_path: pathlib.Path) -> None:
    """FSDP2 + TP on uneven sizes; the maker itself has checked the gather against the unsharded parameters."""
    made = make(tmp_path, Recipe(world=4, tp=2, odd=True))
    ranks = _rank_files(made, 4)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert ranks[0][name].device_mesh.mesh_dim_names == ("fsdp", "tp")
    assert "_StridedShard" in str(ranks[0][name].placements)
    assert ranks[0]["model.norm.weight"].device_mesh.mesh_dim_names == ("fsdp",)
    gathered = _tensors(made.gathered)
    assert sum(rank[name].to_local().numel() for rank in ranks) == gathered[name].numel()


@pytest.mark.parametrize(
    "recipe",
    [Recipe(writer="dcp", odd=True), Recipe(writer="dcp", dtype="mixed", head="tied"), Recipe(4, "dcp", tp=2)],
    ids=["uneven", "mixed-tied", "tp"],
)
def test_dcp_folder_read_by_torch_is_the_gather(tmp_path: pathlib.Path, recipe: Recipe) -> None:
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    made = make(tmp_path, recipe)
    dcp_to_torch_save(made.ckpt, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert set(whole) == {"model", "optim"}
    _assert_same(whole["model"], _tensors(made.gathered))
    assert (made.side_files / "config.json").exists()


def test_same_recipe_gives_same_weights(tmp_path: pathlib.Path) -> None:
    first, second = (make(tmp_path / name, Recipe(odd=True)) for name in ("a", "b"))
    assert first.gathered.read_bytes() == second.gathered.read_bytes()


def test_ranks_that_hang_are_ended() -> None:
    with pytest.raises(RanksFailedError, match="ranks ended with"):
        run_ranks("timeit", ["-n1", "-r1", "import time; time.sleep(99)"], world_size=2, seconds=1)
    commands = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
    assert not [command for command in commands if "time.sleep(99)" in command]


def test_failed_rank_is_reported_with_its_output() -> None:
    with pytest.raises(RanksFailedError, match="No module named no_such_module"):
        run_ranks("no_such_module", [], world_size=2, seconds=30)


def test_impossible_recipes_are_refused() -> None:
    with pytest.raises(ValueError, match="no multiple"):
        Recipe(world=3, tp=2)
    with pytest.raises(ValueError, match="uneven"):
        Recipe(world=4, tp=2, odd=True, writer="dcp")
