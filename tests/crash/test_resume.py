"""What may differ between a run and the one that continues it, what may not, and who else may be at work."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from merge_stream import cli, steps
from tests.crash.conftest import WORDS, Reported, Small
from tests.crash.faults import Faults, in_a_child

pytestmark = pytest.mark.usefixtures("small_segments")


def leave_begun(small: Small, out: Path, *words: str, calls: int = 60) -> None:
    """Leave what kill -9 leaves after so many system calls on the output."""
    with pytest.MonkeyPatch.context() as patch:
        Faults(patch, Path(f"{out}.partial")).kill_at(calls)
        assert in_a_child(lambda: small.merge(out, "-q", *words)) == -signal.SIGKILL
    assert (Path(f"{out}.partial") / "journal").stat().st_size > 500


@pytest.mark.parametrize(
    "words",
    [
        ("--workers", "1"),
        ("--workers", "7"),
        ("--max-mem", "6G"),
        ("--io", "mmap"),
        ("--verify",),
        ("--sha256",),
        ("--check-crc",),
    ],
    ids=" ".join,
)
def test_how_it_is_done_may_change(small: Small, tmp_path: Path, reported: Reported, words: tuple[str, ...]) -> None:
    out = tmp_path / "out"
    leave_begun(small, out)
    assert small.merge(out, "--json", "-q", *words) == 0
    assert reported()["resumed_nbytes"] > 100_000
    small.assert_whole(out)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--dtype", "bf16"), "--dtype was keep, now bf16"),
        (("--layout", "as-is"), "--layout was upstream, now as-is"),
        (("--max-shard-size", "500kB"), "--max-shard-size was 300000, now 500000"),
    ],
    ids=["dtype", "layout", "shard size"],
)
def test_what_changes_bytes_may_not_and_the_difference_is_named(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], named: str
) -> None:
    out = tmp_path / "out"
    leave_begun(small, out)
    before = sorted(p.name for p in Path(f"{out}.partial").rglob("*"))
    for command in ("merge", "plan"):
        assert cli.run([command, str(small.ckpt), str(out), *WORDS, *words]) == 1
        told = capsys.readouterr().err
        assert "out.partial belongs to another run" in told
        assert named in told
        assert "give the same options to continue it, or --restart to begin anew" in told
    assert sorted(p.name for p in Path(f"{out}.partial").rglob("*")) == before
    assert small.merge(out, "-q") == 0  # the same options still continue it
    small.assert_whole(out)


def test_restart_begins_anew_with_other_options(small: Small, tmp_path: Path, reported: Reported) -> None:
    out = tmp_path / "out"
    leave_begun(small, out)
    assert small.merge(out, "--json", "-q", "--max-shard-size", "500kB", "--restart") == 0
    assert reported()["resumed_nbytes"] == 0
    small.assert_whole(out)


class TestTheSource:
    """A checkpoint that changes under the run: never mixed silently into one model."""

    @pytest.fixture
    def own(self, small: Small, tmp_path: Path) -> Small:
        return Small(Path(shutil.copytree(small.ckpt, tmp_path / "ckpt")), small.tensors)

    def rank(self, own: Small) -> Path:
        return own.ckpt / "model_world_size_2_rank_1.pt"

    @pytest.mark.parametrize("how", ["rewritten", "replaced", "cut", "grown", "removed"])
    def test_during_the_run(
        self, own: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str
    ) -> None:
        path, out = self.rank(own), tmp_path / "out"
        whole = path.read_bytes()
        real = steps.run_plan

        def changed(*args: object, **named: object) -> object:
            _change(path, how)
            return real(*args, **named)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(steps, "run_plan", changed)
            code = own.merge(out, "-q")
        told = capsys.readouterr().err
        assert code == 5
        assert path.name in told
        assert "hint: " in told
        assert not out.exists()
        own.assert_nothing_wrong(out)
        if path.exists():
            path.write_bytes(whole)
            assert own.merge(out, "-q") == 1  # what was written of the changed file is not continued
            assert f"{path.name} changed since" in capsys.readouterr().err
        path.write_bytes(whole)
        assert own.merge(out, "-q", "--restart") == 0
        own.assert_whole(out)

    def test_between_two_runs(self, own: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out = tmp_path / "out"
        with pytest.MonkeyPatch.context() as patch:
            Faults(patch, tmp_path / "out.partial").kill_at(60)
            assert in_a_child(lambda: own.merge(out, "-q")) == -signal.SIGKILL
        os.utime(self.rank(own))
        assert own.merge(out, "-q") == 1
        told = capsys.readouterr().err
        assert "was begun with other source files: model_world_size_2_rank_1.pt changed since" in told
        assert "--restart begins anew" in told
        assert own.merge(out, "-q", "--restart") == 0
        own.assert_whole(out)

    def test_while_the_output_is_verified(
        self, own: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The output is right: the message blames the file that changed."""
        real = steps.compare_with_plan

        def changed(*args: object) -> object:
            _change(self.rank(own), "rewritten")
            return real(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(steps, "compare_with_plan", changed)
        assert own.merge(tmp_path / "out", "-q", "--verify") == 5
        assert "model_world_size_2_rank_1.pt changed while" in capsys.readouterr().err


def _change(path: Path, how: str) -> None:
    if how == "removed":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    if how == "cut":
        os.truncate(path, len(data) // 2)
        return
    if how == "grown":
        with path.open("ab") as file:
            file.write(b"more")
        return
    data[len(data) // 3 : len(data) // 2] = bytes(len(data) // 2 - len(data) // 3)
    if how == "replaced":
        path.with_suffix(".new").write_bytes(data)
        path.with_suffix(".new").replace(path)
    else:
        path.write_bytes(data)


class TestTwoRuns:
    def test_at_the_same_time_one_works_and_the_other_is_turned_away(self, small: Small, tmp_path: Path) -> None:
        """Five at once: OUT is right, and who did not make it says that another did."""
        out = tmp_path / "out"
        command = [sys.executable, "-m", "merge_stream", "merge", str(small.ckpt), str(out), *WORDS, "-q"]
        runs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(5)]
        told = [(run.communicate(timeout=120)[1], run.returncode) for run in runs]
        assert [code for _, code in told].count(0) == 1, told
        for text, code in told:
            if code:
                assert code == 1
                assert "another merge-stream writes" in text or "is there and holds" in text, text
                assert "hint: " in text
        small.assert_whole(out)

    def test_one_that_began_while_the_other_ended_writes_nothing(
        self, small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """OUT appears after the second run looked for it and before it held the lock."""
        out = tmp_path / "out"
        check: Callable[..., None] = steps.preflight

        def other(*args: object) -> None:
            check(*args)
            with monkeypatch.context() as patch:
                patch.setattr(steps, "preflight", check)
                assert small.merge(out, "-q") == 0

        monkeypatch.setattr(steps, "preflight", other)
        assert small.merge(out, "-q") == 1
        assert f"{out} is there and holds" in capsys.readouterr().err
        small.assert_whole(out)


class TestSignals:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    @pytest.mark.parametrize("when", ["finish_folder", "commit"])
    def test_at_the_end_leave_a_folder_that_the_same_command_finishes(
        self,
        small: Small,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        number: signal.Signals,
        when: str,
    ) -> None:
        out = tmp_path / "out"
        real = getattr(steps, when)

        def told_to_stop(*args: object, **named: object) -> object:
            os.kill(os.getpid(), number)
            return real(*args, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(steps, when, told_to_stop)
            assert small.merge(out, "-q") == 130
        told = capsys.readouterr().err
        assert f"stopped by {number.name}" in told
        assert "same command continues" in told
        assert not out.exists()
        assert small.merge(out, "-q") == 0
        small.assert_whole(out)

    @pytest.mark.parametrize("step", range(4))
    def test_between_the_renames(
        self, small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int
    ) -> None:
        """OUT is empty, so files move one by one: at no moment do index and config stand beside half the weights."""
        out = tmp_path / "out"
        out.mkdir()
        real, left = os.rename, [step]

        def stopping(source: str, target: str) -> None:
            left[0] -= 1
            if left[0] == -1:
                os.kill(os.getpid(), signal.SIGTERM)
            real(source, target)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "rename", stopping)
            assert small.merge(out, "-q") == 130
        assert "same command continues" in capsys.readouterr().err
        small.assert_nothing_wrong(out)
        assert small.merge(out, "-q") == 0
        small.assert_whole(out)


def test_out_inside_the_checkpoint_changes_nothing_of_it(small: Small, tmp_path: Path) -> None:
    """Neither the run nor a later one takes the model for a part of the checkpoint."""
    ckpt = Path(shutil.copytree(small.ckpt, tmp_path / "ckpt"))
    own = Small(ckpt, small.tensors)
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in ckpt.rglob("*") if p.is_file()}
    leave_begun(own, ckpt / "merged")
    assert own.merge(ckpt / "merged", "-q") == 0
    own.assert_whole(ckpt / "merged")
    assert own.merge(tmp_path / "second", "-q") == 0
    own.assert_whole(tmp_path / "second")
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in before} == before
