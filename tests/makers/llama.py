"""A llama-shaped model in plain torch, with Hugging Face names and a config.json to match.

Small enough to be trained for one step on a CPU; `odd=True` picks sizes that no world size divides,
so that shards are uneven and some are empty. Not a language model: attention has no rotary embedding.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Llama", "LlamaShape", "write_side_files"]


@dataclasses.dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes of a model."""

    layers: int = 2
    vocab: int = 128
    hidden: int = 32
    intermediate: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    head: Literal["lm", "tied", "value"] = "lm"

    @classmethod
    def of(cls, *, odd: bool, head: Literal["lm", "tied", "value"], layers: int) -> LlamaShape:
        """Sizes that 2 and 4 divide, or sizes that they don't: 9 rows over 4 ranks leave the last one empty."""
        even = cls(layers=layers, head=head)
        odd_sizes = {"vocab": 131, "hidden": 33, "intermediate": 67, "heads": 3, "kv_heads": 1, "head_dim": 9}
        return dataclasses.replace(even, **odd_sizes) if odd else even

    def config(self, dtype: torch.dtype) -> dict[str, Any]:
        """The content of config.json."""
        return {
            "architectures": ["LlamaForTokenClassification" if self.head == "value" else "LlamaForCausalLM"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": 128,
            "model_type": "llama",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0,
            "tie_word_embeddings": self.head == "tied",
            "torch_dtype": str(dtype).removeprefix("torch."),
            "vocab_size": self.vocab,
            **({"num_labels": 1} if self.head == "value" else {}),
        }


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size).uniform_(0.5, 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), 1e-6)


class Attention(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden)
        self.post_attention_layernorm = RMSNorm(shape.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden)


class Llama(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.model = Backbone(shape)
        if shape.head == "value":
            self.score = nn.Linear(shape.hidden, 1)
        else:
            self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
            if shape.head == "tied":
                self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        head = self.score if hasattr(self, "score") else self.lm_head
        return head(self.model.norm(x))


def write_side_files(folder: pathlib.Path, shape: LlamaShape, dtype: torch.dtype) -> None:
    """config.json, generation_config.json and a tokenizer stub, as they lie beside a model."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "model": {"type": "BPE"}}
    for name, content in (
        ("config.json", shape.config(dtype)),
        ("generation_config.json", {"bos_token_id": 1, "eos_token_id": 2}),
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
