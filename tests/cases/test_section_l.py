"""Section L: what an output folder must survive. The numbers are those of the collection of cases."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from merge_stream import cli
from merge_stream.engine import memory
from merge_stream.units import parse_bytes
from tests.cases.naive import assert_holds, merged, numbered
from tests.crash.faults import Faults, in_a_child
from tests.folder.models import checkpoint, llama, llama_config, merge, model_folder, tensors_of
from tests.makers.dtensor import write_hub

PLAIN = ("--no-config", "--layout", "as-is")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return checkpoint(
        tmp_path / "ckpt",
        llama(vocab=2000, hidden=32),
        llama_config(vocab_size=2000, hidden_size=32, intermediate_size=64),
    )


def test_case_135_a_killed_run_is_continued_to_the_same_bytes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred of them, at random moments: `make crash`."""
    monkeypatch.setattr(memory, "_SEGMENTS", (16 << 10, 8 << 10))
    clean, out = tmp_path / "clean", tmp_path / "out"
    assert merge(source, clean, "-q") == 0
    for calls in (12, 24, 36):
        with monkeypatch.context() as patch:
            Faults(patch, tmp_path / "out.partial").kill_at(calls)
            assert in_a_child(lambda: merge(source, out, "-q")) == -signal.SIGKILL
        assert not out.exists()
    half = next((tmp_path / "out.partial" / "model").glob("*.safetensors"))
    os.truncate(half, half.stat().st_size // 2)  # and somebody cut a file meanwhile
    assert merge(source, out, "-q") == 0
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {p.name: p.read_bytes() for p in clean.iterdir()}


def test_case_136_files_of_an_older_model_never_stand_beside_the_new(source: Path, tmp_path: Path) -> None:
    out = model_folder(tmp_path / "out", llama(), llama_config())
    (out / "model.safetensors").rename(out / "model-00001-of-00030.safetensors")
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    assert merge(source, out, "-q") == 1
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert merge(source, out, "-q", "--overwrite", "--max-shard-size", "100kB") == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert {p.name for p in out.glob("*.safetensors")} == set(index["weight_map"].values())
    assert not list(tmp_path.glob("out.*"))


def test_case_136_files_of_somebody_are_not_removed(source: Path, tmp_path: Path) -> None:
    out = model_folder(tmp_path / "out", llama(), llama_config())
    (out / "thesis.tex").write_text("years")
    assert merge(source, out, "-q", "--overwrite") == 1
    assert (out / "thesis.tex").read_text() == "years"


def test_case_137_a_missing_output_file_is_named(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert merge(source, out, "-q", "--max-shard-size", "100kB") == 0
    lost = sorted(out.glob("*.safetensors"))[1]
    lost.unlink()
    assert cli.run(["check", str(out)]) == 3
    assert lost.name in capsys.readouterr().out
    code = cli.run(["verify", str(out), "--against", str(source)])
    captured = capsys.readouterr()
    assert code in {3, 5}
    assert lost.name in captured.out + captured.err


def test_case_137_the_index_is_written_last(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Faults(monkeypatch, tmp_path / "out.partial")
    assert merge(source, tmp_path / "out", "-q", "--max-shard-size", "100kB") == 0
    synced = [name for call, name in watch.seen if call in {"fsync", "fdatasync"}]
    at = synced.index("model.safetensors.index.json")
    assert all(k < at for k, name in enumerate(synced) if name.endswith((".safetensors", "config.json")))


@pytest.mark.parametrize(
    ("size", "files"), [("5GB", 1), ("5GiB", 1), ("500MB", 10), ("4.99GB", 2), ("4999999999", 2), (None, 1)]
)
def test_case_139_sizes_are_decimal_as_on_the_hub(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str | None, files: int
) -> None:
    """Ten tensors of exactly 5.0 GB together."""
    shape = (125, 1000, 1000)
    tensors = {f"model.layers.{k}.w": torch.empty(shape, dtype=torch.float32, device="meta") for k in range(10)}
    source = write_hub(tmp_path / "ckpt", tensors)
    words = ["--max-shard-size", size] if size else []
    assert cli.run(["plan", str(source), *PLAIN, "--json", *words]) == 0
    assert len(json.loads(capsys.readouterr().out)["output_files"]) == files
    assert (parse_bytes("5GB"), parse_bytes("5GiB"), parse_bytes("500MB")) == (5 * 10**9, 5 * 2**30, 5 * 10**8)


def test_case_139_files_that_the_hub_refuses_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {"model.w": torch.empty((13_000, 1000, 1000), dtype=torch.float32, device="meta")}
    source = write_hub(tmp_path / "ckpt", tensors)
    assert cli.run(["plan", str(source), *PLAIN]) == 0
    told = capsys.readouterr().out
    assert "model.safetensors has 52.0 GB, and the Hub asks for files up to 50.0 GB (--max-shard-size)" in told


def test_case_141_loaders_find_their_format(source: Path, tmp_path: Path) -> None:
    assert merge(source, tmp_path / "out", "-q", "--max-shard-size", "100kB") == 0
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_case_143_tensors_are_aligned_and_unaligned_ones_are_read(tmp_path: Path) -> None:
    tensors = {"model.a": torch.arange(7).to(torch.int8), "model.b": numbered(5, 3), "model.c": numbered(3).bfloat16()}
    data = {"model.a": 7, "model.b": 60, "model.c": 6}
    header, at = {}, 0
    for name, words in (("model.a", "I8"), ("model.b", "F32"), ("model.c", "BF16")):
        header[name] = {"dtype": words, "shape": list(tensors[name].shape), "data_offsets": [at, at + data[name]]}
        at += data[name]
    text = json.dumps(header).encode()
    text += b" " * (1 - len(text) % 2)  # odd on purpose
    (tmp_path / "ckpt").mkdir()
    with (tmp_path / "ckpt" / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    merged(tmp_path / "ckpt", tmp_path / "out")
    assert_holds(tmp_path / "out", tensors)
    blob = (tmp_path / "out" / "model.safetensors").read_bytes()
    size = int.from_bytes(blob[:8], "little")
    assert size % 8 == 0
    for name, entry in json.loads(blob[8 : 8 + size]).items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % tensors[name].element_size() == 0


def test_case_144_too_small_a_disk_is_told_at_once_with_numbers(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --overwrite the old model stays until the end. Real small disks: tests/crash/test_disks.py."""
    out = tmp_path / "out"
    assert merge(source, out, "-q") == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=300_000))
    for command in ("plan", "merge"):
        assert cli.run([command, str(source), str(out), "--overwrite"]) == 4
        told = capsys.readouterr().err
        assert "has 300 kB free, the output needs" in told
        assert f"or remove {out}, which stays until the new model is whole" in told
    assert tensors_of(out)


def test_case_145_a_full_disk_fails_and_leaves_no_final_names(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a write that falls short first."""
    faults = Faults(monkeypatch, tmp_path)
    faults.shorten(1)
    faults.fail_at(3, errno.ENOSPC, on=["pwritev"], stays=True)
    assert merge(source, tmp_path / "out", "-q") == 4
    assert "could not be written" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    faults.heal()
    assert merge(source, tmp_path / "out", "-q") == 0
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == len(llama())
