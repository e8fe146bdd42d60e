"""A race: one checkpoint, merge-stream and another tool that turns it into a model, in turn and cold.

A *peer* is a tool from PyPI. It is installed into a virtual environment of its own, beside the torch that runs here,
and sees nothing of this project's. Before the first race its imports run once, which gives the memory that "above
import" subtracts, and leaves compiled modules as a user has them. Each run ends with `sync` of what it wrote. After
the last round the outputs are compared: names, dtypes, shapes and bytes of all tensors.
"""

from __future__ import annotations

import functools
import importlib.metadata
import pathlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from bench.measure import Contender, Run, Spread, interleave, ratios, run
from bench.outputs import differences, digests_of_weights

__all__ = ["CHECKPOINT", "OUT", "Peer", "Race", "Size", "environment", "hold"]

CHECKPOINT, OUT = "{checkpoint}", "{out}"
"""Words of a command that stand for the two folders."""
Size = Literal["small", "full"]
_OURS = "merge-stream"
_HIDDEN = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")


@dataclass(frozen=True, slots=True)
class Race:
    """A checkpoint that was made, and the words that follow each command.

    about   what it is, for the heading
    ours    options of `merge-stream merge CKPT OUT`
    theirs  program in the peer's environment and its words, by the name of the way
    """

    about: str
    checkpoint: pathlib.Path
    ours: tuple[str, ...]
    theirs: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Peer:
    """A tool: the package whose version is told, `pip install`s after torch, what it imports, and its races.

    `races(folder, size)` makes one checkpoint after the other in `folder`: full is about 3.6 GB, small some MB.
    """

    package: str
    installs: tuple[tuple[str, ...], ...]
    imports: str
    races: Callable[[pathlib.Path, Size], Generator[Race]]
    variables: Mapping[str, str] = field(default_factory=dict)


def environment(peer: Peer, folder: pathlib.Path) -> pathlib.Path:
    """The peer's virtual environment in `folder`, made unless it is there; CalledProcessError when pip fails."""
    done = folder / "installed"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        torch = importlib.metadata.version("torch").partition("+")[0]
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q"]
        for words in ((f"torch=={torch}",), *peer.installs):
            subprocess.run([*pip, *words], check=True)
        done.touch()
    return folder


def hold(peer: Peer, race: Race, venv: pathlib.Path, rounds: int, tell: Callable[[str], None]) -> tuple[str, list[str]]:
    """Run it; its tables, and what was wrong with the outputs. CommandFailedError when a way fails."""
    ours = (sys.executable, "-m", "merge_stream", "merge", CHECKPOINT, OUT, "-q", *race.ours)
    commands = {_OURS: ours} | {
        name: (str(venv / "bin" / program), *words) for name, (program, *words) in race.theirs.items()
    }
    outs = {name: race.checkpoint.parent / f"out_{name.replace(' ', '_')}" for name in commands}
    contenders = [
        Contender(
            name,
            _line(peer if name != _OURS else None, race.checkpoint, outs[name], words),
            functools.partial(shutil.rmtree, outs[name], ignore_errors=True),
        )
        for name, words in commands.items()
    ]
    theirs = run(_alone(peer, str(venv / "bin" / "python"), "-c", peer.imports)).tree
    imports = dict.fromkeys(commands, theirs) | {_OURS: run((sys.executable, "-c", "import merge_stream.api")).tree}
    runs = interleave(contenders, rounds=rounds, inputs=[race.checkpoint], cold=True, progress=tell)
    wanted = digests_of_weights(outs[_OURS])
    faults = [
        f"{name} and {_OURS} differ in {len(wrong)} tensors, the first is {wrong[0]}"
        for name in race.theirs
        if (wrong := differences(wanted, digests_of_weights(outs[name])))
    ]
    for out in outs.values():
        shutil.rmtree(out)
    return "\n".join(_tables(peer, race, venv, runs=runs, imports=imports, faults=faults)), faults


def _line(peer: Peer | None, checkpoint: pathlib.Path, out: pathlib.Path, words: tuple[str, ...]) -> tuple[str, ...]:
    named = [word.replace(CHECKPOINT, str(checkpoint)).replace(OUT, str(out)) for word in words]
    text = f"{shlex.join(named)} >/dev/null && sync {shlex.quote(str(out))}/*"
    return _alone(peer, "sh", "-c", text) if peer else ("sh", "-c", text)


def _alone(peer: Peer, *words: str) -> tuple[str, ...]:
    """In an environment that does not see ours, nor a GPU."""
    hidden = [word for name in _HIDDEN for word in ("-u", name)]
    given = {"CUDA_VISIBLE_DEVICES": "", **peer.variables}
    return ("env", *hidden, *(f"{name}={value}" for name, value in given.items()), *words)


def _tables(
    peer: Peer,
    race: Race,
    venv: pathlib.Path,
    *,
    runs: Mapping[str, list[Run]],
    imports: Mapping[str, int],
    faults: list[str],
) -> Iterator[str]:
    show = f"import importlib.metadata as m; print(m.version({peer.package!r}))"
    version = run((str(venv / "bin" / "python"), "-c", show)).stdout.strip()
    rounds = len(runs[_OURS])
    nbytes = sum(f.stat().st_size for f in race.checkpoint.rglob("*") if f.is_file())
    verdict = f"**differ**: {'; '.join(faults)}" if faults else "equal"
    yield f"{race.about}: {nbytes / 1e9:.2f} GB of files, {peer.package} {version}, {rounds} rounds, values {verdict}\n"
    yield "| way | wall, s | CPU, s | peak memory, MB | of which imports |\n|---|---|---|---|---|"
    for name, used in runs.items():
        wall, cpu = (Spread.of(getattr(r, key) for r in used).text() for key in ("wall", "cpu"))
        peak = max(r.tree for r in used)
        yield f"| {name} | {wall} | {cpu} | {peak / 1e6:.0f} | {imports[name] / 1e6:.0f} |"
    yield f"\n| way / {_OURS} | wall | CPU | memory above import |\n|---|---|---|---|"
    mine = runs[_OURS]
    for name in race.theirs:
        wall, cpu = (
            ratios([getattr(r, key) for r in runs[name]], [getattr(r, key) for r in mine]).text()
            for key in ("wall", "cpu")
        )
        memory = ratios([r.tree - imports[name] for r in runs[name]], [r.tree - imports[_OURS] for r in mine])
        yield f"| {name} | {wall} | {cpu} | {memory.text(0)} |"
    yield ""
