"""Tensors that no name leads to: counted and named, refused where they look like weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.folder.models import checkpoint, llama, llama_config, merge, tensors_of

RANK = "model_world_size_1_rank_0.pt"


class Shadow:
    """An object with tensors, as averaging of weights keeps them."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = list(tensors)


def rank_file(folder: Path, more: dict[Any, Any]) -> Path:
    source = checkpoint(folder, llama(), llama_config())
    torch.save({**llama(), **more}, source / RANK)
    return source


def full(folder: Path, more: dict[Any, Any], beside: dict[str, Any] | None = None) -> Path:
    source = checkpoint(folder, llama(), llama_config())
    (source / RANK).unlink()
    (source / "fsdp_config.json").unlink()
    torch.save({"model": {**llama(), **more}, **(beside or {})}, source / "model.pt")
    return source


@pytest.mark.parametrize("made", [rank_file, full])
class TestHidden:
    def test_counted_and_named_when_they_are_no_weights(
        self, made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        state = {"counts": [torch.arange(4), (torch.ones(()), {"x": torch.ones(3)})], "words": ["a", 1]}
        assert merge(made(tmp_path / "ckpt", state), tmp_path / "out", "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert told["ignored"]["tensors in lists or objects"] == 3
        assert any(
            "3 tensors without names of their own were left out" in n and "counts[0] [4]" in n for n in told["notes"]
        )
        assert tensors_of(tmp_path / "out").keys() == llama().keys()

    def test_refused_when_they_look_like_weights(
        self, made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = made(tmp_path / "ckpt", {"experts": [torch.ones(4, 8), torch.ones(4, 8).half()]})
        assert merge(source, tmp_path / "out") == 1
        told = capsys.readouterr().err
        assert "2 tensors without a name of a parameter would be lost" in told
        assert "experts[1] [4, 8]" in told
        assert "hint: save a state dict that has a name for each tensor" in told
        assert not (tmp_path / "out").exists()

    def test_a_value_inside_itself_ends(self, made: Any, tmp_path: Path) -> None:
        endless: list[Any] = [torch.ones(2)]
        endless.append(endless)
        assert merge(made(tmp_path / "ckpt", {"endless": endless}), tmp_path / "out") == 0


def test_under_a_number_in_a_rank_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert merge(rank_file(tmp_path / "ckpt", {7: torch.ones(4, 8)}), tmp_path / "out") == 1
    assert "[7] [4, 8]" in capsys.readouterr().err
    assert merge(rank_file(tmp_path / "few", {7: torch.ones(4), (1, 2): "x"}), tmp_path / "out", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert "1 tensor without a name of its own was left out: [7] [4]" in told["notes"]


def test_an_object_with_weights_is_no_python_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert merge(full(tmp_path / "ckpt", {"ema": Shadow(torch.ones(8, 8))}), tmp_path / "out") == 1
    assert "ema[tensors][0] [8, 8]" in capsys.readouterr().err


def test_what_stands_beside_the_model_is_not_looked_at(tmp_path: Path) -> None:
    """Lightning's optimizer_states is a list of whole optimizer states."""
    states = [{"state": {0: {"exp_avg": torch.ones(8, 8)}}, "param_groups": [{"lr": 0.1}]}]
    assert merge(full(tmp_path / "ckpt", {}, {"optimizer_states": states}), tmp_path / "out") == 0
