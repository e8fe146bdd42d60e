"""A merge in a container much smaller than the checkpoint, beside the same merge without a limit.

    python -m bench.container [--gigabytes 4] [--times 8] [--rounds 3] [--folder DIR]

A checkpoint of real random numbers (fp32, written as bf16) is merged with a cold page cache, in
turn in a memory cgroup of an N-th of its size and outside of it. Told are wall and CPU seconds, how
often something was killed for memory, the highest charge of the group, and how the memory of the
process went over the run (anonymous and shared, in the first and in the last third).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

from merge_stream.testing.cgroup import memory_cgroup

__all__ = ["Run", "drop_cache", "merge_once", "thirds", "write_model"]

_EVERY_SECONDS = 0.02
_ROWS = 4096
_BEGUN = 1000
"""Bytes of a journal with a dozen ranges."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One merge: its seconds, its exit code, what the group counted, and samples of the process's memory."""

    code: int
    wall: float
    cpu: float
    oom_kills: int
    group_peak: int
    samples: list[int]
    stderr: str = ""
    report: dict[str, object] = dataclasses.field(default_factory=dict)


def write_model(folder: pathlib.Path, nbytes: int) -> pathlib.Path:
    """A safetensors model of fp32 matrices of 64 MiB, with random values."""
    folder.mkdir(parents=True)
    count = max(nbytes // (_ROWS * _ROWS * 4), 1)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    size = _ROWS * _ROWS * 4
    for k in range(count):
        name = f"model.layers.{k}.mlp.up_proj.weight"
        header[name] = {"dtype": "F32", "shape": [_ROWS, _ROWS], "data_offsets": [k * size, (k + 1) * size]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    values = np.random.default_rng(7)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(count):
            file.write(values.standard_normal(_ROWS * _ROWS, dtype=np.float32).tobytes())
        file.flush()
        os.fsync(file.fileno())
    return folder


def drop_cache(folder: pathlib.Path) -> None:
    """Let no page of these files be cached."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def merge_once(source: pathlib.Path, out: pathlib.Path, *, limit: int | None, more: tuple[str, ...] = ()) -> Run:
    """Merge in a fresh process, in a group of `limit` bytes (None: where this process is)."""
    words = [sys.executable, "-m", "merge_stream", "merge", str(source), str(out), "--dtype", "bf16"]
    words += ["--no-config", "--layout", "as-is", "--json", *more]
    journal = out.with_name(f"{out.name}.partial") / "journal"
    if limit is None:
        return _watched(words, journal)
    with memory_cgroup(limit) as group:
        run = _watched(group.command(words), journal)
    return dataclasses.replace(run, oom_kills=group.oom_kills, group_peak=group.peak)


def thirds(samples: list[int]) -> tuple[float, float]:
    """Mean of the first and of the last third of the samples."""
    cut = max(len(samples) // 3, 1)
    return statistics.fmean(samples[:cut]), statistics.fmean(samples[-cut:])


def _watched(words: list[str], journal: pathlib.Path) -> Run:
    """Run and sample, from the moment on in which the merge itself begins and has filled its slabs once."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        began = time.monotonic()
        child = subprocess.Popen(words, stdout=out, stderr=err)
        samples: list[int] = []
        while True:
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
            if pid:
                break
            if journal.exists() and journal.stat().st_size > _BEGUN:
                samples.append(_resident(child.pid))
            time.sleep(_EVERY_SECONDS)
        child.returncode = os.waitstatus_to_exitcode(status)
        wall = time.monotonic() - began
        out.seek(0)
        err.seek(0)
        told = out.read()
        report = json.loads(told) if told else {}
        cpu = usage.ru_utime + usage.ru_stime
        return Run(child.returncode, wall, cpu, 0, 0, samples, err.read(), report)


def _resident(pid: int) -> int:
    """Anonymous and shared memory of a process: what no kernel can give up."""
    total = 0
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith(("RssAnon:", "RssShmem:")):
                    total += int(line.split()[1]) * 1024
    except OSError:
        pass
    return total


def main() -> int:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--times", type=int, default=8, help="checkpoint size divided by the container's limit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    given = parser.parse_args()
    work = pathlib.Path(tempfile.mkdtemp(prefix="ms_container_", dir=given.folder))
    try:
        source = write_model(work / "model", int(given.gigabytes * 1e9))
        nbytes = (source / "model.safetensors").stat().st_size
        limit = nbytes // given.times
        print(f"checkpoint {nbytes / 1e9:.2f} GB, container {limit / 1e6:.0f} MB, cold, fp32 to bf16")
        print(
            "| round | limit | wall, s | CPU, s | killed | group's peak, MB | memory first third, MB | last third, MB |"
        )
        print("|---|---|---|---|---|---|---|---|")
        walls: dict[bool, list[float]] = {True: [], False: []}
        cpus: dict[bool, list[float]] = {True: [], False: []}
        for k in range(given.rounds):
            for limited in (True, False) if k % 2 else (False, True):
                drop_cache(source)
                run = merge_once(source, work / "out", limit=limit if limited else None)
                shutil.rmtree(work / "out", ignore_errors=True)
                if run.code:
                    print(run.stderr, file=sys.stderr)
                    return 1
                walls[limited].append(run.wall)
                cpus[limited].append(run.cpu)
                first, last = (n / 1e6 for n in thirds(run.samples))
                words = f"{limit / 1e6:.0f} MB" if limited else "none"
                peak = f"{run.group_peak / 1e6:.0f}" if limited else ""
                killed = f"{run.oom_kills}" if limited else ""
                print(
                    f"| {k} | {words} | {run.wall:.2f} | {run.cpu:.2f} | {killed} | {peak} | {first:.1f} | {last:.1f} |"
                )
        pairs = list(zip(walls[True], walls[False], strict=True))
        print(f"\nwall, with / without limit: {statistics.median(a / b for a, b in pairs):.2f} (median of the rounds)")
        print(f"CPU, with / without limit: {statistics.median(cpus[True]) / statistics.median(cpus[False]):.2f}")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
