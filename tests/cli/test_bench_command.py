"""`merge-stream bench`: a small run, baselines, and what it says when something is worse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from merge_stream.benchmark.run import Bench, Measured, compare_with
from merge_stream.errors import UsageError
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
    assert compare_with(baseline, measured()) == []
    (told,) = compare_with(baseline, measured(**change))
    assert told.startswith(words)


def test_memory_may_be_a_little_more() -> None:
    assert compare_with(measured().as_json(), measured(memory=110e6)) == []


@pytest.mark.parametrize("document", [{}, {"bench": 3}, {"bench": {}, "ratios": {}}])
def test_a_baseline_that_is_none(document: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="no baseline of merge-stream bench"):
        compare_with(document, measured())


def test_unknown_words_are_told() -> None:
    ended = tool("bench", "--shape", "lama")
    assert ended.code == 2
    assert "llama-1b" in ended.err


def test_a_baseline_that_is_not_there(tmp_path: Path) -> None:
    ended = tool(*SMALL, "--baseline", tmp_path / "none.json")
    assert ended.code == 2
    assert "none.json" in ended.err
