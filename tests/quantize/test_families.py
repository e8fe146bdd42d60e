"""Quantizing what a trainer wrote gives what quantizing the merged model gives: splits, joins, transposes and folds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from merge_stream.api import merge, verify
from merge_stream.options import MergeOptions, QuantizeName
from tests.families.test_goldens import GOLDENS, numbered, read
from tests.lora.goldens import golden, write_state

FAMILIES = {"qwen3_moe.tf5", "mixtral.tf5", "deepseek_v3.tf5", "minimax.tf5", "qwen2_5_vl.tf5"}
SCHEMES: tuple[QuantizeName, ...] = ("fp8-dynamic", "fp8")


def assert_same(ckpt: Path, tmp_path: Path, scheme: QuantizeName) -> None:
    """The same bytes from the checkpoint and from the plain model that was merged from it, in its own types."""
    plain, quantized = MergeOptions(model_card=False), MergeOptions(model_card=False, quantize=scheme)
    merge(ckpt, tmp_path / "plain", plain)
    merge(ckpt, tmp_path / "direct", quantized)
    merge(tmp_path / "plain", tmp_path / "after", quantized)
    direct, after = (load_file(tmp_path / name / "model.safetensors") for name in ("direct", "after"))
    assert direct.keys() == after.keys()
    assert any(tensor.element_size() == 1 for tensor in direct.values())
    for name, tensor in direct.items():
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name
    assert (tmp_path / "direct" / "config.json").read_bytes() == (tmp_path / "after" / "config.json").read_bytes()
    assert verify(tmp_path / "direct", tmp_path / "plain").ok


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("path", [p for p in GOLDENS if p.stem in FAMILIES], ids=lambda path: path.stem)
def test_tensors_that_a_family_splits_joins_and_transposes(path: Path, tmp_path: Path, scheme: QuantizeName) -> None:
    made = read(path)
    (tmp_path / "ckpt").mkdir()
    arrays = numbered(made["sources"])
    tensors = {name: torch.from_numpy(array).to(torch.float32) for name, array in arrays.items()}
    save_file(tensors, tmp_path / "ckpt" / "model.safetensors")
    (tmp_path / "ckpt" / "config.json").write_text(json.dumps(made["config"]))
    assert_same(tmp_path / "ckpt", tmp_path, scheme)


@pytest.mark.parametrize("name", ["all_linear"])
def test_a_lora_that_is_folded(tmp_path: Path, name: str) -> None:
    """The sum is quantized, not the base."""
    made = golden(name)
    ckpt = write_state(tmp_path / "ckpt", made)
    assert_same(ckpt, tmp_path, "fp8-dynamic")
