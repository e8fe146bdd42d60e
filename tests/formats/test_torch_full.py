"""Whole state dicts in torch.save files: the model is found, and nothing else is taken for one."""

from __future__ import annotations

import collections
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from merge_stream.errors import (
    AmbiguousCheckpointError,
    CorruptCheckpointError,
    IncompleteShardsError,
    MergeStreamError,
    TruncatedFileError,
    UnknownFormatError,
    UnsafePickleError,
    UnsupportedError,
    UsageError,
)
from merge_stream.formats.torch_full import MEMBER
from merge_stream.options import OpenOptions
from merge_stream.storage.local import LocalTree
from merge_stream.tensors.ref import Catalog
from tests.formats.naive import OPTIONS, assert_equal, fixture, opened, values

HF = {"model.embed_tokens.weight": torch.arange(6.0).reshape(3, 2), "model.norm.weight": torch.ones(2)}


def saved(path: Path, state: object, **kwargs: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path, **kwargs)
    return path.parent


def refusal(
    folder: Path, error: type[MergeStreamError], *words: str, options: OpenOptions = OPTIONS
) -> MergeStreamError:
    with pytest.raises(error) as caught:
        MEMBER.open(LocalTree.of([folder]), options)
    for word in words:
        assert word in caught.value.message
    return caught.value


def array(catalog: Catalog, name: str) -> np.ndarray:
    tensor = catalog.tensors[name]
    data, _ = values(catalog, tensor, tensor.shards)
    return np.frombuffer(data, tensor.dtype.numpy()).reshape(tensor.shape)


def assert_hf(catalog: Catalog) -> None:
    assert set(catalog.tensors) == set(HF)
    assert all((array(catalog, name) == value.numpy()).all() for name, value in HF.items())


@pytest.mark.parametrize("case", ["accel_fsdp1_w2_full", "accel_fsdp2_w2_full"])
def test_a_full_state_dict_of_accelerate_is_rebuilt_bit_for_bit(case: str) -> None:
    root = fixture(f"fsdp/{case}")
    catalog = opened(MEMBER, root / "ckpt")
    assert_equal(catalog, root / "expected_state.safetensors")
    assert [f.name for f in catalog.files] == ["pytorch_model_fsdp.bin"]


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "pytorch_model_fsdp_1.bin", "model.pt", "consolidated.00.pth", "anything.pt", "last.ckpt"],
)
def test_known_names_and_a_single_file_are_detected(name: str, legacy: bool, tmp_path: Path) -> None:
    assert_hf(opened(MEMBER, saved(tmp_path / name, HF, _use_new_zipfile_serialization=not legacy)))


@pytest.mark.parametrize("wrap", ["model", "state_dict", "module", "model_state_dict"])
def test_nested_state_dicts_are_entered_and_the_optimizer_is_left(wrap: str, tmp_path: Path) -> None:
    optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}
    state = {wrap: collections.OrderedDict(HF), "optimizer": optimizer, "epoch": 3, "best": 0.5}
    catalog = opened(MEMBER, saved(tmp_path / "model.pt", state))
    assert_hf(catalog)
    assert catalog.facts["container"] == wrap
    assert catalog.ignored == {"optimizer state": 1, "trainer state": 1, "Python value": 1}


