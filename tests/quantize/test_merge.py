"""Quantized output of a merge: what is written, what must not change it, what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from merge_stream import api, cli, steps
from merge_stream.options import MergeOptions
from merge_stream.verification.check import check_folder
from tests.folder.models import checkpoint, config_of, llama, llama_config, merge, model_folder, tensors_of
from tests.quantize.test_fp8_dynamic import by_torch

EXPERT = "model.layers.0.mlp.experts.{}.{}.weight"


def config(**changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 48}
    return llama_config(**(sizes | changes))


def model(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return llama(layers=2, vocab=48, hidden=32, dtype=dtype)


def linear(tensors: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in tensors if "_proj" in name}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "ckpt", model(), config())


def lines(capsys: pytest.CaptureFixture[str]) -> str:
    told = capsys.readouterr()
    return told.out + told.err


def test_linear_layers_are_quantized_and_all_else_is_as_it_was(tmp_path: Path, source: Path) -> None:
    assert merge(source, tmp_path / "out", "--quantize", "fp8-dynamic", "--verify") == 0
    tensors, found = model(), tensors_of(tmp_path / "out")
    assert set(found) == {*tensors, *(f"{name}_scale" for name in linear(tensors))}
    for name, tensor in tensors.items():
        if name in linear(tensors):
            codes, scale = by_torch(tensor)
            assert torch.equal(found[name].view(torch.uint8), codes)
            assert torch.equal(found[f"{name}_scale"], scale)
        else:
            assert torch.equal(found[name], tensor)
    settings = config_of(tmp_path / "out")["quantization_config"]
    assert settings["quant_method"] == "compressed-tensors"
    assert settings["ignore"] == ["lm_head", "model.embed_tokens"]
    assert config_of(tmp_path / "out")["torch_dtype"] == "bfloat16"


def test_dtype_is_that_of_the_plain_tensors_and_codes_come_from_the_source(tmp_path: Path) -> None:
    """No rounding to bf16 before the quantization."""
    tensors = model(torch.float32)
    source = checkpoint(tmp_path / "ckpt", tensors, config(torch_dtype="float32"))
    assert merge(source, tmp_path / "out", "--quantize", "fp8-dynamic", "--dtype", "bf16") == 0
    found = tensors_of(tmp_path / "out")
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(found[name].view(torch.uint8), by_torch(tensors[name])[0])
    assert found["model.norm.weight"].dtype == torch.bfloat16
    assert config_of(tmp_path / "out")["torch_dtype"] == "bfloat16"
    assert cli.run(["verify", str(tmp_path / "out"), "--against", str(source)]) == 0


def test_the_same_command_continues_and_another_one_is_refused(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(steps, "finish_folder", broken)
        assert merge(source, tmp_path / "out", "--quantize", "fp8-dynamic") == 130
    assert merge(source, tmp_path / "out") == 1
    assert "--quantize was fp8-dynamic" in lines(capsys)
    assert merge(source, tmp_path / "out", "--quantize", "fp8-dynamic") == 0
    assert cli.run(["verify", str(tmp_path / "out"), "--against", str(source)]) == 0


def test_verify_tells_errors_worst_first(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert merge(source, tmp_path / "out", "--quantize", "fp8-dynamic", "-q") == 0
    capsys.readouterr()
    assert cli.run(["verify", str(tmp_path / "out"), "--against", str(source), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [e["snr_db"] for e in told["quantized"]] == sorted(e["snr_db"] for e in told["quantized"])
    assert len(told["quantized"]) == 14
    for entry in told["quantized"]:
        weight = model()[entry["name"]].double()
        codes, scale = by_torch(weight.bfloat16())
        error = (codes.view(torch.float8_e4m3fn).float() * scale).double() - weight
        assert entry["max_abs"] == pytest.approx(float(error.abs().max()))
        signal = 10 * torch.log10(weight.square().sum() / error.square().sum())
        assert entry["snr_db"] == pytest.approx(float(signal))


@pytest.mark.parametrize("suffix", ["", "_scale"])
def test_verify_finds_one_other_byte(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    name = f"model.layers.0.mlp.up_proj.weight{suffix}"
    assert merge(source, tmp_path / "out", "--quantize", "fp8-dynamic", "-q") == 0
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    tensors[name].view(torch.uint8).view(-1)[7] ^= 1
    save_file(tensors, file, {"format": "pt"})
    assert cli.run(["verify", str(tmp_path / "out"), "--against", str(source)]) == 3
    assert "model.layers.0.mlp.up_proj.weight: 1 bytes are not those" in lines(capsys)


def test_a_quantized_model_can_be_put_in_other_files(tmp_path: Path, source: Path) -> None:
    assert merge(source, tmp_path / "out", "--quantize", "fp8-dynamic", "-q") == 0
    assert merge(tmp_path / "out", tmp_path / "again", "--max-shard-size", "9KB", "-q") == 0
    assert cli.run(["verify", str(tmp_path / "again"), "--against", str(tmp_path / "out")]) == 0
    assert config_of(tmp_path / "again")["quantization_config"] == config_of(tmp_path / "out")["quantization_config"]


def test_fused_layers_stay_together(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--quantize-ignore", "*.0.self_attn.q_proj", "--quantize-ignore", "model.layers.1.mlp.down_proj.weight")
    assert merge(source, tmp_path / "out", "--quantize", "fp8-dynamic", *options) == 0
    plain = [n for n, t in tensors_of(tmp_path / "out").items() if n in linear(model()) and t.dtype == torch.bfloat16]
    attention = "model.layers.0.self_attn."
    names = {*(f"{attention}{p}_proj.weight" for p in "qkv"), "model.layers.1.mlp.down_proj.weight"}
    assert set(plain) == names
    ignored = config_of(tmp_path / "out")["quantization_config"]["ignore"]
    assert {name.removesuffix(".weight") for name in names} <= set(ignored)
    assert "2 more weights stay plain, since engines make one layer of them" in lines(capsys)
    assert check_folder(tmp_path / "out").ok


def test_weights_whose_shape_does_not_fit_stay_plain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """k_proj has 192 rows, which transformers would dequantize wrongly in blocks of 128: q and v stay plain with it."""
    tensors = llama(layers=1, vocab=48, hidden=256) | {"model.layers.0.self_attn.k_proj.weight": torch.ones(192, 256)}
    source = model_folder(tmp_path / "m", tensors, config(hidden_size=256, intermediate_size=512, num_hidden_layers=1))
    assert merge(source, tmp_path / "out", "--quantize", "fp8-block", "--layout", "as-is") == 0
    found = tensors_of(tmp_path / "out")
    attention = "model.layers.0.self_attn."
    eight_bits = {name for name, tensor in found.items() if tensor.dtype == torch.float8_e4m3fn}
    assert eight_bits == {
        f"{attention}o_proj.weight",
        *(f"model.layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
    }
    plain = {f"{attention}{p}_proj" for p in "qkv"}
    assert plain <= set(config_of(tmp_path / "out")["quantization_config"]["modules_to_not_convert"])
    told = lines(capsys)
    assert f"1 weight stays plain, since fp8-block cannot take the shape: {attention}k_proj.weight" in told
    assert "[192, 256] is not made of whole blocks of 128 x 128" in told
    assert "2 more weights stay plain, since engines make one layer of them and what has no such shape" in told
    assert check_folder(tmp_path / "out").ok


def test_a_model_of_which_nothing_fits_is_refused(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert merge(source, tmp_path / "out", "--quantize", "fp8-block") == 1
    told = lines(capsys)
    assert "nothing is left to quantize: 14 weights of 14 cannot be written so" in told
    assert "fp8-dynamic takes any shape" in told


def test_experts_routers_towers_and_a_tied_head(tmp_path: Path) -> None:
    tensors = {n: t for n, t in model().items() if ".mlp." not in n and n != "lm_head.weight"}
    for layer in range(2):
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = torch.ones(2, 32).bfloat16()
        for expert in range(2):
            at = f"model.layers.{layer}.mlp.experts.{expert}."
            tensors[f"{at}gate_proj.weight"] = torch.randn(16, 32).bfloat16()
            tensors[f"{at}up_proj.weight"] = torch.randn(16, 32).bfloat16()
            tensors[f"{at}down_proj.weight"] = torch.randn(32, 16).bfloat16()
    source = model_folder(tmp_path / "moe", tensors, config(model_type="toy_moe", tie_word_embeddings=True))
    assert merge(source, tmp_path / "out", "--quantize", "fp8-dynamic", "--layout", "as-is") == 0
    found = tensors_of(tmp_path / "out")
    assert found["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16
    assert found["model.layers.1.mlp.experts.1.down_proj.weight"].dtype == torch.float8_e4m3fn
    ignored = config_of(tmp_path / "out")["quantization_config"]["ignore"]
    assert ignored == ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    options = ("--layout", "as-is", "--quantize-ignore", "model.layers.0.mlp.experts.0.up_proj")
    assert merge(source, tmp_path / "one", "--quantize", "fp8-dynamic", *options) == 0
    experts = [t for n, t in tensors_of(tmp_path / "one").items() if n.startswith("model.layers.0.mlp.experts")]
    assert {t.dtype for t in experts} == {torch.bfloat16}


def test_settings_of_the_base_are_replaced(tmp_path: Path) -> None:
    """The base is block fp8 and brings a file that vLLM believes; what was trained is bf16."""
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    source = checkpoint(
        tmp_path / "ckpt", model(), config(quantization_config=settings), {"hf_quant_config.json": "{}"}
    )
    assert merge(source, tmp_path / "out", "--quantize", "fp8-dynamic") == 0
    assert config_of(tmp_path / "out")["quantization_config"]["quant_method"] == "compressed-tensors"
    assert not os.path.exists(tmp_path / "out" / "hf_quant_config.json")
    assert check_folder(tmp_path / "out").ok


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float
) -> None:
    tensors, name = model(), "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = value
    source = checkpoint(tmp_path / "ckpt", tensors, config())
    assert merge(source, tmp_path / "out", "--quantize", "fp8-dynamic") == 5
    told = lines(capsys)
    assert f"{name} holds 1 values that are NaN or infinite" in told
    assert f"--quantize-ignore {name}" in told
    assert not (tmp_path / "out").exists()
    assert merge(source, tmp_path / "plain") == 0
    options = ("--restart", "--quantize-ignore", name)
    assert merge(source, tmp_path / "out", "--quantize", "fp8-dynamic", *options) == 0


def test_stacked_experts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stacked = {"model.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 32, 64).bfloat16()}
    source = model_folder(tmp_path / "m", model() | stacked, config())
    assert merge(source, tmp_path / "out", "--quantize", "fp8-dynamic", "--layout", "as-is") == 1
    assert "gate_up_proj [2, 32, 64] holds the experts of a block in one tensor" in lines(capsys)


def test_what_is_quantized_already_is_refused(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert merge(source, tmp_path / "out", "--quantize", "fp8-dynamic", "-q") == 0
    assert merge(tmp_path / "out", tmp_path / "twice", "--quantize", "fp8-dynamic") == 1
    told = lines(capsys)
    assert "the model is quantized already" in told
    assert "quantize the model that it was made from" in told


def test_a_model_without_known_linear_layers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = model_folder(tmp_path / "m", {"h.0.attn.c_attn.weight": torch.ones(4, 12)}, {"model_type": "toy"})
    assert merge(source, tmp_path / "out", "--quantize", "fp8-dynamic", "--layout", "as-is", "-q") == 1
    assert "none of 1 tensor is a linear layer of a known name" in lines(capsys)


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (("--quantize-ignore", "x"), "nothing is quantized", "add --quantize fp8-dynamic"),
        (("--force",), "nothing is quantized", "add --quantize"),
        (("--quantize", "fp8-dynamic", "--quantize-ignore", "no.such"), "fits none of 14 weights", "one of them is"),
        (("--quantize", "fp8-dynamic", "--quantize-ignore", "*"), "nothing is left to quantize", "leave it out"),
        (("--quantize", "fp8-dynamic", "--no-config"), "without config.json nobody can read", "one of them"),
    ],
)
def test_options_that_contradict_each_other(  # noqa: PLR0917 - fixtures and parameters
    tmp_path: Path,
    source: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
    hint: str,
) -> None:
    assert merge(source, tmp_path / "out", *options) == 2
    told = lines(capsys)
    assert message in told
    assert hint in told


@pytest.mark.parametrize("scheme", ["fp8-dynamic", "int4", "nvfp4"])
def test_a_staging_store_gives_the_same_bytes(tmp_path: Path, scheme: str) -> None:
    """In one command or two; the checkpoint is fp32, and its chunks end within rows."""
    tensors = llama(layers=1, vocab=48, hidden=640, dtype=torch.float32)
    sizes = {"hidden_size": 640, "intermediate_size": 1280, "num_hidden_layers": 1}
    source = checkpoint(tmp_path / "ckpt", tensors, config(**sizes, torch_dtype="float32"))
    options = ("--quantize", scheme, "--dtype", "bf16", "-q")
    assert merge(source, tmp_path / "direct", *options) == 0
    assert merge(source, tmp_path / "through", *options, "--staging", "zarr") == 0
    assert cli.run(["stage", str(source), str(tmp_path / "store"), "-q"]) == 0
    assert cli.run(["finalize", str(tmp_path / "store"), str(tmp_path / "out"), *options]) == 0
    wanted = (tmp_path / "direct" / "model.safetensors").read_bytes()
    for out in ("through", "out"):
        assert (tmp_path / out / "model.safetensors").read_bytes() == wanted
        assert config_of(tmp_path / out) == config_of(tmp_path / "direct")


def test_what_cannot_be_quantized_is_told_before_it_is_staged(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert merge(source, tmp_path / "out", "--quantize", "fp8-block", "--staging", "zarr") == 1
    assert "nothing is left to quantize" in lines(capsys)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_a_row_larger_than_a_segment_is_counted_in_the_bound(tmp_path: Path) -> None:
    """Rows are encoded whole: the smallest bound holds one, and a smaller one is refused."""
    tensors = llama(vocab=8, hidden=8) | {"model.layers.0.mlp.down_proj.weight": torch.ones(2, 3_000_000)}
    source = model_folder(tmp_path / "m", tensors)
    (source / "config.json").write_text("{}")
    job = api.make_plan(
        api.open_checkpoint([source]), MergeOptions(quantize="fp8-dynamic", layout="as-is", max_mem=6_000_000_000)
    )
    assert job.least_segment == 12_000_000
    assert job.plan.read_nbytes == sum(t.nbytes for t in tensors.values())


@pytest.mark.parametrize("fault", ["shape", "absent", "unnamed"])
def test_check_finds_what_loaders_would_misread(tmp_path: Path, source: Path, fault: str) -> None:
    assert merge(source, tmp_path / "out", "--quantize", "fp8-dynamic", "-q") == 0
    assert check_folder(tmp_path / "out").ok
    file, name = tmp_path / "out" / "model.safetensors", "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(file)
    scale = tensors.pop(f"{name}_scale")
    if fault == "shape":
        tensors[f"{name}_scale"] = scale.reshape(-1)
    elif fault == "unnamed":
        tensors[name] = tensors[name].to(torch.bfloat16)
    save_file(tensors, file, {"format": "pt"})
    rules = {f.rule for f in check_folder(tmp_path / "out").findings if f.severity == "error"}
    assert ("excluded" if fault == "unnamed" else "scales") in rules
