"""Where ZeRO keeps the master of each parameter: offsets into flat partitions.

Stage 1, 2 and BF16_Optimizer: a group's flat vector is its parameters in the order of `param_shapes`, each
followed by its gap, then zeros up to a multiple of 2 * W. Rank r owns elements [r * S, (r + 1) * S); the
padding at its end may not be saved.

    |embed          |q    |k  |v  |gap|o    |zeros|
    |rank 0           |rank 1           |

Stage 3: each parameter is cut in W parts of c = ceil(numel / W) elements, and rank r's flat tensor is its
parts of all parameters of the (sub) group, one after another; what is beyond numel is padding.

Facts: DeepSpeed 0.14.4, 0.16.9, 0.19.8. With `round_robin_gradients` parameters are shuffled in the flat
vector; `param_shapes` has the true order, `param_slice_mappings` the untrue one, so the latter counts only
where there is nothing else (BF16_Optimizer without ZeRO, MoE up to 0.16.9).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from merge_stream.errors import CorruptCheckpointError, IncompleteShardsError
from merge_stream.formats._deepspeed_states import OptimStates, Shape
from merge_stream.formats._flat_ranges import Ranges, table_of_ranges
from merge_stream.tensors.dtype import F32, DType
from merge_stream.tensors.ref import ShardTable, TensorRef

__all__ = ["Masters", "flat_masters", "master", "sliced_masters", "stage3_masters", "stage3_parts"]

_MIXED = "files of two saves or of two runs are mixed: pass the files of one save"

Masters = dict[str, TensorRef]


def master(name: str, shape: Shape, ranges: Ranges, stored: DType) -> TensorRef:
    """The master of a parameter, whose elements lie in flat ranges: fp32, widened where it is stored as 16-bit."""
    rows = table_of_ranges(shape, ranges, stored.itemsize)
    return TensorRef(name, F32, shape, rows, stored=None if stored == F32 else stored)


def flat_masters(group: int, shapes: Mapping[str, Shape], ranks: Sequence[OptimStates]) -> Masters:
    """The masters of one group of stage 1 or 2, from the files of its ranks in order.

    CorruptCheckpointError when the parameters do not fill the flat vector, or ranks disagree.
    """
    starts = np.array([0, *np.cumsum([rank.flats[group].shape[0] + _padding(rank, group) for rank in ranks])])
    share = int(starts[1])
    for k, rank in enumerate(ranks):
        if int(starts[k + 1] - starts[k]) != share:
            msg = (
                f"{rank.source.where}: group {group} has {int(starts[k + 1] - starts[k])} elements with padding, "
                f"{ranks[0].source.where} has {share}"
            )
            raise CorruptCheckpointError(msg, hint=_MIXED)
    saved = starts[:-1] + np.array([rank.flats[group].shape[0] for rank in ranks])
    gaps = ranks[0].gaps[group] if ranks[0].gaps and group < len(ranks[0].gaps) else []
    if any(gap < 0 for gap in gaps):
        msg = f"{ranks[0].source.where}: group {group} has an alignment gap of {min(gaps)} elements"
        raise CorruptCheckpointError(msg, hint="the file is damaged: copy it again")
    if gaps and len(gaps) != len(shapes):
        msg = f"{ranks[0].source.where}: group {group} has {len(gaps)} alignment gaps for {len(shapes)} parameters"
        raise CorruptCheckpointError(msg, hint=_MIXED)
    files = np.array([rank.source.index for rank in ranks], dtype=np.int32)
    offsets = np.array([rank.source.at(rank.flats[group], f"group {group}") for rank in ranks], dtype=np.int64)
    stored = ranks[0].dtype
    masters: Masters = {}
    at = 0
    for k, (name, shape) in enumerate(shapes.items()):
        numel = math.prod(shape)
        if at + numel > share * len(ranks):
            raise _unfilled(group, shapes, ranks, share)
        first, last = at // share if share else 0, max((at + numel - 1) // share, 0) if share else 0
        part = slice(first, last + 1)
        lo = np.maximum(starts[:-1][part], at)
        hi = np.minimum(starts[1:][part], at + numel)
        if numel and (hi > saved[part]).any():
            raise _unfilled(group, shapes, ranks, share)
        where = offsets[part] + (lo - starts[:-1][part]) * stored.itemsize
        masters[name] = master(name, shape, Ranges(lo - at, hi - at, files[part], where), stored)
        at += numel + (gaps[k] if k < len(gaps) else 0)
    if not 0 <= share * len(ranks) - at < 2 * len(ranks):
        raise _unfilled(group, shapes, ranks, share)
    return masters


def _padding(rank: OptimStates, group: int) -> int:
    """Elements of the rank's share that are not in its file; BF16_Optimizer (no stage) saves them."""
    return rank.paddings[group] if rank.stage is not None and group < len(rank.paddings) else 0


def _unfilled(
    group: int, shapes: Mapping[str, Shape], ranks: Sequence[OptimStates], share: int
) -> CorruptCheckpointError:
    wanted = sum(map(math.prod, shapes.values()))
    msg = (
        f"group {group}: the {len(shapes)} parameters listed in the model states have {wanted} elements, the flat "
        f"masters of {len(ranks)} ranks have {share * len(ranks)} with padding ({ranks[0].source.where} ...)"
    )
    return CorruptCheckpointError(msg, hint=_MIXED)


