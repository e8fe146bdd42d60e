"""`kill -9` at random moments, then the same command again: the bytes must be those of an undisturbed run.

    python -m tests.crash.kill_resume --runs 100 [--seed 1] [--size 800] [--folder DIR]

A checkpoint of `--size` MB (four rank files of random fp32 values, some tensors cut along columns) is merged once
in peace, kept and cast. Each run then starts a merge, kills it one to three times (at a random moment, when a given
share of the output is journaled, while the finalizer works, or while the commit renames), and lets the same command
end; often with other workers and another bound. Checked for each run:

- every file of OUT is byte-identical, nothing else is in it, no partial folder is left;
- what the last run writes again though the journal had it is less than 5 % of the bytes plus one segment a worker.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import mmap
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from merge_stream.engine.journal import read_journal

if TYPE_CHECKING:
    import torch

__all__ = ["CONFIG", "Harness", "Outcome", "make_checkpoint", "model_of"]

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
SMALL = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up")
LAYERS = 8
SECONDS = 120
MOST_REDONE = 0.05
SETTINGS = (
    ("--workers", "1", "--max-mem", "512M"),
    ("--workers", "1", "--max-mem", "72M"),
    ("--workers", "2", "--max-mem", "512M"),
    ("--workers", "2", "--max-mem", "72M"),
    ("--workers", "4", "--max-mem", "512M"),
)


def make_checkpoint(folder: pathlib.Path, megabytes: int) -> pathlib.Path:
    """Rank files of four ranks, every other large matrix cut along columns."""
    from torch.distributed.tensor import Shard

    from tests.makers.dtensor import Spread, write_ranks

    odd = {f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(1, LAYERS, 2)}
    tensors = {name: Spread(value, [Shard(int(name in odd))]) for name, value in model_of(megabytes).items()}
    return write_ranks(folder, (4,), tensors, config=CONFIG)


def model_of(megabytes: int) -> dict[str, torch.Tensor]:
    """About `megabytes` of fp32 values, different in every row."""
    import torch

    values = torch.randn(1 << 20, generator=torch.Generator().manual_seed(5))
    columns = 1024
    rows = megabytes * 1_000_000 // (4 * columns * (LAYERS + 2))

    def tensor(number: int, count: int) -> torch.Tensor:
        flat = values.roll(number * 4099).repeat(-(-count * columns // len(values)) + 1)
        return flat[number * 131 :][: count * columns].reshape(count, columns)

    tensors = {"model.embed_tokens.weight": tensor(99, rows * 2 + 3), "lm_head.weight": tensor(98, 64)}
    tensors["model.norm.weight"] = values[:columns].clone()
    for layer in range(LAYERS):
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"] = tensor(layer, rows + layer)
        norm = values[layer * 1000 : layer * 1000 + columns].clone()
        for part in ("input", "post_attention"):
            tensors[f"model.layers.{layer}.{part}_layernorm.weight"] = norm
        for number, part in enumerate(SMALL):
            tensors[f"model.layers.{layer}.{part}_proj.weight"] = tensor(50 + number, 16)
    return tensors


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One run: how often it was killed and at what share of the output, and what was done again."""

    kills: int
    shares: Sequence[float]
    redone_nbytes: int
    allowed_nbytes: int
    seconds: float
    how: str


