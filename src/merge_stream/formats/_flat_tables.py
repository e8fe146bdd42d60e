"""From flat parts to tensors: every parameter as boxes of the ranks' parts, all sizes checked.

Facts (fairscale 0.4.13, torch_xla of April 2026): rank r of W holds elements [r * part, (r + 1) * part) of the flat
parameter and then padding. fairscale's part is ceil(size / W), and each rank notes its padding. torch_xla rounds it
up to a multiple of 128, which a private argument changes, so any power of two is taken; `shard_param_on_dim_0` cuts
ceil(rows / W) whole rows instead. With one rank fairscale leaves the shape as it was; units in a process group of one
rank (batch norms, experts) are whole on each.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from merge_stream.errors import CorruptCheckpointError, IncompleteShardsError, UnsupportedError
from merge_stream.formats._catalog import listed
from merge_stream.formats._flat_layout import FlatParam, Slot
from merge_stream.formats._flat_rank import MIXED, FlatRank, Held
from merge_stream.formats._rank_files import ranks_text
from merge_stream.tensors.box import Box, boxes_of_range
from merge_stream.tensors.dtype import DType, dtype_of_torch
from merge_stream.tensors.ref import ShardTable, TensorRef

__all__ = ["FlatTables"]

_COPY = "copy the missing files here; if they lie on the disks of other nodes, name each folder with --input"


@dataclass(slots=True)
class FlatTables:
    """Tensors of the ranks `every`, in the order of the ranks; `files` are their numbers in the catalog.

    `tensors` by name with wrapper prefixes; `kinds` counts what they are stored as.
    """

    every: Sequence[FlatRank]
    files: Sequence[int]
    tensors: dict[str, TensorRef] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    _drifted: list[str] = field(default_factory=list)
    _widened: list[str] = field(default_factory=list)
    _cast: list[str] = field(default_factory=list)

    def fill(self) -> None:
        """All tensors. CorruptCheckpointError and IncompleteShardsError when sizes, paddings or totals are wrong."""
        layout = self.every[0].layout
        for key, param in layout.params.items():
            self._add_flat(key, param)
        for further, name in layout.ties.items():
            self._tie(further, name)
        alone = {self._place(key): param for key, param in layout.params.items() if len(param.slots) == 1}
        for key in self.every[0].held:
            if key in layout.params:
                continue
            shared = alone.get(self._place(key)) if key not in (layout.buffers or ()) else None
            if shared is not None and shared.size:
                self._tie(key, shared.slots[0].name)
            else:
                self._add_buffer(key)

    def notes(self) -> tuple[str, ...]:
        """Remarks on copies that differ, and on buffers that were cast."""
        notes = []
        if self._drifted:
            notes.append(
                f"{len(self._drifted)} tensors that every rank holds whole differ between ranks; rank 0's copy is "
                f"used: {listed(self._drifted, most=3)}"
            )
        if self._widened:
            notes.append(
                f"{len(self._widened)} buffers were saved in the type of the computation, and get their own type "
                f"back: {listed(self._widened, most=3)}"
            )
        if self._cast:
            notes.append(
                f"{len(self._cast)} buffers had another type in the model, and are kept as they were saved: "
                f"{listed(self._cast, most=3)}"
            )
        return tuple(notes)

    def _add_flat(self, key: str, param: FlatParam) -> None:
        helds = self._helds(key)
        dtype, part = helds[0].dtype, math.prod(helds[0].shape)
        unpadded = not any(rank.layout.padding.get(key, 1) for rank in self.every)
        if len(helds) > 1 and part == param.size > 0 and unpadded:
            self._require_copies(key, param, helds)
            for slot in param.slots:
                self._add_copies(slot.name, dtype, slot.shape, [h.offset + slot.start * dtype.itemsize for h in helds])
            self.kinds["copies on every rank"] += 1
            return
        _require_total(key, param, self.every, helds[0].shape)
        self.kinds["flat parameters" if len(param.slots) > 1 else "single parameters"] += 1
        for slot in param.slots:
            rows = ShardTable.of(_rows(slot, part, dtype.itemsize, helds, self.files), len(slot.shape))
            self.tensors[slot.name] = TensorRef(slot.name, dtype, slot.shape, rows)

    def _place(self, key: str) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Offset and shape in every rank's file: what is equal in this is one storage under two names, a tie."""
        return tuple((held.offset, held.shape) for held in self._helds(key))

    def _tie(self, further: str, name: str) -> None:
        tensor = self.tensors[name]
        if further in self.tensors:
            raise CorruptCheckpointError(f"{self.every[0].where}: {further!r} is there twice", hint=MIXED)
        self.tensors[further] = dataclasses.replace(tensor, name=further)
        self.kinds["tied names"] += 1

    def _helds(self, key: str) -> list[Held]:
        """What each rank holds under the key: tensors of one type and shape."""
        helds: list[Held] = []
        for rank in self.every:
            held = rank.held.get(key)
            if held is None:
                raise CorruptCheckpointError(f"{rank.where}: {key!r} is not a tensor", hint=MIXED)
            first = helds[0] if helds else held
            if (held.dtype, held.shape) != (first.dtype, first.shape):
                msg = (
                    f"{rank.where}: {key!r} is {held.dtype} {list(held.shape)}, but {first.dtype} {list(first.shape)} "
                    f"in {self.every[0].where}"
                )
                raise CorruptCheckpointError(msg, hint=MIXED)
            helds.append(held)
        return helds

    def _require_copies(self, key: str, param: FlatParam, helds: Sequence[Held]) -> None:
        """A parameter that each rank holds whole: one model's copies, not an expert of each rank."""
        crcs = {held.crc for held in helds}
        if len(crcs) == 1 and 0 not in crcs:
            return
        matrix = next((slot.name for slot in param.slots if len(slot.shape) > 1), None)
        if matrix is not None:
            state = "not known to be equal (the files have no checksums)" if 0 in crcs else "different"
            msg = f"every rank holds all of {key!r} (with {matrix!r}), and their values are {state}"
            hint = "experts of one rank each, or several runs in one folder: consolidate with the trainer first"
            raise UnsupportedError(msg, hint=hint)
        self._drifted += [slot.name for slot in param.slots]

    def _add_copies(
        self, name: str, dtype: DType, shape: tuple[int, ...], offsets: Sequence[int], stored: DType | None = None
    ) -> None:
        whole = Box.whole(shape)
        rows = [(whole, file, offset) for file, offset in zip(self.files, offsets, strict=True)]
        others = ShardTable.of(rows[1:], len(shape))
        shards = ShardTable.of(rows[:1], len(shape))
        self.tensors[name] = TensorRef(name, dtype, shape, shards, others if len(others) else None, stored)

    def _add_buffer(self, key: str) -> None:
        """What every rank holds whole: the copy of rank 0."""
        layout = self.every[0].layout
        helds = self._helds(key)
        crcs = {held.crc for held in helds}
        name = key.replace("_fpw_module.", "").replace("_fsdp_wrapped_module.", "")
        if layout.buffers is not None and key not in layout.buffers and len(helds) > 1 and (len(crcs) > 1 or 0 in crcs):
            where = self.every[0].where
            msg = f"{where}: {key!r} is neither a parameter nor a buffer of the metadata, and not the same on all ranks"
            raise UnsupportedError(
                msg, hint="it was added to the state dict: leave it out, or save it equal on all ranks"
            )
        if name in self.tensors:
            raise CorruptCheckpointError(f"{self.every[0].where}: {name!r} is a buffer and a parameter", hint=MIXED)
        if len(crcs) > 1:
            self._drifted.append(name)
        dtype, stored = helds[0].dtype, None
        own = dtype_of_torch(layout.narrowed.get(key, ""))
        if own is not None and own != dtype:
            if own.kind == dtype.kind == "float" and own.itemsize > dtype.itemsize:
                dtype, stored = own, dtype
                self._widened.append(name)
            else:
                self._cast.append(name)
        self._add_copies(name, dtype, helds[0].shape, [held.offset for held in helds], stored)
        self.kinds["buffers"] += 1


