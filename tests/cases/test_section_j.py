"""Section J: element types and quantization settings (123, 125 and 127 come with quantized output)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from merge_stream import cli
from tests.folder.models import checkpoint, config_of, llama, llama_config, merge, model_folder, tensors_of

TYPES = {"keep": torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("dtype", list(TYPES))
def test_case_119_the_type_is_the_one_asked_for(tmp_path: Path, dtype: str) -> None:
    tensors = llama(dtype=torch.float32)
    source = checkpoint(tmp_path / "ckpt", tensors, llama_config(torch_dtype="float32"))
    assert merge(source, tmp_path / "out", "--dtype", dtype) == 0
    found = tensors_of(tmp_path / "out")
    assert all(torch.equal(found[name], tensor.to(TYPES[dtype])) for name, tensor in tensors.items())
    assert config_of(tmp_path / "out")["torch_dtype"] == str(TYPES[dtype]).removeprefix("torch.")
    assert cli.run(["verify", str(tmp_path / "out"), "--against", str(source)]) == 0


def test_case_119_the_defaults_are_keep_and_in_verls_spelling_bf16(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "ckpt", llama(dtype=torch.float32), llama_config(torch_dtype="float32"))
    assert merge(source, tmp_path / "ours") == 0
    words = ["merge", "--backend", "fsdp", "--local_dir", str(source), "--target_dir", str(tmp_path / "verls")]
    assert cli.run(words) == 0
    assert {t.dtype for t in tensors_of(tmp_path / "ours").values()} == {torch.float32}
    assert {t.dtype for t in tensors_of(tmp_path / "verls").values()} == {torch.bfloat16}


def test_case_119_overflow_in_fp16_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = llama(dtype=torch.float32)
    tensors["model.norm.weight"][0] = 7e4
    source = checkpoint(tmp_path / "ckpt", tensors, llama_config(torch_dtype="float32"))
    assert merge(source, tmp_path / "out", "--dtype", "fp16") == 0
    assert "OVERFLOW: 1 finite value in 1 tensor became infinite" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_case_121_the_router_bias_stays_fp32(tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    """With the base model, whose files say so, and without, by the list."""
    bias = "model.layers.0.mlp.gate.e_score_correction_bias"
    tensors = llama(dtype=torch.float32) | {bias: torch.tensor([1.0, 1.0 + 2**-20, 3.0])}
    base = {n: t if n == bias else t.bfloat16() for n, t in tensors.items()}
    folder = model_folder(tmp_path / "base", base, llama_config())
    source = checkpoint(tmp_path / "ckpt", tensors, llama_config(torch_dtype="float32"))
    for out, options in (("listed", []), ("by_base", ["--base-model", str(folder)])):
        assert merge(source, tmp_path / out, "--dtype", dtype, *options) == 0
        found = tensors_of(tmp_path / out)
        assert torch.equal(found[bias], tensors[bias])
        assert {n for n, t in found.items() if t.dtype == torch.float32} == {bias}
        assert f"keeps its type under --dtype {dtype}" in capsys.readouterr().out


def test_case_121_integers_are_never_cast(tmp_path: Path) -> None:
    tensors = llama(dtype=torch.float32) | {"model.layers.0.tokens_seen": torch.tensor([2**40])}
    source = checkpoint(tmp_path / "ckpt", tensors, llama_config(torch_dtype="float32"))
    assert merge(source, tmp_path / "out", "--dtype", "bf16", "--layout", "as-is") == 0
    assert torch.equal(tensors_of(tmp_path / "out")["model.layers.0.tokens_seen"], torch.tensor([2**40]))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"torch_dtype": None}, {"torch_dtype": "bfloat16"}),
        ({"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
        ({"torch_dtype": "torch.bfloat16"}, {"torch_dtype": "torch.bfloat16"}),
        ({"dtype": "float16", "torch_dtype": "float32"}, {"dtype": "bfloat16", "torch_dtype": "bfloat16"}),
        (
            {"torch_dtype": None, "text_config": {"torch_dtype": "float32", "hidden_size": 8}},
            {"torch_dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16", "hidden_size": 8}},
        ),
    ],
)
def test_case_128_the_config_says_what_the_weights_are(
    tmp_path: Path, given: dict[str, Any], wanted: dict[str, Any]
) -> None:
    source = checkpoint(tmp_path / "ckpt", llama(), llama_config(**given))
    assert merge(source, tmp_path / "out") == 0
    assert config_of(tmp_path / "out") == llama_config(**wanted)


def test_case_128_a_right_config_keeps_its_bytes(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "ckpt", llama(), llama_config())
    text = '{"model_type":"llama",\t"vocab_size":16, "hidden_size": 8,"num_hidden_layers":1,\r\n"x":"\\u00e9é",'
    text += '"tie_word_embeddings":false,"architectures":["LlamaForCausalLM"]}'
    (source / "huggingface" / "config.json").write_text(text, newline="")
    assert merge(source, tmp_path / "out") == 0
    assert (tmp_path / "out" / "config.json").read_bytes() == text.encode()


def test_quantization_settings_of_the_base_go_with_plain_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rule 6 of the output: the base is fp8, what was trained is bf16."""
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    files = {"hf_quant_config.json": "{}", "tokenizer.json": "{}"}
    base = model_folder(tmp_path / "base", llama(), llama_config(quantization_config=settings), files)
    source = checkpoint(tmp_path / "ckpt", llama())
    assert merge(source, tmp_path / "out", "--base-model", str(base), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert config_of(tmp_path / "out") == llama_config()
    assert any("quantization_config (fp8) left out" in note for note in told["notes"])
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert cli.run(["check", str(tmp_path / "out")]) == 0


def test_quantized_weights_keep_their_settings(tmp_path: Path) -> None:
    """A quantized model that is only put into other files."""
    tensors = llama() | {
        "model.layers.0.self_attn.q_proj.weight": torch.ones(8, 8).to(torch.float8_e4m3fn),
        "model.layers.0.self_attn.q_proj.weight_scale_inv": torch.ones(1, 1),
    }
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    config = llama_config(quantization_config=settings)
    source = model_folder(tmp_path / "fp8", tensors, config, {"hf_quant_config.json": "{}"})
    assert merge(source, tmp_path / "out", "--max-shard-size", "600") == 0
    assert config_of(tmp_path / "out") == config
    assert (tmp_path / "out" / "hf_quant_config.json").exists()
    found = tensors_of(tmp_path / "out")
    assert all(torch.equal(found[n].view(torch.uint8), tensors[n].view(torch.uint8)) for n in tensors)
