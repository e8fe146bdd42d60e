"""Groups of ranks that hold a tensor of one name: copies of each other, or different experts.

Both look the same in the files (same name, shape and placements, on disjoint meshes):

- FSDP2 + TP: what the TP plan leaves out (norms) lies on one 1-D mesh for each TP rank. Copies.
- VeOmni's expert parallelism under verl: each EP rank has its own slice of the experts, sharded over
  a mesh of its own. Different data, to be joined on dim 0 in ascending order of the ranks.

Only a stack of experts by its name (`...experts.down_proj`, no expert's number) can be slices, and
config.json must agree: a join needs its number of experts to be (number of slices) * (size of
dim 0). Everything else is copies, if the bytes are equal, or refused. Bytes are compared by the checksums in
the files where both have one (an equal checksum is believed for tensors that cannot be experts),
otherwise read in pieces of at most 1 MiB.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from merge_stream.containers.json_file import read_json
from merge_stream.errors import CorruptCheckpointError, UnsupportedError
from merge_stream.formats._rank_files import ranks_text
from merge_stream.formats._rank_index import Group
from merge_stream.storage.base import ByteTree

__all__ = ["GroupResolver", "expert_count"]

_STACK = re.compile(r"(?:.*\.)?experts\.(?!\d+$)[^.]+")
_STEP = 1 << 20
_SAMPLE = 4096
_MOST_CONFIG_BYTES = 1 << 24
_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_routed_experts")


class _Piece(NamedTuple):
    rank: int
    offset: int
    nbytes: int
    crc32: int


def expert_count(tree: ByteTree) -> int | None:
    """Number of experts that the config.json beside the checkpoint states, or None."""
    for name in ("huggingface/config.json", "config.json"):
        if name in tree.files and tree.files[name].nbytes <= _MOST_CONFIG_BYTES:
            try:
                config = read_json(tree, name, _MOST_CONFIG_BYTES)
            except CorruptCheckpointError:
                continue
            nested = config.get("text_config")
            for part in (config, nested):
                counts = [part.get(key) for key in _EXPERT_KEYS] if isinstance(part, dict) else []
                for count in counts:
                    if type(count) is int:
                        return count
    return None


class GroupResolver:
    """Decides what several groups of one name mean. `files` maps a rank to its file's name.

    `compared_nbytes` counts what was read for it.
    """

    def __init__(self, tree: ByteTree, files: Mapping[int, str]) -> None:
        self.compared_nbytes = 0
        self._tree = tree
        self._files = files
        self._experts = expert_count(tree)

    def slices(self, tensor: str, groups: Sequence[Group]) -> list[list[Group]]:
        """The groups as slices to be joined on dim 0, each slice as a list of copies.

        One slice: all groups are copies. UnsupportedError when bytes and config.json do not tell.
        """
        groups = sorted(groups, key=lambda group: min(group.ranks))
        first = groups[0]
        self.require_alike(tensor, groups)
        stacked = _is_stack(tensor, len(first.shape))
        wanted = 1
        if stacked and self._experts and first.shape[0] and self._experts % first.shape[0] == 0:
            wanted = self._experts // first.shape[0]
        if stacked and wanted == len(groups):
            return [[group] for group in groups]
        classes: list[list[Group]] = []
        for group in groups:
            for known in classes:
                if self._equal(known[0], group, certain=stacked):
                    known.append(group)
                    break
            else:
                classes.append([group])
        if len(classes) == 1 and wanted == 1:
            return classes
        if wanted > 1 and len(groups) % wanted == 0:
            if len(classes) == wanted and len({len(known) for known in classes}) == 1:
                return classes
            if len(classes) == 1:  # all experts are equal (not trained yet): any order gives the same bytes
                return [list(groups[k::wanted]) for k in range(wanted)]
        raise self._undecided(tensor, classes)

    @staticmethod
    def require_alike(tensor: str, groups: Sequence[Group]) -> None:
        """CorruptCheckpointError unless all groups are of one type, shape and splitting, on ranks of their own."""
        one = groups[0]
        seen: set[int] = set()
        for group in groups:
            if seen & set(group.ranks) or group.dtype != one.dtype or group.shape != one.shape:
                raise _contradiction(tensor, one, group)
            if (group.layout is None) != (one.layout is None) or (group.boxes is None) != (one.boxes is None):
                raise _contradiction(tensor, one, group)
            if group.layout and one.layout and _pattern(group) != _pattern(one):
                raise _contradiction(tensor, one, group)
            seen |= set(group.ranks)

    def _equal(self, a: Group, b: Group, *, certain: bool) -> bool:
        """Whether all first copies have equal bytes; `certain` does not believe equal checksums."""
        pairs = list(zip(_pieces(a), _pieces(b), strict=True))
        if any(one.crc32 and two.crc32 and one.crc32 != two.crc32 for one, two in pairs):
            return False
        if not all(self._same(one, two, min(one.nbytes, _SAMPLE)) for one, two in pairs[:1]):
            return False
        unproven = [(one, two) for one, two in pairs if certain or not one.crc32 or not two.crc32]
        return all(self._same(one, two, one.nbytes) for one, two in unproven)

    def _same(self, a: _Piece, b: _Piece, nbytes: int) -> bool:
        one, two = self._files[a.rank], self._files[b.rank]
        for at in range(0, nbytes, _STEP):
            size = min(_STEP, nbytes - at)
            self.compared_nbytes += 2 * size
            if self._tree.read(one, a.offset + at, size) != self._tree.read(two, b.offset + at, size):
                return False
        return True

    def _undecided(self, tensor: str, classes: Sequence[Sequence[Group]]) -> UnsupportedError:
        texts = [" = ".join(f"ranks {ranks_text(group.ranks)}" for group in known) for known in classes]
        shape = list(classes[0][0].shape)
        experts = f"config.json says {self._experts} experts" if self._experts else "config.json tells no expert count"
        msg = (
            f"{tensor} {shape} lies on {sum(map(len, classes))} groups of ranks with {len(classes)} different contents "
            f"({'; '.join(texts)}), and {experts}: they are neither copies nor known slices"
        )
        hint = "if they are expert-parallel slices, put the model's config.json into huggingface/ beside the rank files"
        return UnsupportedError(msg, hint=hint)


def _is_stack(tensor: str, ndim: int) -> bool:
    """Whether dim 0 counts experts: `...experts.w1` of three dims, or its bias of two."""
    return bool(_STACK.fullmatch(tensor)) and ndim >= (2 if tensor.endswith("bias") else 3)


def _pattern(group: Group) -> tuple[Any, ...]:
    layout = group.layout
    return (layout.mesh.shape, layout.placements) if layout else ()


def _pieces(group: Group) -> list[_Piece]:
    """The non-empty first copies, in the order of the mesh."""
    item, layout = group.dtype.itemsize, group.layout
    if layout is None:
        size = int(np.prod(group.shape, dtype=np.int64)) * item
        return [_Piece(group.ranks[0], group.offsets[0], size, group.crcs[0])]
    sizes = (layout.boxes.stop - layout.boxes.start).prod(axis=1) * item
    rows = sorted((layout.place[rank], k) for k, rank in enumerate(group.ranks))
    return [
        _Piece(group.ranks[k], group.offsets[k], int(sizes[place]), group.crcs[k])
        for place, k in rows
        if sizes[place] and layout.boxes.first[place]
    ]


def _contradiction(tensor: str, a: Group, b: Group) -> CorruptCheckpointError:
    texts = []
    for group in (a, b):
        how = str(group.layout) if group.layout else "ShardedTensor" if group.boxes is not None else "whole"
        texts.append(f"{group.dtype} {list(group.shape)} {how} on ranks {ranks_text(group.ranks)}")
    msg = f"{tensor} is not the same tensor on all ranks: {texts[0]}, but {texts[1]}"
    return CorruptCheckpointError(msg, hint="the rank files are of different runs, or the trainer split it by hand")