def sliced_masters(group: int, shapes: Mapping[str, Shape], ranks: Sequence[OptimStates]) -> Masters:
    """The same from `param_slice_mappings`: the fragments of a name follow one another in the order of the ranks.

    `shapes` may hold more names than this group; names without a shape are an error.
    """
    fragments: dict[str, list[tuple[int, int, int]]] = {}
    for rank in ranks:
        named = rank.slices[group] if rank.slices and group < len(rank.slices) else {}
        base = rank.source.at(rank.flats[group], f"group {group}")
        for name, (start, numel) in named.items():
            if start + numel > rank.flats[group].shape[0] + _padding(rank, group):
                msg = f"{rank.source.where}: {name} would end at element {start + numel} of group {group}"
                raise CorruptCheckpointError(msg, hint=_MIXED)
            fragments.setdefault(name, []).append((numel, rank.source.index, base + start * rank.dtype.itemsize))
    masters: Masters = {}
    for name, parts in fragments.items():
        shape = shapes.get(name)
        if shape is None:
            msg = f"{ranks[0].source.where}: the optimizer has a master of {name}, and no file tells its shape"
            raise IncompleteShardsError(msg, hint="a *model_states.pt file is missing: copy all files of the save here")
        if sum(numel for numel, _, _ in parts) != math.prod(shape):
            have = sum(numel for numel, _, _ in parts)
            msg = f"{name}: the ranks hold {have} elements of its master, its shape is {list(shape)}"
            raise CorruptCheckpointError(msg, hint=_MIXED)
        stops = np.cumsum([numel for numel, _, _ in parts])
        ranges = Ranges([0, *stops[:-1]], stops, [f for _, f, _ in parts], [o for _, _, o in parts])
        masters[name] = master(name, shape, ranges, ranks[0].dtype)
    return masters


def stage3_masters(
    groups: Sequence[Mapping[str, Shape]], ranks: Sequence[OptimStates], chosen: Sequence[int] | None = None
) -> Masters:
    """The masters of stage 3: `groups` are the sub groups, each with a flat tensor on every rank.

    `chosen` are the numbers of their flat tensors (all by default). Writers whose groups are not those of the shapes
    are read as one stream, as zero_to_fp32.py does.
    """
    world = len(ranks)
    flats = range(len(ranks[0].flats)) if chosen is None else chosen
    needed = [sum(-(-math.prod(s) // world) for s in group.values()) for group in groups]
    masters: Masters = {}
    sizes = [[rank.flats[k].shape[0] for k in flats] for rank in ranks]
    if all(size == needed for size in sizes):
        for k, group in zip(flats, groups, strict=True):
            masters |= _from_streams(group, [_Stream(rank, [k]) for rank in ranks])
        return masters
    for rank, size in zip(ranks, sizes, strict=True):
        if sum(size) != sum(needed):
            msg = (
                f"{rank.source.where} holds {sum(size)} elements of masters, but the parameters listed in the model "
                f"states need {sum(needed)} on each of {world} ranks"
            )
            raise CorruptCheckpointError(msg, hint=_MIXED)
    every = {name: shape for group in groups for name, shape in group.items()}
    return _from_streams(every, [_Stream(rank, flats) for rank in ranks])


class _Stream:
    """Flat tensors of a rank, read as one after another."""

    def __init__(self, rank: OptimStates, groups: Sequence[int]) -> None:
        self.index = rank.source.index
        self.dtype = rank.dtype
        self.starts = np.cumsum([0, *(rank.flats[g].shape[0] for g in groups)])
        self.offsets = [rank.source.at(rank.flats[g], f"group {g}") for g in groups]

    def runs(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(start, stop, byte offset) of the parts of elements [start, stop) of the stream."""
        found = []
        for k, offset in enumerate(self.offsets):
            low, high = max(start, int(self.starts[k])), min(stop, int(self.starts[k + 1]))
            if low < high:
                found.append((low, high, offset + (low - int(self.starts[k])) * self.dtype.itemsize))
        return found


def _from_streams(shapes: Mapping[str, Shape], streams: Sequence[_Stream]) -> Masters:
    world = len(streams)
    simple = all(len(stream.offsets) == 1 for stream in streams)
    files = np.array([stream.index for stream in streams], dtype=np.int32)
    bases = np.array([stream.offsets[0] if stream.offsets else 0 for stream in streams], dtype=np.int64)
    stored = streams[0].dtype
    masters: Masters = {}
    at = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        part = -(-numel // world)
        lo = np.minimum(np.arange(world, dtype=np.int64) * part, numel)
        hi = np.minimum(lo + part, numel)
        if simple:
            ranges = Ranges(lo, hi, files, bases + at * stored.itemsize)
        else:
            runs = [
                (low + start - at, low + stop - at, stream.index, offset)
                for stream, low, high in zip(streams, lo.tolist(), hi.tolist(), strict=True)
                for start, stop, offset in stream.runs(at, at + high - low)
            ]
            ranges = Ranges(*zip(*runs, strict=True)) if runs else Ranges([], [], [], [])
        masters[name] = master(name, shape, ranges, stored)
        at += part
    return masters


def stage3_parts(name: str, shape: Shape, parts: Sequence[tuple[int, int, int]], itemsize: int) -> ShardTable:
    """The table of a parameter whose ranks hold (elements, file, offset), padding included: frozen fragments.

    IncompleteShardsError when they do not reach the parameter's end.
    """
    numel = math.prod(shape)
    share = -(-numel // len(parts))
    for have, _, _ in parts:
        if have != share:
            msg = f"{name}: a rank holds {have} elements of this frozen parameter, wanted {share} of {numel}"
            raise IncompleteShardsError(msg, hint=_MIXED)
    lo = np.minimum(np.arange(len(parts), dtype=np.int64) * share, numel)
    hi = np.minimum(lo + share, numel)
    return table_of_ranges(shape, Ranges(lo, hi, [f for _, f, _ in parts], [o for _, _, o in parts]), itemsize)
