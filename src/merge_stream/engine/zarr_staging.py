"""The staging area `zarr`: a partial store, resumable like a partial model.

    STORE.partial/             lock, plan.json and journal as in the staging area `direct`
        model/                 the store to be: NAME/c.0.0 for each array, no zarr.json yet

Without a zarr.json no reader takes the folder for a store before it is whole.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import os
import threading
from collections.abc import Iterator
from operator import attrgetter

import google_crc32c
import numpy as np

from merge_stream.containers.zarr_array import CHECKSUM_NBYTES
from merge_stream.engine.journal import DoneRanges
from merge_stream.engine.staging import DirectStaging
from merge_stream.planning.plan import OutputFile, Plan
from merge_stream.planning.store_layout import SMALL_ARRAYS, PlacedArray, arrays_of
from merge_stream.storage.base import ByteSink
from merge_stream.storage.local import LocalSink

__all__ = ["StoreSink", "ZarrStaging", "sync_file_system"]

_FEW = 32


class ZarrStaging(DirectStaging):
    """The partial store of one plan (`planning.store_layout.store_plan`)."""

    def write(self, output: int, start: int, data: memoryview) -> None:
        """Put the checksum behind each chunk in `data`, then write and journal it."""
        self._store.seal(self._plan.outputs[output], start, data)
        super().write(output, start, data)

    def sync(self) -> None:
        """Sync what is written, and the folders that hold it."""
        super().sync()
        sync_file_system(self.model_dir)

    def _open_sink(self) -> ByteSink:
        self._store = StoreSink(self.model_dir, self._plan)
        return self._store

    def _is_whole(self, number: int, done: DoneRanges) -> bool:
        """Files of every array that is noted as done have their size."""
        output = self._plan.outputs[number]
        if output.name != SMALL_ARRAYS:
            return super()._is_whole(number, done)
        return all(
            _size(os.path.join(self.model_dir, placed.array.file)) == placed.array.file_nbytes
            for placed in self._store.arrays[output.name]
            if done.covers(number, placed.start, placed.start + placed.array.file_nbytes)
        )


class StoreSink:
    """Positioned writes to the outputs of a store's plan; small arrays are made whole, a file each."""

    def __init__(self, folder: str, plan: Plan) -> None:
        self.folder = folder
        self.arrays = {output.name: arrays_of(plan, output) for output in plan.outputs}
        self._shards = LocalSink(folder)
        self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._unsynced: list[str] = []
        self._lock = threading.Lock()
        for group in {os.path.dirname(p.array.name) for small in self.arrays.values() for p in small} - {""}:
            os.makedirs(os.path.join(folder, group), exist_ok=True)

    def seal(self, output: OutputFile, start: int, data: memoryview) -> None:
        """Write the CRC-32C of each chunk into the room behind it; `data` holds whole chunks."""
        values = np.frombuffer(data, np.uint8)
        for placed in self._meeting(output.name, start, start + len(data)):
            array = placed.array
            first = max(start - placed.start, 0) // array.stride
            for number in range(first, array.chunks):
                low = placed.start + number * array.stride - start
                high = low + array.chunk_nbytes
                if low >= len(data):
                    break
                crc = google_crc32c.value(values[low:high])
                data[high : high + CHECKSUM_NBYTES] = crc.to_bytes(CHECKSUM_NBYTES, "little")

    def allocate(self, name: str, nbytes: int) -> None:
        """Create a shard at its full size; small arrays are made when they are written."""
        if name != SMALL_ARRAYS:
            self._shards.allocate(name, nbytes)

    def write_at(self, name: str, offset: int, buffer: memoryview) -> None:
        """Write to a shard, or make the small arrays that `buffer` holds."""
        if name != SMALL_ARRAYS:
            self._shards.write_at(name, offset, buffer)
            return
        for placed in self._meeting(name, offset, offset + len(buffer)):
            low = placed.start - offset
            self._make(placed.array.name, placed.array.file, buffer[low : low + placed.array.file_nbytes])

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from what was written; a small array that is not there reads as zeros."""
        if name != SMALL_ARRAYS:
            self._shards.read_into(name, offset, buffer)
            return
        buffer[:] = bytes(len(buffer))
        for placed in self._meeting(name, offset, offset + len(buffer)):
            low = placed.start - offset
            with contextlib.suppress(FileNotFoundError), open(os.path.join(self.folder, placed.array.file), "rb") as f:
                f.readinto(buffer[low : low + placed.array.file_nbytes])

    def sync(self, name: str) -> None:
        """Return when what was written to an output is on stable storage."""
        if name != SMALL_ARRAYS:
            self._shards.sync(name)
            return
        with self._lock:
            files, self._unsynced = self._unsynced, []
        if len(files) > _FEW and sync_file_system(self.folder):
            return
        for file in files:
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._folder_fd)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def close(self) -> None:
        """Close all files."""
        self._shards.close()
        with contextlib.suppress(OSError):
            os.close(self._folder_fd)

    def _make(self, folder: str, file: str, content: memoryview) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, dir_fd=self._folder_fd)
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666, dir_fd=self._folder_fd)
        try:
            done = 0
            while done < len(content):
                done += os.write(fd, content[done:])
        finally:
            os.close(fd)
        with self._lock:
            self._unsynced.append(file)

    def _meeting(self, name: str, start: int, stop: int) -> Iterator[PlacedArray]:
        """Arrays of an output that have bytes in [start, stop)."""
        arrays = self.arrays[name]
        first = max(bisect.bisect_right(arrays, start, key=attrgetter("start")) - 1, 0)
        for placed in arrays[first:]:
            if placed.start >= stop:
                return
            yield placed


def sync_file_system(folder: str) -> bool:
    """Return when all that was written to the file system of `folder` is on stable storage; False where unknown.

    One call for thousands of small files, where an fsync for each would be thousands of commits.
    OSError when writing back failed (Linux 5.8 and newer tell).
    """
    try:
        call = ctypes.CDLL(None, use_errno=True).syncfs
    except AttributeError:
        return False
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if call(fd) == 0:
            return True
        number = ctypes.get_errno()
    finally:
        os.close(fd)
    if number in {errno.ENOSYS, errno.EINVAL}:
        return False
    raise OSError(number, os.strerror(number), folder)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1
