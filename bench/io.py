"""Ways of reading sources (`--io`), on each file system there is: what `auto` takes has to be what is fastest.

    python -m bench.io            full, about 15 minutes: the tables in docs/performance.md, "Ways of reading"
    python -m bench.io --smoke    a minute, small: does every way still run, and are its bytes right?

File systems: that of the work folder (a disk), tmpfs where /dev/shm has room, and an overlay over the work folder where
one may be mounted (containers have their layers in such; needs root). Two questions for each, cold and warm:

    reading alone    all ways of `bench.read_ways`, also those that the product does not have
    a whole merge    --io pread beside --io mmap, fp32 to bf16 and keep; the output goes to the disk in all cases

Everything is interleaved and told as a ratio to pread, round by round. "From disk" is the kernel's account of what it
fetched for the process, read-ahead included: more than the checkpoint means that something was read twice.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from bench import measure
from bench.measure import Contender, Run, Spread
from bench.outputs import differences, digests_of_synthetic, digests_of_weights
from bench.read_ways import WAYS
from bench.tables import replace_between_markers
from merge_stream.benchmark.synthetic import Synthetic, make_checkpoint

__all__ = ["main"]

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_PAGE = _ROOT / "docs" / "performance.md"
_MEMORY = pathlib.Path("/dev/shm")  # noqa: S108 - the tmpfs that is measured
_RANKS = 8
_LOSES = 1.1
"""`auto` is wrong where another way needs less than 1 / this of its time, at the median."""


@dataclass(frozen=True, slots=True)
class Place:
    """A copy of the checkpoint on one file system."""

    name: str
    folder: pathlib.Path
    has_disk: bool


@dataclass(frozen=True, slots=True)
class Table:
    """One experiment's runs, by way."""

    title: str
    cold: bool
    runs: Mapping[str, Sequence[Run]]

    def faster_than_auto(self) -> list[str]:
        """Ways of the product that needed clearly less time than pread, which is what auto takes."""
        return [
            way
            for way in self.runs
            if way == "mmap"
            and measure.ratios([r.wall for r in self.runs["pread"]], [r.wall for r in self.runs[way]]).median > _LOSES
        ]

    def lines(self) -> Iterator[str]:
        """Markdown; the last column only where there is a disk to fetch from."""
        rounds = len(self.runs["pread"])
        yield f"### {self.title}, {'cold' if self.cold else 'warm'}"
        yield ""
        yield f"Smallest / median / largest of {rounds} round{'s' if rounds != 1 else ''}."
        yield ""
        yield "| way | wall, s | CPU, s | wall / pread | CPU / pread | peak memory, MB | from disk, MB |"
        yield "|---|---|---|---|---|---|---|"
        base = self.runs["pread"]
        for way, runs in self.runs.items():
            cells = [
                way,
                Spread.of(r.wall for r in runs).text(2),
                Spread.of(r.cpu for r in runs).text(2),
                measure.ratios([r.wall for r in runs], [r.wall for r in base]).text(2),
                measure.ratios([r.cpu for r in runs], [r.cpu for r in base]).text(2),
                f"{max(r.tree for r in runs) / 1e6:.0f}",
                f"{Spread.of(r.from_disk / 1e6 for r in runs).median:.0f}",
            ]
            yield "| " + " | ".join(cells) + " |"
        yield ""

    def as_json(self) -> dict[str, Any]:
        """All numbers."""
        return {
            "title": self.title,
            "cold": self.cold,
            "runs": {way: [r.as_json() for r in runs] for way, runs in self.runs.items()},
        }


class Bench:
    """The work folder, and what was measured."""

    def __init__(self, work: pathlib.Path, made: Synthetic, *, rounds: int) -> None:
        self.work, self.made, self.rounds = work, made, rounds
        self.tables: list[Table] = []
        self.faults: list[str] = []

    def reading_alone(self, place: Place, *, cold: bool) -> None:
        """Fresh processes that read everything and keep nothing."""
        command = (sys.executable, "-m", "bench.read_ways")
        ways = [Contender(way, (*command, way, str(place.folder))) for way in WAYS if self._runs(way, place)]
        self._measure(f"reading alone, {place.name}", ways, place, cold=cold)

    def merging(self, place: Place, dtype: str, *, cold: bool) -> None:
        """The whole tool; its outputs are compared with the expected values."""
        out = self.work / "out"
        ways = []
        for io in ("pread", "mmap"):
            words = ("merge", str(place.folder), str(out), "--dtype", dtype, "--io", io, "-q", "--max-mem", "2G")
            line = f"{shlex.quote(sys.executable)} -m merge_stream {shlex.join(words)} && sync {out}/*"
            ways.append(Contender(io, ("sh", "-c", line), lambda: shutil.rmtree(out, ignore_errors=True)))
        seen: dict[str, Any] = {"expected": digests_of_synthetic(self.made)} if dtype == "keep" else {}

        def compare(contender: Contender, _run: Run) -> None:
            if contender.name not in seen:
                seen[contender.name] = digests_of_weights(out)
                first = next(iter(seen))
                if wrong := differences(seen[first], seen[contender.name]):
                    self.faults.append(f"{place.name}, {dtype}: {contender.name} differs from {first}: {wrong[0]}")

        kind = "keep" if dtype == "keep" else f"fp32 to {dtype}"
        self._measure(f"{kind}, {place.name}", ways, place, cold=cold, after=compare)
        shutil.rmtree(out, ignore_errors=True)

    def _measure(
        self,
        title: str,
        ways: Sequence[Contender],
        place: Place,
        *,
        cold: bool,
        after: Callable[[Contender, Run], None] = lambda _c, _r: None,
    ) -> None:
        say(f"\n{title}, {'cold' if cold else 'warm'}")
        try:
            runs = measure.interleave(
                ways, rounds=self.rounds, inputs=[place.folder], cold=cold, after=after, progress=say
            )
        except measure.CommandFailedError as error:
            self.faults.append(f"{title}: {error}")
            return
        self.tables.append(Table(title, cold, runs))

    def _runs(self, way: str, place: Place) -> bool:
        """Whether the file system has this way at all."""
        tried = subprocess.run(
            [sys.executable, "-m", "bench.read_ways", way, str(place.folder)], capture_output=True, check=False
        )
        if tried.returncode:
            say(f"{place.name}: no {way}")
        return tried.returncode == 0


