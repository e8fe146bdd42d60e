"""merge-stream beside the tools that a user would run instead.

    python -m bench.peers [--only NAME ...] [--rounds 3] [--work FOLDER] [--environments FOLDER]
    python -m bench.peers --smoke      tiny checkpoints, one round, no page: does every tool still run?

Each tool gets its own block of docs/performance.md, so one may be measured again alone. 25 minutes and 14 GB of disk
for all; most of it is the installs, which `--environments` keeps for the next time. Exit code 1 when a tool could not
be installed or run, or wrote other values.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import pathlib
import subprocess
import sys
import tempfile

from bench.measure import CommandFailedError
from bench.peers.race import Peer, Size, environment, hold
from bench.tables import replace_between_markers

__all__: list[str] = []

_NAMES = ("verl", "accelerate", "zero_to_fp32", "mergekit")
_PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "performance.md"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=_NAMES, action="append", help="may be repeated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=pathlib.Path, help="folder on the disk to measure; default: a temporary one")
    parser.add_argument("--environments", type=pathlib.Path, help="where the tools are installed; default: not kept")
    parser.add_argument("--smoke", action="store_true", help="tiny, one round, writes no page")
    parser.add_argument("--no-page", action="store_true", help="leave docs/performance.md alone")
    given = parser.parse_args()
    faults = []
    with tempfile.TemporaryDirectory(prefix="ms_bench_peers_", dir=given.work) as scratch:
        for name in given.only or _NAMES:
            peer: Peer = importlib.import_module(f"bench.peers.{name}").PEER
            venv = (given.environments or pathlib.Path(scratch, "environments")) / name
            try:
                with tempfile.TemporaryDirectory(dir=scratch) as folder:
                    text, wrong = _measured(
                        peer,
                        venv,
                        pathlib.Path(folder),
                        "small" if given.smoke else "full",
                        1 if given.smoke else given.rounds,
                    )
            except (CommandFailedError, subprocess.CalledProcessError) as error:
                faults.append(f"{name}: {error}")
                continue
            faults += [f"{name}: {fault}" for fault in wrong]
            print(text)
            if not (given.smoke or given.no_page):
                replace_between_markers(_PAGE, text, writer=f"bench.peers {name}")
    for fault in faults:
        print(f"missed: {fault}", file=sys.stderr)
    return 1 if faults else 0


def _measured(peer: Peer, venv: pathlib.Path, folder: pathlib.Path, size: Size, rounds: int) -> tuple[str, list[str]]:
    """The text of all races of a peer, and what was wrong."""
    installed = environment(peer, venv)
    texts, faults = [], []
    with contextlib.closing(peer.races(folder, size)) as races:
        for race in races:
            text, wrong = hold(peer, race, installed, rounds, lambda line: print(line, file=sys.stderr))
            texts.append(text)
            faults += wrong
    return "\n".join(texts), faults


if __name__ == "__main__":
    raise SystemExit(main())
