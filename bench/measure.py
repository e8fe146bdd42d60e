"""Run commands as fresh processes and measure them: wall time, CPU time, peak memory.

    python -m bench.measure [--rounds N] [--drop FILE_OR_FOLDER ...] [--json] -- COMMAND...

What is measured
  wall    from the start of the process until it ended
  cpu     user + system time of the process and of all children it waited for, by the kernel's account
  peak    largest resident memory of a single process of the command, by the kernel's account (exact)
  disk    bytes that the kernel fetched from a disk for the process and its children, read-ahead included
  tree    largest sum of resident memory over the process and its children, sampled; shared pages count twice

Comparisons are interleaved: A B C, then again in another order, so that a slow minute of the machine hits all. A ratio
is taken round by round and told as min, median and max.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import json
import mmap
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

__all__ = [
    "CommandFailedError",
    "Contender",
    "Run",
    "Spread",
    "back_free_memory",
    "cached_share",
    "drop",
    "gives_pages_back",
    "interleave",
    "machine",
    "ratios",
    "run",
    "warm",
]

_LAUNCHER = pathlib.Path(__file__).with_name("launch.py")
_SAMPLE_SECONDS = 0.02
_FEWEST_ROUNDS = 3
_PAGE = os.sysconf("SC_PAGE_SIZE")


class CommandFailedError(Exception):
    """A measured command ended with an error."""

    def __init__(self, command: Sequence[str], code: int, output: str) -> None:
        self.command, self.code, self.output = command, code, output
        super().__init__(f"exit code {code} from {' '.join(command)}\n{output[-3000:]}")


@dataclass(frozen=True, slots=True)
class Run:
    """What one run used; seconds and bytes."""

    wall: float
    cpu: float
    peak: int
    tree: int
    stdout: str = dataclasses.field(repr=False, default="")
    from_disk: int = 0

    def as_json(self) -> dict[str, float]:
        """The numbers alone."""
        numbers = {"wall": round(self.wall, 4), "cpu": round(self.cpu, 4), "peak": self.peak, "tree": self.tree}
        return {**numbers, "from_disk": self.from_disk}


@dataclass(frozen=True, slots=True)
class Spread:
    """Smallest, middle and largest of some numbers."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, numbers: Iterable[float]) -> Spread:
        """Of at least one number."""
        ordered = sorted(numbers)
        return cls(ordered[0], statistics.median(ordered), ordered[-1])

    def as_json(self) -> dict[str, float]:
        """As an object with min, median and max."""
        return {"min": round(self.low, 4), "median": round(self.median, 4), "max": round(self.high, 4)}

    def text(self, digits: int = 2) -> str:
        """`min / median / max`."""
        return f"{self.low:.{digits}f} / {self.median:.{digits}f} / {self.high:.{digits}f}"


@dataclass(frozen=True, slots=True)
class Contender:
    """One way of doing the job: a command, and what has to be removed before it can run again."""

    name: str
    command: tuple[str, ...]
    prepare: Callable[[], None] = lambda: None


def run(command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None) -> Run:
    """Run `command` to its end; CommandFailedError with its output when it fails."""
    with tempfile.TemporaryDirectory(prefix="ms_measure_") as scratch:
        result = pathlib.Path(scratch, "result.json")
        out, err = pathlib.Path(scratch, "out"), pathlib.Path(scratch, "err")
        launcher = [sys.executable, "-I", "-S", str(_LAUNCHER), str(result), *command]
        with out.open("wb") as out_file, err.open("wb") as err_file:
            # The launcher's first line is the command's pid; what follows is the command's own output.
            process = subprocess.Popen(launcher, stdout=out_file, stderr=err_file, env=env, cwd=cwd)
            with _TreeSampler(process.pid) as sampler:
                code = process.wait()
        text = out.read_text(errors="replace").partition("\n")[2]
        if code:
            raise CommandFailedError(command, code, text + err.read_text(errors="replace"))
        used = json.loads(result.read_text())
    cpu, tree = used["user"] + used["system"], max(sampler.peak, used["peak"])
    return Run(used["wall"], cpu, used["peak"], tree, text, used["from_disk"])


class _TreeSampler:
    """Samples the sum of resident memory of all descendants of a launcher."""

    def __init__(self, launcher: int) -> None:
        self.peak = 0
        self._launcher = launcher
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self.peak = max(self.peak, sum(_resident(pid) for pid in _descendants(self._launcher)))


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    todo = [pid]
    while todo:
        parent = todo.pop()
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                children = pathlib.Path(f"/proc/{parent}/task/{thread}/children").read_text().split()
                todo += map(int, children)
                found += map(int, children)
    return found


def _resident(pid: int) -> int:
    try:
        return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


# ------------------------------------------------------------------------------------- page cache


def drop(paths: Iterable[pathlib.Path], *, whole_cache: bool = False) -> None:
    """Write back what is dirty and drop the cached pages of these files and folders.

    Other pages stay (a contender's own libraries are not part of the question); `whole_cache` drops them too,
    where the kernel lets us.
    """
    os.sync()
    for path in _files(paths):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    if whole_cache:
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("1")


