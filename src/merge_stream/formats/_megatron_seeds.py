"""Whether the files of a torch_dist save were exchanged, as far as states of random numbers tell.

`.metadata` says which file holds a chunk, and nothing in a chunk says whose it is: files of equal make can stand for
each other, and every shape fits. But the first rank of each (stage, tensor-parallel rank) also saves

    rng_state/shard_{stage}.{rank}_{stages}.{ranks}     [{"rng_tracker_states": {"data-parallel-rng": state, ...}}]

and the seeds of its generators are made from its ranks: that of `data-parallel-rng` is seed + 100 x stage, that of
`model-parallel-rng` the same + 2718 + rank. A state of CUDA is 16 bytes, seed and offset. Only the whole set of
ranks in another order counts as exchanged; any other numbers tell nothing (verl adds no stages to its seeds).

Facts, from sources: Megatron-LM main of 2026-08, megatron-core 0.5 to 0.19 (`tensor_parallel/random.py`,
`training/initialize.py`), torch 2.13 (`CUDAGeneratorImpl::get_state`).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from merge_stream.containers.torch_file import TorchFile, open_torch_file
from merge_stream.containers.torch_tensor import locate, plain_tensor
from merge_stream.errors import CorruptCheckpointError, UnsafePickleError, UnsupportedError
from merge_stream.formats._dcp_metadata import DcpMetadata, StoredChunk
from merge_stream.storage.base import ByteTree

__all__ = ["require_own_seeds"]

_SHARD = re.compile(r"rng_state/shard_(?P<stage>\d{1,6})\.(?P<rank>\d{1,6})_\d{1,6}\.\d{1,6}")
_STATE_NBYTES = 16
_OFFSET, _STAGE = 2718, 100


class _Seeds(NamedTuple):
    file: str
    data: int
    model: int


def require_own_seeds(tree: ByteTree, meta: DcpMetadata) -> None:
    """CorruptCheckpointError when the states of a set of ranks stand in another order than their names."""
    found: dict[tuple[int, int], _Seeds] = {}
    for name, chunks in meta.stored.items():
        match = _SHARD.fullmatch(name)
        if match is not None and chunks:
            seeds = _read(tree, chunks[0])
            if seeds is not None:
                found[int(match["stage"]), int(match["rank"])] = seeds
    if len(found) < 2:
        return
    first = min(seeds.data for seeds in found.values())
    stages = {at: (seeds.data - first) / _STAGE for at, seeds in found.items()}
    ranks: dict[tuple[int, int], float] = {at: seeds.model - seeds.data - _OFFSET for at, seeds in found.items()}
    for axis, kind, told in ((0, "pipeline stage", stages), (1, "tensor-parallel rank", ranks)):
        odd = next((at for at, own in told.items() if own != at[axis]), None)
        if odd is not None and sorted(told.values()) == sorted(at[axis] for at in found):
            msg = f"{found[odd].file} holds the random state of {kind} {told[odd]:g}, .metadata says {odd[axis]}"
            raise CorruptCheckpointError(
                f"{tree.label}: {msg}: files of ranks were exchanged",
                hint="give each file its own name, or copy the folder again from where it was saved",
            )


def _read(tree: ByteTree, chunk: StoredChunk) -> _Seeds | None:
    """The seeds in one state; None when it is none of CUDA, or of another form."""
    if chunk.file not in tree.files:
        return None
    try:
        file = open_torch_file(tree, chunk.file, offset=chunk.start, nbytes=chunk.nbytes)
    except (UnsafePickleError, UnsupportedError):
        return None  # no state of Megatron's; nothing needs it
    state: Any = file.root
    while isinstance(state, list) and len(state) == 1:
        state = state[0]
    states = state.get("rng_tracker_states") if isinstance(state, dict) else None
    if not isinstance(states, dict):
        return None
    data, model = (_seed(tree, chunk, file, states.get(f"{kind}-parallel-rng")) for kind in ("data", "model"))
    return None if data is None or model is None else _Seeds(chunk.file, data, model)


def _seed(tree: ByteTree, chunk: StoredChunk, file: TorchFile, state: object) -> int | None:
    view = plain_tensor(state, "a state of random numbers", file.where)
    if view is None or view.shape != (_STATE_NBYTES,) or view.dtype.itemsize != 1:
        return None
    return int.from_bytes(tree.read(chunk.file, locate(view, file, "a state of random numbers"), 8), "little")