def test_root_chooses_and_an_unknown_root_lists_those_there(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model.pt", {"model": HF, "ema": {k: v + 1 for k, v in HF.items()}})
    assert_hf(opened(MEMBER, folder))
    ema = opened(MEMBER, folder, options=OpenOptions(root="ema"))
    assert (array(ema, "model.norm.weight") == 2).all()
    assert "model, ema" in refusal(folder, UsageError, "'x'", options=OpenOptions(root="x")).hint


def test_tied_weights_views_parameters_and_dtypes(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(4, 3)
    state = {
        "a.weight": base,
        "tied.weight": base,
        "part.weight": base[1:3],
        "p.weight": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        "q.weight": torch.ones(2).to(torch.float8_e4m3fn),
        "scalar.weight": torch.tensor(7),
        "empty.weight": torch.ones(0, 3),
    }
    catalog = opened(MEMBER, saved(tmp_path / "model.pt", state))
    assert catalog.tensors["a.weight"].shards.same_bytes(catalog.tensors["tied.weight"].shards)
    assert (array(catalog, "part.weight") == base[1:3].numpy()).all()
    assert array(catalog, "scalar.weight") == 7
    assert str(catalog.tensors["q.weight"].dtype) == "F8_E4M3"
    assert len(catalog.tensors["empty.weight"].shards) == 0
    folder = saved(tmp_path / "turned" / "model.pt", {"t.weight": base.T})
    refusal(folder, UnsupportedError, "'t.weight'", "row")


def sharded(folder: Path, index: dict[str, str] | None = None) -> Path:
    one, two = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")
    saved(folder / one, {"model.embed_tokens.weight": HF["model.embed_tokens.weight"]})
    saved(folder / two, {"model.norm.weight": HF["model.norm.weight"]})
    where = {"model.embed_tokens.weight": one, "model.norm.weight": two} if index is None else index
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def test_sharded_bin_files_and_their_index_agree_both_ways(tmp_path: Path) -> None:
    assert_hf(opened(MEMBER, sharded(tmp_path)))
    (tmp_path / "pytorch_model.bin.index.json").unlink()
    assert_hf(opened(MEMBER, tmp_path))
    wrong = {
        "model.embed_tokens.weight": "pytorch_model-00002-of-00002.bin",
        "model.norm.weight": "pytorch_model-00001-of-00002.bin",
    }
    refusal(sharded(tmp_path, wrong), CorruptCheckpointError, "model.embed_tokens.weight")
    sharded(tmp_path)
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    refusal(tmp_path, IncompleteShardsError, "pytorch_model-00002-of-00002.bin")


@pytest.mark.parametrize(
    "name",
    [
        "optimizer.bin",
        "optimizer.pt",
        "optimizer_1.bin",
        "scheduler.bin",
        "scheduler.pt",
        "random_states_0.pkl",
        "training_args.bin",
        "rng_state.pth",
        "rng_state_0.pth",
        "scaler.pt",
        "data.pt",
        "common.pt",
        "mp_rank_00_model_states.pt",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "layer_00-model_states.pt",
        "model_optim_rng.pt",
        "distrib_optim.pt",
        "model_world_size_2_rank_0.pt",
        "optim_world_size_2_rank_0.pt",
        "extra_state_world_size_2_rank_0.pt",
        "pytorch_model_fsdp_rank0.bin",
        "pytorch_model_fsdp_0_rank1.bin",
        "optimizer_0_rank0.bin",
        "adapter_model.bin",
        "custom_checkpoint_0.pkl",
        "sampler.bin",
    ],
)
def test_what_trainers_write_beside_a_model_is_never_taken_for_one(name: str, tmp_path: Path) -> None:
    saved(tmp_path / name, HF)
    assert MEMBER.detect(LocalTree.of([tmp_path])) is None
    refusal(tmp_path, UnknownFormatError, str(tmp_path))


def test_a_single_file_without_a_model_or_with_company_is_not_detected(tmp_path: Path) -> None:
    assert (
        MEMBER.detect(LocalTree.of([saved(tmp_path / "a" / "x.pt", {"step": 3, "lr": torch.ones(1).item()})])) is None
    )
    assert MEMBER.detect(LocalTree.of([saved(tmp_path / "b" / "x.pt", [torch.ones(2)])])) is None
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "x.bin").write_bytes(b"no torch file")
    assert MEMBER.detect(LocalTree.of([tmp_path / "c"])) is None
    saved(tmp_path / "d" / "x.pt", HF)
    assert MEMBER.detect(LocalTree.of([saved(tmp_path / "d" / "y.pt", HF)])) is None
    saved(tmp_path / "mp_rank_00_000" / "model.pt", HF)
    assert MEMBER.detect(LocalTree.of([tmp_path / "mp_rank_00_000"])) is None
    assert MEMBER.detect(LocalTree.of([tmp_path])) is None


def test_two_whole_models_are_ambiguous(tmp_path: Path) -> None:
    saved(tmp_path / "pytorch_model_fsdp.bin", HF)
    saved(tmp_path / "pytorch_model_fsdp_1.bin", HF)
    refusal(tmp_path, AmbiguousCheckpointError, "pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin")
    (tmp_path / "pytorch_model_fsdp_1.bin").unlink()
    saved(tmp_path / "pytorch_model.bin", HF)
    refusal(tmp_path, AmbiguousCheckpointError, "pytorch_model.bin", "pytorch_model_fsdp.bin")


def test_tensor_parallel_parts_of_one_model_are_refused(tmp_path: Path) -> None:
    for part in range(2):
        saved(tmp_path / f"consolidated.0{part}.pth", HF)
    refusal(tmp_path, UnsupportedError, "2 tensor-parallel parts", "consolidated.01.pth")


def test_meta_names_are_told(tmp_path: Path) -> None:
    state = {"tok_embeddings.weight": torch.ones(2), "layers.0.attention.wq.weight": torch.ones(2)}
    assert opened(MEMBER, saved(tmp_path / "consolidated.00.pth", state)).naming == "torchtitan"


def test_objects_that_are_no_state_dict_are_explained(tmp_path: Path) -> None:
    refusal(saved(tmp_path / "a" / "model.pt", torch.nn.Linear(2, 2)), UnsupportedError, "Linear")
    refusal(saved(tmp_path / "b" / "model.pt", {"optimizer": HF, "step": 1}), UnknownFormatError, "optimizer state")
    refusal(saved(tmp_path / "c" / "model.pt", {"layers.0._flat_param": torch.ones(4)}), UnsupportedError, "flat")
    loop: dict[str, Any] = {"a.w": torch.ones(1)}
    loop["b"] = loop
    refusal(saved(tmp_path / "d" / "model.pt", loop), CorruptCheckpointError, "nested without end")


def test_damaged_and_hostile_files_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "pytorch_model.bin", HF)
    path = folder / "pytorch_model.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-200])
    refusal(folder, TruncatedFileError, "pytorch_model.bin")
    path.write_bytes(b"")
    refusal(folder, TruncatedFileError, "pytorch_model.bin")

    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            import os

            return os.system, (f"touch {tmp_path}/marker",)

    torch.save({"a.w": Evil()}, path, pickle_module=pickle)
    refusal(folder, UnsafePickleError, "pytorch_model.bin")
    assert not (tmp_path / "marker").exists()
