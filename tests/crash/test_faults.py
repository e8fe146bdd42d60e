"""Disks that fail: a clear error and a resumable folder, or the right model; never anything between."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import pytest

from tests.cases.naive import assert_holds
from tests.crash.conftest import Small
from tests.crash.faults import Faults, few_of_each, in_a_child

pytestmark = pytest.mark.usefixtures("small_segments")


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: Small) -> Faults:
    return Faults(monkeypatch, tmp_path, small.ckpt)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: Small) -> Sequence[tuple[str, str]]:
    """The system calls of an undisturbed run, in order."""
    with monkeypatch.context() as patch:
        watch = Faults(patch, tmp_path, small.ckpt)
        assert small.merge(tmp_path / "undisturbed", "-q", "--workers", "1") == 0
        return list(watch.seen)


def continued(small: Small, out: Path, *, made: bool) -> None:
    """The same command makes the model, or the disturbed run had `made` it and only its traces may be left."""
    code = small.merge(out, "-q")
    assert code == 0 or (made and code == 1)
    if made:
        small.assert_nothing_wrong(out)
        assert_holds(out, small.tensors)
    else:
        small.assert_whole(out)


@pytest.mark.crash
class TestAnyCallMayFail:
    """Every kind of system call on every kind of file, of the checkpoint and of the output."""

    def test_by_an_error_of_the_disk(
        self,
        small: Small,
        tmp_path: Path,
        calls: Sequence[tuple[str, str]],
        faults: Faults,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        failed = 0
        for number in few_of_each(calls):
            out = tmp_path / f"out{number}"
            faults.fail_at(number, errno.EIO)
            code = small.merge(out, "-q", "--workers", "1")
            told = capsys.readouterr().err
            faults.heal()
            small.assert_nothing_wrong(out)
            if code:
                failed += 1
                assert "error: " in told, calls[number]
                assert "Traceback" not in told, calls[number]
                assert "nput/output error" in told or "could not be" in told, (calls[number], told)
            continued(small, out, made=code == 0)
        assert failed > 20

    def test_or_be_the_last_before_kill_9(
        self, small: Small, tmp_path: Path, calls: Sequence[tuple[str, str]], faults: Faults
    ) -> None:
        for number in few_of_each(calls):
            out = tmp_path / f"out{number}"
            faults.kill_at(number)
            assert in_a_child(lambda out=out: small.merge(out, "-q", "--workers", "1")) == -signal.SIGKILL
            faults.heal()
            small.assert_nothing_wrong(out)
            made = out.is_dir() and not list(out.parent.glob(f"{out.name}.*"))
            continued(small, out, made=made)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A call that fails for good, the exit code, and what is told."""

    error: int
    call: str
    code: int
    words: Sequence[str]

    def __str__(self) -> str:
        return f"{errno.errorcode[self.error]}-{self.call}"


FULL = ("could not be written", "free some space", "same command continues")
FAULTS = (
    Fault(errno.ENOSPC, "pwritev", 4, FULL),
    Fault(errno.ENOSPC, "pwrite", 4, FULL),  # of the journal
    Fault(errno.ENOSPC, "fdatasync", 4, FULL),
    Fault(errno.EDQUOT, "pwritev", 4, ("quota", "same command continues")),
    Fault(errno.EFBIG, "ftruncate", 4, ("ulimit -f", "--max-shard-size")),
    Fault(errno.EIO, "pwritev", 1, ("nput/output error", "same command continues")),
    Fault(errno.EROFS, "pwritev", 1, ("ead-only", "disk that can be written")),
)


class TestWrites:
    """What the command line says about each failure of the output's disk, and that the same command goes on."""

    @pytest.mark.parametrize("fault", FAULTS, ids=str)
    @pytest.mark.parametrize("number", [1, 9])
    def test_is_told_and_continued(  # noqa: PLR0917 - fixtures
        self,
        small: Small,
        tmp_path: Path,
        faults: Faults,
        capsys: pytest.CaptureFixture[str],
        fault: Fault,
        number: int,
    ) -> None:
        out = tmp_path / "out"
        first = fault.call in {"ftruncate", "fdatasync"}
        faults.fail_at(0 if first else number, fault.error, on=[fault.call], stays=True)
        assert small.merge(out, "-q") == fault.code
        told = capsys.readouterr().err
        for word in fault.words:
            assert word in told
        assert not out.exists()
        assert {p.name for p in (tmp_path / "out.partial" / "model").iterdir()} <= {
            f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3)
        }
        faults.heal()
        assert small.merge(out, "-q") == 0
        small.assert_whole(out)


class TestHarmless:
    @pytest.mark.parametrize("seed", range(3))
    def test_short_reads_and_writes_are_continued(
        self, small: Small, tmp_path: Path, faults: Faults, seed: int
    ) -> None:
        undisturbed = tmp_path / "undisturbed"
        assert small.merge(undisturbed, "-q") == 0
        count = len(faults.seen)
        faults.shorten(seed)
        out = tmp_path / "out"
        assert small.merge(out, "-q", "--verify") == 0
        assert len(faults.seen) > 3 * count
        small.assert_whole(out)
        for path in undisturbed.iterdir():
            assert (out / path.name).read_bytes() == path.read_bytes()

    def test_system_calls_that_signals_interrupt_are_made_again(self, small: Small, tmp_path: Path) -> None:
        """EINTR, every 200 microseconds."""
        caught: list[int] = []

        def note(number: int, _frame: FrameType | None) -> None:
            caught.append(number)

        before = signal.signal(signal.SIGALRM, note)
        signal.siginterrupt(signal.SIGALRM, True)
        signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
        try:
            assert small.merge(tmp_path / "out", "-q", "--verify") == 0
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert len(caught) > 20
        small.assert_whole(tmp_path / "out")


class TestThroughAStore:
    """`--staging zarr`: killed in place of any of its renames, the same command ends in the model, with exit code 0."""

    @pytest.mark.slow
    @pytest.mark.parametrize("target", ["new", "empty", "overwrite", "kept store"])
    def test_killed_at_a_rename(self, small: Small, tmp_path: Path, faults: Faults, target: str) -> None:
        def run(out: Path) -> int:
            words = ["--staging", "zarr", "--workers", "1", "-q"]
            words += ["--overwrite"] if target == "overwrite" else []
            words += ["--keep-store", f"{out}-store"] if target == "kept store" else []
            return small.merge(out, *words)

        def fresh(name: str) -> Path:
            out = tmp_path / name
            if target == "empty":
                out.mkdir()
            if target == "overwrite":
                small.merge(out, "-q")
            faults.seen.clear()
            return out

        assert run(fresh("undisturbed")) == 0
        renames = [k for k, (call, _) in enumerate(faults.seen) if call in {"rename", "replace"}]
        assert len(renames) > 3
        for number in sorted({*renames, *(k + 1 for k in renames)}):
            out = fresh(f"out{number}")
            faults.kill_at(number)
            assert in_a_child(lambda out=out: run(out)) == -signal.SIGKILL
            faults.heal()
            if target != "overwrite":
                small.assert_nothing_wrong(out)
            assert run(out) == 0, (number, faults.seen[number])
            small.assert_nothing_wrong(out)
            assert_holds(out, small.tensors)
            assert not list(tmp_path.glob(f"{out.name}.*"))
            assert not [name for name in os.listdir(out) if name.startswith(".")]
