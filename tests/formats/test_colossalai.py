"""ColossalAI: real saves of every plugin give the live model's weights; mixed and interrupted saves are told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from merge_stream import cli
from merge_stream.errors import (
    AmbiguousCheckpointError,
    CorruptCheckpointError,
    IncompleteShardsError,
    MergeStreamError,
    UnsupportedError,
)
from merge_stream.formats.colossalai import MEMBER
from merge_stream.storage.local import LocalTree
from tests.cases.naive import merged
from tests.formats.naive import DATA, OPTIONS, copied, opened
from tests.formats.test_deepspeed import content

REAL = sorted(path.parent for path in DATA.glob("colossalai/*/check.json"))


def runs() -> Iterator[tuple[Path, dict[str, object]]]:
    for case in REAL:
        for run in json.loads((case / "check.json").read_text())["runs"]:
            yield case, run


@pytest.mark.parametrize(("case", "run"), [pytest.param(c, r, id=c.name) for c, r in runs()])
def test_real_saves_give_the_models_own_weights(case: Path, run: dict[str, object], tmp_path: Path) -> None:
    options = [str(argument) for argument in run.get("args", [])]
    if "base_model" in run:
        options += ["--base-model", str(case / str(run["base_model"]))]
    assert (
        cli.run(["merge", str(case / "ckpt"), str(tmp_path / "out"), "-q", "--check-replicas", "--strict", *options])
        == 0
    )
    assert content(tmp_path / "out") == content(case / str(run["compare"]))


def test_a_padded_vocabulary_is_cut_in_the_config_too(tmp_path: Path) -> None:
    case = DATA / "colossalai" / "syn_padded_vocab"
    options = ["--base-model", str(case / "hf"), "-q"]
    assert cli.run(["merge", str(case / "ckpt"), str(tmp_path / "out"), *options]) == 0
    assert json.loads((case / "ckpt" / "config.json").read_text())["vocab_size"] == 192
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 131


def test_without_a_base_model_the_padding_stays(tmp_path: Path) -> None:
    """Nothing tells the true size, and a vocabulary may have been enlarged on purpose."""
    case = DATA / "colossalai" / "syn_padded_vocab"
    assert cli.run(["merge", str(case / "ckpt"), str(tmp_path / "out"), "-q"]) == 0
    assert content(tmp_path / "out")["lm_head.weight"][1][0] == 192


def test_inspect_tells_stages_and_expert_ranks() -> None:
    catalog = opened(MEMBER, DATA / "colossalai" / "moe_ep2_pp2_bin" / "ckpt")
    assert (catalog.facts["pipeline stages"], catalog.facts["expert-parallel ranks"]) == (2, 2)
    assert any(tensor.replicas is not None for tensor in catalog.tensors.values())


def refused(folder: Path, error: type[MergeStreamError], *words: str) -> str:
    with pytest.raises(error) as caught:
        MEMBER.open(LocalTree.of([folder]), OPTIONS)
    for word in words:
        assert word in caught.value.message
    assert caught.value.hint
    return caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    folder = copied("colossalai/ddp_bin", tmp_path)
    (folder / "pytorch_model-00003.bin").unlink()
    refused(folder, IncompleteShardsError, "lacks 1 of 4 files", "pytorch_model-00003.bin")


def test_the_index_of_a_stage_is_missing(tmp_path: Path) -> None:
    folder = copied("colossalai/syn_pp_interrupted", tmp_path)
    (folder / "tmp_index_files" / "pytorch_model.bin.index-stage-00001.json").unlink()
    refused(folder, IncompleteShardsError, "interrupted", "stage 1")


def test_numbers_in_the_names_of_stage_indices_are_no_lengths(tmp_path: Path) -> None:
    """Stage 99999 of 500 ranks: named in part, not listed in whole."""
    folder = copied("colossalai/syn_pp_interrupted", tmp_path)
    indices = folder / "tmp_index_files"
    for rank in range(1, 501):
        (indices / f"pytorch_model.bin.index-stage-99999-{rank:05d}.json").write_text("{}")
    message = refused(folder, IncompleteShardsError, "interrupted", "stage 1 rank 1", "and more")
    assert len(message) < 1000


def test_files_of_a_stage_that_has_no_index(tmp_path: Path) -> None:
    """The last stage was writing when the save was killed: nothing else tells that there was one."""
    folder = copied("colossalai/syn_pp_interrupted", tmp_path)
    (folder / "tmp_index_files" / "pytorch_model.bin.index-stage-00002.json").unlink()
    refused(
        folder, IncompleteShardsError, "interrupted", "pytorch_model-stage-00002-shard-00001.bin", "no stage's index"
    )


def test_an_interrupted_file_that_holds_nothing_but_copies(tmp_path: Path) -> None:
    """Expert-parallel ranks repeat what they share, perhaps in a file of their own."""
    folder = copied("colossalai/syn_pp_interrupted", tmp_path)
    first = folder / "tmp_index_files" / "pytorch_model.bin.index-stage-00001.json"
    for stage in (1, 2):
        own = json.loads((folder / "tmp_index_files" / f"pytorch_model.bin.index-stage-0000{stage}.json").read_text())
        copies = {name: file.replace("-shard", "-00002-shard") for name, file in own["weight_map"].items()}
        for name in set(own["weight_map"].values()):
            shutil.copyfile(folder / name, folder / name.replace("-shard", "-00002-shard"))
        path = first.with_name(f"pytorch_model.bin.index-stage-0000{stage}-00002.json")
        path.write_text(json.dumps({"weight_map": copies}))
        first.with_name(f"pytorch_model.bin.index-stage-0000{stage}.json").rename(
            first.with_name(f"pytorch_model.bin.index-stage-0000{stage}-00001.json")
        )
    catalog = opened(MEMBER, folder)
    assert all(tensor.replicas is not None for tensor in catalog.tensors.values())
    assert not catalog.ignored


@pytest.mark.parametrize("case", ["hp_pp2_bin", "ddp_bin", "async_llz1_safetensors"])
def test_weight_files_without_an_index(tmp_path: Path, case: str) -> None:
    folder = copied(f"colossalai/{case}", tmp_path)
    for path in folder.glob("*.index*.json"):
        path.unlink()
    refused(folder, IncompleteShardsError, "no index")
    with pytest.raises(IncompleteShardsError, match="no index"):
        merged(folder, tmp_path / "out")


def test_files_that_the_index_does_not_name_are_told(tmp_path: Path) -> None:
    """A second save removes only files of its own base name, so they may be of an older one."""
    folder = copied("colossalai/ddp_bin", tmp_path)
    shutil.copyfile(folder / "pytorch_model-00001.bin", folder / "pytorch_model-stage-00002-shard-00001.bin")
    catalog = opened(MEMBER, folder)
    assert catalog.ignored["weight file that the index does not name"] == 1
    assert any("pytorch_model-stage-00002-shard-00001.bin" in note for note in catalog.notes)


def test_a_file_of_an_older_save_is_found_out(tmp_path: Path) -> None:
    folder = copied("colossalai/ddp_bin", tmp_path)
    shutil.copyfile(folder / "pytorch_model-00001.bin", folder / "pytorch_model-00002.bin")
    refused(folder, IncompleteShardsError, "the index says", "which does not hold it")


def test_a_tensor_that_the_index_does_not_name(tmp_path: Path) -> None:
    folder = copied("colossalai/ddp_bin", tmp_path)
    path = folder / "pytorch_model.bin.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    refused(folder, CorruptCheckpointError, "model.norm.weight", "does not name")


def test_two_models_in_one_folder(tmp_path: Path) -> None:
    folder = copied("colossalai/ddp_bin", tmp_path)
    shutil.copyfile(folder / "pytorch_model.bin.index.json", folder / "pytorch_model.bin.index.policy.json")
    refused(folder, AmbiguousCheckpointError, "2 indices")


def test_parts_of_tensors_are_refused(tmp_path: Path) -> None:
    folder = copied("colossalai/ddp_bin", tmp_path)
    path = folder / "pytorch_model.bin.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "dtensor/model.norm.weight.*.bin"
    path.write_text(json.dumps(index))
    refused(folder, UnsupportedError, "parts of tensors")


def test_a_truncated_asynchronous_write_is_told(tmp_path: Path) -> None:
    folder = copied("colossalai/async_llz1_safetensors", tmp_path)
    path = folder / "model-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert cli.run(["merge", str(folder), str(tmp_path / "out"), "-q"]) == 5
