"""DeepSpeed's `zero_to_fp32`, plain (one dict of all tensors) and lazy (tensors gathered while a file is written).

The checkpoints have Adam's moments and 16-bit weights, as real ones do (`tests/makers/zero_files.py`). DeepSpeed is
installed without compiled operators.
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
from collections.abc import Generator

from bench.peers.race import CHECKPOINT, OUT, Peer, Race, Size

__all__ = ["PEER", "make"]

_PLAIN = """
import os, sys
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import save_file
state = get_fp32_state_dict_from_zero_checkpoint(sys.argv[1])
os.makedirs(sys.argv[2])
save_file({name: tensor.contiguous() for name, tensor in state.items()}, sys.argv[2] + "/model.safetensors")
"""
_LAZY = """
import sys
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
convert_zero_checkpoint_to_fp32_state_dict(sys.argv[1], sys.argv[2], safe_serialization=True, max_shard_size="5GB")
"""
_NEEDS = (
    "hjson",
    "py-cpuinfo",
    "msgpack",
    "einops",
    "pydantic",
    "tqdm",
    "packaging",
    "psutil",
    "numpy",
    "safetensors",
    "huggingface_hub",
)
_ROWS = 4096
_RANKS = 8


def make(folder: str, stage: int, parameters: int) -> None:
    """Write the checkpoint; in a process of its own, since it holds all of it."""
    import torch

    from tests.makers.zero_files import ZeroRun, write_zero

    count = max(parameters // (_ROWS * 1024), 1)
    torch.manual_seed(0)
    weights = {f"model.layers.{k}.weight": torch.randn(_ROWS, 1024) for k in range(count)}
    weights |= {f"model.layers.{k}.norm": torch.randn(1023) for k in range(count)}
    write_zero(pathlib.Path(folder), ZeroRun([weights], stage=stage, ranks=_RANKS))


def _races(folder: pathlib.Path, size: Size) -> Generator[Race]:
    for stage in (2, 3):
        ckpt = folder / f"zero{stage}"
        parameters = 0 if size == "small" else 300_000_000
        code = f"from bench.peers.zero_to_fp32 import make; make({str(ckpt)!r}, {stage}, {parameters})"
        subprocess.run([sys.executable, "-c", code], check=True)
        yield Race(
            f"ZeRO-{stage}, {_RANKS} ranks, to fp32",
            ckpt,
            ("--no-config", "--layout", "as-is", "--max-mem", "2G"),
            {
                "zero_to_fp32": ("python", "-c", _PLAIN, CHECKPOINT, OUT),
                "zero_to_fp32, lazy": ("python", "-c", _LAZY, CHECKPOINT, OUT),
            },
        )
        shutil.rmtree(ckpt)


PEER = Peer(
    "deepspeed",
    (_NEEDS, ("--no-deps", "--no-build-isolation", "deepspeed==0.19.8")),
    "import deepspeed.utils.zero_to_fp32, safetensors.torch",
    _races,
    {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"},
)
