"""config.json of the output: untouched when it can be, else changed in as few keys as possible."""

from __future__ import annotations

import json
from typing import Any

import pytest

from merge_stream.output.class_names import class_for
from merge_stream.output.config_patch import OutputTensor, dominant_dtype, patch_config
from merge_stream.output.index import build_index
from merge_stream.tensors.dtype import DTYPES

CAUSAL = ["LlamaForCausalLM"]
BY_NAME = {d.name: d for d in DTYPES}


def tensors(**sizes: int) -> list[OutputTensor]:
    """One tensor of each size, named by its dtype."""
    return [OutputTensor(f"model.layers.0.{name}.weight", BY_NAME[name], size) for name, size in sizes.items()]


def text_of(config: dict[str, Any], **how: Any) -> bytes:
    return (json.dumps(config, indent=2, **how) + "\n").encode()


def patched(config: dict[str, Any], outputs: list[OutputTensor], *, untied: bool = False) -> dict[str, Any]:
    return dict(json.loads(patch_config(text_of(config), outputs, untied=untied).data))


@pytest.mark.parametrize(
    "original",
    [
        b'{"architectures": ["A"],   "dtype":"bfloat16", "x": 1e-5}',
        b'{\n    "torch_dtype": "bfloat16",\n    "architectures": ["A"],\n    "n": "\xc3\xa9\\u00e9"\n}',
        b'\xef\xbb\xbf{"architectures": ["A"]}\r\n',
        b'{"architectures": ["A"], "dtype": "torch.bfloat16"}',
    ],
)
def test_nothing_to_change_gives_the_very_bytes(original: bytes) -> None:
    result = patch_config(original, tensors(BF16=10, F32=2, I64=99), untied=False)
    assert result.data == original
    assert result.notes == ()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("was", [None, "float32"])
def test_case_128_dtype_is_that_of_the_weights_in_all_nests(key: str, was: str | None) -> None:
    config = {
        key: was,
        "architectures": CAUSAL,
        "text_config": {key: "float32", "vision_config": {}},
        "vision_config": {key: was, "quantization_config": {key: "float32"}},
        "rope_scaling": {key: "float32"},
    }
    got = patch_config(text_of(config), tensors(BF16=10, F32=3), untied=False)
    document = json.loads(got.data)
    assert document[key] == document["text_config"][key] == document["vision_config"][key] == "bfloat16"
    assert document["rope_scaling"][key] == "float32"
    assert len([note for note in got.notes if key in note]) == 3


def test_a_vision_tower_keeps_its_own_dtype() -> None:
    outputs = [
        *tensors(BF16=100),
        OutputTensor("vision_tower.a.weight", BY_NAME["F32"], 5),
    ]
    config = {"architectures": CAUSAL, "dtype": "bfloat16", "vision_config": {"dtype": "float32"}}
    assert patch_config(text_of(config), outputs, untied=False).data == text_of(config)


def test_no_dtype_key_is_added() -> None:
    assert patched({"architectures": CAUSAL}, tensors(F16=1)) == {"architectures": CAUSAL}


def test_dominant_dtype_counts_elements_of_floats_only() -> None:
    dominant = dominant_dtype(tensors(BF16=10, F32=11, I64=1000))
    assert dominant is not None
    assert dominant.name == "F32"
    assert dominant_dtype(tensors(I64=1)) is None


def test_case_71_broken_tie_is_written_where_it_stands() -> None:
    config = {
        "architectures": CAUSAL,
        "tie_word_embeddings": True,
        "text_config": {"tie_word_embeddings": True, "a": 1},
    }
    result = patch_config(text_of(config), tensors(BF16=1), untied=True)
    document = json.loads(result.data)
    assert document["tie_word_embeddings"] is False
    assert document["text_config"] == {"tie_word_embeddings": False, "a": 1}
    assert len(result.notes) == 2


def test_case_71_tie_by_default_is_undone_at_the_top_and_in_the_text_nest() -> None:
    document = patched({"architectures": CAUSAL, "text_config": {}}, tensors(BF16=1), untied=True)
    assert document["tie_word_embeddings"] is False
    assert document["text_config"]["tie_word_embeddings"] is False


