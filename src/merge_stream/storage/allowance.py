"""How much memory the reading of metadata may take: the part of `--max-mem` that is there before a plan is.

A merge is bounded by slabs; but headers, pickles and JSON files become Python objects, many times
larger than their bytes, before there is a plan. So each reader tells what it is about to build, before
it does, and is refused when the process would pass the limit. The answer is measured, not summed up:
what earlier files left behind is in the resident memory of the process.

    allowance = MetadataAllowance(limit_bytes=32_000_000_000)
    tree = LocalTree.of(folders, allowance)        readers ask the allowance of their tree
    allowance.require(nbytes, where)               MemoryLimitTooSmallError, or nothing

Small files pass whatever the limit is (`_GRACE` in all): a bound that is too small for any run is told
by the plan, which knows the smallest that works.
"""

from __future__ import annotations

import resource
from typing import NoReturn

import psutil

from merge_stream.errors import MemoryLimitTooSmallError
from merge_stream.units import format_bytes

__all__ = ["DEFAULT_LIMIT", "MetadataAllowance"]

DEFAULT_LIMIT = 8_000_000_000
"""Bound of the process in bytes where none is given; that of MergeOptions."""
_GRACE = 16 << 20
_UNMEASURED = 1 << 20
_SLACK = 4 << 20
_PAGE = resource.getpagesize()


class MetadataAllowance:
    """Memory in bytes that the process may have reached after the next piece of metadata was built."""

    __slots__ = ("_first", "_unmeasured", "limit_bytes")

    def __init__(self, limit_bytes: int = DEFAULT_LIMIT) -> None:
        self.limit_bytes = limit_bytes
        self._first = _resident()
        self._unmeasured = 0

    def room(self) -> int:
        """Bytes that may still be built."""
        return max(self.limit_bytes - _SLACK, self._first + _GRACE) - _resident()

    def require(self, nbytes: int, where: str) -> None:
        """MemoryLimitTooSmallError when `nbytes` more, for `where`, do not fit. Small amounts are measured together."""
        self._unmeasured += nbytes
        if self._unmeasured >= _UNMEASURED:
            self._unmeasured = 0
            if nbytes > self.room():
                self.refuse(nbytes, where)

    def refuse(self, nbytes: int, where: str) -> NoReturn:
        """The error that `nbytes` for `where` do not fit."""
        used = _resident()
        enough = -(-(used + nbytes + nbytes // 16 + 2 * _GRACE) // 1_000_000)
        msg = (
            f"--max-mem {format_bytes(self.limit_bytes)} is too small to read {where}: its metadata takes about "
            f"{format_bytes(nbytes)} of memory, beside the {format_bytes(used)} in use"
        )
        hint = f"give --max-mem {enough}M or more, if the file is as large as it should be; else it is damaged"
        raise MemoryLimitTooSmallError(msg, hint=hint)


def _resident() -> int:
    """Resident bytes of this process (read from /proc, which takes a third of psutil's time, where it is there)."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return int(psutil.Process().memory_info().rss)
