"""Section I: names of vision models, experts and LoRA. The numbers are those of the collection of cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import Shard

from merge_stream import cli
from tests.folder.models import checkpoint, config_of, llama, llama_config, merge, model_folder, parts_of, tensors_of
from tests.makers.dtensor import Spread, write_ranks


def vision_config(**changes: Any) -> dict[str, Any]:
    """A small Qwen2-VL."""
    config = llama_config(
        model_type="qwen2_vl",
        architectures=["Qwen2VLForConditionalGeneration"],
        vision_config={"model_type": "qwen2_vl", "embed_dim": 8},
    )
    return config | changes


def vision_tensors() -> dict[str, torch.Tensor]:
    """In the names that transformers 5 (and 4.52 on) has in memory."""
    text = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in llama().items()
    }
    biases = {f"model.language_model.layers.0.self_attn.{k}_proj.bias": torch.ones(8).bfloat16() for k in "qkv"}
    tower = parts_of("qwen2_vl.tf5", r"model\.visual\.")
    return (
        text | biases | tower | {"model.visual.blocks.0.attn.qkv.weight": torch.arange(192).reshape(24, 8).bfloat16()}
    )


def hub_names() -> dict[str, torch.Tensor]:
    return {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): tensor
        for name, tensor in vision_tensors().items()
    }


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_case_107_names_are_those_of_the_repository(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "ckpt", vision_tensors(), vision_config())
    assert merge(source, tmp_path / "out") == 0
    assert same(tensors_of(tmp_path / "out"), hub_names())
    base = model_folder(tmp_path / "base", hub_names(), vision_config())
    assert merge(source, tmp_path / "by_base", "--base-model", str(base)) == 0
    assert same(tensors_of(tmp_path / "by_base"), hub_names())
    assert merge(source, tmp_path / "as_is", "--layout", "as-is") == 0
    assert same(tensors_of(tmp_path / "as_is"), vision_tensors())
    for out in ("out", "by_base", "as_is"):
        assert cli.run(["verify", str(tmp_path / out), "--against", str(source)]) == 0


@pytest.mark.parametrize("of_5", [True, False])
def test_case_109_fused_experts_in_the_orientation_of_the_repository(tmp_path: Path, *, of_5: bool) -> None:
    """E 4, I 6, H 8: transformers 5 has [E, 2I, H] in memory, 4.57 and every engine [E, H, 2I] for Qwen3-VL."""
    at = "model.language_model.layers.0.mlp.experts."
    gate_up, down = torch.randn(4, 8, 12).bfloat16(), torch.randn(4, 6, 8).bfloat16()
    text = llama_config(model_type="qwen3_vl_moe_text", num_experts=4, moe_intermediate_size=6)
    config = {
        "model_type": "qwen3_vl_moe",
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"model_type": "qwen3_vl_moe"},
        "tie_word_embeddings": False,
    }
    rest = {n.replace("model.", "model.language_model.", 1): t for n, t in llama().items() if ".mlp." not in n}
    rest |= {f"model.language_model.layers.0.self_attn.{k}_norm.weight": torch.ones(4).bfloat16() for k in "qk"}
    rest |= parts_of("qwen3_vl_moe.tf5", r"model\.visual\.")
    rest["model.language_model.layers.0.mlp.gate.weight"] = torch.randn(4, 8).bfloat16()
    rest["lm_head.weight"] = torch.randn(16, 8).bfloat16()
    in_memory = [t.transpose(1, 2).contiguous() if of_5 else t for t in (gate_up, down)]
    stored = dict(zip((f"{at}gate_up_proj", f"{at}down_proj"), in_memory, strict=True))
    assert merge(checkpoint(tmp_path / "ckpt", rest | stored, config), tmp_path / "out") == 0
    wanted = rest | {f"{at}gate_up_proj": gate_up, f"{at}down_proj": down}
    assert same(tensors_of(tmp_path / "out"), wanted)


EXPERTS = "model.layers.0.mlp.experts."
MIXTURE = llama_config(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], num_experts=4)


def mixture() -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """A Qwen3-MoE without its experts, and these as they are in memory: E 4, I 6, H 8."""
    rest = {n: t for n, t in llama().items() if ".mlp." not in n}
    rest |= {f"model.layers.0.self_attn.{k}_norm.weight": torch.ones(4).bfloat16() for k in "qk"}
    rest["model.layers.0.mlp.gate.weight"] = torch.randn(4, 8).bfloat16()
    return rest, torch.randn(4, 12, 8).bfloat16(), torch.randn(4, 8, 6).bfloat16()


def apart(gate_up: torch.Tensor, down: torch.Tensor) -> dict[str, torch.Tensor]:
    """The experts as in the repository."""
    made = {}
    for e in range(len(down)):
        gate, up = gate_up[e].chunk(2)
        made |= {f"{EXPERTS}{e}.gate_proj.weight": gate.contiguous(), f"{EXPERTS}{e}.up_proj.weight": up.contiguous()}
        made[f"{EXPERTS}{e}.down_proj.weight"] = down[e].contiguous()
    return made


@pytest.mark.parametrize("with_base", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_case_109_experts_are_apart_in_the_right_orientation(tmp_path: Path, *, with_base: bool, turned: bool) -> None:
    """[E, 2I, H] of transformers 5, or [E, H, 2I]: the shapes tell which."""
    rest, gate_up, down = mixture()
    fused = {f"{EXPERTS}gate_up_proj": gate_up, f"{EXPERTS}down_proj": down}
    stored = {n: t.transpose(1, 2).contiguous() if turned else t for n, t in fused.items()}
    wanted = rest | apart(gate_up, down)
    base = model_folder(tmp_path / "base", wanted, MIXTURE)
    options = ["--base-model", str(base)] if with_base else []
    assert merge(checkpoint(tmp_path / "ckpt", rest | stored, MIXTURE), tmp_path / "out", *options) == 0
    assert same(tensors_of(tmp_path / "out"), wanted)


def test_case_111_sizes_in_a_nested_text_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    flat = vision_config()
    text = {key: flat.pop(key) for key in sizes} | {"model_type": "qwen2_vl_text"}
    source = checkpoint(tmp_path / "ckpt", vision_tensors(), flat | {"text_config": text})
    assert merge(source, tmp_path / "out") == 0
    assert same(tensors_of(tmp_path / "out"), hub_names())
    wrong = checkpoint(tmp_path / "wrong", vision_tensors(), flat | {"text_config": text | {"vocab_size": 99}})
    assert merge(wrong, tmp_path / "none") == 5
    assert "vocab_size 99" in capsys.readouterr().err


def test_case_112_a_vision_prefix_is_mapped(tmp_path: Path) -> None:
    tensors = {n.replace("model.", "model.language_model.", 1): t for n, t in llama(head=False).items()}
    tensors |= parts_of("llava_clip.tf5", r"model\.(vision_tower|multi_modal_projector)\.")
    tensors["lm_head.weight"] = torch.ones(16, 8).bfloat16()
    config = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": llama_config(),
        "vision_config": {"model_type": "clip_vision_model"},
    }
    assert merge(checkpoint(tmp_path / "ckpt", tensors, config), tmp_path / "out") == 0
    found = tensors_of(tmp_path / "out")
    assert "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight" in found
    assert "language_model.lm_head.weight" in found
    assert "language_model.model.embed_tokens.weight" in found


def test_case_112_where_it_cannot_be_told_all_names_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown vision model: refused with the ways out, and both ways lead there."""
    tensors = llama() | {f"vision_model.blocks.{n}.weight": torch.ones(2, 2).bfloat16() for n in range(2)}
    config = llama_config(model_type="seeing_llama", architectures=["SeeingLlama"])
    source = checkpoint(tmp_path / "ckpt", tensors, config)
    assert merge(source, tmp_path / "out") == 1
    told = capsys.readouterr().err
    assert "seeing_llama" in told
    assert "--layout as-is" in told
    assert "--base-model" in told
    assert merge(source, tmp_path / "as_is", "--layout", "as-is") == 0
    base = model_folder(tmp_path / "base", tensors, config)
    assert merge(source, tmp_path / "by_base", "--base-model", str(base)) == 0
    assert same(tensors_of(tmp_path / "by_base"), tensors)


