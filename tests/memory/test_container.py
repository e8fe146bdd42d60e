"""In a real memory cgroup (v1 or v2): a checkpoint of eight times the limit is merged, not killed, hardly slower."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from bench.container import Run, drop_cache, merge_once, thirds
from merge_stream.testing.cgroup import memory_cgroup, unavailable
from tests.makers.dtensor import write_hub

pytestmark = [
    pytest.mark.memory,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "memory cgroups can be made"),
]

LIMIT = 160_000_000 // 4096 * 4096
SHAPE = (1 << 12, 1 << 12)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """1.28 GB of fp32, eight times the limit, as a sparse file: it passes through the page cache all the same."""
    count = -(-8 * LIMIT // (SHAPE[0] * SHAPE[1] * 4))
    tensors = {f"model.layers.{k}.mlp.up_proj.weight": torch.empty(SHAPE, device="meta") for k in range(count)}
    folder = write_hub(tmp_path_factory.mktemp("container") / "model", tensors)
    assert (folder / "model.safetensors").stat().st_size >= 8 * LIMIT
    yield folder
    shutil.rmtree(folder)


def merged(source: pathlib.Path, tmp_path: pathlib.Path, limit: int | None, *more: str) -> Run:
    drop_cache(source)
    run = merge_once(source, tmp_path / "out", limit=limit, more=more)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    return run


def test_eight_times_the_limit_is_merged(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Not killed, memory flat over the run, at most 1.5 times slower (the better of two runs of each)."""
    free = [merged(source, tmp_path, None) for _ in range(2)]
    tight = [merged(source, tmp_path, LIMIT) for _ in range(2)]
    for run in (*free, *tight):
        assert run.code == 0, run.stderr
    for run in tight:
        assert run.oom_kills == 0
        assert 0 < run.group_peak <= LIMIT
        first, last = thirds(run.samples)
        assert last <= 1.1 * first
        memory = run.report["memory"]
        assert isinstance(memory, dict)
        assert memory["peak"] <= memory["projected"] <= memory["allowed"] == LIMIT // 2
        assert re.match(r"half of the container's limit \(/sys/fs/cgroup/.*/memory\.", str(run.report["memory_bound"]))
    assert min(run.cpu for run in tight) <= 1.5 * min(run.cpu for run in free)
    assert min(run.wall for run in tight) <= 1.5 * min(run.wall for run in free) + 1  # a busy machine


def test_plan_and_refusal_tell_whose_limit_it_is(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    words = [sys.executable, "-m", "merge_stream", "plan", str(source), "--no-config", "--layout", "as-is"]
    with memory_cgroup(LIMIT) as group:
        told = subprocess.run(group.command(words), capture_output=True, check=True, text=True).stdout
        above = subprocess.run(group.command([*words, "--max-mem", "8G"]), capture_output=True, check=True, text=True)
    assert re.search(r"of 80\.0 MB allowed \(half of the container's limit \(/sys/fs/cgroup/", told)
    assert "note: --max-mem is above the container's limit (" in above.stderr
    assert "which is used instead (160 MB)" in above.stderr
    with memory_cgroup(100_000_000) as group:
        refused = subprocess.run(group.command(words), capture_output=True, check=False, text=True)
    assert refused.returncode == 4, refused.stderr
    assert "the bound of 50.0 MB (half of the container's limit" in refused.stderr
    least = re.search(r"hint: give --max-mem (\d+M) or more", refused.stderr)
    assert least is not None
    with memory_cgroup(100_000_000) as group:
        subprocess.run(group.command([*words, "--max-mem", least[1]]), capture_output=True, check=True)


HOG = """
import mmap, sys, time
memory = mmap.mmap(-1, int(sys.argv[1]))
for at in range(0, len(memory), 4096):
    memory[at] = 1
print("full", flush=True)
time.sleep(60)
"""


def test_another_process_takes_the_memory(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Slabs are parked and given back, which is told; the run goes on to its end."""
    out = tmp_path / "out"
    words = ["merge", str(source), str(out), "--no-config", "--layout", "as-is", "--json", "--max-mem", "90M"]
    with memory_cgroup(2 * LIMIT) as group:
        hog = subprocess.Popen(group.command([sys.executable, "-S", "-c", HOG, str(LIMIT)]), stdout=subprocess.PIPE)
        assert hog.stdout is not None
        assert hog.stdout.readline() == b"full\n"
        held = group.usage()
        group.limit(held + 100_000_000)  # what is left is hardly more than the run needs
        command = group.command([sys.executable, "-m", "merge_stream", *words])
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        squeeze = threading.Thread(target=_squeeze, args=(group, out.with_name("out.partial"), held))
        squeeze.start()
        told, remarks = run.communicate(timeout=200)
        squeeze.join()
        hog.kill()
        hog.wait()
        hog.stdout.close()
    assert run.returncode == 0, remarks
    assert group.oom_kills == 0
    report = json.loads(told)
    assert report["memory"]["parked"] >= 1
    assert re.match(r"the container was short of memory for .*: 1 of \d+ slabs in use", report["memory_pressure"])
    assert "note: the container is short of memory: slabs are parked until that is over" in remarks
    shutil.rmtree(out)


def _squeeze(group: object, partial: pathlib.Path, held: int) -> None:
    """Once the run has begun, leave it next to nothing for a second."""
    from merge_stream.testing.cgroup import MemoryCgroup

    assert isinstance(group, MemoryCgroup)
    while not (partial / "journal").exists():
        time.sleep(0.01)
    group.limit(held + 48_000_000)
    time.sleep(1)
    group.limit(held + 200_000_000)
