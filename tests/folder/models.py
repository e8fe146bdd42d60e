"""Small checkpoints and model folders for the tests of what stands around the weights."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from merge_stream import cli

__all__ = [
    "checkpoint",
    "config_of",
    "llama",
    "llama_config",
    "merge",
    "model_folder",
    "parts_of",
    "run_tool",
    "tensors_of",
]

Tensors = dict[str, torch.Tensor]


def llama(
    layers: int = 1,
    *,
    vocab: int = 16,
    hidden: int = 8,
    head: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Tensors:
    """The tensors of a tiny Llama."""
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    tensors = {"model.embed_tokens.weight": made(vocab, hidden), "model.norm.weight": made(hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{at}self_attn.{name}.weight"] = made(hidden, hidden)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{at}mlp.{name}.weight"] = made(2 * hidden, hidden)
        tensors[f"{at}mlp.down_proj.weight"] = made(hidden, 2 * hidden)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = made(hidden)
    if head:
        tensors["lm_head.weight"] = made(vocab, hidden)
    return tensors


def parts_of(golden: str, pattern: str) -> Tensors:
    """Tensors of ones for the names in a golden's state dict that match, for what a model must have besides."""
    text = (Path(__file__).parents[1] / "families" / "goldens" / f"{golden}.json").read_text()
    sources: dict[str, list[int]] = json.loads(text)["sources"]
    return {name: torch.ones(shape).bfloat16() for name, shape in sources.items() if re.match(pattern, name)}


def llama_config(**changes: Any) -> dict[str, Any]:
    """config.json of `llama()`; None takes a key out."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 16,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return config | changes


def checkpoint(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
) -> Path:
    """A folder of verl with one rank: the whole model in one file, config and side files in `huggingface/`."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({name: value.clone() for name, value in tensors.items()}, folder / "model_world_size_1_rank_0.pt")
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 1}))
    _beside(folder / "huggingface", config, files)
    return folder


def model_folder(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
) -> Path:
    """A Hugging Face folder with one weight file."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.clone() for name, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    _beside(folder, config, files)
    return folder


def _beside(folder: Path, config: Mapping[str, Any] | None, files: Mapping[str, str] | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
    for name, text in (files or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def merge(source: Path, out: Path, *options: str) -> int:
    """Run a merge in this process; its exit code."""
    return cli.run(["merge", str(source), str(out), "--max-mem", "6G", *options])


def run_tool(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The tool in a process of its own."""
    import os

    return subprocess.run(
        [sys.executable, "-m", "merge_stream", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **env},
    )


def tensors_of(folder: Path) -> Tensors:
    """All tensors of a model folder."""
    found: Tensors = {}
    for file in sorted(folder.glob("model*.safetensors")):
        found |= load_file(file)
    return found


def config_of(folder: Path) -> dict[str, Any]:
    """Its config."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config
