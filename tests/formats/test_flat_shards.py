"""Flat parameters with metadata: rebuilt as the model was before it was sharded, or refused with the reason."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from merge_stream.api import merge
from merge_stream.errors import (
    AmbiguousCheckpointError,
    CorruptCheckpointError,
    IncompleteShardsError,
    MergeStreamError,
    TruncatedFileError,
    UnknownFormatError,
    UnsupportedError,
    UsageError,
)
from merge_stream.formats.flat_shards import MEMBER
from merge_stream.opening import open_checkpoint
from merge_stream.options import MergeOptions, OpenOptions
from merge_stream.storage.local import LocalTree
from merge_stream.tensors.ref import Catalog
from tests.cli.tool import CONFIG, LLAMA
from tests.formats.naive import OPTIONS, assert_equal, copied, fixture, opened, values

FAIRSCALE = ["w3_nested", "w7_nested", "w2_unflat_fp16", "w1_unflat", "w2_norms"]
XLA = ["w2_nested", "w3_unflat", "w2_rows", "w1"]
NESTED = "flat_shards/fairscale_w3_nested"
SMALL = {"a.weight": torch.arange(10.0).reshape(5, 2), "a.bias": torch.arange(3.0), "b.scale": torch.tensor(7.0)}


@pytest.mark.parametrize("case", [f"fairscale_{case}" for case in FAIRSCALE] + [f"xla_{case}" for case in XLA])
def test_a_real_checkpoint_is_rebuilt_bit_for_bit(case: str) -> None:
    root = fixture(f"flat_shards/{case}")
    catalog = opened(MEMBER, root / "ckpt")
    assert_equal(catalog, root / "expected_state.safetensors")
    assert open_checkpoint([root / "ckpt"]).format == "flat_shards"
    assert catalog.facts["world size"] == int(case.split("_")[1][1:])


def test_ties_are_one_storage_under_both_names() -> None:
    catalog = opened(MEMBER, fixture(NESTED) / "ckpt")
    for one, two in (
        ("decoder.embed_tokens.weight", "decoder.output_projection.weight"),
        ("decoder.layers.0.fc2.bias", "decoder.layers.0.norm.twin"),
    ):
        assert catalog.tensors[one].shards.same_bytes(catalog.tensors[two].shards)


# ---- files made here, in fairscale's and torch_xla's form


def fairscale_files(
    folder: Path, params: Mapping[str, torch.Tensor], world: int, *, name: str = "checkpoint_last-shard{}.pt"
) -> Path:
    """One flat parameter with all of `params`, cut and padded as fairscale does."""
    flat = torch.cat([tensor.reshape(-1) for tensor in params.values()])
    part = -(-len(flat) // world)
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        own = flat[rank * part : (rank + 1) * part].clone()
        content = {
            "names": list(params),
            "shapes": [tensor.shape for tensor in params.values()],
            "numels": [tensor.numel() for tensor in params.values()],
            "padding": part - len(own),
        }
        unit = {"fsdp_path": "", "params": {"flat_param_0": content}, "no_broadcast_optim_state": False}
        saved = {
            "model": {
                "flat_param_0": torch.nn.functional.pad(own, (0, part - len(own))),
                "version": torch.tensor([3.0]),
            },
            "shard_metadata": {"param_metadata": [{**unit, "shared_param_info": []}], "buffer_names": ["version"]},
        }
        torch.save(saved, folder / name.format(rank))
    return folder


def changed(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Load a file, change it in place, save it again."""
    saved = torch.load(folder / name, weights_only=True)
    change(saved)
    torch.save(saved, folder / name)


def content_of(saved: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = saved["shard_metadata"]["param_metadata"][0]["params"]["flat_param_0"]
    return content


def refusal(
    folder: Path, error: type[MergeStreamError], *words: str, options: OpenOptions = OPTIONS
) -> MergeStreamError:
    with pytest.raises(error) as caught:
        MEMBER.open(LocalTree.of([folder]), options)
    for word in words:
        assert word in caught.value.message
    assert caught.value.hint
    return caught.value


def array(catalog: Catalog, name: str) -> np.ndarray:
    tensor = catalog.tensors[name]
    data, hits = values(catalog, tensor, tensor.shards)
    assert (hits == 1).all()
    return np.frombuffer(data, tensor.dtype.numpy()).reshape(tensor.shape)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 9, 14, 20])
def test_any_world_size_gives_the_same_values(world: int, tmp_path: Path) -> None:
    """20 ranks for 14 elements: the last ones hold padding alone."""
    catalog = opened(MEMBER, fairscale_files(tmp_path, SMALL, world))
    assert set(catalog.tensors) == {*SMALL, "version"}
    assert all((array(catalog, name) == tensor.numpy()).all() for name, tensor in SMALL.items())


