"""What would fail later is refused at the start, with numbers and a way out; nothing on disk is changed."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import subprocess
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from merge_stream import preflight as module
from merge_stream.errors import DiskSpaceError, MergeStreamError, ResourceError, UsageError
from merge_stream.output.place import KEPT_STORE, STORE_OF_STAGE, choose_place
from merge_stream.preflight import Target, Writes, check_target, check_together
from merge_stream.storage.mounts import Mount
from tests.cli.tool import as_mere_mortal

GB = 10**9
TWO = Writes({"model-00001-of-00002.safetensors": 5 * GB, "model-00002-of-00002.safetensors": GB}, largest_item=GB)
SMALL = Writes({"model.safetensors": 1000})


def check(out: Path, writes: Writes = SMALL, *, overwrite: bool = False) -> None:
    check_target(choose_place(out, overwrite=overwrite), writes)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A disk with as much room as the test says."""
    found = SimpleNamespace(free=100 * GB, files=10**6, inodes=10**6, flags=0, block=4096)
    usage = namedtuple("usage", "total used free")  # noqa: PYI024 - as shutil's own
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, found.free))

    def statvfs(_: str) -> SimpleNamespace:
        return SimpleNamespace(f_flag=found.flags, f_frsize=found.block, f_files=found.files, f_favail=found.inodes)

    monkeypatch.setattr(os, "statvfs", statvfs)
    return found


class TestRoom:
    def test_both_numbers_are_told(self, tmp_path: Path, disk: SimpleNamespace) -> None:
        disk.free = 5 * GB
        with pytest.raises(DiskSpaceError, match=r"has 5\.00 GB free, the output needs 6\.00 GB") as caught:
            check(tmp_path / "out", TWO)
        assert "choose another disk" in caught.value.hint
        assert "bf16" not in caught.value.hint
        disk.free = 6 * GB + 2 * disk.block
        check(tmp_path / "out", TWO)
        assert os.listdir(tmp_path) == []

    def test_whole_blocks_and_bookkeeping_count(self, tmp_path: Path, disk: SimpleNamespace) -> None:
        many = Writes({f"part-{k}": 1 for k in range(100)}, more_nbytes=1000)
        disk.free = 100 * disk.block + 999
        with pytest.raises(DiskSpaceError, match="needs 411 kB"):
            check(tmp_path / "out", many)
        disk.free += 1
        check(tmp_path / "out", many)

    def test_what_an_interrupted_run_has_written_is_not_needed_again(
        self, tmp_path: Path, disk: SimpleNamespace
    ) -> None:
        model = tmp_path / "out.partial" / "model"
        model.mkdir(parents=True)
        written = os.urandom(1 << 20)
        with (model / "model.safetensors").open("wb") as file:
            file.write(written)
            file.truncate(2 << 20)  # the rest is a hole
            os.fsync(file.fileno())
        disk.free = 1 << 20
        check(tmp_path / "out", Writes({"model.safetensors": 2 << 20}))
        disk.free -= 4096
        with pytest.raises(DiskSpaceError, match=r"needs 1\.05 MB"):
            check(tmp_path / "out", Writes({"model.safetensors": 2 << 20}))

    def test_an_old_model_stays_until_the_new_one_is_whole_and_the_hint_says_so(
        self, tmp_path: Path, disk: SimpleNamespace
    ) -> None:
        out = tmp_path / "out"
        out.mkdir()
        (out / "config.json").write_text("{}")
        disk.free = GB
        with pytest.raises(DiskSpaceError) as caught:
            check(out, Writes(TWO.files, can_shrink=True), overwrite=True)
        assert f"or remove {out}, which stays until the new model is whole" in caught.value.hint
        assert "--dtype bf16" in caught.value.hint

    def test_inodes_are_counted_where_the_file_system_has_a_number_of_them(
        self, tmp_path: Path, disk: SimpleNamespace
    ) -> None:
        disk.inodes = 3
        with pytest.raises(DiskSpaceError, match="room for 3 more files") as caught:
            check(tmp_path / "out", TWO)
        assert "--max-shard-size" in caught.value.hint
        disk.files = disk.inodes = 0  # btrfs counts none
        check(tmp_path / "out", TWO)


