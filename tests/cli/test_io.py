"""`--io`: the same model by either way of reading, also half by one and half by the other, and told in the report."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import Shard

from merge_stream.api import merge
from merge_stream.engine.events import Progress
from merge_stream.engine.executor import StopFlag
from merge_stream.errors import InterruptedRunError
from merge_stream.options import IoName, MergeOptions
from merge_stream.storage.mapped import can_copy
from tests.cli.tool import tool
from tests.makers.dtensor import Spread, write_ranks

pytestmark = pytest.mark.skipif(not can_copy(), reason="this system forbids process_vm_readv")

WAYS = ("auto", "pread", "mmap")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, dict[str, torch.Tensor]]:
    """32 MB in two ranks: several segments."""
    generator = torch.Generator().manual_seed(8)
    tensors = {f"model.layers.{k}.w": torch.randn((1024, 1021), generator=generator) for k in range(8)}
    folder = tmp_path_factory.mktemp("large") / "ckpt"
    write_ranks(folder, (2,), {name: Spread(value, [Shard(0)]) for name, value in tensors.items()})
    return folder, tensors


def options(io: IoName) -> MergeOptions:
    return MergeOptions(write_config=False, layout="as-is", io=io, workers=2)


def assert_read_by(ways: Mapping[str, int], nbytes: int, io: str) -> None:
    """All bytes by the way that was asked for, but for single reads of less than a page."""
    assert sum(ways.values()) == nbytes
    assert ways["mmap" if io == "mmap" else "pread"] > 0.95 * nbytes
    assert io == "mmap" or set(ways) == {"pread"}


@pytest.mark.parametrize("io", WAYS)
def test_each_way_gives_the_tensors_and_is_told(
    tmp_path: pathlib.Path, large: tuple[pathlib.Path, dict[str, torch.Tensor]], io: str
) -> None:
    source, tensors = large
    plain = ("--no-config", "--layout", "as-is", "--io", io)
    ended = tool("merge", source, tmp_path / "out", *plain, "--dtype", "bf16", "--verify", "--json")
    assert ended.code == 0, ended.err
    assert_read_by(ended.json["io"], ended.json["read_nbytes"], io)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(merged[name], value.bfloat16()) for name, value in tensors.items())
    assert tool("verify", tmp_path / "out", "--against", source, "--io", io, "-q").code == 0
    assert tool("plan", source, *plain).code == 0


def test_a_person_is_told_too(tmp_path: pathlib.Path, large: tuple[pathlib.Path, dict[str, torch.Tensor]]) -> None:
    words = ("--no-config", "--layout", "as-is", "--io", "mmap")
    assert " MB by mmap" in tool("merge", large[0], tmp_path / "out", *words).out


@pytest.mark.parametrize("io", WAYS)
def test_tensors_smaller_than_a_page_are_the_same_too(tmp_path: pathlib.Path, ckpt: pathlib.Path, io: str) -> None:
    ended = tool("merge", ckpt, tmp_path / "out", "--io", io, "--json")
    ways = ended.json["io"]
    assert sum(ways.values()) == ended.json["read_nbytes"]
    assert set(ways) <= ({"pread", "mmap"} if io == "mmap" else {"pread"}), "read together, they may fill pages"
    assert tool("verify", tmp_path / "out", "--against", ckpt, "-q").code == 0


@pytest.mark.parametrize(("first", "then"), [("pread", "mmap"), ("mmap", "auto")])
def test_another_way_continues_a_run(
    tmp_path: pathlib.Path, large: tuple[pathlib.Path, dict[str, torch.Tensor]], first: IoName, then: IoName
) -> None:
    source, tensors = large
    stop = StopFlag()

    def observer(event: object) -> None:
        if isinstance(event, Progress):
            stop.set("the test")

    with pytest.raises(InterruptedRunError):
        merge(source, tmp_path / "out", options(first), observer=observer, stop=stop)
    report = merge(source, tmp_path / "out", options(then))
    assert report.resumed_nbytes > 0
    assert_read_by(report.io, report.read_nbytes, then)
    assert report.read_nbytes + report.resumed_nbytes == sum(t.nbytes for t in tensors.values())
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(merged[name], value) for name, value in tensors.items())


def test_a_truncated_file_is_told_in_the_same_words(tmp_path: pathlib.Path, own_ckpt: pathlib.Path) -> None:
    victim = next(own_ckpt.glob("model_world_size_2_rank_1.pt"))
    with victim.open("r+b") as file:
        file.truncate(victim.stat().st_size // 2)
    told = set()
    for io in ("pread", "mmap"):
        ended = tool("merge", own_ckpt, tmp_path / f"out_{io}", "--io", io, "--json")
        assert ended.code == 5
        told.add(json.dumps([ended.json["error"], ended.json["hint"]]))
    assert len(told) == 1


def test_a_way_that_is_not_there_is_a_usage_error(tmp_path: pathlib.Path, ckpt: pathlib.Path) -> None:
    ended = tool("merge", ckpt, tmp_path / "out", "--io", "direct")
    ended.refused(2, "'direct' is not one of 'auto', 'pread', 'mmap'")
