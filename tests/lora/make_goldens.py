"""Remake the goldens of LoRA: what peft's `merge_and_unload` gives on a CPU, beside the state dict it started from.

    PYTHONPATH=/tmp/tf5:/tmp/peft_oracle:. .venv/bin/python -m tests.lora.make_goldens [NAME ...]

with peft 0.21.2, accelerate, transformers 5.24.0 in front of the path (torch comes from .venv). Each golden is
one safetensors file: `state/NAME` is the trainer's full state dict, `merged/NAME` the truth,
`adapter/NAME` what `save_pretrained` writes; the metadata holds adapter_config.json, the
model's config.json and the adapter's name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import sys
import tempfile
import warnings
from typing import Any

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

HERE = pathlib.Path(__file__).resolve().parents[1] / "data" / "lora"
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, the adapter's settings, the element types of both."""

    model: str
    base: str
    adapter: str
    settings: dict[str, Any]
    name: str = "default"
    swapped: bool = False  # expert factors as peft 0.18 shaped them


def llama(**more: Any) -> Any:
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 8,
            "hidden_size": 16,
            "intermediate_size": 40,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "bos_token_id": None,
            "eos_token_id": None,
            "tie_word_embeddings": False,
            "max_position_embeddings": 64,
            **more,
        }
    )
    return transformers.LlamaForCausalLM(config)


def build(kind: str) -> Any:
    torch.manual_seed(11)
    if kind == "llama":
        return llama()
    if kind == "llama_bias":
        return llama(attention_bias=True)
    if kind == "llama_wide":  # more than one cell of the grid either way
        return llama(hidden_size=68, intermediate_size=1030, vocab_size=4)
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=24,
                n_positions=8,
                n_embd=16,
                n_layer=1,
                n_head=2,
                bos_token_id=None,
                eos_token_id=None,
                tie_word_embeddings=False,
            )
        )
    if kind == "qwen3_moe":
        return transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(
                vocab_size=24,
                hidden_size=16,
                intermediate_size=16,
                moe_intermediate_size=12,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
                num_experts=4,
                num_experts_per_tok=2,
                tie_word_embeddings=False,
            )
        )
    if kind == "gpt_oss":
        return transformers.GptOssForCausalLM(
            transformers.GptOssConfig(
                vocab_size=24,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
                num_local_experts=3,
                num_experts_per_tok=2,
                tie_word_embeddings=False,
            )
        )
    raise ValueError(kind)


def cases() -> dict[str, Case]:
    few = {"r": 4, "lora_alpha": 6, "target_modules": LINEARS}
    both = {"target_modules": ["q_proj", "down_proj"], "r": 4, "lora_alpha": 6}
    experts = {"r": 3, "lora_alpha": 8, "target_modules": ["q_proj"]}
    every = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], **experts}
    made = {f"types_{b}_{a}": Case("llama", b, a, both) for b in DTYPES for a in ("bf16", "fp32")}
    made |= {f"dora_{b}_{a}": Case("llama", b, a, {**both, "use_dora": True}) for b in DTYPES for a in ("bf16", "fp32")}
    return made | {
        "vanilla": Case("llama", "fp32", "fp32", few),
        "all_linear": Case("llama", "bf16", "fp32", {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}),
        "rslora": Case("llama", "bf16", "fp32", {**few, "use_rslora": True}),
        "patterns": Case(
            "llama",
            "bf16",
            "fp32",
            {
                **few,
                "rank_pattern": {"q_proj": 7, r"layers\.\d+\.mlp\.(up|down)_proj": 2},
                "alpha_pattern": {"k_proj": 20, "self_attn.q_proj": 5},
            },
        ),
        "wide_bf16": Case("llama_wide", "bf16", "bf16", {**both, "r": 16, "target_modules": ["down_proj"]}),
        "modules_to_save": Case("llama", "bf16", "fp32", {**both, "modules_to_save": ["lm_head", "input_layernorm"]}),
        "embedding_bf16": Case("llama", "bf16", "fp32", {**both, "target_modules": ["embed_tokens", "lm_head"]}),
        "embedding_fp32": Case("llama", "fp32", "bf16", {**both, "target_modules": ["embed_tokens", "q_proj"]}),
        "embedding_dora": Case(
            "llama", "bf16", "fp32", {**both, "target_modules": ["embed_tokens", "q_proj"], "use_dora": True}
        ),
        "conv1d": Case(
            "gpt2", "fp32", "fp32", {"r": 4, "lora_alpha": 6, "target_modules": ["c_attn", "c_proj", "c_fc"]}
        ),
        "conv1d_head": Case(
            "gpt2",
            "bf16",
            "fp32",
            {"r": 4, "lora_alpha": 6, "fan_in_fan_out": True, "target_modules": ["c_proj", "lm_head"]},
        ),
        "conv1d_dora": Case(
            "gpt2", "fp32", "fp32", {"r": 4, "lora_alpha": 6, "target_modules": ["c_attn", "c_proj"], "use_dora": True}
        ),
        "lora_bias": Case(
            "llama_bias", "bf16", "bf16", {**both, "target_modules": ["q_proj", "o_proj"], "lora_bias": True}
        ),
        "lora_bias_fp32": Case("llama_bias", "bf16", "fp32", {**both, "target_modules": ["v_proj"], "lora_bias": True}),
        "other_name": Case("llama", "bf16", "fp32", both, name="policy"),
        "experts_bf16_fp32": Case("qwen3_moe", "bf16", "fp32", every),
        "experts_fp32_fp32": Case("qwen3_moe", "fp32", "fp32", every),
        "experts_bf16_bf16": Case("qwen3_moe", "bf16", "bf16", every),
        "experts_one": Case(
            "qwen3_moe", "bf16", "fp32", {**experts, "target_parameters": ["mlp.experts.gate_up_proj"]}
        ),
        "experts_0_18": Case("qwen3_moe", "bf16", "fp32", every, swapped=True),
        "experts_transposed": Case("gpt_oss", "bf16", "fp32", every),
        "parameter_2d": Case(
            "qwen3_moe", "bf16", "fp32", {**experts, "target_parameters": ["mlp.gate.weight", "o_proj.weight"]}
        ),
    }


