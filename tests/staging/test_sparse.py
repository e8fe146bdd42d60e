"""`--sparse`: zeros of the model are holes on the disk, and read as zeros; nothing else changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard

from merge_stream.api import merge
from merge_stream.options import MergeOptions
from merge_stream.storage.holes import HolesSink
from tests.cli.tool import tool
from tests.makers.dtensor import Spread, write_ranks


def checkpoint(folder: Path) -> Path:
    """4 MB of zeros with a few numbers in them, and a tensor without zeros."""
    mostly = torch.zeros(1024, 1024)
    mostly[3, 5], mostly[700, :] = 7.0, 2.0
    return write_ranks(
        folder,
        (2,),
        {"model.a.weight": Spread(mostly, [Shard(0)]), "model.b.weight": Spread(torch.ones(64, 512), [Shard(0)])},
    )


def options(**more: object) -> MergeOptions:
    return MergeOptions(layout="as-is", write_config=False, max_mem=3_000_000_000, **more)  # type: ignore[arg-type]


def weights(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def test_the_bytes_are_those_of_a_plain_merge(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "ckpt")
    merge([source], tmp_path / "plain", options())
    report = merge([source], tmp_path / "sparse", options(sparse=True, verify=True))
    assert weights(tmp_path / "sparse") == weights(tmp_path / "plain")
    files = [tmp_path / name / "model.safetensors" for name in ("plain", "sparse")]
    whole, less = (os.stat(file).st_blocks * 512 for file in files)
    if whole < files[0].stat().st_size:
        pytest.skip("the file system leaves holes by itself")
    assert less <= whole - 3_500_000
    assert report.checksums


@pytest.mark.parametrize("at", [0, 1, 4095, 65_536, 200_000])
def test_any_offset(tmp_path: Path, at: int) -> None:
    sink = HolesSink(str(tmp_path))
    sink.allocate("file", 700_000)
    data = bytearray(400_000)
    data[0], data[70_000], data[399_999] = 1, 2, 3
    sink.write_at("file", at, memoryview(data))
    sink.close()
    assert (tmp_path / "file").read_bytes() == bytes(at) + data + bytes(700_000 - at - len(data))


def test_zeros_are_written_into_files_that_were_there(tmp_path: Path) -> None:
    """What an interrupted run left where nothing was noted may be anything."""
    (tmp_path / "file").write_bytes(b"\xff" * 200_000)
    sink = HolesSink(str(tmp_path))
    sink.allocate("file", 200_000)
    sink.write_at("file", 0, memoryview(bytes(200_000)))
    sink.close()
    assert (tmp_path / "file").read_bytes() == bytes(200_000)


def test_through_a_store_it_has_no_meaning(tmp_path: Path) -> None:
    ended = tool("merge", checkpoint(tmp_path / "ckpt"), tmp_path / "out", "--sparse", "--staging", "zarr")
    assert ended.code == 2
    assert "--staging zarr" in ended.err
