"""measured <= projected <= allowed, in fresh processes, children included, planning included.

The sources are sparse files with real headers: any size, no disk. The outputs are real, and removed at once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import pty
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.makers.dtensor import Spread, write_bin, write_dcp, write_hub, write_ranks

pytestmark = pytest.mark.memory

MEASURE = pathlib.Path(__file__).with_name("measure.py")
BOUND = 512_000_000
WIDE = "model.layers.0.mlp.down_proj.weight"


@dataclasses.dataclass(frozen=True)
class Measured:
    """One process tree, from outside, and what it said."""

    code: int
    peak: int
    stdout: str
    stderr: str

    @property
    def report(self) -> dict[str, Any]:
        assert self.code == 0, self.stderr
        answer: dict[str, Any] = json.loads(self.stdout)
        return answer

    def assert_triple(self, allowed: int) -> None:
        memory = self.report["memory"]
        numbers = f"measured {self.peak}, its own figure {memory['peak']}, {memory}"
        assert self.peak <= memory["projected"] <= allowed, numbers
        assert memory["allowed"] <= allowed, numbers
        assert memory["peak"] > 0.9 * self.peak, numbers  # what the report says is what was


def run(tmp_path: pathlib.Path, *words: str, terminal: bool = False) -> Measured:
    """`merge-stream words`, measured from outside."""
    numbers = tmp_path / "measured.json"
    command = [sys.executable, "-S", "-E", str(MEASURE), str(numbers), sys.executable, "-m", "merge_stream", *words]
    if terminal:
        stdout, stderr = _on_terminal(command)
    else:
        ended = subprocess.run(command, capture_output=True, check=False, text=True, timeout=200)
        stdout, stderr = ended.stdout, ended.stderr
    found = json.loads(numbers.read_text())
    return Measured(found["code"], found["peak"], stdout, stderr)


def _on_terminal(command: Sequence[str]) -> tuple[str, str]:
    leader, follower = pty.openpty()
    shown: list[bytes] = []

    def drain() -> None:
        try:
            while data := os.read(leader, 4096):
                shown.append(data)
        except OSError:
            pass  # the other end was closed

    reader = threading.Thread(target=drain)
    reader.start()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=follower, check=False, text=True, timeout=200, env=environment
    )
    os.close(follower)
    reader.join()
    os.close(leader)
    return ended.stdout, b"".join(shown).decode(errors="replace")


def merge(
    tmp_path: pathlib.Path, source: pathlib.Path, *words: str, bound: str = "512M", terminal: bool = False
) -> Measured:
    """A merge without config (the names are made up); its output is removed."""
    out = tmp_path / "out"
    plain = ("--no-config", "--layout", "as-is", "--json", "--max-mem", bound)
    found = run(tmp_path, "merge", str(source), str(out), *plain, *words, terminal=terminal)
    shutil.rmtree(out, ignore_errors=True)
    return found


def holes(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """A folder for each (format, size)."""
    from torch.distributed.tensor import Replicate, Shard

    folder = tmp_path_factory.mktemp("sources")
    small = {f"model.layers.{k}.mlp.up_proj.weight": holes(40, 17) for k in range(20)}
    small |= {f"model.layers.{k}.input_layernorm.weight": holes(17) for k in range(20)}
    sizes = {
        "small": small,
        "huge": {WIDE: holes(1 << 18, 1 << 10)},
        "bf16": {WIDE: holes(1 << 17, 1 << 10, dtype=torch.bfloat16)},
    }
    for size, tensors in sizes.items():
        write_hub(folder / f"hub_{size}", tensors)
        write_bin(folder / f"bin_{size}" / "pytorch_model.bin", tensors, sparse=True)
        for dim in (0, 1):
            write_dcp(folder / f"dcp_{size}_dim{dim}", 4, tensors, dim=dim, sparse=True)
            spread = {name: Spread(value, [Shard(min(dim, value.ndim - 1))]) for name, value in tensors.items()}
            write_ranks(folder / f"ranks_{size}_dim{dim}", (4,), spread, sparse=True)
    replicated = {WIDE: Spread(holes(1 << 17, 1 << 10), [Replicate(), Shard(0)])}
    write_ranks(folder / "ranks_hsdp", (2, 2), replicated, names=("ddp", "fsdp"), sparse=True)
    yield folder
    shutil.rmtree(folder)


FORMATS = ("hub", "bin", "dcp", "ranks")


@pytest.mark.parametrize("dtype", ["keep", "bf16", "fp16", "fp32"])
@pytest.mark.parametrize("layout", FORMATS)
def test_small_checkpoint(tmp_path: pathlib.Path, sources: pathlib.Path, layout: str, dtype: str) -> None:
    name = f"{layout}_small" + ("_dim0" if layout in {"dcp", "ranks"} else "")
    merge(tmp_path, sources / name, "--dtype", dtype).assert_triple(BOUND)


@pytest.mark.parametrize("dtype", ["keep", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["hub_huge", "bin_huge", "dcp_huge_dim0", "ranks_huge_dim0", "ranks_huge_dim1"])
def test_single_huge_tensor(tmp_path: pathlib.Path, sources: pathlib.Path, name: str, dtype: str) -> None:
    """1 GB of fp32, cut along rows or along columns."""
    merge(tmp_path, sources / name, "--dtype", dtype, bound="100M").assert_triple(100_000_000)


@pytest.mark.parametrize("name", ["hub_bf16", "dcp_bf16_dim1", "ranks_bf16_dim0"])
def test_wider_output(tmp_path: pathlib.Path, sources: pathlib.Path, name: str) -> None:
    """A bf16 source written as fp32."""
    merge(tmp_path, sources / name, "--dtype", "fp32").assert_triple(BOUND)


@pytest.mark.parametrize("name", ["hub_huge", "bin_huge", "dcp_huge_dim1", "ranks_huge_dim1"])
def test_with_verify(tmp_path: pathlib.Path, sources: pathlib.Path, name: str) -> None:
    found = merge(tmp_path, sources / name, "--dtype", "bf16", "--verify")
    found.assert_triple(BOUND)
    assert any("compared with the source" in text for text in found.report["verified"])


def test_with_check_replicas(tmp_path: pathlib.Path, sources: pathlib.Path) -> None:
    found = merge(tmp_path, sources / "ranks_hsdp", "--dtype", "bf16", "--check-replicas")
    found.assert_triple(BOUND)
    assert found.report["read_nbytes"] >= 3 * (1 << 29)  # both copies of 512 MiB were compared, one was read again


def test_many_workers(tmp_path: pathlib.Path, sources: pathlib.Path) -> None:
    found = merge(tmp_path, sources / "ranks_huge_dim1", "--dtype", "bf16", "--workers", "16")
    found.assert_triple(BOUND)
    assert found.report["workers"] == 16


def test_on_a_terminal(tmp_path: pathlib.Path, sources: pathlib.Path) -> None:
    """The progress bar's package is counted too."""
    found = merge(tmp_path, sources / "hub_huge", "--dtype", "bf16", terminal=True)
    found.assert_triple(BOUND)
    assert "merging" in found.stderr


