"""Section B: what counts as memory. Limits of real containers: tests/memory/test_container.py."""

from __future__ import annotations

import pathlib
import shutil

import pytest
from torch.distributed.tensor import Replicate, Shard

from merge_stream import api, steps
from merge_stream.engine import limits, memory
from merge_stream.engine.events import Phase, Progress
from merge_stream.options import MergeOptions
from merge_stream.storage.local import LocalSink
from tests.cases.memory_of import holes, measured
from tests.cases.naive import numbered
from tests.cli.tool import tool
from tests.makers.dtensor import Spread, write_hub, write_ranks

MB = 1_000_000
W = "model.layers.0.mlp.down_proj.weight"
PLAIN = ("--no-config", "--layout", "as-is")


@pytest.mark.memory
@pytest.mark.parametrize("io", ["pread", "mmap"])
def test_case_018_mapped_reads_do_not_count_and_do_not_stall(tmp_path: pathlib.Path, io: str) -> None:
    source = write_hub(tmp_path / "ckpt", {W: holes(100, 1000, 1000)})
    found = measured(source, tmp_path / "out", "90M", "--io", io)
    assert found.report["memory"]["parked"] == 0


def test_case_016_unflushed_bytes_never_pass_the_window(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unflushed, most = dict[str, int](), [0]
    write, sync = LocalSink.write_at, LocalSink.sync

    def counted(self: LocalSink, name: str, offset: int, buffer: memoryview) -> None:
        write(self, name, offset, buffer)
        unflushed[name] = unflushed.get(name, 0) + len(buffer)
        most[0] = max(most[0], sum(unflushed.values()))

    def synced(self: LocalSink, name: str) -> None:
        before = unflushed.get(name, 0)
        sync(self, name)
        unflushed[name] -= before

    monkeypatch.setattr(LocalSink, "write_at", counted)
    monkeypatch.setattr(LocalSink, "sync", synced)
    monkeypatch.setattr(steps, "flush_window", lambda: 256 << 10)
    monkeypatch.setattr(memory, "_SEGMENTS", (64 << 10, 16 << 10))
    source = write_hub(tmp_path / "ckpt", {f"model.w{k}": numbered(256, 1024) for k in range(16)})
    api.merge(source, tmp_path / "out", MergeOptions(layout="as-is", write_config=False, workers=2))
    assert 0 < most[0] <= 4 * (256 << 10) + 2 * (64 << 10) + (16 << 10)  # the last: headers


@pytest.mark.parametrize("io", ["pread", "mmap"])
def test_case_017_no_file_is_mapped_writable(tmp_path: pathlib.Path, io: str) -> None:
    """Looked at after each written range, while windows of other workers may be open."""
    source = write_hub(tmp_path / "ckpt", {f"model.w{k}": numbered(512, 1024) for k in range(8)})
    seen = [0]

    def look(event: object) -> None:
        if isinstance(event, (Phase, Progress)):
            seen[0] += 1
            for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
                assert not (str(tmp_path) in line and "w" in line.split()[1]), line

    options = MergeOptions(layout="as-is", write_config=False, io=io, workers=4)  # type: ignore[arg-type]
    api.merge(source, tmp_path / "out", options, observer=look)
    assert seen[0] > 4


@pytest.mark.memory
def test_case_020_a_tight_bound_costs_no_time(tmp_path: pathlib.Path) -> None:
    """CPU seconds, since the machine may be busy; with a real container: docs/reliability.md."""
    source = write_hub(tmp_path / "ckpt", {W: holes(160, 1000, 1000)})
    tight, wide = (
        min(measured(source, tmp_path / f"out{bound}{k}", bound, "--dtype", "bf16").cpu for k in range(2))
        for bound in ("80M", "2G")
    )
    assert tight <= 1.5 * wide


@pytest.mark.memory
@pytest.mark.parametrize("workers", ["8", "16"])
def test_case_021_and_023_threads_multiply_no_memory(tmp_path: pathlib.Path, workers: str) -> None:
    """32 files of 16 MB, replicas too; what is freed is not kept by an allocator: slabs are used again."""
    spread = {W: Spread(holes(1 << 17, 1 << 10), [Replicate(), Shard(0)])}
    source = write_ranks(tmp_path / "ckpt", (2, 16), spread, names=("ddp", "fsdp"), sparse=True)
    measured(source, tmp_path / "out", "100M", "--workers", workers, "--dtype", "bf16")


@pytest.mark.memory
@pytest.mark.parametrize("io", ["pread", "mmap"])
def test_case_024_a_file_larger_than_the_address_space(tmp_path: pathlib.Path, io: str) -> None:
    if shutil.which("prlimit") is None:
        pytest.skip("prlimit is not here")
    source = write_hub(tmp_path / "ckpt", {W: holes(400, 1000, 1000)})
    before = ("prlimit", "--as=1000000000")
    ended = tool(
        "merge", source, tmp_path / "out", *PLAIN, "--io", io, "--workers", "2", "--dtype", "bf16", before=before
    )
    assert ended.code == 0, ended.err


@pytest.mark.memory
def test_case_025_the_bound_is_a_ceiling_and_no_reservation(tmp_path: pathlib.Path) -> None:
    small = write_hub(tmp_path / "small", {W: holes(500, 500)})
    assert measured(small, tmp_path / "out", "32G").peak < 70 * MB
    large = write_hub(tmp_path / "large", {W: holes(1 << 17, 1 << 10)})
    low, high = (
        min(measured(large, tmp_path / f"out{bound}{k}", bound).cpu for k in range(2)) for bound in ("72M", "4G")
    )
    assert high >= 0.7 * low


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/outer/inner\n", {"outer/memory.max": str(1 << 30), "outer/inner/memory.max": "max"}),
        (
            "4:memory:/outer/inner\n",
            {
                "memory/outer/memory.limit_in_bytes": str(1 << 30),
                "memory/outer/inner/memory.limit_in_bytes": "9223372036854771712",
            },
        ),
    ],
    ids=["v2", "v1"],
)
def test_case_014_a_container_is_believed_before_the_host(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str]
) -> None:
    """The parent group is the tighter one. More kinds: tests/unit/test_limits.py."""
    monkeypatch.setattr(limits, "_PROC", str(tmp_path / "proc"))
    monkeypatch.setattr(limits, "_SYS", str(tmp_path / "sys"))
    for name, text in {"proc/self/cgroup": own, **{f"sys/{k}": v for k, v in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = limits.available_limit()
    assert found.nbytes == 1 << 30
    assert "outer/memory." in found.words
    over = limits.bound_for("32G")
    assert (over.nbytes, "container" in over.words) == (1 << 30, True)
