"""Experts of AutoEP: which expert is whose, and their masters in ZeRO stage 3.

    ds_zero_partition_groups[g]   {partition_count, partition_ranks}: over which ranks a group is cut
    ds_autoep_layers[l]           {ep_rank, expert_placement}: which experts this rank's stack holds

Everything else is cut over all ranks; a stack of local experts (`experts.w1` [local, ...]) only over the ranks that
hold the same experts, in the order of `partition_ranks`. There are no expert files. Facts: DeepSpeed 0.19.8
(runtime/zero/stage3.py, runtime/engine.py), real checkpoints of 4 ranks with 2 and 4 expert-parallel ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from merge_stream.errors import CorruptCheckpointError, UnsupportedError
from merge_stream.formats._deepspeed_states import ModelStates, OptimStates, Shape
from merge_stream.formats._zero_masters import Masters, stage3_masters
from merge_stream.tensors.ref import ShardTable, TensorRef
from merge_stream.tensors.tables import moved, rows_of, stacked

__all__ = ["experts_of", "is_expert", "place_stack", "router_of", "stage3_masters_of_all"]

_STACK = re.compile(r".*\.experts\.w[123]")
_MIXED = "files of two runs are mixed, or the file is damaged: copy all files of one save again"


def stage3_masters_of_all(states: Sequence[ModelStates], optim: Sequence[OptimStates]) -> Masters:
    """The masters of stage 3: groups cut over all ranks, and those of experts.

    CorruptCheckpointError when the ranks contradict each other, UnsupportedError for other groups that are cut over
    some ranks only.
    """
    groups = states[0].groups or []
    cuts = [_cuts(rank) for rank in optim]
    everyone = tuple(range(len(optim)))
    if all(cut == everyone for of_rank in cuts for cut in of_rank):
        return stage3_masters(groups, optim)
    for one, of_rank in zip(optim, cuts, strict=True):
        if not len(of_rank) == len(one.flats) == len(groups):
            what = f"{len(of_rank)} ds_zero_partition_groups and {len(one.flats)} flat tensors"
            raise CorruptCheckpointError(f"{one.source.where} has {what} for {len(groups)} groups", hint=_MIXED)
    masters: Masters = {}
    for group, shapes in enumerate(groups):
        members: dict[tuple[int, ...], list[int]] = {}
        for rank, of_rank in enumerate(cuts):
            members.setdefault(of_rank[group], []).append(rank)
        if any(list(ranks) != there for ranks, there in members.items()):
            where = optim[0].source.where
            msg = f"{where}: the ranks of group {group} do not agree over which of them it is cut"
            raise CorruptCheckpointError(msg, hint=_MIXED)
        if list(members) == [everyone]:
            masters |= stage3_masters([shapes], optim, [group])
            continue
        stacks: Masters = {}
        for ranks in members:
            for name, stack in stage3_masters([shapes], [optim[rank] for rank in ranks], [group]).items():
                places = [_own_experts(states[rank], name, stack.shape) for rank in ranks]
                if any(place != places[0] for place in places):
                    msg = f"{states[ranks[0]].source.where}: ranks that share a part of {name} name other experts"
                    raise CorruptCheckpointError(msg, hint=_MIXED)
                place_stack(stacks, stack, places[0], len(members))
        masters |= stacks
    return masters


def _cuts(rank: OptimStates) -> list[tuple[int, ...]]:
    """The ranks over which each group is cut, as one of them says; nothing where no AutoEP is (nothing tells then)."""
    described = rank.state.get("ds_zero_partition_groups")
    if described is None:
        return []
    found = []
    for group in described if isinstance(described, list) else [None]:
        ranks = group.get("partition_ranks") if isinstance(group, dict) else None
        if not isinstance(ranks, (list, tuple)) or not ranks or any(type(n) is not int for n in ranks):
            msg = f"{rank.source.where}: ds_zero_partition_groups holds {repr(group)[:80]}"
            raise CorruptCheckpointError(msg, hint=_MIXED)
        found.append(tuple(ranks))
    return found


def _own_experts(states: ModelStates, name: str, shape: Shape) -> Sequence[int]:
    """The experts of the stack `name` on the rank that wrote `states`."""
    layer = _layer_of(states, name)
    rank = layer.get("ep_rank") if layer else None
    if layer is None or type(rank) is not int or not shape:
        msg = (
            f"{states.source.where}: {name} is cut over some of the ranks only, and ds_autoep_layers does not tell why"
        )
        raise UnsupportedError(msg, hint="save a universal checkpoint, or gather the model in the training script")
    return experts_of(states, name, shape, rank)


def experts_of(states: ModelStates | None, name: str, shape: Shape, rank: int) -> Sequence[int]:
    """Which experts an expert-parallel rank holds: what AutoEP wrote, else the next ones in order."""
    placement = (_layer_of(states, name) or {}).get("expert_placement")
    entries = placement.get("ranks") if isinstance(placement, dict) else None
    for entry in entries if isinstance(entries, list) else ():
        experts = entry.get("experts") if isinstance(entry, dict) and entry.get("rank") == rank else None
        if isinstance(experts, list) and len(experts) == shape[0] and all(type(n) is int for n in experts):
            return experts
    return range(rank * shape[0], (rank + 1) * shape[0])


def _layer_of(states: ModelStates | None, name: str) -> dict[object, object] | None:
    layers = states.state.get("ds_autoep_layers") if states else None
    for layer in layers if isinstance(layers, list) else ():
        if isinstance(layer, dict) and name.startswith(f"{layer.get('expert_key_prefix')}."):
            return layer
    return None


def is_expert(name: str) -> bool:
    """True for names of parameters that deepspeed.moe and AutoEP write to the experts' files."""
    return ".deepspeed_experts." in name or bool(_STACK.fullmatch(name))


def router_of(states: ModelStates, name: str) -> str | None:
    """The router's name for this one, by which transformers' code finds it: `mlp.gate.X` is `mlp.router.X`."""
    layers = states.state.get("ds_autoep_layers")
    for layer in layers if isinstance(layers, list) else ():
        path = layer.get("module_path") if isinstance(layer, dict) else None
        if isinstance(path, str) and name.startswith(f"{path}."):
            return f"{path}.router.{name.removeprefix(f'{path}.').partition('.')[2]}"
    return None


def place_stack(found: Masters, stack: TensorRef, experts: Sequence[int], ranks: int) -> None:
    """Put a rank's stack of local experts at its rows of the whole stack; CorruptCheckpointError beyond its end."""
    name, shape, rows = stack.name, stack.shape, stack.shards
    if experts and not 0 <= min(experts) <= max(experts) < shape[0] * ranks:
        msg = f"{name} would hold the experts {min(experts)} to {max(experts)}, of {shape[0] * ranks}"
        raise CorruptCheckpointError(msg, hint=_MIXED)
    rest = (0,) * (len(shape) - 1)
    before = found[name].shards if name in found else ShardTable.of([], len(shape))
    size = stack.on_disk.itemsize
    parts = [moved(rows_of(rows, k, k + 1, size), (expert, *rest)) for k, expert in enumerate(experts)]
    whole = (shape[0] * ranks, *shape[1:])
    found[name] = TensorRef(name, stack.dtype, whole, stacked([before, *parts], len(shape)), stored=stack.stored)
