"""What a merge may do besides moving bytes, in CPU seconds for each GB: checksums, and folding a LoRA.

    python -m bench.costs [--rounds 3] [--work FOLDER]

Checksums: of 512 MB in memory, in pieces of 4 MiB, as the engine takes them. LoRA: four matrices of 4096 x 14336 in
bf16 (0.47 GB) with an adapter, `--lora merge` less `--lora keep`, in whole processes and in turn. Each number is the
smallest / median / largest of the rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import xxhash

from bench import measure
from bench.measure import Spread
from merge_stream.engine.journal import crc32c

__all__: list[str] = []

_PIECE, _PIECES = 4 << 20, 128
_LAYERS, _ROWS, _COLUMNS = 4, 4096, 14336


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.costs", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=pathlib.Path, help="folder on a disk with 2 GB; default: a temporary one")
    given = parser.parse_args()
    print("| what | CPU s for each GB |\n|---|---|")
    for name, seconds in _checksums(given.rounds):
        print(f"| {name} | {seconds.text(3)} |", flush=True)
    with tempfile.TemporaryDirectory(prefix="ms_bench_", dir=given.work) as folder:
        for rank, dora in ((16, False), (64, False), (256, False), (16, True)):
            seconds = _folding(pathlib.Path(folder), rank, given.rounds, dora=dora)
            print(f"| LoRA r {rank}{', DoRA' if dora else ''} | {seconds.text(1)} |", flush=True)
    return 0


def _checksums(rounds: int) -> Iterator[tuple[str, Spread]]:
    data = np.random.default_rng(1).bytes(_PIECE)
    ways: dict[str, Callable[[], object]] = {
        "CRC-32C (every merge)": lambda: crc32c(memoryview(data)),
        "xxh3 (every merge)": lambda: xxhash.xxh3_64_digest(data),
        "CRC-32 (`--check-crc`)": lambda: zlib.crc32(data),
        "SHA-256 (`--sha256`)": lambda: hashlib.sha256(data).digest(),
    }
    for name, way in ways.items():
        taken = []
        for _ in range(rounds):
            began = time.process_time()
            for _ in range(_PIECES):
                way()
            taken.append((time.process_time() - began) / (_PIECE * _PIECES / 1e9))
        yield name, Spread.of(taken)


def _folding(work: pathlib.Path, rank: int, rounds: int, *, dora: bool) -> Spread:
    import torch
    from safetensors.torch import save_file

    ckpt, out = work / f"ckpt{rank}{dora}", work / "out"
    ckpt.mkdir()
    tensors = {}
    for k in range(_LAYERS):
        layer = f"base_model.model.model.layers.{k}.mlp.down_proj."
        tensors[f"{layer}base_layer.weight"] = torch.randn(_ROWS, _COLUMNS, dtype=torch.bfloat16)
        tensors[f"{layer}lora_A.default.weight"] = torch.randn(rank, _COLUMNS)
        tensors[f"{layer}lora_B.default.weight"] = torch.randn(_ROWS, rank)
        if dora:
            tensors[f"{layer}lora_magnitude_vector.default.weight"] = torch.ones(_ROWS)
    save_file(tensors, ckpt / "model.safetensors")
    (ckpt / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": 16, "use_dora": dora}))
    words = ("merge", str(ckpt), str(out), "--no-config", "--layout", "as-is", "--overwrite", "-q", "--lora")
    taken = []
    for _ in range(rounds):
        fold, keep = (measure.run([sys.executable, "-m", "merge_stream", *words, how]).cpu for how in ("merge", "keep"))
        taken.append((fold - keep) / (2 * _LAYERS * _ROWS * _COLUMNS / 1e9))
    return Spread.of(taken)


if __name__ == "__main__":
    raise SystemExit(main())
