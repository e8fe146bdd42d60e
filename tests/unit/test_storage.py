"""Reads and writes are exact, open files are bounded, and a tree is a closed list of files."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from merge_stream.errors import CorruptCheckpointError, TruncatedFileError, UnknownFormatError
from merge_stream.storage import local as module
from merge_stream.storage.local import LocalSink, LocalSource, LocalTree, natural_key
from merge_stream.storage.memory import MemorySink, MemorySource, MemoryTree

DATA = bytes(range(256)) * 4096  # 1 MiB: bulk


def open_fds(folder: Path) -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith(str(folder))
        except OSError:
            continue
    return count


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(DATA)
    return path


class TestReading:
    def test_any_range_is_exact(self, file: Path) -> None:
        source = LocalSource()
        for offset, nbytes in ((0, len(DATA)), (1, 7), (len(DATA) - 1, 1), (12345, 300_000), (5, 0)):
            buffer = bytearray(nbytes)
            source.read_into(str(file), offset, memoryview(buffer))
            assert buffer == DATA[offset : offset + nbytes]
        source.close()

    def test_short_reads_are_continued(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A signal or a network file system may give less than was asked for."""
        preadv = os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, bufs, at, *flags: preadv(fd, [bufs[0][:1000]], at, *flags))
        buffer = bytearray(300_001)
        source = LocalSource()
        source.read_into(str(file), 77, memoryview(buffer))
        assert buffer == DATA[77 : 77 + 300_001]
        source.close()

    def test_the_end_of_a_file_is_told_with_all_numbers(self, file: Path) -> None:
        source = LocalSource()
        with pytest.raises(TruncatedFileError) as caught:
            source.read_into(str(file), len(DATA) - 10, memoryview(bytearray(50)))
        for word in (str(file), f"ends at byte {len(DATA)}", "wanted 50 bytes", f"at offset {len(DATA) - 10}"):
            assert word in caught.value.message
        source.close()

    @pytest.mark.parametrize("cached", [True, False])
    def test_read_pages_are_dropped_behind_unless_they_were_cached_before(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, cached: bool
    ) -> None:
        path = tmp_path / "large"
        nbytes = 40 << 20
        with path.open("wb") as file:
            file.truncate(nbytes)
        dropped = []
        preadv = os.preadv

        def disk(fd: int, buffers: list[memoryview], at: int, flags: int = 0) -> int:
            if flags & os.RWF_NOWAIT and not cached:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            return preadv(fd, buffers, at)

        monkeypatch.setattr(os, "preadv", disk)
        monkeypatch.setattr(os, "posix_fadvise", lambda _fd, at, count, _advice: dropped.append((at, count)))
        source = LocalSource()
        buffer = memoryview(bytearray(1 << 20))
        for at in range(0, nbytes, 1 << 20):
            source.read_into(str(path), at, buffer)
            assert all(start + count <= at + (1 << 20) - (8 << 20) for start, count in dropped)
        assert sum(count for _, count in dropped) == (0 if cached else 32 << 20)
        assert all((start | count) % (2 << 20) == 0 for start, count in dropped)
        source.close()
        assert ((0, 0) in dropped) is not cached  # the rest, at the end

    def test_other_errors_are_raised(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "preadv", broken)
        source = LocalSource()
        with pytest.raises(OSError, match="Input/output"):
            source.read_into(str(file), 0, memoryview(bytearray(10)))
        source.close()

    def test_a_missing_file_is_an_os_error(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            LocalSource().read_into(str(tmp_path / "none"), 0, memoryview(bytearray(1)))


class TestWriting:
    def test_short_writes_are_continued(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pwritev = os.pwritev
        monkeypatch.setattr(os, "pwritev", lambda fd, bufs, at, *flags: pwritev(fd, [bufs[0][:1000]], at, *flags))
        sink = LocalSink(str(tmp_path))
        sink.allocate("f", 400_000)
        sink.write_at("f", 10, memoryview(DATA[:300_001]))
        sink.close()
        assert (tmp_path / "f").read_bytes()[10 : 10 + 300_001] == DATA[:300_001]

    def test_a_full_disk_is_an_os_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "pwritev", full)
        sink = LocalSink(str(tmp_path))
        sink.allocate("f", 10)
        with pytest.raises(OSError, match="No space"):
            sink.write_at("f", 0, memoryview(b"x"))
        sink.close()

    def test_allocate_keeps_what_is_there(self, tmp_path: Path) -> None:
        sink = LocalSink(str(tmp_path))
        sink.allocate("f", 100)
        sink.write_at("f", 50, memoryview(b"abc"))
        sink.allocate("f", 100)
        buffer = bytearray(3)
        sink.read_into("f", 50, memoryview(buffer))
        assert buffer == b"abc"
        sink.allocate("f", 20)
        assert (tmp_path / "f").stat().st_size == 20
        with pytest.raises(TruncatedFileError, match="ends at byte 20"):
            sink.read_into("f", 18, memoryview(buffer))
        sink.close()

    def test_files_have_the_modes_that_the_umask_asks_for(self, tmp_path: Path) -> None:
        before = os.umask(0o027)
        try:
            LocalSink(str(tmp_path)).allocate("f", 1)
        finally:
            os.umask(before)
        assert (tmp_path / "f").stat().st_mode & 0o777 == 0o640


class TestOpenFiles:
    def test_are_bounded_under_many_threads_and_every_read_is_right(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """512 rank files and a limit of 8: idle ones are closed, those in use never are."""
        monkeypatch.setattr(module, "open_file_limit", lambda: 8)
        for k in range(100):
            (tmp_path / str(k)).write_bytes(b"%04d" % k * 100)
        source = LocalSource()
        wrong: list[int] = []
        most = [0]

        def work(seed: int) -> None:
            for j in range(300):
                k = (seed * 37 + j * 13) % 100
                buffer = bytearray(400)
                source.read_into(str(tmp_path / str(k)), 0, memoryview(buffer))
                if buffer != b"%04d" % k * 100:
                    wrong.append(k)
                if j % 20 == 0:
                    most[0] = max(most[0], open_fds(tmp_path))

        threads = [threading.Thread(target=work, args=(s,)) for s in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not wrong
        assert most[0] <= 8 + 6
        assert open_fds(tmp_path) <= 8
        source.close()
        assert open_fds(tmp_path) == 0

    def test_a_failed_read_leaves_no_file_in_use(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "open_file_limit", lambda: 1)
        for name in "abcd":
            (tmp_path / name).write_bytes(b"x")
        source = LocalSource()
        for name in "abcd":
            with pytest.raises(TruncatedFileError):
                source.read_into(str(tmp_path / name), 0, memoryview(bytearray(2)))
        assert open_fds(tmp_path) == 1
        source.close()


def build(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


class TestTree:
    def test_lists_files_with_sizes_in_natural_order(self, tmp_path: Path) -> None:
        tree = LocalTree.of([build(tmp_path, {"r10": b"1", "r2": b"22", "sub/x": b"333"})])
        assert list(tree.files) == ["r2", "r10", "sub/x"]
        assert [e.nbytes for e in tree.files.values()] == [2, 1, 3]
        assert list(tree.folders()) == ["sub"]
        assert tree.subtree("sub").read("x") == b"333"
        assert list(tree.subtree("su").files) == []

    def test_names_of_a_checkpoint_cannot_leave_it(self, tmp_path: Path) -> None:
        """They only select from the list that was made at the start."""
        build(tmp_path, {"secret": b"s", "ckpt/a": b"a"})
        tree = LocalTree.of([tmp_path / "ckpt"])
        for name in ("../secret", "/etc/passwd", str(tmp_path / "secret"), "./a", "a/../a", "a\0", ""):
            with pytest.raises(KeyError):
                tree.read(name)
        for folder in ("..", "../", "/", "."):
            assert dict(tree.subtree(folder).files) == {}

    def test_links_to_files_are_followed_and_links_to_folders_are_not(self, tmp_path: Path) -> None:
        build(tmp_path, {"blobs/1": b"one", "far/away": b"x"})
        ckpt = tmp_path / "ckpt"
        ckpt.mkdir()
        (ckpt / "file").symlink_to("../blobs/1")
        (ckpt / "folder").symlink_to("../far")
        (ckpt / "loop").symlink_to(".")
        (ckpt / "dangling").symlink_to("nowhere")
        os.mkfifo(ckpt / "pipe")
        tree = LocalTree.of([ckpt])
        assert list(tree.files) == ["file"]
        assert tree.read("file") == b"one"
        (tmp_path / "entry").symlink_to("ckpt")
        assert list(LocalTree.of([tmp_path / "entry"]).files) == ["file"]  # the given folder itself may be one

    def test_our_own_leftovers_and_deep_folders_are_not_listed(self, tmp_path: Path) -> None:
        build(tmp_path, {"a": b"", "X.partial/model/b": b"", ".git/c": b"", "1/2/3/4/5/d": b"", "1/2/3/4/5/6/e": b""})
        assert sorted(LocalTree.of([tmp_path]).files) == ["1/2/3/4/5/d", "a"]

    @pytest.mark.parametrize("kind", ["missing", "file"])
    def test_a_folder_that_is_none_is_told(self, tmp_path: Path, kind: str) -> None:
        path = tmp_path / "x"
        if kind == "file":
            path.write_text("")
        with pytest.raises(UnknownFormatError, match="not there" if kind == "missing" else "a file, not a folder"):
            LocalTree.of([path])

    def test_reading_beyond_the_end_is_told(self, tmp_path: Path) -> None:
        tree = LocalTree.of([build(tmp_path, {"a": b"12345"})])
        assert tree.read("a", 1, 3) == b"234"
        assert tree.read("a", 5) == b""
        for offset, nbytes in ((3, 3), (6, None), (0, 6)):
            with pytest.raises(TruncatedFileError, match="has 5 bytes"):
                tree.read("a", offset, nbytes)

    def test_a_file_that_shrank_since_it_was_listed_is_told(self, tmp_path: Path) -> None:
        tree = LocalTree.of([build(tmp_path, {"a": b"12345"})])
        (tmp_path / "a").write_bytes(b"12")
        with pytest.raises(TruncatedFileError, match="ended at byte 2"):
            tree.read("a")

    def test_short_reads_of_metadata_are_continued(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tree = LocalTree.of([build(tmp_path, {"a": DATA})])
        pread = os.pread
        monkeypatch.setattr(os, "pread", lambda fd, n, at: pread(fd, min(n, 100_000), at))
        assert tree.read("a") == DATA


class TestOverlay:
    def test_parts_of_one_checkpoint_are_laid_over_each_other(self, tmp_path: Path) -> None:
        a = build(tmp_path / "a", {"rank0": b"0", "config.json": b"{}"})
        b = build(tmp_path / "b", {"rank1": b"1", "config.json": b"{}"})
        tree = LocalTree.of([a, b])
        assert list(tree.files) == ["config.json", "rank0", "rank1"]
        assert tree.read("config.json") == b"{}"
        assert tree.read("rank1") == b"1"

    def test_the_same_folder_twice_is_no_contradiction(self, tmp_path: Path) -> None:
        a = build(tmp_path / "a", {"rank0": b"0"})
        assert LocalTree.of([a, a]).read("rank0") == b"0"

    @pytest.mark.parametrize("other", [b"{ }", b"[]"])
    def test_doubles_that_differ_in_size_or_content_are_refused(self, tmp_path: Path, other: bytes) -> None:
        a, b = build(tmp_path / "a", {"s/c": b"{}"}), build(tmp_path / "b", {"s/c": other})
        with pytest.raises(CorruptCheckpointError, match="stands in two input folders") as caught:
            LocalTree.of([a, b]).subtree("s").read("c")
        assert str(a / "s/c") in caught.value.message
        assert str(b / "s/c") in caught.value.message

    def test_a_difference_behind_the_first_mebibyte_is_found(self, tmp_path: Path) -> None:
        a, b = build(tmp_path / "a", {"c": DATA * 3}), build(tmp_path / "b", {"c": DATA * 2 + b"\1" + DATA[1:]})
        with pytest.raises(CorruptCheckpointError):
            LocalTree.of([a, b]).entry("c")


class TestMemory:
    def test_behaves_as_the_local_storage_does(self) -> None:
        tree = MemoryTree({"a": b"12345", "sub/b": b"6"})
        assert tree.read("a", 1, 2) == b"23"
        assert list(tree.folders()) == ["sub"]
        assert tree.subtree("sub").read("b") == b"6"
        sink = MemorySink()
        sink.allocate("f", 10)
        sink.write_at("f", 2, memoryview(b"xy"))
        sink.allocate("f", 10)
        assert sink.contents["f"][2:4] == b"xy"
        calls: list[Callable[[], object]] = [
            lambda: tree.read("a", 3, 3),
            lambda: MemorySource({"a": b"1"}).read_into("a", 0, memoryview(bytearray(2))),
        ]
        for call in calls:
            with pytest.raises(TruncatedFileError):
                call()
        with pytest.raises(ValueError, match="beyond the end"):
            sink.write_at("f", 9, memoryview(b"xy"))


def test_natural_order() -> None:
    names = ["layers.10.w", "layers.2.w", "layers.2.b", "layers", "10", "9", "a1b2", "a1b10", ""]
    assert sorted(names, key=natural_key) == [
        "",
        "9",
        "10",
        "a1b2",
        "a1b10",
        "layers",
        "layers.2.b",
        "layers.2.w",
        "layers.10.w",
    ]
