"""`--base-model ORG/NAME`: small files and headers from a stand-in of the Hub, never the weights."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from merge_stream import cli
from merge_stream.errors import CheckpointError, HubError
from merge_stream.output.model_info import find_model_folder
from tests.folder.hub_server import Hub
from tests.folder.models import checkpoint, config_of, llama, llama_config, merge, model_folder, tensors_of
from tests.lora.goldens import Golden, golden, write_adapter, write_base

FILES = {
    "tokenizer.json": '{"model": {"type": "BPE", "vocab": {"a": 0}}}',
    "generation_config.json": '{"eos_token_id": [1, 2]}',
    "README.md": "---\nlicense: apache-2.0\npipeline_tag: text-generation\n---\n# Base\n",
    "LICENSE": "words",
}
BIG = 300_000


def base(tmp_path: Path, hub: Hub, **more: bytes) -> dict[str, bytes]:
    folder = model_folder(tmp_path / "base", llama(vocab=20_000), llama_config(vocab_size=20_000), FILES)
    files = {p.name: p.read_bytes() for p in folder.iterdir()} | more
    hub.add("org/base", files)
    assert len(files["model.safetensors"]) > BIG
    return files


def test_names_config_and_side_files_come_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    base(tmp_path, hub, **{"pytorch_model.bin": b"x" * 999, "optimizer.pt": b"y" * 999})
    source = checkpoint(tmp_path / "ckpt", llama(vocab=20_000, seed=1))
    assert merge(source, tmp_path / "out", "--base-model", "org/base") == 0
    out = tmp_path / "out"
    assert (out / "generation_config.json").read_bytes() == FILES["generation_config.json"].encode()
    assert torch.equal(tensors_of(out)["lm_head.weight"], llama(vocab=20_000, seed=1)["lm_head.weight"])
    card = (out / "README.md").read_text()
    assert "base_model: org/base\n" in card
    assert "license: apache-2.0\n" in card
    asked = {name for name, _, _ in hub.ranges}
    assert not asked & {"pytorch_model.bin", "optimizer.pt"}
    weights = [(span, size) for name, span, size in hub.ranges if name == "model.safetensors"]
    assert weights == [("bytes=0-100000", 100_001)]


def test_every_header_of_an_index_is_read_by_range(hub: Hub, tmp_path: Path) -> None:
    tensors = llama(vocab=20_000)
    one, two = {"lm_head.weight": tensors["lm_head.weight"]}, dict(tensors)
    two.pop("lm_head.weight")
    files = {"config.json": json.dumps(llama_config(vocab_size=20_000)).encode()}
    weight_map = {}
    for number, part in enumerate((one, two), 1):
        name = f"model-0000{number}-of-00002.safetensors"
        folder = model_folder(tmp_path / f"part{number}", part)
        files[name] = (folder / "model.safetensors").read_bytes()
        weight_map |= dict.fromkeys(part, name)
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    hub.add("org/base", files)
    folder = find_model_folder([], "org/base", write_config=True)
    assert folder.info.base_tensors is not None
    assert set(folder.info.base_tensors) == set(tensors)
    assert folder.info.base_tensors["lm_head.weight"].shape == (20_000, 8)
    assert sum(size for name, _, size in hub.ranges if name.endswith(".safetensors")) <= 2 * 100_001
    assert any("org/base on the Hub (2 headers" in note for note in folder.notes)
    assert folder.base_id == "org/base"


def test_a_revision_can_be_named(hub: Hub, tmp_path: Path) -> None:
    base(tmp_path, hub)
    hub.repos["org/base"].branches["v2"] = dict(hub.files("org/base")) | {"extra.txt": b"v2"}
    folder = find_model_folder([], "org/base@v2", write_config=True)
    assert "extra.txt" in {f.name for f in folder.side_files.files}


def test_a_folder_of_that_name_wins(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "org" / "base", llama(), llama_config())
    find_model_folder([], "org/base", write_config=True)
    assert hub.requests == []


def test_offline_the_cache_serves(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    base(tmp_path, hub)
    find_model_folder([], "org/base", write_config=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = len(hub.requests)
    folder = find_model_folder([], "org/base", write_config=True)
    assert len(hub.requests) == before
    assert folder.config_bytes is not None
    assert any("cache" in note for note in folder.notes)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE"):
        find_model_folder([], "org/other", write_config=True)


def test_weights_in_the_cache_are_used(hub: Hub, tmp_path: Path) -> None:
    from huggingface_hub import HfApi

    base(tmp_path, hub)
    snapshot = HfApi(endpoint=hub.url).snapshot_download("org/base")
    assert (Path(snapshot) / "model.safetensors").is_symlink()
    hub.ranges.clear()
    folder = find_model_folder([], "org/base", write_config=True)
    assert folder.info.base_tensors is not None
    assert [name for name, _, _ in hub.ranges if name == "model.safetensors"] == []


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [("org/none", None, "404"), ("org/base", 401, "HF_TOKEN"), ("org/base", 403, "403"), ("org/base", 500, "500")],
)
def test_refusals_of_the_hub_are_clear(hub: Hub, tmp_path: Path, name: str, status: int | None, words: str) -> None:
    base(tmp_path, hub)
    if status is not None:
        hub.fail("GET", "/api/models/org/base", status)
    with pytest.raises(HubError) as caught:
        find_model_folder([], name, write_config=True)
    assert words in str(caught.value)
    assert "--base-model DIR" in caught.value.hint


def test_a_repository_without_config_is_refused(hub: Hub) -> None:
    hub.add("org/data", {"README.md": b"no model"})
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        find_model_folder([], "org/data", write_config=True)


def test_a_snapshot_of_the_cache_is_base_source_and_checked(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import HfApi

    base(tmp_path, hub)
    snapshot = Path(HfApi(endpoint=hub.url).snapshot_download("org/base"))
    assert cli.run(["check", str(snapshot)]) == 0
    assert merge(snapshot, tmp_path / "resharded", "--max-shard-size", "100kB") == 0
    assert config_of(tmp_path / "resharded") == config_of(snapshot)
    assert len(list((tmp_path / "resharded").glob("*.safetensors"))) > 1
    source = checkpoint(tmp_path / "ckpt", llama(vocab=20_000))
    assert merge(source, tmp_path / "out", "--base-model", str(snapshot)) == 0
    assert not any(p.is_symlink() for p in (tmp_path / "out").iterdir())
    assert "base_model: org/base\n" in (tmp_path / "out" / "README.md").read_text()
    assert cli.run(["verify", str(tmp_path / "resharded"), "--against", str(snapshot)]) == 0


def test_without_the_extra_the_way_out_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "huggingface_hub":
            raise ModuleNotFoundError(name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(HubError, match="needs the package huggingface_hub") as caught:
        find_model_folder([], "org/base", write_config=True)
    assert "pip install 'merge-stream[hub]'" in caught.value.hint
    assert "--base-model DIR" in caught.value.hint


def test_plan_asks_the_hub_too_and_writes_nothing(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base(tmp_path, hub)
    source = checkpoint(tmp_path / "ckpt", llama(vocab=20_000))
    assert cli.run(["plan", str(source), str(tmp_path / "out"), "--base-model", "org/base", "--json"]) == 0
    assert "names are those of org/base on the Hub (1 header read" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def lone_adapter(tmp_path: Path, hub: Hub, name: str = "vanilla") -> tuple[Path, Golden]:
    """An adapter without weights, and the model it belongs to on the stand-in as org/base."""
    made = golden(name)
    folder = write_base(tmp_path / "base", made)
    hub.add("org/base", {p.name: p.read_bytes() for p in folder.iterdir()} | {"padding.safetensors": b"x"})
    return write_adapter(tmp_path / "adapter", made), made


def test_an_adapter_alone_asks_for_weights_in_merge_and_plan_alike(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter, _ = lone_adapter(tmp_path, hub)
    for command in (["merge", str(adapter), str(tmp_path / "out")], ["plan", str(adapter)]):
        assert cli.run([*command, "--base-model", "org/base"]) != 0
        told = capsys.readouterr().err
        assert "error: the weights of org/base are needed to fold the adapter" in told
        assert "`hf download org/base` brings them" in told
    assert not (tmp_path / "out").exists()


def test_weights_in_the_cache_take_an_adapter_by_the_name_on_the_hub(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import HfApi

    adapter, made = lone_adapter(tmp_path, hub)
    HfApi(endpoint=hub.url).snapshot_download("org/base", ignore_patterns=["padding*"])
    out = tmp_path / "out"
    assert cli.run(["plan", str(adapter), str(out), "--base-model", "org/base", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["tensors"] == len(made.merged)
    assert set(planned["side_files"]) == {"README.md", "config.json"}
    assert merge(adapter, out, "--base-model", "org/base") == 0
    got = tensors_of(out)
    assert {name: got[name].equal(tensor) for name, tensor in made.merged.items()} == dict.fromkeys(made.merged, True)
    assert "base_model: org/base\n" in (out / "README.md").read_text()
    assert cli.run(["verify", str(out), "--against", str(adapter), "--base-model", "org/base"]) == 0


def test_inspect_tells_of_the_base_model_from_headers(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter, made = lone_adapter(tmp_path, hub)
    assert cli.run(["inspect", str(adapter), "--base-model", "org/base"]) == 0
    told = capsys.readouterr().out
    assert f"base model  org/base: {len(made.original)} tensors" in told
    assert "config      the base model's" in told
    modules = {name.split(".lora_")[0] for name in made.adapter if ".lora_" in name}
    assert f"adapter     fits {len(modules)} modules of the base model" in told
    assert [name for name, span, _ in hub.ranges if name == "model.safetensors" and span is None] == []

    whole = checkpoint(tmp_path / "ckpt", llama(), llama_config())
    assert cli.run(["inspect", str(whole), "--base-model", "org/base"]) == 0
    assert "base model  org/base" in capsys.readouterr().out
    other = model_folder(tmp_path / "other", {"model.embed_tokens.weight": torch.ones(2, 2)}, llama_config())
    assert cli.run(["inspect", str(adapter), "--base-model", str(other)]) != 0
    assert "which the base model" in capsys.readouterr().err
    assert cli.run(["inspect", str(adapter), "--base-model", "org/none"]) != 0
    assert "404" in capsys.readouterr().err
