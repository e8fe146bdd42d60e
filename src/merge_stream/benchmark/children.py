"""Commands that the bench runs: each in a session of its own, which is ended with us, whatever ends us.

Ctrl-C reaches this process alone, so that it can end what it started and remove its folder with nobody writing there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from merge_stream.errors import MergeStreamError

__all__ = ["ChildFailedError", "Used", "measured", "python"]


class ChildFailedError(MergeStreamError):
    """A command of the bench ended with an error: its own words, hint and exit code where it told them."""

    def __init__(self, message: str, *, hint: str, exit_code: int) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Used:
    """Seconds of wall and CPU time (its children's too), and what it told on stdout."""

    wall: float
    cpu: float
    told: str


def python(module: str, *words: str) -> list[str]:
    """`python -m module words`, by this interpreter."""
    return [sys.executable, "-m", module, *words]


def measured(command: str | Sequence[str]) -> Used:
    """Run a shell command, or the words of one, to its end; ChildFailedError when it fails."""
    words = ["sh", "-c", command] if isinstance(command, str) else list(command)
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
        assert process.stdout is not None
        try:
            told = process.stdout.read()
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        finally:
            process.stdout.close()
        wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        if process.returncode:
            raise _failed(words, process.returncode, told, errors.read())
    return Used(wall, usage.ru_utime + usage.ru_stime, told)


def _failed(words: Sequence[str], code: int, told: str, errors: str) -> ChildFailedError:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        report: Any = json.loads(told)
        return ChildFailedError(report["error"], hint=report["hint"], exit_code=int(report["exit_code"]))
    command = words[2] if words[:2] == ["sh", "-c"] else shlex.join(words)
    msg = f"`{command[:200]}` ended with {code}: {errors[-1000:].strip()}"
    return ChildFailedError(msg, hint="the bench cannot go on; run the command by itself", exit_code=1)
