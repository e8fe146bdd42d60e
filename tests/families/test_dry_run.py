"""The optional last resort: transformers' own conversion on tensors without data."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys

import pytest

from merge_stream.architectures._dry_run import dry_run
from merge_stream.architectures.base import ModelInfo
from merge_stream.tensors.parameter import Mapping
from tests.families.test_goldens import GOLDENS, assert_equal, read

CONFIG = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "tie_word_embeddings": False,
}


def test_without_transformers_it_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert dry_run({"model.norm.weight": (8,)}, ModelInfo(CONFIG)) is None
    assert "HF_HUB_OFFLINE" not in os.environ, "an upload that follows must reach the Hub"


@pytest.mark.parametrize("version", ["none", "4"])
def test_without_transformers_5_torch_is_not_imported(
    version: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal is told at once: importing torch alone takes seconds."""
    if version == "4":  # has no conversion_mapping
        (tmp_path / "transformers").mkdir()
        (tmp_path / "transformers/__init__.py").write_text("raise AssertionError('imported')")
    path = [str(tmp_path), *(p for p in sys.path if not pathlib.Path(p, "transformers").exists())]
    monkeypatch.setattr(sys, "path", path)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert (importlib.util.find_spec("transformers") is None) == (version == "none")
    assert dry_run({"model.norm.weight": (8,)}, ModelInfo(CONFIG)) is None
    assert "torch" not in sys.modules


def test_with_transformers_5_it_is_the_table() -> None:
    """Runs where transformers 5 is installed; make_goldens.py tells how to put it on the path."""
    pytest.importorskip("transformers.core_model_loading", exc_type=ImportError)
    golden = read(next(path for path in GOLDENS if path.stem == "mixtral.tf5"))
    converted = dry_run(golden["sources"], ModelInfo(CONFIG))
    assert converted is not None
    assert_equal(Mapping("dry run", converted.parameters), golden)
    assert dry_run({"model.norm.weight": (8,)}, ModelInfo(CONFIG)) is None
    assert dry_run(golden["sources"], ModelInfo({"model_type": "mixtral"})) is None
