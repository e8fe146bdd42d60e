"""Section H: DeepSpeed. The numbers are those of the collection of cases."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil

import pytest
import torch
from safetensors.torch import load_file

from merge_stream.errors import IncompleteShardsError, MergeStreamError
from merge_stream.options import OpenOptions
from tests.cases.naive import NAMES_AS_THEY_ARE, assert_holds, merged, numbered
from tests.formats.naive import DATA
from tests.makers.zero_files import ZeroRun, write_zero

ODD = {"model.a": numbered(5), "model.b": numbered(7, 3, first=50), "model.c": numbered(1, first=90)}
BF16 = dataclasses.replace(NAMES_AS_THEY_ARE, dtype="bf16")


@pytest.mark.parametrize("whole", [False, True], ids=["padding left out", "padding saved"])
def test_case_093_padding_of_zero_2(tmp_path: pathlib.Path, *, whole: bool) -> None:
    """57 elements over 2 ranks are aligned to 60; the partitions carry none or all of the 3."""
    tensors = {"model.w": numbered(19, 3)}
    run = ZeroRun([tensors], whole_padding=whole)
    merged(write_zero(tmp_path / "ckpt", run), tmp_path / "out")
    assert_holds(tmp_path / "out", tensors)


def test_case_093_more_than_padding_is_left_over(tmp_path: pathlib.Path) -> None:
    """The model states list fewer parameters than the flat vector has."""
    folder = write_zero(tmp_path / "ckpt", ZeroRun([{"model.w": numbered(19, 3), "model.v": numbered(9)}]))
    states = folder / "global_step7" / "mp_rank_00_model_states.pt"
    content = torch.load(states, weights_only=False)
    del content["param_shapes"][0]["model.v"]
    torch.save(content, states)
    with pytest.raises(MergeStreamError, match="have 57 elements, the flat masters of 2 ranks have 68"):
        merged(folder, tmp_path / "out")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_case_094_odd_sizes_on_any_number_of_ranks(tmp_path: pathlib.Path, stage: int, ranks: int) -> None:
    """Stage 3 pads each parameter to a multiple of W; a wrong offset would shift everything after the first."""
    merged(write_zero(tmp_path / "ckpt", ZeroRun([ODD], stage=stage, ranks=ranks)), tmp_path / "out")
    assert_holds(tmp_path / "out", ODD)


@pytest.mark.parametrize("stage", [2, 3])
def test_case_095_shared_parameters_are_there(tmp_path: pathlib.Path, stage: int) -> None:
    """The alias is in no list of shapes; without a config that ties them both are written."""
    embed = numbered(6, 4)
    run = ZeroRun(
        [{"model.embed_tokens.weight": embed}], stage=stage, shared={"lm_head.weight": "model.embed_tokens.weight"}
    )
    merged(write_zero(tmp_path / "ckpt", run), tmp_path / "out")
    assert_holds(tmp_path / "out", {"model.embed_tokens.weight": embed, "lm_head.weight": embed})


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_case_097_frozen_parameters(tmp_path: pathlib.Path, stage: int) -> None:
    """Stage 3 keeps fragments of them in the model states, stage 1 lists them nowhere but in `module`."""
    frozen = {"model.frozen": numbered(5, 3, first=30)}
    run = ZeroRun([ODD], stage=stage, frozen=frozen)
    merged(write_zero(tmp_path / "ckpt", run), tmp_path / "out")
    assert_holds(tmp_path / "out", ODD | frozen)


def test_case_097_a_parameter_that_is_nowhere_on_disk(tmp_path: pathlib.Path) -> None:
    """Trained without the optimizer: ZeRO stage 3 saves a placeholder only."""
    folder = write_zero(tmp_path / "ckpt", ZeroRun([ODD], stage=3, lost=["model.gone"]))
    with pytest.raises(IncompleteShardsError, match=r"nowhere on disk.*model\.gone"):
        merged(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stage", [2, 3])
def test_case_098_frozen_ones_left_out_on_request(tmp_path: pathlib.Path, stage: int) -> None:
    run = ZeroRun([ODD], stage=stage, frozen={"model.frozen": numbered(5, 3)})
    report = merged(write_zero(tmp_path / "ckpt", run), tmp_path / "out", opening=OpenOptions(exclude_frozen=True))
    assert_holds(tmp_path / "out", ODD)
    assert report.ignored["frozen parameters (--exclude-frozen)"] == 1


@pytest.mark.parametrize("weights", ["master", "module"])
def test_case_100_expert_files(tmp_path: pathlib.Path, weights: str) -> None:
    """Written by DeepSpeed's engine: 2 layers of 4 experts, 2 expert-parallel ranks; its own weights are the truth."""
    case = DATA / "deepspeed" / "moe_z2_ep2_w4"
    expected = load_file(case / ("expected" if weights == "master" else "expected_module") / "model.safetensors")
    assert sum("deepspeed_experts" in name for name in expected) >= 8
    merged(case / "ckpt", tmp_path / "out", opening=OpenOptions(weights=weights))
    assert_holds(tmp_path / "out", expected)


@pytest.mark.parametrize("weights", ["master", "module"])
def test_case_100_a_lost_expert_is_named(tmp_path: pathlib.Path, weights: str) -> None:
    shutil.copytree(DATA / "deepspeed" / "moe_z2_ep2_w4" / "ckpt", tmp_path / "ckpt")
    (tmp_path / "ckpt" / "global_step2" / "layer_1_expert_2_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(IncompleteShardsError, match="2"):
        merged(tmp_path / "ckpt", tmp_path / "out", opening=OpenOptions(weights=weights))


@pytest.mark.parametrize("stage", [2, 3])
def test_case_102_bf16_at_once(tmp_path: pathlib.Path, stage: int) -> None:
    """No fp32 file on the way; stage 2 reads the 16-bit weights themselves."""
    report = merged(write_zero(tmp_path / "ckpt", ZeroRun([ODD], stage=stage)), tmp_path / "out", BF16)
    assert_holds(tmp_path / "out", {name: tensor.to(torch.bfloat16) for name, tensor in ODD.items()})
    assert report.output_nbytes < 8192


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_case_104_names_of_files_and_ranks_beyond_ten(tmp_path: pathlib.Path, dtype: torch.dtype) -> None:
    """`bf16_` before the names or not; rank 10 comes after rank 2."""
    tensors = {"model.w": numbered(41, 3)}
    merged(write_zero(tmp_path / "ckpt", ZeroRun([tensors], ranks=12, dtype=dtype)), tmp_path / "out")
    assert_holds(tmp_path / "out", tensors)


def test_case_104_the_missing_rank_is_named(tmp_path: pathlib.Path) -> None:
    folder = write_zero(tmp_path / "ckpt", ZeroRun([ODD], ranks=12))
    (folder / "global_step7" / "bf16_zero_pp_rank_10_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(IncompleteShardsError, match="those of ranks 10 are missing"):
        merged(folder, tmp_path / "out")


def test_case_106_a_file_name_as_out_is_refused(tmp_path: pathlib.Path) -> None:
    folder = write_zero(tmp_path / "ckpt", ZeroRun([ODD]))
    with pytest.raises(MergeStreamError, match=r"out\.safetensors"):
        merged(folder, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
