"""System calls on the files of a test that fail, fall short, or end the run, as disks and kernels make them."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merge_stream.testing.faulty import os_error

if TYPE_CHECKING:
    import pytest

__all__ = ["CALLS", "Faults", "few_of_each", "in_a_child"]

ON_DESCRIPTORS = ("pread", "preadv", "pwrite", "pwritev", "fdatasync", "fsync", "ftruncate")
ON_PATHS = ("open", "rename", "replace", "mkdir", "unlink", "rmdir")
CALLS = ON_DESCRIPTORS + ON_PATHS


def in_a_child(work: Callable[[], int]) -> int:
    """Run `work` in a copy of this process; its exit code, or minus the signal that ended it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of threads; those of the tests are idle
        pid = os.fork()
    if pid == 0:
        code = 70
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def few_of_each(seen: Sequence[tuple[str, str]]) -> list[int]:
    """Numbers of the calls that are worth a fault: first, last and one between for each kind of call and file."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for number, (call, name) in enumerate(seen):
        kinds.setdefault((call, re.sub(r"\d+", "N", name)), []).append(number)
    return sorted({numbers[k] for numbers in kinds.values() for k in (0, len(numbers) // 2, -1)})


class Faults:
    """Calls of `os` on files below `folders`; `seen` lists those so far as (call, file name)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
        self.seen: list[tuple[str, str]] = []
        self._folders = tuple(map(str, folders))
        self._lock = threading.Lock()
        self._fault: Callable[[str], BaseException | None] = lambda _: None
        self._random: random.Random | None = None
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def fail_at(self, number: int, error: int, *, on: Sequence[str] = CALLS, stays: bool = False) -> None:
        """The `number`-th call (from 0) of those in `on` fails; all later ones too when the fault `stays`."""
        self._at(number, os_error(error), on, stays=stays)

    def kill_at(self, number: int) -> None:
        """The process dies of SIGKILL in place of its `number`-th call."""

        def die() -> OSError:
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        self._at(number, die, CALLS, stays=False)

    def _at(self, number: int, error: Callable[[], OSError], on: Sequence[str], *, stays: bool) -> None:
        left = [number]

        def fault(call: str) -> BaseException | None:
            if call not in on:
                return None
            left[0] -= 1
            return error() if left[0] == -1 or (stays and left[0] < 0) else None

        self._fault = fault

    def heal(self) -> None:
        """From now on nothing fails."""
        self._fault, self._random = (lambda _: None), None

    def shorten(self, seed: int) -> None:
        """Reads and writes of data move a random part, and at least one byte."""
        self._random = random.Random(seed)

    def _wrapped(self, call: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def made(where: Any, *args: Any, **named: Any) -> Any:
            path = _path_of(where) if call in ON_DESCRIPTORS else os.fspath(where)
            if not str(path).startswith(self._folders):
                return real(where, *args, **named)
            with self._lock:
                self.seen.append((call, os.path.basename(str(path))))
                error = self._fault(call)
                if error is None and self._random is not None:
                    args = self._shortened(call, args)
            if error is not None:
                raise error
            return real(where, *args, **named)

        return made

    def _shortened(self, call: str, args: Sequence[Any]) -> tuple[Any, ...]:
        assert self._random is not None
        first, *rest = args or [None]
        if call in {"preadv", "pwritev"} and len(first[0]) > 1:
            first = [memoryview(first[0])[: self._random.randint(1, len(first[0]))]]
        elif call == "pwrite" and len(first) > 1:
            first = first[: self._random.randint(1, len(first))]
        elif call == "pread" and first > 1:
            first = self._random.randint(1, first)
        else:
            return tuple(args)
        return (first, *rest)


def _path_of(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""
