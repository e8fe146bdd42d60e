"""Section J: element types and quantization."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from safetensors.torch import save_file

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
    files = {"hf_quant_config.json": "{}", "tokenizer.json": '{"model": {}}'}
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


E4M3 = torch.float8_e4m3fn
LARGER = llama_config(hidden_size=128, intermediate_size=256, vocab_size=48)
OUT_OF_RANGE = [447, 448, 464, 465, 480, 1e4, -465, -1e4, -0.0, 2.0**-9, 2.0**-10, 1e-40]


@pytest.mark.parametrize("scheme", ["fp8-dynamic", "fp8-block", "fp8", "mxfp8"])
def test_case_123_nothing_leaves_the_range_of_float8(tmp_path: Path, scheme: str) -> None:
    """Scales keep every value within +-448; codes are those of a clamped cast, whatever version of torch reads them."""
    tensors, name = llama(hidden=128, vocab=48, dtype=torch.float32), "model.layers.0.mlp.up_proj.weight"
    tensors[name].view(-1)[: len(OUT_OF_RANGE)] = torch.tensor(OUT_OF_RANGE)
    source = checkpoint(tmp_path / "ckpt", tensors, LARGER | {"torch_dtype": "float32"})
    assert merge(source, tmp_path / "out", "--quantize", scheme) == 0
    codes = tensors_of(tmp_path / "out")[name]
    assert codes.dtype == E4M3
    assert torch.isfinite(codes.float()).all()
    assert float(codes.float().abs().max()) == 448
    assert cli.run(["verify", str(tmp_path / "out"), "--against", str(source)]) == 0


@pytest.mark.parametrize("scheme", ["fp8-dynamic", "fp8-block", "fp8", "mxfp8", "int8", "int4", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_case_123_a_weight_without_a_scale_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scheme: str, value: float
) -> None:
    tensors, name = llama(hidden=128, vocab=48, dtype=torch.float32), "model.layers.0.mlp.up_proj.weight"
    tensors[name][100, 77] = value
    source = checkpoint(tmp_path / "ckpt", tensors, LARGER | {"torch_dtype": "float32"})
    assert merge(source, tmp_path / "out", "--quantize", scheme) == 5
    assert f"{name} holds 1 values that are NaN or infinite" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_case_125_weight_scale_and_settings_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """[256, 256] becomes float8 with 2 x 2 scales under DeepSeek's names; norms, embeddings and head stay plain."""
    tensors, name = llama(hidden=256, vocab=48), "model.layers.0.self_attn.q_proj.weight"
    config = llama_config(hidden_size=256, intermediate_size=512, vocab_size=48)
    source = checkpoint(tmp_path / "ckpt", tensors, config)
    assert merge(source, tmp_path / "out", "--quantize", "fp8-block", "--verify") == 0
    found, settings = tensors_of(tmp_path / "out"), config_of(tmp_path / "out")["quantization_config"]
    assert (found[name].dtype, tuple(found[name].shape)) == (E4M3, (256, 256))
    scale = found[f"{name}_scale_inv"]
    assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (2, 2))
    assert settings["quant_method"] == "fp8"
    assert settings["weight_block_size"] == [128, 128]
    assert settings["activation_scheme"] == "dynamic"
    assert settings["modules_to_not_convert"] == ["lm_head", "model.embed_tokens"]
    plain = {n for n, t in found.items() if t.dtype == torch.bfloat16}
    assert plain == {n for n in tensors if "_proj" not in n}
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    error = (found[name].float() * wide - tensors[name].float()).abs()
    assert float((error / tensors[name].float().abs().clamp(min=float(scale.max()) * 2**-6)).max()) <= 2**-4
    capsys.readouterr()
    assert cli.run(["verify", str(tmp_path / "out"), "--against", str(source), "--json"]) == 0
    told = {e["name"]: e for e in json.loads(capsys.readouterr().out)["quantized"]}
    assert told[name]["max_abs"] == pytest.approx(float(error.max()))


@pytest.mark.parametrize("fault", ["name", "settings"])
def test_case_125_check_finds_scales_that_loaders_do_not_see(tmp_path: Path, fault: str) -> None:
    """Scales under the other name, or none told in config.json: such a model loads as garbage without an error."""
    source = checkpoint(tmp_path / "ckpt", llama(hidden=128, vocab=48), LARGER)
    assert merge(source, tmp_path / "out", "--quantize", "fp8-block") == 0
    assert cli.run(["check", str(tmp_path / "out")]) == 0
    if fault == "name":
        tensors = {n.replace("_scale_inv", "_scale"): t for n, t in tensors_of(tmp_path / "out").items()}
        save_file(tensors, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    else:
        config = config_of(tmp_path / "out")
        del config["quantization_config"]
        (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    assert cli.run(["check", str(tmp_path / "out")]) != 0


class Float8Tensor(torch.Tensor):
    """As quantizing frameworks have it: a tensor subclass around bytes and a scale."""

    def __new__(cls, data: torch.Tensor, _: torch.Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16)
        return made

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.inner, self.scale = data, scale

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def made(cls, data: torch.Tensor, scale: torch.Tensor) -> Self:
        return cls(data, scale)


class Reduced(Float8Tensor):
    """The same with a way of pickling of its own (Transformer Engine)."""

    def __reduce_ex__(self, _: Any) -> Any:
        return Reduced.made, (self.inner, self.scale)


@pytest.mark.parametrize("words", [(), ("--no-config", "--layout", "as-is")], ids=["model", "weights alone"])
@pytest.mark.parametrize("kind", [Float8Tensor, Reduced])
def test_case_127_a_quantized_tensor_object_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: type[Float8Tensor], words: tuple[str, ...]
) -> None:
    """Its bytes are no values without what the framework knows; parameter and class are named, nothing is written."""
    tensors, name = dict(llama()), "model.layers.0.mlp.up_proj.weight"
    tensors[name] = kind(torch.zeros(16, 8, dtype=torch.uint8), torch.ones(1))
    source = tmp_path / "ckpt"
    source.mkdir()
    torch.save(tensors, source / "pytorch_model.bin")
    (source / "config.json").write_text(json.dumps(llama_config()))
    assert merge(source, tmp_path / "out", *words) != 0
    error = capsys.readouterr().err
    assert name in error
    assert kind.__name__ in error
    assert not (tmp_path / "out").exists()
