"""An OUT on tmpfs is memory: said, counted, and refused when it does not fit; written pages wait in bounded number."""

from __future__ import annotations

import os
import pathlib
import subprocess
import threading
from collections.abc import Iterator

import pytest
import torch

from merge_stream import memory_files
from merge_stream.api import merge
from merge_stream.engine.limits import Limit
from merge_stream.engine.staging import DirectStaging
from merge_stream.errors import DiskSpaceError
from merge_stream.options import MergeOptions
from merge_stream.storage.local import LocalSink
from tests.cli.tool import tool
from tests.makers.dtensor import write_hub

PLAIN = MergeOptions(write_config=False, layout="as-is")
WORDS = ("--no-config", "--layout", "as-is")
MODEL = {f"model.layers.{k}.mlp.up_proj.weight": torch.ones(1000, 1000) for k in range(8)}


@pytest.fixture
def tmpfs(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system in memory."""
    folder = tmp_path / "in_memory"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", folder], check=False, capture_output=True
    )
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def source(tmp_path: pathlib.Path) -> pathlib.Path:
    return write_hub(tmp_path / "ckpt", MODEL)


def test_plan_and_merge_say_that_out_is_memory(source: pathlib.Path, tmpfs: pathlib.Path) -> None:
    said = f"{tmpfs}/out lies in memory (tmpfs on {tmpfs}): its 32.0 MB are memory too, beside --max-mem"
    assert said in tool("plan", source, tmpfs / "out", *WORDS).out
    ended = tool("merge", source, tmpfs / "out", *WORDS, "--json")
    assert f"warning: {said}" in ended.err
    assert any(text.startswith(said) for text in ended.json["warnings"])
    assert "lies in memory" not in tool("plan", source, source.parent / "out", *WORDS).out


def test_refused_when_model_and_run_do_not_fit(
    source: pathlib.Path, tmpfs: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_files, "free_memory", lambda: Limit(31_000_000, "the container"))
    with pytest.raises(
        DiskSpaceError, match=r"model's 32\.0 MB and this run's .* MB do not fit in the 31\.0 MB"
    ) as caught:
        merge(source, tmpfs / "out", PLAIN)
    assert caught.value.exit_code == 4
    assert caught.value.hint == "choose an OUT on a disk"
    assert not (tmpfs / "out.partial").exists()


def test_what_an_interrupted_run_wrote_does_not_count_again(
    source: pathlib.Path, tmpfs: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmpfs / "out.partial" / "model"
    place.mkdir(parents=True)
    (place / "model.safetensors").write_bytes(bytes(30_000_000))
    monkeypatch.setattr(memory_files, "free_memory", lambda: Limit(31_000_000, "the container"))
    monkeypatch.setattr(memory_files, "resident", lambda: 1 << 40)
    assert merge(source, tmpfs / "out", PLAIN).output_nbytes > 32_000_000


def test_written_bytes_that_are_not_on_the_disk_are_bounded(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four flush windows at most, and a segment or so for each worker, with a disk that is slow to sync."""
    lock, waiting, most = threading.Lock(), [0], [0]
    write_at, sync, init = LocalSink.write_at, LocalSink.sync, DirectStaging.__init__
    window = 1 << 20

    def counted(self: LocalSink, name: str, offset: int, buffer: memoryview) -> None:
        with lock:
            waiting[0] += len(buffer)
            most[0] = max(most[0], waiting[0])
        write_at(self, name, offset, buffer)

    def slow(self: LocalSink, name: str) -> None:
        with lock:
            before = waiting[0]
        threading.Event().wait(0.02)
        sync(self, name)
        with lock:
            waiting[0] -= before

    def small(self: DirectStaging, *args: object, **more: object) -> None:
        init(self, *args, **{**more, "flush_bytes": window})  # type: ignore[arg-type]

    monkeypatch.setattr(LocalSink, "write_at", counted)
    monkeypatch.setattr(LocalSink, "sync", slow)
    monkeypatch.setattr(DirectStaging, "__init__", small)
    source = write_hub(tmp_path / "ckpt", MODEL)
    report = merge(source, tmp_path / "out", MergeOptions(write_config=False, layout="as-is", workers=2))
    assert report.written_nbytes == 32_000_000
    assert (
        most[0] <= 4 * window + 3 * report.segment_nbytes + 4096
    )  # the last one noted, and one in hand of each worker
    assert os.path.getsize(tmp_path / "out" / "model.safetensors") == report.output_nbytes
