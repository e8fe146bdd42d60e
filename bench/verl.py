"""merge-stream beside verl's own `verl.model_merger` on the same FSDP2 checkpoint.

    python -m bench.verl [--venv FOLDER] [--shape llama-3.6gb] [--ranks 8] [--rounds 3] [--work FOLDER]
                         [--page docs/performance.md]

verl is installed into a virtual environment of its own in the scratch folder, with the torch of this one and without
what only training needs, or FOLDER holds such an environment already. Runs are interleaved and cold, each ends with
`sync`; verl writes bf16, so we do too, and the values are compared. "Above import" subtracts the peak of a process
that only imports verl's merger, or merge-stream. The page gets the table between markers.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile

from bench.measure import Contender, Spread, interleave, ratios, run
from bench.outputs import differences, digests_of_weights
from bench.tables import replace_between_markers
from merge_stream.benchmark.shapes import SHAPES
from merge_stream.benchmark.synthetic import make_checkpoint

__all__ = ["main"]

_VERL = "verl==0.9.1"
_NEEDS = (
    "transformers>=5.5", "accelerate", "peft", "tensordict", "ray", "omegaconf", "hydra-core", "datasets", "codetiming",
)  # fmt: skip
# verl loads the tokenizer of the model and saves it again
_TOKENIZER = (
    '{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null, '
    '"pre_tokenizer": null, "post_processor": null, "decoder": null, '
    '"model": {"type": "WordLevel", "vocab": {"<unk>": 0}, "unk_token": "<unk>"}}'
)


def main() -> None:
    """Print a table, and put it into the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--venv", type=pathlib.Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.6gb")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=pathlib.Path)
    parser.add_argument("--page", type=pathlib.Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ms_bench_verl_", dir=given.work) as scratch:
        venv = given.venv or _installed(pathlib.Path(scratch, "venv"))
        ckpt = pathlib.Path(scratch, "ckpt")
        made = make_checkpoint(ckpt, shape=given.shape, ranks=given.ranks, layout="fsdp2")
        (ckpt / "huggingface" / "tokenizer.json").write_text(_TOKENIZER)
        (ckpt / "huggingface" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        title = f"FSDP2, {given.ranks} ranks: {made.nbytes / 1e9:.2f} GB fp32 to bf16"
        table = _compare(ckpt, venv / "bin" / "python", given.rounds, title)
        if given.page:
            replace_between_markers(given.page, table, writer="bench.verl")


def _installed(folder: pathlib.Path) -> pathlib.Path:
    torch = importlib.metadata.version("torch").partition("+")[0]
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q"]
    subprocess.run([*pip, f"torch=={torch}"], check=True)
    subprocess.run([*pip, "--no-deps", _VERL], check=True)
    subprocess.run([*pip, *_NEEDS], check=True)
    return folder


def _compare(ckpt: pathlib.Path, python: pathlib.Path, rounds: int, title: str) -> str:
    outs = {name: ckpt.parent / f"out_{name}" for name in ("merge-stream", "verl")}

    def synced(*command: str, out: pathlib.Path) -> tuple[str, ...]:
        text = f"CUDA_VISIBLE_DEVICES= {shlex.join(command)} >/dev/null"
        return ("sh", "-c", f"{text} && sync -f {shlex.quote(str(out))}")

    ours = (sys.executable, "-m", "merge_stream", str(ckpt), str(outs["merge-stream"]), "-q")
    theirs = (str(python), "-m", "verl.model_merger", "merge", "--backend", "fsdp")
    commands = {
        "merge-stream": (*ours, "--dtype", "bf16", "--max-mem", "2G"),
        "verl": (*theirs, "--local_dir", str(ckpt), "--target_dir", str(outs["verl"])),
    }
    contenders = [
        Contender(name, synced(*command, out=outs[name]), functools.partial(_remove, outs[name]))
        for name, command in commands.items()
    ]
    runs = interleave(
        contenders, rounds=rounds, inputs=[ckpt], cold=True, progress=lambda text: print(text, flush=True)
    )
    wrong = differences(digests_of_weights(outs["verl"]), digests_of_weights(outs["merge-stream"]))
    imports = {
        "verl": run(synced(str(python), "-c", "import verl.model_merger.__main__", out=ckpt)).tree,
        "merge-stream": run((sys.executable, "-c", "import merge_stream.api")).tree,
    }
    mine, other = runs["merge-stream"], runs["verl"]
    wall = ratios([r.wall for r in other], [r.wall for r in mine])
    cpu = ratios([r.cpu for r in other], [r.cpu for r in mine])
    memory = Spread.of(
        (b.tree - imports["verl"]) / (a.tree - imports["merge-stream"]) for a, b in zip(mine, other, strict=True)
    )
    lines = [
        f"{title}, {rounds} rounds, values {'**DIFFERENT**: ' + wrong[0] if wrong else 'equal'}\n",
        "| verl / merge-stream | smallest / median / largest | goal |\n|---|---|---|",
        f"| wall | {wall.text()} | 4 |",
        f"| CPU | {cpu.text()} | 5 |",
        f"| memory above import | {memory.text(0)} | 100 |",
        "",
        "; ".join(
            f"{name}: {Spread.of(r.wall for r in rs).text()} s, CPU {Spread.of(r.cpu for r in rs).text()} s, peak "
            f"{max(r.tree for r in rs) / 1e6:.0f} MB (of which imports {imports[name] / 1e6:.0f})"
            for name, rs in runs.items()
        )
        + ".\n",
    ]
    text = "\n".join(lines)
    print(f"\n{text}", flush=True)
    return text


def _remove(folder: pathlib.Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
