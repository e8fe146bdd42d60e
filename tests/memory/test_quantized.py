"""Every scheme within `--max-mem 512M` on weights with long rows: its peak, and what was projected for it.

One scheme on 3 GB, the others on one weight of 436 MB; with ALL_SCHEMES set (`make nightly`) all on 3 GB.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from merge_stream.encodings.base import schemes
from tests.makers.dtensor import write_hub

pytestmark = [pytest.mark.memory, pytest.mark.slow]

LIMIT = 512_000_000
SHAPE = (4096, 53_248)
"""`down_proj` of a 405B model, a quarter of its rows: a band of 128 rows has 13.6 MB."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[bool, pathlib.Path]]:
    """Sparse files of 3 GB, and of a seventh: they pass through memory all the same."""
    found = {large: tmp_path_factory.mktemp("quantized") / "model" for large in (True, False)}
    for large, folder in found.items():
        names = [f"model.layers.{k}.mlp.down_proj.weight" for k in range(7 if large else 1)]
        write_hub(folder, {name: torch.empty(SHAPE, dtype=torch.bfloat16, device="meta") for name in names})
        (folder / "config.json").write_text("{}")
    assert (found[True] / "model.safetensors").stat().st_size > 3_000_000_000
    yield found
    for folder in found.values():
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", [scheme.name for scheme in schemes() if not scheme.transposed])
@pytest.mark.parametrize("verify", [False, True], ids=["", "verified"])
def test_within_half_a_gigabyte(
    tmp_path: pathlib.Path, sources: dict[bool, pathlib.Path], name: str, verify: bool
) -> None:
    if verify and name not in {"fp8-block", "nvfp4"}:
        pytest.skip("the largest bands and the most parts stand for all")
    source = sources[(name == "fp8-block" and not verify) or "ALL_SCHEMES" in os.environ]
    options = ["--layout", "as-is", "--quantize", name, "--max-mem", str(LIMIT), "--json", *["--verify"] * verify]
    command = [sys.executable, "-m", "merge_stream", str(source), str(tmp_path / "out"), *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert ended.returncode == 0, ended.stderr
    memory = json.loads(ended.stdout)["memory"]
    assert memory["peak"] <= memory["projected"] <= memory["allowed"] == LIMIT
