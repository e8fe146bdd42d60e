"""measured <= projected <= allowed, for both halves; zarr is never imported by them."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from merge_stream.testing.memory import measure
from tests.cli.tool import tool

BOUND = 100_000_000


@pytest.mark.memory
def test_stage_and_finalize_stay_in_their_bound(tmp_path: pathlib.Path) -> None:
    """A tensor of three times the bound, and a bound near the smallest that works."""
    ckpt, store, out = tmp_path / "ckpt", tmp_path / "store", tmp_path / "out"
    ckpt.mkdir()
    save_file({"w": torch.ones((3, 50_000_001), dtype=torch.bfloat16)}, ckpt / "model.safetensors")
    for words in (
        ("stage", ckpt, store, "--layout", "as-is"),
        ("finalize", store, out, "--dtype", "fp32", "--verify"),
    ):
        command = [sys.executable, "-m", "merge_stream", *map(str, words), "--no-config", "--max-mem", str(BOUND)]
        run = measure([*command, "--json"])
        assert run.returncode == 0, run.stderr
        memory = json.loads(run.stdout)["memory"]
        assert run.peak <= memory["projected"] <= BOUND, (run.peak, memory)


def test_a_bound_that_holds_no_chunk_is_refused_with_the_one_that_does(
    plain: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    words = ("stage", plain, tmp_path / "store", "--layout", "as-is", "--no-config")
    ended = tool(*words, "--max-mem", "20M").refused(4, "--max-mem", "is too small", "give --max-mem")
    least = ended.err.partition("give --max-mem ")[2].split()[0]
    assert tool(*words, "--max-mem", least, "-q").code == 0


def test_staging_imports_no_zarr(plain: pathlib.Path, tmp_path: pathlib.Path) -> None:
    program = (
        "import sys\nfrom merge_stream.cli import run\n"
        f"assert run(['stage', {str(plain)!r}, {str(tmp_path / 's')!r}, '--layout=as-is', '--no-config', '-q']) == 0\n"
        f"assert run(['finalize', {str(tmp_path / 's')!r}, {str(tmp_path / 'o')!r}, '--no-config', '-q']) == 0\n"
        "assert not {'zarr', 'torch', 'numcodecs'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
