"""`stage`, `finalize` and `--staging zarr` give the model that a direct merge gives."""

from __future__ import annotations

import json
import os
import pathlib
import re

import pytest
import torch
import zarr
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Shard

from tests.cli.tool import CONFIG, LLAMA, tool
from tests.makers.dtensor import Spread, write_ranks


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """Every file; of the model card all but the fingerprint, which is that of the way taken."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    found["README.md"] = re.sub(rb"`[0-9a-f]{32}`", b"", found["README.md"])
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Rank files of a model, split over two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    spread = {name: Spread(tensor, [Shard(0)]) for name, tensor in LLAMA.items()}
    write_ranks(folder / "ckpt", (2,), spread, config=CONFIG)
    return folder / "ckpt"


@pytest.mark.slow
def test_one_store_gives_the_models_of_direct_merges_in_every_type(ranks: pathlib.Path, tmp_path: pathlib.Path) -> None:
    store = tmp_path / "store"
    ended = tool("stage", ranks, store, "--json")
    assert ended.json["out"] == str(store)
    assert ended.json["tensors"] == len(LLAMA)
    moved = tmp_path / "moved"
    store.rename(moved)
    for dtype, size in (("keep", "5GB"), ("bf16", "20KB"), ("fp16", "5GB")):
        words = ("--dtype", dtype, "--max-shard-size", size)
        assert tool("merge", ranks, tmp_path / f"direct-{dtype}", *words, "-q").code == 0
        ended = tool("finalize", moved, tmp_path / f"staged-{dtype}", *words, "--verify", "--sha256", "--json")
        assert ended.json["ok"], ended
        assert contents(tmp_path / f"staged-{dtype}") == contents(tmp_path / f"direct-{dtype}")


def test_a_merge_through_a_store_leaves_the_model_alone(ranks: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert tool("merge", ranks, tmp_path / "direct", "--dtype", "bf16", "-q").code == 0
    ended = tool("merge", ranks, tmp_path / "out", "--dtype", "bf16", "--staging", "zarr", "--json")
    assert ended.code == 0, ended.err
    assert contents(tmp_path / "out") == contents(tmp_path / "direct")
    assert sorted(os.listdir(tmp_path)) == ["direct", "out"]
    assert ended.json["format"] == "fsdp"
    assert "each chunk has its CRC-32C" in ended.json["verified"]


def test_a_kept_store_serves_again(ranks: pathlib.Path, tmp_path: pathlib.Path) -> None:
    words = ("--staging", "zarr", "--keep-store", tmp_path / "store", "-q")
    assert tool("merge", ranks, tmp_path / "one", *words).code == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "store").rglob("*")}
    assert tool("merge", ranks, tmp_path / "two", *words).code == 0
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "store").rglob("*")} == before
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert len(zarr.open_group(tmp_path / "store", mode="r")) == len(LLAMA)


@pytest.mark.slow
def test_staging_again_is_no_error_and_another_checkpoint_is_one(
    ranks: pathlib.Path, llama: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    assert tool("stage", ranks, tmp_path / "store", "-q").code == 0
    ended = tool("stage", ranks, tmp_path / "store")
    assert ended.code == 0
    assert "holds this checkpoint already" in ended.err
    tool("stage", llama, tmp_path / "store").refused(1, "is the store of another checkpoint", "another STORE")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    refused = tool("stage", ranks, tmp_path / "full").refused(1, "thesis.tex", "choose another STORE")
    assert "--overwrite" not in refused.err


def test_an_empty_folder_becomes_the_store(ranks: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """As a mount point would."""
    (tmp_path / "store").mkdir()
    assert tool("stage", ranks, tmp_path / "store", "-q").code == 0
    assert len(zarr.open_group(tmp_path / "store", mode="r")) == len(LLAMA)
    (tmp_path / "out").mkdir()
    assert tool("merge", ranks, tmp_path / "out", "--staging", "zarr", "-q").code == 0
    assert "config.json" in os.listdir(tmp_path / "out")
    assert not [name for name in os.listdir(tmp_path / "out") if name.startswith(".")]


@pytest.mark.slow
def test_inspect_and_plan_know_a_store(ranks: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert tool("stage", ranks, tmp_path / "store", "-q").code == 0
    assert "zarr_store" in tool("inspect", tmp_path / "store").out
    ended = tool("plan", tmp_path / "store", tmp_path / "out", "--dtype", "bf16", "--json")
    assert ended.json["tensors"] == len(LLAMA)
    assert tool("merge", tmp_path / "store", tmp_path / "out", "-q").code == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["stage", "CKPT"], "stage takes two paths"),
        (["merge", "CKPT", "OUT", "--keep-store", "STORE"], "--keep-store names the folder"),
        (["merge", "STORE", "OUT", "--base-model", "LLAMA"], "--base-model was decided when"),
        (["merge", "STORE", "OUT", "--lora", "merge"], "--lora was decided when"),
        (["finalize", "STORE", "STORE"], "OUT is the input folder"),
        (["stage", "CKPT", "CKPT/inner/../../ckpt"], "STORE is the input folder"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_mistakes_are_told(
    ranks: pathlib.Path, llama: pathlib.Path, tmp_path: pathlib.Path, words: list[str], told: str
) -> None:
    assert tool("stage", ranks, tmp_path / "store", "-q").code == 0
    places = {"CKPT": str(ranks), "LLAMA": str(llama), "OUT": str(tmp_path / "out"), "STORE": str(tmp_path / "store")}
    given = [places.get(word, word.replace("CKPT", str(ranks))) for word in words]
    tool(*given).refused(2, told)
    assert not (tmp_path / "out").exists()


def test_finalize_of_a_checkpoint_says_what_it_wants(ranks: pathlib.Path, tmp_path: pathlib.Path) -> None:
    tool("finalize", ranks, tmp_path / "out").refused(5, "is not a zarr_store checkpoint", "merge-stream stage")


def test_a_store_remembers_what_a_cast_must_leave_wide(tmp_path: pathlib.Path) -> None:
    ckpt = tmp_path / "ckpt"
    ckpt.mkdir()
    save_file({**LLAMA, "model.layers.0.A_log": torch.ones(3)}, ckpt / "model.safetensors")
    assert tool("stage", ckpt, tmp_path / "store", "--layout", "as-is", "--no-config", "-q").code == 0
    assert tool("finalize", tmp_path / "store", tmp_path / "out", "--no-config", "--dtype", "bf16", "-q").code == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["model.layers.0.A_log"].dtype == torch.float32
    assert found["model.norm.weight"].dtype == torch.bfloat16


@pytest.mark.slow
def test_a_tied_head_is_written_on_request_only(tmp_path: pathlib.Path) -> None:
    ckpt = tmp_path / "ckpt"
    ckpt.mkdir()
    tied = {**LLAMA, "lm_head.weight": LLAMA["model.embed_tokens.weight"].clone()}
    save_file(tied, ckpt / "model.safetensors")
    (ckpt / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    for name, words in (("plain", []), ("whole", ["--materialize-tied"])):
        assert tool("stage", ckpt, tmp_path / f"store-{name}", *words, "-q").code == 0
        assert tool("finalize", tmp_path / f"store-{name}", tmp_path / name, "-q").code == 0
        assert tool("merge", ckpt, tmp_path / f"direct-{name}", *words, "-q").code == 0
        assert contents(tmp_path / name) == contents(tmp_path / f"direct-{name}")
        assert ("lm_head.weight" in load_file(tmp_path / name / "model.safetensors")) == (name == "whole")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["megatron/fsdp_llama_dp2", "deepspeed/z1_bf16_gradfp32_w3_odd"])
def test_masters_of_a_16_bit_model_stay_masters_in_a_store(name: str, tmp_path: pathlib.Path) -> None:
    """`keep` and bf16 write the model's type, fp32 the masters themselves, with and without a store."""
    given = pathlib.Path(__file__).parents[1] / "data" / name
    ckpt, words = given / "ckpt", ("--base-model", given / "hf")
    assert tool("stage", ckpt, tmp_path / "store", *words, "-q").code == 0
    kinds = set()
    for dtype in ("keep", "bf16", "fp32"):
        direct, staged = tmp_path / f"direct-{dtype}", tmp_path / f"staged-{dtype}"
        ended = tool("merge", ckpt, direct, *words, "--dtype", dtype, "-q")
        assert ended.code == 0, ended.err
        assert tool("finalize", tmp_path / "store", staged, "--dtype", dtype, "-q").code == 0
        assert contents(staged) == contents(direct)
        kinds |= {tensor.dtype for tensor in load_file(direct / "model.safetensors").values()}
    assert kinds == {torch.bfloat16, torch.float32}


