"""DeepSpeed: parts of a model with files of their own (experts, layers, tensor-parallel ranks), some of them lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from merge_stream.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompleteShardsError,
    MergeStreamError,
    UnsupportedError,
)
from merge_stream.options import OpenOptions
from tests.cases.naive import merged
from tests.formats.naive import DATA


def copied(case: str, tmp_path: Path) -> Path:
    shutil.copytree(DATA / case / "ckpt", tmp_path / "ckpt")
    return tmp_path / "ckpt"


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


def removed(folder: Path, pattern: str) -> Path:
    found = list(folder.rglob(pattern))
    assert found
    for path in found:
        path.unlink()
    return folder


def refusal(ckpt: Path, tmp_path: Path, error: type[MergeStreamError], **opening: str) -> str:
    with pytest.raises(error) as caught:
        merged(ckpt, tmp_path / "out", opening=OpenOptions(**opening))
    assert not (tmp_path / "out").exists()
    assert caught.value.hint
    return caught.value.message


@pytest.mark.parametrize("weights", ["master", "module"])
@pytest.mark.parametrize("case", ["deepspeed/moe_z2_ep2_w4", "deepspeed_old/moe_z2_ep2_w4"])
class TestExperts:
    def test_none_of_their_files_is_there(self, tmp_path: Path, case: str, weights: str) -> None:
        """The rest of the model is whole, and a merge of it would run through."""
        ckpt = removed(copied(case, tmp_path), "*_expert_*")
        assert "holds no expert files" in refusal(ckpt, tmp_path, IncompleteShardsError, weights=weights)

    def test_a_layer_of_them_is_missing(self, tmp_path: Path, case: str, weights: str) -> None:
        ckpt = removed(copied(case, tmp_path), "layer_1_expert_*")
        message = refusal(ckpt, tmp_path, IncompleteShardsError, weights=weights)
        assert "1 MoE layers, the model states list 2" in message

    @pytest.mark.parametrize("stated", [True, False])
    def test_the_last_one_is_missing(self, tmp_path: Path, case: str, weights: str, *, stated: bool) -> None:
        """Without `num_experts` the gate tells, which has a row for each expert."""
        ckpt = removed(copied(case, tmp_path), "layer_*_expert_3_*")
        if not stated and weights == "module":
            changed(next(ckpt.rglob("mp_rank_00_model_states.pt")), lambda state: state.update(num_experts=None))
            assert "chooses among 4" in refusal(ckpt, tmp_path, IncompleteShardsError, weights=weights)
        else:
            assert "missing: 3" in refusal(ckpt, tmp_path, IncompleteShardsError, weights=weights)


@pytest.mark.parametrize("what", ["lost", "of another shape"])
def test_experts_of_a_layer_are_alike(tmp_path: Path, what: str) -> None:
    """With --weights module nothing else tells what an expert consists of."""
    ckpt = copied("deepspeed/moe_z2_ep2_w4", tmp_path)

    def change(state: dict[str, Any]) -> None:
        name = next(name for name in state if name.endswith("fc2.weight"))
        state[name] = None if what == "lost" else state[name][:-1].clone()

    changed(next(ckpt.rglob("layer_1_expert_2_*")), change)
    assert "differ in fc2.weight" in refusal(ckpt, tmp_path, IncompleteShardsError, weights="module")


@pytest.mark.parametrize("what", ["lost", "of another shape"])
def test_the_module_is_compared_with_the_optimizers_list(tmp_path: Path, what: str) -> None:
    ckpt = copied("deepspeed/z2_bf16_multigroup_w3", tmp_path)

    def change(state: dict[str, Any]) -> None:
        module = state["module"]
        name = "model.layers.0.mlp.gate_proj.weight"
        module[name] = None if what == "lost" else module[name][:-1].clone()

    changed(next(ckpt.rglob("mp_rank_00_model_states.pt")), change)
    message = refusal(ckpt, tmp_path, CorruptCheckpointError, weights="module")
    assert "gate_proj.weight" in message
    assert "the optimizer lists it as" in message


class TestExpertsUnderTensorParallelism:
    """Whole experts, each in the file of some rank; or parts of every expert in the files of all ranks."""

    @pytest.mark.parametrize("weights", ["master", "module"])
    @pytest.mark.parametrize(
        ("case", "lost"),
        [
            ("moe_tp2_ep4_w4", "layer_0_expert_2_mp_rank_00*"),
            ("moe_tp2_ep4_w4", "layer_*_mp_rank_01*"),
            ("moe_tp2_cut_ep2_w4", "layer_0_expert_3_mp_rank_01*"),
            ("moe_tp2_cut_ep2_w4", "layer_0_expert_0_mp_rank_00*"),
            ("moe_tp2_cut_ep2_w4", "layer_*_mp_rank_01*"),
        ],
    )
    def test_a_file_is_missing(self, tmp_path: Path, case: str, lost: str, weights: str) -> None:
        """The half of an expert that is left looks like a whole, smaller one."""
        ckpt = removed(copied(f"deepspeed/{case}", tmp_path), lost)
        assert "expert" in refusal(ckpt, tmp_path, CheckpointError, weights=weights)

    def test_optimizer_files_of_two_ranks_changed_places(self, tmp_path: Path) -> None:
        ckpt = copied("deepspeed/moe_tp2_ep4_w4", tmp_path)
        one, two = (next(ckpt.rglob(f"*zero_pp_rank_1_mp_rank_0{mp}_optim*")) for mp in (0, 1))
        held = one.read_bytes()
        one.write_bytes(two.read_bytes())
        two.write_bytes(held)
        assert "do not round to the weights" in refusal(ckpt, tmp_path, CorruptCheckpointError)


class TestLayersOfAPipeline:
    """Stage 0 in fp32: nothing but the moments of the optimizer tells what was trained."""

    @pytest.mark.parametrize("layer", ["1", "2", "3"])
    @pytest.mark.parametrize("weights", ["master", "module"])
    def test_a_layer_file_is_missing(self, tmp_path: Path, layer: str, weights: str) -> None:
        ckpt = removed(copied("deepspeed/pp2_z0_w2", tmp_path), f"layer_0{layer}-model_states.pt")
        message = refusal(ckpt, tmp_path, IncompleteShardsError, weights=weights)
        assert "more than the layer files" in message

    def test_a_matrix_is_missing_in_a_layer_file(self, tmp_path: Path) -> None:
        """It is no further use of a tied layer, which another stage would have too."""
        ckpt = copied("deepspeed/pp2_z0_w2", tmp_path)
        changed(
            next(ckpt.rglob("layer_02-model_states.pt")), lambda state: state.update({"self_attn.k_proj.weight": None})
        )
        assert "more than the layer files" in refusal(ckpt, tmp_path, IncompleteShardsError)

    def test_all_of_them_are_missing(self, tmp_path: Path) -> None:
        ckpt = removed(copied("deepspeed/pp2_z0_w2", tmp_path), "layer_*")
        assert "holds no layer files" in refusal(ckpt, tmp_path, IncompleteShardsError)


class TestAffineMap:
    """What a newer DeepSpeed may say of a piece changes its values; skipping it would be a wrong weight."""

    def folder(self, tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
        ckpt = copied("deepspeed/tp2_z0_w2", tmp_path)
        for path in ckpt.rglob("*model_states.pt"):
            changed(path, lambda state: change(state["universal_checkpoint_info"]["affine_map"]))
        return ckpt

    def test_a_scaled_piece(self, tmp_path: Path) -> None:
        def scale(affine: dict[str, Any]) -> None:
            for placed in affine["params"].values():
                for rank in placed["ranks"].values():
                    for piece in rank["pieces"]:
                        piece["scale"] = 0.5

        ckpt = self.folder(tmp_path, scale)
        assert "is described with scale" in refusal(ckpt, tmp_path, UnsupportedError)

    @pytest.mark.parametrize("version", [2, "1", None])
    def test_another_version(self, tmp_path: Path, version: object) -> None:
        ckpt = self.folder(tmp_path, lambda affine: affine.update(version=version))
        assert "affine_map is of version" in refusal(ckpt, tmp_path, UnsupportedError)

    def test_a_piece_twice(self, tmp_path: Path) -> None:
        def twice(affine: dict[str, Any]) -> None:
            ranks = next(iter(affine["params"].values()))["ranks"]
            ranks[1]["pieces"] = ranks[0]["pieces"]

        refusal(self.folder(tmp_path, twice), tmp_path, MergeStreamError)


def test_tensor_parallel_ranks_of_two_saves_without_zero(tmp_path: Path) -> None:
    """Stage 0 has no optimizer files whose step could tell."""
    ckpt = copied("deepspeed/tp2_z0_w2", tmp_path)
    changed(next(ckpt.rglob("mp_rank_01_model_states.pt")), lambda state: state.update(global_steps=9))
    assert "has global_steps" in refusal(ckpt, tmp_path, CorruptCheckpointError)
