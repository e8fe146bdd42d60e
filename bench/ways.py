"""The ways that `bench.compare` compares, as commands, and experiments made of them: runs, equal outputs, ratios."""

from __future__ import annotations

import os
import pathlib
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from bench import measure
from bench.measure import Contender, Run, Spread
from bench.outputs import Digests, differences, digests_of_torch_file, digests_of_weights
from merge_stream.benchmark.synthetic import Layout, Synthetic, make_checkpoint

__all__ = ["Bench", "Goal", "Outcome", "Size"]

_SCRIPTS = pathlib.Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Goal:
    """`metric` of one way divided by that of another must be at most `limit` (at the median); "": the metric itself."""

    title: str
    metric: str
    one: str
    other: str
    limit: float | None

    def measured(self, runs: Mapping[str, Sequence[Run]], imports: Mapping[str, int]) -> Spread:
        """The ratio, round by round."""
        if not self.other:
            return Spread.of(self._values(runs, imports, self.one))
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


@dataclass(frozen=True, slots=True)
class Size:
    """How large the checkpoints are, how often each way runs, whether warm too, and the limits of the main goals."""

    scale: float
    ranks: int
    rounds: int
    warm: bool
    limits: Mapping[str, float | None]


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
        if not _has_room(self._memory_source.parent, nbytes):
            self._memory_source = self.work / "cp_source_cached"  # in the page cache, as it was just written
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
        out, script = self.work / "out", _SCRIPTS / "baseline_in_memory.py"
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
    def checkpoint(
        self, shape: str, layout: Layout, ranks: int, scale: float = 1.0, *, name: str = ""
    ) -> Iterator[Synthetic]:
        """A synthetic checkpoint that is removed at the end."""
        folder = self.work / (name or f"{shape}-{layout}")
        self.say(f"making {folder.name}: {ranks} ranks, scale {scale:g}")
        try:
            yield make_checkpoint(folder, shape=shape, ranks=ranks, layout=layout, scale=scale)
        finally:
            self._remove_outputs()
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def elsewhere(self, parent: pathlib.Path) -> Iterator[None]:
        """The same with a work folder on another file system."""
        held = self.work, self._disk_source, self._memory_source
        with tempfile.TemporaryDirectory(prefix="ms_bench_", dir=parent) as folder:
            self.work = pathlib.Path(folder)
            self._disk_source, self._memory_source = self.work / "cp_source", self.work / "cp_source_too"
            try:
                yield
            finally:
                self.work, self._disk_source, self._memory_source = held

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

    def as_json(self, seconds: float) -> dict[str, object]:
        """What was measured since `outcomes` and `faults` were emptied."""
        return {
            "seconds": round(seconds),
            "imports": self.imports,
            "faults": self.faults,
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
                for outcome in self.outcomes
            ],
        }

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


def _has_room(folder: pathlib.Path, nbytes: int) -> bool:
    """A tmpfs of a container may have 64 MB, or be missing."""
    return folder.is_dir() and shutil.disk_usage(folder).free > nbytes
