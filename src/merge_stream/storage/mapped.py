"""Reading by memory map, in windows that are unmapped once they are consumed.

A window maps a few MiB of a file, is copied to where the bytes belong, and goes at once. So
what it adds to resident memory is at most `window_room` for each reader, and nothing stays
mapped between two reads.

The kernel makes the copy (process_vm_readv of this process's own memory), not a load
instruction. Where a page cannot be had, because the file shrank under the map or the disk
failed, a load would end the process with SIGBUS, which Python cannot survive; the kernel
stops copying instead and tells how far it came. The size is looked at before a window is
mapped, and again after the copy: behind the new end of a file that shrank, the last page
reads as zeros, and such a copy counts as none.

    read_into --copy(fd, offset, buffer)--> window --kernel--> buffer      bytes copied

What was not copied is the caller's to read in another way, which also finds the right error.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
from collections.abc import Callable

import numpy as np

from merge_stream.errors import UnsupportedError

__all__ = ["Mapped", "can_copy", "window_room"]

_PAGE = mmap.ALLOCATIONGRANULARITY


def window_room(window_bytes: int) -> int:
    """Resident bytes that a window for reads of `window_bytes` can take: reads do not begin at page borders."""
    return -(-window_bytes // _PAGE) * _PAGE + _PAGE


class Mapped:
    """Reads through windows of at most `window_bytes`; each reader has at most one at a time.

    UnsupportedError where the system does not let the kernel make the copy. `nbytes` counts
    what came through a window.
    """

    def __init__(self, window_bytes: int) -> None:
        if not can_copy():
            msg = "--io mmap cannot be used here: the system forbids process_vm_readv"
            msg += ", without which a file that shrinks while it is mapped would end the process"
            raise UnsupportedError(msg, hint="leave --io out, or give --io pread; containers forbid it by seccomp")
        self._window_bytes = window_bytes
        self._count = threading.Lock()
        self.nbytes = 0

    def copy(self, fd: int, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from `offset` of the file; returns how many of its first bytes are there, which may be none.

        A read of less than a page is left to the caller: its window would cost ten times what reading it does.
        """
        if len(buffer) < _PAGE:
            return 0
        done = 0
        while done < len(buffer):
            wanted = min(len(buffer) - done, self._window_bytes)
            got = _copy_window(fd, offset + done, buffer[done : done + wanted])
            done += got
            if got < wanted:
                break
        with self._count:
            self.nbytes += done
        return done


def _copy_window(fd: int, offset: int, buffer: memoryview) -> int:
    stop = offset + len(buffer)
    if os.fstat(fd).st_size < stop:
        return 0
    start = offset // _PAGE * _PAGE
    try:
        window = mmap.mmap(fd, stop - start, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=start)
    except (OSError, ValueError):  # no room for the map, a file system without maps; the file shrank just now
        return 0
    with window:
        copied = _copy(_address(window) + offset - start, buffer)
    return copied if os.fstat(fd).st_size >= stop else 0


@functools.cache
def can_copy() -> bool:
    """The kernel copies within this process when it is asked to."""
    source, target = np.frombuffer(b"window", dtype=np.uint8), bytearray(6)
    return _copy(source.__array_interface__["data"][0], memoryview(target)) == 6 and target == b"window"


class _Range(ctypes.Structure):
    """An iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def _copy(address: int, buffer: memoryview) -> int:
    """Copy the memory at `address` into `buffer`; returns how many bytes, 0 when not one could be had."""
    call = _system_call()
    if call is None:
        return 0
    there = _Range(address, len(buffer))
    here = _Range(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), len(buffer))
    return max(call(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0), 0)


@functools.cache
def _system_call() -> Callable[..., int] | None:
    """process_vm_readv (Linux 3.2, glibc 2.15); a call releases the interpreter lock."""
    try:
        call = ctypes.CDLL(None).process_vm_readv
    except AttributeError:
        return None
    pointer = ctypes.POINTER(_Range)
    call.restype = ctypes.c_ssize_t
    call.argtypes = (ctypes.c_int, pointer, ctypes.c_ulong, pointer, ctypes.c_ulong, ctypes.c_ulong)
    return call


def _address(window: mmap.mmap) -> int:
    return int(np.frombuffer(window, dtype=np.uint8).__array_interface__["data"][0])