class Harness:
    """A checkpoint, its true results, and runs that are disturbed."""

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        megabytes: int,
        seed: int,
        make: Callable[[pathlib.Path, int], pathlib.Path] = make_checkpoint,
        words: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.ckpt = make(folder / "ckpt", megabytes)
        self.words = words
        self.expected: dict[str, pathlib.Path] = {}
        self.seconds: dict[str, float] = {}
        self.data_nbytes: dict[str, int] = {}
        for dtype in ("keep", "bf16"):
            out = folder / f"expected_{dtype}"
            began = time.monotonic()
            report = self._finish(out, dtype, SETTINGS[0])
            self.seconds[dtype] = time.monotonic() - began
            self.expected[dtype] = out
            self.data_nbytes[dtype] = report["written_nbytes"]

    def command(self, out: pathlib.Path, dtype: str, settings: Sequence[str], *more: str) -> list[str]:
        """The merge."""
        words = ["merge", str(self.ckpt), str(out), "--dtype", dtype, "--max-shard-size", "200MB", "--json", "-q"]
        return [sys.executable, "-m", "merge_stream", *words, *self.words, *settings, *more]

    def run(self, number: int) -> Outcome:
        """Start, kill, resume, compare; raises AssertionError when a promise is broken."""
        pick = self.random
        dtype = pick.choice(["keep", "bf16"])
        out = self.folder / f"out_{number}"
        more, work = self._target(out, pick.choice(["new", "new", "empty", "old"]))
        settings = pick.choice(SETTINGS)
        began = time.monotonic()
        shares: list[float] = []
        how: list[str] = []
        for _ in range(pick.choice([1, 1, 1, 2, 3])):
            moment = self._moment(work, dtype)
            if not self._killed(self.command(out, dtype, settings, *more), moment[1]):
                break
            how.append(moment[0])
            shares.append(sum(_journaled(work).values()) / self.data_nbytes[dtype])
            if self._whole(out, work, dtype):
                break
            if pick.random() < 0.4:
                settings = pick.choice(SETTINGS)
        held = sum(_journaled(work).values())
        if not self._whole(out, work, dtype):
            report = self._finish(out, dtype, settings, *more)
            redone = report["written_nbytes"] - (self.data_nbytes[dtype] - held)
            if not report["written_nbytes"]:  # only the renames were left
                redone = 0
            allowed = int(MOST_REDONE * self.data_nbytes[dtype]) + report["workers"] * report["segment_nbytes"]
            assert redone < max(allowed, 1), f"{redone} bytes were done again, allowed are {allowed} ({how})"
        else:
            redone, allowed = 0, 1
        self._compare(out, dtype)
        left = _places(out, work)
        assert not left, f"left behind: {left} ({how})"
        shutil.rmtree(out)
        return Outcome(len(how), shares, redone, allowed, time.monotonic() - began, "+".join(how) or "not killed")

    def _whole(self, out: pathlib.Path, work: pathlib.Path, dtype: str) -> bool:
        """The killed run had committed and cleaned up: nothing is left to be resumed."""
        return not _places(out, work) and out.is_dir() and self._names(out) == self._names(self.expected[dtype])

    def _target(self, out: pathlib.Path, kind: str) -> tuple[list[str], pathlib.Path]:
        """(further options, partial folder) for an OUT that is not there, empty, or an old model."""
        if kind == "empty":
            out.mkdir()
            return [], out / ".merge-stream"
        if kind == "old":
            out.mkdir()
            (out / "config.json").write_text("{}")
            (out / "model.safetensors").write_bytes(b"an old model")
            return ["--overwrite"], pathlib.Path(f"{out}.partial")
        return [], pathlib.Path(f"{out}.partial")

    def _moment(self, work: pathlib.Path, dtype: str) -> tuple[str, Callable[[float], bool]]:
        """(name, question "now?" asked with the seconds since the start)."""
        kind = self.random.choice(["time", "time", "share", "share", "finish", "commit"])
        if kind == "time":
            at = self.random.uniform(0.0, 1.1 * self.seconds[dtype])
            return f"after {at:.1f} s", lambda seconds: seconds >= at
        if kind == "share":
            wanted = self.random.random() * (1 if self.random.random() < 0.8 else 0.02)
            nbytes = wanted * self.data_nbytes[dtype]
            return f"at {wanted:.0%}", lambda _: sum(_journaled(work).values()) >= nbytes and work.exists()
        wait = self.random.choice([0.0, 0.0, 0.001, 0.003, 0.01])
        sign = {"finish": work / "model" / "tokenizer.json", "commit": pathlib.Path(f"{work}.committing")}[kind]
        seen: list[float] = []

        def reached(seconds: float) -> bool:
            if not seen and sign.exists():
                seen.append(seconds)
            return bool(seen) and seconds >= seen[0] + wait

        return kind, reached

    def _killed(self, command: Sequence[str], now: Callable[[float], bool]) -> bool:
        """True when the process was killed before it had ended by itself."""
        log = self.folder / "stderr"
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file, cwd=REPOSITORY)
        began = time.monotonic()
        while process.poll() is None:
            seconds = time.monotonic() - began
            if now(seconds):
                process.kill()
                process.wait()
                return process.returncode == -9
            assert seconds < SECONDS, "the run hangs"
            time.sleep(0.0005)
        assert process.returncode == 0, log.read_text()
        return False

    def _finish(self, out: pathlib.Path, dtype: str, settings: Sequence[str], *more: str) -> dict[str, Any]:
        ended = subprocess.run(
            self.command(out, dtype, settings, *more),
            capture_output=True,
            check=False,
            text=True,
            timeout=SECONDS,
            cwd=REPOSITORY,
        )
        assert ended.returncode == 0, ended.stderr
        report: dict[str, Any] = json.loads(ended.stdout)
        return report

    def _compare(self, out: pathlib.Path, dtype: str) -> None:
        wanted = self.expected[dtype]
        assert self._names(out) == self._names(wanted)
        for name in self._names(wanted):
            assert _equal(wanted / name, out / name), f"{name} differs from the undisturbed run"

    @staticmethod
    def _names(folder: pathlib.Path) -> list[str]:
        return sorted(p.name for p in folder.iterdir())


