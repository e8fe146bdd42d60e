"""Section D: FSDP and DTensor layout. The numbers are those of the collection of cases."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from merge_stream.errors import CorruptCheckpointError, MergeStreamError
from merge_stream.options import OpenOptions
from tests.cases.naive import NAMES_AS_THEY_ARE, assert_holds, merged, numbered
from tests.makers.dtensor import Spread, write_ranks


def test_case_038_world_size_one(tmp_path: pathlib.Path) -> None:
    """Plain tensors, no DTensor at all."""
    tensors = {"model.norm.weight": numbered(7), "model.layers.0.mlp.up_proj.weight": numbered(5, 3)}
    report = merged(write_ranks(tmp_path / "ckpt", (1,), tensors), tmp_path / "out")
    assert report.tensors == 2
    assert_holds(tmp_path / "out", tensors)


def test_case_038_world_size_one_of_fsdp2(tmp_path: pathlib.Path) -> None:
    """FSDP2 wraps its tensors on a mesh of one rank too."""
    tensor = numbered(5, 3)
    merged(write_ranks(tmp_path / "ckpt", (1,), {"model.w": Spread(tensor, [Shard(0)])}), tmp_path / "out")
    assert_holds(tmp_path / "out", {"model.w": tensor})


def test_case_039_replicated_buffers_are_written_once(tmp_path: pathlib.Path) -> None:
    weight = numbered(16, 4)
    buffers = {"model.scalar": numbered().reshape(()), "model.one": numbered(1), "model.scale": numbered(1152)}
    written = write_ranks(tmp_path / "ckpt", (8,), {"model.w": Spread(weight, [Shard(0)]), **buffers})
    report = merged(written, tmp_path / "out", dataclasses.replace(NAMES_AS_THEY_ARE, check_replicas=True))
    assert not report.warnings
    assert_holds(tmp_path / "out", {"model.w": weight, **buffers})


@pytest.mark.parametrize(
    "names",
    [
        ("ddp", "fsdp"),
        ("hsdp_replicate", "hsdp_shard"),
        ("dp_replicate", "dp_shard"),
        ("dp_shard_cp", "x"),
        ("fsdp", "tp"),
        None,
    ],
    ids=str,
)
def test_case_042_any_names_of_mesh_dims(tmp_path: pathlib.Path, names: tuple[str, str] | None) -> None:
    """The placements decide: here two copies of two halves, whatever the dims are called."""
    weight, square = numbered(6, 5), numbered(4, 4, first=100)
    tensors = {"model.w": Spread(weight, [Replicate(), Shard(0)]), "model.s": Spread(square, [Shard(0), Shard(1)])}
    written = write_ranks(tmp_path / "ckpt", (2, 2), tensors, names=names)
    merged(written, tmp_path / "out")
    assert_holds(tmp_path / "out", {"model.w": weight, "model.s": square})


def test_case_042_names_can_be_given_for_messages(tmp_path: pathlib.Path) -> None:
    weight = numbered(6, 5)
    written = write_ranks(tmp_path / "ckpt", (2, 2), {"model.w": Spread(weight, [Replicate(), Shard(0)])}, names=None)
    merged(written, tmp_path / "out", opening=OpenOptions(mesh_dim_names=("outer", "inner")))
    assert_holds(tmp_path / "out", {"model.w": weight})


@pytest.mark.parametrize("mesh", [(4, 1), (1, 4)])
def test_case_042_a_mesh_dim_of_size_one(tmp_path: pathlib.Path, mesh: tuple[int, int]) -> None:
    """HSDP with one shard or with one replica, TP of one rank."""
    tensor = numbered(6, 5)
    written = write_ranks(tmp_path / "ckpt", mesh, {"model.w": Spread(tensor, [Replicate(), Shard(0)])})
    merged(written, tmp_path / "out")
    assert_holds(tmp_path / "out", {"model.w": tensor})


@pytest.fixture
def drifted(tmp_path: pathlib.Path) -> tuple[pathlib.Path, torch.Tensor]:
    """HSDP 2x2: the second replica has one element that is 1e-3 larger."""
    weight = numbered(6, 5)
    other = weight[3:].clone()  # what ranks 1 and 3 hold
    other[1, 2] += 1e-3
    tensors = {"model.w": Spread(weight, [Replicate(), Shard(0)])}
    written = write_ranks(tmp_path / "ckpt", (2, 2), tensors, names=("ddp", "fsdp"), changed={3: {"model.w": other}})
    return written, weight


def test_case_043_drifted_replicas_are_told(drifted: tuple[pathlib.Path, torch.Tensor], tmp_path: pathlib.Path) -> None:
    """The copy of the lowest coordinate is written; tensor, place and difference are named."""
    written, weight = drifted
    report = merged(written, tmp_path / "out", dataclasses.replace(NAMES_AS_THEY_ARE, check_replicas=True))
    assert_holds(tmp_path / "out", {"model.w": weight})
    (warning,) = report.warnings
    for part in ("model.w", "rank_3.pt", "1 of 15 elements", "max abs 0.000999", "lowest rank"):
        assert part in warning, warning


def test_case_043_drifted_replicas_are_an_error_with_strict(
    drifted: tuple[pathlib.Path, torch.Tensor], tmp_path: pathlib.Path
) -> None:
    options = dataclasses.replace(NAMES_AS_THEY_ARE, check_replicas=True, strict=True)
    with pytest.raises(CorruptCheckpointError, match=r"model\.w.*max abs 0\.000999"):
        merged(drifted[0], tmp_path / "out", options)
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


def test_case_043_without_the_check_the_choice_is_the_same(
    drifted: tuple[pathlib.Path, torch.Tensor], tmp_path: pathlib.Path
) -> None:
    merged(drifted[0], tmp_path / "out")
    assert_holds(tmp_path / "out", {"model.w": drifted[1]})


@pytest.mark.parametrize(("rows", "columns"), [(8, 1), (8, 3), (16, 5)])
def test_case_044_strided_order_of_fsdp_over_tp(tmp_path: pathlib.Path, rows: int, columns: int) -> None:
    """TP cut first, then FSDP: in mesh order the ranks hold rows {0,1}, {4,5}, {2,3}, {6,7}."""
    weight = numbered(rows, columns)
    spread = Spread(weight, [_StridedShard(0, split_factor=2), Shard(0)], order=(1, 0))
    written = write_ranks(tmp_path / "ckpt", (2, 2), {"model.w": spread}, names=("fsdp", "tp"))
    if rows == 8:
        held = [torch.load(p, weights_only=False) for p in sorted(written.glob("*.pt"))]
        assert [x["model.w"].to_local()[:, 0].div(columns).int().tolist() for x in held] == [
            [0, 1],
            [4, 5],
            [2, 3],
            [6, 7],
        ]
    merged(written, tmp_path / "out")
    assert_holds(tmp_path / "out", {"model.w": weight})


@pytest.mark.parametrize(("world", "shape"), [(4, (6,)), (4, (6, 3)), (8, (3, 2)), (4, (1,)), (8, (9, 2))])
def test_case_046_empty_local_shards(tmp_path: pathlib.Path, world: int, shape: tuple[int, ...]) -> None:
    """Fewer rows than ranks, and chunks rounded up so that the last ranks get nothing."""
    tensor = numbered(*shape)
    written = write_ranks(tmp_path / "ckpt", (world,), {"model.w": Spread(tensor, [Shard(0)])})
    merged(written, tmp_path / "out")
    assert_holds(tmp_path / "out", {"model.w": tensor})


@pytest.mark.parametrize("name", ["_fsdp_wrapped_module._flat_param", "model.layers.0._flat_param", "flat_param_0"])
def test_case_048_flat_parameters_are_explained(tmp_path: pathlib.Path, name: str) -> None:
    """What it is, why it cannot be split, and what to do."""
    for rank in range(2):
        (tmp_path / "ckpt").mkdir(exist_ok=True)
        torch.save({name: numbered(50)}, tmp_path / "ckpt" / f"model_world_size_2_rank_{rank}.pt")
    with pytest.raises(MergeStreamError) as caught:
        merged(tmp_path / "ckpt", tmp_path / "out")
    message = caught.value.message + " " + caught.value.hint
    assert name in message
    assert "flat" in message
    assert caught.value.hint
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


def test_case_049_two_axes_on_different_dims(tmp_path: pathlib.Path) -> None:
    weight, odd = numbered(6, 8), numbered(5, 7, first=1000)
    tensors = {"model.w": Spread(weight, [Shard(0), Shard(1)]), "model.v": Spread(odd, [Shard(1), Shard(0)])}
    written = write_ranks(tmp_path / "ckpt", (2, 2), tensors, names=("fsdp", "tp"))
    merged(written, tmp_path / "out")
    assert_holds(tmp_path / "out", {"model.w": weight, "model.v": odd})


def test_case_049_partial_sums_are_refused(tmp_path: pathlib.Path) -> None:
    """With tensor name and placement, before anything is written."""
    written = write_ranks(tmp_path / "ckpt", (2, 2), {"model.w": Spread(numbered(6, 4), [Partial(), Shard(0)])})
    with pytest.raises(MergeStreamError) as caught:
        merged(written, tmp_path / "out")
    assert "model.w" in caught.value.message
    assert "Partial" in caught.value.message
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


def test_case_049_partial_over_one_rank_is_whole(tmp_path: pathlib.Path) -> None:
    """A mesh dim of size one has a single copy, so there is nothing to be summed."""
    weight = numbered(6, 4)
    written = write_ranks(tmp_path / "ckpt", (1, 2), {"model.w": Spread(weight, [Partial(), Shard(0)])}, names=None)
    merged(written, tmp_path / "out")
    assert_holds(tmp_path / "out", {"model.w": weight})


def test_case_042_the_report_is_json(tmp_path: pathlib.Path) -> None:
    """Reports of merges that ignored something can be printed (a Counter cannot be copied field by field)."""
    written = write_ranks(tmp_path / "ckpt", (2,), {"model.w": Spread(numbered(6, 4), [Shard(0)])})
    for rank in range(2):
        state = torch.load(written / f"model_world_size_2_rank_{rank}.pt", weights_only=False)
        state["model._extra_state"] = torch.zeros(3)
        torch.save(state, written / f"model_world_size_2_rank_{rank}.pt")
    report = merged(written, tmp_path / "out")
    assert sum(json.loads(json.dumps(report.as_json()))["ignored"].values()) == 1
