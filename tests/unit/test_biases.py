"""Biases that the config promises or denies: names and configs of transformers 4.57.6 (tests/data/megatron_bridges)."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.biases import check_biases
from merge_stream.errors import CheckpointError, IncompleteShardsError

MADE = sorted((pathlib.Path(__file__).parents[1] / "data" / "megatron_bridges").glob("*.json"))


def opened(path: pathlib.Path) -> tuple[set[str], dict[str, Any]]:
    document = json.loads(path.read_text())
    return set(document["hf"]), document["config"]


def model(config: dict[str, Any]) -> ModelInfo:
    return ModelInfo(config, "hf/config.json")


@pytest.mark.parametrize("path", MADE, ids=lambda path: path.stem)
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