def test_case_112_in_a_family_that_has_none_all_names_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text model with a tower: every stranger is named, and a file of rules carries them through or drops them."""
    strangers = {f"vision_model.blocks.{n}.weight": torch.ones(2, 2).bfloat16() for n in range(2)}
    rest, gate_up, down = mixture()
    source = checkpoint(tmp_path / "ckpt", rest | apart(gate_up, down) | strangers, MIXTURE)
    assert merge(source, tmp_path / "out") != 0
    told = capsys.readouterr().err
    assert all(name in told for name in strangers)
    assert not (tmp_path / "out").exists()
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nrename = "vision_model.{rest}"\nto = "tower.{rest}"\n')
    assert merge(source, tmp_path / "renamed", "--rules", str(rules)) == 0
    assert {n for n in tensors_of(tmp_path / "renamed") if n.startswith("tower.")} == {
        name.replace("vision_model", "tower") for name in strangers
    }


def lora_tensors() -> dict[str, torch.Tensor]:
    """A Llama whose q_proj is adapted, rank 8, in peft's names."""
    at = "base_model.model.model.layers.0.self_attn.q_proj"
    named = {f"base_model.model.{name}": tensor for name, tensor in llama(dtype=torch.float32).items()}
    named[f"{at}.base_layer.weight"] = named.pop(f"{at}.weight")
    generator = torch.Generator().manual_seed(3)
    named[f"{at}.lora_A.default.weight"] = torch.randn(8, 8, generator=generator)
    named[f"{at}.lora_B.default.weight"] = torch.randn(8, 8, generator=generator)
    return named


