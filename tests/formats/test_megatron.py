"""Megatron: real saves of every layout give the model they were made from; what contradicts itself is refused."""

from __future__ import annotations

import argparse
import io
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from merge_stream import cli
from merge_stream.errors import (
    AmbiguousCheckpointError,
    CorruptCheckpointError,
    IncompleteShardsError,
    MergeStreamError,
    TruncatedFileError,
)
from merge_stream.formats.megatron import MEMBER
from merge_stream.options import OpenOptions
from merge_stream.storage.local import LocalTree
from tests.formats.naive import DATA
from tests.formats.test_deepspeed import content

MEGATRON = DATA / "megatron"
REAL = sorted(path.parent for path in MEGATRON.glob("*/check.json"))
STEP = "iter_0000100"


def runs() -> Iterator[tuple[Path, dict[str, object]]]:
    for case in REAL:
        for run in json.loads((case / "check.json").read_text())["runs"]:
            yield case, run


@pytest.mark.parametrize(("case", "run"), [pytest.param(c, r, id=c.name) for c, r in runs()])
def test_real_saves_give_the_model_they_were_made_from(case: Path, run: dict[str, object], tmp_path: Path) -> None:
    """The truth is the Hugging Face model that was loaded into Megatron."""
    options = ["--base-model", str(case / str(run["base_model"]))] if "base_model" in run else []
    assert cli.run(["merge", str(case / "ckpt"), str(tmp_path / "out"), "-q", "--check-replicas", *options]) == 0
    assert content(tmp_path / "out") == content(case / str(run["compare"]))


@pytest.mark.parametrize("name", ["td_qwen3moe_grouped_tp2_ep2", "legacy_qwen3moe_weight1_ep2", "zarr_llama_tp2_pp2"])
def test_pieces_of_any_size_give_the_same(name: str, tmp_path: Path) -> None:
    """Small output files and several workers cut the same stacks elsewhere."""
    case = MEGATRON / name
    options = ["--base-model", str(case / "hf"), "--max-shard-size", "20kB", "--workers", "4", "--verify", "-q"]
    assert cli.run(["merge", str(case / "ckpt"), str(tmp_path / "out"), *options]) == 0
    assert content(tmp_path / "out") == content(case / "expected")


def copied(name: str, folder: Path) -> Path:
    shutil.copytree(MEGATRON / name / "ckpt", folder / "ckpt")
    return folder / "ckpt"


