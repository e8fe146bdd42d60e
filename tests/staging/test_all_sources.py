"""A store of reordered, transposed and folded tensors holds what a direct merge writes."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
from safetensors.torch import load_file, save_file

from merge_stream.api import merge
from merge_stream.containers import zarr_array
from merge_stream.options import MergeOptions
from merge_stream.through_store import finalize_store, stage
from tests.families.test_goldens import GOLDENS, numbered, read
from tests.lora.goldens import golden, write_state

FAMILIES = ["gpt_oss.tf5", "gpt_neox.tf5", "llama4.tf5", "granitemoe.tf5", "jamba.tf4"]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 200 bytes: every tensor has several, and they end where no rule of a family does."""
    zarr_array.lay_out_array.cache_clear()
    monkeypatch.setattr(zarr_array, "_LARGEST_CHUNK", 200)


def assert_same(ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
    options = MergeOptions(model_card=False)
    merge(ckpt, tmp_path / "direct", options)
    stage(ckpt, tmp_path / "store", options)
    finalize_store(tmp_path / "store", tmp_path / "staged", options)
    zarr_array.lay_out_array.cache_clear()
    direct, staged = (load_file(tmp_path / name / "model.safetensors") for name in ("direct", "staged"))
    assert direct.keys() == staged.keys()
    for name, tensor in direct.items():
        assert torch.equal(tensor.view(torch.uint8), staged[name].view(torch.uint8)), name
    assert (tmp_path / "direct" / "config.json").read_bytes() == (tmp_path / "staged" / "config.json").read_bytes()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("path", [p for p in GOLDENS if p.stem in FAMILIES], ids=lambda path: path.stem)
def test_tensors_that_a_family_splits_joins_and_transposes(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    made = read(path)
    arrays = numbered(made["sources"])
    (tmp_path / "ckpt").mkdir()
    tensors = {name: torch.from_numpy(array).to(torch.float32) for name, array in arrays.items()}
    save_file(tensors, tmp_path / "ckpt" / "model.safetensors")
    (tmp_path / "ckpt" / "config.json").write_text(json.dumps(made["config"]))
    assert_same(tmp_path / "ckpt", tmp_path)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", ["all_linear", "conv1d_dora", "dora_bf16_fp32"])
def test_a_lora_that_is_folded_into_the_store(name: str, tmp_path: pathlib.Path) -> None:
    assert_same(write_state(tmp_path / "ckpt", golden(name)), tmp_path)
