"""fp32 masters without ZeRO: in the `optimizer` of the model states, without names.

    fp32_groups_flat [group]          FP16_Optimizer with a fused Adam: a flat vector for each group
    fp32_groups      [group][param]   FP16_UnfusedOptimizer: one tensor for each parameter

Facts (DeepSpeed 0.19.8, runtime/fp16/fused_optimizer.py, unfused_optimizer.py): a fused group's 16-bit
parameters become views of one flat tensor, so the module's storage and offset tell where in the flat master
a parameter lies. Unfused groups list their parameters in the module's order. Both are proved by the values
before anything is written: a master rounds to its 16-bit weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from merge_stream.containers.pickle_reader import dotted_name
from merge_stream.containers.torch_tensor import PlainTensor, plain_tensor
from merge_stream.errors import CorruptCheckpointError, UnsupportedError
from merge_stream.formats._deepspeed_states import ModelStates, Shape
from merge_stream.formats._flat_ranges import Ranges
from merge_stream.formats._zero_masters import Masters, master
from merge_stream.tensors.dtype import F32

__all__ = ["moment_shapes", "unpartitioned_masters"]

_MODULE = "--weights module writes the 16-bit weights"


def unpartitioned_masters(states: ModelStates) -> Masters | None:
    """Masters by the module's names; None when the file holds none (no optimizer saved, or fp32 training)."""
    optimizer = states.state.get("optimizer")
    if not isinstance(optimizer, dict):
        return None
    for key, read in (("fp32_groups_flat", _fused), ("fp32_groups", _unfused)):
        if key not in optimizer:
            continue
        groups = optimizer[key]
        stated = optimizer.get("optimizer_state_dict")
        settings = stated.get("param_groups") if isinstance(stated, dict) else None
        if not isinstance(groups, (list, tuple)) or (isinstance(settings, list) and len(settings) != len(groups)):
            have = f"{len(groups)} groups" if isinstance(groups, (list, tuple)) else dotted_name(groups)
            wanted = f"{len(settings)} groups" if isinstance(settings, list) else "a list of groups"
            msg = f"{states.source.where}: {key} of its optimizer is {have}, wanted {wanted}"
            raise CorruptCheckpointError(msg, hint=f"the file is damaged: copy it again; {_MODULE}")
        return read(states, groups)
    return None


def moment_shapes(states: ModelStates) -> list[Shape]:
    """The shapes of what a plain optimizer of torch (fp32, stage 0) trains, as its first moments have them."""
    optimizer = states.state.get("optimizer")
    entries = optimizer.get("state") if isinstance(optimizer, dict) else None
    found = []
    for entry in entries.values() if isinstance(entries, dict) else ():
        for key in ("exp_avg", "momentum_buffer", "sum"):
            value = entry.get(key) if isinstance(entry, dict) else None
            moment = plain_tensor(value, "a moment", states.source.where)
            if moment is not None:
                found.append(moment.shape)
                break
    return found


def _wide(value: Any, states: ModelStates) -> PlainTensor:  # noqa: ANN401 - unpickled
    tensor = plain_tensor(value, "a master", states.source.where)
    if tensor is None or tensor.dtype.name != "F32":
        msg = f"{states.source.where}: a master of its optimizer is no F32 tensor"
        raise UnsupportedError(msg, hint=_MODULE)
    return tensor


def _fused(states: ModelStates, flats: Sequence[Any]) -> Masters:
    module = states.module or {}
    storages: dict[str, list[str]] = {}
    for name, tensor in module.items():
        if tensor.dtype.kind == "float" and tensor.dtype.itemsize == 2:
            storages.setdefault(tensor.storage, []).append(name)
    lengths = {
        key: states.source.file.storages[key].nbytes // 2 for key in storages if key in states.source.file.storages
    }
    masters: Masters = {}
    for group, value in enumerate(flats):
        flat = _wide(value, states)
        fitting = [key for key, length in lengths.items() if length == flat.shape[0]]
        if len(flat.shape) != 1 or len(fitting) != 1:
            msg = (
                f"{states.source.where}: the flat master of group {group} {list(flat.shape)} belongs to "
                f"{len(fitting)} of the module's storages, wanted one"
            )
            raise UnsupportedError(msg, hint=_MODULE)
        base = states.source.at(flat, f"group {group}")
        for name in storages.pop(fitting[0]):
            view = module[name]
            numel = math.prod(view.shape)
            ranges = Ranges([0], [numel], [states.source.index], [base + view.offset * 4])
            masters.setdefault(name, master(name, view.shape, ranges, F32))
        del lengths[fitting[0]]
    return masters


def _unfused(states: ModelStates, groups: Sequence[Any]) -> Masters:
    queues = [[_wide(value, states) for value in group] for group in groups if isinstance(group, (list, tuple))]
    at = [0] * len(queues)
    masters: Masters = {}
    seen: set[tuple[str, int]] = set()
    for name, shape in _trained(states.module or {}, seen):
        heads = [k for k, queue in enumerate(queues) if at[k] < len(queue) and queue[at[k]].shape == shape]
        if len(heads) > 1:
            msg = f"{states.source.where}: {name} {list(shape)} may be the next master of {len(heads)} groups"
            raise UnsupportedError(msg, hint=_MODULE)
        if heads:
            tensor = queues[heads[0]][at[heads[0]]]
            at[heads[0]] += 1
            ranges = Ranges(
                [0], [math.prod(shape)], [states.source.index], [states.source.at(tensor, f"the master of {name}")]
            )
            masters[name] = master(name, shape, ranges, F32)
    left = sum(len(queue) for queue in queues) - sum(at)
    if left:
        msg = f"{states.source.where}: {left} masters of its optimizer fit no parameter in the module's order"
        raise UnsupportedError(msg, hint=_MODULE)
    return masters


def _trained(module: Mapping[str, PlainTensor], seen: set[tuple[str, int]]) -> list[tuple[str, Shape]]:
    """Floating 16-bit tensors in the module's order, a tied one once."""
    found = []
    for name, tensor in module.items():
        place = (tensor.storage, tensor.offset)
        if tensor.dtype.kind == "float" and tensor.dtype.itemsize == 2 and place not in seen:
            seen.add(place)
            found.append((name, tensor.shape))
    return found
