"""How much memory a command really needed, itself and its children, as the kernel counted it.

Three traps, and what is done about them:

- `ru_maxrss` of a child starts with the peak of the process that it was forked from. So the
  command is started by a small launcher (this file, run by a bare interpreter), and what
  that inherits is a few MB.
- VmHWM belongs to the address space that `exec` made, so it is honest, but it is gone with
  the process: it is read every few milliseconds, and wait4's figure closes the gap.
- A sum over processes needs readings of one moment: for each moment the sum of the peaks of
  all that lived then is taken, which is never too small.

    run = measure([sys.executable, "-m", "merge_stream", "merge", ckpt, out])
    assert run.peak <= 512_000_000
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["MeasuredRun", "assert_peak_memory", "measure"]

_EVERY_SECONDS = 0.004


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A command that has ended, its words, and its peaks in bytes.

    `peak` is the sum over the process tree, `largest` that of the largest single process.
    """

    returncode: int
    stdout: str
    stderr: str
    peak: int
    largest: int
    seconds: float


def measure(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None, timeout: float = 600
) -> MeasuredRun:
    """Run `command` to its end in a fresh process and read the memory it needed."""
    with tempfile.TemporaryDirectory() as folder:
        told = os.path.join(folder, "peaks.json")
        launcher = [sys.executable, "-I", "-S", os.path.abspath(__file__), told, *command]
        began = time.monotonic()
        ended = subprocess.run(  # noqa: S603 - the caller's command
            launcher, capture_output=True, text=True, env=env, cwd=cwd, timeout=timeout, check=False
        )
        seconds = time.monotonic() - began
        with open(told, encoding="ascii") as file:
            numbers = json.load(file)
    return MeasuredRun(ended.returncode, ended.stdout, ended.stderr, numbers["peak"], numbers["largest"], seconds)


def assert_peak_memory(command: Sequence[str], at_most: int, *, env: Mapping[str, str] | None = None) -> MeasuredRun:
    """Run `command`; AssertionError when it fails, or when its process tree needed more than `at_most` bytes."""
    run = measure(command, env=env)
    if run.returncode:
        raise AssertionError(f"{' '.join(command)} ended with {run.returncode}:\n{run.stderr}")
    if run.peak > at_most:
        raise AssertionError(f"{' '.join(command)} needed {run.peak:,} bytes, allowed were {at_most:,}")
    return run


def _launch(told: str, command: Sequence[str]) -> int:
    """Start the command, watch its tree, write the peaks to the file `told`; returns its exit code."""
    child = subprocess.Popen(command)  # noqa: S603 - the caller's command
    peaks: dict[int, int] = {}
    tree = 0
    while True:
        alive = [child.pid, *_descendants(child.pid)]
        for pid in alive:
            peaks[pid] = max(peaks.get(pid, 0), _high_water(pid))
        tree = max(tree, sum(peaks[pid] for pid in alive))
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            break
        time.sleep(_EVERY_SECONDS)
    largest = max(usage.ru_maxrss * 1024, *peaks.values())
    with open(told, "w", encoding="ascii") as file:
        json.dump({"peak": max(tree, largest), "largest": largest}, file)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += [int(word) for word in file.read().split()]
    return found + [below for one in found for below in _descendants(one)]


def _high_water(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    sys.exit(_launch(sys.argv[1], sys.argv[2:]))
