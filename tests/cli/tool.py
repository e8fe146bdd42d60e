"""Start the tool as a user does, and look at what it says and leaves."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["CONFIG", "LLAMA", "Ended", "as_mere_mortal", "listing", "tool"]

SECONDS = 60
HIDDEN, HEADS, HEAD, WIDE, VOCAB, LAYERS = 16, 2, 8, 24, 40, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "head_dim": HEAD,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": VOCAB,
}


def _llama() -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": (HEAD, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": (HEAD, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
            f"{prefix}mlp.gate_proj.weight": (WIDE, HIDDEN),
            f"{prefix}mlp.up_proj.weight": (WIDE, HIDDEN),
            f"{prefix}mlp.down_proj.weight": (HIDDEN, WIDE),
            f"{prefix}input_layernorm.weight": (HIDDEN,),
            f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
        }
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


LLAMA = _llama()


@dataclasses.dataclass(frozen=True)
class Ended:
    """A run of the tool."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Stdout, which must be exactly one JSON object."""
        answer = json.loads(self.out)
        assert isinstance(answer, dict)
        return answer

    def refused(self, code: int, *parts: str) -> Ended:
        """Ended with `code` and one error with a hint; all `parts` are in it."""
        assert self.code == code, self
        assert "Traceback" not in self.err, self.err
        assert self.err.count("error: ") == 1, self.err
        told = self.err[self.err.index("error: ") :]
        assert "\nhint: " in told, told
        for part in parts:
            assert part in told, (part, told)
        return self


def tool(
    *words: str | os.PathLike[str],
    env: Mapping[str, str] | None = None,
    cwd: pathlib.Path | None = None,
    before: Sequence[str] = (),
) -> Ended:
    """`merge-stream words`; `before` is a command that starts it."""
    command = [*before, sys.executable, "-m", "merge_stream", *map(os.fspath, words)]
    ended = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        text=True,
        timeout=SECONDS,
        cwd=cwd,
        env={**os.environ, **(env or {})},
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def as_mere_mortal() -> list[str]:
    """Start of a command that obeys file modes: root without the capability to ignore them, others as they are."""
    if os.geteuid():
        return []
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]


def listing(folder: pathlib.Path) -> list[str]:
    """Everything below a folder."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))
