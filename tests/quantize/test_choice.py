"""Which scheme is chosen and why, what belongs together, what is refused; the form of gpt-oss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from merge_stream import api, cli
from merge_stream.encodings.base import scheme_named
from merge_stream.options import MergeOptions
from merge_stream.planning.plan import Plan
from merge_stream.verification.check import check_folder
from tests.folder.models import checkpoint, config_of, llama, llama_config, merge, model_folder, tensors_of

Tensors = dict[str, torch.Tensor]


def folder(path: Path, tensors: Tensors, **changes: Any) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 48}
    return model_folder(path, tensors, llama_config(**(sizes | changes)))


def experts(count: int = 2) -> Tensors:
    """A dense attention and experts of their own tensors."""
    tensors = {n: t for n, t in llama(vocab=48, hidden=128).items() if ".mlp." not in n}
    tensors["model.layers.0.mlp.gate.weight"] = torch.ones(count, 128).bfloat16()
    for expert in range(count):
        at = f"model.layers.0.mlp.experts.{expert}."
        for name, scale in (("gate_proj", 1.0), ("up_proj", 3.0)):
            tensors[f"{at}{name}.weight"] = (torch.randn(256, 128) * scale).bfloat16()
        tensors[f"{at}down_proj.weight"] = torch.randn(128, 256).bfloat16()
    return tensors


def plan_of(source: Path, **options: Any) -> Plan:
    return api.make_plan(api.open_checkpoint([source]), MergeOptions(layout="as-is", **options)).plan


def told(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    return captured.out + captured.err


@pytest.mark.parametrize("quantize", ["auto", "auto-fp8"])
def test_auto_takes_blocks_where_all_shapes_allow_them(tmp_path: Path, quantize: str) -> None:
    plan = plan_of(folder(tmp_path / "m", llama(vocab=48, hidden=128)), quantize=quantize)
    assert plan.scheme == "fp8-block"
    assert f"--quantize {quantize}: fp8-block, since all linear layers are made of whole blocks" in " ".join(plan.notes)


def test_auto_takes_channels_where_a_shape_forbids_blocks(tmp_path: Path) -> None:
    tensors = llama(vocab=48, hidden=128) | {"model.layers.0.self_attn.k_proj.weight": torch.ones(64, 128).bfloat16()}
    source = folder(tmp_path / "m", tensors)
    plan = plan_of(source, quantize="auto")
    assert plan.scheme == "fp8-dynamic"
    text = " ".join(plan.notes)
    assert "fp8-dynamic and not fp8-block, since 1 weight of 7 cannot take it" in text
    assert "model.layers.0.self_attn.k_proj.weight: [64, 128]" in text
    assert plan_of(source, quantize="auto", quantize_ignore=("*.k_proj",)).scheme == "fp8-block"


def test_dtype_fp8_is_auto_among_the_float8_schemes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(
        tmp_path / "ckpt",
        llama(vocab=48, hidden=128),
        llama_config(hidden_size=128, intermediate_size=256, vocab_size=48),
    )
    assert merge(source, tmp_path / "out", "--dtype", "fp8") == 0
    assert config_of(tmp_path / "out")["quantization_config"]["quant_method"] == "fp8"
    assert tensors_of(tmp_path / "out")["model.norm.weight"].dtype == torch.bfloat16
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| quantized | fp8-block: 7 linear layers; the rest plain |" in card
    told(capsys)
    assert merge(source, tmp_path / "both", "--dtype", "fp8", "--quantize", "int8") == 2
    assert "--dtype fp8 means --quantize auto-fp8" in told(capsys)


def test_experts_that_a_loader_misreads_are_refused_without_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folder(tmp_path / "m", experts(), model_type="toy_moe")
    options = ("--layout", "as-is", "--quantize", "nvfp4")
    assert merge(source, tmp_path / "out", *options) == 1
    text = told(capsys)
    assert "transformers 5.24 ignores the global scales of experts: wrong values, no error" in text
    assert "add --force" in text
    assert merge(source, tmp_path / "out", *options, "--force") == 0
    assert "ignores the global scales of experts" in told(capsys)
    assert cli.run(["verify", str(tmp_path / "out"), "--against", str(source)]) == 0
    found = {(f.rule, f.loaders) for f in check_folder(tmp_path / "out").findings}
    assert {("nvfp4", "transformers (MoE)"), ("nvfp4", "llama.cpp, TGI")} <= found


def test_layers_that_engines_fuse_share_their_global_scale(tmp_path: Path) -> None:
    """q/k/v of one layer, gate/up of one expert; others have their own."""
    tensors = experts()
    tensors["model.layers.0.self_attn.k_proj.weight"] *= 7
    source = folder(tmp_path / "m", tensors, model_type="toy_moe")
    assert merge(source, tmp_path / "out", "--layout", "as-is", "--quantize", "nvfp4", "--force") == 0
    found = tensors_of(tmp_path / "out")
    groups = [[f"self_attn.{p}_proj" for p in "qkv"], ["self_attn.o_proj"]]
    for expert in range(2):
        groups += [[f"mlp.experts.{expert}.{p}_proj" for p in ("gate", "up")], [f"mlp.experts.{expert}.down_proj"]]
    for group in groups:
        names = [f"model.layers.0.{name}.weight" for name in group]
        largest = max(float(tensors[name].float().abs().max()) for name in names)
        for name in names:
            assert float(found[f"{name}_global_scale"]) == pytest.approx(448 * 6 / largest, rel=1e-6)


def test_a_scale_for_a_whole_weight_reads_it_twice(tmp_path: Path) -> None:
    tensors = llama(vocab=48, hidden=128)
    source = folder(tmp_path / "m", tensors)
    linear = sum(t.nbytes for n, t in tensors.items() if "_proj" in n)
    once = plan_of(source, quantize="fp8-dynamic").read_nbytes
    assert once == sum(t.nbytes for t in tensors.values())
    assert plan_of(source, quantize="fp8").read_nbytes == once + linear
    assert plan_of(source, quantize="nvfp4").read_nbytes == once + linear


@pytest.mark.parametrize("scheme", ["fp8", "nvfp4"])
def test_a_value_that_is_not_finite_is_found_before_a_byte_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scheme: str
) -> None:
    tensors, name = llama(vocab=48, hidden=128), "model.layers.0.mlp.up_proj.weight"
    tensors[name][3, 5] = float("nan")
    assert merge(folder(tmp_path / "m", tensors), tmp_path / "out", "--quantize", scheme, "--layout", "as-is") == 5
    assert f"{name} holds 1 values that are NaN or infinite" in told(capsys)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------ gpt-oss

STACKS = ("gate_up_proj", "down_proj")


def gpt_oss() -> Tensors:
    """One layer with four experts in stacks, [experts, in, out]."""
    generator = torch.Generator().manual_seed(9)
    tensors = {n: t for n, t in llama(vocab=48, hidden=64).items() if ".mlp." not in n}
    at = "model.layers.0.mlp."
    tensors[f"{at}router.weight"] = torch.ones(4, 64).bfloat16()
    tensors[f"{at}router.bias"] = torch.ones(4).bfloat16()
    tensors["model.layers.0.self_attn.sinks"] = torch.ones(2).bfloat16()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        tensors[f"model.layers.0.self_attn.{name}.bias"] = torch.ones(64).bfloat16()
    for name, shape in (("gate_up_proj", (4, 64, 192)), ("down_proj", (4, 96, 64))):
        tensors[f"{at}experts.{name}"] = torch.randn(shape, generator=generator).bfloat16()
        tensors[f"{at}experts.{name}_bias"] = torch.randn(4, shape[2], generator=generator).bfloat16()
    return tensors


@pytest.fixture
def oss(tmp_path: Path) -> Path:
    changes = {"hidden_size": 64, "intermediate_size": 96, "architectures": ["GptOssForCausalLM"]}
    return folder(tmp_path / "oss", gpt_oss(), model_type="gpt_oss", **changes)


def by_library_rule(weight: torch.Tensor) -> tuple[bytes, bytes]:
    """Each expert's transposed matrix in the form that tests/quantize/test_schemes.py compares with the library."""
    scheme, blocks, scales = scheme_named("mxfp4"), b"", b""
    for matrix in weight.float().numpy():
        values = np.ascontiguousarray(matrix.T)
        outs = [np.empty(values.size // 2, np.uint8), np.empty(values.size // 32, np.uint8)]
        assert not scheme.encode(values, outs, 0.0)
        blocks, scales = blocks + outs[0].tobytes(), scales + outs[1].tobytes()
    return blocks, scales


@pytest.mark.parametrize("quantize", ["mxfp4", "auto"])
def test_gpt_oss_is_written_in_its_own_form(
    tmp_path: Path, oss: Path, capsys: pytest.CaptureFixture[str], quantize: str
) -> None:
    tensors = gpt_oss()
    assert merge(oss, tmp_path / "out", "--layout", "as-is", "--quantize", quantize, "--verify") == 0
    found = tensors_of(tmp_path / "out")
    for name in (f"model.layers.0.mlp.experts.{stack}" for stack in STACKS):
        count, inside, out = tensors[name].shape
        blocks, scales = found.pop(f"{name}_blocks"), found.pop(f"{name}_scales")
        assert tuple(blocks.shape) == (count, out, inside // 32, 16)
        assert tuple(scales.shape) == (count, out, inside // 32)
        assert (blocks.numpy().tobytes(), scales.numpy().tobytes()) == by_library_rule(tensors.pop(name))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    settings = config_of(tmp_path / "out")["quantization_config"]
    assert settings["quant_method"] == "mxfp4"
    assert {"lm_head", "model.layers.0.mlp.router", "model.layers.0.self_attn.q_proj"} <= set(
        settings["modules_to_not_convert"]
    )
    assert ("the form that gpt-oss has in its own repositories" in told(capsys)) == (quantize == "auto")
    assert cli.run(["verify", str(tmp_path / "out"), "--against", str(oss)]) == 0
    assert not [f for f in check_folder(tmp_path / "out").findings if f.about == "quantized"]


def test_gpt_oss_does_not_depend_on_segments(tmp_path: Path, oss: Path) -> None:
    """Transposed rows come from many short runs of the source."""
    options = ("--layout", "as-is", "--quantize", "mxfp4", "-q")
    assert merge(oss, tmp_path / "a", *options) == 0
    assert merge(oss, tmp_path / "b", *options, "--workers", "3", "--max-shard-size", "20KB") == 0
    a, b = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_other_schemes_point_to_the_form_of_gpt_oss(
    tmp_path: Path, oss: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert merge(oss, tmp_path / "out", "--layout", "as-is", "--dtype", "fp8") == 1
    assert "--quantize mxfp4" in told(capsys)


def test_gpt_oss_is_not_quantized_from_a_staging_store(
    tmp_path: Path, oss: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--layout", "as-is", "--quantize", "mxfp4", "--staging", "zarr")
    assert merge(oss, tmp_path / "out", *options) == 1
    assert "with --staging direct" in told(capsys)
