"""DeepSpeed and ColossalAI: killed merges go on to the same bytes, and a merge of 200 MB of memory is whole."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable

import pytest
import torch

from merge_stream.testing.memory import measure
from tests.cases.naive import assert_holds
from tests.crash.kill_resume import CONFIG, Harness, model_of
from tests.makers.zero_files import ZeroRun, write_zero

pytestmark = [pytest.mark.crash, pytest.mark.slow]


def _zero(folder: pathlib.Path, megabytes: int, *, stage: int) -> pathlib.Path:
    tensors = list(model_of(megabytes).items())
    groups = [dict(tensors[:5]), dict(tensors[5:])]
    write_zero(folder, ZeroRun(groups, stage=stage, ranks=3))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def _zero2(folder: pathlib.Path, megabytes: int) -> pathlib.Path:
    return _zero(folder, megabytes, stage=2)


def _zero3(folder: pathlib.Path, megabytes: int) -> pathlib.Path:
    return _zero(folder, megabytes, stage=3)


def _universal(folder: pathlib.Path, megabytes: int) -> pathlib.Path:
    _zero2(folder, megabytes)
    place = folder / "global_step7"
    for path in place.glob("*optim*"):
        path.unlink()
    for name, tensor in model_of(megabytes).items():
        (place / "zero" / name).mkdir(parents=True)
        torch.save({"param": tensor, "cat_dim": 0}, place / "zero" / name / "fp32.pt")
    return folder


def _colossalai(folder: pathlib.Path, megabytes: int) -> pathlib.Path:
    folder.mkdir()
    weight_map = {}
    tensors = list(model_of(megabytes).items())
    for stage in (1, 2):
        part = dict(tensors[(stage - 1) * 20 :][: 20 if stage == 1 else None])
        name = f"pytorch_model-stage-0000{stage}-shard-00001.bin"
        torch.save(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


Make = Callable[[pathlib.Path, int], pathlib.Path]
CASES = [
    pytest.param(_zero2, (), id="ZeRO-2"),
    pytest.param(_zero2, ("--weights", "module"), id="ZeRO-2 module"),
    pytest.param(_zero3, (), id="ZeRO-3"),
    pytest.param(_universal, (), id="universal"),
    pytest.param(_colossalai, (), id="ColossalAI"),
]


@pytest.mark.timeout(280)
@pytest.mark.parametrize(("make", "words"), CASES)
def test_killed_runs_continue_to_the_same_bytes(tmp_path: pathlib.Path, make: Make, words: tuple[str, ...]) -> None:
    harness = Harness(tmp_path, megabytes=60, seed=7, make=make, words=words)
    assert any(harness.run(number).kills for number in range(8)), "no run was killed before its end"


@pytest.mark.parametrize(("make", "words"), CASES)
def test_a_bound_below_the_size_of_the_model(tmp_path: pathlib.Path, make: Make, words: tuple[str, ...]) -> None:
    """260 MB of fp32 values within 200 MB of memory for the whole process."""
    ckpt = make(tmp_path / "ckpt", 260)
    command = [sys.executable, "-m", "merge_stream", str(ckpt), str(tmp_path / "out"), "-q", *words]
    run = measure([*command, "--max-mem", "200M"], timeout=200)
    assert run.returncode == 0, run.stderr
    assert run.peak <= 200_000_000
    dtype = torch.bfloat16 if words else torch.float32
    assert_holds(tmp_path / "out", {name: tensor.to(dtype) for name, tensor in model_of(260).items()})
