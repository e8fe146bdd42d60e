"""Which tensor stands in which output file at which offset; decided by names and sizes alone.

Files follow the rule of huggingface_hub 2.4 `split_state_dict_into_shards_factory`: tensors
in natural order; one larger than the limit gets a file of its own and does not close the
current file; else the current file closes when it would overflow. Inside a file tensors
stand by item size, largest first, then in natural order, so every tensor is aligned to its
item size without a gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from merge_stream.storage.local import natural_key
from merge_stream.tensors.dtype import DType

__all__ = ["Placed", "file_name", "split_in_files"]


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor to be placed: its name, element type and bytes."""

    name: str
    dtype: DType
    nbytes: int


def file_name(k: int, count: int) -> str:
    """Name of file k (from 0) of `count`."""
    return "model.safetensors" if count == 1 else f"model-{k + 1:05d}-of-{count:05d}.safetensors"


def split_in_files(tensors: Sequence[Placed], max_nbytes: int) -> list[list[Placed]]:
    """The tensors of each file in data order; files in the order the hub numbers them."""
    files: list[list[Placed]] = []
    current: list[Placed] = []
    size = 0
    order = {t.name: _order(t.name) for t in tensors}
    for tensor in sorted(tensors, key=lambda t: order[t.name]):
        if tensor.nbytes > max_nbytes:
            files.append([tensor])
            continue
        if current and size + tensor.nbytes > max_nbytes:
            files.append(current)
            current, size = [], 0
        current.append(tensor)
        size += tensor.nbytes
    if current:
        files.append(current)
    return [sorted(f, key=lambda t: (-t.dtype.itemsize, order[t.name])) for f in files]


def _order(name: str) -> tuple[object, str]:
    """Natural order; names that differ in leading zeros only ("h.1", "h.01") by their characters."""
    return natural_key(name), name
