"""The ratios of an earlier run in a file, and what of a new run is worse."""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from merge_stream.benchmark.run import Bench, Measured
from merge_stream.errors import UsageError
from merge_stream.units import format_bytes

__all__ = ["compare_with", "load", "require_writable"]

_ADDED = 64 << 20
"""Bytes of memory that a run may take more than its baseline, whatever the ratio."""
_RATIOS = ("wall / floor", "CPU s / GB")
_WRITE_ONE = "write one with --write-baseline FILE"


def load(path: str, bench: Bench) -> dict[str, Any]:
    """A baseline from a file; UsageError when it is none, or that of another bench than this one."""
    try:
        found = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        msg = f"the baseline {path} cannot be read: {error}"
        raise UsageError(msg, hint=_WRITE_ONE) from error
    try:
        numbers = [*(found["ratios"][name] for name in _RATIOS), found["memory"]]
        was = {key: found["bench"][key] for key in asdict(bench) if key != "rounds"}
    except (KeyError, TypeError) as error:
        msg = f"{path} is no baseline of merge-stream bench: {error} is missing or of another type"
        raise UsageError(msg, hint=_WRITE_ONE) from error
    if any(isinstance(n, bool) or not isinstance(n, (int, float)) or not 0 < n < math.inf for n in numbers):
        msg = f"{path} is no baseline of merge-stream bench: its ratios and memory are {numbers}"
        raise UsageError(msg, hint=_WRITE_ONE)
    other = {key: value for key, value in asdict(bench).items() if key != "rounds" and was[key] != value}
    if other:
        msg = f"the baseline {path} is of another bench: { ({key: was[key] for key in other}) }, this one has {other}"
        raise UsageError(msg, hint="give the same options, or write a new baseline with --write-baseline")
    return dict(found)


def require_writable(path: str, baseline: str | None) -> None:
    """UsageError when a new baseline could not be written to `path`, or would replace the one compared with."""
    file = pathlib.Path(path)
    if baseline is not None and file.resolve() == pathlib.Path(baseline).resolve():
        msg = f"--write-baseline {path} would replace the baseline that this run is compared with"
        raise UsageError(msg, hint="write to another file, or leave --baseline out to begin anew")
    if file.is_dir() or not file.parent.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        msg = f"--write-baseline {path} cannot be written"
        raise UsageError(msg, hint="name a file in a folder that is there and can be written to")


def compare_with(baseline: Mapping[str, Any], found: Measured, tolerance: float) -> list[str]:
    """What is worse than `tolerance` times the baseline, in words."""
    worse = [
        f"{name} is {value:.3f}, the baseline {baseline['ratios'][name]:.3f}, allowed {limit:.3f}"
        for name, value in found.as_json()["ratios"].items()
        if value > (limit := baseline["ratios"][name] * tolerance)
    ]
    most = max(baseline["memory"] * tolerance, baseline["memory"] + _ADDED)
    if found.memory > most:
        worse.append(
            f"memory is {format_bytes(found.memory)}, the baseline {format_bytes(baseline['memory'])}, allowed "
            f"{format_bytes(int(most))}"
        )
    return worse
