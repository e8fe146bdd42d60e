"""What the tool costs before it has done anything: CPU of `--help` and `inspect`, and what an import brings.

python -m bench.startup [--json]      exit code 1 when a goal is missed
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tempfile
from collections.abc import Sequence

from bench import measure
from merge_stream.benchmark.synthetic import make_checkpoint

__all__ = ["main"]

_GOAL_SECONDS = 0.5
_ROUNDS = 7
_HEAVY = ("torch", "zarr", "rich", "huggingface_hub", "transformers")
_LIST_HEAVY = f"import sys, merge_stream; print(*[m for m in {_HEAVY!r} if m in sys.modules])"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.startup", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    tool = (sys.executable, "-m", "merge_stream")
    missed = []
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="ms_bench_") as folder:
        made = make_checkpoint(pathlib.Path(folder, "ckpt"), shape="tiny", ranks=4, layout="fsdp2")
        for name, command in (
            ("python -c pass", (sys.executable, "-c", "pass")),
            ("merge-stream --help", (*tool, "--help")),
            ("merge-stream inspect", (*tool, "inspect", str(made.folder))),
            ("merge-stream plan", (*tool, "plan", str(made.folder))),
        ):
            runs = [measure.run(command) for _ in range(_ROUNDS)]
            cpu = measure.Spread.of(r.cpu for r in runs)
            peak = max(r.peak for r in runs)
            found[name] = {"cpu": cpu.as_json(), "peak": peak}
            if not given.json:
                print(f"{name:24s} CPU {cpu.text(3)} s (min / median / max of {_ROUNDS}), peak {peak / 1e6:.0f} MB")
            if cpu.median > _GOAL_SECONDS:
                missed.append(f"{name}: {cpu.median:.3f} s of CPU, the goal is {_GOAL_SECONDS}")
    heavy = measure.run((sys.executable, "-c", _LIST_HEAVY)).stdout.split()
    found["heavy modules of `import merge_stream`"] = heavy
    if heavy:
        missed.append(f"import merge_stream imports {', '.join(heavy)}")
    print(
        json.dumps(found) if given.json else f"`import merge_stream` brings of {', '.join(_HEAVY)}: {heavy or 'none'}"
    )
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
