"""Universal checkpoints (ds_to_universal): one folder for each parameter.

    TAG_universal/zero/NAME/fp32.pt      {"param": tensor, "cat_dim"?, "vocab_tensor"?} (stage 1, 2; parts joined)
                                         or a bare 1-D tensor (stage 3), whose shape the model states tell
    TAG_universal/*_model_states.pt      copied from the checkpoint: shapes, buffers, frozen parameters

Facts: DeepSpeed 0.16.9 and 0.19.8 (checkpoint/ds_to_universal.py). Frozen parameters are not converted; they
are in the copied model states. A checkpoint of `round_robin_gradients` is converted wrongly by DeepSpeed itself:
there the values contradict the copied 16-bit weights, which the merge finds out.
"""

from __future__ import annotations

import math

from merge_stream.containers.torch_file import open_torch_file
from merge_stream.containers.torch_tensor import plain_tensor
from merge_stream.errors import CorruptCheckpointError, IncompleteShardsError, UnsupportedError
from merge_stream.formats._catalog import FileTable, listed
from merge_stream.formats._deepspeed_files import DeepSpeedFiles
from merge_stream.formats._deepspeed_local import LocalModel, frozen_of, plain_ref, widened
from merge_stream.formats._deepspeed_states import ModelStates, Shape, StatesFile, read_model_states
from merge_stream.options import OpenOptions
from merge_stream.tensors.box import Box
from merge_stream.tensors.dtype import F32
from merge_stream.tensors.ref import ShardTable, TensorRef

__all__ = ["read_universal"]


def read_universal(files: DeepSpeedFiles, table: FileTable, options: OpenOptions) -> LocalModel:
    """Every parameter of a universal checkpoint."""
    if options.weights == "module":
        msg = f"{files.tree.label} is a universal checkpoint, which holds fp32 weights"
        raise UnsupportedError(msg, hint="leave --weights module out; --dtype bf16 writes 16-bit weights")
    tree = files.tree
    names = [*files.module.values(), *files.zero3.values()]
    states = [read_model_states(tree, name, table.index(name)) for name in names]
    shapes = {name: shape for s in states for group in s.groups or () for name, shape in group.items()}
    model = LocalModel(states=states[0] if states else None)
    model.facts["layout"] = "universal"
    model.facts["weights"] = "fp32 masters"
    version = states[0].state.get("ds_version") if states else None
    model.facts["trainer"] = f"DeepSpeed {version}" if isinstance(version, str) else "DeepSpeed"
    for name, path in files.universal.items():
        source = StatesFile(path, table.index(path), open_torch_file(tree, path))
        model.metadata_nbytes += source.file.metadata_nbytes
        model.tensors[name] = _parameter(name, source, shapes.get(name))
    _require_all(model, shapes, files)
    model.is_pipeline = any(state.module is None for state in states)
    if files.zero3:
        _add_from_stage3(model, states)
    else:
        _add_from_module(model, states, several=len(files.module) > 1)
    model.metadata_nbytes += sum(s.source.file.metadata_nbytes for s in states)
    return model


def _parameter(name: str, source: StatesFile, listed_shape: Shape | None) -> TensorRef:
    root = source.file.root
    value = root.get("param") if isinstance(root, dict) else root
    tensor = plain_tensor(value, name, source.where)
    if tensor is None or tensor.dtype != F32:
        msg = f"{source.where} holds no fp32 tensor"
        raise CorruptCheckpointError(msg, hint="convert the checkpoint again with ds_to_universal")
    offset = source.at(tensor, name)
    shape = tensor.shape
    if not isinstance(root, dict):
        if listed_shape is None:
            msg = f"{source.where} is flat, and no model states file beside it tells the shape of {name}"
            raise IncompleteShardsError(msg, hint="copy the *_model_states.pt files of the folder too")
        if math.prod(listed_shape) != math.prod(shape):
            msg = f"{source.where} has {math.prod(shape)} elements, {name} is {list(listed_shape)} in the model states"
            raise CorruptCheckpointError(msg, hint="convert the checkpoint again with ds_to_universal")
        shape = listed_shape
    rows = ShardTable.of([(Box.whole(shape), source.index, offset)], len(shape))
    return TensorRef(name, F32, shape, rows)


def _require_all(model: LocalModel, shapes: dict[str, Shape], files: DeepSpeedFiles) -> None:
    missing = [name for name in shapes if name not in model.tensors and math.prod(shapes[name]) > 0]
    if missing:
        names = listed(missing, most=3)
        msg = f"{files.tree.label}/zero lacks {len(missing)} parameters that the model states list: {names}"
        raise IncompleteShardsError(msg, hint="the conversion did not finish, or a part of the copy is missing")


def _add_from_module(model: LocalModel, states: list[ModelStates], *, several: bool) -> None:
    """Frozen parameters, buffers and aliases of stage 1 and 2, and the 16-bit weights to compare with."""
    for state in states:
        for name, tensor in (state.module or {}).items():
            ref = plain_ref(name, tensor, state.source)
            owner = state.shared.get(name)
            if name in model.tensors:
                if model.tensors[name].shape == ref.shape and ref.dtype != F32 and ref.dtype.kind == "float":
                    model.twins[name] = ref
            elif owner in model.tensors:
                model.tensors[name] = model.tensors[owner]
            elif several:
                msg = f"{state.source.where}: {name} was not converted, and it may be one of several parts"
                raise UnsupportedError(msg, hint="merge the checkpoint that was converted instead")
            else:
                model.tensors[name] = widened(ref)
                if name not in state.buffers:
                    model.frozen.add(name)


def _add_from_stage3(model: LocalModel, states: list[ModelStates]) -> None:
    first = states[0]
    for name, shape in first.frozen_shapes.items():
        model.tensors.setdefault(name, widened(frozen_of(name, shape, states)))
        model.frozen.add(name)
    for name, tensor in (first.module or {}).items():
        owner = first.shared.get(name)
        if name in model.tensors:
            continue
        if owner in model.tensors:
            model.tensors[name] = model.tensors[owner]
        elif name in first.buffers or math.prod(tensor.shape) > 0:
            model.tensors[name] = widened(plain_ref(name, tensor, first.source))
        else:
            msg = f"{first.source.where}: {name} is nowhere on disk"
            raise IncompleteShardsError(msg, hint="the optimizer did not have it, and ZeRO stage 3 saves no others")
