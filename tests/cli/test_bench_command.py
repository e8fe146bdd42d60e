"""`merge-stream bench`: a small run, baselines, and what it says when something is worse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from merge_stream.benchmark import run
from merge_stream.benchmark.baseline import compare_with, load
from merge_stream.benchmark.run import Bench, Measured, require_possible
from merge_stream.errors import DiskSpaceError, UsageError
from tests.cli.tool import tool

SMALL = ("bench", "--shape", "tiny", "--ranks", "2", "--rounds", "1", "-q")


def measured(**more: float) -> Measured:
    found = Measured(Bench(), nbytes=1_000_000_000, memory=int(more.get("memory", 60e6)))
    found.merge_seconds, found.floor_seconds = [2.0 * more.get("slower", 1), 2.2, 1.8], [4.0, 4.4, 3.6]
    found.merge_cpu = [1.0 * more.get("busier", 1)] * 3
    return found


@pytest.mark.slow
def test_a_run_and_its_baseline(tmp_path: Path) -> None:
    file, work = tmp_path / "baseline.json", tmp_path / "work"
    work.mkdir()
    first = tool(*SMALL, "--work", work, "--write-baseline", file)
    assert first.code == 0, first.err
    assert not first.out
    again = tool(*SMALL, "--work", work, "--baseline", file, "--tolerance", "50", "--json")
    assert again.code == 0, again.err
    told = json.loads(again.out)
    assert told["ok"]
    assert set(told["ratios"]) == set(json.loads(file.read_text())["ratios"]) == {"wall / floor", "CPU s / GB"}
    assert not list(work.iterdir())  # nothing is left

    other = tool(*SMALL, "--scale", "2", "--work", work, "--baseline", file)
    assert other.code == 2
    assert "another bench" in other.err
    assert "making the checkpoint" not in other.err

    numbers = json.loads(file.read_text())
    numbers["ratios"]["CPU s / GB"] /= 1000
    file.write_text(json.dumps(numbers))
    worse = tool(*SMALL, "--work", work, "--baseline", file)
    assert worse.code == 1
    assert "CPU s / GB is" in worse.out


def test_ratios_are_taken_round_by_round() -> None:
    assert measured().wall_ratio == 0.5
    assert measured().cpu_per_gb == 1.0


@pytest.mark.parametrize(
    ("change", "words"),
    [({"busier": 1.3}, "CPU s / GB is 1.300"), ({"memory": 200e6}, "memory is 200 MB")],
)
def test_what_is_worse_is_named(change: dict[str, float], words: str) -> None:
    baseline = measured().as_json()
    assert compare_with(baseline, measured(), 1.25) == []
    (told,) = compare_with(baseline, measured(**change), 1.25)
    assert told.startswith(words)


def test_memory_may_be_a_little_more() -> None:
    assert compare_with(measured().as_json(), measured(memory=110e6), 1.25) == []


def test_a_baseline_is_read_again_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    file.write_text(json.dumps(measured().as_json()))
    assert load(str(file), Bench(rounds=9)) == measured().as_json()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bench": 3}, "no baseline of merge-stream bench"),
        ({"ratios": {}}, "no baseline of merge-stream bench: 'wall / floor' is missing"),
        ({"ratios": {"wall / floor": float("nan"), "CPU s / GB": 1}}, "no baseline of merge-stream bench"),
        ({"ratios": {"wall / floor": "1", "CPU s / GB": 1}}, "no baseline of merge-stream bench"),
        ({"memory": 0}, "no baseline of merge-stream bench"),
        ({"bench": {**measured().as_json()["bench"], "ranks": 4}}, r"another bench: \{'ranks': 4\}, this one has"),
    ],
)
def test_a_baseline_that_is_none(change: dict[str, object], words: str, tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    file.write_text(json.dumps({**measured().as_json(), **change}))
    with pytest.raises(UsageError, match=words):
        load(str(file), Bench())
    file.write_text("[1]")
    with pytest.raises(UsageError, match="no baseline"):
        load(str(file), Bench())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--work", "WORK/none"], "is no folder"),
        (["--max-mem", "lots"], "is not a size"),
        (["--sharding", "hsdp", "--ranks", "3"], "even number of ranks"),
        (["--write-baseline", "WORK/none/b.json"], "cannot be written"),
        (["--write-baseline", "WORK"], "cannot be written"),
    ],
)
def test_what_cannot_be_is_told_before_the_checkpoint_is_made(words: list[str], told: str, tmp_path: Path) -> None:
    ended = tool("bench", "--work", tmp_path, *(word.replace("WORK", str(tmp_path)) for word in words))
    assert (ended.code, "making" in ended.err) == (2, False)
    assert told in ended.err
    assert not list(tmp_path.iterdir())


def test_the_baseline_compared_with_is_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    file.write_text(json.dumps(measured().as_json()))
    ended = tool("bench", "--baseline", file, "--write-baseline", file)
    assert ended.code == 2
    assert "would replace" in ended.err


def test_no_room_is_told_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-1B has 4.94 GB in fp32, and as much in a model and a block of bf16; DCP holds 1.05 GB twice (the tie)."""
    usage = run.shutil.disk_usage(tmp_path)._replace(free=9_950_000_000)
    monkeypatch.setattr(run.shutil, "disk_usage", lambda _path: usage)
    require_possible(Bench(), tmp_path)
    with pytest.raises(DiskSpaceError, match=r"has 9.95 GB free, the bench needs 10.9 GB \(a checkpoint of 6.00 GB"):
        require_possible(Bench(layout="dcp"), tmp_path)
    usage = usage._replace(free=9_850_000_000)
    with pytest.raises(DiskSpaceError, match=r"has 9.85 GB free, the bench needs 9.90 GB"):
        require_possible(Bench(), tmp_path)


@pytest.mark.slow
def test_too_little_memory_is_told_in_the_words_of_the_merge(tmp_path: Path) -> None:
    ended = tool(*SMALL, "--work", tmp_path, "--max-mem", "1M", "--json")
    assert ended.code == 4
    assert json.loads(ended.out)["error"].startswith("--max-mem 1.00 MB is too small")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    """Neither files nor processes, and not from a folder that cannot be written to."""
    words = [sys.executable, "-m", "merge_stream", "bench", "--shape", "tiny", "--rounds", "100", "--work", tmp_path]
    with subprocess.Popen([*map(str, words)], stderr=subprocess.PIPE, text=True, cwd="/proc") as process:
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(2)]  # making the checkpoint, a round
        process.send_signal(number)
        rest = process.stderr.read()
    assert lines[1].startswith("round 1/100")
    assert process.returncode == 130
    assert f"stopped by {number.name}" in rest
    assert not list(tmp_path.iterdir())
    commands = [Path(f"/proc/{pid}/cmdline") for pid in os.listdir("/proc") if pid.isdigit()]
    left = [path for path in commands if path.exists() and str(tmp_path).encode() in path.read_bytes()]
    assert not left


def test_unknown_words_are_told() -> None:
    ended = tool("bench", "--shape", "lama")
    assert ended.code == 2
    assert "llama-1b" in ended.err


def test_a_baseline_that_is_not_there(tmp_path: Path) -> None:
    ended = tool(*SMALL, "--baseline", tmp_path / "none.json")
    assert ended.code == 2
    assert "none.json" in ended.err
