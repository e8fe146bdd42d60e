"""kill -9 in either half: the same command goes on, to the same bytes; nothing half made opens."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import save_file

from merge_stream.engine.executor import StopFlag
from merge_stream.errors import InterruptedRunError, PlanMismatchError
from merge_stream.options import MergeOptions
from merge_stream.through_store import finalize_store, merge_through_store, stage
from tests.cli.tool import tool

PLAIN = MergeOptions(layout="as-is", write_config=False, workers=2)


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """48 MB in large tensors and 300 small ones."""
    folder = tmp_path_factory.mktemp("ckpt")
    generator = torch.Generator().manual_seed(5)
    large = {f"w{k}": torch.randn((3000, 1000), generator=generator) for k in range(4)}
    save_file(large | {f"s{k}": torch.full((500,), float(k)) for k in range(300)}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def whole(ckpt: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """`store` and `out` of runs that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    stage(ckpt, folder / "store", PLAIN)
    finalize_store(folder / "store", folder / "out", PLAIN)
    return folder


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


class StopAfter:
    """An observer that asks for the end once `nbytes` are written."""

    def __init__(self, nbytes: int) -> None:
        self.flag = StopFlag()
        self._left = nbytes

    def __call__(self, event: object) -> None:
        self._left -= getattr(event, "nbytes", 0)
        if self._left < 0:
            self.flag.set("the test")


def started(*words: str | os.PathLike[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "merge_stream", *map(os.fspath, words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.slow
def test_a_killed_stage_and_a_killed_finalize_go_on_to_the_same_bytes(
    ckpt: pathlib.Path, whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    chance = random.Random(11)
    store, out = tmp_path / "store", tmp_path / "out"
    halves = (
        (store, ("stage", ckpt, store, "--layout", "as-is", "--no-config", "-q")),
        (out, ("finalize", store, out, "--no-config", "-q")),
    )
    kills = 0
    for target, words in halves:
        for _ in range(3):
            process = started(*words)
            journal = pathlib.Path(f"{target}.partial") / "journal"
            while process.poll() is None and not (journal.exists() and journal.stat().st_size > chance.randrange(3000)):
                time.sleep(0.001)
            process.kill()
            kills += process.wait() == -signal.SIGKILL
            if target == store and not store.exists():
                partial = pathlib.Path(f"{target}.partial") / "model"
                tool("inspect", partial).refused(5, "")
        ended = tool(*words)
        assert ended.code == 0 or target.exists(), ended.err
    assert kills >= 2
    assert contents(out) == contents(whole / "out")
    assert contents(store) == contents(whole / "store")


@pytest.mark.parametrize("nbytes", [0, 300_000, 20_000_000, 47_900_000])
def test_a_stopped_stage_writes_only_what_is_missing(
    ckpt: pathlib.Path, whole: pathlib.Path, tmp_path: pathlib.Path, nbytes: int
) -> None:
    observer = StopAfter(nbytes)
    with pytest.raises(InterruptedRunError):
        stage(ckpt, tmp_path / "store", PLAIN, observer=observer, stop=observer.flag)
    fewer = MergeOptions(layout="as-is", write_config=False, workers=1, max_mem=6_000_000_000)
    report = stage(ckpt, tmp_path / "store", fewer)
    assert report.resumed_nbytes >= nbytes // 2
    assert contents(tmp_path / "store") == contents(whole / "store")


@pytest.mark.parametrize("nbytes", [1_000_000, 40_000_000, 60_000_000, 90_000_000])
def test_a_stopped_merge_through_a_store_goes_on(
    ckpt: pathlib.Path, whole: pathlib.Path, tmp_path: pathlib.Path, nbytes: int
) -> None:
    observer = StopAfter(nbytes)
    with pytest.raises(InterruptedRunError):
        merge_through_store(ckpt, tmp_path / "out", PLAIN, observer=observer, stop=observer.flag)
    assert os.listdir(tmp_path) == ["out.partial"]
    report = merge_through_store(ckpt, tmp_path / "out", PLAIN)
    assert report.resumed_nbytes >= nbytes // 2
    assert os.listdir(tmp_path) == ["out"]
    assert contents(tmp_path / "out") == contents(whole / "out")


def test_a_small_tensor_that_vanished_from_a_partial_store_is_written_anew(
    ckpt: pathlib.Path, whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    observer = StopAfter(48_300_000)
    with pytest.raises(InterruptedRunError):
        stage(ckpt, tmp_path / "store", PLAIN, observer=observer, stop=observer.flag)
    found = sorted((tmp_path / "store.partial" / "model").glob("s*/c.0"))
    assert found
    found[0].unlink()
    os.truncate(found[-1], 3)
    stage(ckpt, tmp_path / "store", PLAIN)
    assert contents(tmp_path / "store") == contents(whole / "store")


def test_other_options_do_not_continue_a_store(ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
    observer = StopAfter(20_000_000)
    with pytest.raises(InterruptedRunError):
        stage(ckpt, tmp_path / "store", PLAIN, observer=observer, stop=observer.flag)
    os.utime(ckpt / "model.safetensors")
    with pytest.raises(PlanMismatchError, match="changed since") as caught:
        stage(ckpt, tmp_path / "store", PLAIN)
    assert "--restart" in caught.value.hint
    stage(ckpt, tmp_path / "store", MergeOptions(layout="as-is", write_config=False, restart=True))