@pytest.mark.parametrize("name", ["any{}.pt", "model.rank{}.bin", "x_shard_{}.ckpt", "shard{}.pth"])
def test_other_names_are_recognised_by_what_the_files_hold(name: str, tmp_path: Path) -> None:
    catalog = opened(MEMBER, fairscale_files(tmp_path, SMALL, 3, name=name))
    assert (array(catalog, "a.weight") == SMALL["a.weight"].numpy()).all()


def test_a_single_file_may_have_any_name(tmp_path: Path) -> None:
    fairscale_files(tmp_path, SMALL, 1, name="model.pt")
    catalog = open_checkpoint([tmp_path])
    assert catalog.format == "flat_shards"
    assert (array(catalog, "a.bias") == SMALL["a.bias"].numpy()).all()


def test_metaseq_names_are_written_as_they_are(tmp_path: Path) -> None:
    root = fixture(NESTED)
    merge(root / "ckpt", tmp_path / "out", options=MergeOptions(layout="as-is", write_config=False))
    got = load_file(tmp_path / "out" / "model.safetensors")
    want = load_file(root / "expected_state.safetensors")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_hugging_face_names_give_a_model_with_the_config_beside(tmp_path: Path) -> None:
    folder = fairscale_files(tmp_path / "ckpt", LLAMA, 3, name="llama-shard{}.pt")
    for rank in range(3):
        changed(folder, f"llama-shard{rank}.pt", lambda saved: saved["model"].pop("version"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    merge(folder, tmp_path / "out", options=MergeOptions(model_card=False))
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got.keys() == LLAMA.keys()
    assert all(torch.equal(got[name], LLAMA[name]) for name in LLAMA)
    assert (tmp_path / "out" / "config.json").exists()


def test_root_chooses_another_state_dict_of_the_same_metadata(tmp_path: Path) -> None:
    fairscale_files(tmp_path, SMALL, 2)
    for rank in range(2):
        ema = lambda saved: saved.update(extra_state={"ema": {k: v + 1 for k, v in saved["model"].items()}})  # noqa: E731
        changed(tmp_path, f"checkpoint_last-shard{rank}.pt", ema)
    assert array(opened(MEMBER, tmp_path), "a.bias")[0] == 0
    assert array(opened(MEMBER, tmp_path, options=OpenOptions(root="extra_state.ema")), "a.bias")[0] == 1
    refusal(tmp_path, UsageError, "'nothing'", options=OpenOptions(root="nothing"))
    for rank in range(2):
        changed(
            tmp_path,
            f"checkpoint_last-shard{rank}.pt",
            lambda s: s.update(one=s.pop("model"), two=s["extra_state"]["ema"]),
        )
    assert "--root" in refusal(tmp_path, AmbiguousCheckpointError, "one, two").hint


def test_tensors_in_lists_are_never_dropped_in_silence(tmp_path: Path) -> None:
    fairscale_files(tmp_path, SMALL, 1)
    changed(tmp_path, "checkpoint_last-shard0.pt", lambda saved: saved["model"].update(more=[torch.ones(2, 2)]))
    refusal(tmp_path, UnsupportedError, "more[0]")


# ---- ranks


def test_every_missing_rank_is_named(tmp_path: Path) -> None:
    fairscale_files(tmp_path, SMALL, 5)
    (tmp_path / "checkpoint_last-shard4.pt").unlink()
    refusal(tmp_path, IncompleteShardsError, "14 elements", "have ranks 0-3", "missing ranks 4")
    (tmp_path / "checkpoint_last-shard1.pt").unlink()
    refusal(tmp_path, IncompleteShardsError, "have ranks 0, 2-3", "missing ranks 1")


def test_a_missing_rank_of_torch_xla_is_known_from_the_metadata(tmp_path: Path) -> None:
    folder = copied("flat_shards/xla_w3_unflat", tmp_path)
    (folder / "rank2-of-3-pytorch_model.bin").unlink()
    refusal(folder, IncompleteShardsError, "have ranks 0-1", "missing ranks 2")


def test_ranks_on_several_disks_are_laid_over_each_other(tmp_path: Path) -> None:
    fairscale_files(tmp_path / "one", SMALL, 3)
    (tmp_path / "two").mkdir()
    shutil.move(tmp_path / "one" / "checkpoint_last-shard1.pt", tmp_path / "two")
    catalog = opened(MEMBER, tmp_path / "one", tmp_path / "two")
    assert (array(catalog, "a.weight") == SMALL["a.weight"].numpy()).all()


def test_renamed_ranks_are_found_by_their_padding(tmp_path: Path) -> None:
    fairscale_files(tmp_path, SMALL, 4)
    (tmp_path / "checkpoint_last-shard3.pt").rename(tmp_path / "x")
    (tmp_path / "checkpoint_last-shard0.pt").rename(tmp_path / "checkpoint_last-shard3.pt")
    (tmp_path / "x").rename(tmp_path / "checkpoint_last-shard0.pt")
    refusal(tmp_path, CorruptCheckpointError, "padding", "on rank 0")


def test_torch_xla_files_tell_their_ranks_whatever_they_are_called(tmp_path: Path) -> None:
    folder = copied("flat_shards/xla_w2_nested", tmp_path)
    names = sorted(path.name for path in folder.iterdir())
    for number, name in zip((1, 0), names, strict=True):
        (folder / name).rename(folder / f"x{number}.pth")
    assert_equal(opened(MEMBER, folder), fixture("flat_shards/xla_w2_nested") / "expected_state.safetensors")
    shutil.copy(folder / "x0.pth", folder / "x2.pth")
    refusal(folder, AmbiguousCheckpointError, "both of rank 1")


def test_several_checkpoints_are_ambiguous_and_a_file_says_which(tmp_path: Path) -> None:
    fairscale_files(tmp_path, SMALL, 2)
    fairscale_files(
        tmp_path, {name: tensor + 1 for name, tensor in SMALL.items()}, 3, name="checkpoint_best-shard{}.pt"
    )
    found = refusal(tmp_path, AmbiguousCheckpointError, "checkpoint_best-shard*.pt", "checkpoint_last-shard*.pt")
    assert "pass one file" in found.hint
    catalog = open_checkpoint([tmp_path / "checkpoint_best-shard1.pt"])
    assert catalog.facts["world size"] == 3
    assert array(catalog, "b.scale") == 8


def test_numbers_that_are_no_ranks_are_ambiguous(tmp_path: Path) -> None:
    for step in (100, 200):
        fairscale_files(tmp_path, SMALL, 1, name=f"step{step}.pt")
    refusal(tmp_path, AmbiguousCheckpointError, "do not tell their ranks", "100, 200")


# ---- contradictions


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: content_of(s).update(padding=1), ("padding",)),
        (lambda s: content_of(s).update(numels=[10, 3, 2]), ("'b.scale'", "2 elements")),
        (lambda s: content_of(s).update(shapes=[(5, 2), (3,), (-1,)]), ("malformed",)),
        (lambda s: content_of(s).update(names=["a.weight", "a.bias"]), ("malformed",)),
        (lambda s: content_of(s).update(names=["a.weight", "a.bias", "a.bias"]), ("'a.bias' twice",)),
        (lambda s: s["shard_metadata"]["param_metadata"][0].update(shared_param_info=[("x.w", "y.w")]), ("'x.w'",)),
        (lambda s: s.pop("shard_metadata"), ("no shard metadata",)),
        (lambda s: s["model"].update(flat_param_0=torch.ones(7).half()), ("F16",)),
        (lambda s: s["model"].update(flat_param_0=torch.ones(8)), ("[8]",)),
        (lambda s: s["model"].update(flat_param_0=3), ("flat_param_0",)),
        (lambda s: s["model"].pop("flat_param_0"), ("flat_param_0",)),
        (lambda s: s["model"].update(more=torch.ones(2)), ("'more'",)),
    ],
)
def test_contradictions_are_refused_with_the_place(
    change: Callable[[dict[str, Any]], object], words: tuple[str, ...], tmp_path: Path
) -> None:
    fairscale_files(tmp_path, SMALL, 2)
    changed(tmp_path, "checkpoint_last-shard1.pt", change)
    with pytest.raises(MergeStreamError) as caught:
        MEMBER.open(LocalTree.of([tmp_path]), OPTIONS)
    assert caught.value.exit_code == 5
    assert caught.value.hint
    for word in ("shard1.pt", *words):
        assert word in caught.value.message


