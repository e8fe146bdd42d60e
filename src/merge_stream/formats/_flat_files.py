"""Which files of a folder are the flat shards of one checkpoint: by what they hold, and grouped by their names.

    checkpoint_last-shard0.pt, checkpoint_last-shard1.pt     fairseq, metaseq: rank 0, rank 1
    final_ckpt_rank-00000000-of-00000002.pth                 torch_xla's example
    rank0-of-2-pytorch_model.bin                             transformers' Trainer on torch_xla
    any0.pt, any1.pt                                         the last number of the name counts the ranks

Names that are alike but for that number are one set. fairscale's metadata does not say the rank, so the number
of the name does; torch_xla's says it itself. One file of a set is opened to see whether it holds flat shards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from merge_stream.containers.torch_file import open_torch_file
from merge_stream.errors import MemoryLimitTooSmallError, MergeStreamError
from merge_stream.formats._flat_layout import is_metadata
from merge_stream.formats._rank_files import recognise
from merge_stream.formats._roots import is_flat_key
from merge_stream.storage.base import ByteTree

__all__ = ["FlatSet", "flat_sets", "other_sets"]

_TORCH = re.compile(r"[^/]+\.(pt|pth|bin|ckpt)")
_KEYWORD = re.compile(r"(?:rank|shard)[-_]?(\d{1,9})(?!\d)")
_LAST = re.compile(r"(\d{1,9})(?=[^\d]*$)")
# what stands beside a model, and files of other trainers, which are never opened to look for flat shards
_OTHERS = re.compile(
    r".*optim.*|.*sched.*|.*rng.*|.*scaler.*|training_args.*|zero_.*|bf16_zero.*|mp_rank_.*|layer_\d+-model.*|common\.pt"
    r"|(pytorch_)?model-\d{5}-of-\d{5}\.bin|adapter_.*|expert_\d+.*"
)
_PEEKS = 2  # files of a set that are tried, should the first be damaged


@dataclass(frozen=True, slots=True)
class FlatSet:
    """Files alike but for one number: `pattern` with `*` in its place, `files` by number in its order.

    `counted` says that the word rank or shard stands before the number. `bare`: no metadata beside the shards.
    """

    pattern: str
    files: Mapping[int, str]
    counted: bool
    bare: bool = False


def flat_sets(tree: ByteTree) -> Iterator[FlatSet]:
    """The sets that hold flat shards, those whose names count ranks first."""
    if ".metadata" in tree.files or recognise(tree.files):
        return
    for group in sorted(_groups(tree.files), key=lambda group: not group.counted):
        kind = _kind(tree, group)
        if kind:
            yield FlatSet(group.pattern, group.files, group.counted, bare=kind == "bare")


def other_sets(names: Iterable[str], chosen: str) -> frozenset[str]:
    """Torch files of `names` that are not in the set of `chosen`, if that is called -shardN or rank N of M."""
    if not re.search(r"-shard\d+\.|rank[-_]?\d+-of-\d+", chosen):
        return frozenset()
    groups = _groups(names)
    own = {name for group in groups if chosen in group.files.values() for name in group.files.values()}
    return frozenset(name for group in groups for name in group.files.values()) - own if own else frozenset()


def _groups(names: Iterable[str]) -> list[FlatSet]:
    found: dict[tuple[str, bool], dict[int, str]] = {}
    for name in names:
        if not _TORCH.fullmatch(name) or _OTHERS.fullmatch(name):
            continue
        stem, dot, kind = name.rpartition(".")
        words = list(_KEYWORD.finditer(stem))
        number = words[-1] if words else _LAST.search(stem)
        if number is None:
            found[name, False] = {0: name}
            continue
        pattern = f"{stem[: number.start(1)]}*{stem[number.end(1) :]}{dot}{kind}"
        found.setdefault((pattern, bool(words)), {})[int(number[1])] = name
    return [
        FlatSet(pattern, dict(sorted(files.items())), counted) for (pattern, counted), files in sorted(found.items())
    ]


def _kind(tree: ByteTree, group: FlatSet) -> str:
    """What the first file of the set that can be opened holds: "flat", "bare" (no metadata), or ""."""
    for name in list(group.files.values())[:_PEEKS]:
        try:
            root: Any = open_torch_file(tree, name).root
        except MemoryLimitTooSmallError:
            raise
        except MergeStreamError:
            continue
        if not isinstance(root, dict):
            return ""
        if any(is_metadata(value) for value in root.values()):
            return "flat"
        inner = [root, *(value for value in root.values() if isinstance(value, dict))]
        return "bare" if any(is_flat_key(key) for mapping in inner for key in mapping) else ""
    return ""
