"""Section F: lost, missing and wrong tensors. The numbers are those of the collection of cases."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from merge_stream import cli
from tests.folder.models import checkpoint, config_of, llama, llama_config, merge, tensors_of

MTP = {"model.layers.1.eh_proj.weight": torch.ones(8, 16).bfloat16()}


def sharded_base(folder: Path, tensors: dict[str, torch.Tensor], files: int) -> Path:
    """A base model in several files, with an index."""
    folder.mkdir(parents=True)
    names = list(tensors)
    weight_map = {}
    for number in range(files):
        part = {name: tensors[name].clone() for name in names[number::files]}
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(llama_config()))
    return folder


@pytest.mark.parametrize("at", ["mtp.layers.{n}.proj", "model.layers.{n}.mtp.proj"])
def test_case_062_tensors_that_the_base_has_more_drop_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], at: str
) -> None:
    """Each file of the base ends with a tensor of the prediction layer, which the checkpoint lacks."""
    tensors = llama()
    extra = {f"{at.format(n=n)}.weight": torch.ones(4).bfloat16() for n in range(3)}
    base = sharded_base(tmp_path / "base", tensors | extra, 3)
    source = checkpoint(tmp_path / "ckpt", tensors)
    assert merge(source, tmp_path / "out", "--base-model", str(base), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert set(tensors_of(tmp_path / "out")) == set(tensors)
    assert told["tensors"] == len(tensors)
    assert any("3 tensors of the base model's multi-token-prediction" in note for note in told["notes"])


def test_case_062_any_other_absent_tensor_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = llama()
    base = sharded_base(tmp_path / "base", tensors, 3)
    lost = dict(tensors)
    lost.pop("model.layers.0.self_attn.k_proj.weight")
    assert merge(checkpoint(tmp_path / "ckpt", lost), tmp_path / "out", "--base-model", str(base)) == 5
    assert "model.layers.0.self_attn.k_proj.weight" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_case_065_prediction_layers_that_were_trained_are_written(tmp_path: Path) -> None:
    """The repositories of DeepSeek and GLM number the prediction layer behind the last one."""
    tensors = llama() | {n.replace("layers.0", "layers.1"): t for n, t in llama().items() if "layers.0" in n} | MTP
    config = llama_config(num_nextn_predict_layers=1, model_type="glm4_moe", architectures=["Glm4MoeForCausalLM"])
    assert merge(checkpoint(tmp_path / "ckpt", tensors, config), tmp_path / "out") == 0
    assert torch.equal(
        tensors_of(tmp_path / "out")["model.layers.1.eh_proj.weight"], MTP["model.layers.1.eh_proj.weight"]
    )


def test_case_065_a_tensor_that_the_base_does_not_know_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = sharded_base(tmp_path / "base", llama(), 2)
    source = checkpoint(tmp_path / "ckpt", llama() | {"decoder.mtp.0.weight": torch.ones(4).bfloat16()})
    assert merge(source, tmp_path / "out", "--base-model", str(base)) == 5
    told = capsys.readouterr().err
    assert "decoder.mtp.0.weight" in told
    assert "hint:" in told


QWEN_MOE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}


def test_case_066_fused_experts_become_one_tensor_for_each(tmp_path: Path) -> None:
    rest = {n: t for n, t in llama().items() if ".mlp." not in n}
    rest["model.layers.0.mlp.gate.weight"] = torch.randn(4, 8).bfloat16()
    rest |= {f"model.layers.0.self_attn.{k}_norm.weight": torch.ones(4).bfloat16() for k in "qk"}
    gate_up, down = torch.randn(4, 12, 8).bfloat16(), torch.randn(4, 8, 6).bfloat16()
    at = "model.layers.0.mlp.experts."
    source = checkpoint(
        tmp_path / "ckpt", rest | {f"{at}gate_up_proj": gate_up, f"{at}down_proj": down}, llama_config(**QWEN_MOE)
    )
    assert merge(source, tmp_path / "out") == 0
    found = tensors_of(tmp_path / "out")
    for expert in range(4):
        assert torch.equal(found.pop(f"{at}{expert}.gate_proj.weight"), gate_up[expert, :6])
        assert torch.equal(found.pop(f"{at}{expert}.up_proj.weight"), gate_up[expert, 6:])
        assert torch.equal(found.pop(f"{at}{expert}.down_proj.weight"), down[expert])
    assert found.keys() == rest.keys()
    assert cli.run(["check", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("name", ["mlp.experts.linear_fc1.weight0", "mlp.experts.experts.linear_fc1.weight"])
def test_case_066_names_of_megatron_are_never_passed_through(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    tensors = {n: t for n, t in llama().items() if ".mlp." not in n} | {f"decoder.layers.0.{name}": torch.ones(8, 8)}
    assert merge(checkpoint(tmp_path / "ckpt", tensors, llama_config(**QWEN_MOE)), tmp_path / "out") != 0
    assert name in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_case_068_the_folder_of_config_and_tokenizer_is_no_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoint(tmp_path / "actor", llama(), llama_config(), {"tokenizer.json": "{}"})
    assert merge(source / "huggingface", tmp_path / "out") == 5
    told = capsys.readouterr().err
    assert "no weights" in told
    assert str(source) in told


def test_case_070_a_tied_head_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One storage under two names, as torch saves it."""
    tensors = llama(head=False)
    shared = tensors["model.embed_tokens.weight"]
    source = checkpoint(tmp_path / "ckpt", tensors, llama_config(tie_word_embeddings=True))
    torch.save(tensors | {"lm_head.weight": shared}, source / "model_world_size_1_rank_0.pt")
    assert merge(source, tmp_path / "out") == 0
    assert set(tensors_of(tmp_path / "out")) == set(tensors)
    assert "left out lm_head.weight: equal to model.embed_tokens.weight" in capsys.readouterr().out
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is True


