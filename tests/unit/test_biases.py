"""Biases that the config promises or denies, in names and configs of transformers 4.57.6 and by hand."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.biases import check_biases, module_of
from merge_stream.errors import CheckpointError, IncompleteShardsError

TESTS = pathlib.Path(__file__).parents[1]
MADE = sorted((TESTS / "data/megatron_bridges").glob("*.json"))
GOLDENS = sorted((TESTS / "families/goldens").glob("*.json"))


def opened(path: pathlib.Path) -> tuple[set[str], dict[str, Any]]:
    document = json.loads(path.read_text())
    return set(document.get("hf") or document["outputs"]), document["config"]


def model(config: dict[str, Any]) -> ModelInfo:
    return ModelInfo(config, "hf/config.json")


@pytest.mark.parametrize("path", [*MADE, *GOLDENS], ids=lambda path: path.stem)
def test_a_model_of_transformers_has_what_its_config_says(path: pathlib.Path) -> None:
    names, config = opened(path)
    check_biases(names, model(config))
    check_biases(names, model({key: value for key, value in config.items() if value is not False}))


TOLD = [
    ("seed_oss.transformers", "attention_bias", "q_proj.bias"),
    ("glm4.transformers", "attention_bias", "v_proj.bias"),
    ("glm4_moe.mbridge", "attention_bias", "k_proj.bias"),
    ("gpt_neox.transformers", "attention_bias", "dense.bias"),
    ("gpt_oss.megatron-bridge", "attention_bias", "o_proj.bias"),
    ("starcoder2.transformers", "use_bias", "c_proj.bias"),
    ("qwen2_moe.mbridge", "qkv_bias", "k_proj.bias"),
]


@pytest.mark.parametrize(("file", "key", "bias"), TOLD)
def test_a_bias_that_every_layer_lacks_is_an_error(file: str, key: str, bias: str) -> None:
    names, config = opened(MADE[0].with_name(f"{file}.json"))
    left = {name for name in names if not name.endswith(bias)}
    assert left != names
    with pytest.raises(IncompleteShardsError, match=rf"{bias}.* missing: hf/config.json says {key} true"):
        check_biases(left, model(config))
    without_key = {name: value for name, value in config.items() if name != key}
    if file != "glm4_moe.mbridge":  # there false is what a config means that does not say it
        with pytest.raises(IncompleteShardsError, match=rf"has by default {key} true"):
            check_biases(left, model(without_key))


@pytest.mark.parametrize(("file", "key", "bias"), TOLD)
def test_a_bias_that_the_config_denies_is_an_error(file: str, key: str, bias: str) -> None:
    del bias
    names, config = opened(MADE[0].with_name(f"{file}.json"))
    with pytest.raises(CheckpointError, match=rf"says {key} false: loaders would leave out"):
        check_biases(names, model(config | {key: False}))
    check_biases(names, model(config | {key: False, "auto_map": {"AutoModelForCausalLM": "own.Model"}}))


def test_a_llama_has_no_biases_unless_its_config_says_so() -> None:
    names, config = opened(MADE[0].with_name("llama.megatron-bridge.json"))
    with pytest.raises(IncompleteShardsError, match="mlp_bias true"):
        check_biases(names, model(config | {"mlp_bias": True}))
    extra = "model.layers.1.self_attn.o_proj.bias"
    with pytest.raises(CheckpointError, match=f"{extra}, but hf/config.json says attention_bias false"):
        check_biases(names | {extra}, model(config))


ATTENTION = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj"
LATENT = "self_attn.q_a_proj self_attn.kv_a_proj_with_mqa self_attn.o_proj"
FFN = "mlp.gate_proj mlp.up_proj mlp.down_proj"
OF_FLAGS = [
    # model_type, flag, what it is when the config does not say it, modules of a layer with a bias, others without
    ("deepseek_v2", "attention_bias", False, LATENT, "self_attn.q_b_proj self_attn.kv_b_proj"),
    ("deepseek_v2", "mlp_bias", False, FFN, LATENT),
    ("deepseek_v3", "attention_bias", False, LATENT, "self_attn.q_b_proj self_attn.q_proj mlp.shared_experts.up_proj"),
    ("cohere", "attention_bias", False, ATTENTION, FFN),
    ("cohere2", "attention_bias", False, ATTENTION, FFN),
    ("ernie4_5", "use_bias", False, f"{ATTENTION} {FFN}", ""),
    ("ernie4_5_moe", "use_bias", False, f"{ATTENTION} mlp.shared_experts.up_proj", "mlp.gate"),
    (
        "stablelm",
        "use_qkv_bias",
        False,
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        f"self_attn.o_proj {FFN}",
    ),
    ("phimoe", "attention_bias", False, ATTENTION, "block_sparse_moe.gate"),
    ("jamba", "mamba_conv_bias", True, "mamba.conv1d", "mamba.in_proj"),
    ("lfm2", "conv_bias", False, "conv.conv conv.in_proj conv.out_proj", "self_attn.q_proj"),
]


@pytest.mark.parametrize(("kind", "flag", "default", "modules", "without"), OF_FLAGS)
@pytest.mark.parametrize("told", [True, False, None])
def test_what_a_flag_is_about(
    kind: str, flag: str, modules: str, without: str, *, default: bool, told: bool | None
) -> None:
    weights = {f"model.layers.1.{module}.weight" for module in f"{modules} {without}".split()}
    biases = {f"model.layers.1.{module}.bias" for module in modules.split()}
    config = model({"model_type": kind} | ({} if told is None else {flag: told}))
    there = default if told is None else told
    check_biases(weights | biases if there else weights, config)
    for bias in biases:
        if there:
            with pytest.raises(IncompleteShardsError, match=f"{bias} is missing: .* {flag} true"):
                check_biases(weights | biases - {bias}, config)
        else:
            with pytest.raises(CheckpointError, match=f"holds {bias}, but .* {flag} false"):
                check_biases(weights | {bias}, config)


def test_a_flag_may_be_about_an_end_of_the_model() -> None:
    opt = "model.decoder.layers.0.fc1"
    with pytest.raises(IncompleteShardsError, match=rf"{opt}\.bias is missing: .* has by default enable_bias true"):
        check_biases({f"{opt}.weight"}, model({"model_type": "opt"}))
    with pytest.raises(CheckpointError, match=r"lm_head\.bias, but .*lm_head_bias false"):
        check_biases({"lm_head.weight", "lm_head.bias"}, model({"model_type": "phimoe", "lm_head_bias": False}))


def test_a_config_inside_another_speaks_of_its_own_modules() -> None:
    query, projector = "language_model.model.layers.0.self_attn.q_proj", "multi_modal_projector.linear_1"
    tower = "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj"  # CLIP's has biases whatever the text says
    names = {f"{module}.weight" for module in (query, projector, tower)} | {f"{projector}.bias", f"{tower}.bias"}
    config: dict[str, Any] = {"model_type": "llava", "text_config": {"model_type": "llama"}}
    check_biases(names, model(config))
    check_biases(names - {f"{tower}.bias"}, model(config))
    with pytest.raises(CheckpointError, match=rf"{query}\.bias, but .* text_config\.attention_bias false"):
        check_biases(names | {f"{query}.bias"}, model(config))
    with pytest.raises(
        IncompleteShardsError, match=r"projector\.linear_1\.bias is missing: .*multimodal_projector_bias"
    ):
        check_biases(names - {f"{projector}.bias"}, model(config))
    deeper = {"model_type": "qwen2_5_omni", "thinker_config": {"model_type": "qwen3_omni_moe_thinker", **config}}
    deeper["thinker_config"]["model_type"] = "qwen3_omni_moe_thinker"
    with pytest.raises(CheckpointError, match=r"thinker_config\.text_config\.attention_bias false"):
        check_biases({f"thinker.model.{query[21:]}.{leaf}" for leaf in ("weight", "bias")}, model(deeper))


def test_modules_have_open_numbers_and_no_stem() -> None:
    assert module_of("model.layers.3.mlp.experts.17.up_proj.bias") == "layers.#.mlp.experts.#.up_proj"
    assert module_of("language_model.model.layers.3.self_attn.q_proj.bias") == "layers.#.self_attn.q_proj"
    assert module_of("gpt_neox.layers.0.attention.dense.weight") == "layers.#.attention.dense"
    assert (
        module_of("vision_tower.encoder.layer.1.attention.q_proj.bias")
        == "vision_tower.encoder.layer.#.attention.q_proj"
    )
