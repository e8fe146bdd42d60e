"""A `torch_dist` checkpoint of a Qwen3-MoE of any size, experts in stacks [layers, experts, rows, columns].

Keys, shapes and axes are those of megatron-core 0.19 (tests/data/megatron/td_qwen3moe_grouped_tp2_ep2); torch's own
DCP writes it.
"""

from __future__ import annotations

import json
import pathlib
import warnings
from dataclasses import dataclass

import torch
import torch.distributed.checkpoint as dcp

__all__ = ["Sizes", "write_stacks"]


@dataclass(frozen=True)
class Sizes:
    """Eight heads and four groups of 16; the rest as told."""

    layers: int
    experts: int
    inner: int
    hidden: int

    @property
    def largest_nbytes(self) -> int:
        """Of the stack of gate and up."""
        return self.layers * self.experts * 2 * self.inner * self.hidden * 2


def write_stacks(folder: pathlib.Path, sizes: Sizes) -> dict[str, torch.Tensor]:
    """Write `folder`/ckpt and `folder`/hf; returns the tensors by Megatron's names."""
    shapes = {
        "embedding.word_embeddings.weight": (256, sizes.hidden),
        "output_layer.weight": (256, sizes.hidden),
        "decoder.final_layernorm.weight": (sizes.hidden,),
    }
    layer = {
        "self_attention.linear_proj.weight": (sizes.hidden, 128),
        "self_attention.linear_qkv.weight": (256, sizes.hidden),
        "self_attention.linear_qkv.layer_norm_weight": (sizes.hidden,),
        "self_attention.q_layernorm.weight": (16,),
        "self_attention.k_layernorm.weight": (16,),
        "pre_mlp_layernorm.weight": (sizes.hidden,),
        "mlp.router.weight": (sizes.experts, sizes.hidden),
        "mlp.experts.experts.linear_fc1.weight": (sizes.experts, 2 * sizes.inner, sizes.hidden),
        "mlp.experts.experts.linear_fc2.weight": (sizes.experts, sizes.hidden, sizes.inner),
    }
    shapes |= {f"decoder.layers.{name}": (sizes.layers, *shape) for name, shape in layer.items()}
    torch.manual_seed(0)
    tensors = {name: torch.empty(shape, dtype=torch.bfloat16).uniform_() for name, shape in shapes.items()}
    place = folder / "ckpt" / "iter_0000100"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group is there
        dcp.save(dict(tensors), checkpoint_id=str(place), no_dist=True)
    (place / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (folder / "ckpt" / "latest_checkpointed_iteration.txt").write_text("100")
    (folder / "hf").mkdir()
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "hidden_size": sizes.hidden,
        "moe_intermediate_size": sizes.inner,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": sizes.layers,
        "num_experts": sizes.experts,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 256,
    }
    (folder / "hf" / "config.json").write_text(json.dumps(config))
    return tensors
