"""Flattened fp32 masters of megatron-core's older optimizers: `optimizer.state.fp32_param.<key>`.

A weight [X, Y, Z] that is cut into local blocks [x, y, z] is saved as [X/x, Y/y, Z/z, x*y*z]: a grid of blocks, each
flat, and of each block data-parallel ranks save ranges.

Facts: megatron-core 0.8 to 0.15, `fully_sharded_model_space` (real files of 0.12).
"""

from __future__ import annotations

import itertools
import math

from merge_stream.errors import CorruptCheckpointError
from merge_stream.tensors.box import Box, boxes_of_range
from merge_stream.tensors.ref import ShardTable, TensorRef

__all__ = ["unflattened"]


def unflattened(name: str, flat: TensorRef, shape: tuple[int, ...]) -> TensorRef:
    """The master as a tensor of `shape`, that of its weight; CorruptCheckpointError when its blocks do not make it."""
    grid, count = flat.shape[:-1], flat.shape[-1] if flat.shape else 0
    whole = len(grid) == len(shape) and all(n and not size % n for n, size in zip(grid, shape, strict=False))
    block = tuple(size // n for n, size in zip(grid, shape, strict=True)) if whole else ()
    if not whole or math.prod(block) != count:
        msg = f"{flat.name} {list(flat.shape)} is no grid of flat blocks of {name} {list(shape)}"
        raise CorruptCheckpointError(msg, hint="leave --weights master out: the weights of the model are there")
    size = flat.dtype.itemsize
    rows: list[tuple[Box, int, int]] = []
    for k in range(len(flat.shards)):
        box, file, offset = flat.shards.row(k)
        blocks = (range(a, b) for a, b in zip(box.start[:-1], box.stop[:-1], strict=True))
        for at in itertools.product(*blocks):
            corner = tuple(i * n for i, n in zip(at, block, strict=True))
            for part in boxes_of_range(block, box.start[-1], box.stop[-1]):
                rows.append((part.shifted(corner), file, offset))
                offset += part.size * size
    return TensorRef(name, flat.dtype, shape, ShardTable.of(rows, len(shape)))
