"""Section C: speed. What is counted here holds on any machine; seconds are those of the benches.

34  rivals on the same checkpoint, disk and hour        bench/peers, docs/performance.md "Beside other tools"
36  a stored baseline of ratios, and a smoke run in CI  tests/cli/test_bench_command.py, .ci/run
37  cold and warm apart, in another order each round    bench/measure.py, tests/test_bench.py
"""

from __future__ import annotations

import os
import pathlib
import resource
import time
from collections import Counter

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import Shard

from bench import measure
from merge_stream.options import MergeOptions
from merge_stream.storage.local import LocalSink, LocalSource
from merge_stream.through_store import stage
from tests.cases.naive import NAMES_AS_THEY_ARE, assert_holds, merged, numbered
from tests.makers.dtensor import Spread, write_hub, write_ranks

MB = 1_000_000
TWO = MergeOptions(layout="as-is", write_config=False, workers=2)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each read of tensor data."""
    seen: list[int] = []
    read = LocalSource.read_into

    def counted(self: LocalSource, path: str, offset: int, buffer: memoryview) -> None:
        seen.append(buffer.nbytes)
        read(self, path, offset, buffer)

    monkeypatch.setattr(LocalSource, "read_into", counted)
    return seen


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each write of tensor data."""
    seen: list[int] = []
    write = LocalSink.write_at

    def counted(self: LocalSink, name: str, offset: int, buffer: memoryview) -> None:
        seen.append(buffer.nbytes)
        write(self, name, offset, buffer)

    monkeypatch.setattr(LocalSink, "write_at", counted)
    return seen


def cold(folder: pathlib.Path) -> pathlib.Path:
    """`folder`, none of whose bytes are in memory."""
    measure.drop([folder])
    if measure.cached_share([folder]) > 0.01:
        pytest.skip("this file system does not drop pages (tmpfs)")
    return folder


def test_case_027_few_faults_and_reads_of_megabytes(tmp_path: pathlib.Path, reads: list[int]) -> None:
    """100 MB are 24,000 pages; a fault for each would be the speed of the threads' reports."""
    write_hub(tmp_path / "ckpt", {f"model.w{k}": numbered(1250, 2000) for k in range(10)})
    source = cold(tmp_path / "ckpt")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    merged(source, tmp_path / "out")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before < 1000
    assert sum(reads) == 100 * MB
    assert sum(reads) / len(reads) >= MB


@pytest.mark.parametrize("io", ["pread", "mmap"])
def test_case_028_nothing_is_fetched_twice(tmp_path: pathlib.Path, io: str) -> None:
    """8 files that are read in turn: what read-ahead fetched for one is still there when it is read."""
    wanted = {f"model.w{k}": numbered(8 * 125, 1000) for k in range(12)}
    write_ranks(tmp_path / "ckpt", (8,), {name: Spread(value, [Shard(0)]) for name, value in wanted.items()})
    source = cold(tmp_path / "ckpt")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
    merged(source, tmp_path / "out", MergeOptions(layout="as-is", write_config=False, workers=4, io=io))  # type: ignore[arg-type]
    fetched = (resource.getrusage(resource.RUSAGE_SELF).ru_inblock - before) * 512
    assert fetched <= 1.1 * sum(file.stat().st_size for file in source.rglob("*.pt"))
    assert_holds(tmp_path / "out", wanted)


def test_case_029_columns_are_written_as_rows_are(tmp_path: pathlib.Path, reads: list[int], writes: list[int]) -> None:
    """[4096, 4096] bf16 in 8: a run of columns is 1 KB, and no read or write is that short."""
    wanted = {f"model.w{k}": numbered(4096, 4096, dtype=torch.bfloat16, first=k) for k in range(2)}
    calls, cpu = {}, {}
    for dim in (0, 1):
        source = write_ranks(
            tmp_path / f"ckpt{dim}", (8,), {name: Spread(value, [Shard(dim)]) for name, value in wanted.items()}
        )
        times = []
        for k in range(3):
            reads.clear()
            writes.clear()
            began = time.process_time()
            merged(source, tmp_path / f"out{dim}{k}", TWO)
            times.append(time.process_time() - began)
        assert_holds(tmp_path / f"out{dim}0", wanted)
        calls[dim], cpu[dim] = len(writes), min(times)
        assert min(reads) >= 100_000
        assert sum(writes) / len(writes) >= MB
    assert calls[1] <= 1.5 * calls[0]
    assert cpu[1] <= 2 * cpu[0]


@pytest.mark.slow
def test_case_031_each_file_is_opened_a_few_times_whatever_it_holds(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """18,000 tensors in 160 files."""
    (tmp_path / "ckpt").mkdir()
    value = torch.ones(4, 4)
    for k in range(160):
        tensors = {f"model.layers.{k}.w{j}": value + j for j in range(113)}
        save_file(tensors, tmp_path / "ckpt" / f"model-{k + 1:05d}-of-00160.safetensors")
    opened = Counter[str]()
    really = os.open

    def counted(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        opened[os.path.basename(path)] += 1
        return really(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", counted)
    report = merged(tmp_path / "ckpt", tmp_path / "out", NAMES_AS_THEY_ARE)
    assert report.tensors == 160 * 113
    sources = [n for name, n in opened.items() if name.endswith("-of-00160.safetensors")]
    assert len(sources) == 160
    assert max(sources) <= 4  # listing, header, data


@pytest.mark.slow
def test_case_033_small_arrays_in_a_store_cost_less_than_twice_plain_files(tmp_path: pathlib.Path) -> None:
    """2,000 of 4 KB: `stage` beside one file with a sync for each; more rounds where it is close."""
    wanted = {f"model.layers.{k}.norm.weight": numbered(2048, dtype=torch.bfloat16, first=k) for k in range(2000)}
    source = write_hub(tmp_path / "ckpt", wanted)
    staged, plain = [], []
    for k in range(5):
        began = time.perf_counter()
        stage(source, tmp_path / f"store{k}", TWO)
        staged.append(time.perf_counter() - began)
        folder = tmp_path / f"plain{k}"
        folder.mkdir()
        began = time.perf_counter()
        for name, value in wanted.items():
            with (folder / name).open("wb") as file:
                file.write(value.view(torch.int16).numpy().data)
                os.fsync(file.fileno())
        plain.append(time.perf_counter() - began)
        if k and min(staged) <= 2 * min(plain):
            break
    assert min(staged) <= 2 * min(plain)
