"""How long planning takes, and how much memory, at sizes that no machine here could merge: sparse files, real headers.

    python -m bench.planning --work FOLDER [--only NAME ...] [--rounds 3] [--keep]
    python -m bench.planning --work FOLDER --whole    # merge 105 billion parameters: is memory flat? 5 minutes

    llama-405b    1137 parameters x 512 ranks, FSDP2 (and 64, 128 and 256 ranks: is it linear?)
    deepseek-v3   45,000 parameters x 64 ranks, FSDP2, each expert under its own name (and 16 ranks)
    moe-1t        730 parameters x 256 ranks, FSDP2, experts stacked: 70,000 output tensors (and 64 ranks)
    megatron      DeepSeek-V3 in torch_dist, TP 8, PP 16, EP 32: 48,000 chunks

`plan` and `inspect` run in fresh processes, warm (the files were just made), under --max-mem 4G. Making the
checkpoints takes most of the time: 2 minutes for llama-405b, 14 for deepseek-v3, and 17 GB of disk for all.
A *record* is a tensor in one rank's file, or a chunk.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench import measure
from bench.measure import Spread
from bench.sparse import make_sparse_megatron, make_sparse_ranks

__all__: list[str] = []

_GOALS = {"llama-405b, 512 ranks": (30.0, 1_000_000_000)}  # seconds of `plan`, bytes of memory


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint: `make` writes it and tells its records; `words` follow the name of the folder."""

    name: str
    make: Callable[[pathlib.Path], int]
    below: str = ""
    words: tuple[str, ...] = ()


def _ranks(shape: str, ranks: int) -> Case:
    def make(folder: pathlib.Path) -> int:
        return len(make_sparse_ranks(folder, shape, ranks).parameters) * ranks

    return Case(f"{shape}, {ranks} ranks", make)


CASES = {
    "llama-405b": [_ranks("llama-405b", ranks) for ranks in (64, 128, 256, 512)],
    "deepseek-v3": [_ranks("deepseek-v3", ranks) for ranks in (16, 64)],
    "moe-1t": [_ranks("moe-1t", ranks) for ranks in (64, 256)],
    "megatron": [Case("megatron torch_dist, TP 8 PP 16 EP 32", make_sparse_megatron, "ckpt", ("--base-model", "hf"))],
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.planning", description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder on a disk with 17 GB; made if needed")
    parser.add_argument("--only", choices=CASES, action="append", help="may be repeated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints, and take those that are there")
    parser.add_argument("--whole", action="store_true", help="merge one of them instead of planning all")
    given = parser.parse_args(arguments)
    if given.whole:
        return _whole(given.work)
    failed = 0
    print(
        "| checkpoint | records | `plan` wall, s | CPU, s | CPU for each record, us | memory, MB "
        "| `inspect` wall, s | CPU, s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in given.only or CASES:
        for case in CASES[name]:
            folder = given.work / case.name.replace(" ", "-").replace(",", "")
            note = folder / "records.json"
            if not note.exists():
                shutil.rmtree(folder, ignore_errors=True)
                records = case.make(folder)
                note.write_text(json.dumps(records))
            failed += _measure(case, folder, json.loads(note.read_text()), given.rounds)
            if not given.keep:
                shutil.rmtree(folder)
    return 1 if failed else 0


def _whole(work: pathlib.Path) -> int:
    """A merge from the first byte to the last of 32 layers of Llama-405B (212 GB), into files that keep the holes."""
    source, out = work / "llama-405b-32-layers", work / "out"
    shutil.rmtree(out, ignore_errors=True)
    if not source.exists():
        make_sparse_ranks(source, "llama-405b", 64, layers=32)
    words = ("merge", str(source), str(out), "--sparse", "--max-mem", "1G", "--json", "-q")
    used = measure.run([sys.executable, "-m", "merge_stream", *words])
    report = json.loads(used.stdout)
    resident = [sample[1] for sample in report["timeline"]]
    third = len(resident) // 3
    first, last = max(resident[:third]), max(resident[-third:])
    print(
        f"{report['output_nbytes'] / 1e9:.0f} GB in {used.wall:.0f} s, CPU {used.cpu:.0f} s; resident memory at most "
        f"{first / 1e6:.0f} MB in the first third, {last / 1e6:.0f} MB in the last; projected "
        f"{report['memory']['projected'] / 1e6:.0f} MB"
    )
    shutil.rmtree(out)
    return 1 if last > first * 1.1 else 0


def _measure(case: Case, folder: pathlib.Path, records: int, rounds: int) -> int:
    """One row of the table; 1 when a goal is missed."""
    words = [str(folder / word) if not word.startswith("-") else word for word in case.words]
    tool = [sys.executable, "-m", "merge_stream"]
    plan = [*tool, "plan", str(folder / case.below), *words, "--max-mem", "4G", "--json"]
    inspect = [*tool, "inspect", str(folder / case.below), "--max-mem", "4G", "--json"]
    runs = [(measure.run(plan), measure.run(inspect)) for _ in range(rounds)]
    wall, cpu = Spread.of(p.wall for p, _ in runs), Spread.of(p.cpu for p, _ in runs)
    memory = max(p.peak for p, _ in runs)
    looked, looked_cpu = Spread.of(i.wall for _, i in runs), Spread.of(i.cpu for _, i in runs)
    print(
        f"| {case.name} | {records:,} | {wall.text(1)} | {cpu.text(1)} | {cpu.median / records * 1e6:.1f} | "
        f"{memory / 1e6:.0f} | {looked.text(1)} | {looked_cpu.text(1)} |",
        flush=True,
    )
    seconds, nbytes = _GOALS.get(case.name, (float("inf"), 1 << 62))
    if wall.median > seconds or memory > nbytes:
        print(f"missed: {case.name}: goal {seconds} s and {nbytes / 1e6:.0f} MB", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
