"""Which config, which side files, which names: the checkpoint's folder first, then the base model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from merge_stream.errors import CheckpointError, CorruptCheckpointError, HubError
from merge_stream.output.model_info import find_model_folder


def model(path: Path, *files: str, config: dict[str, Any] | None = None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    for name in files:
        (path / name).write_text(name)
    return path


def weights(path: Path, **tensors: tuple[int, ...]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: np.zeros(shape, np.float16) for name, shape in tensors.items()}, path)


def test_own_folder_alone(tmp_path: Path) -> None:
    own = model(tmp_path / "huggingface", "tokenizer.json", config={"model_type": "llama"})
    folder = find_model_folder([str(own)], None, write_config=True)
    assert folder.info.model_type == "llama"
    assert folder.info.config_path == str(own / "config.json")
    assert folder.info.base_tensors is None
    assert folder.config_bytes == (own / "config.json").read_bytes()
    assert [f.name for f in folder.side_files.files] == ["tokenizer.json"]
    assert folder.notes == ()


def test_case_133_own_config_wins_over_the_base(tmp_path: Path) -> None:
    own = model(tmp_path / "own", config={"model_type": "llama", "vocab_size": 1010})
    base = model(tmp_path / "base", "tokenizer.json", config={"model_type": "llama", "vocab_size": 1000})
    folder = find_model_folder([str(own)], str(base), write_config=True)
    assert folder.info.config is not None
    assert folder.info.config["vocab_size"] == 1010
    assert [(f.name, f.origin) for f in folder.side_files.files] == [("tokenizer.json", "base model")]


def test_config_of_the_base_fills_in_with_a_note(tmp_path: Path) -> None:
    own = model(tmp_path / "own", "tokenizer.json")
    base = model(tmp_path / "base", "vocab.json", config={"model_type": "qwen2"})
    folder = find_model_folder([str(own)], str(base), write_config=True)
    assert folder.info.model_type == "qwen2"
    assert any("config.json is taken from the base model" in note for note in folder.notes)
    assert [f.name for f in folder.side_files.files] == ["tokenizer.json"]


def test_missing_config_names_both_ways_out(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json") as caught:
        find_model_folder([str(model(tmp_path / "own"))], None, write_config=True)
    assert "--base-model DIR" in caught.value.hint
    assert "--no-config" in caught.value.hint
    assert caught.value.exit_code == 5


def test_weights_alone_read_no_config_of_the_checkpoint(tmp_path: Path) -> None:
    own = model(tmp_path / "own", "tokenizer.json")
    (own / "config.json").write_text("{broken")
    folder = find_model_folder([str(own)], None, write_config=False)
    assert (folder.info.config, folder.config_bytes, folder.side_files.files) == (None, None, ())
    base = model(tmp_path / "base", config={"model_type": "llama"})
    folder = find_model_folder([str(own)], str(base), write_config=False)
    assert folder.info.model_type == "llama"
    assert folder.config_bytes is None
    assert folder.side_files.files == ()


@pytest.mark.parametrize("text", ["{broken", "[]", ""])
def test_broken_config_is_told_with_its_path(tmp_path: Path, text: str) -> None:
    own = model(tmp_path / "own")
    (own / "config.json").write_text(text)
    with pytest.raises(CorruptCheckpointError, match=r"own/config\.json"):
        find_model_folder([str(own)], None, write_config=True)


@pytest.mark.parametrize(
    ("name", "match", "hint"),
    [
        ("nowhere", "is not there", "pass a folder"),
        ("empty", "has no config", "snapshots"),
        ("file", "not a folder", "pass a folder"),
    ],
)
def test_unusable_base_model_is_refused(tmp_path: Path, name: str, match: str, hint: str) -> None:
    own = model(tmp_path / "own", config={"model_type": "llama"})
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=match) as caught:
        find_model_folder([str(own)], str(tmp_path / name), write_config=True)
    assert hint in caught.value.hint


def test_hub_name_as_base_model_needs_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(HubError, match="HF_HUB_OFFLINE") as caught:
        find_model_folder([], "Qwen/Qwen2-7B", write_config=True)
    assert "--base-model DIR" in caught.value.hint


def test_base_tensors_come_from_headers_of_a_hub_snapshot(tmp_path: Path) -> None:
    weights(tmp_path / "blobs/one", a=(2, 3))
    weights(tmp_path / "blobs/two", b=(4,))
    base = model(tmp_path / "snapshots/rev", config={"model_type": "x"})
    (base / "model-00001-of-00002.safetensors").symlink_to(tmp_path / "blobs/one")
    (base / "model-00002-of-00002.safetensors").symlink_to(tmp_path / "blobs/two")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors = find_model_folder([], str(base), write_config=True).info.base_tensors
    assert tensors is not None
    assert {name: (t.dtype.name, t.shape) for name, t in tensors.items()} == {"a": ("F16", (2, 3)), "b": ("F16", (4,))}


def test_single_file_and_strays(tmp_path: Path) -> None:
    base = model(tmp_path / "base", config={"model_type": "x"})
    weights(base / "model.safetensors", a=(1,))
    weights(base / "consolidated.safetensors", stray=(1,))
    weights(base / "adapter_model.safetensors", stray=(1,))
    tensors = find_model_folder([], str(base), write_config=True).info.base_tensors
    assert tensors is not None
    assert set(tensors) == {"a"}


def test_index_without_files_is_told_and_not_used(tmp_path: Path) -> None:
    base = model(tmp_path / "base", config={"model_type": "x"})
    (base / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    folder = find_model_folder([], str(base), write_config=True)
    assert folder.info.base_tensors is None
    assert "model-1.safetensors" in folder.notes[0]


@pytest.mark.parametrize("index", ['{"weight_map": 3}', '{"weight_map": {"b": "model.safetensors"}}'])
def test_index_that_lies_is_corrupt(tmp_path: Path, index: str) -> None:
    base = model(tmp_path / "base", config={"model_type": "x"})
    weights(base / "model.safetensors", a=(1,))
    (base / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CorruptCheckpointError, match=r"index\.json"):
        find_model_folder([], str(base), write_config=True)


def test_base_model_that_is_the_own_folder_gives_its_files_once(tmp_path: Path) -> None:
    own = model(tmp_path / "own", "tokenizer.json", config={"model_type": "llama"})
    folder = find_model_folder([str(own)], str(own), write_config=True)
    assert [f.name for f in folder.side_files.files] == ["tokenizer.json"]


def test_only_the_folder_of_the_config_gives_side_files(tmp_path: Path) -> None:
    own = model(tmp_path / "huggingface", "tokenizer.json", config={"model_type": "llama"})
    root = model(tmp_path, "vocab.json", "notes.txt", config={"model_type": "other"})
    folder = find_model_folder([str(own), str(root)], None, write_config=True)
    assert folder.info.model_type == "llama"
    assert [f.name for f in folder.side_files.files] == ["tokenizer.json"]
