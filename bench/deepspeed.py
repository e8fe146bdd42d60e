"""merge-stream beside DeepSpeed's own `zero_to_fp32`, plain and lazy, on the same ZeRO-2 and ZeRO-3 checkpoints.

    python -m bench.deepspeed [--deepspeed FOLDER] [--parameters 300e6] [--ranks 8] [--rounds 3] [--work FOLDER]
                              [--page docs/performance.md]

DeepSpeed is installed into the scratch folder (without its dependencies that are here, and without compiled
operators), or FOLDER holds it already; the project itself does not need it. The checkpoints have Adam's moments and
16-bit weights, as real ones do (`tests/makers/zero_files.py`). Runs are interleaved and cold, each ends with `sync`;
the outputs are compared byte for byte. "Above import" subtracts the peak of a process that only imports DeepSpeed, or
merge-stream. The page gets the tables between markers.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile

from bench.measure import Contender, Spread, drop, interleave, ratios, run
from bench.tables import replace_between_markers

__all__ = ["main"]

_PLAIN = """
import sys
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import save_file
import os
state = get_fp32_state_dict_from_zero_checkpoint(sys.argv[1])
os.makedirs(sys.argv[2])
save_file({name: tensor.contiguous() for name, tensor in state.items()}, sys.argv[2] + "/model.safetensors")
"""
_LAZY = """
import sys
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
convert_zero_checkpoint_to_fp32_state_dict(sys.argv[1], sys.argv[2], safe_serialization=True, max_shard_size="5GB")
"""
_IMPORT = "import deepspeed.utils.zero_to_fp32, safetensors.torch"
_ROWS = 4096
_PACKAGES = (
    "deepspeed==0.19.8", "hjson", "py-cpuinfo", "msgpack", "einops", "pydantic", "pydantic-core", "annotated-types",
    "typing-inspection", "typing-extensions", "tqdm", "packaging", "ninja",
)  # fmt: skip


def main() -> None:
    """Print a table for each stage, and put all into the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--deepspeed", type=pathlib.Path)
    parser.add_argument("--parameters", type=float, default=300e6)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=pathlib.Path)
    parser.add_argument("--page", type=pathlib.Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ms_bench_ds_", dir=given.work) as scratch:
        deepspeed = given.deepspeed or _installed(pathlib.Path(scratch, "deepspeed"))
        tables = []
        for stage in (2, 3):
            place = pathlib.Path(scratch, f"zero{stage}")
            _in_another_process(place, stage, given.parameters, given.ranks)
            tables.append(_compare(place, deepspeed, given.rounds, f"ZeRO-{stage}, {given.ranks} ranks"))
            shutil.rmtree(place)
        if given.page:
            replace_between_markers(given.page, "\n".join(tables), writer="bench.deepspeed")


def _installed(folder: pathlib.Path) -> pathlib.Path:
    """DeepSpeed in a folder of its own: beside torch and numpy of this environment, which it takes."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(folder),
    ]
    subprocess.run([*command, *_PACKAGES], check=True, env={**os.environ, "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"})
    return folder


def make(folder: str, stage: int, parameters: float, ranks: int) -> None:
    """Write the checkpoint."""
    import torch

    from tests.makers.zero_files import ZeroRun, write_zero

    count = max(int(parameters / (_ROWS * 1024)), 1)
    torch.manual_seed(0)
    weights = {f"model.layers.{k}.weight": torch.randn(_ROWS, 1024) for k in range(count)}
    weights |= {f"model.layers.{k}.norm": torch.randn(1023) for k in range(count)}
    write_zero(pathlib.Path(folder), ZeroRun([weights], stage=stage, ranks=ranks))


def _in_another_process(folder: pathlib.Path, stage: int, parameters: float, ranks: int) -> None:
    code = f"from bench.deepspeed import make; make({str(folder)!r}, {stage}, {parameters}, {ranks})"
    run([sys.executable, "-c", code])


def _compare(ckpt: pathlib.Path, deepspeed: pathlib.Path, rounds: int, title: str) -> str:
    outs = {name: ckpt.parent / f"out_{name.replace(' ', '_')}" for name in ("merge-stream", "plain", "lazy")}

    where = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(deepspeed)]))

    def synced(*command: str, out: pathlib.Path) -> tuple[str, ...]:
        path = f"DS_ACCELERATOR=cpu PYTHONPATH={shlex.quote(where)}"
        return ("sh", "-c", f"{path} {shlex.join(command)} >/dev/null && sync -f {shlex.quote(str(out))}")

    ours = [sys.executable, "-m", "merge_stream", str(ckpt), str(outs["merge-stream"]), "-q", "--no-config"]
    ours += ["--layout", "as-is", "--max-mem", "2G"]
    commands = {
        "merge-stream": ours,
        "plain": [sys.executable, "-c", _PLAIN, str(ckpt), str(outs["plain"])],
        "lazy": [sys.executable, "-c", _LAZY, str(ckpt), str(outs["lazy"])],
    }
    contenders = [
        Contender(name, synced(*command, out=outs[name]), functools.partial(_remove, outs[name]))
        for name, command in commands.items()
    ]
    nbytes = sum(path.stat().st_size for path in ckpt.rglob("*") if path.is_file())
    drop([ckpt])
    runs = interleave(
        contenders, rounds=rounds, inputs=[ckpt], cold=True, progress=lambda text: print(text, flush=True)
    )
    same = _same(outs["merge-stream"], outs["plain"]) and _same(outs["merge-stream"], outs["lazy"])
    imports = run(list(synced(sys.executable, "-c", _IMPORT, out=ckpt))).tree
    ours_import = run([sys.executable, "-c", "import merge_stream.api"]).tree
    lines = [
        f"{title}: {nbytes / 1e9:.2f} GB of files, {rounds} rounds, outputs {'equal' if same else '**DIFFERENT**'}\n",
        "| merge-stream / zero_to_fp32 | wall | CPU | memory above import |\n|---|---|---|---|",
    ]
    mine = runs["merge-stream"]
    for name in ("plain", "lazy"):
        other = runs[name]
        wall = ratios([r.wall for r in mine], [r.wall for r in other])
        cpu = ratios([r.cpu for r in mine], [r.cpu for r in other])
        memory = Spread.of((a.tree - ours_import) / (b.tree - imports) for a, b in zip(mine, other, strict=True))
        lines.append(f"| {name} | {wall.text()} | {cpu.text()} | {memory.text(3)} |")
    lines.append(
        f"\nPeaks: {', '.join(f'{name} {max(r.tree for r in rs) / 1e6:.0f} MB' for name, rs in runs.items())}.\n"
    )
    text = "\n".join(lines)
    print(f"\n{text}", flush=True)
    return text


def _remove(folder: pathlib.Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _same(one: pathlib.Path, other: pathlib.Path) -> bool:
    from safetensors.numpy import load_file

    def tensors(folder: pathlib.Path) -> dict[str, bytes]:
        return {n: a.tobytes() for p in sorted(folder.glob("*.safetensors")) for n, a in load_file(p).items()}

    return tensors(one) == tensors(other)


if __name__ == "__main__":
    main()
