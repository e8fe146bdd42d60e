"""verl's `verl.model_merger` on an FSDP2 checkpoint of 8 ranks.

verl writes bf16, so we do too. It is installed without what only training needs (vLLM, flash-attn and their like).
"""

from __future__ import annotations

import pathlib
from collections.abc import Generator

from bench.peers.race import CHECKPOINT, OUT, Peer, Race, Size
from merge_stream.benchmark.synthetic import make_checkpoint

__all__ = ["PEER"]

_NEEDS = (
    "transformers>=5.5", "accelerate", "peft", "tensordict", "ray", "omegaconf", "hydra-core", "datasets", "codetiming",
)  # fmt: skip
# verl loads the tokenizer of the model and saves it again
_TOKENIZER = (
    '{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null, '
    '"pre_tokenizer": null, "post_processor": null, "decoder": null, '
    '"model": {"type": "WordLevel", "vocab": {"<unk>": 0}, "unk_token": "<unk>"}}'
)


def _races(folder: pathlib.Path, size: Size) -> Generator[Race]:
    ckpt = folder / "ckpt"
    make_checkpoint(ckpt, shape="tiny" if size == "small" else "llama-3.6gb", ranks=8, layout="fsdp2")
    side = ckpt / "huggingface"
    (side / "tokenizer.json").write_text(_TOKENIZER)
    (side / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    words = ("-m", "verl.model_merger", "merge", "--backend", "fsdp", "--local_dir", CHECKPOINT, "--target_dir", OUT)
    yield Race(
        "FSDP2, 8 ranks, fp32 to bf16",
        ckpt,
        ("--dtype", "bf16", "--max-mem", "2G"),
        {"verl.model_merger": ("python", *words)},
    )


PEER = Peer("verl", (("--no-deps", "verl==0.9.1"), _NEEDS), "import verl.model_merger.__main__", _races)
