"""Names and shapes of the models that the benches use, in the sizes of real families.

A shape is data: the parameters in the order of the model's state dict, and the config.json that goes with
them. `scale` changes the number of layers and the vocabulary (or the size of the one tensor, or the number of
small ones), never the width, so that a small checkpoint has the same kind of shards as a large one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

__all__ = ["PLANNED", "SHAPES", "Model", "model_of", "planned_model"]

ONE_TENSOR_BYTES = 4_000_000_000
SMALL_TENSORS = 20_000


@dataclass(frozen=True, slots=True)
class Model:
    """Parameters in state dict order, names that share the storage of another, and the config.json."""

    parameters: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]
    config: Mapping[str, object]

    @property
    def elements(self) -> int:
        """Elements of all parameters; tied ones count once."""
        return sum(_product(shape) for name, shape in self.parameters.items() if name not in self.tied)


@dataclass(frozen=True, slots=True)
class _Decoder:
    """The sizes of a decoder-only transformer."""

    model_type: str
    architecture: str
    hidden: int
    layers: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    tied: bool = False
    bias: bool = False
    head_norms: bool = False
    experts: int = 0
    fused: bool = False

    def scaled(self, scale: float) -> _Decoder:
        layers = max(1, round(self.layers * scale))
        vocab = max(256, round(self.vocab * scale / 64) * 64) if scale != 1 else self.vocab
        return replace(self, layers=layers, vocab=vocab)

    def parameters(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        h, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, h)
        for i in range(self.layers):
            p = f"model.layers.{i}."
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                yield f"{p}self_attn.{name}_proj.weight", (rows, h)
                if self.bias:
                    yield f"{p}self_attn.{name}_proj.bias", (rows,)
            yield f"{p}self_attn.o_proj.weight", (h, q)
            if self.head_norms:
                yield f"{p}self_attn.q_norm.weight", (self.head_dim,)
                yield f"{p}self_attn.k_norm.weight", (self.head_dim,)
            if self.experts:
                yield f"{p}mlp.gate.weight", (self.experts, h)
                if self.fused:
                    yield f"{p}mlp.experts.gate_up_proj", (self.experts, 2 * self.intermediate, h)
                    yield f"{p}mlp.experts.down_proj", (self.experts, h, self.intermediate)
                for e in range(0 if self.fused else self.experts):
                    yield from self._mlp(f"{p}mlp.experts.{e}.")
            else:
                yield from self._mlp(f"{p}mlp.")
            yield f"{p}input_layernorm.weight", (h,)
            yield f"{p}post_attention_layernorm.weight", (h,)
        yield "model.norm.weight", (h,)
        yield "lm_head.weight", (self.vocab, h)

    def _mlp(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{prefix}gate_proj.weight", (self.intermediate, self.hidden)
        yield f"{prefix}up_proj.weight", (self.intermediate, self.hidden)
        yield f"{prefix}down_proj.weight", (self.hidden, self.intermediate)

    def model(self) -> Model:
        config: dict[str, object] = {
            "architectures": [self.architecture],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": 4096,
            "model_type": self.model_type,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0,
            "tie_word_embeddings": self.tied,
            "vocab_size": self.vocab,
        }
        if self.experts:
            config |= {
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "moe_intermediate_size": self.intermediate,
                "norm_topk_prob": True,
                "num_experts": self.experts,
                "num_experts_per_tok": 8,
            }
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if self.tied else {}
        return Model(dict(self.parameters()), tied, config)


_LLAMA = ("llama", "LlamaForCausalLM")
_DECODERS = {
    # Llama-3.2-1B: 1.24 billion parameters, 4.9 GB in fp32.
    "llama-1b": _Decoder(*_LLAMA, 2048, 16, 128_256, 32, 8, 64, 8192, tied=True),
    # 0.9 billion parameters, 3.6 GB in fp32: the size of the first measurements.
    "llama-3.6gb": _Decoder(*_LLAMA, 2048, 17, 32_000, 32, 8, 64, 5632),
    # Qwen2.5-0.5B: 14 heads, biases, tied, a vocabulary that is a third of the model.
    "qwen": _Decoder("qwen2", "Qwen2ForCausalLM", 896, 24, 151_936, 14, 2, 64, 4864, tied=True, bias=True),
    # Qwen3-MoE with each expert under its own name: 1600 small matrices, 0.9 billion parameters.
    "moe": _Decoder("qwen3_moe", "Qwen3MoeForCausalLM", 1024, 16, 32_000, 16, 4, 64, 512, head_norms=True, experts=32),
    # For tests: sizes that 2 and 4 divide, and sizes that they don't.
    "tiny": _Decoder(*_LLAMA, 64, 2, 512, 4, 2, 16, 128),
    "tiny-odd": _Decoder(*_LLAMA, 33, 2, 131, 3, 1, 9, 67),
    "tiny-moe": _Decoder("qwen3_moe", "Qwen3MoeForCausalLM", 64, 2, 512, 4, 2, 16, 32, head_norms=True, experts=4),
}
SHAPES = (*_DECODERS, "one-tensor", "many-small")
# Never filled with values: only planned (`bench.planning`).
_PLANNED = {
    # Llama-3.1-405B: 1138 parameters.
    "llama-405b": _Decoder(*_LLAMA, 16384, 126, 128_256, 128, 8, 128, 53248),
    # 1.0 trillion parameters, experts fused per layer as transformers 5 holds them: 1.0 TB in 8 bits, 2.1 in bf16.
    "moe-1t": _Decoder(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        7168,
        61,
        163_840,
        64,
        8,
        128,
        2048,
        head_norms=True,
        experts=384,
        fused=True,
    ),
}
PLANNED = (*_PLANNED, "deepseek-v3")


def planned_model(shape: str, *, layers: int | None = None) -> Model:
    """A model of which only names and shapes are needed; `layers` instead of its own number of them."""
    if shape == "deepseek-v3":
        return _deepseek_v3(layers or 61)
    decoder = _PLANNED[shape]
    return (replace(decoder, layers=layers) if layers else decoder).model()


def _deepseek_v3(layers: int) -> Model:
    """DeepSeek-V3 (671B): latent attention, 3 dense layers, then 256 experts under their own names."""
    h, vocab, heads, inner, dense = 7168, 129_280, 128, 2048, 3
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, h)}

    def mlp(prefix: str, width: int) -> None:
        shapes[f"{prefix}gate_proj.weight"] = (width, h)
        shapes[f"{prefix}up_proj.weight"] = (width, h)
        shapes[f"{prefix}down_proj.weight"] = (h, width)

    for i in range(layers):
        p = f"model.layers.{i}."
        shapes[f"{p}self_attn.q_a_proj.weight"] = (1536, h)
        shapes[f"{p}self_attn.q_a_layernorm.weight"] = (1536,)
        shapes[f"{p}self_attn.q_b_proj.weight"] = (heads * 192, 1536)
        shapes[f"{p}self_attn.kv_a_proj_with_mqa.weight"] = (576, h)
        shapes[f"{p}self_attn.kv_a_layernorm.weight"] = (512,)
        shapes[f"{p}self_attn.kv_b_proj.weight"] = (heads * 256, 512)
        shapes[f"{p}self_attn.o_proj.weight"] = (h, heads * 128)
        if i < dense:
            mlp(f"{p}mlp.", 18_432)
        else:
            shapes[f"{p}mlp.gate.weight"] = (256, h)
            shapes[f"{p}mlp.gate.e_score_correction_bias"] = (256,)
            for e in range(256):
                mlp(f"{p}mlp.experts.{e}.", inner)
            mlp(f"{p}mlp.shared_experts.", inner)
        shapes[f"{p}input_layernorm.weight"] = shapes[f"{p}post_attention_layernorm.weight"] = (h,)
    shapes["model.norm.weight"] = (h,)
    shapes["lm_head.weight"] = (vocab, h)
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": h,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "intermediate_size": 18_432,
        "moe_intermediate_size": inner,
        "first_k_dense_replace": dense,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
    }
    return Model(shapes, {}, config)


def model_of(shape: str, *, scale: float, itemsize: int) -> Model:
    """The parameters and the config of `shape`; `itemsize` matters where the shape is told in bytes."""
    if shape in _DECODERS:
        decoder = _DECODERS[shape]
        return (decoder if scale == 1 else decoder.scaled(scale)).model()
    config = _DECODERS["tiny"].model().config
    if shape == "one-tensor":
        width = 4096
        rows = max(1, round(ONE_TENSOR_BYTES * scale / itemsize / width))
        sizes = {"hidden_size": width, "vocab_size": rows, "num_hidden_layers": 0}
        return Model({"model.embed_tokens.weight": (rows, width)}, {}, {**config, **sizes})
    if shape == "many-small":  # of 9 tensors of a layer 7 have 16 x 16 elements: 1 KB in fp32
        layers = max(1, round(SMALL_TENSORS * scale / 9))
        return _Decoder(*_LLAMA, 16, layers, 256, 1, 1, 16, 16).model()
    msg = f"no shape {shape!r}; there are {', '.join(SHAPES)}"
    raise ValueError(msg)


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
