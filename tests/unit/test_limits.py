"""Which memory limit holds: fake /proc and /sys/fs/cgroup, as containers of each kind show them."""

from __future__ import annotations

import os
import pathlib
import resource
import subprocess
import sys
from collections.abc import Mapping

import psutil
import pytest

from merge_stream.engine import limits
from merge_stream.engine.limits import available_limit, bound_for, flush_window, free_memory
from tests.cli.tool import tool
from tests.makers.dtensor import write_hub

GIB = 1 << 30
SENTINEL = "9223372036854771712"
HOST = int(psutil.virtual_memory().total)


@pytest.fixture
def system(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setattr(limits, "_PROC", str(tmp_path / "proc"))
    monkeypatch.setattr(limits, "_SYS", str(tmp_path / "sys"))
    (tmp_path / "proc" / "self").mkdir(parents=True)
    return tmp_path


def show(system: pathlib.Path, own: str, files: Mapping[str, str]) -> None:
    (system / "proc" / "self" / "cgroup").write_text(own)
    for name, text in files.items():
        path = system / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.mark.parametrize(
    ("own", "files", "nbytes", "file"),
    [
        ("0::/\n", {"memory.max": str(GIB)}, GIB, "memory.max"),
        ("0::/a/b\n", {"a/memory.max": str(GIB), "a/b/memory.max": "max"}, GIB, "a/memory.max"),
        ("0::/a/b\n", {"a/memory.max": str(GIB), "a/b/memory.max": str(2 * GIB)}, GIB, "a/memory.max"),
        ("0::/a\n", {"a/memory.max": str(2 * GIB), "a/memory.high": str(GIB)}, GIB, "a/memory.high"),
        ("0::/host/path\n", {"memory.max": str(GIB)}, GIB, "memory.max"),  # the container sees its group as the root
        ("4:memory:/d/x\n0::/\n", {"memory/d/x/memory.limit_in_bytes": str(GIB)}, GIB, "limit_in_bytes"),
        (
            "4:memory:/d/x\n",
            {"memory/d/memory.limit_in_bytes": str(GIB), "memory/d/x/memory.limit_in_bytes": SENTINEL},
            GIB,
            "memory/d/memory.limit_in_bytes",
        ),
        ("4:memory:/docker/1\n", {"memory/memory.limit_in_bytes": str(GIB)}, GIB, "limit_in_bytes"),
        ("4:cpu,memory:/x\n", {"cpu,memory/x/memory.limit_in_bytes": str(GIB)}, GIB, "limit_in_bytes"),
        ("4:memory:/\n0::/u\n", {"unified/u/memory.max": str(GIB)}, GIB, "unified/u/memory.max"),  # hybrid
    ],
)
def test_the_smallest_of_all_ancestors(
    system: pathlib.Path, own: str, files: Mapping[str, str], nbytes: int, file: str
) -> None:
    show(system, own, files)
    limit = available_limit()
    assert limit.nbytes == nbytes
    assert limit.words.startswith("the container's limit (")
    assert limit.words.endswith(f"{file})")


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/a\n", {"a/memory.max": "max"}),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": SENTINEL}),
        ("0::/a\n", {"a/memory.max": str(HOST * 4)}),
        ("0::/gone\n", {}),
        ("nonsense\n", {}),
    ],
)
def test_without_a_limit_it_is_the_host(system: pathlib.Path, own: str, files: Mapping[str, str]) -> None:
    show(system, own, files)
    assert available_limit() == limits.Limit(HOST, "the host's memory")
    assert bound_for(None) == limits.Bound(HOST // 2, "half of the host's memory")


@pytest.mark.parametrize(
    ("given", "nbytes", "words"),
    [
        (None, GIB // 2, "half of the container's limit ("),
        ("80%", GIB * 8 // 10, "--max-mem 80% of the container's limit ("),
        ("100M", 100_000_000, "--max-mem 100M"),
        ("0.5GiB", GIB // 2, "--max-mem 0.5GiB"),
        ("32G", GIB, "the container's limit ("),
    ],
)
def test_the_bound_and_its_words(system: pathlib.Path, given: str | None, nbytes: int, words: str) -> None:
    show(system, "0::/\n", {"memory.max": str(GIB)})
    bound = bound_for(given)
    assert bound.nbytes == nbytes
    assert bound.words.startswith(words)
    assert bool(bound.note) == (given == "32G")


def test_free_memory_takes_page_cache_for_free_but_not_tmpfs(system: pathlib.Path) -> None:
    stat = "anon 5\nfile 90000000\nshmem 40000000\ninactive_file 30000000\nactive_file 20000000"
    show(system, "0::/\n", {"memory.max": "100000000", "memory.current": "95000000", "memory.stat": stat})
    assert free_memory() == limits.Limit(55_000_000, "the container")
    stat = "inactive_file 1\nactive_file 1\ntotal_inactive_file 30000000\ntotal_active_file 20000000"
    v1 = {"limit_in_bytes": "100000000", "usage_in_bytes": "95000000", "stat": stat}
    show(system, "4:memory:/\n", {f"memory/memory.{name}": text for name, text in v1.items()})
    assert free_memory() == limits.Limit(55_000_000, "the container")


def test_the_flush_window_shrinks_with_the_container(system: pathlib.Path) -> None:
    show(system, "0::/\n", {"memory.max": "256000000"})
    assert flush_window() == 16_000_000  # four of them are a quarter of the container
    show(system, "0::/\n", {"memory.max": "16000000"})
    assert flush_window() == 4 << 20
    show(system, "0::/\n", {"memory.max": "max"})
    assert flush_window() == 64 << 20


def limited(kind: int, nbytes: int, words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "merge_stream", *words],
        capture_output=True,
        check=False,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(kind, (nbytes, nbytes)),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "letter"), [(resource.RLIMIT_AS, "v"), (resource.RLIMIT_DATA, "d")])
def test_limits_of_the_process_count(tmp_path: pathlib.Path, kind: int, letter: str) -> None:
    """A merge that says that it can, can; below that it refuses with the figure that works."""
    import torch

    tensors = {f"model.layers.{k}.mlp.up_proj.weight": torch.randn(800, 500) for k in range(30)}
    source = write_hub(tmp_path / "ckpt", tensors)
    words = ["merge", str(source), str(tmp_path / "out"), "--no-config", "--layout", "as-is", "--dtype", "bf16"]
    words += ["--max-mem", "90%", "--workers", "4"]
    plain = tool(*words[:2], tmp_path / "plain", *words[3:])
    assert plain.code == 0, plain.err
    wanted = (tmp_path / "plain" / "model.safetensors").read_bytes()
    ended: dict[int, int] = {}
    for megabytes in (2000, 700, 400, 250, 140):
        run = limited(kind, megabytes << 20, words)
        ended[megabytes] = run.returncode
        if run.returncode:
            assert run.returncode == 4, run.stderr
            assert f"ulimit -{letter}" in run.stderr or "--max-mem" in run.stderr, run.stderr
            assert "hint: " in run.stderr
            assert not (tmp_path / "out").exists()
        else:
            assert f"of the process's limit (ulimit -{letter}))" in run.stdout
            assert (tmp_path / "out" / "model.safetensors").read_bytes() == wanted
            (tmp_path / "out" / "model.safetensors").unlink()
            (tmp_path / "out").rmdir()
    assert ended[2000] == ended[700] == 0
    assert sorted(ended.values(), reverse=False) == [
        ended[m] for m in sorted(ended, reverse=True)
    ]  # once small, refused
