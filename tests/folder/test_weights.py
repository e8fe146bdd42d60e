"""Weights that are special: tied heads on demand, value models, resized vocabularies, fp32 islands."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from merge_stream import cli
from merge_stream.architectures.base import BaseTensor, ModelInfo
from merge_stream.architectures.precision import names_kept_wide
from merge_stream.architectures.ties import absent_head
from merge_stream.tensors.dtype import DType, dtype_named
from merge_stream.verification.check import check_folder
from tests.folder.models import checkpoint, config_of, llama, llama_config, merge, model_folder, tensors_of


def dtype(name: str) -> DType:
    found = dtype_named(name)
    assert found is not None
    return found


# ------------------------------------------------------------------------------------------------ ties


@pytest.mark.parametrize("stored", [True, False])
def test_materialized_head_is_the_embedding_and_config_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, stored: bool
) -> None:
    tensors = llama(head=False)
    if stored:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    source = checkpoint(tmp_path / "ckpt", tensors, llama_config(tie_word_embeddings=True))
    assert merge(source, tmp_path / "plain") == 0
    assert merge(source, tmp_path / "out", "--materialize-tied") == 0
    assert "--materialize-tied" in capsys.readouterr().out
    assert "lm_head.weight" not in tensors_of(tmp_path / "plain")
    found = tensors_of(tmp_path / "out")
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    config = (source / "huggingface" / "config.json").read_bytes()
    assert (tmp_path / "out" / "config.json").read_bytes() == config
    for out in ("plain", "out"):
        assert cli.run(["verify", str(tmp_path / out), "--against", str(source)]) == 0
        assert cli.run(["check", str(tmp_path / out)]) == 0


def test_materialized_head_is_cast_and_split_like_any_other(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "ckpt", llama(head=False), llama_config(tie_word_embeddings=True))
    options = ("--materialize-tied", "--dtype", "fp32", "--max-shard-size", "600", "--verify")
    assert merge(source, tmp_path / "out", *options) == 0
    found = tensors_of(tmp_path / "out")
    assert found["lm_head.weight"].dtype == torch.float32
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" in index["weight_map"]


def test_materialize_is_another_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(tmp_path / "ckpt", llama(head=False), llama_config(tie_word_embeddings=True))
    prints = []
    for options in ([], ["--materialize-tied"]):
        assert cli.run(["plan", str(source), "--json", *options]) == 0
        prints.append(json.loads(capsys.readouterr().out)["fingerprint"])
    assert prints[0] != prints[1]


def test_nothing_to_materialize_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(tmp_path / "ckpt", llama(), llama_config())
    assert merge(source, tmp_path / "out", "--materialize-tied") == 0
    assert "has no effect" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "config", "wanted"),
    [
        (["model.embed_tokens.weight"], {"tie_word_embeddings": True}, ("lm_head.weight", "model.embed_tokens.weight")),
        (["model.embed_tokens.weight"], {"tie_word_embeddings": False}, None),
        (["model.embed_tokens.weight", "score.weight"], {"tie_word_embeddings": True}, None),
        (
            ["model.embed_tokens.weight"],
            {"tie_word_embeddings": True, "architectures": ["QwenForSequenceClassification"]},
            None,
        ),
        (
            ["gpt_neox.embed_in.weight"],
            {"tie_word_embeddings": True, "model_type": "gpt_neox"},
            ("embed_out.weight", "gpt_neox.embed_in.weight"),
        ),
        (["transformer.wte.weight"], {"model_type": "gpt2"}, ("lm_head.weight", "transformer.wte.weight")),
        (
            ["language_model.model.embed_tokens.weight"],
            {"model_type": "gemma3"},
            ("language_model.lm_head.weight", "language_model.model.embed_tokens.weight"),
        ),
    ],
)
def test_which_head_is_absent(names: list[str], config: dict[str, object], wanted: tuple[str, str] | None) -> None:
    assert absent_head(names, ModelInfo(config)) == wanted


# ------------------------------------------------------------------------------------------------ value models


def value_model(bias: bool, rows: int = 1) -> dict[str, torch.Tensor]:
    tensors = llama(head=False) | {"score.weight": torch.ones(rows, 8).bfloat16()}
    return tensors | ({"score.bias": torch.ones(rows).bfloat16()} if bias else {})


@pytest.mark.parametrize(
    ("bias", "given", "wanted"),
    [
        (True, ["LlamaForTokenClassification"], "LlamaForTokenClassification"),
        (True, ["LlamaForCausalLM"], "LlamaForTokenClassification"),
        (True, None, "LlamaForTokenClassification"),
        (False, ["LlamaForCausalLM"], "LlamaForSequenceClassification"),
        (False, ["LlamaForSequenceClassification"], "LlamaForSequenceClassification"),
        (False, ["MyRewardModel"], "MyRewardModel"),
    ],
)
def test_class_and_labels_of_a_value_model(tmp_path: Path, bias: bool, given: list[str] | None, wanted: str) -> None:
    config = llama_config(architectures=given, id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})
    source = checkpoint(tmp_path / "ckpt", value_model(bias), config)
    assert merge(source, tmp_path / "out") == 0
    assert config_of(tmp_path / "out") == config | {"architectures": [wanted]}
    assert set(tensors_of(tmp_path / "out")) == set(value_model(bias))


def test_labels_follow_the_head_where_the_class_was_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(tmp_path / "ckpt", value_model(bias=True), llama_config())
    assert merge(source, tmp_path / "out") == 0
    assert "id2label and label2id set to the 1 rows" in capsys.readouterr().out
    assert config_of(tmp_path / "out")["id2label"] == {"0": "LABEL_0"}
    assert cli.run(["check", str(tmp_path / "out")]) == 0


def test_trls_value_head_keeps_its_class(tmp_path: Path) -> None:
    tensors = llama() | {"v_head.summary.weight": torch.ones(1, 8).bfloat16()}
    source = checkpoint(tmp_path / "ckpt", tensors, llama_config())
    assert merge(source, tmp_path / "out") == 0
    assert config_of(tmp_path / "out") == llama_config()
    assert "v_head.summary.weight" in tensors_of(tmp_path / "out")


# ------------------------------------------------------------------------------------------------ vocabulary


def test_resized_vocabulary_with_its_own_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = model_folder(tmp_path / "base", llama(), llama_config())
    source = checkpoint(tmp_path / "ckpt", llama(vocab=24), llama_config(vocab_size=24))
    assert merge(source, tmp_path / "out", "--base-model", str(base)) == 0
    assert "model.embed_tokens.weight has 24 rows, the base model has 16" in capsys.readouterr().out
    assert config_of(tmp_path / "out")["vocab_size"] == 24


def test_padded_vocabulary_is_refused_with_the_likely_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoint(tmp_path / "ckpt", llama(vocab=64), llama_config(vocab_size=60))
    assert merge(source, tmp_path / "out") == 5
    told = capsys.readouterr().err
    assert "has 64 rows, but" in told
    assert "4 rows more look like padding to a multiple of 64" in told
    assert "set vocab_size to 64" in told
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------ islands


def test_islands_of_the_base_stay_wide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = llama(dtype=torch.float32)
    base = {n: t.bfloat16() for n, t in tensors.items()}
    base["model.norm.weight"] = tensors["model.norm.weight"]
    folder = model_folder(tmp_path / "base", base, llama_config())
    source = checkpoint(tmp_path / "ckpt", tensors, llama_config())
    options = ("--base-model", str(folder), "--dtype", "bf16", "--verify")
    assert merge(source, tmp_path / "out", *options) == 0
    found = tensors_of(tmp_path / "out")
    assert {n for n, t in found.items() if t.dtype == torch.float32} == {"model.norm.weight"}
    assert torch.equal(found["model.norm.weight"], tensors["model.norm.weight"])
    assert "1 tensor keeps its type under --dtype bf16: model.norm.weight" in capsys.readouterr().out
    assert cli.run(["verify", str(tmp_path / "out"), "--against", str(source)]) == 0


NAMES = [
    "model.layers.0.mlp.gate.e_score_correction_bias",
    "model.layers.0.linear_attn.A_log",
    "model.layers.0.linear_attn.dt_bias",
    "backbone.layers.0.mixer.D",
    "model.layers.0.mlp.gate.weight",
    "model.layers.0.self_attn.D_proj.weight",
    "model.norm.weight",
]


def test_islands_without_a_base_are_a_short_list() -> None:
    assert names_kept_wide(NAMES, ModelInfo(None)) == set(NAMES[:4])


def test_a_16_bit_base_decides_alone() -> None:
    base = {name: BaseTensor(dtype("BF16"), (100,)) for name in NAMES}
    base["model.norm.weight"] = BaseTensor(dtype("F32"), (4,))
    assert names_kept_wide(NAMES, ModelInfo(None, "", base)) == {"model.norm.weight"}


def test_an_fp32_base_says_nothing_about_islands() -> None:
    base = {name: BaseTensor(dtype("F32"), (100,)) for name in NAMES}
    assert names_kept_wide(NAMES, ModelInfo(None, "", base)) == set(NAMES[:4])


def test_islands_are_aligned_in_the_file(tmp_path: Path) -> None:
    tensors = llama(dtype=torch.float32) | {"model.layers.0.mlp.gate.e_score_correction_bias": torch.ones(3)}
    source = checkpoint(tmp_path / "ckpt", tensors, llama_config())
    assert merge(source, tmp_path / "out", "--dtype", "bf16") == 0
    with safe_open(tmp_path / "out" / "model.safetensors", framework="numpy") as file:
        value = file.get_tensor("model.layers.0.mlp.gate.e_score_correction_bias")
    assert value.dtype == np.float32
    assert "alignment" not in {finding.rule for finding in check_folder(tmp_path / "out").findings}
