"""ShardedTensor records: FSDP1 without a device mesh, SHARDED_STATE_DICT.

Facts (the same pickle in torch 2.3 to 2.13): the state is the 5-tuple (local shards, metadata,
process group state, sharding spec, init_rrefs). A local shard is {tensor, metadata}; a metadata
entry is {shard_offsets, shard_sizes, placement}. Every rank's file lists the boxes of all shards;
a rank whose piece is empty has no local shard, and no entry among the boxes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from merge_stream.containers.pickle_reader import Recorder
from merge_stream.containers.torch_tensor import PlainTensor, plain_tensor
from merge_stream.errors import CorruptCheckpointError
from merge_stream.tensors.box import Box

__all__ = ["LocalShard", "all_boxes", "global_shape", "local_shards"]

Fields = Mapping[str, Any]


class LocalShard(NamedTuple):
    """One box of a ShardedTensor that this file holds."""

    box: Box
    tensor: PlainTensor


def local_shards(state: tuple[Any, ...], tensor: str, where: str) -> list[LocalShard]:
    """The shards of this file."""
    if len(state) != 5 or not isinstance(state[0], list):
        raise _malformed(tensor, where)
    shape = global_shape(state, tensor, where)
    found: list[LocalShard] = []
    for record in state[0]:
        fields = _fields(record, tensor, where)
        box = _box(fields.get("metadata"), shape, tensor, where)
        local = plain_tensor(fields.get("tensor"), tensor, where)
        if local is None:
            raise _malformed(tensor, where)
        if local.shape != box.shape:
            msg = f"{where}: a shard of {tensor} has shape {list(local.shape)}, but its box is {list(box.shape)}"
            raise CorruptCheckpointError(msg, hint="the file is damaged: copy it again")
        found.append(LocalShard(box, local))
    return found


def all_boxes(state: tuple[Any, ...], tensor: str, where: str) -> list[Box]:
    """The boxes of the shards of all ranks, empty ones left out."""
    entries = _fields(state[1], tensor, where).get("shards_metadata")
    if not isinstance(entries, list):
        raise _malformed(tensor, where)
    shape = global_shape(state, tensor, where)
    boxes = [_box(entry, shape, tensor, where) for entry in entries]
    return [box for box in boxes if box.size]


def global_shape(state: tuple[Any, ...], tensor: str, where: str) -> tuple[int, ...]:
    """Shape of the whole tensor."""
    shape = _fields(state[1], tensor, where).get("size")
    if type(shape) is not tuple or any(type(n) is not int or n < 0 for n in shape):
        raise _malformed(tensor, where)
    return shape


def _box(metadata: object, shape: tuple[int, ...], tensor: str, where: str) -> Box:
    fields = _fields(metadata, tensor, where)
    start, extent = fields.get("shard_offsets"), fields.get("shard_sizes")
    if not isinstance(start, (list, tuple)) or not isinstance(extent, (list, tuple)):
        raise _malformed(tensor, where)
    if not len(start) == len(extent) == len(shape) or any(type(n) is not int or n < 0 for n in (*start, *extent)):
        raise _malformed(tensor, where)
    box = Box(tuple(start), tuple(a + n for a, n in zip(start, extent, strict=True)))
    if any(b > n for b, n in zip(box.stop, shape, strict=True)):
        msg = f"{where}: a shard of {tensor} covers {box.start} to {box.stop}, outside of its shape {list(shape)}"
        raise CorruptCheckpointError(msg, hint="the file is damaged: copy it again")
    return box


def _fields(record: object, tensor: str, where: str) -> Fields:
    """State of an object with a __dict__, or with slots: (None, {...})."""
    state = record.state if isinstance(record, Recorder) else None
    if isinstance(state, tuple) and len(state) == 2:
        state = state[1] if isinstance(state[1], dict) else state[0]
    if not isinstance(state, dict):
        raise _malformed(tensor, where)
    return state


def _malformed(tensor: str, where: str) -> CorruptCheckpointError:
    msg = f"{where}: the ShardedTensor {tensor} is malformed"
    return CorruptCheckpointError(msg, hint="the file is damaged, or was written by an unknown torch")
