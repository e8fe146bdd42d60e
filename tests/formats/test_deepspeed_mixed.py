"""DeepSpeed: files of two saves in one folder, where every single file is whole and the sizes fit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from merge_stream.errors import CorruptCheckpointError, IncompleteShardsError, MergeStreamError
from merge_stream.options import OpenOptions
from tests.cases.naive import merged, numbered
from tests.makers.zero_files import ZeroRun, write_zero

EVEN = {"model.a": numbered(8, 4), "model.b": numbered(16, 8, first=100), "model.c": numbered(32, first=400)}
OPTIM, MODEL = "*_optim_states.pt", "*_model_states.pt"


def save(folder: Path, **run: Any) -> Path:
    return write_zero(folder, ZeroRun([EVEN], **run)) / "global_step7"


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


def refusal(
    ckpt: Path, tmp_path: Path, *, error: type[MergeStreamError] = CorruptCheckpointError, **opening: str
) -> str:
    with pytest.raises(error) as caught:
        merged(ckpt, tmp_path / "out", opening=OpenOptions(**opening))
    assert not (tmp_path / "out").exists()
    assert caught.value.hint
    return caught.value.message


class TestStages:
    """Every size is a multiple of 2W, so that both layouts have the same number of elements on each rank."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    @pytest.mark.parametrize(("stage", "other"), [(2, 3), (1, 3), (3, 2), (3, 1)])
    def test_optimizer_files_of_another_stage(self, tmp_path: Path, stage: int, other: int, dtype: torch.dtype) -> None:
        ckpt = save(tmp_path / "ckpt", stage=stage, dtype=dtype)
        for path in save(tmp_path / "other", stage=other, dtype=dtype).glob(OPTIM):
            shutil.copy(path, ckpt)
        assert f"is of ZeRO stage {other}, but" in refusal(ckpt, tmp_path)

    @pytest.mark.parametrize("newer", [2, 3])
    @pytest.mark.parametrize("weights", ["master", "module"])
    def test_model_states_of_two_stages(self, tmp_path: Path, newer: int, weights: str) -> None:
        """A run that goes on with another stage, in the same folder under the same tag."""
        ckpt = save(tmp_path / "ckpt", stage=5 - newer)
        for path in save(tmp_path / "newer", stage=newer).iterdir():
            shutil.copy(path, ckpt)
        assert "which no save writes both" in refusal(ckpt, tmp_path, weights=weights)

    def test_a_file_that_contradicts_itself(self, tmp_path: Path) -> None:
        ckpt = save(tmp_path / "ckpt", stage=3)
        for path in ckpt.glob(OPTIM):
            changed(path, lambda state: state["optimizer_state_dict"].update(zero_stage=2))
        assert "has fp32_flat_groups, and says that it is of ZeRO stage 2" in refusal(ckpt, tmp_path)


@pytest.mark.parametrize("key", ["global_steps", "dp_world_size", "mp_world_size"])
def test_model_states_of_two_saves_in_stage_3(tmp_path: Path, key: str) -> None:
    """The frozen fragments and buffers would be those of two steps; the optimizer files do not tell."""
    ckpt = save(tmp_path / "ckpt", stage=3, frozen={"model.f": numbered(9)})
    for rank in (0, 1):
        changed(
            ckpt / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
            lambda state, rank=rank: state.update({key: 7 + rank}),
        )
    assert f"has {key} 7" in refusal(ckpt, tmp_path)


@pytest.mark.parametrize("weights", ["master", "module"])
def test_model_parallel_ranks_of_two_saves(tmp_path: Path, weights: str) -> None:
    """With --weights module no optimizer file is read whose step could tell."""
    ckpt = _two_model_parallel_ranks(tmp_path)
    changed(ckpt / "mp_rank_01_model_states.pt", lambda state: state.update(global_steps=9))
    assert "has global_steps" in refusal(ckpt, tmp_path, weights=weights)


@pytest.mark.parametrize("weights", ["master", "module"])
@pytest.mark.parametrize("left", ["its optimizer states", "mp_world_size", "an expert file"])
def test_the_last_model_parallel_rank_is_missing(tmp_path: Path, left: str, weights: str) -> None:
    """Half a model, if the files that are there were all that counts (up to 0.16.9 none lists the degrees)."""
    ckpt = _two_model_parallel_ranks(tmp_path)
    (ckpt / "mp_rank_01_model_states.pt").unlink()
    if left != "its optimizer states":
        for path in ckpt.glob("*mp_rank_01_optim_states.pt"):
            path.unlink()
    if left == "an expert file":
        torch.save({}, ckpt / "layer_0_expert_0_mp_rank_01_model_states.pt")
    if left != "mp_world_size":
        changed(ckpt / "mp_rank_00_model_states.pt", lambda state: state.update(mp_world_size=1))
    message = refusal(ckpt, tmp_path, error=IncompleteShardsError, weights=weights)
    assert ("the run had 2" if left == "mp_world_size" else "not of 1") in message


def _two_model_parallel_ranks(tmp_path: Path) -> Path:
    ckpt = save(tmp_path / "ckpt")
    for path in list(ckpt.iterdir()):
        changed(path, lambda state: state.update(mp_world_size=2, global_steps=7) if "module" in state else None)
        shutil.copy(path, ckpt / path.name.replace("mp_rank_00", "mp_rank_01"))
    return ckpt


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("side", [OPTIM, MODEL])
def test_a_group_that_one_side_does_not_have(tmp_path: Path, stage: int, side: str) -> None:
    """The 16-bit weights of the lost group would stand for its masters."""
    groups = [{name: tensor} for name, tensor in EVEN.items()]
    ckpt = write_zero(tmp_path / "ckpt", ZeroRun(groups, stage=stage)) / "global_step7"
    for path in ckpt.glob(side):
        changed(path, _without_the_last_group)
    message = refusal(ckpt, tmp_path)
    assert "groups" in message if stage < 3 else "elements of masters" in message


def _without_the_last_group(state: dict[str, Any]) -> None:
    held = state.get("optimizer_state_dict", state)
    for key in ("single_partition_of_fp32_groups", "fp32_flat_groups", "group_paddings", "param_shapes"):
        if key in held:
            held[key] = held[key][:-1]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_buffer_that_is_named_and_not_there_is_told(tmp_path: Path, stage: int) -> None:
    """A model's own state_dict may leave it out, so it is no error."""
    ckpt = save(tmp_path / "ckpt", stage=stage, buffers={"model.scale": numbered(2)})
    for path in ckpt.glob(MODEL):
        changed(path, lambda state: state["module"].pop("model.scale"))
    report = merged(ckpt, tmp_path / "out")
    assert any("model.scale" in note for note in report.notes)


def test_masters_of_two_types(tmp_path: Path) -> None:
    ckpt = save(tmp_path / "ckpt")

    def narrow(state: dict[str, Any]) -> None:
        held = state["optimizer_state_dict"]
        held["single_partition_of_fp32_groups"] = [t.bfloat16() for t in held["single_partition_of_fp32_groups"]]

    changed(ckpt / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", narrow)
    assert "masters of type F32" in refusal(ckpt, tmp_path)