@pytest.mark.slow
class TestForecasts:
    """What is told beforehand is what is then there."""

    def test_a_dry_run_of_stage_counts_every_file(self, ranks: pathlib.Path, tmp_path: pathlib.Path) -> None:
        told = tool("stage", ranks, tmp_path / "store", "--dry-run", "--json").json
        assert sorted(os.listdir(tmp_path)) == []
        assert tool("stage", ranks, tmp_path / "store", "-q").code == 0
        made = list((tmp_path / "store").rglob("*"))
        files = [path for path in made if path.is_file()]
        assert told["store"]["files"] == len(files)
        assert len(made) <= told["store"]["inodes"] <= len(made) + 12
        assert 0 <= told["store"]["nbytes"] - sum(path.stat().st_size for path in files) < 200_000
        assert told["output_files"] == {}
        lines = tool("stage", ranks, tmp_path / "other", "--dry-run").out
        assert f"{tmp_path / 'other'} is made" in lines
        assert f"{len(files)} files" in lines
        again = tool("stage", ranks, tmp_path / "store", "--dry-run", "--json").json["store"]
        assert "holds this checkpoint already" in again["state"]
        assert again["inodes"] == 0

    @pytest.mark.parametrize("keep", [False, True])
    def test_a_plan_through_a_store_tells_both(self, ranks: pathlib.Path, tmp_path: pathlib.Path, keep: bool) -> None:
        words = ["--staging", "zarr", "--dtype", "bf16", "--max-shard-size", "20KB"]
        words += ["--keep-store", str(tmp_path / "store")] if keep else []
        told = tool("plan", ranks, tmp_path / "out", *words, "--json").json
        assert os.listdir(tmp_path) == []
        assert tool("plan", ranks, *words, "--json").json["store"]["nbytes"] == told["store"]["nbytes"]
        lines = tool("plan", ranks, tmp_path / "out", *words).out
        assert ("removed when OUT is there" in lines) != keep
        report = tool("merge", ranks, tmp_path / "out", *words, "--json").json
        assert report["ok"]
        sizes = {name: (tmp_path / "out" / name).stat().st_size for name in report["files"]}
        assert told["output_files"] == sizes
        assert set(told["side_files"]) == set(report["side_files"])
        assert told["read_nbytes"] >= report["read_nbytes"]
        made = len(os.listdir(tmp_path / "out"))
        assert made <= told["inodes"] <= made + 12
        if keep:
            again = tool("plan", ranks, tmp_path / "again", *words)
            assert "holds this checkpoint already" in again.out
            assert sorted(os.listdir(tmp_path)) == ["out", "store"]

    def test_errors_name_the_store(self, ranks: pathlib.Path, llama: pathlib.Path, tmp_path: pathlib.Path) -> None:
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "thesis.tex").touch()
        for words in (["--dry-run"], []):
            tool("stage", ranks, tmp_path / "full", *words).refused(1, "thesis.tex", "choose another STORE")
        (tmp_path / "file").touch()
        tool("stage", ranks, tmp_path / "file" / "store").refused(1, "choose another STORE")
        assert tool("stage", llama, tmp_path / "store", "-q").code == 0
        for command in ("plan", "merge"):
            given = ("--staging", "zarr", "--keep-store", tmp_path / "store")
            tool(command, ranks, tmp_path / "out", *given).refused(
                1, "another checkpoint", "choose another --keep-store"
            )

    def test_another_run_of_out_is_told_before_anything_is_staged(
        self, ranks: pathlib.Path, tmp_path: pathlib.Path
    ) -> None:
        work = tmp_path / "out.partial"
        work.mkdir()
        (work / "plan.json").write_text('{"fingerprint": "", "identity": {}}')
        for command in ("plan", "merge"):
            tool(command, ranks, tmp_path / "out", "--staging", "zarr").refused(1, "without this store", "--restart")
        assert os.listdir(work) == ["plan.json"]
        assert "thrown away" in tool("plan", ranks, tmp_path / "out", "--staging", "zarr", "--restart").out
        assert tool("merge", ranks, tmp_path / "out", "--staging", "zarr", "--restart", "-q").code == 0
