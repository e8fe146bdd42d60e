"""Universal checkpoints (ds_to_universal): one folder for each parameter.

    TAG_universal/zero/NAME/fp32.pt      {"param": tensor, "cat_dim"?, "vocab_tensor"?} (stage 1, 2; parts joined)
                                         or a bare 1-D tensor (stage 3), whose shape the model states tell
    TAG_universal/*_model_states.pt      copied from the checkpoint: shapes, buffers, frozen parameters

Facts: DeepSpeed 0.16.9 and 0.19.8 (checkpoint/ds_to_universal.py). What was not trained comes from the copied model
states: 0.16.9 does not convert it; 0.19.8 writes it as fp32, integers too, and of several tensor-parallel ranks only
the first one's part. Experts of AutoEP are whole stacks (`is_expert_param`); deepspeed.moe cannot be converted.
A checkpoint of `round_robin_gradients` is converted wrongly by DeepSpeed itself: there the values contradict the copied
16-bit weights, which the merge finds out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from merge_stream.containers.torch_file import open_torch_file
from merge_stream.containers.torch_tensor import plain_tensor
from merge_stream.errors import CorruptCheckpointError, IncompleteShardsError, UnsupportedError
from merge_stream.formats._catalog import FileTable, listed
from merge_stream.formats._deepspeed_experts import fuse_autoep
from merge_stream.formats._deepspeed_files import DeepSpeedFiles, missing_text
from merge_stream.formats._deepspeed_local import LocalModel, frozen_of, plain_ref, widened
from merge_stream.formats._deepspeed_parallel import degrees
from merge_stream.formats._deepspeed_states import ModelStates, Shape, StatesFile, read_model_states
from merge_stream.formats._deepspeed_tensor_parallel import TensorParallelRules
from merge_stream.formats._zero3_experts import router_of
from merge_stream.tensors.box import Box
from merge_stream.tensors.dtype import F32
from merge_stream.tensors.ref import ShardTable, TensorRef

__all__ = ["read_universal"]

_AGAIN = "convert the checkpoint again with ds_to_universal, into an empty folder"
_COPY = "the conversion did not finish, or a part of the copy is missing"


def read_universal(files: DeepSpeedFiles, table: FileTable) -> LocalModel:
    """Every parameter of a universal checkpoint."""
    tree = files.tree
    states = {mp: _states_of(mp, files, table) for mp in files.mp_ranks}
    if missing := missing_text(states, max(states, default=0) + 1):
        msg = f"{tree.label} has no model states of model-parallel rank {missing}, which list the parameters"
        raise IncompleteShardsError(msg, hint=_COPY)
    pipeline, tensor = degrees({mp: LocalModel(states=of_rank[0]) for mp, of_rank in states.items()}, files)
    first = states[0][0]
    stages = [[states[stage * tensor + rank][0] for rank in range(tensor)] for stage in range(pipeline)]
    parts = _parts(stages)
    rules = _rules(stages[0], files)
    model = LocalModel(states=first)
    model.facts["layout"] = "universal"
    model.facts["weights"] = "fp32 masters"
    version = first.state.get("ds_version")
    model.facts["trainer"] = f"DeepSpeed {version}" if isinstance(version, str) else "DeepSpeed"
    untrained = _untrained(stages, parts)
    for name, path in files.universal.items():
        if parts and name not in parts:
            if name in untrained:
                continue  # what the trainer wrote is in the model states
            msg = f"{tree.label}/{path} is a parameter that the model states do not list"
            raise CorruptCheckpointError(msg, hint=f"two conversions are mixed: {_AGAIN}")
        source = StatesFile(path, table.index(path), open_torch_file(tree, path))
        model.metadata_nbytes += source.file.metadata_nbytes
        model.tensors[name] = _parameter(name, source, _expected(name, parts.get(name, ()), rules))
    _require_all(model, parts, files)
    model.is_pipeline = first.module is None
    if len(stages) > 1 and not model.is_pipeline:
        msg = f"{files.tree.label} has {len(stages)} pipeline stages, and weights in its model states"
        raise UnsupportedError(msg, hint="merge the checkpoint that was converted instead")
    if files.zero3:
        _add_from_stage3(model, [states[rank] for rank in range(tensor)], files)
    elif not model.is_pipeline:
        _add_from_module(model, stages[0], files)
    fuse_autoep(model, files)
    model.metadata_nbytes += sum(s.source.file.metadata_nbytes for of_rank in states.values() for s in of_rank)
    return model


def _states_of(mp: int, files: DeepSpeedFiles, table: FileTable) -> list[ModelStates]:
    """The copied model states of a model-parallel rank: one, or that of each data-parallel rank (stage 3)."""
    names = [name for rank, name in sorted(files.zero3.items()) if rank.mp == mp] or [files.module[mp]]
    return [read_model_states(files.tree, name, table.index(name)) for name in names]


def _parts(stages: Sequence[Sequence[ModelStates]]) -> dict[str, list[Shape]]:
    """Trained parameter -> its shape on each tensor-parallel rank of the first stage that has it."""
    found: dict[str, list[Shape]] = {}
    for ranks in stages:
        of_stage: dict[str, list[Shape]] = {}
        for rank in ranks:
            for group in rank.groups or ():
                for name, shape in group.items():
                    of_stage.setdefault(name, []).append(shape)
        found = of_stage | found
    return found


def _expected(name: str, parts: Sequence[Shape], rules: TensorParallelRules | None) -> Sequence[Shape]:
    """The shape of the whole where the rules of tensor parallelism tell it, else those of the parts."""
    if rules is None or not parts:
        return parts
    empty = [TensorRef(name, F32, shape, ShardTable.of([], len(shape))) for shape in parts]
    whole = _joined(rules, name, empty)
    return parts if whole is None else [whole.shape]


def _untrained(stages: Sequence[Sequence[ModelStates]], parts: Mapping[str, object]) -> set[str]:
    names = {name for ranks in stages for rank in ranks for name in (*(rank.module or ()), *rank.frozen_shapes)}
    return names - set(parts)


def _parameter(name: str, source: StatesFile, parts: Sequence[Shape]) -> TensorRef:
    root = source.file.root
    value = root.get("param") if isinstance(root, dict) else root
    tensor = plain_tensor(value, name, source.where)
    if tensor is None or tensor.dtype != F32:
        msg = f"{source.where} holds no fp32 tensor"
        raise CorruptCheckpointError(msg, hint=_AGAIN)
    offset = source.at(tensor, name)
    shape = tensor.shape
    if isinstance(root, dict):
        expert = root.get("ep_num_experts") if root.get("is_expert_param") is True else None
        if parts and not _fits(shape, parts, expert=expert, vocabulary=root.get("vocab_tensor") is True):
            have = " and ".join(str(list(part)) for part in dict.fromkeys(parts))
            msg = f"{source.where} has the shape {list(shape)}, the model states list {have} for {name}"
            raise CorruptCheckpointError(msg, hint=_AGAIN)
    else:
        if not parts:
            msg = f"{source.where} is flat, and no model states file beside it tells the shape of {name}"
            raise IncompleteShardsError(msg, hint="copy the *_model_states.pt files of the folder too")
        if math.prod(parts[0]) != math.prod(shape):
            msg = f"{source.where} has {math.prod(shape)} elements, {name} is {list(parts[0])} in the model states"
            raise CorruptCheckpointError(msg, hint=_AGAIN)
        shape = parts[0]
    rows = ShardTable.of([(Box.whole(shape), source.index, offset)], len(shape))
    return TensorRef(name, F32, shape, rows)


def _fits(whole: Shape, parts: Sequence[Shape], *, expert: object, vocabulary: bool) -> bool:
    """Whether tensor-parallel parts (or a rank's stack of experts) can make up the whole: they differ in one dim."""
    if any(len(part) != len(whole) for part in parts):
        return False
    if expert is not None:
        return whole[:1] == (expert,) and all(part[1:] == whole[1:] for part in parts)
    if all(part == whole for part in parts):
        return True
    for dim, extent in enumerate(whole):
        total = sum(part[dim] for part in parts)
        others = all((*part[:dim], *part[dim + 1 :]) == (*whole[:dim], *whole[dim + 1 :]) for part in parts)
        if others and (total == extent or (vocabulary and dim == 0 and total >= extent)):
            return True
    return False


def _require_all(model: LocalModel, parts: Mapping[str, Sequence[Shape]], files: DeepSpeedFiles) -> None:
    missing = [name for name, shapes in parts.items() if name not in model.tensors and any(map(math.prod, shapes))]
    if missing:
        names = listed(missing, most=3)
        msg = f"{files.tree.label}/zero lacks {len(missing)} parameters that the model states list: {names}"
        raise IncompleteShardsError(msg, hint=_COPY)


def _add_from_module(model: LocalModel, ranks: Sequence[ModelStates], files: DeepSpeedFiles) -> None:
    """Frozen parameters, buffers and aliases of stage 1 and 2, and the weights of the run to compare with."""
    first = ranks[0]
    rules = _rules(ranks, files)
    for name in dict.fromkeys(name for rank in ranks for name in rank.module or ()):
        held = [(rank, (rank.module or {}).get(name)) for rank in ranks]
        refs = [plain_ref(name, tensor, rank.source) for rank, tensor in held if tensor is not None]
        if len(refs) < len(ranks):
            msg = f"{files.tree.label}: {name} is in the model states of {len(refs)} of {len(ranks)} ranks"
            raise CorruptCheckpointError(msg, hint="files of two runs are mixed")
        owner = first.shared.get(name)
        if name in model.tensors:
            twin = refs[0] if rules is None else _joined(rules, name, refs)
            if twin is not None and twin.dtype.kind == "float":
                _add_twin(model, twin, first.source.where)
        elif owner in model.tensors:
            model.tensors[name] = model.tensors[owner]
        else:
            model.tensors[name] = widened(refs[0] if rules is None else rules.join(name, refs))
            if name not in first.buffers:
                model.frozen.add(name)


def _rules(ranks: Sequence[ModelStates], files: DeepSpeedFiles) -> TensorParallelRules | None:
    return TensorParallelRules(ranks[0].state, len(ranks), files.tree.label) if len(ranks) > 1 else None


def _joined(rules: TensorParallelRules, name: str, refs: Sequence[TensorRef]) -> TensorRef | None:
    """The parts as one tensor to compare with; None where no rule joins them (the converter has had one)."""
    try:
        return rules.join(name, refs)
    except UnsupportedError:
        return None


def _add_twin(model: LocalModel, twin: TensorRef, where: str) -> None:
    whole = model.tensors[twin.name]
    if whole.shape != twin.shape:
        two = f"{list(twin.shape)} in {where}, {list(whole.shape)} after the conversion"
        raise CorruptCheckpointError(f"{twin.name} is {two}", hint=_AGAIN)
    model.twins[twin.name] = twin


def _add_from_stage3(model: LocalModel, ranks: Sequence[Sequence[ModelStates]], files: DeepSpeedFiles) -> None:
    """Frozen parameters, buffers and aliases, from the files of each tensor-parallel rank."""
    first = ranks[0][0]
    rules = _rules([states[0] for states in ranks], files)
    for name in first.frozen_shapes:
        parts = [widened(frozen_of(name, states[0].frozen_shapes.get(name, ()), states)) for states in ranks]
        model.tensors.setdefault(name, parts[0] if rules is None else rules.join(name, parts))
        model.frozen.add(name)
    for name, tensor in (first.module or {}).items():
        owner = first.shared.get(name) or router_of(first, name)
        if name in model.tensors:
            continue
        if owner in model.tensors:
            model.tensors[name] = model.tensors[owner]
        elif name in first.buffers or math.prod(tensor.shape) > 0:
            held = [(states[0], (states[0].module or {}).get(name, tensor)) for states in ranks]
            parts = [widened(plain_ref(name, view, rank.source)) for rank, view in held]
            model.tensors[name] = parts[0] if rules is None else rules.join(name, parts)
        else:
            msg = f"{first.source.where}: {name} is nowhere on disk"
            raise IncompleteShardsError(msg, hint="the optimizer did not have it, and ZeRO stage 3 saves no others")
