"""Hugging Face safetensors as a source: index and files agree both ways, and one set of weights is there."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy

from merge_stream.errors import (
    AmbiguousCheckpointError,
    CorruptCheckpointError,
    IncompleteShardsError,
    MergeStreamError,
    TruncatedFileError,
)
from merge_stream.formats.hugging_face import MEMBER
from merge_stream.storage.memory import MemoryTree
from tests.formats.naive import OPTIONS, assert_equal, fixture, opened

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def weights(*names: str) -> bytes:
    return safetensors.numpy.save({name: np.ones((2, 3), np.float32) for name in names}, {"format": "pt"})


def index(**where: str) -> bytes:
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": where}).encode()


def good() -> dict[str, bytes]:
    return {ONE: weights("a"), TWO: weights("b"), INDEX: index(a=ONE, b=TWO)}


def refusal(files: dict[str, bytes], error: type[MergeStreamError], *words: str) -> MergeStreamError:
    with pytest.raises(error) as caught:
        MEMBER.open(MemoryTree(files, "ckpt"), OPTIONS)
    for word in ("ckpt", *words):
        assert word in caught.value.message
    return caught.value


@pytest.mark.parametrize("name", ["dcp_hf_w2_consolidated", "verl_fsdp2_w2_llama", "dcp_fsdp2_w2_flat"])
def test_models_of_the_fixtures_are_read_as_they_are(name: str) -> None:
    case = fixture(f"fsdp/{name}")
    assert_equal(opened(MEMBER, case / "expected"), case / "expected" / "model.safetensors")
    if "consolidated" in name:
        catalog = opened(MEMBER, case / "ckpt")
        assert_equal(catalog, case / "expected_state.safetensors")
        assert catalog.facts["index"] == INDEX


def test_a_sharded_model_is_read_with_and_without_its_index() -> None:
    for files in (good(), {ONE: weights("a"), TWO: weights("b")}):
        catalog = MEMBER.open(MemoryTree(files), OPTIONS)
        assert set(catalog.tensors) == {"a", "b"}
        assert [f.name for f in catalog.files] == [ONE, TWO]


def test_config_folder_is_the_model_itself() -> None:
    tree = MemoryTree({"model.safetensors": weights("a"), "config.json": b"{}"})
    assert MEMBER.open(tree, OPTIONS).config_dirs == (".",)


def test_a_folder_without_weights_is_not_detected() -> None:
    assert (
        MEMBER.detect(MemoryTree({"config.json": b"{}", "tokenizer.json": b"{}", "x/model.safetensors": b""})) is None
    )
    assert MEMBER.detect(MemoryTree({"adapter_model.safetensors": b"", "optimizer.safetensors": b""})) is None


def test_a_variant_is_read_and_the_plain_model_goes_first() -> None:
    only = MEMBER.open(MemoryTree({"model.fp16.safetensors": weights("a")}), OPTIONS)
    assert only.facts["variant"] == "fp16"
    parts = {"model.fp16-00001-of-00001.safetensors": weights("a")}
    listing = {"model.safetensors.index.fp16.json": index(a="model.fp16-00001-of-00001.safetensors")}
    assert set(MEMBER.open(MemoryTree(parts | listing), OPTIONS).tensors) == {"a"}
    both = MEMBER.open(MemoryTree({"model.fp16.safetensors": weights("a"), "model.safetensors": weights("b")}), OPTIONS)
    assert set(both.tensors) == {"b"}
    assert "fp16" in both.notes[0]
    refusal(
        {f"model.{v}.safetensors": weights("a") for v in ("fp16", "bf16")}, AmbiguousCheckpointError, "fp16", "bf16"
    )


def test_a_missing_file_is_named_with_and_without_index() -> None:
    files = good()
    del files[TWO]
    assert "--input" in refusal(files, IncompleteShardsError, TWO, INDEX).hint
    del files[INDEX]
    refusal(files, IncompleteShardsError, TWO)


def test_a_stale_set_beside_is_refused_and_both_are_named() -> None:
    old = "model-00003-of-00003.safetensors"
    refusal(good() | {old: weights("a")}, AmbiguousCheckpointError, old, INDEX, ONE)
    refusal(good() | {"model.safetensors": weights("a")}, AmbiguousCheckpointError, "model.safetensors", INDEX)
    refusal({ONE: weights("a"), TWO: weights("b"), old: weights("c")}, AmbiguousCheckpointError, old, ONE)
    refusal({ONE: weights("a"), TWO: weights("b"), "model.safetensors": weights("c")}, AmbiguousCheckpointError, ONE)


def test_index_and_files_must_agree_both_ways() -> None:
    refusal(good() | {INDEX: index(a=ONE, b=TWO, c=TWO)}, IncompleteShardsError, "c", TWO)
    refusal(good() | {TWO: weights("b", "extra")}, CorruptCheckpointError, "extra", TWO)
    refusal(good() | {INDEX: index(a=TWO, b=ONE)}, CorruptCheckpointError, "'a'", ONE, TWO)
    refusal(good() | {TWO: weights("a", "b")}, CorruptCheckpointError, "'a'", ONE, TWO)


@pytest.mark.parametrize(
    "text", [b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}', b"{", b'{"weight_map": {}}']
)
def test_an_index_without_a_map_is_refused(text: bytes) -> None:
    refusal(good() | {INDEX: text}, MergeStreamError, "ckpt")


def test_an_index_cannot_select_a_file_outside_the_folder() -> None:
    for path in ("../secret.safetensors", "/etc/passwd"):
        refusal({"model.safetensors": weights("a"), INDEX: index(a=path)}, CorruptCheckpointError, path)


def test_a_cut_file_is_truncated() -> None:
    refusal(good() | {TWO: weights("b")[:-1]}, TruncatedFileError, TWO)


def test_two_names_that_differ_by_wrappers_only_are_refused() -> None:
    files = {"model.safetensors": weights("_orig_mod.a", "a")}
    refusal(files, CorruptCheckpointError, "_orig_mod.a")


@pytest.mark.parametrize("name", ["lora_adapter/adapter_model.safetensors", "adapter_model.safetensors"])
def test_an_adapter_beside_the_model_is_never_left_out_without_a_word(name: str) -> None:
    catalog = MEMBER.open(MemoryTree({**good(), name: weights("x.lora_A.weight")}, "ckpt"), OPTIONS)
    assert set(catalog.tensors) == {"a", "b"}
    assert any(f"the adapter {name} is not taken" in note for note in catalog.notes)
    assert MEMBER.open(MemoryTree(good(), "ckpt"), OPTIONS).notes == ()
