"""Thousands of rank files with few open files: more are never open than the process may have."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard

from tests.cases.naive import assert_holds
from tests.cli.tool import tool
from tests.makers.dtensor import Spread, write_dcp, write_ranks

WORDS = ("--no-config", "--layout", "as-is", "--max-shard-size", "2kB")


def limited(files: int, hard: int = 0) -> tuple[str, ...]:
    if shutil.which("prlimit") is None:
        pytest.skip("prlimit is not here")
    return ("prlimit", f"--nofile={files}:{hard or files}")


@pytest.mark.parametrize(
    ("ranks", "io"),
    [
        pytest.param(150, "pread", marks=pytest.mark.slow),
        pytest.param(150, "mmap", marks=pytest.mark.slow),
        pytest.param(3000, "pread", marks=pytest.mark.slow),
    ],
)
def test_more_ranks_than_files_may_be_open(tmp_path: Path, ranks: int, io: str) -> None:
    """Every output file is cut over all ranks; of 150 ranks there are more output files than descriptors too."""
    tensors = {f"model.w{k}": torch.randn(8, ranks) + k for k in range(1 if ranks > 1000 else 80)}
    spread = {name: Spread(value, [Shard(1)]) for name, value in tensors.items()}
    source = write_ranks(tmp_path / "ckpt", (ranks,), spread)
    out = tmp_path / "out"
    ended = tool("merge", source, out, *WORDS, "--io", io, "--verify", "--workers", "16", before=limited(64))
    assert ended.code == 0, ended.err
    assert_holds(out, tensors)


def test_the_files_of_a_dcp_too(tmp_path: Path) -> None:
    tensors = {f"model.w{k}": torch.randn(64, 3) for k in range(3)}
    source = write_dcp(tmp_path / "ckpt", 64, tensors)
    ended = tool("merge", source, tmp_path / "out", *WORDS, before=limited(64))
    assert ended.code == 0, ended.err
    assert_holds(tmp_path / "out", tensors)


def test_the_soft_limit_is_raised_to_the_hard_one(tmp_path: Path) -> None:
    """20 files are too few; that the process may have more is enough."""
    tensors = {f"model.w{k}": torch.randn(40, 3) for k in range(40)}
    source = write_ranks(tmp_path / "ckpt", (40,), {name: Spread(t, [Shard(0)]) for name, t in tensors.items()})
    ended = tool("merge", source, tmp_path / "out", *WORDS, before=limited(20, 200))
    assert ended.code == 0, ended.err
    assert_holds(tmp_path / "out", tensors)


def test_too_few_are_refused_with_the_number(tmp_path: Path) -> None:
    source = write_ranks(tmp_path / "ckpt", (2,), {"model.w": Spread(torch.randn(4, 3), [Shard(0)])})
    ended = tool("merge", source, tmp_path / "out", *WORDS, "--workers", "16", before=limited(40))
    ended.refused(4, "may open 40 files at once, 16 workers need 64", "ulimit -n", "--workers")
    assert not (tmp_path / "out.partial").exists()
