"""A store that was damaged is an error that names tensor and chunk, never zeros."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from merge_stream.errors import CheckpointError, MergeStreamError
from merge_stream.options import MergeOptions
from merge_stream.through_store import finalize_store, stage
from tests.cli.tool import tool
from tests.staging.conftest import TALL, WIDE

FINALIZE = ("--no-config", "-q")


def flip(path: pathlib.Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def data_start(store: pathlib.Path, name: str) -> int:
    """Where the index of a shard says that its first chunk begins."""
    return int(np.frombuffer((store / name / "c.0.0").read_bytes()[:8], "<u8")[0])


def test_a_flipped_bit_names_tensor_and_chunk(own_store: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shard = own_store / TALL / "c.0.0"
    flip(shard, data_start(own_store, TALL) + (1 << 20) + 17)
    ended = tool("finalize", own_store, tmp_path / "out", *FINALIZE)
    ended.refused(5, f"{TALL}: chunk [1, 0] is damaged", "CRC-32C", "stage it anew", str(shard))
    assert not (tmp_path / "out").exists()


def test_a_flipped_bit_of_a_checksum_or_of_a_small_tensor_is_told_too(
    own_store: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    flip(own_store / "counts" / "c.0", -1)
    tool("finalize", own_store, tmp_path / "out", *FINALIZE).refused(5, "counts: chunk [0] is damaged")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda s: (s / TALL / "c.0.0").unlink(), f"{TALL}: "),
        (lambda s: (s / "counts" / "c.0").unlink(), "counts: "),
        (lambda s: (s / "scalar" / "c").unlink(), "scalar: "),
        (lambda s: os.truncate(s / WIDE / "c.0.0", 3_300_000), f"{WIDE}: "),
        (lambda s: os.truncate(s / "counts" / "c.0", 5), "counts: "),
        (lambda s: os.truncate(s / "counts" / "c.0", 500), "counts: "),
        (lambda s: flip(s / WIDE / "c.0.0", 33), f"{WIDE}: the index"),
        (lambda s: flip(s / "zarr.json", 300), "zarr.json changed after"),
        (lambda s: flip(s / TALL / "zarr.json", 40), f"{TALL}/zarr.json differs"),
        (lambda s: (s / "zarr.json").unlink(), "zarr.json is missing"),
        (lambda s: (s / "merge_stream.json").write_text("{"), "no valid JSON"),
        (lambda s: (s / "merge_stream.json").write_text('{"version": 1}'), "names no checksums"),
        (lambda s: (s / "merge_stream.json").unlink(), "is not a zarr_store checkpoint"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_missing_cut_or_changed_is_told_before_the_first_byte(
    own_store: pathlib.Path, tmp_path: pathlib.Path, damage: Callable[[pathlib.Path], object], told: str
) -> None:
    damage(own_store)
    tool("finalize", own_store, tmp_path / "out", *FINALIZE).refused(5, told)
    assert os.listdir(tmp_path) == ["store"]


def test_a_missing_chunk_file_says_which_chunks(own_store: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (own_store / TALL / "c.0.0").unlink()
    tool("finalize", own_store, tmp_path / "out", *FINALIZE).refused(5, "is missing, with chunks [0, 0] to [2, 0]")


def test_a_cut_file_says_in_which_chunk(own_store: pathlib.Path, tmp_path: pathlib.Path) -> None:
    os.truncate(own_store / TALL / "c.0.0", data_start(own_store, TALL) + (1 << 20) + 5)
    tool("finalize", own_store, tmp_path / "out", *FINALIZE).refused(5, f"{TALL}: ", "it is cut in chunk [1, 0]")


def test_a_store_of_another_version_is_refused(own_store: pathlib.Path, tmp_path: pathlib.Path) -> None:
    seal = json.loads((own_store / "merge_stream.json").read_text())
    (own_store / "merge_stream.json").write_text(json.dumps({**seal, "version": 2}))
    tool("finalize", own_store, tmp_path / "out", *FINALIZE).refused(1, "version 2", "known is 1")


@pytest.mark.slow
def test_side_files_are_sealed(llama: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert tool("stage", llama, tmp_path / "store", "-q").code == 0
    side = tmp_path / "store" / "side_files"
    (side / "config.json").write_text((side / "config.json").read_text().replace("16", "61"))
    tool("finalize", tmp_path / "store", tmp_path / "out").refused(5, "side_files/config.json changed after")
    assert tool("stage", llama, tmp_path / "other", "-q").code == 0
    (tmp_path / "other" / "side_files" / "modeling_x.py").write_text("")
    tool("finalize", tmp_path / "other", tmp_path / "out").refused(5, "modeling_x.py was added after")


def test_check_crc_finds_every_damaged_chunk_before_the_merge(own_store: pathlib.Path, tmp_path: pathlib.Path) -> None:
    words = ("merge", own_store, tmp_path / "out", "--no-config", "--check-crc", "--layout", "as-is")
    ended = tool(*words, "--json")
    assert ended.code == 0, ended.err
    assert ended.json["source_checksums"]["records"] >= 12
    flip(own_store / TALL / "c.0.0", -5000)
    tool("merge", own_store, tmp_path / "other", *words[3:]).refused(5, f"{TALL}: chunk [2, 0]")
    assert not (tmp_path / "other").exists()


def test_a_verification_against_a_store_reads_checked_bytes(own_store: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert tool("finalize", own_store, tmp_path / "out", *FINALIZE).code == 0
    assert tool("verify", tmp_path / "out", "--against", own_store).code == 0
    flip(own_store / TALL / "c.0.0", -5000)
    tool("verify", tmp_path / "out", "--against", own_store).refused(5, f"{TALL}: chunk [2, 0] is damaged")


@pytest.fixture(scope="module")
def little(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A store of few bytes, and the model it gives."""
    folder = tmp_path_factory.mktemp("little")
    (folder / "ckpt").mkdir()
    save_file({"a": torch.arange(40.0), "b": torch.ones(3, 3)}, folder / "ckpt" / "model.safetensors")
    plain = MergeOptions(layout="as-is", write_config=False)
    stage(folder / "ckpt", folder / "store", plain)
    finalize_store(folder / "store", folder / "out", plain)
    return folder


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_flipped_bit_anywhere_changes_a_value(
    data: st.DataObject, little: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any bit of any file of the store: an error, or the same bytes."""
    store, out = little / "store", tmp_path_factory.mktemp("flip") / "out"
    files = sorted(path for path in store.rglob("*") if path.is_file())
    path = data.draw(st.sampled_from(files))
    before = path.read_bytes()
    at = data.draw(st.integers(0, len(before) - 1))
    flip(path, at, data.draw(st.integers(0, 7)))
    refused = None
    try:
        finalize_store(store, out, MergeOptions(write_config=False))
    except MergeStreamError as error:
        refused = error
    path.write_bytes(before)
    if refused is None:
        assert (out / "model.safetensors").read_bytes() == (little / "out" / "model.safetensors").read_bytes()
    else:
        assert isinstance(refused, CheckpointError) or "version" in refused.message
        assert refused.hint
        assert not out.exists()