def back_free_memory(nbytes: int) -> None:
    """Where free pages go back to the host of a virtual machine, take `nbytes` from it again and free them.

    Else filling the page cache costs a fault of the host for each page, charged to the process that fills it: a
    cost of the virtual machine and of how long ago somebody used that memory, not of the command.
    """
    if not gives_pages_back():
        return
    nbytes = min(nbytes, _meminfo("MemAvailable") // 2)
    with mmap.mmap(-1, nbytes) as area:
        area.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, nbytes, _PAGE):
            area[start] = 1


def warm(paths: Iterable[pathlib.Path]) -> None:
    """Read these files and folders into the page cache."""
    buffer = bytearray(4 << 20)
    for path in _files(paths):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def cached_share(paths: Iterable[pathlib.Path]) -> float:
    """The part of these files that is in the page cache, by mincore."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    total = cached = 0
    for path in _files(paths):
        size = path.stat().st_size
        if not size:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as mapped:
            pages = -(-size // _PAGE)
            vector = (ctypes.c_ubyte * pages)()
            place = ctypes.c_char.from_buffer(mapped)
            failed = libc.mincore(ctypes.addressof(place), size, ctypes.addressof(vector))
            del place
            if failed:
                return float("nan")
            total += pages
            cached += sum(v & 1 for v in bytes(vector))
    return cached / total if total else 0.0


def _files(paths: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    found: list[pathlib.Path] = []
    for path in paths:
        found += sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
    return found


# ------------------------------------------------------------------------------------ comparisons


def interleave(
    contenders: Sequence[Contender],
    *,
    rounds: int,
    inputs: Sequence[pathlib.Path],
    cold: bool,
    budget_seconds: float = float("inf"),
    memory_backed: int = 0,
    after: Callable[[Contender, Run], None] = lambda _c, _r: None,
    progress: Callable[[str], None] = lambda _t: None,
) -> dict[str, list[Run]]:
    """Run all contenders `rounds` times, in a new order each round; `cold` drops the inputs before each run.

    On a slow machine the rounds end early: from the third on, none begins after `budget_seconds`.
    `memory_backed` bytes of free memory are made real before each run (`back_free_memory`).
    """
    order = random.Random(1)
    runs: dict[str, list[Run]] = {c.name: [] for c in contenders}
    began = time.perf_counter()
    for number in range(rounds):
        if number >= _FEWEST_ROUNDS and time.perf_counter() - began > budget_seconds:
            break
        for contender in order.sample(list(contenders), len(contenders)):
            contender.prepare()
            if cold:
                drop(inputs)
            else:
                warm(inputs)
                os.sync()
            if memory_backed:
                back_free_memory(memory_backed)
            used = run(contender.command)
            runs[contender.name].append(used)
            after(contender, used)
            progress(
                f"{'cold' if cold else 'warm'} {number + 1}/{rounds} {contender.name:32s} wall {used.wall:6.2f} s  "
                f"cpu {used.cpu:6.2f} s  peak {used.peak / 1e6:7.0f} MB"
            )
    return runs


def ratios(one: Sequence[float], other: Sequence[float]) -> Spread:
    """`one` divided by `other`, round by round."""
    return Spread.of(a / b for a, b in zip(one, other, strict=True))


def machine(folder: pathlib.Path) -> dict[str, str | int]:
    """What the numbers were measured on."""
    cpu = next(
        (x.split(":")[1].strip() for x in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x),
        platform.processor(),
    )
    flags = pathlib.Path("/proc/cpuinfo").read_text()
    mount = ("", "", "")
    for line in pathlib.Path("/proc/mounts").read_text().splitlines():
        device, point, kind = line.split()[:3]
        if folder.resolve().is_relative_to(point) and len(point) >= len(mount[1]):
            mount = (device, point, kind)
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "virtual machine": "yes" if "hypervisor" in flags else "no",
        "free pages go back to the host": "yes" if gives_pages_back() else "no",
        "memory GB": round(_meminfo("MemTotal") / 1e9),
        "kernel": platform.release(),
        "file system": f"{mount[2]} on {mount[0]}",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def gives_pages_back() -> bool:
    """This is a virtual machine with free page reporting."""
    return (
        pathlib.Path("/sys/module/page_reporting").exists()
        and "hypervisor" in pathlib.Path("/proc/cpuinfo").read_text()
    )


def _meminfo(key: str) -> int:
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise KeyError(key)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: one command, several rounds."""
    parser = argparse.ArgumentParser(prog="python -m bench.measure", description="Measure a command.")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--drop", type=pathlib.Path, action="append", default=[], help="input to drop from the cache")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(arguments)
    runs = []
    for _ in range(given.rounds):
        if given.drop:
            drop(given.drop)
        try:
            runs.append(run(given.command))
        except CommandFailedError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    found = {key: Spread.of(r.as_json()[key] for r in runs) for key in ("wall", "cpu", "peak", "tree", "from_disk")}
    if given.json:
        print(json.dumps({key: spread.as_json() for key, spread in found.items()}))
    else:
        for key, spread in found.items():
            mega = key in ("peak", "tree", "from_disk")
            scaled = Spread(*(x / 1e6 for x in dataclasses.astuple(spread))) if mega else spread
            print(f"{key:9s} {scaled.text(1 if mega else 3)} {'MB' if mega else 's'}   (min / median / max)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
