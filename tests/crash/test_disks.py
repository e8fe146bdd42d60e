"""Real file systems that are too small, fill up, or cannot be written: refused at once, or resumable."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from merge_stream import steps
from merge_stream.job import Job
from merge_stream.output.place import OutputPlace
from tests.cli.tool import as_mere_mortal, tool
from tests.crash.conftest import Small

pytestmark = pytest.mark.usefixtures("small_segments")


def _mounted(folder: Path, *words: str) -> None:
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", *words, str(folder)], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here: not root, or not allowed")


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB. ext4 notices late that it is full: when it writes back, not when it is written to."""
    folder = tmp_path / "disk"
    if request.param == "tmpfs":
        _mounted(folder, "-t", "tmpfs", "-o", "size=8m", "tmpfs")
    else:
        image = tmp_path / "image"
        image.touch()
        os.truncate(image, 8 << 20)
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("mkfs.ext4 is not here")
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
        _mounted(folder, "-o", "loop", str(image))
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def _fill(disk: Path, leave: int) -> Path:
    """Take all room but `leave` bytes."""
    filler = disk / "filler"
    with filler.open("wb") as file:
        for _ in range(max(shutil.disk_usage(disk).free - leave, 0) // 4096):
            file.write(b"x" * 4096)
        file.flush()
        os.fsync(file.fileno())
    return filler


def test_too_small_a_disk_is_refused_before_the_first_byte(
    small: Small, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _fill(disk, leave=500_000)
    for command in ("merge", "plan"):
        assert tool(command, small.ckpt, disk / "out").refused(4, "free, the output needs", "free some space")
    assert sorted(p.name for p in disk.iterdir() if p.name != "lost+found") == ["filler"]


@pytest.mark.parametrize("leave", [30_000, 200_000, 400_000, 700_000])
def test_a_disk_that_another_program_fills_meanwhile(
    small: Small,
    disk: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    leave: int,
) -> None:
    """The run ends with words, what it wrote stays, and with room again the same command ends in the same bytes."""
    out = disk / "out"
    check = steps.preflight

    def then_fill(job: Job, place: OutputPlace) -> None:
        check(job, place)
        _fill(disk, leave)

    with monkeypatch.context() as patch:
        patch.setattr(steps, "preflight", then_fill)
        assert small.merge(out, "-q") == 4
    told = capsys.readouterr().err
    assert "error: " in told
    assert "free some space" in told
    assert "Traceback" not in told
    small.assert_nothing_wrong(out)
    (disk / "filler").unlink()
    assert small.merge(out, "-q") == 0, capsys.readouterr().err
    small.assert_whole(out)


def test_a_disk_that_is_full_when_the_side_files_are_copied(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    _mounted(disk, "-t", "tmpfs", "-o", "size=8m", "tmpfs")
    try:
        real = steps.finish_folder

        def full(*args: object, **named: object) -> object:
            _fill(disk, leave=0)
            return real(*args, **named)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(steps, "finish_folder", full)
            assert small.merge(disk / "out", "-q") == 4
        assert "same command continues" in capsys.readouterr().err
        small.assert_nothing_wrong(disk / "out")
        assert not (disk / "out").exists()
        (disk / "filler").unlink()
        assert small.merge(disk / "out", "-q") == 0
        small.assert_whole(disk / "out")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_out_on_a_disk_mounted_read_only(small: Small, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    _mounted(disk, "-t", "tmpfs", "-o", "size=8m,ro", "tmpfs")
    try:
        for command in ("merge", "plan"):
            tool(command, small.ckpt, disk / "deep" / "out").refused(1, f"{disk} lies on", "read-only", "choose an OUT")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_mounted_read_only_later(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel does with a disk that fails; mounted for writing again, the run continues."""
    disk = tmp_path / "disk"
    _mounted(disk, "-t", "tmpfs", "-o", "size=8m", "tmpfs")
    try:
        assert small.merge(disk / "whole", "-q") == 0
        real = steps.run_plan

        def remounted(*args: object, **named: object) -> object:
            done = real(*args, **named)  # type: ignore[arg-type]
            args[1].close()  # type: ignore[attr-defined]
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            return done

        with monkeypatch.context() as patch:
            patch.setattr(steps, "run_plan", remounted)
            assert small.merge(disk / "out", "-q") == 1
        assert "ead-only file system" in capsys.readouterr().err
        assert not (disk / "out").exists()
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        assert small.merge(disk / "out", "-q") == 0
        small.assert_whole(disk / "out")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_folders_on_the_way_to_out_are_made(small: Small, tmp_path: Path) -> None:
    assert small.merge(tmp_path / "not" / "there" / "out", "-q") == 0
    small.assert_whole(tmp_path / "not" / "there" / "out")


def test_a_missing_folder_that_may_not_be_made(small: Small, tmp_path: Path) -> None:
    before = as_mere_mortal()
    if before and shutil.which(before[0]) is None:
        pytest.skip("root ignores file modes, and setpriv is not here")
    place = tmp_path / "place"
    place.mkdir(mode=0o555)
    ended = tool("merge", small.ckpt, place / "not" / "there" / "out", before=before)
    ended.refused(1, f"{place} is not writable for this user", "choose an OUT")
    assert os.listdir(place) == []


@pytest.mark.parametrize("where", ["/proc/out", "/sys/out", "/dev/null/out", "/proc/self/fd/out"])
def test_places_that_hold_no_files(small: Small, where: str) -> None:
    ended = tool("merge", small.ckpt, where)
    assert ended.code in {1, 4}
    ended.refused(ended.code, where.rpartition("/")[0])


def test_a_limit_of_file_sizes_is_met_before_the_first_byte(small: Small, tmp_path: Path) -> None:
    before = ("prlimit", "--fsize=400000")
    if shutil.which(before[0]) is None:
        pytest.skip("prlimit is not here")
    for command in ("merge", "plan"):
        ended = tool(command, small.ckpt, tmp_path / "out", before=before)
        ended.refused(4, "model.safetensors would have", "files above 400 kB", "ulimit -f", "--max-shard-size 360000")
    assert os.listdir(tmp_path) == []
    assert tool("merge", small.ckpt, tmp_path / "out", "--max-shard-size", "360000", before=before).code == 0
