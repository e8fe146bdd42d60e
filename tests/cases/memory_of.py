"""Run the tool in a process of its own and measure it from outside."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["Measured", "holes", "measured"]

MEASURE = pathlib.Path(__file__).parents[1] / "memory" / "measure.py"
PLAIN = ("--no-config", "--layout", "as-is")


@dataclasses.dataclass(frozen=True)
class Measured:
    """Exit code 0; peak resident bytes of the process tree, its CPU seconds, and its report."""

    peak: int
    cpu: float
    report: dict[str, Any]


def holes(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that is a hole in a sparse file."""
    return torch.empty(shape, dtype=dtype, device="meta")


def measured(
    source: pathlib.Path, out: pathlib.Path, bound: str, *words: str, env: Mapping[str, str] | None = None
) -> Measured:
    """A merge of `source`, without config unless `words` say otherwise, within `bound`."""
    numbers = out.parent / f"{out.name}.json"
    plain = () if "--base-model" in words or "--with-config" in words else PLAIN
    given = [word for word in words if word != "--with-config"]
    command = [sys.executable, "-S", "-E", str(MEASURE), str(numbers), sys.executable, "-m", "merge_stream", "merge"]
    ended = subprocess.run(
        [*command, str(source), str(out), *plain, "--json", "-q", "--max-mem", bound, *given],
        capture_output=True,
        check=False,
        text=True,
        timeout=200,
        env={**os.environ, **(env or {})},
    )
    found = json.loads(numbers.read_text())
    numbers.unlink()
    assert found["code"] == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert found["peak"] <= report["memory"]["projected"] <= report["memory"]["allowed"]
    return Measured(found["peak"], found["cpu"], report)