def _places(out: pathlib.Path, work: pathlib.Path) -> list[pathlib.Path]:
    """What a run has beside OUT while it works, as far as it is there."""
    names = [f"{work}", f"{work}.committing", f"{work}.committing.new", f"{out}.old", f"{out}.partial"]
    return [path for path in map(pathlib.Path, names) if path.exists()]


def _journaled(work: pathlib.Path) -> dict[int, int]:
    """Bytes of each output file that the journal holds."""
    content = read_journal(str(work / "journal"))
    done = content.trusted
    for r in content.doubtful:
        done.add(r)
    return {output: done.nbytes(output) for output in done.outputs}


def _equal(a: pathlib.Path, b: pathlib.Path) -> bool:
    if a.stat().st_size != b.stat().st_size:
        return False
    with (
        a.open("rb") as x,
        b.open("rb") as y,
        mmap.mmap(x.fileno(), 0, access=mmap.ACCESS_READ) as p,
        mmap.mmap(y.fileno(), 0, access=mmap.ACCESS_READ) as q,
    ):
        left, right = np.frombuffer(p, np.uint8), np.frombuffer(q, np.uint8)
        same = bool(np.array_equal(left, right))
        del left, right  # before the maps are closed
    return same


def main(words: list[str]) -> int:
    """Run, print a line each, and the numbers of all."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash.kill_resume")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="0: a new one, which is printed")
    parser.add_argument("--size", type=int, default=800, help="MB of the checkpoint")
    parser.add_argument("--folder", help="where to work; a temporary folder by default")
    given = parser.parse_args(words)
    seed = given.seed or random.SystemRandom().randrange(1, 1_000_000)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kill-resume-", dir=given.folder) as name:
        harness = Harness(pathlib.Path(name), megabytes=given.size, seed=seed)
        alone = ", ".join(f"{dtype} {seconds:.1f} s" for dtype, seconds in harness.seconds.items())
        print(f"seed {seed}, {given.size} MB; undisturbed: {alone}", flush=True)
        outcomes = []
        for number in range(given.runs):
            outcome = harness.run(number)
            outcomes.append(outcome)
            done = ", ".join(f"{share:.0%}" for share in outcome.shares)
            print(
                f"{number + 1:>4}  killed {outcome.kills}x ({outcome.how}; journaled {done or '-'})  "
                f"again {outcome.redone_nbytes / 1e6:.1f} MB of {outcome.allowed_nbytes / 1e6:.1f} allowed",
                flush=True,
            )
    most = max(o.redone_nbytes for o in outcomes)
    print(
        f"{len(outcomes)} runs, {sum(o.kills for o in outcomes)} kills, all byte-identical; done again at most "
        f"{most / 1e6:.1f} MB; {(time.monotonic() - began) / 60:.1f} min"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