Q = "model.layers.0.self_attn.q_proj.weight"


def test_case_113_alpha_is_read_or_asked_for_and_never_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(tmp_path / "ckpt", lora_tensors(), llama_config(torch_dtype="float32"))
    assert merge(source, tmp_path / "out") == 5
    assert "--lora-alpha" in capsys.readouterr().err
    (source / "lora_train_meta.json").write_text(json.dumps({"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"}))
    assert merge(source, tmp_path / "out", "--lora", "keep") == 0
    adapter = json.loads((tmp_path / "out" / "lora_adapter" / "adapter_config.json").read_text())
    assert adapter["lora_alpha"] == 16
    assert adapter["r"] == 8
    assert cli.run(["check", str(tmp_path / "out")]) == 0
    (source / "lora_train_meta.json").write_text(json.dumps({"r": 8, "lora_alpha": 0}))
    assert merge(source, tmp_path / "zero") == 5
    assert not (tmp_path / "zero").exists()


def test_case_114_folded_or_kept_and_no_prefix_is_left(tmp_path: Path) -> None:
    tensors = lora_tensors()
    plain = llama(dtype=torch.float32)
    source = checkpoint(tmp_path / "ckpt", tensors, llama_config(torch_dtype="float32"))
    assert merge(source, tmp_path / "folded", "--lora-alpha", "16") == 0
    found = tensors_of(tmp_path / "folded")
    assert found.keys() == plain.keys()
    at = "base_model.model.model.layers.0.self_attn.q_proj"
    delta = (tensors[f"{at}.lora_B.default.weight"] @ tensors[f"{at}.lora_A.default.weight"]) * 2.0
    torch.testing.assert_close(found[Q], plain[Q] + delta, rtol=1e-6, atol=1e-6)
    assert merge(source, tmp_path / "kept", "--lora-alpha", "16", "--lora", "keep") == 0
    assert same(tensors_of(tmp_path / "kept"), plain)
    assert (tmp_path / "kept" / "lora_adapter" / "adapter_model.safetensors").is_file()
    assert merge(source, tmp_path / "both", "--lora-alpha", "16", "--lora", "both") == 0
    assert torch.equal(tensors_of(tmp_path / "both")[Q], found[Q])
    assert (tmp_path / "both" / "lora_adapter" / "adapter_config.json").is_file()


def test_case_114_two_ranks_fold_to_what_one_holds(tmp_path: Path) -> None:
    """World size 2: the rows of W, A and B stand in two files, A's cut through the rank."""
    tensors = lora_tensors()
    config = llama_config(torch_dtype="float32")
    one = checkpoint(tmp_path / "one", tensors, config)
    two = write_ranks(
        tmp_path / "two",
        [2],
        {name: Spread(tensor, (Shard(0),)) for name, tensor in tensors.items()},
        config=config,
    )
    for out, source in (("of_one", one), ("of_two", two)):
        assert merge(source, tmp_path / out, "--lora-alpha", "16", "--lora", "both") == 0
    assert same(tensors_of(tmp_path / "of_two"), tensors_of(tmp_path / "of_one"))
    kept = [load_file(tmp_path / out / "lora_adapter" / "adapter_model.safetensors") for out in ("of_one", "of_two")]
    assert len(kept[0]) == 2
    assert same(*kept)


def test_case_116_a_doubled_prefix_is_taken_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {f"model.{name}": tensor for name, tensor in llama().items()}
    source = checkpoint(tmp_path / "ckpt", tensors, llama_config())
    assert merge(source, tmp_path / "out") == 0
    assert same(tensors_of(tmp_path / "out"), llama())
    assert "once too often" in capsys.readouterr().out
    base = model_folder(tmp_path / "base", llama(), llama_config())
    assert merge(source, tmp_path / "by_base", "--base-model", str(base)) == 0
    assert same(tensors_of(tmp_path / "by_base"), llama())


@pytest.mark.parametrize("given", [None, []])
def test_case_118_architectures_are_derived(tmp_path: Path, given: list[str] | None) -> None:
    source = checkpoint(tmp_path / "ckpt", llama(), llama_config(architectures=given))
    assert merge(source, tmp_path / "out") == 0
    assert config_of(tmp_path / "out") == llama_config()


def test_case_118_what_cannot_be_derived_is_left_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = llama_config(architectures=None, model_type="internlm2")
    assert merge(checkpoint(tmp_path / "ckpt", llama(), config), tmp_path / "out") == 0
    assert "architectures is empty and not known" in capsys.readouterr().out
    assert config_of(tmp_path / "out") == config
    assert cli.run(["check", str(tmp_path / "out")]) == 3
