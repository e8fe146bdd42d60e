"""What fuzzing found stays found: each file of `corpus`, and a short run of the fuzzer, within time and rules."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from merge_stream.containers.json_file import read_json
from merge_stream.containers.pickle_reader import read_pickle
from merge_stream.containers.pickle_source import PickleSource
from merge_stream.containers.safetensors_file import read_header
from merge_stream.containers.torch_file import open_torch_file
from merge_stream.errors import MergeStreamError
from merge_stream.formats._dcp_metadata import read_metadata
from merge_stream.storage.allowance import MetadataAllowance
from merge_stream.storage.memory import MemoryTree

CORPUS = sorted((Path(__file__).parent / "corpus").iterdir())


@pytest.mark.timeout(10)
@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_every_reader_ends_with_data_or_an_error_of_ours(path: Path) -> None:
    data = path.read_bytes()
    tree = MemoryTree({"x": data, ".metadata": data}, "corpus", MetadataAllowance(500_000_000))
    source = PickleSource(lambda at, n: data[at : at + n], len(data), "x", tree.allowance)
    before = {*sys.modules, "encodings.utf_8_sig"}  # a codec that the reader names
    for read in (
        lambda: read_pickle(source, "x"),
        lambda: open_torch_file(tree, "x"),
        lambda: read_header(tree, "x"),
        lambda: read_json(tree, "x", 1 << 20),
        lambda: read_metadata(tree),
    ):
        with contextlib.suppress(MergeStreamError):
            read()
    assert set(sys.modules) <= before


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["checkpoint", "side"])
def test_a_short_run_of_the_fuzzer_breaks_nothing(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.hostile.fuzz", "--inputs", "250", "--seed", "7", "--kind", kind]
    done = subprocess.run(
        [*command, "--work", str(tmp_path / "work"), "--found", str(tmp_path / "found")],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        cwd=Path(__file__).resolve().parents[2],
    )
    why = "\n".join(path.read_text(encoding="utf-8") for path in (tmp_path / "found").glob("*/why.txt"))
    assert done.returncode == 0, why or done.stderr
    assert "250 inputs, 0 broke a promise" in done.stdout
