"""Runs that are killed or told to stop go on where they were, to the same bytes."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.crash.kill_resume import SETTINGS, Harness

pytestmark = pytest.mark.crash


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tmp_path_factory.mktemp("crash"), megabytes=400, seed=20_261)


@pytest.mark.timeout(280)
def test_killed_runs_continue_to_the_same_bytes(harness: Harness) -> None:
    """Five of the hundred that `make crash` does."""
    outcomes = [harness.run(number) for number in range(5)]
    assert sum(o.kills for o in outcomes) >= 3


@pytest.mark.timeout(280)
def test_killed_runs_that_quantize_continue_to_the_same_bytes(tmp_path: pathlib.Path) -> None:
    """In two passes: what was looked up before is looked up again, in layers whose scale is shared too."""
    harness = Harness(tmp_path, megabytes=200, seed=20_262, words=("--quantize", "nvfp4"))
    outcomes = [harness.run(number) for number in range(6)]
    assert sum(o.kills for o in outcomes) >= 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_resumable_and_says_so(harness: Harness, number: signal.Signals) -> None:
    out = harness.folder / f"stopped_{number.name}"
    work = pathlib.Path(f"{out}.partial")
    process = subprocess.Popen(
        [word for word in harness.command(out, "keep", SETTINGS[1]) if word not in {"--json", "-q"}],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    journal = work / "journal"
    deadline = time.monotonic() + 60
    while not (journal.exists() and journal.stat().st_size > 2000):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stdout == ""
    assert "Traceback" not in stderr
    assert f"error: stopped by {number.name}" in stderr
    assert "hint: the partial folder is kept; the same command continues it" in stderr
    assert not out.exists()
    held = journal.stat().st_size
    assert held > 2000
    ended = subprocess.run(
        harness.command(out, "keep", SETTINGS[3]), capture_output=True, check=True, text=True, timeout=120
    )
    report = json.loads(ended.stdout)
    assert report["resumed_nbytes"] > 0
    assert report["resumed_nbytes"] + report["written_nbytes"] == harness.data_nbytes["keep"]
    harness._compare(out, "keep")
    assert not work.exists()


def test_a_signal_before_the_first_byte_leaves_nothing(harness: Harness) -> None:
    out = harness.folder / "stopped_early"
    process = subprocess.Popen(
        [sys.executable, "-c", _STOP_WHILE_PLANNING, *harness.command(out, "keep", SETTINGS[0])[3:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    answer = json.loads(stdout)
    assert (answer["ok"], answer["exit_code"]) == (False, 130)
    assert "Traceback" not in stderr
    assert not out.exists()
    assert not pathlib.Path(f"{out}.partial").exists()


_STOP_WHILE_PLANNING = """
import os, signal, sys
import merge_stream.steps as steps
plan = steps.make_plan
def interrupted(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGTERM)
    return plan(*args, **kwargs)
steps.make_plan = interrupted
from merge_stream.cli import run
sys.exit(run(sys.argv[1:]))
"""
