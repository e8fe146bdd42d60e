"""Megatron checkpoints of any layout and size from plain tensors, written by torch alone.

    llama(...)           a Llama's tensors under Hugging Face names, every element its own number
    fused(...)           the same under Megatron-core's names: the inverse of what a merge does, written by hand here
    tensor_part(...)     what a tensor-parallel rank holds of one of them
    write_ranks(...)     mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt
    write_dist(...)      a `torch_dist` folder

Nothing here is shared with the code under test. Names, groups and cuts are those of megatron-core 0.9 to 0.19, as in
the real files of tests/data/megatron.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

__all__ = ["Llama", "fused", "interleaved", "llama", "tensor_part", "write_config", "write_dist", "write_ranks"]

Tensors = dict[str, torch.Tensor]
STEP = "iter_0000100"


class Llama:
    """Sizes of a small Llama, and its config."""

    def __init__(self, **sizes: Any) -> None:
        self.layers: int = sizes.pop("layers", 1)
        self.hidden: int = sizes.pop("hidden", 16)
        self.heads: int = sizes.pop("heads", 4)
        self.groups: int = sizes.pop("groups", 2)
        self.width: int = sizes.pop("width", 4)
        self.inner: int = sizes.pop("inner", 8)
        self.vocabulary: int = sizes.pop("vocabulary", 24)
        self.bias: bool = sizes.pop("bias", False)
        self.changes: dict[str, Any] = sizes

    @property
    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen2ForCausalLM" if self.bias else "LlamaForCausalLM"],
            "model_type": "qwen2" if self.bias else "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            "head_dim": self.width,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            **self.changes,
        }


def llama(of: Llama) -> Tensors:
    """Hugging Face names, fp32, the elements numbered through."""
    at = 0

    def made(*shape: int) -> torch.Tensor:
        nonlocal at
        count = int(torch.Size(shape).numel())
        at += count
        return torch.arange(at - count, at, dtype=torch.float32).reshape(shape)

    tensors = {"model.embed_tokens.weight": made(of.vocabulary, of.hidden)}
    for layer in range(of.layers):
        here = f"model.layers.{layer}"
        rows = {"q_proj": of.heads * of.width, "k_proj": of.groups * of.width, "v_proj": of.groups * of.width}
        for name, count in rows.items():
            tensors[f"{here}.self_attn.{name}.weight"] = made(count, of.hidden)
            if of.bias:
                tensors[f"{here}.self_attn.{name}.bias"] = made(count)
        tensors[f"{here}.self_attn.o_proj.weight"] = made(of.hidden, of.heads * of.width)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{here}.mlp.{name}.weight"] = made(of.inner, of.hidden)
        tensors[f"{here}.mlp.down_proj.weight"] = made(of.hidden, of.inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{here}.{name}.weight"] = made(of.hidden)
    return tensors | {"model.norm.weight": made(of.hidden), "lm_head.weight": made(of.vocabulary, of.hidden)}


def interleaved(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int, width: int) -> torch.Tensor:
    """[q q k v] for each group, row by row."""
    share = len(q) // groups
    parts = []
    for group in range(groups):
        parts += [q[group * share : (group + 1) * share]]
        parts += [part[group * width : (group + 1) * width] for part in (k, v)]
    return torch.cat(parts)


def fused(tensors: Mapping[str, torch.Tensor], of: Llama) -> Tensors:
    """The Llama under Megatron's names, layers numbered, norms fused with the linear behind them."""
    made = {
        "embedding.word_embeddings.weight": tensors["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": tensors["model.norm.weight"],
        "output_layer.weight": tensors["lm_head.weight"],
    }
    for layer in range(of.layers):
        there, here = f"model.layers.{layer}", f"decoder.layers.{layer}"
        for leaf in ("weight", "bias") if of.bias else ("weight",):
            q, k, v = (tensors[f"{there}.self_attn.{name}_proj.{leaf}"] for name in "qkv")
            made[f"{here}.self_attention.linear_qkv.{leaf}"] = interleaved(q, k, v, of.groups, of.width)
        made[f"{here}.self_attention.linear_qkv.layer_norm_weight"] = tensors[f"{there}.input_layernorm.weight"]
        made[f"{here}.self_attention.linear_proj.weight"] = tensors[f"{there}.self_attn.o_proj.weight"]
        made[f"{here}.mlp.linear_fc1.layer_norm_weight"] = tensors[f"{there}.post_attention_layernorm.weight"]
        made[f"{here}.mlp.linear_fc1.weight"] = torch.cat(
            [tensors[f"{there}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        )
        made[f"{here}.mlp.linear_fc2.weight"] = tensors[f"{there}.mlp.down_proj.weight"]
    return made


def tensor_part(name: str, tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """What tensor-parallel rank `rank` of `ranks` holds."""
    if "norm" in name or "router" in name or name.endswith(("linear_proj.bias", "linear_fc2.bias")):
        return tensor.clone()
    if re.search(r"linear_fc1\.(weight|bias)\d*$", name):
        gate, up = tensor.chunk(2)
        return torch.cat([gate.chunk(ranks)[rank], up.chunk(ranks)[rank]])
    dim = 1 if re.search(r"(linear_proj\.weight|linear_fc2\.weight\d*)$", name) else 0
    return tensor.chunk(ranks, dim)[rank].clone()


def write_ranks(
    folder: pathlib.Path,
    states: Mapping[Sequence[int], Mapping[str, torch.Tensor] | Sequence[Mapping[str, torch.Tensor]]],
    arguments: Mapping[str, Any],
    config: Mapping[str, Any],
    processes: Mapping[Any, int] | None = None,
) -> pathlib.Path:
    """Keys are (tensor[, pipeline][, expert]) ranks; a state dict each, or one for each virtual stage.

    `processes` are the numbers (`args.rank`) of those that wrote them.
    """
    for at, state in states.items():
        name = "_".join(f"{number:02d}" if k == 0 else f"{number:03d}" for k, number in enumerate(at))
        place = folder / "ckpt" / STEP / f"mp_rank_{name}"
        place.mkdir(parents=True)
        models = {"model": dict(state)} if isinstance(state, Mapping) else {}
        if not isinstance(state, Mapping):
            models = {f"model{k}": dict(one) for k, one in enumerate(state)}
        own = {} if processes is None else {"rank": processes[at]}
        root = {"args": argparse.Namespace(**arguments, **own), "checkpoint_version": 3.0, "iteration": 100, **models}
        torch.save(root, place / "model_optim_rng.pt")
    (folder / "ckpt" / "latest_checkpointed_iteration.txt").write_text("100")
    write_config(folder, config)
    return folder


def write_dist(
    folder: pathlib.Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    arguments: Mapping[str, Any] | None = None,
    *,
    metadata: bool = True,
    common: Mapping[str, Any] | None = None,
) -> pathlib.Path:
    """One process writes all of `tensors` as a DCP folder.

    `arguments` go to common.pt (up to core 0.18), those of `common` to the common state (0.19).
    """
    place = folder / "ckpt" / STEP
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group is there
        state: dict[str, Any] = {name: tensor.contiguous() for name, tensor in tensors.items()}
        if common is not None:
            state["common_state/shard_0_1"] = [{"args": argparse.Namespace(**common), "iteration": 100}]
        planner = DefaultSavePlanner(flatten_state_dict=False)
        dcp.save(state, checkpoint_id=str(place), no_dist=True, planner=planner)
    if metadata:
        (place / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    if arguments is not None:
        torch.save({"args": argparse.Namespace(**arguments), "iteration": 100}, place / "common.pt")
    (folder / "ckpt" / "latest_checkpointed_iteration.txt").write_text("100")
    write_config(folder, config)
    return folder


def write_config(folder: pathlib.Path, config: Mapping[str, Any]) -> None:
    (folder / "hf").mkdir(exist_ok=True, parents=True)
    (folder / "hf" / "config.json").write_text(json.dumps(dict(config)))