def test_a_total_that_is_too_large_or_too_small_is_refused(tmp_path: Path) -> None:
    for case, (shape, kind) in enumerate([((40, 2), IncompleteShardsError), ((1, 2), CorruptCheckpointError)]):
        folder = fairscale_files(tmp_path / str(case), SMALL, 2)
        sizes = {"shapes": [shape, (3,), ()], "numels": [math.prod(shape), 3, 1]}
        for rank in range(2):
            changed(folder, f"checkpoint_last-shard{rank}.pt", lambda s, sizes=sizes: content_of(s).update(sizes))
        refusal(folder, kind, "flat_param_0", "elements")


def test_a_part_of_torch_xla_that_no_world_size_gives_is_refused(tmp_path: Path) -> None:
    folder = copied("flat_shards/xla_w2_nested", tmp_path)
    for path in sorted(folder.iterdir()):
        changed(
            folder,
            path.name,
            lambda s: s["model"].update({k: v[:100] for k, v in s["model"].items() if v.numel() == 128}),
        )
    refusal(folder, CorruptCheckpointError, "100 elements")


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    fairscale_files(tmp_path, SMALL, 2)
    path = tmp_path / "checkpoint_last-shard1.pt"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(CorruptCheckpointError) as caught:
        MEMBER.open(LocalTree.of([tmp_path]), OPTIONS)
    assert isinstance(caught.value, TruncatedFileError) or "shard1.pt" in caught.value.message