@contextlib.contextmanager
def as_in_0_18() -> Any:
    """As in peft 0.18: in and out features of an expert parameter are its second and third dim, always."""
    from peft.tuners.lora.layer import ParamWrapper

    made = ParamWrapper.update_layer

    def update_layer(self: Any, *arguments: Any, **keywords: Any) -> None:
        base = self.get_base_layer()
        had = getattr(base, "is_transposed", False)
        base.is_transposed = True
        try:
            made(self, *arguments, **keywords)
        finally:
            base.is_transposed = had

    ParamWrapper.update_layer = update_layer
    try:
        yield
    finally:
        ParamWrapper.update_layer = made


def make(case: Case) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    model = build(case.model).to(DTYPES[case.base])
    with as_in_0_18() if case.swapped else contextlib.nullcontext():
        config = LoraConfig(task_type="CAUSAL_LM", **case.settings)
        wrapped = get_peft_model(model, config, adapter_name=case.name, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            wanted = DTYPES[case.adapter]
            if "magnitude" in name:
                change = 1 + 0.2 * torch.rand(parameter.shape, generator=generator)
                parameter.data = (parameter.data.float() * change).to(wanted)
            else:
                parameter.data = (0.1 * torch.randn(parameter.shape, generator=generator)).to(wanted)
        elif case.model == "gpt_oss" and parameter.dim() == 3:  # its weights start as they are in memory
            parameter.data = (0.02 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)
    state = {name.removeprefix("module."): t.detach().clone() for name, t in wrapped.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        wrapped.save_pretrained(folder, selected_adapters=[case.name])
        inside = pathlib.Path(folder, "" if case.name == "default" else case.name)
        adapter = load_file(inside / "adapter_model.safetensors")
        settings = json.loads((inside / "adapter_config.json").read_text())
    if case.swapped:
        settings["peft_version"] = "0.18.1"
    settings["base_model_name_or_path"] = None
    merged = wrapped.merge_and_unload().state_dict()
    tensors: dict[str, torch.Tensor] = {}
    for prefix, group in (("state", state), ("merged", merged), ("adapter", adapter)):
        for name, tensor in group.items():
            if "rotary" in name or (case.model == "gpt2" and name.endswith((".attn.bias", ".masked_bias"))):
                continue
            tensors[f"{prefix}/{name}"] = tensor.detach().clone().contiguous()
    unchanged = [
        name
        for name in merged
        if f"state/base_model.model.{name}" in tensors
        and tensors.get(f"merged/{name}") is not None
        and torch.equal(tensors[f"merged/{name}"], tensors[f"state/base_model.model.{name}"])
    ]
    if case.model == "llama_wide":  # only what is adapted, to stay small
        tensors = {name: t for name, t in tensors.items() if "down_proj" in name}
        unchanged = []
    for name in unchanged:
        del tensors[f"merged/{name}"]
    for name in [n for n in tensors if n.startswith("adapter/")]:  # the values are those of the state dict
        tensors[name] = torch.empty(0, dtype=torch.uint8)
    shapes = {name: [str(t.dtype).removeprefix("torch."), *t.shape] for name, t in adapter.items()}
    told = {
        "adapter_config.json": json.dumps(settings, indent=2, sort_keys=True),
        "config.json": json.dumps(json.loads(model.config.to_json_string(use_diff=True))),
        "name": case.name,
        "adapter": json.dumps(shapes),
        "unchanged": json.dumps(unchanged),
        "made with": f"peft {peft.__version__}, transformers {transformers.__version__}, torch {torch.__version__}",
    }
    return {name: t for name, t in tensors.items() if not name.startswith("adapter/")}, told


def main() -> None:
    warnings.simplefilter("ignore")
    HERE.mkdir(parents=True, exist_ok=True)
    wanted = sys.argv[1:]
    for name, case in cases().items():
        if wanted and name not in wanted:
            continue
        tensors, told = make(case)
        save_file(tensors, HERE / f"{name}.safetensors", told)
        print(name, (HERE / f"{name}.safetensors").stat().st_size)


if __name__ == "__main__":
    main()
