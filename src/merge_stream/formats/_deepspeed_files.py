"""The files of a DeepSpeed checkpoint: which tag, which file is whose.

    RUN/latest                                            the tag ("global_step200")
    RUN/TAG/mp_rank_MM_model_states.pt                    stage 0, 1, 2: one for each model-parallel rank
    RUN/TAG/zero_pp_rank_D_mp_rank_MM_model_states.pt     stage 3: one for each data-parallel rank too
    RUN/TAG/[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt
    RUN/TAG/layer_LL[-model_TT]-model_states.pt           pipeline: the 16-bit weights of a layer
    RUN/TAG/[layer_L_]expert_E_mp_rank_MM_model_states.pt deepspeed.moe: one global expert
    RUN/TAG/expp_rank_R_mp_rank_MM_optim_states.pt        moments of experts: never read
    RUN/TAG/zero/NAME/fp32.pt                             universal (ds_to_universal)

RUN may also be a Trainer's `checkpoint-N`, a Lightning `X.ckpt` (tag `checkpoint`), or the tag's folder
itself. Facts: DeepSpeed 0.14.4, 0.16.9 and 0.19.8 (runtime/engine.py, checkpoint/constants.py); the oldest
files lack the underscore before `optim_states`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from merge_stream.errors import AmbiguousCheckpointError, CorruptCheckpointError, IncompleteShardsError, UsageError
from merge_stream.formats._catalog import listed
from merge_stream.storage.base import ByteTree

__all__ = ["DeepSpeedFiles", "ZeroRank", "choose_tag", "files_of", "looks_like", "missing_text", "tags_of"]

_MODULE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_ZERO3 = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-(?:model_(\d+)-)?model_states\.pt")
_EXPERT = re.compile(r"(?:layer_(\d+)_)?expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_MOMENTS = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_UNIVERSAL = re.compile(r"zero/(.+)/fp32\.pt")
_ANY = (_MODULE, _ZERO3, _OPTIM, _LAYER, _EXPERT)
_MOST_TAG_BYTES = 4096

K = TypeVar("K")


class ZeroRank(NamedTuple):
    """A data-parallel rank within a model-parallel rank."""

    dp: int
    mp: int


@dataclass(slots=True)
class DeepSpeedFiles:
    """The files of one tag, names relative to the tree that `choose_tag` gave."""

    tag: str
    tree: ByteTree
    module: dict[int, str] = field(default_factory=dict)
    zero3: dict[ZeroRank, str] = field(default_factory=dict)
    optim: dict[ZeroRank, str] = field(default_factory=dict)
    layers: dict[tuple[int, int], str] = field(default_factory=dict)
    experts: dict[tuple[int, int, int], str] = field(default_factory=dict)
    universal: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def mp_ranks(self) -> list[int]:
        """Model-parallel ranks that have a file."""
        return sorted({*self.module, *(rank.mp for rank in self.zero3)})


def missing_text(have: Iterable[int], count: int) -> str:
    """Which of the numbers 0 ... `count` - 1 are not there, for a message; "" when all are.

    `count` is a stranger's word: as much work as there are files, whatever it says.
    """
    runs = []
    at = 0
    for number in sorted({*(n for n in have if 0 <= n < count), count}):
        if number > at:
            runs.append(f"{at}-{number - 1}" if number - 1 > at else str(at))
        at = number + 1
    return listed(runs)


def looks_like(name: str) -> bool:
    """True for a file name (without folder) that only DeepSpeed writes."""
    return any(pattern.fullmatch(name) for pattern in _ANY)


def tags_of(tree: ByteTree) -> dict[str, int]:
    """Folder of each tag ("" is the tree itself) -> how many of DeepSpeed's files it holds."""
    found: dict[str, int] = {}
    for path in tree.files:
        folder, _, name = path.rpartition("/")
        if "/" in folder:
            universal = _UNIVERSAL.fullmatch(path.partition("/")[2])
            if universal:
                tag = path.partition("/")[0]
                found[tag] = found.get(tag, 0) + 1
            continue
        if looks_like(name):
            found[folder] = found.get(folder, 0) + 1
    return found