def test_verify_command(tmp_path: pathlib.Path, sources: pathlib.Path) -> None:
    """A model against its checkpoint, and against another model."""
    out = tmp_path / "model"
    words = ("--no-config", "--layout", "as-is", "--max-mem", "512M", "-q", "--dtype", "bf16")
    assert run(tmp_path, "merge", str(sources / "ranks_huge_dim1"), str(out), *words).code == 0
    for against in (sources / "ranks_huge_dim1", sources / "hub_huge"):
        found = run(tmp_path, "verify", str(out), "--against", str(against), "--json", "--max-mem", "90M")
        wanted = 0 if against.name.startswith("ranks") else 3  # fp32 beside bf16: another type, no values compared
        assert found.code == wanted, found.stderr
        assert found.peak <= 90_000_000
    shutil.rmtree(out)


def test_a_checkpoint_of_3_gb_in_512_mb(tmp_path: pathlib.Path) -> None:
    from torch.distributed.tensor import Shard

    tensors = {f"model.layers.{k}.mlp.up_proj.weight": Spread(holes(11_000, 4096), [Shard(0)]) for k in range(17)}
    source = write_ranks(tmp_path / "ckpt", (8,), tensors, sparse=True)
    found = merge(tmp_path, source)
    found.assert_triple(BOUND)
    assert found.report["output_nbytes"] > 3_000_000_000


