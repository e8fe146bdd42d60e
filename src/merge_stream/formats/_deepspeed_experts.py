"""Experts of deepspeed.moe and AutoEP: each global expert has a file, each expert-parallel rank its masters.

    layer_L_expert_E_mp_rank_MM_model_states.pt   16-bit weights of global expert E of MoE layer L
    group with `moe`: True in *_optim_states.pt   masters of the local experts, cut over the ranks R % ep == e

R counts data-parallel ranks D. Under tensor parallelism experts are whole by default and spread over all ranks of
the run, R = D * tp + MM, so that each expert has one file, of any MM; with `enable_expert_tensor_parallelism` each MM
holds its part of every expert, and its own optimizer files count (real checkpoints of 0.19.8).

Facts: DeepSpeed 0.14.4, 0.16.9, 0.19.8 (moe/, runtime/engine.py, zero/stage_1_and_2.py). Masters are named by
local expert ids (`deepspeed_experts.0`), files by global ones; global = e * local + i. Up to 0.16.9 the model
states list no shapes, and in 0.14.4 the slice mappings of expert groups are wrong (they divide by all ranks), so
the order is that of the files: layer, local expert, parameter. AutoEP stacks local experts:
`experts.w1|w2|w3` [local, ...], and is given back the names of the Hugging Face module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from merge_stream.containers.torch_file import open_torch_file
from merge_stream.errors import CorruptCheckpointError, IncompleteShardsError, UnsupportedError
from merge_stream.formats._catalog import FileTable
from merge_stream.formats._deepspeed_files import DeepSpeedFiles, missing_text
from merge_stream.formats._deepspeed_local import LocalModel, plain_ref, widened
from merge_stream.formats._deepspeed_states import OptimStates, Shape, StatesFile, tensors_in
from merge_stream.formats._zero3_experts import experts_of, place_stack
from merge_stream.formats._zero_masters import Masters, flat_masters
from merge_stream.options import OpenOptions
from merge_stream.tensors.ref import TensorRef
from merge_stream.tensors.tables import deeper, moved, stacked

__all__ = ["fuse_autoep", "lay_experts", "read_experts", "require_no_experts"]

_LOCAL = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..*)")
_STACK = re.compile(r"(.*\.experts\.w[123])\.(\d+)")
_GATE = ".deepspeed_moe.gate.wg.weight"
_COPY = "copy the files of all experts here"


def read_experts(
    parts: Mapping[int, LocalModel], files: DeepSpeedFiles, table: FileTable, options: OpenOptions
) -> list[LocalModel]:
    """All experts of a model: whole, or (`enable_expert_tensor_parallelism`) the part of each tensor-parallel rank.

    `parts` are the tensor-parallel ranks of the run. IncompleteShardsError when experts or files of them are missing.
    """
    held = _read(files, table)
    places = {mp: {(layer, expert) for layer, expert, of in files.experts if of == mp} for mp in held}
    cut = len(held) > 1 and all(place == places[0] for place in places.values())
    if set(held) != set(parts):  # a save that is whole has some of every rank, also where experts are whole
        msg = f"{files.tree.label} has expert files of {len(held)} of {len(parts)} tensor-parallel ranks"
        raise IncompleteShardsError(msg, hint=_COPY)
    _require_experts(files, parts[0])
    if cut:
        return [_with_masters(held[mp], part.optim, part, files, options) for mp, part in sorted(parts.items())]
    whole = LocalModel(metadata_nbytes=sum(one.metadata_nbytes for one in held.values()))
    for mp, one in held.items():
        if twice := sorted(set(whole.tensors) & set(one.tensors)):
            msg = f"{files.tree.label}: {twice[0]} is in an expert's file of rank {mp} and in that of another rank"
            raise CorruptCheckpointError(msg, hint="files of two runs are mixed, or some of them are missing")
        whole.tensors |= one.tensors
    # neighbours in the list are neighbours among the run's ranks: all tensor-parallel ones, then the next data rank
    optim = [rank for ranks in zip(*(part.optim for _, part in sorted(parts.items())), strict=False) for rank in ranks]
    return [_with_masters(whole, optim, parts[0], files, options)]


def _with_masters(
    held: LocalModel, optim: Sequence[OptimStates], part: LocalModel, files: DeepSpeedFiles, options: OpenOptions
) -> LocalModel:
    """The experts of `held` with the masters of `optim`; `part` lists the parameters."""
    model = LocalModel(states=part.states, metadata_nbytes=held.metadata_nbytes)
    weights = held.tensors
    _stack_files(weights)
    masters = _masters(optim, part, weights) if options.weights != "module" else {}
    for name, ref in weights.items():
        if name in masters:
            master = masters.pop(name)
            if master.shape != ref.shape:
                msg = f"{name} is {list(ref.shape)} in its expert file, {list(master.shape)} among the masters"
                raise CorruptCheckpointError(msg, hint="files of two runs are mixed")
            model.tensors[name] = master
            model.twins[name] = ref
        else:
            keeps = options.weights == "module" or not optim
            model.tensors[name] = ref if keeps else widened(ref)
    if masters:
        msg = f"{files.tree.label} has masters of experts without a file: {min(masters)} ..."
        raise IncompleteShardsError(msg, hint=_COPY)
    return model


def lay_experts(model: LocalModel, experts: LocalModel, files: DeepSpeedFiles) -> None:
    """Add the experts to the rest of the model."""
    model.tensors |= experts.tensors
    model.twins |= experts.twins
    model.facts["experts"] = len({(layer, expert) for layer, expert, _ in files.experts})
    _require_gates(model, files)
    _require_alike(experts, files)
    fuse_autoep(model, files)


def require_no_experts(parts: Mapping[int, LocalModel], files: DeepSpeedFiles) -> None:
    """IncompleteShardsError when a model without expert files has experts (stage 3 keeps them elsewhere)."""
    for part in () if files.zero3 else parts.values():
        stated = part.states.state.get("num_experts") if part.states else None
        if stated or any(group.get("moe") is True for rank in part.optim for group in rank.param_groups):
            msg = f"{files.tree.label} holds no expert files (layer_*_expert_*), but the model has experts"
            raise IncompleteShardsError(msg, hint=_COPY)


def _read(files: DeepSpeedFiles, table: FileTable) -> dict[int, LocalModel]:
    """The weights in the expert files of each model-parallel rank, by global name."""
    held: dict[int, LocalModel] = {}
    for (_, _, mp), name in sorted(files.experts.items(), key=lambda item: (item[0][2], item[0])):
        source = StatesFile(name, table.index(name), open_torch_file(files.tree, name))
        one = held.setdefault(mp, LocalModel())
        one.metadata_nbytes += source.file.metadata_nbytes
        tensors, _ = tensors_in(source.file.root, source)
        for key, tensor in tensors.items():
            if key in one.tensors:
                msg = f"{source.where} holds {key}, which is in another expert's file too"
                raise CorruptCheckpointError(msg, hint="files of two runs are mixed")
            one.tensors[key] = plain_ref(key, tensor, source)
    return held


def _require_experts(files: DeepSpeedFiles, part: LocalModel) -> None:
    """As many files for each layer as the model states say."""
    stated = part.states.state.get("num_experts") if part.states else None
    stated = [stated] if type(stated) is int else stated  # one number for all layers, in the oldest files
    numbers = [n for n in stated if type(n) is int] if isinstance(stated, list) else []
    layers = sorted({layer for layer, _, _ in files.experts})
    for position, layer in enumerate(layers):
        there = {expert for (of, expert, _) in files.experts if of == layer}
        wanted = numbers[position] if len(numbers) == len(layers) else max(there) + 1
        missing = missing_text(there, wanted)
        if missing or len(there) > wanted:
            msg = f"{files.tree.label} has {len(there)} expert files of MoE layer {max(layer, 0)}, wanted {wanted}"
            raise IncompleteShardsError(f"{msg}; missing: {missing or 'none'}", hint=_COPY)
    if len(numbers) > len(layers):
        msg = f"{files.tree.label} has expert files of {len(layers)} MoE layers, the model states list {len(numbers)}"
        raise IncompleteShardsError(msg, hint=_COPY)


def _require_gates(model: LocalModel, files: DeepSpeedFiles) -> None:
    """A gate of deepspeed.moe has a row for each expert, whatever else says how many there are."""
    for name, gate in model.tensors.items():
        if name.endswith(_GATE) and gate.shape:
            prefix = f"{name.removesuffix(_GATE)}.deepspeed_moe.experts.deepspeed_experts."
            held = {m[2] for other in model.tensors if other.startswith(prefix) and (m := _LOCAL.fullmatch(other))}
            if len(held) != gate.shape[0]:
                msg = (
                    f"{files.tree.label} has {len(held)} experts of {prefix[:-1]}, {name} chooses among {gate.shape[0]}"
                )
                raise IncompleteShardsError(msg, hint=_COPY)


def _require_alike(experts: LocalModel, files: DeepSpeedFiles) -> None:
    """The experts of a layer are copies of one module (moe/experts.py), so they have the same parameters."""
    layers: dict[str, dict[str, dict[str, Shape]]] = {}
    for name, tensor in experts.tensors.items():
        if match := _LOCAL.fullmatch(name):
            layers.setdefault(match[1], {}).setdefault(match[2], {})[match[3]] = tensor.shape
    for layer, held in layers.items():
        first, *others = held.items()
        for number, parameters in others:
            if different := sorted(set(parameters.items()) ^ set(first[1].items())):
                what = f"{layer}{first[0]} and {layer}{number} differ in {different[0][0][1:]}"
                msg = f"{files.tree.label}: the experts {what}, which all experts of a layer have alike"
                raise IncompleteShardsError(msg, hint=f"an expert's file is damaged or of another run: {_COPY}")


def _masters(optim: Sequence[OptimStates], part: LocalModel, weights: Mapping[str, TensorRef]) -> Masters:
    """Masters of all experts by global name."""
    found: Masters = {}
    if not optim:
        return found
    listed = part.states.groups if part.states else None
    number = 0
    for group, settings in enumerate(optim[0].param_groups):
        if settings.get("moe") is not True:
            continue
        number += 1
        count = optim[0].partitions[group] if group < len(optim[0].partitions) else 0
        if not count or len(optim) % count:
            msg = f"{optim[0].source.where}: expert group {group} is cut over {count} of {len(optim)} ranks"
            raise CorruptCheckpointError(msg, hint="files of two runs are mixed")
        if number > 1 and listed is None:
            msg = f"{optim[0].source.where}: two expert groups, and nothing lists which parameters each has"
            raise UnsupportedError(msg, hint="--weights module writes the 16-bit weights")
        ranks = len(optim) // count
        for rank in range(ranks):
            own = list(optim[rank::ranks])
            if listed is not None:
                local = listed[group]
                names = _global_names(local, rank)
            else:
                names = _names_in_files(weights, rank, ranks)
                local = {name: weights[name].shape for name in names}
            for name, master in flat_masters(group, local, own).items():
                if name in names:
                    found[names[name]] = replace(master, name=names[name])
                else:
                    place_stack(found, master, experts_of(part.states, name, master.shape, rank), ranks)
    return found


def _global_names(local: Mapping[str, Shape], rank: int) -> dict[str, str]:
    """Local -> global names of deepspeed.moe; names of stacks (AutoEP) are left out."""
    every: dict[str, set[int]] = {}
    for name in local:
        if match := _LOCAL.fullmatch(name):
            every.setdefault(match[1], set()).add(int(match[2]))
    names = {}
    for name in local:
        if match := _LOCAL.fullmatch(name):
            number = rank * len(every[match[1]]) + int(match[2])
            names[name] = f"{match[1]}{number}{match[3]}"
    return names


def _names_in_files(weights: Mapping[str, TensorRef], rank: int, ranks: int) -> dict[str, str]:
    """Global names of the experts of a rank, in the order of the optimizer."""
    layers: dict[str, dict[int, list[str]]] = {}
    for name in weights:
        match = _LOCAL.fullmatch(name)
        if match is None:
            msg = f"{name} is no parameter of deepspeed.moe"
            raise UnsupportedError(msg, hint="--weights module writes the 16-bit weights")
        layers.setdefault(match[1], {}).setdefault(int(match[2]), []).append(name)
    names = []
    for experts in layers.values():
        share = len(experts) // ranks
        for expert in sorted(experts)[rank * share : (rank + 1) * share]:
            names += experts[expert]
    return {name: name for name in names}


def fuse_autoep(model: LocalModel, files: DeepSpeedFiles) -> None:
    """Give layers that AutoEP took apart the names of the Hugging Face module again.

    experts.w1, w3 [E, I, H] -> experts.gate_up_proj [E, 2 I, H]; experts.w2 -> experts.down_proj;
    router.gate.weight -> gate.weight.
    """
    described = model.states.state.get("ds_autoep_layers") if model.states else None
    if not isinstance(described, list):
        return
    for layer in described:
        if isinstance(layer, dict) and isinstance(layer.get("module_path"), str):
            _fuse_layer(model, layer["module_path"], files)


def _fuse_layer(model: LocalModel, path: str, files: DeepSpeedFiles) -> None:
    prefix = f"{path}.experts."
    for place in (model.tensors, model.twins):
        if all(prefix + part in place for part in ("w1", "w2", "w3")):
            w1, w2, w3 = (place.pop(prefix + part) for part in ("w1", "w2", "w3"))
            if w1.shape != w3.shape or len(w1.shape) != 3:
                msg = f"{files.tree.label}: {prefix}w1 is {list(w1.shape)}, w3 {list(w3.shape)}"
                raise CorruptCheckpointError(msg, hint="files of two runs are mixed")
            rows = stacked([w1.shards, moved(w3.shards, (0, w1.shape[1], 0))], 3)
            name, shape = prefix + "gate_up_proj", (w1.shape[0], 2 * w1.shape[1], w1.shape[2])
            place[name] = TensorRef(name, w1.dtype, shape, rows, stored=w1.stored)
            name = prefix + "down_proj"
            place[name] = TensorRef(name, w2.dtype, w2.shape, w2.shards, stored=w2.stored)
        router = f"{path}.router.gate.weight"
        if router in place:
            place.pop(f"{path}.gate.gate.weight", None)  # the same module, where transformers' code looks for it
            place[f"{path}.gate.weight"] = place.pop(router)


def _stack_files(weights: dict[str, TensorRef]) -> None:
    """`experts.w1.0`, `experts.w1.1` ... of AutoEP become one tensor with an expert dim."""
    stacks: dict[str, dict[int, str]] = {}
    for name in weights:
        if match := _STACK.fullmatch(name):
            stacks.setdefault(match[1], {})[int(match[2])] = name
    for name, experts in stacks.items():
        refs = [weights.pop(experts[k]) for k in sorted(experts)]
        first = refs[0]
        if sorted(experts) != list(range(len(refs))) or any(ref.shape != first.shape for ref in refs):
            msg = f"the experts of {name} are {sorted(experts)[:16]}, of {len({ref.shape for ref in refs})} shapes"
            raise IncompleteShardsError(msg, hint=_COPY)
        rows = stacked([deeper(ref.shards, k) for k, ref in enumerate(refs)], len(first.shape) + 1)
        weights[name] = TensorRef(name, first.dtype, (len(refs), *first.shape), rows)
