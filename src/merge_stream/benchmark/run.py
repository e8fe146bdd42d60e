"""Measure this machine: a merge of a synthetic checkpoint beside the floor of the disk, as ratios.

    floor   `cat` of every input, then `cp` of a file of the output's size, then sync of it: each byte read once and
            written once, one after the other
    merge   `merge-stream merge` in a fresh process, then sync of what it wrote

In each round both run, one after the other in changing order, the pages of the inputs dropped before each. Absolute
times belong to a disk; ratios of one run can be compared with those of another run, so a *baseline* holds ratios.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import shlex
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from merge_stream.benchmark.children import measured, python
from merge_stream.benchmark.shapes import model_of
from merge_stream.containers.safetensors_file import read_header
from merge_stream.errors import DiskSpaceError, UsageError, VerificationError
from merge_stream.storage.local import LocalTree
from merge_stream.storage.mounts import mount_of
from merge_stream.units import format_bytes, parse_memory

__all__ = ["Bench", "Measured", "measure", "require_possible"]

_BLOCK = 4 << 20
_RECORD = 8 << 10
"""Bytes of a tensor in a rank's file besides its values; 4.5 kB were seen."""
_SHORTEST = 0.5
"""Seconds of the floor; below, what is measured is the start of the program."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What is measured: a shape of `benchmark.shapes`, its size times `scale`, written by `ranks` ranks."""

    shape: str = "llama-1b"
    ranks: int = 8
    layout: str = "fsdp2"
    scale: float = 1.0
    dtype: str = "bf16"
    max_mem: str = "2G"
    rounds: int = 3


@dataclass(slots=True)
class Measured:
    """Ratios of a run, the medians of its rounds; seconds and bytes beside them.

    wall    seconds of a merge / seconds of the floor
    cpu     CPU seconds of a merge for each GB that it reads
    memory  largest resident memory of a merge, bytes, by its report
    """

    bench: Bench
    nbytes: int = 0
    merge_seconds: list[float] = field(default_factory=list)
    floor_seconds: list[float] = field(default_factory=list)
    merge_cpu: list[float] = field(default_factory=list)
    memory: int = 0
    disk: str = ""

    @property
    def wall_ratio(self) -> float:
        """Taken round by round."""
        return statistics.median(m / f for m, f in zip(self.merge_seconds, self.floor_seconds, strict=True))

    @property
    def cpu_per_gb(self) -> float:
        """Of the smallest run: another process on the machine can only add to it."""
        return min(self.merge_cpu) / (self.nbytes / 1e9)

    def as_json(self) -> dict[str, Any]:
        """The numbers that a baseline holds, and those they come from."""
        return {
            "bench": asdict(self.bench),
            "ratios": {"wall / floor": round(self.wall_ratio, 4), "CPU s / GB": round(self.cpu_per_gb, 4)},
            "memory": self.memory,
            "input bytes": self.nbytes,
            "merge seconds": [round(s, 3) for s in self.merge_seconds],
            "floor seconds": [round(s, 3) for s in self.floor_seconds],
            "file system": self.disk,
            "notes": self.notes(),
        }

    def notes(self) -> list[str]:
        """Why the ratios may not say what they seem to."""
        notes = []
        if statistics.median(self.floor_seconds) < _SHORTEST:
            notes.append("the floor is too short for its ratio to mean much: take a larger --shape or --scale")
        if self.disk in {"tmpfs", "ramfs"}:
            notes.append(
                f"the work folder is on {self.disk}, so this measures memory and no disk: choose one with --work"
            )
        return notes

    def lines(self) -> list[str]:
        """For a person."""
        bench = self.bench
        size = format_bytes(self.nbytes)
        return [
            f"{bench.shape} x {bench.scale:g}, {bench.ranks} ranks, {bench.layout}, {size}",
            f"  written as  {bench.dtype} under --max-mem {bench.max_mem}",
            f"  merge       {_spread(self.merge_seconds)} s",
            f"  floor       {_spread(self.floor_seconds)} s (cat of the input + cp of the output)",
            f"  wall/floor  {self.wall_ratio:.2f}",
            f"  CPU         {self.cpu_per_gb:.2f} s for each GB read",
            f"  memory      {format_bytes(self.memory)} at most",
            *(f"  note: {note}" for note in self.notes()),
        ]


def require_possible(bench: Bench, folder: pathlib.Path) -> None:
    """Before anything is written: UsageError for options that no run can have, DiskSpaceError where it has no room."""
    parse_memory(bench.max_mem, total=1 << 40)
    if bench.layout in {"hsdp", "tp"} and bench.ranks % 2:
        msg = f"--sharding {bench.layout} needs an even number of ranks, not {bench.ranks}"
        raise UsageError(msg, hint=f"give --ranks {bench.ranks + 1}")
    model = model_of(bench.shape, scale=bench.scale, itemsize=4)
    target = model.elements * (2 if bench.dtype in {"bf16", "fp16"} else 4)
    written = sum(map(math.prod, model.parameters.values())) if bench.layout == "dcp" else model.elements  # ties twice
    source = 4 * written * (2 if bench.layout == "hsdp" else 1) + len(model.parameters) * bench.ranks * _RECORD
    free, needed = shutil.disk_usage(folder).free, source + 2 * target
    if needed > free:
        msg = (
            f"{folder} has {format_bytes(free)} free, the bench needs {format_bytes(needed)} (a checkpoint of "
            f"{format_bytes(source)}, the model that is made of it, and the file that the floor copies)"
        )
        raise DiskSpaceError(msg, hint="choose another disk with --work DIR, a smaller --shape, or a --scale below 1")


