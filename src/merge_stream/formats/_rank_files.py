"""Which files of a folder are one rank set: names only, nothing is opened but fsdp_config.json.

    verl (all versions)           model_world_size_W_rank_R.pt, fsdp_config.json {"world_size": W, "FSDP_version": 2}
                                  (older verl wrote no fsdp_config.json)
    accelerate, use_dcp=False     pytorch_model_fsdp_I_rankR.bin (I numbers the model, W is not in the name)
    accelerate, LOCAL_STATE_DICT  pytorch_model_fsdp_rankR.bin (flat parameters)

Files of another world size may lie in the same folder, left by an earlier run: fsdp_config.json
says which set is meant; without it a set must be complete, and be the only complete one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from merge_stream.containers.json_file import read_json
from merge_stream.errors import AmbiguousCheckpointError, CorruptCheckpointError, IncompleteShardsError
from merge_stream.storage.base import ByteTree
from merge_stream.units import counted

__all__ = ["RankSet", "choose_rank_set", "ranks_text", "recognise"]

_VERL = re.compile(r"model_world_size_(\d{1,7})_rank_(\d{1,7})\.pt")
_ACCELERATE = re.compile(r"pytorch_model_fsdp(?:_(\d{1,4}))?_rank(\d{1,7})\.bin")
_CONFIG = "fsdp_config.json"
_MOST_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RankSet:
    """The files of one checkpoint by rank. `world_size` is 0 when only the tensors know it."""

    trainer: str
    files: Mapping[int, str]
    world_size: int
    fsdp_version: int = 0
    notes: tuple[str, ...] = field(default=())


def recognise(names: Iterable[str]) -> str:
    """What the folder's rank files are, for people; "" when there are none."""
    verl: dict[int, int] = {}
    other = 0
    for name in names:
        if match := _VERL.fullmatch(name):
            verl[int(match[1])] = verl.get(int(match[1]), 0) + 1
        elif _ACCELERATE.fullmatch(name):
            other += 1
    texts = [f"{counted(count, 'file')} model_world_size_{size}_rank_*.pt" for size, count in sorted(verl.items())]
    if other:
        texts.append(f"{counted(other, 'file')} pytorch_model_fsdp*_rank*.bin")
    return " and ".join(texts)


def choose_rank_set(tree: ByteTree) -> RankSet:
    """The set that is meant, complete as far as names can tell.

    IncompleteShardsError lists every missing rank; AmbiguousCheckpointError when two sets could be
    meant; CorruptCheckpointError when names and fsdp_config.json contradict each other.
    """
    verl: dict[int, dict[int, str]] = {}
    accelerate: dict[str, dict[int, str]] = {}
    for name in tree.files:
        if match := _VERL.fullmatch(name):
            _take(tree, verl.setdefault(int(match[1]), {}), int(match[2]), name)
        elif match := _ACCELERATE.fullmatch(name):
            _take(tree, accelerate.setdefault(match[1] or "", {}), int(match[2]), name)
    if verl:
        return _verl_set(tree, verl)
    if len(accelerate) > 1:
        which = ", ".join(f"pytorch_model_fsdp{'_' if key else ''}{key}_rank*.bin" for key in sorted(accelerate))
        msg = f"{tree.label} holds the rank files of {len(accelerate)} models: {which}"
        raise AmbiguousCheckpointError(msg, hint="put the files of one model into a folder of their own")
    files = dict(sorted(next(iter(accelerate.values())).items()))
    _require(tree, files, max(files) + 1, "pytorch_model_fsdp*_rank*.bin")
    return RankSet("accelerate", files, 0)


def _take(tree: ByteTree, files: dict[int, str], rank: int, name: str) -> None:
    """One more file; two of the same rank ("rank_1" and "rank_01") are ambiguous."""
    other = files.setdefault(rank, name)
    if other != name:
        msg = f"{tree.label} holds two files of rank {rank}: {other} and {name}"
        raise AmbiguousCheckpointError(msg, hint="remove the one that is not of this checkpoint")


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks for a message: "0-2, 4"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in runs)


def _verl_set(tree: ByteTree, sets: Mapping[int, Mapping[int, str]]) -> RankSet:
    config = _fsdp_config(tree)
    stated = config.get("world_size")
    if stated is not None:
        if type(stated) is not int or stated < 1:
            msg = f"{tree.label}/{_CONFIG} has world_size {stated!r:.40}, wanted a positive number"
            raise CorruptCheckpointError(msg, hint="restore the file, or remove it")
        if stated not in sets:
            there = ", ".join(map(str, sorted(sets)))
            msg = f"{tree.label}/{_CONFIG} says world size {stated}, but the files are of world size {there}"
            hint = "restore the missing files, or remove fsdp_config.json when it is from another run"
            raise CorruptCheckpointError(msg, hint=hint)
        chosen = stated
    elif len(sets) == 1:
        chosen = next(iter(sets))
    else:
        complete = [size for size, files in sets.items() if len(files) == size and max(files) < size]
        if len(complete) != 1:
            have = "; ".join(f"world size {size}: ranks {ranks_text(files)}" for size, files in sorted(sets.items()))
            state = "several complete sets" if complete else "no complete set"
            msg = f"{tree.label} holds {state} of rank files ({have}), and no {_CONFIG} says which one is meant"
            kind = AmbiguousCheckpointError if complete else IncompleteShardsError
            raise kind(msg, hint='remove the stale files, or write fsdp_config.json with {"world_size": N}')
        chosen = complete[0]
    files = dict(sorted(sets[chosen].items()))
    _require(tree, files, chosen, f"model_world_size_{chosen}_rank_*.pt")
    others = {size: names for size, names in sets.items() if size != chosen}
    reason = f"{_CONFIG} says {chosen}" if stated else f"only world size {chosen} is complete"
    notes = tuple(
        f"{counted(len(names), 'file')} of world size {size} in the same folder left out: {reason}"
        for size, names in sorted(others.items())
    )
    version = config.get("FSDP_version")
    return RankSet("verl", files, chosen, version if type(version) is int else 0, notes)


def _fsdp_config(tree: ByteTree) -> dict[str, Any]:
    if _CONFIG not in tree.files:
        return {}
    return read_json(tree, _CONFIG, _MOST_CONFIG_BYTES)


def _require(tree: ByteTree, files: Mapping[int, str], world_size: int, pattern: str) -> None:
    if max(files) >= world_size:
        msg = f"{tree.label} holds {files[max(files)]}: its rank is not below the world size {world_size}"
        raise CorruptCheckpointError(msg, hint="restore the file's name")
    if len(files) == world_size:
        return
    missing = ranks_text(set(range(world_size)) - set(files))
    msg = (
        f"{world_size - len(files)} of {world_size} files {pattern} are missing in {tree.label}: "
        f"have ranks {ranks_text(files)}, missing ranks {missing}"
    )
    hint = "copy the missing files here; if they lie on the disks of other nodes, name each folder with --input"
    raise IncompleteShardsError(msg, hint=hint)
