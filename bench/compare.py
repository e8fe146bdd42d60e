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

    python -m bench.compare                   full, at most 15 minutes: results.json and the tables in the page
    python -m bench.compare --only layouts    one group again (may be repeated); the others stay in results.json
    python -m bench.compare --smoke           a minute, small, generous limits; exit code 1 when one is missed

What a group measured is written to bench/results.json when it ends, so an interrupted run goes on with --only. The page
is written when all groups are there, of this machine.

Goals are for cold runs: with everything in memory there is no reading to overlap with writing.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from bench import measure
from bench.outputs import digests_of_synthetic
from bench.results import Results
from bench.tables import markdown, replace_between_markers
from bench.ways import Bench, Goal, Size

__all__ = ["GROUPS", "main"]

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_PAGE = _ROOT / "docs" / "performance.md"
_MEMORY = pathlib.Path("/dev/shm")  # noqa: S108 - the tmpfs that is measured
_RESULTS = _ROOT / "bench" / "results.json"


def rank_files(bench: Bench, size: Size) -> None:
    """A cast against floor and usual way, a copy against `cp -r`."""
    limits, rounds = size.limits, size.rounds
    with bench.checkpoint("llama-3.6gb", "fsdp2", size.ranks, size.scale) as made:
        about = f"{made.nbytes / 1e9:.2f} GB fp32, {size.ranks} ranks, Shard(0)"
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
        if size.warm and measure.gives_pages_back():
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
        if size.warm:
            ways = [ours, floor, usual]
            goals = [replace(goal, limit=None) for goal in goals if goal.other != floor_from_disk.name]
            bench.run("fp32 to bf16", about, ways, goals, inputs=[made], rounds=rounds, cold=False)
        ways = [bench.merge_stream(made, "keep"), bench.copy(made)]
        goals = [Goal("wall / cp -r", "wall", "merge-stream", "cp -r", limits["keep"])]
        expected = digests_of_synthetic(made)
        bench.run("keep", about, ways, goals, inputs=[made], rounds=rounds, expected=expected)
        if size.warm:
            goals = [replace(goal, limit=None) for goal in goals]
            bench.run("keep", about, ways, goals, inputs=[made], rounds=rounds, cold=False, expected=expected)


def dcp(bench: Bench, size: Size) -> None:
    """DCP against torch's own consolidation."""
    limits = size.limits
    with bench.checkpoint("llama-3.6gb", "dcp", size.ranks, size.scale) as made:
        about = f"{made.nbytes / 1e9:.2f} GB fp32, {size.ranks} ranks, DCP"
        ways = [bench.merge_stream(made, "keep"), bench.torch_dcp(made)]
        goals = [
            Goal("wall / torch DCP", "wall", "merge-stream", "torch DCP", limits["usual"]),
            Goal("CPU / torch DCP", "cpu", "merge-stream", "torch DCP", limits["cpu"]),
            Goal("memory above import / torch DCP", "memory", "merge-stream", "torch DCP", limits["memory"]),
        ]
        expected = digests_of_synthetic(made)
        rounds = max(1, size.rounds - 2)
        bench.run("DCP, keep", about, ways, goals, inputs=[made], rounds=rounds, expected=expected)


def layouts(bench: Bench, size: Size) -> None:
    """How speed depends on the memory bound and on the layout."""
    ranks, rounds = size.ranks, size.rounds
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


def many_small(bench: Bench, size: Size) -> None:
    """20,000 tensors of 1 KB."""
    with bench.checkpoint("many-small", "fsdp2", size.ranks) as made:
        about = f"20000 tensors of 1 KB, {size.ranks} ranks"
        ways = [bench.merge_stream(made, "keep"), bench.in_memory(made, "keep")]
        goals = [
            Goal("wall of merge-stream, s", "wall", "merge-stream", "", 2.0),
            Goal("wall / in memory", "wall", "merge-stream", "in memory", None),
            Goal("CPU / in memory", "cpu", "merge-stream", "in memory", None),
        ]
        bench.run("many small tensors", about, ways, goals, inputs=[made], rounds=size.rounds, cold=False)


def ranks(bench: Bench, size: Size) -> None:
    """The same bytes in the files of 8, 64 and 512 ranks."""
    with (
        bench.checkpoint("llama-3.6gb", "fsdp2", 8, size.scale, name="ranks-8") as few,
        bench.checkpoint("llama-3.6gb", "fsdp2", 64, size.scale, name="ranks-64") as more,
        bench.checkpoint("llama-3.6gb", "fsdp2", 512, size.scale, name="ranks-512") as many,
    ):
        about = f"{few.nbytes / 1e9:.2f} GB fp32 to bf16, Shard(0)"
        ways = [
            bench.merge_stream(made, "bf16", name=f"merge-stream, {count} ranks")
            for made, count in ((few, 8), (more, 64), (many, 512))
        ]
        goals = [
            Goal(f"{metric}, {count} / 8 ranks", metric, f"merge-stream, {count} ranks", ways[0].name, limit)
            for metric, limit in (("wall", 1.3), ("cpu", None))
            for count in (64, 512)
        ]
        bench.run("number of ranks", about, ways, goals, inputs=[few, more, many], rounds=size.rounds)