def failure(ckpt: Path, base: Path, out: Path) -> MergeStreamError:
    """What a merge says; nothing was written."""
    from merge_stream.api import merge
    from merge_stream.options import MergeOptions

    with pytest.raises(MergeStreamError) as caught:
        merge(ckpt, out, MergeOptions(base_model=str(base)))
    assert not out.exists()
    assert caught.value.hint
    return caught.value


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES: dict[str, tuple[str, Callable[[Path], object], type[MergeStreamError], str]] = {
    "a rank's folder": (
        "legacy_llama_tp2_pp2",
        lambda c: shutil.rmtree(c / STEP / "mp_rank_01_001"),
        IncompleteShardsError,
        "tensor 1 pipeline 1",
    ),
    "a pipeline stage": (
        "legacy_llama_tp2_pp2",
        lambda c: [shutil.rmtree(c / STEP / f"mp_rank_0{t}_001") for t in (0, 1)],
        IncompleteShardsError,
        "pipeline 1",
    ),
    "an expert rank": (
        "legacy_qwen3moe_weight1_ep2",
        lambda c: shutil.rmtree(c / STEP / "mp_rank_00_001"),
        IncompleteShardsError,
        "expert 1",
    ),
    "the end of a rank's file": (
        "legacy_llama_tp2_pp2",
        lambda c: cut(c / STEP / "mp_rank_00_000" / "model_optim_rng.pt"),
        MergeStreamError,
        "mp_rank_00_000/model_optim_rng.pt",
    ),
    "a distcp file": (
        "td_qwen3moe_grouped_tp2_ep2",
        lambda c: (c / STEP / "__1_0.distcp").unlink(),
        IncompleteShardsError,
        "__1_0.distcp",
    ),
    "the end of a distcp file": (
        "td_qwen3moe_grouped_tp2_ep2",
        lambda c: cut(c / STEP / "__1_0.distcp"),
        TruncatedFileError,
        "__1_0.distcp",
    ),
    "the folder of the tracker": (
        "td_qwen3moe_grouped_tp2_ep2",
        lambda c: (c / "latest_checkpointed_iteration.txt").write_text("200"),
        IncompleteShardsError,
        "iter_0000200",
    ),
    "sense in the tracker": (
        "td_qwen3moe_grouped_tp2_ep2",
        lambda c: (c / "latest_checkpointed_iteration.txt").write_text("../../etc"),
        CorruptCheckpointError,
        "wanted a number or release",
    ),
    "a backend that is known": (
        "td_qwen3moe_grouped_tp2_ep2",
        lambda c: (c / STEP / "metadata.json").write_text('{"sharded_backend": "other"}'),
        CorruptCheckpointError,
        "'other'",
    ),
    "the other ranks' folders": (
        "legacy_llama_tp2_pp2",
        lambda c: (
            [p.rename(c / p.name) for p in sorted((c / STEP / "mp_rank_00_000").iterdir())]
            + [shutil.rmtree(c / STEP), (c / "latest_checkpointed_iteration.txt").unlink()]
        ),
        IncompleteShardsError,
        "folder of one rank",
    ),
    "a chunk": (
        "zarr_llama_tp2_pp2",
        lambda c: (c / STEP / "decoder.layers.mlp.linear_fc1.weight" / "2.1.0").unlink(),
        IncompleteShardsError,
        "decoder.layers.mlp.linear_fc1.weight",
    ),
    "the end of a chunk": (
        "zarr_llama_tp2_pp2",
        lambda c: cut(c / STEP / "decoder.layers.mlp.linear_fc1.weight" / "2.1.0"),
        MergeStreamError,
        "decoder.layers.mlp.linear_fc1.weight/2.1.0",
    ),
    "an array": (
        "zarr_llama_tp2_pp2",
        lambda c: shutil.rmtree(c / STEP / "decoder.layers.mlp.linear_fc1.weight"),
        IncompleteShardsError,
        "gate_proj",
    ),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_what_is_missing_is_named(what: str, tmp_path: Path) -> None:
    name, damage, kind, said = DAMAGES[what]
    ckpt = copied(name, tmp_path)
    damage(ckpt)
    error = failure(ckpt, MEGATRON / name / "hf", tmp_path / "out")
    assert isinstance(error, kind)
    assert said in str(error)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("legacy_llama_tp2_pp2", "num_hidden_layers", 3),
        ("legacy_llama_tp2_pp2", "num_hidden_layers", 5),
        ("legacy_llama_tp2_pp2", "num_attention_heads", 2),
        ("legacy_llama_tp2_pp2", "num_key_value_heads", 1),
        ("legacy_llama_tp2_pp2", "hidden_size", 128),
        ("legacy_llama_tp2_pp2", "intermediate_size", 64),
        ("legacy_llama_tp2_pp2", "vocab_size", 4096),
        ("td_qwen3moe_grouped_tp2_ep2", "num_local_experts", 2),
        ("td_qwen3moe_grouped_tp2_ep2", "num_local_experts", 16),
        ("td_qwen3moe_grouped_tp2_ep2", "moe_intermediate_size", 8),
        ("zarr_llama_tp2_pp2", "num_hidden_layers", 2),
        ("zarr_llama_tp2_pp2", "num_key_value_heads", 1),
    ],
)
def test_a_config_of_another_model_is_refused(name: str, key: str, value: object, tmp_path: Path) -> None:
    """Sizes come from the config and must agree with every shape."""
    base = tmp_path / "hf"
    shutil.copytree(MEGATRON / name / "hf", base)
    config = json.loads((base / "config.json").read_text())
    assert config[key] != value
    (base / "config.json").write_text(json.dumps(config | {key: value}))
    failure(MEGATRON / name / "ckpt", base, tmp_path / "out")


LAYOUTS = [
    "legacy_llama_tp2_pp2",
    "fsdp_llama_dp2",
    "zarr_llama_tp2_pp2",
    "td_qwen3moe_grouped_tp2_ep2",
    "verl2_qwen2_tp2_pp2",
]


