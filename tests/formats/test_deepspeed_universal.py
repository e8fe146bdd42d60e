"""Universal checkpoints: what stands beside the converted parameters decides whether they are all there, and whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from merge_stream.errors import CorruptCheckpointError, IncompleteShardsError, MergeStreamError, UnsupportedError
from merge_stream.options import OpenOptions
from tests.cases.naive import assert_holds, merged, numbered
from tests.formats.naive import DATA
from tests.makers.zero_files import ZeroRun, write_zero

WEIGHTS = {"model.a": numbered(6, 4), "model.b": numbered(8, first=40), "model.c": numbered(4, 6, first=60)}
FROZEN = {"model.f": numbered(5, 3, first=90)}
BUFFERS = {"model.ids": torch.arange(7)}


def universal(folder: Path, *, stage: int = 2, converted: Mapping[str, torch.Tensor] | None = None) -> Path:
    """As ds_to_universal of 0.19.8 writes it: stage 3 flat and bare, else with its shape, what is frozen too."""
    write_zero(folder, ZeroRun([WEIGHTS], stage=stage, frozen=FROZEN, buffers=BUFFERS, tag="step_universal"))
    place = folder / "step_universal"
    for path in place.glob("*optim_states.pt"):
        path.unlink()
    if converted is None:
        converted = WEIGHTS if stage == 3 else {**WEIGHTS, **{n: t.float() for n, t in {**FROZEN, **BUFFERS}.items()}}
    for name, tensor in converted.items():
        _write(place, name, tensor.reshape(-1) if stage == 3 else {"cat_dim": 0, "param": tensor})
    return folder


def _write(place: Path, name: str, value: object) -> None:
    (place / "zero" / name).mkdir(parents=True)
    torch.save(value, place / "zero" / name / "fp32.pt")


def refusal(folder: Path, tmp_path: Path, error: type[MergeStreamError], **opening: str) -> str:
    with pytest.raises(error) as caught:
        merged(folder, tmp_path / "out", opening=OpenOptions(**opening))
    assert not (tmp_path / "out").exists()
    assert caught.value.hint
    return caught.value.message


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


@pytest.mark.parametrize("stage", [2, 3])
def test_everything_is_there(tmp_path: Path, stage: int) -> None:
    """Integers stay integers, though the converter writes them as fp32."""
    merged(universal(tmp_path / "ckpt", stage=stage), tmp_path / "out")
    assert_holds(tmp_path / "out", {**WEIGHTS, **FROZEN, **BUFFERS})


def test_the_16_bit_weights_of_the_copied_model_states(tmp_path: Path) -> None:
    merged(universal(tmp_path / "ckpt"), tmp_path / "out", opening=OpenOptions(weights="module"))
    narrow = {name: tensor.bfloat16() for name, tensor in {**WEIGHTS, **FROZEN}.items()}
    assert_holds(tmp_path / "out", {**narrow, **BUFFERS})


def test_stage_3_has_no_16_bit_weights(tmp_path: Path) -> None:
    folder = universal(tmp_path / "ckpt", stage=3)
    assert "fp32 weights alone" in refusal(folder, tmp_path, UnsupportedError, weights="module")


@pytest.mark.parametrize("stage", [2, 3])
def test_a_parameter_is_missing(tmp_path: Path, stage: int) -> None:
    folder = universal(tmp_path / "ckpt", stage=stage)
    (folder / "step_universal" / "zero" / "model.b" / "fp32.pt").unlink()
    assert "lacks 1 parameters that the model states list: model.b" in refusal(folder, tmp_path, IncompleteShardsError)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_parameter_of_another_conversion(tmp_path: Path, stage: int) -> None:
    folder = universal(tmp_path / "ckpt", stage=stage)
    _write(folder / "step_universal", "model.older", numbered(4))
    assert "the model states do not list" in refusal(folder, tmp_path, CorruptCheckpointError)


@pytest.mark.parametrize("stage", [2, 3])
def test_without_model_states_nothing_lists_the_parameters(tmp_path: Path, stage: int) -> None:
    folder = universal(tmp_path / "ckpt", stage=stage)
    for path in (folder / "step_universal").glob("*model_states.pt"):
        path.unlink()
    assert "has no model states" in refusal(folder, tmp_path, IncompleteShardsError)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", ["transposed", "flat", "less", "more"])
def test_shapes_that_are_not_those_of_the_run(tmp_path: Path, shape: str, dtype: torch.dtype) -> None:
    """No config.json knows every shape, so the model states have to."""
    a = WEIGHTS["model.a"]
    wrong = {"transposed": a.T.contiguous(), "flat": a.reshape(-1), "less": a[:3], "more": torch.cat([a, a])}[shape]
    folder = universal(tmp_path / "ckpt", converted={**WEIGHTS, "model.a": wrong})

    def as_run(state: dict[str, Any]) -> None:
        state["module"] = {n: t.to(dtype) if t.is_floating_point() else t for n, t in state["module"].items()}

    changed(folder / "step_universal" / "mp_rank_00_model_states.pt", as_run)
    assert "model.a" in refusal(folder, tmp_path, CorruptCheckpointError)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_values_that_are_not_those_of_the_run(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = universal(tmp_path / "ckpt", converted={**WEIGHTS, "model.b": WEIGHTS["model.b"] * 2})
    changed(
        folder / "step_universal" / "mp_rank_00_model_states.pt",
        lambda state: state.update(module={n: t.to(dtype) for n, t in state["module"].items()}),
    )
    assert "do not round to the weights" in refusal(folder, tmp_path, CorruptCheckpointError)


class TestTensorParallel:
    """Two ranks; a is cut in rows, c in columns, b is whole on both."""

    def folder(self, tmp_path: Path, frozen: torch.Tensor | None = None) -> Path:
        folder = universal(tmp_path / "ckpt", converted=WEIGHTS)
        place = folder / "step_universal"
        whole = torch.load(place / "mp_rank_00_model_states.pt", weights_only=False)
        for rank in (0, 1):
            state = dict(whole)
            module = dict(whole["module"])
            module["model.a"] = module["model.a"].chunk(2)[rank].clone()
            module["model.c"] = module["model.c"].chunk(2, 1)[rank].contiguous()
            if frozen is None:
                del module["model.f"]
            else:
                module["model.f"] = frozen.chunk(2, 1)[rank].contiguous()
            state["module"] = module
            state["param_shapes"] = [{name: module[name].shape for name in WEIGHTS}]
            state["frozen_param_shapes"] = {}
            state["universal_checkpoint_info"] = {
                "tp_replicated_parameter_patterns": [r"^model\.(b|ids)$"],
                "parameter_with_row_parallelism_patterns": [r"^model\.(c|f)$"],
            }
            state["mp_world_size"] = 2
            torch.save(state, place / f"mp_rank_0{rank}_model_states.pt")
        return folder

    def test_the_parts_are_joined(self, tmp_path: Path) -> None:
        merged(self.folder(tmp_path), tmp_path / "out")
        assert_holds(tmp_path / "out", {**WEIGHTS, **BUFFERS})

    @pytest.mark.parametrize("name", ["model.a", "model.c"])
    def test_half_of_a_parameter(self, tmp_path: Path, name: str) -> None:
        """The converter of 0.19.8 writes the first rank's part of what has no optimizer states."""
        folder = self.folder(tmp_path)
        dim = 0 if name == "model.a" else 1
        shutil.rmtree(folder / "step_universal" / "zero" / name)
        part = WEIGHTS[name].chunk(2, dim)[0].contiguous()
        _write(folder / "step_universal", name, {"param": part})
        message = refusal(folder, tmp_path, CorruptCheckpointError)
        assert f"has the shape {list(part.shape)}" in message

    def test_frozen_parts_are_joined_from_the_model_states(self, tmp_path: Path) -> None:
        frozen = numbered(3, 8, first=200)
        folder = self.folder(tmp_path, frozen)
        _write(folder / "step_universal", "model.f", {"param": frozen.chunk(2, 1)[0].contiguous()})
        merged(folder, tmp_path / "out")
        assert_holds(tmp_path / "out", {**WEIGHTS, **BUFFERS, "model.f": frozen})

    def test_a_rank_is_missing(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path)
        (folder / "step_universal" / "mp_rank_01_model_states.pt").unlink()
        assert "the run had 2" in refusal(folder, tmp_path, IncompleteShardsError)


def test_experts_are_as_many_as_the_file_says(tmp_path: Path) -> None:
    shutil.copytree(DATA / "deepspeed" / "uc_autoep_z3_ep2_w4" / "ckpt", tmp_path / "ckpt")
    path = next((tmp_path / "ckpt").rglob("*experts.w1/fp32.pt"))
    changed(path, lambda state: state.update(param=state["param"][:3].clone()))
    message = refusal(tmp_path / "ckpt", tmp_path, CorruptCheckpointError)
    assert "experts.w1" in message