def tmpfs(bench: Bench, size: Size) -> None:
    """Checkpoint, output and floor in memory: the cost of everything but a disk."""
    if not _MEMORY.is_dir():
        bench.faults.append(f"tmpfs: there is no {_MEMORY}")
        return
    with bench.elsewhere(_MEMORY), bench.checkpoint("llama-3.6gb", "fsdp2", size.ranks, size.scale / 2) as made:
        about = f"{made.nbytes / 1e9:.2f} GB fp32, {size.ranks} ranks, all in /dev/shm"
        floor = bench.floors(made, made.model.elements * 2)[0]
        goals = [Goal("wall / floor", "wall", "merge-stream", "floor", 1.3)]
        ways = [bench.merge_stream(made, "bf16"), floor]
        bench.run("fp32 to bf16, tmpfs", about, ways, goals, inputs=[made], rounds=size.rounds, cold=False)
        goals = [Goal("wall / cp -r", "wall", "merge-stream", "cp -r", 1.3)]
        ways = [bench.merge_stream(made, "keep"), bench.copy(made)]
        bench.run("keep, tmpfs", about, ways, goals, inputs=[made], rounds=size.rounds, cold=False)


def experts(bench: Bench, size: Size) -> None:
    """1600 small matrices."""
    with bench.checkpoint("moe", "fsdp2", size.ranks) as made:
        about = f"{made.nbytes / 1e9:.2f} GB fp32 to bf16, {len(made.model.parameters)} tensors, {size.ranks} ranks"
        ways = [bench.merge_stream(made, "bf16"), bench.floors(made, made.model.elements * 2)[0]]
        goals = [Goal("wall / floor", "wall", "merge-stream", "floor", None)]
        bench.run("experts under their own names", about, ways, goals, inputs=[made], rounds=size.rounds)


GROUPS: Mapping[str, Callable[[Bench, Size], None]] = {
    "rank-files": rank_files,
    "dcp": dcp,
    "layouts": layouts,
    "many-small": many_small,
    "experts": experts,
    "ranks": ranks,
    "tmpfs": tmpfs,
}
_SMOKE_GROUPS = ("rank-files", "dcp")
FULL = Size(
    scale=1.0,
    ranks=8,
    rounds=5,
    warm=True,
    limits={"cast": 0.80, "keep": 1.0, "usual": None, "cpu": 1 / 3, "memory": 1 / 50},
)
# On a small checkpoint the start of the interpreter weighs more than the data, and CI machines are busy: the limits
# against `cat` and `cp` only find a disaster, those of CPU time and memory against the usual way find a regression.
SMOKE = Size(
    scale=0.06,
    ranks=4,
    rounds=2,
    warm=False,
    limits={"cast": 30.0, "keep": 30.0, "usual": 1.0, "cpu": 0.5, "memory": 1 / 8},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small, with generous limits; writes no page")
    parser.add_argument("--only", choices=GROUPS, action="append", help="may be repeated")
    parser.add_argument("--rounds", type=int, help="default: 5, with --smoke 2")
    parser.add_argument("--work", type=pathlib.Path, help="folder on the disk to measure; default: a temporary one")
    parser.add_argument("--json", type=pathlib.Path, help="where to write all numbers", default=None)
    parser.add_argument("--no-page", action="store_true", help="leave docs/performance.md alone")
    parser.add_argument("-q", "--quiet", action="store_true")
    given = parser.parse_args(arguments)
    size = SMOKE if given.smoke else FULL
    size = replace(size, rounds=given.rounds or size.rounds)
    target = given.json or (None if given.smoke else _RESULTS)
    faults: list[str] = []
    missed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="ms_bench_", dir=given.work) as folder:
        results = Results.of(target, measure.machine(pathlib.Path(folder)))
        bench = Bench(pathlib.Path(folder), quiet=given.quiet)
        try:
            for name in given.only or (_SMOKE_GROUPS if given.smoke else GROUPS):
                began = time.perf_counter()
                bench.outcomes, bench.faults = [], []
                GROUPS[name](bench, size)
                faults += bench.faults
                missed += [f"{o.title}: {g.title} above {g.limit:.3f}" for o in bench.outcomes for g in o.missed()]
                results.add(name, bench.as_json(time.perf_counter() - began))
        finally:
            bench.close()
    document = results.document(GROUPS)
    table = markdown(document)
    print(table)
    if not given.smoke and not given.no_page:
        if set(GROUPS) <= set(document["groups"]):
            replace_between_markers(_PAGE, table)
        else:
            print(f"{_PAGE} is as before: not all of {', '.join(GROUPS)} were measured yet", file=sys.stderr)
    for line in [*faults, *missed]:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if faults or (given.smoke and missed) else 0


if __name__ == "__main__":
    raise SystemExit(main())
