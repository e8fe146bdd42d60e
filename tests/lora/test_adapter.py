"""Adapters kept beside the model, adapters alone, and `verify` of folded and kept models."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest
import torch
from safetensors.torch import load_file, save_file

from merge_stream.api import merge, verify
from merge_stream.errors import CheckpointError, MergeStreamError, UnsupportedError
from merge_stream.options import LoraChoice, MergeOptions
from tests.folder.models import checkpoint, llama, llama_config, model_folder
from tests.lora.goldens import (
    Golden,
    differences,
    golden,
    read_model,
    write_adapter,
    write_base,
    write_state,
)

KEPT = [
    "conv1d",
    "dora_bf16_fp32",
    "embedding_bf16",
    "experts_bf16_fp32",
    "lora_bias",
    "modules_to_save",
    "other_name",
    "patterns",
]
ALONE = [*KEPT, "embedding_dora", "experts_transposed", "parameter_2d", "rslora"]


def kept(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "lora_adapter" / "adapter_model.safetensors")


@pytest.mark.parametrize("name", KEPT)
def test_kept_model_is_the_plain_base_and_the_adapter_as_peft_writes_it(name: str, tmp_path: pathlib.Path) -> None:
    made = golden(name)
    ckpt = write_state(tmp_path / "ckpt", made)
    merge(ckpt, tmp_path / "out", MergeOptions(lora=LoraChoice("keep"), layout="as-is"))
    got = read_model(tmp_path / "out")
    assert set(got) == set(made.original)
    assert not differences(got, made.original, got)
    adapter = kept(tmp_path / "out")
    # peft copies adapted embeddings and heads too; they stand in the model beside
    assert {n for n in made.adapter if not n.endswith(".base_layer.weight")} == set(adapter)
    assert not differences(adapter, made.adapter, adapter)
    written = (tmp_path / "out" / "lora_adapter" / "adapter_config.json").read_bytes()
    assert written == (ckpt / "adapter_config.json").read_bytes()
    assert verify(tmp_path / "out", ckpt).ok


@pytest.mark.parametrize("name", ALONE)
def test_adapter_alone_is_folded_into_the_base_model(name: str, tmp_path: pathlib.Path) -> None:
    made = golden(name)
    adapter = write_adapter(tmp_path / "adapter", made)
    base = write_base(tmp_path / "base", made)
    merge(adapter, tmp_path / "out", MergeOptions(base_model=str(base)))
    got = read_model(tmp_path / "out")
    assert set(got) == set(made.merged)
    assert not differences(got, made.merged, got)
    assert verify(tmp_path / "out", adapter, base_model=str(base)).ok
    assert verify(tmp_path / "out", write_state(tmp_path / "ckpt", made)).ok


@pytest.mark.parametrize("name", ["patterns", "embedding_bf16", "experts_bf16_fp32", "modules_to_save"])
def test_adapter_alone_is_kept_as_it_is(name: str, tmp_path: pathlib.Path) -> None:
    made = golden(name)
    adapter = write_adapter(tmp_path / "adapter", made)
    merge(adapter, tmp_path / "out", MergeOptions(lora=LoraChoice("keep")))
    assert {p.name for p in (tmp_path / "out").iterdir()} <= {"lora_adapter", "README.md"}
    got = kept(tmp_path / "out")
    assert set(got) == set(made.adapter)
    assert not differences(got, made.adapter, got)
    assert verify(tmp_path / "out", adapter).ok


def test_state_dict_of_an_adapter_alone_is_folded_too(tmp_path: pathlib.Path) -> None:
    """Verl with `save_lora_only`: the trainer's names, and no weight."""
    made = golden("dora_bf16_fp32")
    lone = dataclasses.replace(made, state={n: t for n, t in made.state.items() if ".lora_" in n})
    ckpt, base = write_state(tmp_path / "ckpt", lone), write_base(tmp_path / "base", made)
    merge(ckpt, tmp_path / "out", MergeOptions(base_model=str(base)))
    got = read_model(tmp_path / "out")
    assert not differences(got, made.merged, made.merged)
    with pytest.raises(CheckpointError, match="none of the weights") as caught:
        merge(ckpt, tmp_path / "other")
    assert "--base-model" in str(caught.value)
    assert "--lora keep" in str(caught.value)