@contextmanager
def places(work: pathlib.Path, made: Synthetic) -> Iterator[list[Place]]:
    """The checkpoint on every file system there is; what was copied or mounted is gone at the end."""
    kind = str(measure.machine(work)["file system"]).split()[0]
    found = [Place(kind, made.folder, has_disk=True)]
    with ExitStack() as stack:
        if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 2 * made.nbytes:
            copy = pathlib.Path(tempfile.mkdtemp(prefix="ms_bench_", dir=_MEMORY))
            stack.callback(shutil.rmtree, copy)
            shutil.copytree(made.folder, copy, dirs_exist_ok=True)
            found.append(Place("tmpfs", copy, has_disk=False))
        else:
            say("no tmpfs: /dev/shm has no room")
        overlay = work / "overlay"
        for name in ("upper", "work", "mounted"):
            (overlay / name).mkdir(parents=True)
        where = f"lowerdir={made.folder},upperdir={overlay / 'upper'},workdir={overlay / 'work'}"
        mounted = overlay / "mounted"
        tried = subprocess.run(
            ["mount", "-t", "overlay", "overlay", "-o", where, str(mounted)],
            capture_output=True,
            text=True,
            check=False,
        )
        if tried.returncode == 0:
            stack.callback(subprocess.run, ["umount", str(mounted)], check=True)
            found.append(Place(f"overlay on {kind}", mounted, has_disk=True))
        else:
            say(f"no overlay: {tried.stderr.strip()}")
        yield found


def markdown(bench: Bench) -> str:
    """The section of the page."""
    lines = ["| machine | |", "|---|---|"]
    facts = {k: v for k, v in measure.machine(bench.work).items() if k != "file system"}
    made = bench.made
    facts["checkpoint"] = f"{made.nbytes / 1e9:.2f} GB fp32, {_RANKS} ranks"
    facts["outputs of both ways"] = "**see below**" if bench.faults else "equal, byte for byte"
    lines += [f"| {key} | {value} |" for key, value in facts.items()]
    lines += [""] + [f"**{fault.splitlines()[0]}**\n" for fault in bench.faults]
    for table in bench.tables:
        lines += table.lines()
    return "\n".join(lines).rstrip()


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 when outputs differ, a way fails, or (full size) mmap beats what auto takes."""
    parser = argparse.ArgumentParser(prog="python -m bench.io", description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small, and the page stays as it is")
    parser.add_argument("--scale", type=float, default=0.5, help="of the 3.6 GB checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=pathlib.Path, help="folder on the disk to be measured; default: build/")
    parser.add_argument("--json", type=pathlib.Path, help="write all numbers there")
    given = parser.parse_args(arguments)
    scale, rounds = (0.02, 1) if given.smoke else (given.scale, given.rounds)
    parent = given.work or _ROOT / "build"
    parent.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ms_io_", dir=parent) as folder:
        work = pathlib.Path(folder)
        made = make_checkpoint(work / "checkpoint", shape="llama-3.6gb", ranks=_RANKS, layout="fsdp2", scale=scale)
        bench = Bench(work, made, rounds=rounds)
        with places(work, made) as found:
            for place in found:
                for cold in (True, False) if place.has_disk else (False,):
                    bench.reading_alone(place, cold=cold)
                    bench.merging(place, "bf16", cold=cold)
                    bench.merging(place, "keep", cold=cold)
        text = markdown(bench)
    if given.json:
        given.json.write_text(json.dumps([t.as_json() for t in bench.tables], indent=1))
    for fault in bench.faults:
        say(f"fault: {fault}")
    losing = [] if given.smoke else [f"{t.title}: {w}" for t in bench.tables for w in t.faster_than_auto()]
    for line in losing:
        say(f"faster than what auto takes: {line}")
    if given.smoke:
        print(text)
    else:
        replace_between_markers(_PAGE, text, writer="bench.io")
    say(f"{time.perf_counter() - began:.0f} s")
    return 1 if bench.faults or losing else 0


if __name__ == "__main__":
    raise SystemExit(main())
