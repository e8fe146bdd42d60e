"""`check` and what a merge would refuse: parts that every layer lacks, biases that config.json promises or denies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from merge_stream.verification.check import check_folder
from merge_stream.verification.finding import Finding
from tests.folder.models import checkpoint, llama, llama_config, merge, model_folder, parts_of, tensors_of
from tests.folder.test_check import SIDE

Tensors = dict[str, torch.Tensor]
GPT_OSS = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "tie_word_embeddings": False}
Q_BIAS = "model.layers.0.self_attn.q_proj.bias"


def found(path: Path, tensors: Tensors, config: dict[str, Any]) -> list[Finding]:
    return [f for f in check_folder(model_folder(path / "m", tensors, config, SIDE)).findings if f.rule == "parts"]


@pytest.mark.parametrize("part", ["mlp.up_proj.weight", "self_attn.k_proj.weight", "post_attention_layernorm.weight"])
def test_a_part_that_every_layer_lacks(tmp_path: Path, part: str) -> None:
    tensors = {name: tensor for name, tensor in llama(2).items() if not name.endswith(part)}
    (finding,) = found(tmp_path, tensors, llama_config(num_hidden_layers=2))
    assert finding.severity == "error"
    assert f"model.layers.0.{part}, model.layers.1.{part} are missing: a llama (config.json) has them" in finding.text
    assert "merge again" in finding.hint


def test_biases_that_the_config_promises_or_denies(tmp_path: Path) -> None:
    biases = {f"model.layers.0.self_attn.{k}_proj.bias": torch.zeros(8).bfloat16() for k in "qkvo"}
    assert found(tmp_path / "right", llama() | biases, llama_config(attention_bias=True)) == []
    (finding,) = found(tmp_path / "promised", llama(), llama_config(attention_bias=True))
    assert (finding.severity, "attention_bias true" in finding.text) == ("error", True)
    (finding,) = found(tmp_path / "denied", llama() | {Q_BIAS: torch.zeros(8).bfloat16()}, llama_config())
    assert f"holds {Q_BIAS}, but config.json has by default attention_bias false" in finding.text


def test_a_family_whose_parts_are_not_known_is_a_note(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, llama(), llama_config(model_type="own_llama"))
    assert finding.severity == "note"
    assert "'own_llama'" in finding.text


@pytest.mark.parametrize("scheme", ["fp8-block", "fp8-dynamic", "int4", "mxfp4", "nvfp4"])
def test_quantized_models_have_their_parts_under_other_names(tmp_path: Path, scheme: str) -> None:
    tensors, config = llama(hidden=128, vocab=128), llama_config(hidden_size=128, intermediate_size=256, vocab_size=128)
    out = tmp_path / "out"
    assert merge(checkpoint(tmp_path / "ckpt", tensors, config, SIDE), out, "--quantize", scheme) == 0
    assert [f for f in check_folder(out).findings if f.severity == "error"] == []


def test_mxfp4_blocks_are_the_experts_of_a_gpt_oss(tmp_path: Path) -> None:
    tensors = parts_of("gpt_oss.tf5", "")
    packed = {}
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        del tensors[name]
        packed |= {f"{name}_blocks": torch.zeros(4, 64, 1, 16).byte(), f"{name}_scales": torch.zeros(4, 64, 1).byte()}
    config = GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}}
    assert found(tmp_path / "whole", tensors | packed, config) == []
    left = {name: tensor for name, tensor in packed.items() if "gate_up_proj" not in name}
    (finding,) = found(tmp_path / "lost", tensors | left, config)
    assert "mlp.experts.gate_up_proj" in finding.text


@pytest.mark.parametrize(("method", "weight"), [("bitsandbytes", "SCB"), ("hqq", "W_q"), ("own", "codes")])
def test_forms_of_quantization_that_are_not_known_are_not_judged(tmp_path: Path, method: str, weight: str) -> None:
    there = {name: tensor for name, tensor in llama().items() if method == "bitsandbytes" or "mlp" not in name}
    there |= {f"model.layers.0.mlp.{k}_proj.{weight}": torch.ones(8).byte() for k in ("gate", "up", "down")}
    config = llama_config(quantization_config={"quant_method": method})
    source = model_folder(tmp_path / "m", there, config, SIDE)
    assert {f.rule for f in check_folder(source).findings} & {"parts", "family"} == set()
    assert merge(source, tmp_path / "out") == 0
    assert tensors_of(tmp_path / "out").keys() == there.keys()


def test_names_of_memory_are_told_once(tmp_path: Path) -> None:
    """What no repository has is an error of its own; that its parts are missing too says nothing more."""
    tensors = parts_of("mixtral.tf5", "")
    config = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "tie_word_embeddings": False}
    folder = model_folder(tmp_path / "m", tensors, config, SIDE)
    assert {f.rule for f in check_folder(folder).findings if f.severity == "error"} == {"fused-experts"}
