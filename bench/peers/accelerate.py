"""`accelerate merge-weights` on the sharded state dict of FSDP as accelerate saves it: a DCP folder of 8 ranks.

It loads all of it through torch's `_load_state_dict` (as `dcp_to_torch_save` does) and writes one safetensors file.
"""

from __future__ import annotations

import pathlib
from collections.abc import Generator

from bench.peers.race import CHECKPOINT, OUT, Peer, Race, Size
from merge_stream.benchmark.synthetic import make_checkpoint

__all__ = ["PEER"]


def _races(folder: pathlib.Path, size: Size) -> Generator[Race]:
    ckpt = folder / "pytorch_model_fsdp_0"
    make_checkpoint(ckpt, shape="tiny" if size == "small" else "llama-3.6gb", ranks=8, layout="dcp", root="model")
    yield Race(
        "DCP as accelerate saves FSDP, 8 ranks, fp32 kept",
        ckpt,
        ("--base-model", str(ckpt / "huggingface"), "--max-mem", "2G"),
        {"accelerate merge-weights": ("accelerate", "merge-weights", CHECKPOINT, OUT)},
    )


PEER = Peer(
    "accelerate",
    (("accelerate==1.15.0", "safetensors"),),
    "import accelerate.commands.merge, torch.distributed.checkpoint.format_utils, safetensors.torch",
    _races,
)