@pytest.mark.parametrize("name", LAYOUTS)
def test_fewer_and_wider_heads_of_the_same_rows_are_refused(name: str, tmp_path: Path) -> None:
    """No shape tells them: the rows of query, key and value would be cut elsewhere. All layouts keep arguments."""
    case = shutil.copytree(MEGATRON / name, tmp_path / "case")
    base = case / "hf" if (case / "hf").exists() else next(case.rglob("huggingface"))
    config = json.loads((base / "config.json").read_text())
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    other = {"num_attention_heads": heads // 2, "num_key_value_heads": groups // 2, "head_dim": 2 * width}
    (base / "config.json").write_text(json.dumps(config | other))
    error = failure(case / "ckpt", base, tmp_path / "out")
    assert f"{heads} queries and {groups} groups of {width} by the trainer's arguments" in str(error)


@pytest.mark.parametrize("layout", ["zarr", "fsdp"])
def test_what_norms_mean_is_read_in_every_layout(layout: str, tmp_path: Path) -> None:
    """`apply_layernorm_1p` of common.pt beside zarr arrays, and of the item `args` of Megatron-FSDP."""
    name = {"zarr": "zarr_llama_tp2_pp2", "fsdp": "fsdp_llama_dp2"}[layout]
    ckpt = copied(name, tmp_path)
    told = argparse.Namespace(apply_layernorm_1p=True)
    if layout == "zarr":
        torch.save({"args": told, "iteration": 100}, ckpt / STEP / "common.pt")
    else:
        path = ckpt / STEP / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        place = next(info for index, info in metadata.storage_data.items() if index.fqn == "args")
        file = ckpt / STEP / place.relative_path
        place.offset = file.stat().st_size
        buffer = io.BytesIO()
        torch.save(told, buffer)
        place.length = len(buffer.getvalue())
        with file.open("ab") as stream:
            stream.write(buffer.getvalue())
        path.write_bytes(pickle.dumps(metadata))
    options = ["--base-model", str(MEGATRON / name / "hf"), "-q"]
    assert cli.run(["merge", str(ckpt), str(tmp_path / "out"), *options]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    wanted = load_file(MEGATRON / name / "expected" / "model.safetensors")
    for key, tensor in wanted.items():
        assert torch.equal(found[key], (tensor.float() + 1).to(tensor.dtype) if "norm" in key else tensor), key


def test_an_actor_beside_a_critic_is_asked_for(tmp_path: Path) -> None:
    step = copied("verl2_qwen2_tp2_pp2", tmp_path) / "global_step_7"
    shutil.copytree(step / "actor", step / "critic")
    with pytest.raises(AmbiguousCheckpointError, match="actor and a critic"):
        MEMBER.detect(LocalTree.of([step]))


def test_inspect_tells_the_parallel_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["inspect", str(MEGATRON / "legacy_llama_tp2_pp2" / "ckpt"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["format"] == "megatron"
    assert {"tensor-parallel ranks": 2, "pipeline stages": 2, "world size": 4}.items() <= told["facts"].items()


@pytest.mark.parametrize("name", ["legacy_llama_tp2_pp2", "td_qwen3moe_grouped_tp2_ep2"])
def test_a_folder_of_another_iteration_than_its_files_is_told(name: str, tmp_path: Path) -> None:
    ckpt = copied(name, tmp_path)
    (ckpt / STEP).rename(ckpt / "iter_0000050")
    (ckpt / "latest_checkpointed_iteration.txt").write_text("50")
    notes = MEMBER.open(LocalTree.of([ckpt]), OpenOptions()).notes
    assert any("they say iteration 100" in note for note in notes)
    whole = MEMBER.open(LocalTree.of([MEGATRON / name / "ckpt"]), OpenOptions()).notes
    assert not any("iteration" in note for note in whole)


def test_every_bit_is_a_sources(tmp_path: Path) -> None:
    """A changed element of one rank's file is a changed element of one tensor."""
    name = "legacy_llama_tp2_pp2"
    ckpt = copied(name, tmp_path)
    path = ckpt / STEP / "mp_rank_01_000" / "model_optim_rng.pt"
    whole = load_file(MEGATRON / name / "expected" / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    slice_ = whole.chunk(2, dim=1)[1].contiguous().view(torch.uint8).numpy().tobytes()
    data = bytearray(path.read_bytes())
    assert data.count(slice_) == 1
    data[data.index(slice_) + len(slice_) // 2] ^= 1
    path.write_bytes(data)
    out = tmp_path / "out"
    assert cli.run(["merge", str(ckpt), str(out), "-q", "--base-model", str(MEGATRON / name / "hf")]) == 0
    found, wanted = content(out), content(MEGATRON / name / "expected")
    assert [key for key in wanted if found[key] != wanted[key]] == ["model.layers.0.mlp.down_proj.weight"]