def test_a_single_tensor_of_4_gb_in_512_mb(tmp_path: pathlib.Path) -> None:
    source = write_hub(tmp_path / "ckpt", {WIDE: holes(1 << 20, 1 << 10)})
    found = merge(tmp_path, source, "--dtype", "bf16")
    found.assert_triple(BOUND)
    assert found.report["read_nbytes"] == 1 << 32


@pytest.mark.parametrize("name", ["hub_small", "ranks_bf16_dim1", "dcp_bf16_dim0", "bin_bf16"])
@pytest.mark.parametrize("more", [(), ("--verify",)], ids=["plain", "verify"])
def test_too_small_a_bound_names_one_that_works(
    tmp_path: pathlib.Path, sources: pathlib.Path, name: str, more: Sequence[str]
) -> None:
    refused = merge(tmp_path, sources / name, *more, bound="20M")
    assert refused.code == 4, refused.stderr
    assert "--max-mem 20.0 MB is too small" in refused.stderr
    assert not (tmp_path / "out.partial").exists()
    least = re.search(r"hint: give --max-mem (\d+)M or more", refused.stderr)
    assert least is not None, refused.stderr
    merge(tmp_path, sources / name, *more, bound=f"{least[1]}M").assert_triple(int(least[1]) * 1_000_000)


def test_plan_projects_what_the_merge_projects(tmp_path: pathlib.Path, sources: pathlib.Path) -> None:
    words = ("--no-config", "--layout", "as-is", "--json", "--max-mem", "512M", "--dtype", "bf16")
    planned = run(tmp_path, "plan", str(sources / "ranks_huge_dim1"), str(tmp_path / "out"), *words).report
    merged = merge(tmp_path, sources / "ranks_huge_dim1", "--dtype", "bf16")
    assert abs(planned["peak_memory"] - merged.report["memory"]["projected"]) < 2_000_000
    assert merged.peak <= planned["peak_memory"]


@pytest.mark.parametrize("more", [(), ("--verify",)], ids=["plain", "verify"])
def test_many_tensors(tmp_path: pathlib.Path, more: Sequence[str]) -> None:
    """As many as the largest mixture-of-experts models have: metadata costs memory too."""
    tensors = {
        f"model.layers.{layer}.mlp.experts.{expert}.{which}_proj.weight": holes(32, 8)
        for layer in range(60)
        for expert in range(256)
        for which in ("gate", "up", "down")
    }
    source = write_hub(tmp_path / "ckpt", tensors)
    merge(tmp_path, source, "--dtype", "bf16", *more).assert_triple(BOUND)


@pytest.mark.parametrize("name", ["ranks_huge_dim1", "hub_huge"])
def test_with_sha256(tmp_path: pathlib.Path, sources: pathlib.Path, name: str) -> None:
    merge(tmp_path, sources / name, "--dtype", "bf16", "--sha256", bound="100M").assert_triple(100_000_000)


def test_checking_a_record_larger_than_the_bound(tmp_path: pathlib.Path) -> None:
    source = write_bin(tmp_path / "ckpt" / "pytorch_model.bin", {WIDE: torch.ones(60_000, 500)})
    found = merge(tmp_path, source, "--check-crc", bound="100M")
    found.assert_triple(100_000_000)
    assert found.report["source_checksums"]["nbytes"] == 120_000_000


def test_checking_many_records(tmp_path: pathlib.Path) -> None:
    """No list of them is kept."""
    tensors = {f"model.layers.{k // 100}.mlp.experts.{k % 100}.up_proj.weight": torch.ones(2, 8) for k in range(8000)}
    source = write_bin(tmp_path / "ckpt" / "pytorch_model.bin", tensors)
    plain = merge(tmp_path, source)
    checked = merge(tmp_path, source, "--check-crc")
    checked.assert_triple(BOUND)
    assert checked.report["source_checksums"]["records"] == 8000
    assert checked.peak <= plain.peak + 10_000_000
