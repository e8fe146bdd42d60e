"""A process that reads a folder and does nothing with it: one way of reading, for `bench.io`.

    python -m bench.read_ways WAY FOLDER

Two threads read all files in turns, four reads of 4 MiB from each (the ranks' files of a checkpoint are read so), from
an offset that is no page border (torch's files have their tensors at such).

    pread            the product's: positioned reads, pages dropped behind the reader unless they were cached before
    mmap             the product's: windows that the kernel copies from (`storage/mapped.py`), pages dropped alike
    pread, kept      positioned reads alone; pages stay in the page cache
    pread, uncached  positioned reads with RWF_DONTCACHE
    mmap, loads      windows that numpy copies from: a file that shrinks would end the process with SIGBUS
    direct           O_DIRECT, aligned
"""

from __future__ import annotations

import argparse
import mmap
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from merge_stream.storage.local import LocalSource
from merge_stream.storage.page_cache import Behind

__all__ = ["WAYS", "main"]

_SEGMENT = 4 << 20
_TURN = 4
_THREADS = 2
_OFFSET = 704
_PAGE = mmap.PAGESIZE
_RWF_DONTCACHE = 0x80

ReadInto = Callable[[str, int, memoryview], None]


def _product(io: str) -> ReadInto:
    return LocalSource(io, window_bytes=_SEGMENT).read_into  # type: ignore[arg-type]


class _Descriptors:
    """Files opened once, with the product's dropping of pages or without."""

    def __init__(self, flags: int = os.O_RDONLY, *, drops: bool = False) -> None:
        self._flags, self._drops = flags, drops
        self._open: dict[str, tuple[int, Behind | None]] = {}
        self._lock = threading.Lock()

    def of(self, path: str) -> tuple[int, Behind | None]:
        with self._lock:
            if path not in self._open:
                fd = os.open(path, self._flags)
                self._open[path] = fd, Behind(fd) if self._drops else None
            return self._open[path]


def _positioned(flags: int) -> ReadInto:
    files = _Descriptors()

    def read(path: str, offset: int, buffer: memoryview) -> None:
        os.preadv(files.of(path)[0], [buffer], offset, flags)

    return read


def _loads() -> ReadInto:
    files = _Descriptors(drops=True)

    def read(path: str, offset: int, buffer: memoryview) -> None:
        fd, behind = files.of(path)
        start = offset // _PAGE * _PAGE
        length = offset + len(buffer) - start
        with mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=start) as window:
            np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(window, np.uint8)[offset - start :])
        if behind is not None:
            behind.passed(fd, offset + len(buffer))

    return read


def _direct() -> ReadInto:
    files = _Descriptors(os.O_RDONLY | os.O_DIRECT)

    def read(path: str, offset: int, buffer: memoryview) -> None:
        os.preadv(files.of(path)[0], [buffer], offset // _PAGE * _PAGE)

    return read


WAYS: dict[str, Callable[[], ReadInto]] = {
    "pread": lambda: _product("pread"),
    "mmap": lambda: _product("mmap"),
    "pread, kept": lambda: _positioned(0),
    "pread, uncached": lambda: _positioned(_RWF_DONTCACHE),
    "mmap, loads": _loads,
    "direct": _direct,
}


def _reads(folder: pathlib.Path) -> Iterator[tuple[str, int, int]]:
    """(path, offset, bytes): each file in turn gives a few segments, until all are read."""
    left = [(str(f), _OFFSET, f.stat().st_size) for f in sorted(folder.rglob("*")) if f.is_file()]
    while left:
        later = []
        for path, offset, nbytes in left:
            stop = min(offset + _TURN * _SEGMENT, nbytes)
            yield from ((path, at, min(_SEGMENT, stop - at)) for at in range(offset, stop, _SEGMENT))
            if stop < nbytes:
                later.append((path, stop, nbytes))
        left = later


def main(arguments: Sequence[str] | None = None) -> int:
    """Read everything once; prints how many bytes."""
    parser = argparse.ArgumentParser(prog="python -m bench.read_ways", description="Read a folder in one way.")
    parser.add_argument("way", choices=list(WAYS))
    parser.add_argument("folder", type=pathlib.Path)
    given = parser.parse_args(arguments)
    read = WAYS[given.way]()
    reads, lock, done = _reads(given.folder), threading.Lock(), [0]
    failures: list[BaseException] = []

    def work() -> None:
        area = mmap.mmap(-1, _SEGMENT)  # page-aligned, as O_DIRECT wants it
        buffer = memoryview(area)
        while not failures:
            with lock:
                item = next(reads, None)
            if item is None:
                return
            path, offset, nbytes = item
            try:
                read(path, offset, buffer[: -(-nbytes // _PAGE) * _PAGE] if given.way == "direct" else buffer[:nbytes])
            except BaseException as error:  # noqa: BLE001 - told by the main thread
                failures.append(error)
            with lock:
                done[0] += nbytes

    threads = [threading.Thread(target=work) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    print(done[0])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
