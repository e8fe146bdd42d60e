"""Section E: missing, misplaced and partial input. The numbers are those of the collection of cases."""

from __future__ import annotations

import json
import pathlib
import shutil
import time

import pytest
import torch
from torch.distributed.tensor import Shard

from merge_stream.errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    CorruptCheckpointError,
    IncompleteShardsError,
    UnknownFormatError,
)
from tests.cases.naive import assert_holds, merged, numbered
from tests.makers.dtensor import Spread, write_bin, write_dcp, write_hub, write_ranks

WEIGHTS = {"model.w": numbered(10, 4), "model.norm.weight": numbered(4, first=500)}
SPREAD = {name: Spread(tensor, [Shard(0)]) for name, tensor in WEIGHTS.items()}


def test_case_050_fsdp_config_is_not_needed(tmp_path: pathlib.Path) -> None:
    """World size from the names, the mesh from the tensors."""
    written = write_ranks(tmp_path / "ckpt", (4,), SPREAD, fsdp_config=False)
    assert not (written / "fsdp_config.json").exists()
    merged(written, tmp_path / "out")
    assert_holds(tmp_path / "out", WEIGHTS)


def test_case_050_a_config_that_contradicts_the_names_is_an_error(tmp_path: pathlib.Path) -> None:
    written = write_ranks(tmp_path / "ckpt", (4,), SPREAD)
    (written / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 8}))
    with pytest.raises(CheckpointError) as caught:
        merged(written, tmp_path / "out")
    assert "8" in caught.value.message
    assert "4" in caught.value.message
    assert caught.value.hint


def test_case_051_missing_rank_files_are_listed_at_once(tmp_path: pathlib.Path) -> None:
    """Sixteen ranks, each node kept its own eight: which eight are missing, and what to do."""
    here, there = write_ranks(tmp_path / "node0", (16,), SPREAD), tmp_path / "node1"
    there.mkdir()
    for rank in range(8, 16):
        shutil.move(here / f"model_world_size_16_rank_{rank}.pt", there)
    began = time.monotonic()
    with pytest.raises(IncompleteShardsError) as caught:
        merged(here, tmp_path / "out")
    assert time.monotonic() - began < 2
    assert "8 of 16 files model_world_size_16_rank_*.pt are missing" in caught.value.message
    assert "have ranks 0-7, missing ranks 8-15" in caught.value.message
    assert "--input" in caught.value.hint
    assert sorted(p.name for p in tmp_path.iterdir()) == ["node0", "node1"]
    merged([here, there], tmp_path / "out")
    assert_holds(tmp_path / "out", WEIGHTS)


def test_case_052_dcp_metadata_on_one_node(tmp_path: pathlib.Path) -> None:
    """A has `.metadata` and rank 0's files, B the other rank's; neither can be merged alone."""
    a, b = write_dcp(tmp_path / "a", 2, WEIGHTS), tmp_path / "b"
    b.mkdir()
    for path in a.glob("__1_*.distcp"):
        shutil.move(path, b)
    with pytest.raises(CheckpointError) as alone:
        merged(a, tmp_path / "out")
    assert "--input" in alone.value.hint
    with pytest.raises(CheckpointError) as without_metadata:
        merged(b, tmp_path / "out")
    assert ".metadata" in str(without_metadata.value)
    for order in ([a, b], [b, a]):
        merged(order, tmp_path / "out")
        assert_holds(tmp_path / "out", WEIGHTS)
        shutil.rmtree(tmp_path / "out")


def test_case_052_a_file_that_differs_between_folders_is_a_conflict(tmp_path: pathlib.Path) -> None:
    a, b = write_dcp(tmp_path / "a", 2, WEIGHTS), tmp_path / "b"
    shutil.copytree(a, b)
    damaged = b / "__1_0.distcp"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"__1_0\.distcp stands in two input folders"):
        merged([a, b], tmp_path / "out")
    damaged.write_bytes((a / "__1_0.distcp").read_bytes())
    merged([a, b], tmp_path / "out")
    assert_holds(tmp_path / "out", WEIGHTS)


