"""The file system of a path, as /proc tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from merge_stream.storage import mounts as module
from merge_stream.storage.mounts import Mount, largest_file_of, mount_of

TABLE = r"""
21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw
30 21 0:25 / /mnt/ram rw - tmpfs tmpfs rw
31 21 8:1 / /mnt/my\040stick rw shared:7 master:2 - vfat /dev/sda1 rw
32 21 0:30 /sub /mnt/ram/deep rw - nfs4 host:/x rw
33 21 0:31 / /mnt/twice rw - ext4 /dev/b rw
34 21 0:32 / /mnt/twice rw - fuse.sshfs c rw
a line that is none
""".lstrip()


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(TABLE)
    monkeypatch.setattr(module, "_MOUNTINFO", str(path))
    return path


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("/home/x", Mount("ext4", "/")),
        ("/mnt/ram", Mount("tmpfs", "/mnt/ram")),
        ("/mnt/ram/out/that/is/to/be", Mount("tmpfs", "/mnt/ram")),
        ("/mnt/rampart", Mount("ext4", "/")),
        ("/mnt/ram/deep/x", Mount("nfs4", "/mnt/ram/deep")),
        ("/mnt/my stick/out", Mount("vfat", "/mnt/my stick")),
        ("/mnt/twice/x", Mount("fuse.sshfs", "/mnt/twice")),
    ],
)
def test_the_deepest_mount_that_holds_the_path(table: Path, path: str, wanted: Mount) -> None:
    assert mount_of(path) == wanted


def test_nothing_is_claimed_where_the_table_cannot_be_read(table: Path) -> None:
    table.unlink()
    assert mount_of("/home/x") == Mount("", "/")


def test_fat_is_the_only_one_with_a_limit_that_people_meet() -> None:
    assert largest_file_of("vfat") == 4 * 2**30 - 1
    assert [largest_file_of(kind) for kind in ("ext4", "exfat", "")] == [None, None, None]


def test_the_real_table_is_understood(tmp_path: Path) -> None:
    found = mount_of(str(tmp_path))
    assert found.type
    assert Path(found.folder).is_dir()
