"""From the parts of all model-parallel ranks to one model: tensor parallelism, pipeline stages, experts.

MM of `mp_rank_MM` is pp_stage * tp_degree + tp_rank (verified by the names in `param_shapes`; DeepSpeed 0.14.4 to
0.19.8). A pipeline keeps its 16-bit weights in layer files and names masters `<layer>.<name>`; a tied layer stands
in every stage that uses it, as `tied_modules.<key>.<name>`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from merge_stream.errors import CorruptCheckpointError, IncompleteShardsError, UnsupportedError
from merge_stream.formats._catalog import FileTable, listed
from merge_stream.formats._deepspeed_experts import (
    fuse_autoep,
    lay_experts,
    read_experts,
    require_no_experts,
)
from merge_stream.formats._deepspeed_files import DeepSpeedFiles
from merge_stream.formats._deepspeed_local import LocalModel
from merge_stream.formats._deepspeed_pipeline import add_sliced_masters, lay_under, read_layers, require_layers
from merge_stream.formats._deepspeed_tensor_parallel import TensorParallelRules
from merge_stream.options import OpenOptions
from merge_stream.tensors.ref import TensorRef

__all__ = ["degrees", "join_local_models"]


def join_local_models(
    models: Mapping[int, LocalModel], files: DeepSpeedFiles, table: FileTable, options: OpenOptions
) -> LocalModel:
    """One model of the parts of all model-parallel ranks."""
    pipeline, tensor = degrees(models, files)
    layers = read_layers(files, table)
    if layers and sorted(layers) != list(range(tensor)):
        msg = f"{files.tree.label} has layer files of tensor-parallel ranks {sorted(layers)}, wanted {tensor} ranks"
        raise IncompleteShardsError(msg, hint="copy all layer_* files here")
    require_layers(models, layers, files)
    metadata = sum(model.metadata_nbytes for model in (*models.values(), *layers.values()))
    stages: list[LocalModel] = []
    for stage in range(pipeline):
        parts = [models[stage * tensor + rank] for rank in range(tensor)]
        for rank, part in enumerate(parts):
            if layers:
                add_sliced_masters(part, layers[rank])
        stages.append(_join_ranks(parts, files))
    whole = stages[0] if pipeline == 1 else _join_stages(stages, files)
    if layers:
        states = models[0].states
        for held in layers.values():
            held.states = states
        held = _join_ranks([layers[rank] for rank in range(tensor)], files)
        lay_under(whole, held, module=options.weights == "module", trained=_trained(models))
        whole.is_pipeline = True
    if tensor > 1:
        whole.facts["tensor-parallel ranks"] = tensor
    if pipeline > 1:
        whole.facts["pipeline stages"] = pipeline
    if files.experts:
        if pipeline > 1:
            msg = f"{files.tree.label} has experts and {pipeline} pipeline stages, which number their layers anew"
            raise UnsupportedError(msg, hint="gather the model in the training script")
        experts = read_experts(models, files, table, options)
        metadata += sum(one.metadata_nbytes for one in experts)
        lay_experts(whole, _join_ranks(experts, files), files)
    else:
        require_no_experts(models, files)
        fuse_autoep(whole, files)  # stage 3 has no expert files
    whole.metadata_nbytes = metadata
    return whole


def degrees(models: Mapping[int, LocalModel], files: DeepSpeedFiles) -> tuple[int, int]:
    """(pipeline stages, tensor-parallel ranks); IncompleteShardsError when ranks are missing."""
    states = models[0].states
    stated = states.state.get("checkpoint_parallel_dimensions") if states else None
    pipeline, tensor = (stated.get("pp_degree"), stated.get("tp_degree")) if isinstance(stated, dict) else (None, None)
    if type(pipeline) is not int or type(tensor) is not int or pipeline < 1 or tensor < 1:
        wanted = (states.number("mp_world_size") if states else None) or 1
        if len(models) % wanted or (len(models) != wanted and not files.layers):
            msg = (
                f"{files.tree.label} has model states of {len(models)} model-parallel ranks, but the run had {wanted} "
                "(mp_world_size)"
            )
            raise IncompleteShardsError(msg, hint="copy all mp_rank_* files here, and no others")
        tensor = max((model for _, model in files.layers), default=0) + 1 if files.layers else len(models)
        if len(models) % tensor:
            msg = f"{files.tree.label}: {len(models)} model-parallel ranks are no multiple of {tensor}"
            raise IncompleteShardsError(msg, hint="copy all mp_rank_* files here")
        pipeline = len(models) // tensor
    if pipeline * tensor != len(models):
        msg = (
            f"{files.tree.label} has model states of {len(models)} model-parallel ranks, but the run had "
            f"{pipeline} x {tensor} (pipeline x tensor)"
        )
        raise IncompleteShardsError(msg, hint="copy all mp_rank_* files here")
    return pipeline, tensor


def _trained(models: Mapping[int, LocalModel]) -> set[str] | None:
    """What the optimizers of all ranks list; None when one has no list."""
    found: set[str] = set()
    for model in models.values():
        if model.states is None or model.states.groups is None:
            return None
        found.update(name for group in model.states.groups for name in group)
    return found


def _join_ranks(parts: Sequence[LocalModel], files: DeepSpeedFiles) -> LocalModel:
    """One stage, from its tensor-parallel ranks."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for rank, part in enumerate(parts):
        other = set(part.tensors) ^ set(first.tensors)
        if other:
            names = listed(sorted(other), most=3)
            msg = f"{files.tree.label}: rank 0 and rank {rank} of tensor parallelism differ in {names}"
            raise CorruptCheckpointError(msg, hint="files of two runs are mixed")
    states = first.states
    rules = TensorParallelRules(states.state if states else {}, len(parts), files.tree.label)
    joined = LocalModel(frozen=first.frozen, states=states, facts=first.facts, ignored=first.ignored, notes=first.notes)
    joined.frozen_known = all(part.frozen_known for part in parts)
    for name in first.tensors:
        joined.tensors[name] = rules.join(name, [part.tensors[name] for part in parts])
        if all(name in part.twins for part in parts):
            joined.twins[name] = rules.join(name, [part.twins[name] for part in parts])
    return joined


def _join_stages(stages: Sequence[LocalModel], files: DeepSpeedFiles) -> LocalModel:
    """All stages; what stands in several (tied layers) must have one shape, and the first one counts."""
    whole = stages[0]
    owner: dict[str, TensorRef] = dict(whole.tensors)
    for stage, model in enumerate(stages[1:], 1):
        for name, tensor in model.tensors.items():
            known = owner.setdefault(name, tensor)
            if known is tensor:
                whole.tensors[name] = tensor
                if name in model.twins:
                    whole.twins[name] = model.twins[name]
            elif known.shape != tensor.shape or known.dtype != tensor.dtype:
                msg = (
                    f"{files.tree.label}: {name} is {known.dtype} {list(known.shape)} in an earlier pipeline stage, "
                    f"{tensor.dtype} {list(tensor.shape)} in stage {stage}"
                )
                raise CorruptCheckpointError(msg, hint="files of two runs are mixed")
            else:
                copies = tensor.shards
                whole.tensors[name] = TensorRef(name, known.dtype, known.shape, known.shards, copies, known.stored)
        whole.frozen |= model.frozen
        whole.frozen_known &= model.frozen_known
        whole.notes += [note for note in model.notes if note not in whole.notes]
    return whole
