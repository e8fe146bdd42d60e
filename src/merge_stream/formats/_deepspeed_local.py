"""The part of the model that each model-parallel rank of a DeepSpeed run holds.

    stage 0..2   everything stands in `module` (16-bit, or fp32); masters are laid over it
    stage 3      masters, frozen fragments, buffers; `module` holds placeholders of no elements

Every parameter must be somewhere: a placeholder that nothing fills is refused by name (stage 3 does not save
what was trained without the optimizer). Facts as in `_deepspeed_states`; stage 1 lists no frozen parameters, and
0.19 lists empty parameters among the frozen ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from merge_stream.containers.torch_tensor import PlainTensor
from merge_stream.errors import CorruptCheckpointError, IncompleteShardsError, UnsupportedError
from merge_stream.formats._catalog import FileTable, listed
from merge_stream.formats._deepspeed_files import DeepSpeedFiles, missing_text
from merge_stream.formats._deepspeed_saves import (
    COPY,
    require_ranks,
    require_same_save,
    require_same_step,
    require_stage,
)
from merge_stream.formats._deepspeed_states import (
    ModelStates,
    OptimStates,
    Shape,
    StatesFile,
    read_model_states,
    read_optim_states,
)
from merge_stream.formats._rank_files import ranks_text
from merge_stream.formats._zero3_experts import is_expert, router_of, stage3_masters_of_all
from merge_stream.formats._zero_masters import Masters, flat_masters, sliced_masters, stage3_parts
from merge_stream.formats._zero_stage0 import moment_shapes, unpartitioned_masters
from merge_stream.options import OpenOptions
from merge_stream.tensors.box import Box
from merge_stream.tensors.dtype import F32, DType
from merge_stream.tensors.ref import ShardTable, TensorRef

__all__ = ["LocalModel", "frozen_of", "plain_ref", "read_local_models", "widened"]

_MODULE = "--weights module writes the 16-bit weights of the model states alone"


@dataclass(slots=True, eq=False)
class LocalModel:
    """Named tensors of one model-parallel rank (later: of the whole model).

    twins    the trainer's own copies of masters, by name: 16-bit, or the same in an fp32 run
    frozen   names that were not trained; `frozen_known` is false where no file tells
    states   the model states it came from, for what belongs to parallelism
    is_pipeline  names begin with the number of a layer
    """

    tensors: dict[str, TensorRef] = field(default_factory=dict)
    twins: dict[str, TensorRef] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    frozen_known: bool = True
    states: ModelStates | None = None
    optim: list[OptimStates] = field(default_factory=list)
    facts: dict[str, str | int] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    metadata_nbytes: int = 0
    is_pipeline: bool = False


def read_local_models(files: DeepSpeedFiles, table: FileTable, options: OpenOptions) -> dict[int, LocalModel]:
    """The local model of every model-parallel rank that has a file."""
    ranks = files.mp_ranks
    if not ranks:
        kind = "optimizer states" if files.optim else "layer files"
        msg = f"{files.tree.label} holds {kind}, but no *_model_states.pt of a rank, which has the names and shapes"
        raise IncompleteShardsError(msg, hint=COPY)
    others = {*(rank.mp for rank in files.optim), *(mp for _, _, mp in files.experts), *ranks}
    if missing := missing_text(ranks, max(others) + 1):
        msg = f"{files.tree.label} has model states of model-parallel ranks {ranks_text(ranks)}, not of {missing}"
        raise IncompleteShardsError(msg, hint=COPY)
    models: dict[int, LocalModel] = {}
    for mp in ranks:
        first = models[0].states if models else None  # the global rank 0 alone writes which parameters are shared
        models[mp] = _read(files, table, options, mp, first.shared if first else {})
    require_same_save([model.states for model in models.values() if model.states is not None])
    require_same_step(model.optim for model in models.values())
    return models


def _read(
    files: DeepSpeedFiles, table: FileTable, options: OpenOptions, mp: int, shared: Mapping[str, str]
) -> LocalModel:
    tree = files.tree
    optim: dict[int, OptimStates] = {}
    if options.weights != "module":
        for rank, name in sorted(files.optim.items()):
            if rank.mp == mp and (held := read_optim_states(tree, name, table.index(name))) is not None:
                optim[rank.dp] = held
    zero3 = {rank.dp: name for rank, name in sorted(files.zero3.items()) if rank.mp == mp}
    if zero3:
        states3 = [read_model_states(tree, name, table.index(name)) for name in zero3.values()]
        states3[0].shared = {**shared, **states3[0].shared}
        model = _stage3(files, mp, zero3, states3, optim, options)
        read: list[StatesFile] = [s.source for s in states3]
    else:
        name = files.module[mp]
        states = read_model_states(tree, name, table.index(name))
        model = _module_first(files, mp, states, optim, options)
        read = [states.source]
    read += [rank.source for rank in optim.values()]
    if model.states is not None and model.states.module is not None:
        lost = sorted(b for b in model.states.buffers if b not in model.states.module and not is_expert(b))
        if lost:
            model.notes.append(f"buffers that the checkpoint names and does not hold: {listed(lost, most=3)}")
    model.metadata_nbytes = sum(source.file.metadata_nbytes for source in read)
    model.optim = [optim[dp] for dp in sorted(optim)]
    return model


def plain_ref(name: str, tensor: PlainTensor, source: StatesFile) -> TensorRef:
    """A tensor that stands whole in one file, in its own type."""
    rows = ShardTable.of([(Box.whole(tensor.shape), source.index, source.at(tensor, name))], len(tensor.shape))
    return TensorRef(name, tensor.dtype, tensor.shape, rows)


def widened(tensor: TensorRef) -> TensorRef:
    """The same tensor as fp32 when it is of a narrower floating type."""
    if not _is_narrow(tensor.dtype):
        return tensor
    return TensorRef(tensor.name, F32, tensor.shape, tensor.shards, tensor.replicas, tensor.dtype)


def _is_narrow(dtype: DType) -> bool:
    return dtype.kind == "float" and dtype.itemsize < F32.itemsize


# ------------------------------------------------------------------------------------------- stage 0, 1, 2


def _module_first(
    files: DeepSpeedFiles, mp: int, states: ModelStates, optim: Mapping[int, OptimStates], options: OpenOptions
) -> LocalModel:
    """`module`, with the masters laid over it."""
    model = LocalModel(states=states)
    module = states.module or {}
    refs = {name: plain_ref(name, tensor, states.source) for name, tensor in module.items()}
    model.ignored["Python value"] += states.other
    model.facts = _facts(states, optim)
    model.frozen = set(states.frozen_shapes)
    if options.weights == "module":
        model.tensors = refs
        model.facts["weights"] = "module"
        _require_listed(refs, states)
        _mark_frozen(model, states)
        return model
    masters = _masters(files, mp, states, optim)
    if masters is None:
        _mark_frozen(model, states)
        if any(_is_narrow(ref.dtype) for ref in refs.values()):
            model.notes.append("the checkpoint holds no fp32 masters: its 16-bit weights are merged as they are")
        model.tensors = refs
        return model
    model.facts["weights"] = _masters_text(optim)
    for alias, owner in _aliases(states).items():
        if owner in masters:
            masters.setdefault(alias, replace(masters[owner], name=alias))
    if states.module is not None:
        _require_shapes(masters, refs, states.source.where)
    trained = set(masters)
    for name, ref in refs.items():
        if name in masters:
            model.tensors[name] = masters.pop(name)
            if ref.dtype == F32 or _is_narrow(ref.dtype):
                model.twins[name] = ref
        else:
            model.tensors[name] = widened(ref)
    model.tensors |= masters
    model.frozen |= {name for name in refs if name not in trained and name not in states.buffers}
    return model


def _require_listed(refs: Mapping[str, TensorRef], states: ModelStates) -> None:
    """What the optimizer trains is in `module` too, in the same shape; experts and layers have files of their own."""
    for group in states.groups or () if states.module is not None else ():
        for name, shape in group.items():
            ref = refs.get(name)
            if ref is None and is_expert(name):
                continue
            if ref is None or ref.shape != shape:
                what = f"has no {name}" if ref is None else f"has {name} {list(ref.shape)}"
                msg = f"{states.source.where} {what} in `module`, the optimizer lists it as {list(shape)}"
                raise CorruptCheckpointError(
                    msg, hint="the file is damaged, or of two runs; leave --weights module out"
                )


def _mark_frozen(model: LocalModel, states: ModelStates) -> None:
    """What is frozen where no masters tell: the names that the optimizer's list lacks.

    Without that list (no ZeRO) an optimizer that has as many moments as there are weights trains all of them.
    """
    module = states.module or {}
    weights = {name: tensor for name, tensor in module.items() if name not in states.buffers}
    if states.groups is None:
        once = {(tensor.storage, tensor.offset, tensor.shape) for tensor in weights.values()}
        model.frozen_known = not weights or len(moment_shapes(states)) == len(once)
        return
    listed_names = {name for group in states.groups for name in group}
    trained = {*listed_names, *(alias for alias, owner in _aliases(states).items() if owner in listed_names)}
    model.frozen |= set(weights) - trained


def _masters(files: DeepSpeedFiles, mp: int, states: ModelStates, optim: Mapping[int, OptimStates]) -> Masters | None:
    """Masters by name; None when this stage keeps none."""
    if not optim:
        if states.stage in {1, 2} or any(rank.mp == mp for rank in files.optim):
            msg = f"{files.tree.label} has no optimizer states of model-parallel rank {mp}, which hold the fp32 masters"
            raise IncompleteShardsError(msg, hint=f"{COPY}; {_MODULE}")
        return unpartitioned_masters(states)
    groups = max(len(rank.flats) for rank in optim.values())
    require_stage(optim, states, stage3=False)
    require_ranks(files, mp, optim)
    ranks = [optim[dp] for dp in sorted(optim)]
    if states.groups is not None and len(states.groups) != groups:
        msg = (
            f"{states.source.where} lists the parameters of {len(states.groups)} groups, "
            f"{ranks[0].source.where} has the masters of {groups}"
        )
        raise CorruptCheckpointError(msg, hint="files of two runs are mixed: copy all files of one save again")
    masters: Masters = {}
    for group in range(groups):
        if _is_expert_group(ranks[0], group):
            continue  # `_deepspeed_experts`
        if states.groups is not None:
            masters |= flat_masters(group, states.groups[group], ranks)
        else:
            shapes = {name: tensor.shape for name, tensor in (states.module or {}).items()}
            if states.module is None:
                return masters  # a pipeline: `_deepspeed_pipeline` has the shapes
            masters |= sliced_masters(group, shapes, ranks)
    return masters


def _is_expert_group(rank: OptimStates, group: int) -> bool:
    return group < len(rank.param_groups) and rank.param_groups[group].get("moe") is True


def _aliases(states: ModelStates) -> dict[str, str]:
    """Alias -> owner: what the file says, and names of one storage (stage 0 and ranks but the first say nothing)."""
    aliases = dict(states.shared)
    owners: dict[tuple[str, int, Shape], str] = {}
    for name, tensor in (states.module or {}).items():
        if math.prod(tensor.shape):
            owner = owners.setdefault((tensor.storage, tensor.offset, tensor.shape), name)
            if owner != name:
                aliases.setdefault(name, owner)
                aliases.setdefault(owner, name)
    return aliases


def _require_shapes(masters: Masters, refs: Mapping[str, TensorRef], where: str) -> None:
    for name, master in masters.items():
        ref = refs.get(name)
        if ref is not None and ref.shape != master.shape:
            two = f"{list(ref.shape)} in `module`, but {list(master.shape)} in the optimizer's list"
            msg = f"{where}: {name} has shape {two}"
            raise CorruptCheckpointError(msg, hint="files of two runs are mixed")


# ------------------------------------------------------------------------------------------- stage 3


def _stage3(  # noqa: PLR0917 - the files of one model-parallel rank
    files: DeepSpeedFiles,
    mp: int,
    names: Mapping[int, str],
    states: Sequence[ModelStates],
    optim: Mapping[int, OptimStates],
    options: OpenOptions,
) -> LocalModel:
    """Masters, frozen fragments and buffers of all ranks."""
    first = states[0]
    if options.weights == "module":
        msg = f"{files.tree.label} is of ZeRO stage 3, whose model states hold no 16-bit weights"
        raise UnsupportedError(
            msg, hint="leave --weights module out and write --dtype bf16, or merge the gathered model file beside it"
        )
    if not optim:
        msg = f"{files.tree.label} has no optimizer states, which hold the weights of ZeRO stage 3"
        raise IncompleteShardsError(msg, hint=COPY)
    require_stage(optim, first, stage3=True)
    require_ranks(files, mp, optim)
    if set(names) != set(optim):
        msg = (
            f"{files.tree.label} has model states of ranks {ranks_text(names)}, optimizer states of {ranks_text(optim)}"
        )
        raise IncompleteShardsError(msg, hint=COPY)
    if first.groups is None:
        msg = f"{first.source.where} lists no parameters (param_shapes is missing)"
        raise CorruptCheckpointError(msg, hint="the save did not finish, or the file is of another kind")
    for other in states[1:]:
        if _in_order(other) != _in_order(first) or other.frozen_shapes != first.frozen_shapes:
            msg = f"{other.source.where} lists other parameters than {first.source.where}"
            raise CorruptCheckpointError(msg, hint="files of two runs are mixed")
    require_same_save(states)
    model = LocalModel(states=first, facts=_facts(first, optim))
    model.facts["weights"] = _masters_text(optim)
    model.ignored["Python value"] += first.other
    model.tensors |= stage3_masters_of_all(states, [optim[dp] for dp in sorted(optim)])
    for name, shape in first.frozen_shapes.items():
        model.tensors.setdefault(name, widened(frozen_of(name, shape, states)))
        model.frozen.add(name)
    _fill_from_module(model, first)
    return model


def _in_order(states: ModelStates) -> list[list[tuple[str, Shape]]]:
    """The lists of parameters; their order is that of the flat tensors, so it must be the same on all ranks."""
    return [list(group.items()) for group in states.groups or ()]


def frozen_of(name: str, shape: Shape, states: Sequence[ModelStates]) -> TensorRef:
    """A frozen parameter from the fragments of all ranks."""
    parts = []
    for rank in states:
        view = rank.frozen.get(name)
        if view is None:
            msg = f"{rank.source.where} holds no fragment of the frozen parameter {name}"
            raise IncompleteShardsError(msg, hint="the save did not finish, or files of two runs are mixed")
        if view.dtype.kind != "float":
            msg = f"{rank.source.where}: the frozen parameter {name} is {view.dtype}, quantized without its scale"
            raise UnsupportedError(
                msg, hint="train without zero_quantized_nontrainable_weights, or use --exclude-frozen"
            )
        parts.append(
            (math.prod(view.shape), rank.source.index, rank.source.at(view, name) if view.shape != (0,) else 0)
        )
    view = states[0].frozen[name]
    if not math.prod(shape):
        return TensorRef(name, view.dtype, shape, ShardTable.of([], len(shape)))
    return TensorRef(name, view.dtype, shape, stage3_parts(name, shape, parts, view.dtype.itemsize))


def _fill_from_module(model: LocalModel, states: ModelStates) -> None:
    """Buffers and aliases; a placeholder that stands for nothing on disk is refused."""
    lost = []
    for name, tensor in (states.module or {}).items():
        if name in model.tensors:
            continue
        owner = states.shared.get(name) or router_of(states, name)
        if owner in model.tensors:
            model.tensors[name] = model.tensors[owner]
        elif name in states.buffers or math.prod(tensor.shape) > 0:
            model.tensors[name] = widened(plain_ref(name, tensor, states.source))
        else:
            lost.append(name)
    if lost:
        msg = (
            f"{states.source.where}: {len(lost)} parameters are nowhere on disk, since the optimizer did not have them "
            f"and ZeRO stage 3 saves no others: {listed(lost, most=4)}"
        )
        raise IncompleteShardsError(
            msg, hint="save again with stage3_gather_16bit_weights_on_model_save, or train them"
        )


# ------------------------------------------------------------------------------------------- facts


def _masters_text(optim: Mapping[int, OptimStates]) -> str:
    dtype = next((rank.dtype for rank in optim.values()), F32)
    return "fp32 masters" if dtype == F32 else f"{dtype} masters, widened to fp32"


def _facts(states: ModelStates, optim: Mapping[int, OptimStates]) -> dict[str, str | int]:
    facts: dict[str, str | int] = {}
    version = states.state.get("ds_version")
    facts["trainer"] = f"DeepSpeed {version}" if isinstance(version, str) else "DeepSpeed"
    stage = states.stage if states.stage is not None else next((o.stage for o in optim.values() if o.stage), None)
    if stage is not None:
        facts["ZeRO stage"] = stage
    if optim:
        facts["data-parallel ranks"] = len(optim)
        facts["optimizer groups"] = max(len(rank.flats) for rank in optim.values())
        steps = sorted({step for rank in optim.values() for step in rank.steps})
        if steps:
            facts["optimizer step"] = ", ".join(map(str, steps[:3]))
    return facts
