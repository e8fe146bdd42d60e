"""Fuzzing: damaged files of real checkpoints through inspect, plan and small merges, in guarded worker processes.

    python -m tests.hostile.fuzz --inputs 200000 --seed 1 [--kind side] [--work DIR] [--found DIR]

Each input is one checkpoint of tests/data with one file changed (`mutations`); with `--kind side` a small model
with one of the JSON files beside its weights changed (`side_files`). It must end in a result or a
MergeStreamError, within 10 seconds, without taking more memory than the bound, opening a file outside its
folders, importing, compiling or starting anything. What breaks that is written to --found, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from typing import Any

DATA = pathlib.Path(__file__).resolve().parents[1] / "data"
LIMIT = 400_000_000
SECONDS = 10
_FORBIDDEN = ("exec", "compile", "import", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork",
              "ctypes.dlopen", "socket.connect")  # fmt: skip

_ABSENT = ("torch", "transformers")
"""Asked for where no table knows a family (`architectures._dry_run`); as if they were not installed."""


class Watch:
    """An audit hook: after `arm`, what a checkpoint must not cause is noted."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self.allowed = (
            *allowed,
            "/proc/",
            "/sys/fs/cgroup",
            "/etc/",
            sys.prefix,
            sys.base_prefix,
            str(DATA.parents[1]),
        )
        self.armed = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        if event == "import" and args[0] in _ABSENT:
            return
        if event in _FORBIDDEN:
            self.seen.append(f"{event} {str(args)[:200]}")
        elif event == "open" and isinstance(args[0], (str, bytes)):
            path = os.path.abspath(os.fsdecode(args[0]))
            if not path.startswith(self.allowed):
                self.seen.append(f"open {path[:200]!a}")


def checkpoints() -> list[pathlib.Path]:
    """The folders of tests/data that are checkpoints, small ones."""
    return sorted(path for path in DATA.glob("*/*/ckpt") if path.is_dir()) + sorted(DATA.glob("*/ckpt"))


def _too_long(*_: object) -> None:
    raise TimeoutError


def resident() -> int:
    """Resident bytes of this process."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096


def run_one(folder: pathlib.Path, out: pathlib.Path, *, merge: bool) -> str:
    """Open, plan and perhaps merge; the name of the error, or "ok"."""
    from merge_stream.api import make_plan, open_checkpoint
    from merge_stream.api import merge as do_merge
    from merge_stream.errors import MergeStreamError
    from merge_stream.inspection import describe
    from merge_stream.options import MergeOptions

    options = MergeOptions(max_mem=LIMIT, write_config=False, overwrite=True, workers=1, layout="as-is")
    try:
        catalog = open_checkpoint([folder], max_mem=LIMIT)
        describe(catalog, every_tensor=True).lines()
        make_plan(catalog, options)
        if merge:
            do_merge(folder, out, options)
    except MergeStreamError as error:
        str(error)
        return type(error).__name__
    return "ok"


def run_side(folder: pathlib.Path, out: pathlib.Path, *, merge: bool) -> str:
    """The same for a folder of `side_files`."""
    from merge_stream.errors import MergeStreamError
    from tests.hostile.side_files import look

    try:
        look(folder, {kind: folder.parent / kind for kind in ("model", "base", "adapter", "lora")}, out, merge=merge)
    except MergeStreamError as error:
        str(error)
        return type(error).__name__
    return "ok"


def work(seed: int, inputs: int, base: str, found: str, kind: str = "checkpoint") -> int:
    """Run `inputs` inputs; the number of those that broke a promise."""
    from tests.hostile.mutations import mutated
    from tests.hostile.side_files import make_folders

    rng = random.Random(seed)
    root = pathlib.Path(base) / f"w{seed}"
    shutil.rmtree(root, ignore_errors=True)
    folders = []
    for name in _ABSENT if kind == "side" else ():
        sys.modules[name] = None  # type: ignore[assignment]
    run = run_side if kind == "side" else run_one
    for target in make_folders(root).values() if kind == "side" else ():
        names = [p.relative_to(target) for p in target.glob("*.json")]
        folders.append((target, names, [1] * len(names)))
    for source in checkpoints() if kind != "side" else ():
        target = root / f"in{len(folders)}"
        shutil.copytree(source, target)
        names = [p.relative_to(target) for p in target.rglob("*") if p.is_file() and p.stat().st_size < 300_000]
        weights = [1 if name.suffix == ".json" else 6 for name in names]
        folders.append((target, names, weights))
    watch = Watch((str(root),))
    signal.signal(signal.SIGALRM, _too_long)
    for target, _, _ in folders:
        run(target, root / "out", merge=True)
    broken = 0
    counts: dict[str, int] = {}
    started = time.monotonic()
    for number in range(inputs):
        target, names, weights = rng.choice(folders)
        name = rng.choices(names, weights)[0]
        path = target / name
        honest = path.read_bytes()
        changed = mutated(str(name), honest, rng)
        path.write_bytes(changed)
        before, what = resident(), ""
        watch.seen, watch.armed = [], True
        signal.alarm(SECONDS)
        try:
            end = run(target, root / "out", merge=rng.random() < 0.02)
            counts[end] = counts.get(end, 0) + 1
        except BaseException:  # noqa: BLE001 - whatever it is, it is what is looked for
            what = traceback.format_exc()
        signal.alarm(0)
        watch.armed = False
        what = what or "\n".join(watch.seen) or (f"grew to {resident()}" if resident() > max(LIMIT, before) else "")
        path.write_bytes(honest)
        if what:
            broken += 1
            place = pathlib.Path(found) / f"{seed}-{number}"
            place.mkdir(parents=True, exist_ok=True)
            (place / "input").write_bytes(changed)
            (place / "why.txt").write_text(f"{target.name} {name}\n{what}\n", encoding="utf-8", errors="replace")
        if number % 2000 == 1999:
            rate = (number + 1) / (time.monotonic() - started)
            print(f"seed {seed}: {number + 1} inputs, {broken} broken, {rate:.0f}/s, {counts}", flush=True)
    shutil.rmtree(root, ignore_errors=True)
    return broken


def main() -> int:
    """Run workers one after another, each a fresh process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=["checkpoint", "side"], default="checkpoint")
    parser.add_argument("--batch", type=int, default=10_000)
    parser.add_argument("--work", default=f"{tempfile.gettempdir()}/merge-stream-fuzz")
    parser.add_argument("--found", default=f"{tempfile.gettempdir()}/merge-stream-fuzz-found")
    given = parser.parse_args()
    broken = False
    context = multiprocessing.get_context("spawn")
    for batch in range(-(-given.inputs // given.batch)):
        count = min(given.batch, given.inputs - batch * given.batch)
        process = context.Process(target=work, args=(given.seed + batch, count, given.work, given.found, given.kind))
        process.start()
        process.join()
        broken |= process.exitcode != 0
    found = list(pathlib.Path(given.found).glob("*/why.txt")) if pathlib.Path(given.found).is_dir() else []
    print(f"{given.inputs} inputs, {len(found)} broke a promise" + (f": {given.found}" if found else ""))
    return 1 if broken or found else 0


if __name__ == "__main__":
    raise SystemExit(main())