def _require_total(key: str, param: FlatParam, every: Sequence[FlatRank], shape: tuple[int, ...]) -> None:
    """The parts together are the whole parameter, and each is what its rank must hold."""
    world, part, size = len(every), math.prod(shape), param.size
    whole = len(param.slots) == 1 and world == 1 and shape == param.slots[0].shape
    rows = len(param.slots) == 1 and len(shape) > 1 and shape[1:] == param.slots[0].shape[1:]
    if not (len(shape) == 1 or whole or (rows and every[0].layout.library == "torch_xla")):
        msg = f"{every[0].where}: {key!r} has the shape {list(shape)}, wanted a flat part of {size} elements"
        raise CorruptCheckpointError(msg, hint=MIXED)
    if part * world < size:
        needed = -(-size // part) if part else 0
        lack = f", missing ranks {ranks_text(range(world, needed))}" if needed else ""
        msg = (
            f"{key!r} has {size} elements, but the {world} ranks hold only {part * world} "
            f"({part} each): have ranks 0-{world - 1}{lack}"
        )
        raise IncompleteShardsError(msg, hint=_COPY)
    if every[0].layout.library == "torch_xla":
        if rows:
            good = shape[0] == -(-param.slots[0].shape[0] // world)
        else:  # the smallest multiple of some power of two that suffices
            good = not part or (part - (part & -part)) * world < size
    else:
        good = part == -(-size // world)
        for number, rank in enumerate(every):
            padding, wanted = rank.layout.padding[key], part - max(0, min(part, size - number * part))
            if good and padding != wanted:
                msg = f"{rank.where}: {key!r} has {padding} elements of padding, wanted {wanted} on rank {number}"
                raise CorruptCheckpointError(msg, hint="the rank files were renamed, or are of different runs")
    if not good:
        msg = f"{every[0].where}: {key!r} has parts of {part} elements, which {size} over {world} ranks do not give"
        raise CorruptCheckpointError(msg, hint="files of another world size are among them, or a file is damaged")


def _rows(
    slot: Slot, part: int, itemsize: int, helds: Sequence[Held], files: Sequence[int]
) -> list[tuple[Box, int, int]]:
    """The boxes of a parameter, in the ranks' parts that its elements fall into."""
    rows: list[tuple[Box, int, int]] = []
    at = slot.start
    while at < slot.stop:
        rank = at // part
        stop = min(slot.stop, (rank + 1) * part)
        for box in boxes_of_range(slot.shape, at - slot.start, stop - slot.start):
            rows.append((box, files[rank], helds[rank].offset + (at - rank * part) * itemsize))
            at += box.size
    return rows