class TestFileSizes:
    def test_the_limit_of_the_process(
        self, tmp_path: Path, disk: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        limits = {resource.RLIMIT_FSIZE: (2 * GB, 2 * GB)}
        monkeypatch.setattr(resource, "getrlimit", lambda which: limits.get(which, (1024, 1024)))
        with pytest.raises(DiskSpaceError, match=r"-00001-of-00002.*5\.00 GB, and this process.*2\.00 GB") as caught:
            check(tmp_path / "out", TWO)
        assert "ulimit -f unlimited" in caught.value.hint
        assert "--max-shard-size 1800000000" in caught.value.hint
        with pytest.raises(DiskSpaceError) as caught:
            check(tmp_path / "out", Writes(TWO.files, largest_item=5 * GB))
        assert "--max-shard-size" not in caught.value.hint  # a tensor is never cut in two

    def test_fat32(self, tmp_path: Path, disk: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "mount_of", lambda _: Mount("vfat", "/media/stick"))
        with pytest.raises(DiskSpaceError, match=r"/media/stick \(vfat\) holds no files above 4\.29 GB") as caught:
            check(tmp_path / "out", TWO)
        assert "choose another disk, or give --max-shard-size" in caught.value.hint
        check(tmp_path / "out", Writes({"model.safetensors": 4 * GB}))


class TestPermissions:
    def test_a_read_only_file_system(self, tmp_path: Path, disk: SimpleNamespace) -> None:
        disk.flags = os.ST_RDONLY
        with pytest.raises(MergeStreamError, match="mounted read-only") as caught:
            check(tmp_path / "deep" / "out")
        assert "disk that can be written" in caught.value.hint

    def test_a_real_one(self, tmp_path: Path) -> None:
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m,ro", "tmpfs", str(tmp_path)]
        if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("nothing can be mounted here")
        try:
            with pytest.raises(MergeStreamError, match="mounted read-only"):
                check(tmp_path / "out")
        finally:
            subprocess.run(["umount", str(tmp_path)], check=True)

    def test_a_path_below_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        with pytest.raises(MergeStreamError, match=f"{tmp_path}/file is a file"):
            check(tmp_path / "file" / "a" / "out")

    def test_folders_that_are_not_there_are_no_error(self, tmp_path: Path) -> None:
        check(tmp_path / "a" / "b" / "out")
        assert os.listdir(tmp_path) == []

    def denied(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        real = os.access
        monkeypatch.setattr(os, "access", lambda p, mode: False if os.fspath(p) == str(path) else real(p, mode))

    def test_a_folder_that_is_not_writable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.denied(monkeypatch, tmp_path)
        with pytest.raises(MergeStreamError, match=f"{tmp_path} is not writable for this user"):
            check(tmp_path / "deep" / "out")

    @pytest.mark.parametrize("name", ["model", "journal", "lock", "plan.json", ""])
    def test_the_partial_folder_of_another_user(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        work = tmp_path / "out.partial"
        (work / "model").mkdir(parents=True)
        for file in ("journal", "lock", "plan.json"):
            (work / file).write_text("")
        check(tmp_path / "out")
        self.denied(monkeypatch, work / name if name else work)
        with pytest.raises(MergeStreamError, match="of an interrupted run, is not writable") as caught:
            check(tmp_path / "out")
        assert "the user who began it" in caught.value.hint

    def test_the_old_model_of_another_user_in_a_folder_such_as_tmp(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "out"
        out.mkdir()
        (out / "config.json").write_text("{}")
        tmp_path.chmod(0o1777)
        check(out, overwrite=True)
        monkeypatch.setattr(os, "geteuid", lambda: out.stat().st_uid + 1)
        with pytest.raises(MergeStreamError, match="cannot be replaced by this user"):
            check(out, overwrite=True)
        tmp_path.chmod(stat.S_IRWXU)
        check(out, overwrite=True)


class TestNames:
    def test_a_folder_of_a_name_that_no_folder_can_have(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"has 300 bytes, .* allows 255"):
            check(tmp_path / ("x" * 300) / "out")

    def test_a_file_system_with_shorter_names(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Such as eCryptfs: 143 bytes."""
        monkeypatch.setattr(os, "pathconf", lambda *_: 143)
        check(tmp_path / ("x" * 120))
        with pytest.raises(UsageError, match="allows 143") as caught:
            check(tmp_path / ("x" * 130))
        assert "shorter name" in caught.value.hint
        with pytest.raises(UsageError, match=r"tokenizer.*has 149 bytes"):
            check(tmp_path / "out", Writes({"tokenizer" + "x" * 140: 3}))

    def test_a_path_that_is_too_long_is_refused_by_its_files(self, tmp_path: Path) -> None:
        deep = tmp_path
        while len(str(deep)) < 3900:
            deep /= "d" * min(200, 3990 - len(str(deep)))
        with pytest.raises(UsageError, match="the system allows 4095") as caught:
            check(deep / "out", Writes({"x" * 250: 1}))
        assert "shorter path" in caught.value.hint


class TestOpenFiles:
    @pytest.mark.parametrize(
        ("soft", "hard", "fits"),
        [(64, 64, True), (20, 64, True), (63, 63, False), (20, resource.RLIM_INFINITY, True), (20, 20, False)],
    )
    def test_the_hard_limit_counts(self, monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, fits: bool) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
        if fits:
            module._check_open_files(16)
            return
        with pytest.raises(ResourceError, match=f"may open {hard} files at once, 16 workers need 64") as caught:
            module._check_open_files(16)
        assert "ulimit -n" in caught.value.hint
        assert "--workers" in caught.value.hint


@pytest.fixture
def unreadable(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    path.chmod(0)
    yield path
    path.chmod(0o600)


def test_a_side_file_that_cannot_be_read_is_told_before_the_weights_are_written(unreadable: Path) -> None:
    before = as_mere_mortal()
    if before and shutil.which(before[0]) is None:
        pytest.skip("root ignores file modes, and setpriv is not here")
    program = (
        "from types import SimpleNamespace as S; from merge_stream import preflight as p\n"
        "p.check_target = p.writes_of = lambda *_, **__: None\n"
        f"side = S(path={str(unreadable)!r})\n"
        "job = S(plan=None, folder=S(side_files=S(files=[side])), memory=S(workers=1, segment=1))\n"
        "job.options = S(sparse=False)\n"
        "try: p.preflight(job, S(kind=S(word='OUT')))\n"
        "except p.MergeStreamError as error: print(error)\n"
    )
    import sys

    ended = subprocess.run([*before, sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert f"{unreadable}, which is copied to OUT, cannot be read" in ended.stdout


class TestStores:
    MANY = Writes({f"w{k}/c.0": 10 for k in range(100)})

    def test_a_folder_and_a_file_for_each_tensor_and_the_right_words(
        self, tmp_path: Path, disk: SimpleNamespace
    ) -> None:
        place = choose_place(tmp_path / "store", overwrite=False, kind=STORE_OF_STAGE)
        disk.inodes = 209
        with pytest.raises(DiskSpaceError, match=r"room for 209 more files .* the store needs 210") as caught:
            check_target(place, self.MANY)
        assert "another STORE" in caught.value.hint
        assert "--max-shard-size" not in caught.value.hint
        disk.inodes = 210
        check_target(place, self.MANY)
        disk.free = 200 * disk.block - 1
        with pytest.raises(DiskSpaceError, match="the store needs 819 kB") as caught:
            check_target(place, self.MANY)
        assert "OUT" not in caught.value.hint

    def test_store_and_model_must_fit_together(self, tmp_path: Path, disk: SimpleNamespace) -> None:
        model = Target(choose_place(tmp_path / "out", overwrite=False), SMALL)
        store = Target(choose_place(tmp_path / "store", overwrite=False, kind=KEPT_STORE), self.MANY)
        disk.inodes = 211  # 210 and 11
        with pytest.raises(DiskSpaceError, match="the model and the store need 221 at one time") as caught:
            check_together([store, model])
        assert "--keep-store DIR" in caught.value.hint
        disk.inodes, disk.free = 221, 200 * disk.block
        with pytest.raises(DiskSpaceError, match="the model and the store need 823 kB at one time"):
            check_together([store, model])
        disk.free = 201 * disk.block
        check_together([store, model])