@pytest.mark.parametrize("layout", ["ranks", "dcp", "dcp dim 1", "bin", "bin legacy", "hub"])
def test_case_054_every_layout_is_recognised(tmp_path: pathlib.Path, layout: str) -> None:
    """No option tells the type."""
    kind, _, how = layout.partition(" ")
    ckpt = tmp_path / "ckpt"
    if kind == "ranks":
        write_ranks(ckpt, (4,), SPREAD)
    elif kind == "dcp":
        write_dcp(ckpt, 3, WEIGHTS, dim=1 if how else 0)
    elif kind == "bin":
        write_bin(ckpt / "pytorch_model.bin", WEIGHTS, legacy=bool(how))
    else:
        write_hub(ckpt, WEIGHTS)
    report = merged(ckpt, tmp_path / "out")
    assert report.format == {"ranks": "fsdp", "dcp": "dcp", "bin": "torch_full", "hub": "hugging_face"}[kind]
    assert_holds(tmp_path / "out", WEIGHTS)


def test_case_054_an_unknown_folder_says_what_was_seen_and_expected(tmp_path: pathlib.Path) -> None:
    ckpt = tmp_path / "ckpt"
    ckpt.mkdir()
    (ckpt / "weights.npz").write_bytes(b"x")
    (ckpt / "notes.txt").write_text("x")
    with pytest.raises(UnknownFormatError) as caught:
        merged(ckpt, tmp_path / "out")
    assert "notes.txt, weights.npz" in caught.value.message
    assert "model_world_size_" in caught.value.hint
    assert ".metadata" in caught.value.hint


def test_case_055_a_parent_with_one_checkpoint(tmp_path: pathlib.Path) -> None:
    """Descended into, and told."""
    write_dcp(tmp_path / "run" / "step_7" / "pytorch_model_fsdp_0", 2, WEIGHTS)
    report = merged(tmp_path / "run", tmp_path / "out")
    assert_holds(tmp_path / "out", WEIGHTS)
    assert any("step_7/pytorch_model_fsdp_0" in note for note in report.notes)


def test_case_055_a_parent_with_two_lists_the_choices(tmp_path: pathlib.Path) -> None:
    for step in (7, 12):
        write_dcp(tmp_path / "run" / f"step_{step}" / "pytorch_model_fsdp_0", 2, WEIGHTS)
    with pytest.raises(AmbiguousCheckpointError) as caught:
        merged(tmp_path / "run", tmp_path / "out")
    for step in (7, 12):
        assert f"step_{step}/pytorch_model_fsdp_0" in caught.value.message
    assert "step_12/pytorch_model_fsdp_0" in caught.value.hint
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_case_055_deeper_than_three_folders_is_not_searched(tmp_path: pathlib.Path) -> None:
    write_dcp(tmp_path / "run" / "a" / "b" / "c" / "d", 2, WEIGHTS)
    with pytest.raises(UnknownFormatError):
        merged(tmp_path / "run", tmp_path / "out")


def test_case_054_one_file_of_a_checkpoint_stands_for_its_folder(tmp_path: pathlib.Path) -> None:
    """A rank file is a part: the whole folder is taken, and that is told."""
    written = write_ranks(tmp_path / "ckpt", (2,), SPREAD)
    report = merged(written / "model_world_size_2_rank_0.pt", tmp_path / "out")
    assert_holds(tmp_path / "out", WEIGHTS)
    assert any("is one file of a checkpoint" in note for note in report.notes)


def test_case_054_a_plain_state_dict_of_any_name(tmp_path: pathlib.Path) -> None:
    (tmp_path / "ckpt").mkdir()
    torch.save(dict(WEIGHTS), tmp_path / "ckpt" / "final.pt")
    merged(tmp_path / "ckpt", tmp_path / "out")
    assert_holds(tmp_path / "out", WEIGHTS)
