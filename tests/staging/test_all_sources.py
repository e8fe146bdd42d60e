"""A store of reordered, transposed and folded tensors holds what a direct merge writes."""

from __future__ import annotations

import json
import pathlib
from typing import Literal

import pytest
import torch
import zarr
from safetensors.torch import load_file, save_file

from merge_stream.api import merge, verify
from merge_stream.containers import zarr_array
from merge_stream.errors import CorruptCheckpointError, UsageError
from merge_stream.inspection import describe
from merge_stream.opening import open_checkpoint
from merge_stream.options import LoraChoice, MergeOptions
from merge_stream.through_store import finalize_store, merge_through_store, stage
from tests.families.test_goldens import GOLDENS, numbered, read
from tests.lora.goldens import golden, write_adapter, write_state

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


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("mode", ["keep", "both"])
@pytest.mark.parametrize("name", ["all_linear", "embedding_bf16", "experts_bf16_fp32", "modules_to_save"])
def test_an_adapter_that_is_kept_goes_through_a_store(
    name: str, mode: Literal["keep", "both"], tmp_path: pathlib.Path
) -> None:
    made = golden(name)
    ckpt, store = write_state(tmp_path / "ckpt", made), tmp_path / "store"
    options = MergeOptions(model_card=False, lora=LoraChoice(mode))
    merge(ckpt, tmp_path / "direct", options)
    stage(ckpt, store, options)
    finalize_store(store, tmp_path / "staged", MergeOptions(model_card=False, verify=True))
    zarr_array.lay_out_array.cache_clear()
    assert everything(tmp_path / "staged") == everything(tmp_path / "direct")
    assert verify(tmp_path / "staged", store).ok
    assert verify(tmp_path / "staged", ckpt, lora=options.lora).ok
    kept = zarr.open_group(store, mode="r")["lora_adapter"]
    stored = load_file(tmp_path / "direct" / "lora_adapter" / "adapter_model.safetensors")
    assert set(kept) == set(stored)
    assert "kept" in str(describe(open_checkpoint([store]), every_tensor=False).facts["LoRA"])
    with pytest.raises(UsageError, match="--lora was decided when"):
        verify(tmp_path / "staged", store, lora=LoraChoice("keep"))


def everything(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("mode", ["keep", "both"])
def test_staging_zarr_keeps_an_adapter(mode: Literal["keep", "both"], tmp_path: pathlib.Path) -> None:
    ckpt = write_state(tmp_path / "ckpt", golden("patterns"))
    options = MergeOptions(model_card=False, dtype="bf16", lora=LoraChoice(mode))
    merge(ckpt, tmp_path / "direct", options)
    merge_through_store(ckpt, tmp_path / "staged", options)
    assert everything(tmp_path / "staged") == everything(tmp_path / "direct")
    assert not (tmp_path / "staged.partial").exists()


def test_an_adapter_alone_goes_through_a_store(tmp_path: pathlib.Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", golden("patterns"))
    options = MergeOptions(lora=LoraChoice("keep"), model_card=False)
    merge(adapter, tmp_path / "direct", options)
    stage(adapter, tmp_path / "store", options)
    finalize_store(tmp_path / "store", tmp_path / "staged", MergeOptions(model_card=False))
    assert everything(tmp_path / "staged") == everything(tmp_path / "direct")
    assert set(everything(tmp_path / "staged")) == {
        "lora_adapter/adapter_config.json",
        "lora_adapter/adapter_model.safetensors",
    }


def test_a_damaged_group_of_an_adapter_is_told(tmp_path: pathlib.Path) -> None:
    ckpt = write_state(tmp_path / "ckpt", golden("patterns"))
    stage(ckpt, tmp_path / "store", MergeOptions(lora=LoraChoice("keep")))
    arrays = [p for p in (tmp_path / "store" / "lora_adapter").rglob("c.*") if p.is_file()]
    data = bytearray(arrays[0].read_bytes())
    data[0] ^= 1
    arrays[0].write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"lora_adapter/base_model.*chunk \[0, 0\] is damaged"):
        finalize_store(tmp_path / "store", tmp_path / "out")
