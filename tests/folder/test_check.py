"""`check`: each thing that an engine refuses or misreads is found, named, and nothing is said about a sound folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from merge_stream import cli
from merge_stream.containers.safetensors_file import HeaderEntry, build_header
from merge_stream.tensors.dtype import dtype_named
from merge_stream.verification.check import check_folder
from tests.folder.models import checkpoint, config_of, llama, llama_config, merge, model_folder

VOCABULARY = {f"t{n}": n for n in range(16)}
SIDE = {
    "tokenizer.json": json.dumps({"model": {"type": "BPE", "vocab": VOCABULARY}}),
    "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ m }}"}),
    "generation_config.json": json.dumps({"eos_token_id": [1, 2]}),
}


def folder(tmp_path: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    return model_folder(tmp_path / "m", tensors or llama(), llama_config(**config), SIDE)


def several(tmp_path: Path) -> Path:
    """A sound folder of several files with an index."""
    source = checkpoint(tmp_path / "ckpt", llama(2), llama_config(num_hidden_layers=2), SIDE)
    assert merge(source, tmp_path / "m", "--max-shard-size", "600") == 0
    return tmp_path / "m"


def rules(path: Path, severity: str | None = None) -> set[str]:
    return {f.rule for f in check_folder(path).findings if severity in {None, f.severity}}


def rewrite(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: content for key, content in value.items() if content is not None}))


def test_a_sound_folder_gets_no_word(tmp_path: Path) -> None:
    assert check_folder(folder(tmp_path)).findings == ()


def test_what_a_merge_writes_is_sound(tmp_path: Path) -> None:
    found = check_folder(several(tmp_path))
    assert found.findings == ()
    assert found.files > 2
    assert found.tensors == len(llama(2))


def test_exit_codes_json_and_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder(tmp_path)
    assert cli.run(["check", str(path)]) == 0
    assert capsys.readouterr().out.startswith("ok: ")
    (path / "config.json").unlink()
    assert cli.run(["check", str(path), "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert told["findings"][0] == {
        "severity": "error",
        "about": "config",
        "rule": "config-readable",
        "loaders": "all",
        "text": "config.json is not there",
        "hint": "copy it from the base model",
    }
    assert cli.run(["check", str(path), "-q"]) == 3
    assert capsys.readouterr().out.startswith("NOT OK: ")
    assert cli.run(["check", str(tmp_path / "none")]) == 5
    assert "not there" in capsys.readouterr().err


def test_a_large_folder_takes_seconds(tmp_path: Path) -> None:
    entries, at = [], 0
    dtype = dtype_named("BF16")
    assert dtype is not None
    for number in range(50_000):
        entries.append(HeaderEntry(f"model.layers.0.x.{number}.weight", dtype, (8, 8), at, at + 128))
        at += 128
    header = build_header(entries)
    (tmp_path / "config.json").write_text(json.dumps(llama_config()))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + at)
    began = time.monotonic()
    check_folder(tmp_path)
    assert time.monotonic() - began < 20


# ------------------------------------------------------------------------------------------------ files


def _drop_file(path: Path) -> None:
    next(path.glob("model-00002*")).unlink()


def _drop_from_index(path: Path) -> None:
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"].pop("lm_head.weight")
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _add_to_index(path: Path) -> None:
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"]["ghost.weight"] = "model-00001-of-" + next(path.glob("model-00001*")).name[-17:]
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _swap_in_index(path: Path) -> None:
    index = json.loads((path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"]["lm_head.weight"] = next(f for f in files if f != index["weight_map"]["lm_head.weight"])
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _no_index(path: Path) -> None:
    (path / "model.safetensors.index.json").unlink()


def _broken_index(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text('{"weight_map": [')


def _cut(path: Path) -> None:
    file = next(path.glob("model-00001*"))
    os.truncate(file, file.stat().st_size - 2)


def _tail(path: Path) -> None:
    with next(path.glob("model-00001*")).open("ab") as file:
        file.write(b"\0\0")


def _stale(path: Path) -> None:
    save_file({"old.weight": torch.zeros(2)}, path / "model-00001-of-00099.safetensors", {"format": "pt"})
    (path / "model-00001-of-00099.safetensors").chmod(0o644)


def _twice(path: Path) -> None:
    index = json.loads((path / "model.safetensors.index.json").read_text())
    first, second = sorted(set(index["weight_map"].values()))[:2]
    (path / second).write_bytes((path / first).read_bytes())


def _pointer(path: Path) -> None:
    next(path.glob("model-00001*")).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def _dead_link(path: Path) -> None:
    (path / "vocab.json").symlink_to(path / "nowhere")


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (_drop_file, "index-files"),
        (_drop_from_index, "index-tensors"),
        (_add_to_index, "index-tensors"),
        (_swap_in_index, "index-tensors"),
        (_no_index, "index-missing"),
        (_broken_index, "index-readable"),
        (_cut, "header"),
        (_tail, "header"),
        (_stale, "stale-files"),
        (_twice, "double"),
        (_pointer, "lfs-pointer"),
        (_dead_link, "link"),
    ],
)
def test_damaged_files_are_errors_about_files(tmp_path: Path, damage: Callable[[Path], None], rule: str) -> None:
    path = several(tmp_path)
    damage(path)
    found = [f for f in check_folder(path).findings if f.rule == rule]
    assert found
    assert {(f.severity, f.about) for f in found} == {("error", "files")}
    assert all(f.loaders and f.text for f in found)


def test_files_without_index_that_are_incomplete(tmp_path: Path) -> None:
    path = several(tmp_path)
    _no_index(path)
    _drop_file(path)
    assert {"files-complete", "index-missing"} <= rules(path, "error")


def test_any_safetensors_beside_a_single_file_is_an_error_for_vllm(tmp_path: Path) -> None:
    path = folder(tmp_path)
    save_file({"x": torch.zeros(2)}, path / "adapter_model.safetensors")
    found = next(f for f in check_folder(path).findings if f.rule == "stale-files")
    assert found.severity == "error"
    assert found.loaders == "vLLM"


def test_other_weights_and_unfinished_writes_are_warnings(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "pytorch_model.bin").write_bytes(b"old")
    (path / "x.partial").write_bytes(b"")
    (path / "original").mkdir()
    assert rules(path, "warning") == {"other-weights", "unfinished"}
    assert rules(path, "note") == {"original"}


def test_closed_modes_are_told(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "model.safetensors").chmod(0o600)
    assert rules(path) == {"modes"}


def test_format_and_alignment(tmp_path: Path) -> None:
    path = folder(tmp_path)
    tensors = llama()
    save_file(tensors, path / "model.safetensors")
    (path / "model.safetensors").chmod(0o644)
    assert rules(path) == {"format"}
    save_file(tensors, path / "model.safetensors", {"format": "np"})
    (path / "model.safetensors").chmod(0o644)
    assert rules(path, "error") == {"format"}
    header = b'{"__metadata__":{"format":"pt"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    header += b'"b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}}'
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 5)
    assert "alignment" in rules(path, "warning")


def test_a_folder_without_weights(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "model.safetensors").unlink()
    assert rules(path, "error") == {"no-weights"}


def test_an_adapter_needs_its_alpha(tmp_path: Path) -> None:
    adapter = tmp_path / "m" / "lora_adapter"
    adapter.mkdir(parents=True)
    save_file({"base_model.model.a.lora_A.weight": torch.zeros(2, 2)}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 0}')
    assert rules(tmp_path / "m", "error") == {"adapter-alpha"}
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    assert check_folder(tmp_path / "m").ok
    assert rules(tmp_path / "m") == {"adapter-only"}
    (adapter / "adapter_config.json").write_text('{"lora_alpha": 4}')
    assert rules(tmp_path / "m", "error") == {"adapter-config"}


def test_a_model_without_its_weights_is_no_adapter(tmp_path: Path) -> None:
    """`--lora both` makes a model and an adapter; what is left when the model was lost has a config.json."""
    path = folder(tmp_path)
    (path / "lora_adapter").mkdir()
    save_file({"base_model.model.a.lora_A.weight": torch.zeros(2, 2)}, path / "lora_adapter/adapter_model.safetensors")
    (path / "lora_adapter/adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 4}')
    assert check_folder(path).findings == ()
    (path / "model.safetensors").unlink()
    assert rules(path, "error") == {"no-weights"}


def test_the_shards_of_a_trainer_are_no_model(tmp_path: Path) -> None:
    """Also where verl has put an adapter beside them."""
    path = checkpoint(tmp_path / "actor", llama())
    (path / "lora_adapter").mkdir()
    save_file({"base_model.model.a.lora_A.weight": torch.zeros(2, 2)}, path / "lora_adapter/adapter_model.safetensors")
    (path / "lora_adapter/adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 4}')
    assert rules(path, "error") == {"no-weights"}
    found = check_folder(path).findings
    assert "model_world_size_1_rank_0.pt" in found[0].text
    assert "merge-stream CKPT OUT" in found[0].hint


def test_an_adapters_own_folder_is_checked_as_one(tmp_path: Path) -> None:
    save_file({"base_model.model.a.lora_A.weight": torch.zeros(2, 2)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 4}')
    assert rules(tmp_path) == {"adapter-only"}
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 0}')
    assert rules(tmp_path, "error") == {"adapter-alpha"}
    (tmp_path / "adapter_config.json").unlink()
    assert rules(tmp_path, "error") == {"adapter-config"}
    model_folder(tmp_path, llama(), llama_config())  # beside a model the file is a stray
    assert "stale-files" in rules(tmp_path, "error")


# ------------------------------------------------------------------------------------------------ config


@pytest.mark.parametrize(
    ("changes", "rule", "severity"),
    [
        ({"vocab_size": 99}, "shapes", "error"),
        ({"hidden_size": 16}, "shapes", "error"),
        ({"num_hidden_layers": 2}, "shapes", "error"),
        ({"model_type": None}, "model-type", "error"),
        ({"architectures": None}, "architectures", "error"),
        ({"architectures": []}, "architectures", "error"),
        ({"architectures": ["A", "B"]}, "architectures", "warning"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures", "error"),
        ({"torch_dtype": "float16"}, "dtype", "warning"),
        ({"torch_dtype": None, "dtype": "float16"}, "dtype", "warning"),
        ({"dtype": "float32"}, "dtype", "warning"),
        ({"tie_word_embeddings": True}, "tied", "note"),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 1e6}}, "rope", "warning"),
        ({"quantization_config": {"quant_method": "fp8"}}, "settings", "error"),
    ],
)
def test_config_against_the_tensors(tmp_path: Path, changes: dict[str, Any], rule: str, severity: str) -> None:
    path = folder(tmp_path)
    rewrite(path / "config.json", **changes)
    assert rule in rules(path, severity)


def test_config_that_is_no_json(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "config.json").write_text("{")
    assert rules(path, "error") == {"config-readable"}


def test_absent_head(tmp_path: Path) -> None:
    path = folder(tmp_path, llama(head=False), tie_word_embeddings=True)
    assert check_folder(path).findings == ()
    rewrite(path / "config.json", tie_word_embeddings=None)
    assert rules(path, "error") == {"head"}
    rewrite(path / "config.json", tie_word_embeddings=False)
    assert "shapes" in rules(path, "error")


def test_tie_flags_that_versions_read_differently(tmp_path: Path) -> None:
    path = folder(tmp_path)
    config = llama_config(tie_word_embeddings=True, text_config={"tie_word_embeddings": False})
    (path / "config.json").write_text(json.dumps(config))
    assert "tie-flags" in rules(path, "warning")


def test_value_head_under_a_language_model_class(tmp_path: Path) -> None:
    tensors = llama(head=False) | {"score.weight": torch.zeros(1, 8).bfloat16()}
    path = folder(tmp_path, tensors, id2label={"0": "LABEL_0"})
    assert "architectures" in rules(path, "error")
    rewrite(path / "config.json", architectures=["LlamaForTokenClassification"])
    assert check_folder(path).ok
    rewrite(path / "config.json", id2label={"0": "a", "1": "b"})
    assert rules(path, "error") == {"labels"}


def test_two_heads_are_one_too_many(tmp_path: Path) -> None:
    path = folder(tmp_path, llama() | {"score.weight": torch.ones(1, 8).bfloat16()})
    assert "two-heads" in rules(path, "warning")


def test_wrapped_value_head(tmp_path: Path) -> None:
    path = folder(tmp_path, llama() | {"v_head.summary.weight": torch.zeros(1, 8).bfloat16()})
    assert rules(path, "warning") == {"wrapped-head"}


ODD: list[Any] = [None, True, -1, 1.5, "x", [], ["x"], [[1]], {}, {"model_type": ["x"]}, {"architectures": 3}, 10**30]
ODD += [{"config_groups": [1]}, {"config_groups": {"g": 3}, "quant_method": "compressed-tensors"}, {"quant_method": []}]
KEYS = (
    "architectures model_type text_config vision_config audio_config quantization_config auto_map tie_word_embeddings "
    "torch_dtype vocab_size hidden_size num_hidden_layers num_experts rope_parameters eos_token_id id2label topk_method"
)
CLASSES = ["PhimoeForCausalLM", "LlavaForConditionalGeneration", "Llama4ForCausalLM", "LlamaForTokenClassification"]
KINDS = ["phimoe", "phi3", "deepseek_v3", "gemma2", "llava_next", "qwen3_moe"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_json_in_a_config_makes_a_check_fail_otherwise_than_by_a_finding(
    tmp_path: Path, data: st.DataObject
) -> None:
    path = tmp_path / "m"
    if not path.exists():
        folder(tmp_path)
    config = llama_config(
        architectures=[data.draw(st.sampled_from(CLASSES))], model_type=data.draw(st.sampled_from(KINDS))
    )
    config |= data.draw(st.dictionaries(st.sampled_from(KEYS.split()), st.sampled_from(ODD), max_size=4))
    (path / "config.json").write_text(json.dumps(config))
    json.dumps(check_folder(path).as_json())


# ------------------------------------------------------------------------------------------------ names


def test_names_of_wrappers(tmp_path: Path) -> None:
    tensors = {f"base_model.model.{name}": value for name, value in llama().items()}
    assert "wrapper" in rules(folder(tmp_path, tensors), "error")


def test_fused_experts_of_a_family_that_stores_them_apart(tmp_path: Path) -> None:
    tensors = {n: t for n, t in llama().items() if ".mlp." not in n}
    tensors["model.layers.0.mlp.gate.weight"] = torch.zeros(4, 8).bfloat16()
    tensors |= {f"model.layers.0.self_attn.{k}_norm.weight": torch.ones(4).bfloat16() for k in "qk"}
    fused = {
        "model.layers.0.mlp.experts.gate_up_proj": torch.zeros(4, 16, 8).bfloat16(),
        "model.layers.0.mlp.experts.down_proj": torch.zeros(4, 8, 8).bfloat16(),
    }
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    path = folder(tmp_path, tensors | fused, **config)
    found = next(f for f in check_folder(path).findings if f.rule == "fused-experts")
    assert found.severity == "error"
    assert "SGLang" in found.loaders
    apart = {}
    for expert in range(4):
        at = f"model.layers.0.mlp.experts.{expert}."
        apart |= {f"{at}{p}_proj.weight": torch.zeros(8, 8).bfloat16() for p in ("gate", "up", "down")}
    other = tmp_path / "other"
    other.mkdir()
    assert check_folder(folder(other, tensors | apart, **config)).ok


def test_a_vision_tower_without_vision_model(tmp_path: Path) -> None:
    tensors = {f"language_model.{n}": t for n, t in llama().items()}
    tensors["vision_tower.embeddings.class_embedding"] = torch.zeros(8).bfloat16()
    tensors["multi_modal_projector.linear_1.weight"] = torch.zeros(8, 8).bfloat16()
    config = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "vision_config": {"model_type": "clip_vision_model"},
        "text_config": {"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1},
    }
    path = folder(tmp_path, tensors, **config)
    assert "vision-tower" in rules(path, "error")
    assert "processor" in rules(path, "warning")


def test_experts_of_qwen3_vl_in_the_order_of_memory(tmp_path: Path) -> None:
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    config = {
        "model_type": "qwen3_vl_moe",
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "text_config": {"model_type": "qwen3_vl_moe_text", "hidden_size": 8, "vocab_size": 16},
    }
    path = folder(tmp_path, {name: torch.zeros(2, 12, 8).bfloat16()}, **config)
    assert "experts-transposed" in rules(path, "error")


def test_buffers_are_noted(tmp_path: Path) -> None:
    path = folder(tmp_path, llama() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)})
    assert "buffers" in rules(path, "note")


# ------------------------------------------------------------------------------------------------ quantized


def fp8_folder(tmp_path: Path, rows: int = 256, *, scale: bool = True, **settings: Any) -> Path:
    """Like a DeepSeek layer: one fp8 weight with block scales."""
    weight = torch.zeros(rows, 256).to(torch.float8_e4m3fn)
    tensors = {"model.layers.0.self_attn.o_proj.weight": weight}
    if scale:
        tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"] = torch.ones(-(-rows // 128), 2)
    given = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]} | settings
    config = llama_config(num_hidden_layers=None, vocab_size=None, hidden_size=None, quantization_config=given)
    return model_folder(tmp_path / "q", tensors, config, SIDE)


def quantized_rules(path: Path) -> set[str]:
    return {f.rule for f in check_folder(path).findings if f.about == "quantized"}


def test_block_fp8_that_all_read(tmp_path: Path) -> None:
    assert quantized_rules(fp8_folder(tmp_path)) == set()


@pytest.mark.parametrize(
    ("how", "rule"),
    [
        ({"scale": False}, "fp8-scales"),
        ({"rows": 192}, "fp8-blocks"),
        ({"activation_scheme": None}, "fp8"),
        ({"weight_block_size": None}, "fp8"),
    ],
)
def test_fp8_that_some_engine_misreads(tmp_path: Path, how: dict[str, Any], rule: str) -> None:
    assert quantized_rules(fp8_folder(tmp_path, **how)) == {rule}


def test_quantized_tensors_without_settings(tmp_path: Path) -> None:
    path = fp8_folder(tmp_path)
    rewrite(path / "config.json", quantization_config=None)
    assert quantized_rules(path) == {"settings"}


def test_settings_file_beside_plain_weights(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "hf_quant_config.json").write_text("{}")
    assert rules(path, "error") == {"settings"}


def test_fused_layers_quantized_in_part(tmp_path: Path) -> None:
    path = fp8_folder(tmp_path)
    tensors = {f"model.layers.0.self_attn.{p}_proj.weight": torch.zeros(128, 128).bfloat16() for p in "qk"}
    tensors["model.layers.0.self_attn.v_proj.weight"] = torch.zeros(128, 128).to(torch.float8_e4m3fn)
    tensors["model.layers.0.self_attn.v_proj.weight_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    assert quantized_rules(path) == {"fused-layers", "excluded"}  # and the plain part is not named


def test_compressed_tensors_groups(tmp_path: Path) -> None:
    group = {"weights": {"type": "float", "strategy": "tensor"}, "format": "float-quantized"}
    settings = {"quant_method": "compressed-tensors", "config_groups": {"a": group, "b": group}}
    path = fp8_folder(tmp_path)
    rewrite(path / "config.json", quantization_config=settings)
    assert quantized_rules(path) == {"groups", "strategy"}


def test_router_that_is_not_named_as_plain(tmp_path: Path) -> None:
    path = fp8_folder(tmp_path)
    tensors = {
        "model.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(128, 128).to(torch.float8_e4m3fn),
        "model.layers.0.mlp.experts.0.up_proj.weight_scale_inv": torch.ones(1, 1),
        "model.layers.0.mlp.gate.weight": torch.zeros(4, 128).bfloat16(),
    }
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    assert quantized_rules(path) == {"excluded"}
    settings = config_of(path)["quantization_config"] | {"modules_to_not_convert": ["model.layers.0.mlp.gate"]}
    rewrite(path / "config.json", quantization_config=settings)
    assert quantized_rules(path) == set()


# ------------------------------------------------------------------------------------------------ beside


@pytest.mark.parametrize(
    ("name", "text", "rule", "severity"),
    [
        ("tokenizer.json", None, "tokenizer", "warning"),
        ("tokenizer.json", "{", "tokenizer", "error"),
        ("tokenizer.json", "{}", "tokenizer", "error"),
        ("tokenizer.json", '{"model": {"vocab": {"a": 16}}}', "vocabulary", "error"),
        ("tokenizer.json", '{"model": {"vocab": {}}, "added_tokens": [{"id": 40}]}', "vocabulary", "error"),
        ("tokenizer_config.json", "[]", "json", "error"),
        ("tokenizer_config.json", None, "tokenizer-config", "warning"),
        ("tokenizer_config.json", '{"tokenizer_class": "TokenizersBackend"}', "tokenizer-class", "warning"),
        ("tokenizer_config.json", '{"extra_special_tokens": []}', "tokenizer-class", "warning"),
        ("tokenizer_config.json", "{}", "chat-template", "note"),
        ("generation_config.json", "{", "generation", "error"),
        ("generation_config.json", '{"_from_model_config": true}', "generation", "warning"),
        ("generation_config.json", '{"eos_token_id": 99}', "generation", "error"),
        ("processor_config.json", "{", "json", "error"),
    ],
)
def test_files_beside_the_weights(tmp_path: Path, name: str, text: str | None, rule: str, severity: str) -> None:
    path = folder(tmp_path)
    (path / name).unlink(missing_ok=True)
    if text is not None:
        (path / name).write_text(text)
    assert rule in rules(path, severity)


def test_end_tokens_that_were_lost(tmp_path: Path) -> None:
    path = folder(tmp_path, eos_token_id=[1, 2])
    (path / "generation_config.json").write_text('{"eos_token_id": 1}')
    assert rules(path, "warning") == {"generation"}


def test_code_that_auto_map_names(tmp_path: Path) -> None:
    path = folder(tmp_path, auto_map={"AutoModel": "modeling_x.X", "AutoConfig": "org/repo--configuration_x.C"})
    assert rules(path, "error") == {"code"}
    (path / "modeling_x.py").write_text("raise SystemExit('never imported')\n")
    assert check_folder(path).ok
