"""Section N: verification and what a user sees (averaging and batch come later)."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import torch

from merge_stream import cli, console
from merge_stream.engine.events import Phase, Progress
from tests.folder.models import checkpoint, llama, llama_config, merge, model_folder, tensors_of
from tests.makers.dtensor import write_dcp

Q = "model.layers.0.self_attn.q_proj.weight"


def test_case_159_one_step_of_one_element_fails_with_name_and_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = llama()
    source = checkpoint(tmp_path / "ckpt", tensors, llama_config())
    tensors[Q].view(torch.int16)[3, 5] += 1
    changed = model_folder(tmp_path / "changed", tensors, llama_config())
    assert cli.run(["verify", str(changed), "--against", str(source), "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    (difference,) = told["differences"]
    assert difference["name"] == Q
    assert difference["different"] == 1
    assert difference["first"] == [3, 5]
    assert difference["max_abs"] > 0
    assert cli.run(["verify", str(changed), "--against", str(source), "--rtol", "0.02"]) == 0
    capsys.readouterr()
    assert cli.run(["verify", str(changed), "--against", str(source)]) == 3
    told_in_words = capsys.readouterr().out
    assert Q in told_in_words
    assert "[3, 5]" in told_in_words


def test_case_159_a_declared_cast_is_compared_exactly(tmp_path: Path) -> None:
    tensors = llama(dtype=torch.float32)
    source = checkpoint(tmp_path / "ckpt", tensors, llama_config(torch_dtype="float32"))
    cast = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert cli.run(["verify", str(model_folder(tmp_path / "a", cast)), "--against", str(source)]) == 0
    cast[Q].view(torch.int16)[0, 0] ^= 1
    assert cli.run(["verify", str(model_folder(tmp_path / "b", cast)), "--against", str(source)]) == 3


def test_case_161_what_is_known_at_the_start_fails_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in less than five seconds, before any file exists; and `plan` fails likewise."""
    out = tmp_path / "out"
    good = checkpoint(tmp_path / "good", llama(), llama_config())
    no_config = checkpoint(tmp_path / "no_config", llama())
    unmapped = checkpoint(
        tmp_path / "unmapped", llama() | {"surprise.w": torch.ones(2)}, llama_config(model_type="odd")
    )
    lost = checkpoint(tmp_path / "lost", llama(), llama_config())
    (lost / "model_world_size_1_rank_0.pt").rename(lost / "model_world_size_2_rank_0.pt")
    (lost / "fsdp_config.json").unlink()
    for source, options, code in (
        (no_config, (), 5),
        (good, ("--dtype", "int3"), 2),
        (good, ("--max-shard-size", "many"), 2),
        (unmapped, (), 1),
        (lost, (), 5),
        (good, ("--max-mem", "1k"), 4),
        (good, ("--base-model", str(tmp_path / "nowhere")), 5),
    ):
        for command in ("merge", "plan"):
            began = time.monotonic()
            assert cli.run([command, str(source), str(out), *options]) == code, (source, options)
            assert time.monotonic() - began < 5
            assert "error: " in capsys.readouterr().err
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("Usage", (), {"free": 100})())
    assert merge(good, out) == 4
    assert "100 B free" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good", "lost", "no_config", "unmapped"]


def test_case_163_a_log_gets_a_line_at_least_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes, rate, time left and memory, one line each, for an hour of slow reading."""
    clock = iter(range(1_000_000))
    monkeypatch.setattr(console.time, "monotonic", lambda: float(next(clock)))
    with console.Console(quiet=False, allowed=10**9) as told:
        told(Phase("merging", 3_600_000))
        for _ in range(3_600):
            told(Progress(1_000))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 360
    assert all(
        re.fullmatch(r"merging: \d+ % [\d.]+ k?M?B, [\d.]+ k?B/s, .+ left, memory .+ of 1(\.00)? GB", line)
        for line in lines[1:]
    ), lines[1]


def test_case_163_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with console.Console(quiet=True, allowed=10**9) as told:
        told(Phase("merging", 10))
        told(Progress(10))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("nested", ["model.", "app.model.", ""])
def test_case_166_only_the_model_of_a_dcp_is_taken(tmp_path: Path, nested: str) -> None:
    tensors = llama()
    state = {f"{nested}{name}": tensor for name, tensor in tensors.items()}
    state |= {f"optim.state.{name}.exp_avg": torch.zeros(4) for name in tensors}
    source = write_dcp(tmp_path / "ckpt", 2, state)
    base = model_folder(tmp_path / "base", tensors, llama_config())
    assert merge(source, tmp_path / "out", "--base-model", str(base)) == 0
    found = tensors_of(tmp_path / "out")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_case_166_bytes_of_other_parts_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What torch itself writes: nested parts, numbers and texts as BYTE_IO entries."""
    from torch.distributed import checkpoint as dcp

    tensors = llama()
    state = {
        "model": tensors,
        "optim": {"state": {name: {"exp_avg": torch.zeros_like(t)} for name, t in tensors.items()}, "lr": 1e-4},
        "dataloader": {"epoch": 3, "state": b"bytes", "worker": "words"},
        "train_step": 7,
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=str(tmp_path / "ckpt"), no_dist=True)
    base = model_folder(tmp_path / "base", tensors, llama_config())
    assert merge(tmp_path / "ckpt", tmp_path / "out", "--base-model", str(base), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    found = tensors_of(tmp_path / "out")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert sum(told["ignored"].values()) == len(tensors) + 5


def test_case_161_a_missing_tokenizer_is_told_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = checkpoint(tmp_path / "bare", llama(), llama_config())
    whole = checkpoint(tmp_path / "whole", llama(), llama_config(), {"tokenizer.json": "{}"})
    for source, wanted in ((bare, True), (whole, False)):
        assert cli.run(["plan", str(source), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert any("no tokenizer" in text for text in [*told["warnings"], *told["notes"]]) is wanted
    base = model_folder(tmp_path / "base", llama(), llama_config())
    assert cli.run(["plan", str(bare), "--base-model", str(base), "--json"]) == 0
    assert "there is no tokenizer beside the checkpoint, nor in the base model" in capsys.readouterr().out
