"""Checksums of the files that are written: as anybody computes them, for nothing, and after any interruption."""

from __future__ import annotations

import itertools
import pathlib
import subprocess
import sys

import google_crc32c
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from merge_stream import api
from merge_stream.api import finalize, make_plan, merge, open_checkpoint
from merge_stream.engine.file_checksums import joined_crc32c
from merge_stream.engine.staging import DirectStaging
from merge_stream.errors import InterruptedRunError
from merge_stream.options import MergeOptions
from merge_stream.report import Report
from tests.cli.tool import LLAMA, tool
from tests.makers.dtensor import Spread, write_hub, write_ranks

PLAIN = MergeOptions(write_config=False, layout="as-is")
BIG = {f"model.layers.{k}.mlp.up_proj.weight": torch.randn(700, 601) for k in range(8)}

DOCUMENTED = """
import sys, google_crc32c
crc = 0
for block in iter(lambda: sys.stdin.buffer.read(1 << 22), b""):
    crc = google_crc32c.extend(crc, block)
print(f"{crc:08x}")
"""


def said_by_tools(path: pathlib.Path) -> dict[str, str]:
    """What coreutils and the command of docs/reliability.md say."""
    sha = subprocess.run(["sha256sum", path], capture_output=True, check=True, text=True).stdout.split()[0]
    with path.open("rb") as file:
        crc = subprocess.run([sys.executable, "-c", DOCUMENTED], stdin=file, capture_output=True, check=True, text=True)
    return {"crc32c": crc.stdout.strip(), "sha256": sha}


@pytest.mark.parametrize("shard_size", ["5GB", "4MB"])
def test_report_and_summary_say_what_the_tools_say(tmp_path: pathlib.Path, shard_size: str) -> None:
    ckpt = write_ranks(tmp_path / "ckpt", (2,), {name: Spread(value, [Shard(0)]) for name, value in BIG.items()})
    words = ("--no-config", "--layout", "as-is", "--max-shard-size", shard_size, "--sha256")
    found = tool("merge", ckpt, tmp_path / "out", *words, "--json").json["checksums"]
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert sorted(found) == files
    for name in files:
        assert found[name] == said_by_tools(tmp_path / "out" / name)
    told = tool("merge", ckpt, tmp_path / "again", *words).out
    assert "\n  sha256:\n" in told
    for name in files:
        assert f"    {found[name]['sha256']}  {name}\n" in told


def test_equal_to_what_the_hub_names_the_file_by(tmp_path: pathlib.Path) -> None:
    """The LFS oid, as huggingface_hub computes it before an upload."""
    lfs = pytest.importorskip("huggingface_hub.lfs")
    ckpt = write_hub(tmp_path / "ckpt", LLAMA)
    report = merge(ckpt, tmp_path / "out", MergeOptions(write_config=False, layout="as-is", sha256=True))
    oid = lfs.UploadInfo.from_path(str(tmp_path / "out" / "model.safetensors")).sha256.hex()
    assert report.checksums["model.safetensors"]["sha256"] == oid


def test_without_the_option_the_output_is_not_read_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRC-32C comes from the journal: reading the output for it would be an error here."""

    def never(*_: object) -> None:
        raise AssertionError("the output was read")

    monkeypatch.setattr("merge_stream.storage.local.LocalSink.read_into", never)
    report = merge(write_hub(tmp_path / "ckpt", BIG), tmp_path / "out", PLAIN)
    path = tmp_path / "out" / "model.safetensors"
    assert report.checksums == {"model.safetensors": {"crc32c": said_by_tools(path)["crc32c"]}}
    assert "\n  crc32c:\n" in "\n".join(report.lines())


def test_the_checksum_is_of_what_was_meant_to_be_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that writes something else is found out: the file's own CRC is another one."""
    write_at = DirectStaging.write

    def faulty(self: DirectStaging, output: int, start: int, data: memoryview) -> None:
        write_at(self, output, start, data)
        self.sink.write_at("model.safetensors", start, memoryview(bytes([data[0] ^ 1])))

    honest = merge(write_hub(tmp_path / "ckpt", LLAMA), tmp_path / "honest", PLAIN)
    monkeypatch.setattr(DirectStaging, "write", faulty)
    report = merge(tmp_path / "ckpt", tmp_path / "out", PLAIN)
    assert report.checksums == honest.checksums
    on_disk = said_by_tools(tmp_path / "out" / "model.safetensors")["crc32c"]
    assert report.checksums["model.safetensors"]["crc32c"] != on_disk


def interrupted(ckpt: pathlib.Path, out: pathlib.Path, *, after: int, max_mem: int) -> Report:
    """A merge that is stopped after some segments, then continued with another bound."""
    job = make_plan(open_checkpoint([ckpt]), MergeOptions(write_config=False, layout="as-is", workers=1))
    count = itertools.count()
    write = DirectStaging.write

    def stopping(self: DirectStaging, output: int, start: int, data: memoryview) -> None:
        if next(count) == after:
            raise InterruptedRunError("stopped")
        write(self, output, start, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DirectStaging, "write", stopping)
        with pytest.raises(InterruptedRunError):
            api.execute(job, out)
    return merge(ckpt, out, MergeOptions(write_config=False, layout="as-is", max_mem=max_mem, sha256=True))


@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize("spare", [16_000_000, 100_000_000])
def test_after_a_resume_with_other_segments(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, after: int, spare: int
) -> None:
    from merge_stream.engine.memory import peak_rss

    ckpt = write_hub(tmp_path / "ckpt", BIG)
    monkeypatch.setattr("merge_stream.engine.memory.peak_rss", lambda: 0)
    report = interrupted(ckpt, tmp_path / "out", after=after, max_mem=peak_rss() + spare)
    assert report.resumed_nbytes
    assert report.checksums["model.safetensors"] == said_by_tools(tmp_path / "out" / "model.safetensors")


def test_no_fast_crc_means_no_crc(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(google_crc32c, "implementation", "python")
    options = MergeOptions(write_config=False, layout="as-is", sha256=True)
    report = merge(write_hub(tmp_path / "ckpt", LLAMA), tmp_path / "out", options)
    assert set(report.checksums["model.safetensors"]) == {"sha256"}
    assert merge(tmp_path / "ckpt", tmp_path / "out2", PLAIN).checksums == {"model.safetensors": {}}


def test_python_api_finalizes_with_checksums(tmp_path: pathlib.Path) -> None:
    job = make_plan(open_checkpoint([write_hub(tmp_path / "ckpt", LLAMA)]), PLAIN)
    report = finalize(api.execute(job, tmp_path / "out"))
    assert (
        report.as_json()["checksums"]["model.safetensors"]["crc32c"]
        == said_by_tools(tmp_path / "out" / "model.safetensors")["crc32c"]
    )


@given(st.lists(st.binary(max_size=300), max_size=12))
def test_crc_of_parts_is_that_of_the_whole(parts: list[bytes]) -> None:
    crcs = [google_crc32c.value(part) for part in parts]
    assert joined_crc32c(crcs, [len(part) for part in parts]) == google_crc32c.value(b"".join(parts))


def test_crc_of_parts_of_a_large_file() -> None:
    block = np.random.default_rng(0).integers(0, 256, 5_000_011, dtype=np.uint8)
    one = google_crc32c.value(block)
    whole = 0
    for _ in range(9):
        whole = google_crc32c.extend(whole, block)
    assert joined_crc32c([one] * 9, [len(block)] * 9) == whole
