"""What a killed run leaves looks like a model, and no command takes it for one."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from merge_stream import steps, through_store
from merge_stream.storage.unfinished import WORK_FILES
from tests.cli.tool import tool
from tests.crash.conftest import Small
from tests.crash.faults import in_a_child

pytestmark = pytest.mark.usefixtures("small_segments")

RUNS = {"out": (), "empty": (), "through": ("--staging", "zarr"), "empty-through": ("--staging", "zarr")}


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def killed(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the leavings of runs that were killed when all was written and nothing renamed."""
    folder = tmp_path / "runs"
    for name in RUNS:
        if name.startswith("empty"):
            (folder / name).mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(steps, "commit", die)
        patch.setattr(through_store, "commit", die)
        for name, words in RUNS.items():
            code = in_a_child(lambda name=name, words=words: small.merge(folder / name, "-q", *words))
            assert code == -signal.SIGKILL
    return folder


@pytest.mark.slow
def test_no_command_takes_it(killed: Path, small: Small) -> None:
    told = "that has not ended wrote so far"
    assert set(WORK_FILES) < set(os.listdir(killed / "out.partial"))
    work = ("out.partial", "empty", "empty/.merge-stream", "through.partial/store.partial")
    for name in (*work, "out.partial/model", "empty/.merge-stream/model", "through.partial/store.partial/model"):
        tool("inspect", killed / name).refused(5, told, "command again")
    for name in ("out.partial/model", "empty"):
        tool("check", killed / name).refused(5, told)
        tool(killed / name, killed / "copy", "--no-config").refused(5, told)
        tool("verify", small.ckpt, "--against", killed / name).refused(5)
    tool("inspect", next((killed / "out.partial" / "model").glob("*.safetensors"))).refused(5, told)
    tool("finalize", killed / "through.partial" / "store.partial" / "model", killed / "copy").refused(5, told)
    tool("inspect", killed).refused(5, "is empty")
    assert not (killed / "copy").exists()


@pytest.mark.slow
def test_a_checkpoint_beside_it_is_found_and_the_same_commands_go_on(killed: Path, small: Small) -> None:
    shutil.copytree(small.ckpt, killed / "ckpt")
    assert "in ckpt/ below" in tool("inspect", killed).out
    for name, words in RUNS.items():
        assert small.merge(killed / name, "-q", *words) == 0
        small.assert_whole(killed / name)
        assert "hugging_face" in tool("inspect", killed / name).out
