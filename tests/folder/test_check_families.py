"""`check` on every family: silent about the names of the repository, and an error for names that engines misread."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import pytest

from merge_stream.containers.safetensors_file import HeaderEntry, build_header
from merge_stream.tensors.dtype import dtype_named
from merge_stream.verification.check import check_folder

GOLDENS = sorted((pathlib.Path(__file__).parents[1] / "families" / "goldens").glob("*.json"))
BF16 = dtype_named("BF16")


def folder(path: pathlib.Path, shapes: dict[str, list[int]], config: dict[str, Any]) -> pathlib.Path:
    """Headers and holes."""
    entries, at = [], 0
    assert BF16 is not None
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        entries.append(HeaderEntry(name, BF16, tuple(shape), at, at + size))
        at += size
    header = build_header(entries)
    with (path / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + at)
    (path / "config.json").write_text(json.dumps(config))
    return path


def errors_about_names(path: pathlib.Path) -> set[str]:
    return {f.rule for f in check_folder(path).findings if f.about == "names" and f.severity == "error"}


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda path: path.stem)
def test_names_of_the_repository_are_right(tmp_path: pathlib.Path, golden: pathlib.Path) -> None:
    value = json.loads(golden.read_text())
    shapes = {name: output[2] for name, output in value["outputs"].items()}
    assert errors_about_names(folder(tmp_path, shapes, value["config"])) == set()


@pytest.mark.parametrize(
    ("family", "rule"),
    [
        ("mixtral", "fused-experts"),
        ("qwen2_moe", "fused-experts"),
        ("qwen3_moe", "fused-experts"),
        ("deepseek_v3", "fused-experts"),
        ("glm4_moe", "fused-experts"),
        ("olmoe", "fused-experts"),
        ("qwen3_next", "fused-experts"),
        ("qwen3_vl_moe", "experts-transposed"),
        ("gemma3", "family"),
    ],
)
def test_names_in_the_memory_of_transformers_5_are_errors(tmp_path: pathlib.Path, family: str, rule: str) -> None:
    value = json.loads((GOLDENS[0].parent / f"{family}.tf5.json").read_text())
    assert rule in errors_about_names(folder(tmp_path, value["sources"], value["config"]))