# ---- copies and buffers


def test_buffers_are_those_of_rank_0_and_a_difference_is_told(tmp_path: Path) -> None:
    fairscale_files(tmp_path, SMALL, 2)
    changed(tmp_path, "checkpoint_last-shard1.pt", lambda saved: saved["model"]["version"].add_(1))
    catalog = opened(MEMBER, tmp_path)
    assert array(catalog, "version") == 3
    assert catalog.tensors["version"].replicas is not None
    assert any("version" in note and "differ" in note for note in catalog.notes)


def test_experts_that_each_rank_holds_alone_are_refused(tmp_path: Path) -> None:
    """Two ranks, each with a whole parameter: copies when they are equal, else not one model's."""
    fairscale_files(tmp_path, SMALL, 1)
    shutil.copy(tmp_path / "checkpoint_last-shard0.pt", tmp_path / "checkpoint_last-shard1.pt")
    assert (array(opened(MEMBER, tmp_path), "a.weight") == SMALL["a.weight"].numpy()).all()
    changed(tmp_path, "checkpoint_last-shard1.pt", lambda saved: saved["model"]["flat_param_0"].add_(1))
    refusal(tmp_path, UnsupportedError, "'flat_param_0'", "different")
    for rank in range(2):
        (tmp_path / f"checkpoint_last-shard{rank}.pt").rename(tmp_path / f"checkpoint_last-rank-{rank}-shard{rank}.pt")
    refusal(tmp_path, UnsupportedError, "experts")


def test_a_buffer_that_torch_xla_cast_gets_its_own_type_back(tmp_path: Path) -> None:
    folder = copied("flat_shards/xla_w2_nested", tmp_path)
    key = "_fsdp_wrapped_module.decoder.version"

    def cast(saved: dict[str, Any]) -> None:
        saved["model"][key] = saved["model"][key].bfloat16()
        saved["shard_metadata"]["buffer_info"] = {key: {"_orig_dtype": torch.float32}}

    for path in sorted(folder.iterdir()):
        changed(folder, path.name, cast)
    tensor = opened(MEMBER, folder).tensors["decoder.version"]
    assert (str(tensor.dtype), str(tensor.on_disk)) == ("F32", "BF16")
    merge(folder, tmp_path / "out", options=MergeOptions(layout="as-is", write_config=False))
    got = load_file(tmp_path / "out" / "model.safetensors")["decoder.version"]
    assert torch.equal(got, torch.tensor([3.0]))
    assert got.dtype == torch.float32


# ---- what cannot be merged


def test_tensor_parallel_parts_are_refused_unless_there_is_one(tmp_path: Path) -> None:
    name = "checkpoint_1-model_part-0-shard{}.pt"
    fairscale_files(tmp_path, SMALL, 2, name=name)
    assert "metaseq" in refusal(tmp_path, UnsupportedError, "tensor-parallel part").hint
    for size in (2, 1):
        for rank in range(2):
            cfg = {"common": {"model_parallel_size": size}}
            changed(tmp_path, name.format(rank), lambda saved, cfg=cfg: saved.update(cfg=copy.deepcopy(cfg)))
        if size == 2:
            refusal(tmp_path, UnsupportedError, "model_parallel_size 2")
    assert (array(opened(MEMBER, tmp_path), "a.bias") == SMALL["a.bias"].numpy()).all()


@pytest.mark.parametrize("world", [1, 2])
def test_flat_parameters_without_metadata_are_explained(world: int, tmp_path: Path) -> None:
    fairscale_files(tmp_path, SMALL, world)
    for rank in range(world):
        changed(tmp_path, f"checkpoint_last-shard{rank}.pt", lambda saved: saved.pop("shard_metadata"))
    with pytest.raises(UnsupportedError, match="flat parameters") as caught:
        open_checkpoint([tmp_path])
    assert "FULL_STATE_DICT" in caught.value.hint
    assert "shard_metadata" in caught.value.hint


def test_other_folders_are_left_to_other_formats(tmp_path: Path) -> None:
    torch.save({"model": {"a.weight": torch.ones(2)}}, tmp_path / "model.pt")
    assert MEMBER.detect(LocalTree.of([tmp_path])) is None
    refusal(tmp_path, UnknownFormatError, "shard_metadata")