def test_case_071_a_head_that_differs_unties_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(tmp_path / "ckpt", llama(), llama_config(tie_word_embeddings=True))
    assert merge(source, tmp_path / "out") == 0
    found = tensors_of(tmp_path / "out")
    assert torch.equal(found["lm_head.weight"], llama()["lm_head.weight"])
    assert torch.equal(found["model.embed_tokens.weight"], llama()["model.embed_tokens.weight"])
    assert config_of(tmp_path / "out") == llama_config(tie_word_embeddings=False)
    assert "their values differ" in capsys.readouterr().err
    assert merge(source, tmp_path / "strict", "--strict") == 5
    assert not (tmp_path / "strict").exists()


def test_case_071_one_bit_is_a_difference(tmp_path: Path) -> None:
    tensors = llama(head=False)
    head = tensors["model.embed_tokens.weight"].clone()
    head.view(torch.int16)[15, 7] ^= 1
    source = checkpoint(tmp_path / "ckpt", tensors | {"lm_head.weight": head}, llama_config(tie_word_embeddings=True))
    assert merge(source, tmp_path / "out") == 0
    assert torch.equal(tensors_of(tmp_path / "out")["lm_head.weight"], head)
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is False


@pytest.mark.parametrize("stored", [True, False])
def test_case_072_the_head_is_written_where_it_is_wanted(tmp_path: Path, *, stored: bool) -> None:
    tensors = llama(head=False)
    if stored:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    source = checkpoint(tmp_path / "ckpt", tensors, llama_config(tie_word_embeddings=True))
    assert merge(source, tmp_path / "out", "--materialize-tied") == 0
    found = tensors_of(tmp_path / "out")
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    given = (source / "huggingface" / "config.json").read_bytes()
    assert (tmp_path / "out" / "config.json").read_bytes() == given


def test_case_074_noise_of_frameworks_is_counted_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = llama()
    source = checkpoint(tmp_path / "ckpt", tensors, llama_config())
    noise: dict[str, object] = {f"model.layers.0.m{n}._extra_state": io.BytesIO(b"x") for n in range(100)}
    noise["model.layers.0.q._extra_state"] = torch.empty(0, dtype=torch.uint8)
    torch.save(tensors | noise, source / "model_world_size_1_rank_0.pt")
    assert merge(source, tmp_path / "out", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert set(tensors_of(tmp_path / "out")) == set(tensors)
    assert sum(told["ignored"].values()) == 101


def test_case_070_one_storage_under_two_names_is_two_tensors_where_nothing_ties_them(tmp_path: Path) -> None:
    tensors = llama(head=False)
    source = checkpoint(tmp_path / "ckpt", tensors, llama_config(tie_word_embeddings=False))
    shared = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    torch.save(shared, source / "model_world_size_1_rank_0.pt")
    assert merge(source, tmp_path / "out") == 0
    found = tensors_of(tmp_path / "out")
    assert torch.equal(found["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert torch.equal(found["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