@pytest.mark.parametrize("config", [{"architectures": None, "model_type": "qwen2"}, {"model_type": "qwen2"}])
def test_case_118_architectures_are_derived_when_clearly_known(config: dict[str, Any]) -> None:
    result = patch_config(text_of(config), tensors(BF16=1), untied=False)
    assert json.loads(result.data)["architectures"] == ["Qwen2ForCausalLM"]
    assert "architectures was empty" in result.notes[0]


def test_case_118_unknown_architectures_are_left_with_a_note() -> None:
    config = {"architectures": None, "model_type": "brand_new"}
    result = patch_config(text_of(config), tensors(BF16=1), untied=False)
    assert result.data == text_of(config)
    assert "left as it is" in result.notes[0]


@pytest.mark.parametrize(
    ("model_type", "names", "wanted"),
    [
        ("llama", ["lm_head.weight"], "LlamaForCausalLM"),
        ("gpt2", ["transformer.wte.weight"], "GPT2LMHeadModel"),
        ("phimoe", ["lm_head.weight"], "PhiMoEForCausalLM"),  # as engines and the repository spell it
        ("exaone_moe", ["lm_head.weight"], "ExaoneMoEForCausalLM"),
        ("qwen2", ["score.weight", "score.bias"], "Qwen2ForTokenClassification"),
        ("qwen2", ["score.weight"], "Qwen2ForSequenceClassification"),
        ("qwen2", ["v_head.summary.weight", "lm_head.weight"], None),
        ("mamba", ["score.weight"], None),
        ("qwen2_5_vl", ["lm_head.weight", "visual.x.weight"], "Qwen2_5_VLForConditionalGeneration"),
        ("", [], None),
    ],
)
def test_class_by_model_type_and_head(model_type: str, names: list[str], wanted: str | None) -> None:
    assert class_for(model_type, names) == wanted


def test_quantization_config_of_the_base_goes_with_plain_weights() -> None:
    config = {
        "architectures": CAUSAL,
        "quantization_config": {"quant_method": "fp8"},
        "text_config": {"quantization_config": {}},
    }
    result = patch_config(text_of(config), tensors(BF16=1), untied=False)
    assert json.loads(result.data) == {"architectures": CAUSAL, "text_config": {}}
    assert "fp8" in result.notes[0]


@pytest.mark.parametrize(
    "quantized",
    [
        tensors(F8_E4M3=5),
        [OutputTensor("model.layers.0.mlp.experts.gate_up_proj_blocks", BY_NAME["U8"], 5)],
    ],
)
def test_quantization_config_stays_with_quantized_weights(quantized: list[OutputTensor]) -> None:
    config = {"architectures": CAUSAL, "quantization_config": {"quant_method": "fp8"}}
    assert patch_config(text_of(config), quantized, untied=False).data == text_of(config)


@pytest.mark.parametrize("indent", [2, 4, "\t"])
@pytest.mark.parametrize("newline", ["", "\n"])
def test_order_indent_newline_and_letters_stay(indent: int | str, newline: str) -> None:
    config = {"z": "é", "architectures": CAUSAL, "dtype": None, "a": [1, 2.5], "m": {}}
    original = (json.dumps(config, indent=indent, ensure_ascii=False) + newline).encode()
    result = patch_config(original, tensors(BF16=1), untied=False)
    assert result.data == original.replace(b"null", b'"bfloat16"')


def test_one_line_stays_one_line() -> None:
    result = patch_config(b'{"architectures": ["A"], "dtype": null}', tensors(F32=1), untied=False)
    assert result.data == b'{"architectures": ["A"], "dtype": "float32"}'


def test_index_is_as_the_hub_writes_it() -> None:
    data = build_index({"b": "y", "a": "x"}, total_size=12, total_parameters=6)
    assert data == (
        b'{\n  "metadata": {\n    "total_parameters": 6,\n    "total_size": 12\n  },\n'
        b'  "weight_map": {\n    "a": "x",\n    "b": "y"\n  }\n}\n'
    )
