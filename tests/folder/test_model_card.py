"""The model card: provenance of the weights, nothing about the machine, nobody's words overwritten."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from merge_stream.output.model_card import CardFacts, build_card, hub_id_of, is_own_card, step_of
from tests.folder.models import checkpoint, llama, llama_config, merge, model_folder

FACTS = CardFacts(
    format="fsdp",
    facts={
        "trainer": "verl",
        "world size": 8,
        "device mesh": "8 (fsdp)",
        "secret": "hf_abcdef",
        "container": "/home/me",
    },
    step=100,
    fingerprint="f" * 32,
    version="1.2.3",
    dtype="bf16",
    dtypes={"BF16": 10, "F32": 2},
    layout="upstream",
    lora="",
    tensors=12,
    parameters=3_000,
    nbytes=6_000,
    files=1,
    architectures=("LlamaForCausalLM",),
)


def test_card_tells_where_the_weights_come_from(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "run" / "global_step_100" / "actor", llama(), llama_config())
    assert merge(source, tmp_path / "out", "--dtype", "fp32") == 0
    text = (tmp_path / "out" / "README.md").read_text()
    assert is_own_card(text)
    head, body = text.removeprefix("---\n").split("\n---\n", 1)
    assert "library_name: transformers" in head
    assert "pipeline_tag: text-generation" in head
    assert "- merge-stream" in head
    assert "- verl" in head
    for row in ("| checkpoint format | fsdp |", "| training step | 100 |", "| element types | cast to fp32 |"):
        assert row in body
    assert re.search(r"\| plan fingerprint \| `[0-9a-f]{32}` \|", body)
    assert re.search(r"merge-stream \d+\.\d+", body)
    assert f"| tensors | {len(llama())} ({len(llama())} F32) |" in body


def test_card_holds_no_path_and_no_fact_that_is_not_listed(tmp_path: Path) -> None:
    text = build_card(FACTS).decode()
    assert "hf_abcdef" not in text
    assert "/home" not in text
    config = llama_config(_name_or_path="/home/someone/models/llama")
    source = checkpoint(tmp_path / "ckpt", llama(), config)
    assert merge(source, tmp_path / "out") == 0
    text = (tmp_path / "out" / "README.md").read_text()
    assert str(tmp_path) not in text
    assert "someone" not in text
    assert "base_model" not in text


def test_card_is_the_same_for_every_run(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "ckpt", llama(), llama_config())
    assert merge(source, tmp_path / "a", "--workers", "1") == 0
    assert merge(source, tmp_path / "b", "--workers", "2") == 0
    assert (tmp_path / "a" / "README.md").read_bytes() == (tmp_path / "b" / "README.md").read_bytes()


def test_readme_of_the_checkpoint_is_kept_byte_for_byte(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "ckpt", llama(), llama_config(), {"README.md": "# My model\r\n"})
    assert merge(source, tmp_path / "out") == 0
    assert (tmp_path / "out" / "README.md").read_bytes() == (source / "huggingface" / "README.md").read_bytes()


def test_readme_of_the_base_gives_licence_and_task_only(tmp_path: Path) -> None:
    readme = "---\nlicense: other\nlicense_name: llama3\nlicense_link: LICENSE\nlanguage:\n- en\npipeline_tag: chat\n"
    readme += "widget: |\n  x\n---\n# The base model is great\n"
    base = model_folder(tmp_path / "base", llama(), llama_config(), {"README.md": readme, "LICENSE": "words"})
    source = checkpoint(tmp_path / "ckpt", llama(seed=1))
    assert merge(source, tmp_path / "out", "--base-model", str(base)) == 0
    text = (tmp_path / "out" / "README.md").read_text()
    assert "license: other\nlicense_name: llama3\nlicense_link: LICENSE\npipeline_tag: chat\n" in text
    assert "great" not in text
    assert "widget" not in text
    assert (tmp_path / "out" / "LICENSE").read_text() == "words"


def test_no_model_card(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "ckpt", llama(), llama_config())
    assert merge(source, tmp_path / "out", "--no-model-card") == 0
    assert merge(source, tmp_path / "weights", "--no-config") == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == ["model.safetensors"]


def test_existing_out_and_its_readme_are_not_touched(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "ckpt", llama(), llama_config())
    assert merge(source, tmp_path / "out") == 0
    (tmp_path / "out" / "README.md").write_text("mine\n")
    assert merge(source, tmp_path / "out") == 1
    assert (tmp_path / "out" / "README.md").read_text() == "mine\n"


def test_the_report_names_the_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(tmp_path / "ckpt", llama(), llama_config())
    assert merge(source, tmp_path / "out", "--json") == 0
    assert json.loads(capsys.readouterr().out)["side_files"]["README.md"] == "written by merge-stream"


def test_a_value_model_is_no_chat_model() -> None:
    from dataclasses import replace

    text = build_card(replace(FACTS, architectures=("LlamaForTokenClassification",))).decode()
    assert "pipeline_tag: token-classification" in text


@pytest.mark.parametrize(
    ("root", "step"),
    [
        ("/runs/x/global_step_100/actor", 100),
        ("/out/checkpoint-500", 500),
        ("/o/step-1000", 1000),
        ("/o/iter_0000020/", 20),
        ("/data/2024/model", None),
        ("/step-1/a/b/c/d/e", None),
    ],
)
def test_step_by_the_folder(root: str, step: int | None) -> None:
    assert step_of(root) == step


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
        ("Qwen/Qwen2.5-7B@main", "Qwen/Qwen2.5-7B"),
        ("/root/.cache/huggingface/hub/models--Qwen--Qwen2.5-7B/snapshots/abc", "Qwen/Qwen2.5-7B"),
        ("/home/me/models/llama", ""),
        ("models/llama", ""),
        ("./a/b", ""),
        ("../x", ""),
        ("gpt2", ""),
        ("", ""),
        (None, ""),
    ],
)
def test_names_on_the_hub(text: str | None, name: str) -> None:
    assert hub_id_of(text) == name