def upstream_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Qwen3-MoE as in its repository: one matrix for each expert."""
    plain = {}
    for name, tensor in tensors.items():
        at = name.rpartition(".")[0]
        for e in range(tensor.shape[0]) if tensor.dim() == 3 else ():
            half = tensor.shape[1] // 2
            if name.endswith("gate_up_proj"):
                plain[f"{at}.{e}.gate_proj.weight"] = tensor[e, :half].contiguous()
                plain[f"{at}.{e}.up_proj.weight"] = tensor[e, half:].contiguous()
            else:
                plain[f"{at}.{e}.down_proj.weight"] = tensor[e].contiguous()
        if tensor.dim() != 3:
            plain[name] = tensor
    return plain


@pytest.mark.parametrize("name", ["experts_bf16_fp32", "experts_0_18", "experts_one"])
def test_fused_experts_are_folded_before_they_are_split(name: str, tmp_path: pathlib.Path) -> None:
    made = golden(name)
    merge(write_state(tmp_path / "ckpt", made), tmp_path / "out")
    wanted = upstream_experts(made.merged)
    got = read_model(tmp_path / "out")
    assert set(got) == set(wanted)
    assert not differences(got, wanted, wanted)


@pytest.mark.parametrize("name", ["experts_bf16_fp32", "experts_0_18", "experts_one"])
def test_adapter_of_fused_experts_is_folded_into_a_repository_with_single_ones(
    name: str, tmp_path: pathlib.Path
) -> None:
    made = golden(name)
    base = write_base(tmp_path / "base", made)
    save_file(upstream_experts(made.original), base / "model.safetensors")
    adapter = write_adapter(tmp_path / "adapter", made)
    merge(adapter, tmp_path / "out", MergeOptions(base_model=str(base)))
    wanted = upstream_experts(made.merged)
    got = read_model(tmp_path / "out")
    assert set(got) == set(wanted)
    assert not differences(got, wanted, wanted)
    assert verify(tmp_path / "out", adapter, base_model=str(base)).ok


def test_both_writes_the_folded_model_and_the_adapter(tmp_path: pathlib.Path) -> None:
    made = golden("vanilla")
    ckpt = write_state(tmp_path / "ckpt", made)
    merge(ckpt, tmp_path / "out", MergeOptions(lora=LoraChoice("both")))
    got = read_model(tmp_path / "out")
    assert not differences(got, made.merged, got)
    assert set(kept(tmp_path / "out")) == set(made.adapter)
    assert verify(tmp_path / "out", ckpt, lora=LoraChoice("both")).ok
    assert not verify(tmp_path / "out", ckpt).ok


def test_verify_sees_a_changed_adapter(tmp_path: pathlib.Path) -> None:
    ckpt = write_state(tmp_path / "ckpt", golden("vanilla"))
    merge(ckpt, tmp_path / "out", MergeOptions(lora=LoraChoice("keep")))
    where = tmp_path / "out" / "lora_adapter" / "adapter_model.safetensors"
    tensors = load_file(where)
    first = min(tensors)
    tensors[first] = tensors[first] + 1
    save_file(tensors, where)
    verdict = verify(tmp_path / "out", ckpt)
    assert [d.name for d in verdict.differences] == [first]


def test_an_adapter_of_another_model_is_refused(tmp_path: pathlib.Path) -> None:
    made, other = golden("conv1d"), golden("vanilla")
    adapter = write_adapter(tmp_path / "adapter", made)
    base = write_base(tmp_path / "base", other)
    with pytest.raises(CheckpointError, match=r"transformer\.h\.0"):
        merge(adapter, tmp_path / "out", MergeOptions(base_model=str(base)))
    assert not (tmp_path / "out").exists()


def test_pissa_without_its_base_is_refused(tmp_path: pathlib.Path) -> None:
    """Training began by changing the base weights: the original ones are the wrong ones to fold into."""
    made = golden("vanilla")
    made.settings["init_lora_weights"] = "pissa"
    adapter, base = write_adapter(tmp_path / "adapter", made), write_base(tmp_path / "base", made)
    with pytest.raises(UnsupportedError, match="pissa"):
        merge(adapter, tmp_path / "out", MergeOptions(base_model=str(base)))
    merge(write_state(tmp_path / "ckpt", made), tmp_path / "whole")


def changed(made: Golden, **settings: object) -> Golden:
    return dataclasses.replace(made, settings={**made.settings, **settings})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"peft_type": "ADALORA"}, "ADALORA"),
        ({"use_dora": True}, "use_dora True"),
        ({"r": 5}, "rank 4"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"rank_pattern": {"(": 3}}, "no regular expression"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, object], told: str, tmp_path: pathlib.Path) -> None:
    ckpt = write_state(tmp_path / "ckpt", changed(golden("vanilla"), **settings))
    with pytest.raises(MergeStreamError, match=told):
        merge(ckpt, tmp_path / "out")


@pytest.mark.parametrize("alone", [True, False])
def test_a_kept_adapter_whose_settings_leave_factors_out_is_refused(tmp_path: pathlib.Path, *, alone: bool) -> None:
    """Peft makes layers for the modules that `target_modules` names, and has no place for other factors."""
    made = golden("vanilla")
    modules = sorted({n.split(".lora_")[0].rpartition(".")[2] for n in made.adapter if ".lora_A" in n})
    few = dataclasses.replace(made, settings={**made.settings, "target_modules": modules[:1]})
    source = (write_adapter if alone else write_state)(tmp_path / "few", few)
    with pytest.raises(CheckpointError, match=f"targets {modules[0]}, and .*{modules[1]} has LoRA factors"):
        merge(source, tmp_path / "out", MergeOptions(lora=LoraChoice("keep"), layout="as-is"))
    assert not (tmp_path / "out").exists()
    for given in (modules, "all-linear", ".*_proj", [f"x.{modules[0]}", *modules]):
        made = dataclasses.replace(made, settings={**made.settings, "target_modules": given})
        source = (write_adapter if alone else write_state)(tmp_path / f"all{len(str(given))}", made)
        merge(source, tmp_path / f"out{len(str(given))}", MergeOptions(lora=LoraChoice("keep"), layout="as-is"))


def test_case_113_alpha_zero_is_never_believed(tmp_path: pathlib.Path) -> None:
    made = golden("vanilla")
    ckpt = write_state(tmp_path / "ckpt", changed(made, lora_alpha=0))
    with pytest.raises(CheckpointError, match="lora_alpha is nowhere") as caught:
        merge(ckpt, tmp_path / "out")
    assert "--lora-alpha N" in str(caught.value)
    (ckpt / "lora_train_meta.json").write_text(json.dumps({"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM"}))
    merge(ckpt, tmp_path / "out")
    got = read_model(tmp_path / "out")
    assert not differences(got, made.merged, got)


@pytest.mark.parametrize("alpha", [6, 0])
def test_case_113_alpha_is_given(alpha: float, tmp_path: pathlib.Path) -> None:
    made = golden("vanilla")
    ckpt = write_state(tmp_path / "ckpt", made, settings=False)
    options = MergeOptions(lora=LoraChoice("merge", alpha))
    if not alpha:
        with pytest.raises(CheckpointError, match="--lora-alpha 0"):
            merge(ckpt, tmp_path / "out", options)
        return
    merge(ckpt, tmp_path / "out", options)
    got = read_model(tmp_path / "out")
    assert not differences(got, made.merged, got)
    merge(ckpt, tmp_path / "kept", MergeOptions(lora=LoraChoice("keep", alpha)))
    config = json.loads((tmp_path / "kept" / "lora_adapter" / "adapter_config.json").read_bytes())
    assert config["lora_alpha"] == 6
    assert config["r"] == 4
    assert set(config["target_modules"]) == set(made.settings["target_modules"])


def test_case_114_no_prefix_of_peft_is_left(tmp_path: pathlib.Path) -> None:
    ckpt = write_state(tmp_path / "ckpt", golden("all_linear"))
    for mode in ("merge", "keep"):
        merge(ckpt, tmp_path / mode, MergeOptions(lora=LoraChoice(mode)))
        names = list(read_model(tmp_path / mode))
        assert not [n for n in names if "base_model" in n or "base_layer" in n or "lora_" in n]


def test_lora_option_without_lora_is_an_error(tmp_path: pathlib.Path) -> None:
    base = write_base(tmp_path / "base", golden("vanilla"))
    for choice in (LoraChoice("keep"), LoraChoice(None, 8)):
        with pytest.raises(CheckpointError, match="no LoRA tensors"):
            merge(base, tmp_path / "out", MergeOptions(lora=choice))


def test_lone_factor_and_two_adapters_are_refused(tmp_path: pathlib.Path) -> None:
    made = golden("vanilla")
    first = next(n for n in made.state if ".lora_A." in n)
    lone = dataclasses.replace(made, state={n: t for n, t in made.state.items() if n != first})
    with pytest.raises(CheckpointError, match="has not both"):
        merge(write_state(tmp_path / "lone", lone), tmp_path / "out")
    second = {n.replace(".default.", ".other."): t.clone() for n, t in made.state.items() if ".lora_" in n}
    two = dataclasses.replace(made, state={**made.state, **second})
    with pytest.raises(UnsupportedError, match="2 adapters: default, other"):
        merge(write_state(tmp_path / "two", two), tmp_path / "out")


def test_quantized_base_is_refused(tmp_path: pathlib.Path) -> None:
    made = golden("vanilla")
    name = next(n for n in made.state if n.endswith("q_proj.base_layer.weight"))
    state = {**made.state, name: made.state[name].to(torch.float8_e4m3fn)}
    with pytest.raises(UnsupportedError, match="quantized"):
        merge(write_state(tmp_path / "ckpt", dataclasses.replace(made, state=state)), tmp_path / "out")


def test_square_conv1d_without_settings_is_told_by_the_model_type(tmp_path: pathlib.Path) -> None:
    made = golden("conv1d_head")
    ckpt = write_state(tmp_path / "ckpt", made, settings=False)
    merge(ckpt, tmp_path / "out", MergeOptions(lora=LoraChoice("merge", 6), layout="as-is"))
    got = read_model(tmp_path / "out")
    assert not differences(got, made.merged, got)


def test_adapter_speaks_the_names_of_memory_and_the_base_those_of_its_repository(tmp_path: pathlib.Path) -> None:
    """Qwen2.5-VL: `model.language_model.layers` in memory is `model.layers` in the repository."""
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: torch.randn(16, 16, generator=generator)
        for name in ("model.layers.0.self_attn.q_proj.weight", "visual.merger.mlp.0.weight", "lm_head.weight")
    }
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    save_file(weights, base / "model.safetensors")
    (base / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "tie_word_embeddings": False}))
    at = "base_model.model.model.language_model.layers.0.self_attn.q_proj"
    a, b = torch.randn(4, 16, generator=generator), torch.randn(16, 4, generator=generator)
    save_file({f"{at}.lora_A.weight": a, f"{at}.lora_B.weight": b}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}))
    merge(adapter, tmp_path / "out", MergeOptions(base_model=str(base)))
    wanted = {**weights}
    wanted["model.layers.0.self_attn.q_proj.weight"] = weights["model.layers.0.self_attn.q_proj.weight"] + b @ a * 2.0
    got = read_model(tmp_path / "out")
    assert set(got) == set(wanted)
    assert not differences(got, wanted, wanted)


Q = "base_model.model.model.layers.0.self_attn.q_proj"


def critic() -> dict[str, torch.Tensor]:
    """A value model with LoRA: its head was trained whole, as peft wraps it."""
    named = {f"base_model.model.{n}": t for n, t in llama().items() if n != "lm_head.weight"}
    named[f"{Q}.base_layer.weight"] = named.pop(f"{Q}.weight")
    named |= {f"{Q}.lora_A.default.weight": torch.ones(2, 8), f"{Q}.lora_B.default.weight": torch.ones(8, 2)}
    head = "base_model.model.score."
    for part, shape in (("weight", (1, 8)), ("bias", (1,))):
        named[f"{head}original_module.{part}"] = torch.zeros(shape).bfloat16()
        named[f"{head}modules_to_save.default.{part}"] = torch.ones(shape).bfloat16()
    return named


@pytest.mark.parametrize("lost", ["original_module.weight", "modules_to_save.default.bias"])
def test_a_module_saved_in_half_is_refused(lost: str, tmp_path: pathlib.Path) -> None:
    """Else the untrained part would stand beside the trained one."""
    state = {name: tensor for name, tensor in critic().items() if not name.endswith(lost)}
    source = checkpoint(tmp_path / "ckpt", state, llama_config())
    with pytest.raises(CheckpointError, match=r"of score\.(weight|bias) is missing"):
        merge(source, tmp_path / "out", MergeOptions(lora=LoraChoice("merge", 4)))
    assert not (tmp_path / "out").exists()


def test_a_value_adapter_alone_takes_the_place_of_the_base_models_head(tmp_path: pathlib.Path) -> None:
    """Peft loads a base for token classification, which has no lm_head."""
    whole = checkpoint(tmp_path / "ckpt", critic(), llama_config())
    merge(whole, tmp_path / "whole", MergeOptions(lora=LoraChoice("both", 4)))
    base = model_folder(tmp_path / "base", llama(), llama_config())
    alone = tmp_path / "whole" / "lora_adapter"
    report = merge(alone, tmp_path / "out", MergeOptions(base_model=str(base)))
    got, wanted = read_model(tmp_path / "out"), read_model(tmp_path / "whole")
    assert not differences(got, wanted, got)
    assert set(got) == set(wanted)
    assert "lm_head.weight" not in got
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForTokenClassification"]
    assert any("lm_head.weight of the base model is left out" in note for note in report.notes)
    assert verify(tmp_path / "out", alone, base_model=str(base)).ok
