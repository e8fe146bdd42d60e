"""Merge in this process, under the trainer's names, and compare with plain arrays."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

import torch
from safetensors.torch import load_file

from merge_stream.api import merge
from merge_stream.options import MergeOptions, OpenOptions
from merge_stream.report import Report

__all__ = ["assert_holds", "merged", "numbered"]

NAMES_AS_THEY_ARE = MergeOptions(layout="as-is", write_config=False)


def numbered(*shape: int, dtype: torch.dtype = torch.float32, first: int = 0) -> torch.Tensor:
    """Every element is its own number, so any that changed its place is seen."""
    return (torch.arange(int(torch.Size(shape).numel())) + first).reshape(shape).to(dtype)


def merged(
    checkpoint: pathlib.Path | Sequence[pathlib.Path],
    out: pathlib.Path,
    options: MergeOptions = NAMES_AS_THEY_ARE,
    *,
    opening: OpenOptions | None = None,
) -> Report:
    return merge(checkpoint, out, options, opening=opening)


def assert_holds(out: pathlib.Path, wanted: Mapping[str, torch.Tensor]) -> None:
    """Exactly these tensors: names, shapes, types and bits."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(out.glob("*.safetensors")):
        found |= load_file(path)
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape, name
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