def measure(bench: Bench, folder: pathlib.Path, tell: Callable[[str], None]) -> Measured:
    """Make the checkpoint in the empty `folder`, merge it `rounds` times beside the floor, and check the first result.

    ChildFailedError when a command fails, VerificationError when a value is wrong. It writes below `folder` alone.
    """
    tell("making the checkpoint")
    source, out, block = folder / "ckpt", folder / "out", folder / "block"
    words = ("--shape", bench.shape, "--ranks", str(bench.ranks), "--layout", bench.layout, "--scale", str(bench.scale))
    measured(python("merge_stream.benchmark.synthetic", str(source), *words))
    inputs = sorted(f for f in source.rglob("*") if f.is_file())
    found = Measured(bench, sum(f.stat().st_size for f in inputs), disk=mount_of(str(folder)).type)
    options = ("--dtype", bench.dtype, "--max-mem", bench.max_mem, "--json", "-q")
    merge = shlex.join(python("merge_stream", "merge", str(source), str(out), *options))
    names = shlex.join(str(f) for f in inputs)
    ways: dict[str, str] = {
        "merge": f"{merge} && sync {shlex.quote(str(out))}/*",
        "floor": f"cat {names} > /dev/null && cp {shlex.quote(str(block))} {shlex.quote(str(out))} && sync "
        f"{shlex.quote(str(out))}",
    }
    _clear(out)
    measured(ways["merge"])  # once before: the size of the output, and a check of the values
    _check(bench, out)
    _fill(block, sum(f.stat().st_size for f in out.iterdir()))
    for number in range(bench.rounds):
        for name in sorted(ways, reverse=bool(number % 2)):
            _clear(out)
            _drop(inputs)
            used = measured(ways[name])
            tell(f"round {number + 1}/{bench.rounds}, {name}: {used.wall:.2f} s, CPU {used.cpu:.2f} s")
            (found.merge_seconds if name == "merge" else found.floor_seconds).append(used.wall)
            if name == "merge":
                found.merge_cpu.append(used.cpu)
                found.memory = max(found.memory, json.loads(used.told)["memory"]["peak"])
    return found


# ------------------------------------------------------------------------------------------ parts


def _clear(out: pathlib.Path) -> None:
    if out.is_dir():
        for file in out.iterdir():
            file.unlink()
        out.rmdir()
    out.unlink(missing_ok=True)


def _drop(files: Sequence[pathlib.Path]) -> None:
    """Write back what is dirty, and drop the cached pages of the files."""
    os.sync()
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _fill(block: pathlib.Path, nbytes: int) -> None:
    with block.open("wb") as file:
        for start in range(0, nbytes, _BLOCK):
            file.write(os.urandom(min(_BLOCK, nbytes - start)))


def _check(bench: Bench, out: pathlib.Path) -> None:
    """Each value of the model against the numbers that the checkpoint was made of."""
    import ml_dtypes
    import numpy as np

    from merge_stream.benchmark.values import Values

    values = Values("float32")
    model = model_of(bench.shape, scale=bench.scale, itemsize=values.itemsize)
    kind = np.dtype({"bf16": ml_dtypes.bfloat16, "fp16": np.float16}.get(bench.dtype, np.float32))
    tree = LocalTree.of([str(out)])
    seen = set()
    for name in sorted(n for n in tree.files if n.endswith(".safetensors")):
        for parameter, tensor in read_header(tree, name).tensors.items():
            seen.add(parameter)
            shape = model.parameters[parameter]
            rows = max(_BLOCK // max(math.prod(shape[1:]) * 4, 1), 1)
            for low in range(0, shape[0], rows):
                high = min(low + rows, shape[0])
                start, stop = [low, *(0 for _ in shape[1:])], [high, *shape[1:]]
                wanted = values.box(parameter, shape, start, stop).view(np.float32).astype(kind)
                at = tensor.offset + low * math.prod(shape[1:]) * kind.itemsize
                got = tree.read(name, at, wanted.nbytes)
                if got != wanted.tobytes():
                    msg = f"{name}: rows {low} to {high} of {parameter} are wrong"
                    raise VerificationError(msg, hint="please report this: the merge wrote other values than it read")
    lost = set(model.parameters) - seen - set(model.tied)
    if lost:
        msg = f"{len(lost)} parameters were not written, the first is {min(lost)}"
        raise VerificationError(msg, hint="please report this")


def _spread(seconds: Sequence[float]) -> str:
    return f"{min(seconds):.2f} / {statistics.median(seconds):.2f} / {max(seconds):.2f}"
