"""merge-stream beside the floor of the disk, the usual way and torch's consolidation, on one checkpoint and one disk.

All ways are commands in fresh processes, interleaved in random order, cold (input pages dropped) and warm apart.
Every way ends with `sync` of what it wrote, so that nobody is faster by leaving work to the kernel.

    merge-stream         merge CKPT OUT --max-mem 2G, journal and checksums on, --verify off
    floor                cat of all inputs to /dev/null, then cp of a file of the output's size from memory
                         (tmpfs) to the disk, then sync: every byte in once, every byte out once, one after the other
    floor, source cold   the same, but cp reads its source from the disk too, as `cp` of a real output would
    cp -r                copy of the checkpoint itself: the floor of a merge that keeps the dtype
    in memory            torch.load of all ranks, cat, save_file (bench/baseline_in_memory.py)
    torch DCP            dcp_to_torch_save of a DCP folder

    python -m bench.compare            full, at most 15 minutes: results.json and the table in docs/performance.md
    python -m bench.compare --smoke    a minute, small, generous limits; exit code 1 when a limit is missed

Goals are for cold runs: with everything in memory there is no reading to overlap with writing.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from bench import measure
from bench.measure import Contender, Run, Spread
from bench.outputs import (
    Digests,
    differences,
    digests_of_synthetic,
    digests_of_torch_file,
    digests_of_weights,
)
from bench.tables import markdown, replace_between_markers
from merge_stream.benchmark.synthetic import Layout, Synthetic, make_checkpoint

__all__ = ["Goal", "Outcome", "main"]

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_PAGE = _ROOT / "docs" / "performance.md"
_RESULTS = _ROOT / "bench" / "results.json"


@dataclass(frozen=True, slots=True)
class Goal:
    """`metric` of one way divided by that of another must be at most `limit` (at the median)."""

    title: str
    metric: str
    one: str
    other: str
    limit: float | None

    def measured(self, runs: Mapping[str, Sequence[Run]], imports: Mapping[str, int]) -> Spread:
        """The ratio, round by round."""
        return measure.ratios(self._values(runs, imports, self.one), self._values(runs, imports, self.other))

    def _values(self, runs: Mapping[str, Sequence[Run]], imports: Mapping[str, int], way: str) -> list[float]:
        if self.metric == "memory":
            return [max(r.tree - imports[way.partition(",")[0]], _PAGE_BYTES) for r in runs[way]]
        return [getattr(r, self.metric) for r in runs[way]]


_PAGE_BYTES = 4096
_SECONDS_FOR_EACH = 75  # experiments; nine of them and the making of their checkpoints fit in 15 minutes


@dataclass(slots=True)
class Outcome:
    """One experiment: what ran, on what, and how the ratios came out."""

    title: str
    about: str
    cold: bool
    runs: dict[str, list[Run]]
    goals: list[tuple[Goal, Spread]] = field(default_factory=list)

    def missed(self) -> list[Goal]:
        """Goals whose median ratio is above the limit."""
        return [goal for goal, ratio in self.goals if goal.limit is not None and ratio.median > goal.limit]


class Bench:
    """The work folder of a run, and the commands of all ways in it."""

    def __init__(self, work: pathlib.Path, *, quiet: bool) -> None:
        self.work = work
        self.outcomes: list[Outcome] = []
        self.faults: list[str] = []
        self._quiet = quiet
        self._memory_source = pathlib.Path("/dev/shm", f"ms_bench_{os.getpid()}")  # noqa: S108
        self._disk_source = work / "cp_source"
        self._digests: dict[str, Digests] = {}
        self.imports = {
            "merge-stream": self._peak_of_imports(
                "numpy, ml_dtypes, xxhash, psutil, merge_stream.api, merge_stream.cli"
            ),
            "in memory": self._peak_of_imports("torch, safetensors.torch, torch.distributed.tensor"),
            "torch DCP": self._peak_of_imports("torch, torch.distributed.checkpoint.format_utils"),
        }

    # ---------------------------------------------------------------- ways

    def merge_stream(self, made: Synthetic, dtype: str, *more: str, name: str = "merge-stream") -> Contender:
        """The tool, as a user types it."""
        out = self.work / "out"
        options = " ".join(shlex.quote(o) for o in ("--dtype", dtype, "-q", *(more or ("--max-mem", "2G"))))
        tool = f"{shlex.quote(sys.executable)} -m merge_stream merge {made.folder} {out} {options}"
        return self._contender(name, f"{tool} >/dev/null && sync {out}/*")

    def floors(self, made: Synthetic, nbytes: int) -> list[Contender]:
        """Read all, then write as much as the output has: from memory, and from the disk."""
        inputs = " ".join(str(f) for f in sorted(made.folder.iterdir()) if f.is_file())
        out = self.work / "out.bin"
        self._make_sources(nbytes)
        return [
            self._contender(name, f"cat {inputs} >/dev/null && cp {source} {out} && sync {out}", drop=dropped)
            for name, source, dropped in (
                ("floor", self._memory_source, ()),
                ("floor, source cold", self._disk_source, (self._disk_source,)),
            )
        ]

    def copy(self, made: Synthetic) -> Contender:
        """`cp -r` of the checkpoint."""
        out = self.work / "out"
        return self._contender("cp -r", f"cp -r {made.folder} {out} && find {out} -type f -exec sync {{}} +")

    def in_memory(self, made: Synthetic, dtype: str) -> Contender:
        """The usual way."""
        out, script = self.work / "out", _ROOT / "bench" / "baseline_in_memory.py"
        tool = f"{shlex.quote(sys.executable)} {script} {made.folder} {out} --dtype {dtype}"
        return self._contender("in memory", f"{tool} && sync {out}/*")

    def torch_dcp(self, made: Synthetic) -> Contender:
        """What torch ships."""
        out = self.work / "out.pt"
        code = "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as f\n"
        code += f"f({str(made.folder)!r}, {str(out)!r})"
        return self._contender("torch DCP", f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} && sync {out}")

    def _contender(self, name: str, line: str, *, drop: Sequence[pathlib.Path] = ()) -> Contender:
        def prepare() -> None:
            self._remove_outputs()
            if drop:
                measure.drop(drop)

        return Contender(name, ("sh", "-c", line), prepare)

    # --------------------------------------------------------- experiments

    @contextmanager
    def checkpoint(self, shape: str, layout: Layout, ranks: int, scale: float = 1.0) -> Iterator[Synthetic]:
        """A synthetic checkpoint that is removed at the end."""
        folder = self.work / f"{shape}-{layout}"
        self.say(f"making {folder.name}: {ranks} ranks, scale {scale:g}")
        try:
            yield make_checkpoint(folder, shape=shape, ranks=ranks, layout=layout, scale=scale)
        finally:
            self._remove_outputs()
            shutil.rmtree(folder, ignore_errors=True)

    def run(
        self,
        title: str,
        about: str,
        ways: Sequence[Contender],
        goals: Sequence[Goal],
        *,
        inputs: Sequence[Synthetic],
        rounds: int,
        cold: bool = True,
        memory_backed: int = 0,
        expected: Digests | None = None,
    ) -> None:
        """Run the ways, compare what they wrote with each other (and with `expected`), take the ratios."""
        self.say(f"\n{title}: {about}, {'cold' if cold else 'warm'}")
        seen: dict[str, Digests] = {"expected": expected} if expected else {}

        def compare_outputs(contender: Contender, _run: Run) -> None:
            if contender.name in seen or contender.name.startswith(("floor", "cp")):
                return
            seen[contender.name] = self._output_digests()
            first = next(iter(seen))
            wrong = differences(seen[first], seen[contender.name])
            if wrong:
                self.faults.append(f"{title}: {contender.name} differs from {first} in {len(wrong)} ({wrong[0]})")

        try:
            runs = measure.interleave(
                ways,
                rounds=rounds,
                inputs=[made.folder for made in inputs],
                cold=cold,
                budget_seconds=_SECONDS_FOR_EACH,
                memory_backed=memory_backed,
                after=compare_outputs,
                progress=self.say,
            )
        except measure.CommandFailedError as error:
            self.faults.append(f"{title}: {error}")
            return
        outcome = Outcome(title, about, cold, runs)
        outcome.goals = [(goal, goal.measured(runs, self.imports)) for goal in goals]
        self.outcomes.append(outcome)
        for goal, ratio in outcome.goals:
            self.say(f"  {goal.title}: {ratio.text(3)}" + (f"  (goal {goal.limit:.3f})" if goal.limit else ""))

    def say(self, text: str) -> None:
        """Progress, on stderr."""
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove everything."""
        self._memory_source.unlink(missing_ok=True)

    def _peak_of_imports(self, modules: str) -> int:
        line = f"{shlex.quote(sys.executable)} -c 'import {modules}' && true"  # below a shell, as all ways are
        return max(measure.run(("sh", "-c", line)).tree for _ in range(3))

    def _make_sources(self, nbytes: int) -> None:
        if self._disk_source.exists() and self._disk_source.stat().st_size == nbytes:
            return
        block = os.urandom(1 << 20)
        for source in (self._disk_source, self._memory_source):
            with source.open("wb") as file:
                for start in range(0, nbytes, len(block)):
                    file.write(block[: nbytes - start])

    def _remove_outputs(self) -> None:
        for path in self.work.glob("out*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _output_digests(self) -> Digests:
        single = self.work / "out.pt"
        return digests_of_torch_file(single) if single.exists() else digests_of_weights(self.work / "out")


def main_experiments(
    bench: Bench, *, scale: float, ranks: int, rounds: int, warm: bool, limits: Mapping[str, float | None]
) -> None:
    """The goals: a cast against floor and usual way, a copy against `cp -r`, DCP against torch's own consolidation."""
    with bench.checkpoint("llama-3.6gb", "fsdp2", ranks, scale) as made:
        about = f"{made.nbytes / 1e9:.2f} GB fp32, {ranks} ranks, Shard(0)"
        ours, usual = bench.merge_stream(made, "bf16"), bench.in_memory(made, "bf16")
        floor, floor_from_disk = bench.floors(made, made.model.elements * 2)
        goals = [
            Goal("wall / floor", "wall", "merge-stream", "floor", limits["cast"]),
            Goal("wall / floor, source cold", "wall", "merge-stream", "floor, source cold", None),
            Goal("wall / in memory", "wall", "merge-stream", "in memory", limits["usual"]),
            Goal("CPU / in memory", "cpu", "merge-stream", "in memory", limits["cpu"]),
            Goal("memory above import / in memory", "memory", "merge-stream", "in memory", limits["memory"]),
        ]
        ways = [ours, floor, floor_from_disk, usual]
        bench.run("fp32 to bf16", about, ways, goals, inputs=[made], rounds=rounds)
        if warm and measure.gives_pages_back():
            title = "fp32 to bf16, free memory taken from the host before each run"
            bench.run(
                title,
                about,
                [ours, floor],
                [replace(goals[0], limit=None)],
                inputs=[made],
                rounds=3,
                memory_backed=2 * made.nbytes,
            )
        if warm:
            ways = [ours, floor, usual]
            goals = [replace(goal, limit=None) for goal in goals if goal.other != floor_from_disk.name]
            bench.run("fp32 to bf16", about, ways, goals, inputs=[made], rounds=rounds, cold=False)
        ways = [bench.merge_stream(made, "keep"), bench.copy(made)]
        goals = [Goal("wall / cp -r", "wall", "merge-stream", "cp -r", limits["keep"])]
        expected = digests_of_synthetic(made)
        bench.run("keep", about, ways, goals, inputs=[made], rounds=rounds, expected=expected)
        if warm:
            goals = [replace(goal, limit=None) for goal in goals]
            bench.run("keep", about, ways, goals, inputs=[made], rounds=rounds, cold=False, expected=expected)
    with bench.checkpoint("llama-3.6gb", "dcp", ranks, scale) as made:
        about = f"{made.nbytes / 1e9:.2f} GB fp32, {ranks} ranks, DCP"
        ways = [bench.merge_stream(made, "keep"), bench.torch_dcp(made)]
        goals = [
            Goal("wall / torch DCP", "wall", "merge-stream", "torch DCP", limits["usual"]),
            Goal("CPU / torch DCP", "cpu", "merge-stream", "torch DCP", limits["cpu"]),
            Goal("memory above import / torch DCP", "memory", "merge-stream", "torch DCP", limits["memory"]),
        ]
        bench.run("DCP, keep", about, ways, goals, inputs=[made], rounds=max(2, rounds - 2), expected=expected)


def more_experiments(bench: Bench, *, ranks: int, rounds: int) -> None:
    """How speed depends on the memory bound, the layout and the number of tensors."""
    with (
        bench.checkpoint("llama-3.6gb", "fsdp2", ranks) as rows,
        bench.checkpoint("llama-3.6gb", "shard1", ranks) as columns,
        bench.checkpoint("llama-3.6gb", "tp", ranks) as grid,
    ):
        about = f"{rows.nbytes / 1e9:.2f} GB fp32 to bf16, {ranks} ranks"
        small, large = ("--max-mem", "512M"), ("--max-mem", "16G")
        ways = [
            bench.merge_stream(rows, "bf16", *small, name="merge-stream, 512M"),
            bench.merge_stream(rows, "bf16", *large, name="merge-stream, 16G"),
        ]
        goals = [Goal("wall, 512M / 16G", "wall", ways[0].name, ways[1].name, 1 / 0.9)]
        bench.run("memory bound", about, ways, goals, inputs=[rows], rounds=rounds)
        ways = [
            bench.merge_stream(made, "bf16", name=f"merge-stream, {name}")
            for made, name in ((rows, "Shard(0)"), (columns, "Shard(1)"), (grid, "fsdp x tp"))
        ]
        goals = [
            Goal("wall, Shard(1) / Shard(0)", "wall", ways[1].name, ways[0].name, 1.3),
            Goal("wall, fsdp x tp / Shard(0)", "wall", ways[2].name, ways[0].name, 1.3),
        ]
        bench.run("layouts", about, ways, goals, inputs=[rows, columns, grid], rounds=rounds)
    with bench.checkpoint("many-small", "fsdp2", ranks) as made:
        about = f"20000 tensors of 1 KB, {ranks} ranks"
        ways = [bench.merge_stream(made, "keep"), bench.in_memory(made, "keep")]
        goals = [Goal("wall / in memory", "wall", "merge-stream", "in memory", None)]
        bench.run("many small tensors", about, ways, goals, inputs=[made], rounds=rounds)
    with bench.checkpoint("moe", "fsdp2", ranks) as made:
        about = f"{made.nbytes / 1e9:.2f} GB fp32 to bf16, {len(made.model.parameters)} tensors, {ranks} ranks"
        ways = [bench.merge_stream(made, "bf16"), bench.floors(made, made.model.elements * 2)[0]]
        goals = [Goal("wall / floor", "wall", "merge-stream", "floor", None)]
        bench.run("experts under their own names", about, ways, goals, inputs=[made], rounds=rounds)


FULL: dict[str, float | None] = {"cast": 0.85, "keep": 1.05, "usual": None, "cpu": 1 / 3, "memory": 1 / 50}
# On a small checkpoint the start of the interpreter weighs more than the data, and CI machines are busy:
# the limits against `cat` and `cp` only find a disaster, those against the usual way find a regression.
SMOKE: dict[str, float | None] = {"cast": 10.0, "keep": 10.0, "usual": 0.7, "cpu": 0.5, "memory": 1 / 8}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small, with generous limits; writes no page")
    parser.add_argument("--rounds", type=int, help="default: 5, with --smoke 2")
    parser.add_argument("--work", type=pathlib.Path, help="folder on the disk to measure; default: a temporary one")
    parser.add_argument("--json", type=pathlib.Path, help="where to write all numbers", default=None)
    parser.add_argument("--no-page", action="store_true", help="leave docs/performance.md alone")
    parser.add_argument("-q", "--quiet", action="store_true")
    given = parser.parse_args(arguments)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ms_bench_", dir=given.work) as folder:
        bench = Bench(pathlib.Path(folder), quiet=given.quiet)
        try:
            if given.smoke:
                main_experiments(bench, scale=0.06, ranks=4, rounds=given.rounds or 2, warm=False, limits=SMOKE)
            else:
                main_experiments(bench, scale=1, ranks=8, rounds=given.rounds or 5, warm=True, limits=FULL)
                more_experiments(bench, ranks=8, rounds=given.rounds or 5)
        finally:
            bench.close()
        facts = measure.machine(pathlib.Path(folder))
    result = _result(bench, facts, time.perf_counter() - began)
    table = markdown(result)
    print(table)
    target = given.json or (None if given.smoke else _RESULTS)
    if target:
        target.write_text(json.dumps(result, indent=1) + "\n")
    if not given.smoke and not given.no_page:
        replace_between_markers(_PAGE, table)
    missed = [f"{o.title}: {goal.title} above {goal.limit:.3f}" for o in bench.outcomes for goal in o.missed()]
    for line in [*bench.faults, *missed]:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if bench.faults or (given.smoke and missed) else 0


def _result(bench: Bench, facts: Mapping[str, object], seconds: float) -> dict[str, object]:
    return {
        "machine": dict(facts),
        "seconds": round(seconds),
        "imports": bench.imports,
        "faults": bench.faults,
        "experiments": [
            {
                "title": outcome.title,
                "about": outcome.about,
                "cache": "cold" if outcome.cold else "warm",
                "runs": {name: [r.as_json() for r in runs] for name, runs in outcome.runs.items()},
                "ratios": [
                    {"title": goal.title, "goal": goal.limit, **ratio.as_json()} for goal, ratio in outcome.goals
                ],
            }
            for outcome in bench.outcomes
        ],
    }


if __name__ == "__main__":
    raise SystemExit(main())
