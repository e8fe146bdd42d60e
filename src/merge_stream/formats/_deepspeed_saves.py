"""One save: what all of its files must say alike, and how many of them there are.

Files of two saves, or of two runs, load without an error in DeepSpeed itself and give a wrong model. What tells them
apart: the optimizer's step, `global_steps` and the world sizes of the model states, `partition_count`, the stage, the
number and the type of the flat tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from merge_stream.errors import CorruptCheckpointError, IncompleteShardsError
from merge_stream.formats._deepspeed_files import DeepSpeedFiles, missing_text
from merge_stream.formats._deepspeed_states import ModelStates, OptimStates
from merge_stream.formats._rank_files import ranks_text

__all__ = ["COPY", "require_ranks", "require_same_save", "require_same_step", "require_stage"]

COPY = "copy the missing files here; if they lie on other nodes, name each node's folder with --input"


def require_stage(optim: Mapping[int, OptimStates], states: ModelStates, *, stage3: bool) -> None:
    """Stage 3 lays its masters out in another way, and the sizes may be the same."""
    for rank in optim.values():
        if (rank.stage == 3) != stage3:
            stage = "no ZeRO stage" if rank.stage is None else f"ZeRO stage {rank.stage}"
            other = "stage 3" if stage3 else "stage 0, 1 or 2"
            msg = f"{rank.source.where} is of {stage}, but {states.source.where} of {other}"
            raise CorruptCheckpointError(msg, hint="files of two runs are mixed: copy all files of one save again")


def require_ranks(files: DeepSpeedFiles, mp: int, optim: Mapping[int, OptimStates]) -> None:
    """As many ranks as the flat tensors were cut into, and one step."""
    ranks = [optim[dp] for dp in sorted(optim)]
    first = ranks[0]
    for other in ranks[1:]:
        for what, one, two in (
            ("groups of masters", len(first.flats), len(other.flats)),
            ("ZeRO stage", first.stage, other.stage),
            ("partition_count", first.partitions, other.partitions),
            ("masters of type", first.dtype, other.dtype),
        ):
            if one != two:
                msg = f"{first.source.where} has {what} {one}, {other.source.where} {two}"[:600]
                raise CorruptCheckpointError(msg, hint="files of two runs are mixed: copy all files of one save again")
    world = max(first.partitions, default=0) or max(optim) + 1
    if missing := missing_text(optim, world):
        msg = (
            f"{files.tree.label} has optimizer states of ranks {ranks_text(optim)} of {world} (model-parallel rank "
            f"{mp}); those of ranks {missing} are missing"
        )
        raise IncompleteShardsError(msg, hint=COPY)
    extra = {dp for dp in optim if dp >= world}
    if extra:
        msg = f"{files.tree.label} has optimizer states of ranks {ranks_text(extra)}, but the run had {world} ranks"
        raise CorruptCheckpointError(msg, hint="files of an earlier, larger run are mixed in: remove them")


def require_same_save(states: Sequence[ModelStates]) -> None:
    """What every file of a save says alike: its step, and the size of the run."""
    first = states[0]
    for other in states[1:]:
        for key in ("global_steps", "dp_world_size", "mp_world_size"):
            one, two = first.number(key), other.number(key)
            if one != two:
                msg = f"{first.source.where} has {key} {one}, {other.source.where} {two}: files of two saves are mixed"
                raise CorruptCheckpointError(msg, hint="copy all files of one save again")


def require_same_step(of_ranks: Iterable[Sequence[OptimStates]]) -> None:
    """No trace but the optimizer's step tells files of two saves apart."""
    known: tuple[str, frozenset[int]] | None = None
    for ranks in of_ranks:
        for rank in ranks:
            if not rank.steps:
                continue
            if known is None:
                known = rank.source.where, rank.steps
            elif known[1] != rank.steps:
                msg = (
                    f"{rank.source.where} is of step {_text(rank.steps)}, {known[0]} of step {_text(known[1])}: "
                    "files of two saves are mixed"
                )
                raise CorruptCheckpointError(msg, hint="copy all files of one save again")


def _text(steps: Iterable[int]) -> str:
    return " and ".join(map(str, sorted(steps)))
