"""Reads by memory map give the bytes and the errors of positioned reads, whatever becomes of the file."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from merge_stream.errors import TruncatedFileError, UnsupportedError
from merge_stream.options import IoName
from merge_stream.storage import mapped as module
from merge_stream.storage.local import LocalSource
from merge_stream.storage.mapped import Mapped, can_copy, window_room

pytestmark = pytest.mark.skipif(not can_copy(), reason="this system forbids process_vm_readv")

DATA = os.urandom(1 << 20)
PAGE = mmap.PAGESIZE
BOTH: tuple[IoName, ...] = ("pread", "mmap")


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "data"
    path.write_bytes(DATA)
    return path


def maps_of(path: pathlib.Path) -> int:
    return pathlib.Path("/proc/self/maps").read_text().count(str(path))


def read(source: LocalSource, path: pathlib.Path, offset: int, nbytes: int) -> bytearray:
    buffer = bytearray(nbytes)
    source.read_into(str(path), offset, memoryview(buffer))
    return buffer


@pytest.mark.parametrize("window", [PAGE, 3 * PAGE, 1 << 18, 1 << 22])
def test_any_range_is_exact_and_comes_through_windows(file: pathlib.Path, window: int) -> None:
    source = LocalSource("mmap", window_bytes=window)
    whole = 0
    for offset, nbytes in (
        (0, len(DATA)),
        (1, len(DATA) - 1),
        (PAGE - 1, 2),
        (PAGE, PAGE),
        (len(DATA) - 1, 1),
        (704, 300_000),
        (5, 0),
        (len(DATA), 0),
    ):
        assert read(source, file, offset, nbytes) == DATA[offset : offset + nbytes]
        whole += nbytes if nbytes >= PAGE else 0  # smaller ones cost less when they are read
    assert source.mapped_nbytes == whole
    source.close()


@pytest.mark.parametrize("io", ["auto", "pread"])
def test_auto_reads_without_maps(file: pathlib.Path, io: IoName) -> None:
    source = LocalSource(io)
    assert read(source, file, 3, 1000) == DATA[3:1003]
    assert source.mapped_nbytes == 0
    source.close()


def test_a_window_is_no_larger_than_it_says_and_gone_after_the_read(
    file: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []
    real, seen = module._copy, []

    def copy(address: int, buffer: memoryview) -> int:
        seen.append(maps_of(file))
        for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
            if str(file) in line:
                start, stop = (int(x, 16) for x in line.split()[0].split("-"))
                lengths.append(stop - start)
        return real(address, buffer)

    monkeypatch.setattr(module, "_copy", copy)
    window = 16 * PAGE
    source = LocalSource("mmap", window_bytes=window)
    read(source, file, 704, 500_000)
    assert set(seen) == {1}
    assert max(lengths) == window_room(window)
    assert maps_of(file) == 0
    source.close()


def test_readers_in_many_threads_do_not_disturb_each_other(file: pathlib.Path) -> None:
    source = LocalSource("mmap", window_bytes=8 * PAGE)
    wrong: list[int] = []

    def work(seed: int) -> None:
        for j in range(60):
            offset = (seed * 7919 + j * 104_729) % (len(DATA) - 70_000)
            if read(source, file, offset, 70_000) != DATA[offset : offset + 70_000]:
                wrong.append(offset)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert source.mapped_nbytes == 6 * 60 * 70_000
    source.close()


# ------------------------------------------------------------------------- files that are not what they were


def messages(act: Callable[[LocalSource], object]) -> set[str]:
    """What `act` raises, with either way of reading."""
    found = set()
    for io in BOTH:
        source = LocalSource(io)
        with pytest.raises((TruncatedFileError, OSError)) as caught:
            act(source)
        found.add(f"{type(caught.value).__name__}: {caught.value}")
        source.close()
    return found


@pytest.mark.parametrize("offset", [len(DATA) - 10, len(DATA), len(DATA) + 3 * PAGE, 0])
def test_the_end_of_a_file_is_told_in_the_same_words(file: pathlib.Path, offset: int) -> None:
    (message,) = messages(lambda source: read(source, file, offset, len(DATA) + 50))
    assert "hint: the file is cut, or shrank during the run" in message


def shrinking(file: pathlib.Path, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """The file is cut when the window stands and nothing is copied yet: the worst moment."""
    real = module._copy

    def copy(address: int, buffer: memoryview) -> int:
        os.truncate(file, nbytes)
        return real(address, buffer)

    monkeypatch.setattr(module, "_copy", copy)


@pytest.mark.parametrize("nbytes", [0, 1, PAGE, 10 * PAGE, 10 * PAGE + 1, len(DATA) - PAGE, len(DATA) - 1])
def test_a_file_that_shrinks_under_its_map_is_an_error_and_no_signal(
    file: pathlib.Path, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    """A load from such a page would end the process with SIGBUS; the rest of the last page reads as zeros."""
    shrinking(file, monkeypatch, nbytes)
    source = LocalSource("mmap")
    with pytest.raises(TruncatedFileError, match=f"ends at byte {nbytes}, wanted {len(DATA)} bytes at offset 0"):
        read(source, file, 0, len(DATA))
    source.close()


def test_a_file_that_shrinks_behind_what_is_read_is_read(file: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shrinking(file, monkeypatch, 5 * PAGE)
    source = LocalSource("mmap")
    assert read(source, file, PAGE + 7, 4 * PAGE - 7) == DATA[PAGE + 7 : 5 * PAGE]
    source.close()


def test_a_load_would_have_been_the_end(file: pathlib.Path) -> None:
    """That the test above tests something: the same with a load from the map."""
    code = "import mmap, os, sys\nfd = os.open(sys.argv[1], os.O_RDONLY)\nm = mmap.mmap(fd, 0, prot=mmap.PROT_READ)\n"
    code += "os.truncate(sys.argv[1], 1)\nm[100_000]"
    ended = subprocess.run([sys.executable, "-S", "-c", code, str(file)], check=False)
    assert ended.returncode < 0


@pytest.mark.parametrize("first", [0, 3 * PAGE])
def test_what_cannot_be_copied_is_read(file: pathlib.Path, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """A page that faults for another reason: the copy ends there, and a positioned read goes on."""
    real = module._copy
    monkeypatch.setattr(module, "_copy", lambda address, buffer: real(address, buffer[:first]) if first else 0)
    source = LocalSource("mmap")
    assert read(source, file, 0, len(DATA)) == DATA
    assert source.mapped_nbytes == first
    source.close()


@pytest.mark.parametrize("error", [OSError(errno.ENODEV, "no maps here"), OSError(errno.ENOMEM, "ulimit -v")])
def test_a_file_system_without_maps_is_read(
    file: pathlib.Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def no_map(*_: object, **__: object) -> mmap.mmap:
        raise error

    monkeypatch.setattr(module.mmap, "mmap", no_map)
    source = LocalSource("mmap")
    assert read(source, file, 1, 100_000) == DATA[1:100_001]
    assert source.mapped_nbytes == 0
    source.close()


@contextlib.contextmanager
def broken_disk(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file on a file system whose disk ends too early: its later pages cannot be read."""
    image, mounted = folder / "image", folder / "mounted"
    mounted.mkdir()
    with image.open("wb") as disk:
        disk.truncate(32 << 20)

    def call(*words: str) -> str:
        ended = subprocess.run(words, capture_output=True, text=True, check=False)
        if ended.returncode:
            pytest.skip(f"no disk of our own here: {words[0]}: {ended.stderr.strip()}")
        return ended.stdout.strip()

    try:
        call("mkfs.ext4", "-q", "-F", str(image))
        device = call("losetup", "--direct-io=on", "-f", "--show", str(image))
    except FileNotFoundError as error:
        pytest.skip(f"no disk of our own here: {error}")
    try:
        call("mount", device, str(mounted))
        try:
            path = mounted / "data"
            path.write_bytes(b"\1" * (20 << 20))
            os.sync()
            os.truncate(image, 16 << 20)
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            yield path
        finally:
            call("umount", str(mounted))
    finally:
        call("losetup", "-d", device)


def test_a_disk_that_fails_is_told_in_the_same_words(tmp_path: pathlib.Path) -> None:
    with broken_disk(tmp_path) as path:
        (message,) = messages(lambda source: read(source, path, 0, 20 << 20))
        assert message == f"OSError: [Errno {errno.EIO}] Input/output error: '{path}'"


# -------------------------------------------------------------------------------------------- where it is forbidden


@pytest.mark.parametrize("known", [True, False])
def test_a_system_that_forbids_the_copy_is_refused_with_a_hint(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    forbidden = (lambda *_: -1) if known else None
    monkeypatch.setattr(module, "_system_call", lambda: forbidden)
    can_copy.cache_clear()
    try:
        with pytest.raises(UnsupportedError, match="the system forbids process_vm_readv") as caught:
            Mapped(1 << 20)
        assert "--io pread" in caught.value.hint
        LocalSource("auto").close()
    finally:
        can_copy.cache_clear()