def choose_tag(tree: ByteTree, wanted: str | None) -> str:
    """The tag's folder in the tree: the one asked for, the one `latest` names, or the only one.

    UsageError for a tag that is not there, AmbiguousCheckpointError when several could be meant.
    """
    tags = tags_of(tree)
    if "" in tags:
        if wanted not in {None, "", tree.label.rstrip("/").rpartition("/")[2]}:
            msg = f"{tree.label} is the folder of one tag, and --tag {wanted} names another"
            raise UsageError(msg, hint="pass the folder above it")
        return ""
    there = f"the tags there are {listed(sorted(tags))}"
    if wanted is not None:
        if wanted not in tags:
            raise UsageError(f"{tree.label} holds no tag {wanted!r}", hint=there)
        return wanted
    for name in ("latest", "latest_universal"):
        if name not in tree.files:
            continue
        stated = _stated(tree, name)
        if stated in tags:
            return stated
        if name == "latest" and f"{stated}_universal" in tags and len(tags) == 1:
            return f"{stated}_universal"
        if len(tags) != 1 or name == "latest_universal":
            msg = f"{tree.label}/{name} names the tag {stated[:80]!r}, which is not there"
            raise IncompleteShardsError(msg, hint=f"give --tag; {there}")
        msg = f"{tree.label}/latest names the tag {stated[:80]!r}, but the only folder is {next(iter(tags))!r}"
        raise IncompleteShardsError(msg, hint=f"an unfinished save, or a part of the copy; --tag {next(iter(tags))}")
    if len(tags) == 1:
        return next(iter(tags))
    msg = f"{tree.label} holds {len(tags)} tags ({listed(sorted(tags))}), and no file `latest` says which is meant"
    raise AmbiguousCheckpointError(msg, hint=f"give --tag, for example --tag {max(tags)}")


def _stated(tree: ByteTree, name: str) -> str:
    data = tree.read(name, 0, min(tree.files[name].nbytes, _MOST_TAG_BYTES))
    try:
        return data.decode().strip()
    except UnicodeDecodeError:
        msg = f"{tree.label}/{name} is no text"
        raise CorruptCheckpointError(msg, hint="give --tag") from None


def files_of(tree: ByteTree, folder: str) -> DeepSpeedFiles:
    """All files of the tag in `folder`; CorruptCheckpointError when two names say the same rank, or two stages."""
    here = tree.subtree(folder)
    files = DeepSpeedFiles(folder or tree.label.rstrip("/").rpartition("/")[2], here)
    for name in here.files:
        if match := _MODULE.fullmatch(name):
            _put(files.module, int(match[1]), name, here)
        elif match := _ZERO3.fullmatch(name):
            _put(files.zero3, ZeroRank(int(match[1]), int(match[2])), name, here)
        elif match := _OPTIM.fullmatch(name):
            _put(files.optim, ZeroRank(int(match[1]), int(match[2])), name, here)
        elif match := _LAYER.fullmatch(name):
            _put(files.layers, (int(match[1]), int(match[2] or 0)), name, here)
        elif match := _EXPERT.fullmatch(name):
            _put(files.experts, (int(match[1] or -1), int(match[2]), int(match[3])), name, here)
        elif match := _UNIVERSAL.fullmatch(name):
            files.universal[match[1]] = name
    if files.module and files.zero3:
        two = f"{next(iter(files.module.values()))} (stage 0, 1, 2) and {next(iter(files.zero3.values()))} (stage 3)"
        msg = f"{here.label} holds {two}, which no save writes both"
        raise CorruptCheckpointError(msg, hint="two saves went into one folder: remove the files of the older one")
    return files


def _put(place: dict[K, str], key: K, name: str, tree: ByteTree) -> None:
    other = place.setdefault(key, name)
    if other != name:
        msg = f"{tree.label} holds {other} and {name}, two files of the same rank"
        raise CorruptCheckpointError(msg, hint="files of two runs are mixed: remove those of the other run")
