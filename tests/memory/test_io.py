"""measured <= projected <= allowed with each `--io`: a mapped window is memory too."""

from __future__ import annotations

import pathlib
import re

import pytest
from torch.distributed.tensor import Shard

from merge_stream.engine import memory as module
from merge_stream.storage.mapped import can_copy, window_room
from tests.makers.dtensor import Spread, write_hub, write_ranks
from tests.memory.test_triple import WIDE, holes, merge, run

pytestmark = [pytest.mark.memory, pytest.mark.skipif(not can_copy(), reason="this system forbids process_vm_readv")]

WAYS = ("pread", "mmap")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """512 MiB of fp32 in one tensor: rows and columns over four ranks, and whole."""
    folder = tmp_path_factory.mktemp("source")
    for dim in (0, 1):
        write_ranks(folder / f"dim{dim}", (4,), {WIDE: Spread(holes(1 << 17, 1 << 10), [Shard(dim)])}, sparse=True)
    write_hub(folder / "hub", {WIDE: holes(1 << 17, 1 << 10)})
    return folder


@pytest.mark.parametrize("io", WAYS)
@pytest.mark.parametrize("dtype", ["keep", "bf16"])
@pytest.mark.parametrize("name", ["dim0", "dim1", "hub"])
def test_a_huge_tensor(tmp_path: pathlib.Path, source: pathlib.Path, name: str, dtype: str, io: str) -> None:
    found = merge(tmp_path, source / name, "--dtype", dtype, "--io", io, bound="110M")
    found.assert_triple(110_000_000)
    assert set(found.report["io"]) == {io}


@pytest.mark.parametrize("io", WAYS)
def test_with_verify_and_many_workers(tmp_path: pathlib.Path, source: pathlib.Path, io: str) -> None:
    words = ("--dtype", "bf16", "--verify", "--workers", "8", "--io", io)
    merge(tmp_path, source / "dim1", *words, bound="400M").assert_triple(400_000_000)


def test_windows_are_in_the_projected_figure(tmp_path: pathlib.Path, source: pathlib.Path) -> None:
    words = ("--dtype", "bf16", "--workers", "8")
    reports = {io: merge(tmp_path, source / "dim0", *words, "--io", io).report for io in WAYS}
    assert reports["mmap"]["segment_nbytes"] == reports["pread"]["segment_nbytes"]
    more = reports["mmap"]["memory"]["projected"] - reports["pread"]["memory"]["projected"]
    assert abs(more - 8 * window_room(reports["mmap"]["segment_nbytes"])) < 2_000_000


def test_windows_shrink_with_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "resident", lambda: 50_000_000)
    monkeypatch.setattr(module, "peak_rss", lambda: 50_000_000)
    ample = module.plan_memory(1 << 40, workers=2, io="mmap")
    bound = ample.projected - (6 << 20)
    tight = module.plan_memory(bound, workers=2, io="mmap")
    assert (tight.workers, tight.segment) == (2, ample.segment // 2)
    assert tight.projected <= bound
    assert module.plan_memory(bound, workers=2, io="pread").segment == ample.segment


def test_too_small_a_bound_names_one_that_works(tmp_path: pathlib.Path, source: pathlib.Path) -> None:
    refused = merge(tmp_path, source / "hub", "--io", "mmap", bound="20M")
    assert refused.code == 4, refused.stderr
    least = re.search(r"hint: give --max-mem (\d+)M or more", refused.stderr)
    assert least is not None, refused.stderr
    found = merge(tmp_path, source / "hub", "--io", "mmap", bound=f"{least[1]}M")
    found.assert_triple(int(least[1]) * 1_000_000)
    assert set(found.report["io"]) == {"mmap"}


def test_the_verify_command(tmp_path: pathlib.Path, source: pathlib.Path) -> None:
    out = tmp_path / "model"
    words = ("--no-config", "--layout", "as-is", "--max-mem", "512M", "-q")
    assert run(tmp_path, "merge", str(source / "dim1"), str(out), *words).code == 0
    checked = run(tmp_path, "verify", str(out), "--against", str(source / "hub"), "--io", "mmap", "--max-mem", "100M")
    assert checked.code == 0, checked.stderr
    assert checked.peak <= 100_000_000
