"""Where the workers' CPU time goes: reads, writes, casts, checksums, and what is left, which is Python.

    python -m bench.profile [--work FOLDER] [--dtype bf16] [--rounds 5] [--page docs/performance.md]

A merge of the checkpoint of the first measurements (3.6 GB of fp32, 8 ranks), cold, in a fresh process each round.
There the functions that move or change bytes are wrapped: the thread's own CPU clock is read before and after. All
other CPU time of the workers' threads is the price of Python: cutting the plan, looking up extents, leases, the
journal, and the wrappers themselves (about 1 us each). Waiting does not count, nor does the main thread.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from bench import measure
from bench.measure import Spread
from bench.tables import replace_between_markers
from merge_stream.options import DtypeName

__all__ = ["main"]

_GOAL = 0.05
_BULK = {
    "reads": "os.preadv",
    "dropped pages": "os.posix_fadvise",
    "writes": "os.pwritev",
    "casts": "Cast.encode",
    "checksums": "journal.checksum",
}
_PYTHON = "Python"


def _profile(checkpoint: str, out: str, dtype: DtypeName) -> dict[str, float]:
    """Merge here, and tell seconds of CPU by what they were spent on, and the number of segments."""
    from merge_stream import api
    from merge_stream.encodings.cast import Cast
    from merge_stream.engine import journal, staging
    from merge_stream.options import MergeOptions

    spent: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    clock = time.thread_time

    def timed(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the function takes
            began = clock()
            try:
                return function(*args, **kwargs)
            finally:
                if threading.current_thread().name.startswith("worker"):
                    spent[kind] += clock() - began
                    calls[kind] += 1

        return call

    os.preadv = timed("reads", os.preadv)
    os.posix_fadvise = timed("dropped pages", os.posix_fadvise)
    os.pwritev = timed("writes", os.pwritev)
    Cast.encode = timed("casts", Cast.encode)  # type: ignore[method-assign]
    staging.checksum = timed("checksums", journal.checksum)  # type: ignore[attr-defined]
    run = threading.Thread.run

    def run_and_tell(thread: threading.Thread) -> None:
        try:
            run(thread)
        finally:
            if thread.name.startswith("worker"):
                spent["all"] += clock()

    threading.Thread.run = run_and_tell  # type: ignore[method-assign, assignment]
    api.merge(checkpoint, out, MergeOptions(dtype=dtype, max_mem=2_000_000_000))
    found = {kind: spent[kind] for kind in _BULK}
    return {**found, _PYTHON: spent["all"] - sum(found.values()), "segments": calls["checksums"]}


def _table(rounds: Sequence[dict[str, float]], about: str) -> str:
    kinds = [*_BULK, _PYTHON]
    lines = [f"{about}; smallest / median / largest of {len(rounds)} rounds, {rounds[0]['segments']:.0f} segments.", ""]
    lines += ["| | CPU of the workers, s | share |", "|---|---|---|"]
    for kind in kinds:
        seconds = Spread.of(r[kind] for r in rounds)
        share = Spread.of(100 * r[kind] / sum(r[k] for k in kinds) for r in rounds)
        name = kind if kind == _PYTHON else f"{kind} (`{_BULK[kind]}`)"
        lines.append(f"| {name} | {seconds.text(2)} | {share.text(1)} % |")
    python = Spread.of(r[_PYTHON] / sum(r[k] for k in kinds) for r in rounds)
    each = Spread.of(1e6 * r[_PYTHON] / r["segments"] for r in rounds)
    verdict = "met" if python.median < _GOAL else "**missed**"
    lines += ["", f"Python takes {each.text(0)} us for a segment. Goal: less than {_GOAL:.0%} of the time: {verdict}."]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.profile", description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=pathlib.Path, help="folder on the disk to measure; default: a temporary one")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--page", type=pathlib.Path, help="page to write the table into")
    parser.add_argument("--once", nargs=2, metavar=("CKPT", "OUT"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.once:
        checkpoint, out = given.once
        print(json.dumps(_profile(checkpoint, out, given.dtype)))
        return 0
    from merge_stream.benchmark.synthetic import make_checkpoint

    rounds = []
    with tempfile.TemporaryDirectory(prefix="ms_profile_", dir=given.work) as folder:
        work = pathlib.Path(folder)
        made = make_checkpoint(work / "ckpt", shape="llama-3.6gb", ranks=8, layout="fsdp2", scale=given.scale)
        for _ in range(given.rounds):
            shutil.rmtree(work / "out", ignore_errors=True)
            measure.drop([made.folder])
            words = ["-m", "bench.profile", "--dtype", given.dtype, "--once", str(made.folder), str(work / "out")]
            told = subprocess.run([sys.executable, *words], check=True, stdout=subprocess.PIPE, text=True).stdout
            rounds.append(json.loads(told))
        table = _table(rounds, f"{made.nbytes / 1e9:.2f} GB fp32, `--dtype {given.dtype}`, cold")
    print(table)
    if given.page:
        replace_between_markers(given.page, table, writer="bench.profile")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
