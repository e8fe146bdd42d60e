"""What DeepSpeed's state files say, as plain records.

    *_model_states.pt  -> ModelStates    weights, shapes of the optimizer's parameters, frozen parts, aliases
    *_optim_states.pt  -> OptimStates    flat fp32 masters, paddings, steps

Facts (0.14.4, 0.16.9, 0.19.8; runtime/engine.py, zero/stage_1_and_2.py, zero/stage3.py, bf16_optimizer.py):
`param_shapes` is a list (one entry for each optimizer group; for each sub group in stage 3) of dicts
name -> shape, or None without ZeRO; the masters are `single_partition_of_fp32_groups` (stage 1, 2 and
BF16_Optimizer) or `fp32_flat_groups` (stage 3), one 1-D tensor for each group, which are 16-bit under these names
too with `bf16_master_weights_and_grads` or `fp16_master_weights_and_grads`. Everything else in these
dicts, `client_state` included, may be any object and is not looked at.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from merge_stream.containers.pickle_reader import Recorder, dotted_name
from merge_stream.containers.torch_file import TorchFile, open_torch_file
from merge_stream.containers.torch_tensor import PlainTensor, locate, plain_tensor
from merge_stream.errors import CorruptCheckpointError, UnsupportedError
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.dtype import F32, DType

__all__ = [
    "ModelStates",
    "OptimStates",
    "Shape",
    "StatesFile",
    "read_model_states",
    "read_optim_states",
    "tensors_in",
]

Shape = tuple[int, ...]

_MASTERS = {"F32", "BF16", "F16"}
_MOST_DIMS = 64
_DAMAGED = "the file is damaged, or was written by an unknown DeepSpeed: copy it again"


@dataclass(frozen=True, slots=True, eq=False)
class StatesFile:
    """An opened file: `index` among the catalog's files."""

    name: str
    index: int
    file: TorchFile

    @property
    def where(self) -> str:
        """The path, for messages."""
        return self.file.where

    def at(self, view: PlainTensor, name: str) -> int:
        """Byte offset of the view's first element."""
        return locate(view, self.file, name)


@dataclass(slots=True, eq=False)
class ModelStates:
    """One `*_model_states.pt`.

    module      name -> tensor; None where a pipeline keeps its weights in layer files
    groups      name -> shape for each group of the optimizer, or None when the file does not tell
    frozen      name -> fragment of a parameter that is not trained
    shared      alias -> owner
    """

    source: StatesFile
    module: dict[str, PlainTensor] | None
    buffers: frozenset[str] = frozenset()
    groups: list[dict[str, Shape]] | None = None
    frozen_shapes: dict[str, Shape] = field(default_factory=dict)
    frozen: dict[str, PlainTensor] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    state: Mapping[Any, Any] = field(default_factory=dict)
    other: int = 0

    @property
    def config(self) -> Mapping[Any, Any]:
        """DeepSpeed's own configuration, or nothing (MoE up to 0.16.9)."""
        return _mapping(self.state.get("ds_config"))

    @property
    def stage(self) -> int | None:
        """The ZeRO stage that the configuration asks for; None when it is not there."""
        if not self.config:
            return None
        stage = _mapping(self.config.get("zero_optimization")).get("stage", 0)
        return stage if type(stage) is int else 0

    def number(self, key: str) -> int | None:
        """An integer of the state."""
        value = self.state.get(key)
        return value if type(value) is int else None


@dataclass(slots=True, eq=False)
class OptimStates:
    """One `*_optim_states.pt` that holds masters.

    stage       1, 2 or 3; None for BF16_Optimizer, which does not say
    flats       1-D tensor of each group, all of one type
    paddings    elements at the end of each group's partition that were not saved
    partitions  over how many ranks each group is cut
    gaps        zeros after each parameter of each group (`parameter_alignment`)
    slices      name -> (start, numel) within this rank's flat tensor, for each group
    steps       the optimizer's step counts
    """

    source: StatesFile
    stage: int | None
    flats: list[PlainTensor]
    paddings: list[int]
    partitions: list[int]
    gaps: list[list[int]] | None
    slices: list[dict[str, tuple[int, int]]] | None
    steps: frozenset[int]
    param_groups: list[Mapping[Any, Any]]
    state: Mapping[Any, Any]

    @property
    def dtype(self) -> DType:
        """Type of the masters: fp32, or 16-bit with `bf16_master_weights_and_grads` or `fp16_master_...`."""
        return self.flats[0].dtype if self.flats else F32


def read_model_states(tree: ByteTree, name: str, index: int) -> ModelStates:
    """Open a model states file; CorruptCheckpointError when it is none."""
    source = StatesFile(name, index, open_torch_file(tree, name))
    state = source.file.root
    if not isinstance(state, dict) or "module" not in state:
        msg = f"{source.where} holds no `module`: it is no DeepSpeed model states file"
        raise CorruptCheckpointError(msg, hint=_DAMAGED)
    result = ModelStates(source, None, state=state)
    if state["module"] is not None:
        result.module, result.other = tensors_in(state["module"], source)
    result.buffers = frozenset(n for n in _items(state.get("buffer_names")) if isinstance(n, str))
    if state.get("param_shapes") is not None:
        shapes = state["param_shapes"]
        groups = shapes if isinstance(shapes, list) else [shapes]  # a single dict before 0.4
        result.groups = [_shapes(group, source.where) for group in groups]
    result.frozen_shapes = _shapes(state.get("frozen_param_shapes") or {}, source.where)
    result.frozen, _ = tensors_in(state.get("frozen_param_fragments") or {}, source)
    shared = _mapping(state.get("shared_params") or {})
    result.shared = {a: b for a, b in shared.items() if isinstance(a, str) and isinstance(b, str)}
    return result


def tensors_in(values: Any, source: StatesFile) -> tuple[dict[str, PlainTensor], int]:  # noqa: ANN401 - unpickled
    """The tensors of a flat state dict, and how many other values there are."""
    if not isinstance(values, dict):
        msg = f"{source.where} holds a {dotted_name(values)} where a state dict was wanted"
        raise CorruptCheckpointError(msg, hint=_DAMAGED)
    found: dict[str, PlainTensor] = {}
    other = 0
    for name, value in values.items():
        tensor = plain_tensor(value, repr(name), source.where)
        if tensor is not None and isinstance(name, str):
            found[name] = tensor
        elif tensor is not None:
            msg = f"{source.where} holds a tensor under the key {name!r:.60}, wanted a name"
            raise CorruptCheckpointError(msg, hint=_DAMAGED)
        else:
            other += 1
    return found, other


def read_optim_states(tree: ByteTree, name: str, index: int) -> OptimStates | None:
    """Open an optimizer states file; None when it holds no optimizer (MoE up to 0.16.9 writes such)."""
    source = StatesFile(name, index, open_torch_file(tree, name))
    root = source.file.root
    state = root.get("optimizer_state_dict") if isinstance(root, dict) else None
    if state is None and isinstance(root, dict) and root.get("optimizer", 0) is None:
        return None
    if not isinstance(state, dict):
        msg = f"{source.where} holds no `optimizer_state_dict`: it is no DeepSpeed optimizer states file"
        raise CorruptCheckpointError(msg, hint=_DAMAGED)
    key = "fp32_flat_groups" if "fp32_flat_groups" in state else "single_partition_of_fp32_groups"
    if key not in state:
        msg = f"{source.where} holds no fp32 masters (neither fp32_flat_groups nor single_partition_of_fp32_groups)"
        raise UnsupportedError(
            msg, hint="--weights module writes the 16-bit weights of the model states, where they are"
        )
    flats = [_flat(value, source) for value in _items(state[key])]
    if len(kinds := {flat.dtype.name for flat in flats}) > 1:
        msg = f"{source.where}: its flat groups of masters are {' and '.join(sorted(kinds))}, wanted one type"
        raise CorruptCheckpointError(msg, hint=_DAMAGED)
    partitions = state.get("partition_count")
    counts = [partitions] * len(flats) if type(partitions) is int else _ints(partitions)
    base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    stage = state.get("zero_stage")
    if isinstance(stage, Recorder):
        stage = stage.args[0] if len(stage.args) == 1 else None
    if (stage == 3) != (key == "fp32_flat_groups"):
        msg = f"{source.where} has {key}, and says that it is of ZeRO stage {stage!r:.40}"
        raise CorruptCheckpointError(msg, hint=_DAMAGED)
    return OptimStates(
        source,
        stage if type(stage) is int else None,
        flats,
        _ints(state.get("group_paddings")),
        counts,
        _gaps(state.get("param_alignment_paddings")),
        _slices(state.get("param_slice_mappings")),
        _steps(base, tree, source),
        [_mapping(g) for g in _items(_mapping(base).get("param_groups"))],
        state,
    )


def _flat(value: Any, source: StatesFile) -> PlainTensor:  # noqa: ANN401 - unpickled
    flat = plain_tensor(value, "a flat group", source.where)
    if flat is None or len(flat.shape) != 1 or flat.dtype.name not in _MASTERS:
        what = f"{flat.dtype} {list(flat.shape)}" if flat else dotted_name(value)
        msg = f"{source.where}: a flat group of masters is {what}, wanted one dim of F32, BF16 or F16"
        raise CorruptCheckpointError(msg, hint=_DAMAGED)
    return flat


def _shapes(value: Any, where: str) -> dict[str, Shape]:  # noqa: ANN401 - unpickled
    shapes: dict[str, Shape] = {}
    for name, shape in _mapping(value).items():
        if (
            not isinstance(name, str)
            or type(shape) is not tuple
            or len(shape) > _MOST_DIMS
            or any(type(n) is not int or n < 0 for n in shape)
        ):
            msg = f"{where}: the shape of {name!r:.80} is {shape!r:.60}"
            raise CorruptCheckpointError(msg, hint=_DAMAGED)
        shapes[name] = shape
    return shapes


def _gaps(value: Any) -> list[list[int]] | None:  # noqa: ANN401 - unpickled
    if not isinstance(value, list):
        return None
    return [_ints(group) for group in value]


def _slices(value: Any) -> list[dict[str, tuple[int, int]]] | None:  # noqa: ANN401 - unpickled
    """`param_slice_mappings`: an ordered dict of fragment_address(numel, start) for each group."""
    if not isinstance(value, list):
        return None
    groups = []
    for group in value:
        named: dict[str, tuple[int, int]] = {}
        for name, address in _mapping(group).items():
            where = _mapping(address.state) if isinstance(address, Recorder) else {}
            start, numel = where.get("start"), where.get("numel")
            if isinstance(name, str) and type(start) is int and type(numel) is int and start >= 0 and numel >= 0:
                named[name] = (start, numel)
        groups.append(named)
    return groups


def _steps(base: Any, tree: ByteTree, source: StatesFile) -> frozenset[int]:  # noqa: ANN401 - unpickled
    """Step counts of the base optimizer: ints, or 0-d tensors whose few bytes are read."""
    found: set[int] = set()
    states = base if isinstance(base, list) else [base]  # a list with elastic_checkpoint
    for one in states:
        for entry in _mapping(_mapping(one).get("state")).values():
            value = _mapping(entry).get("step")
            if type(value) is int:
                found.add(value)
                continue
            view = plain_tensor(value, "step", source.where)
            if view is not None and view.dtype.name in _SCALARS and view.shape in {(), (1,)}:
                data = tree.read(source.name, source.at(view, "step"), view.dtype.itemsize)
                step = struct.unpack(_SCALARS[view.dtype.name], data)[0]
                if not math.isfinite(step):
                    msg = f"{source.where}: its optimizer is at step {step}, wanted a number"
                    raise CorruptCheckpointError(msg, hint=_DAMAGED)
                found.add(int(step))
    return frozenset(found)


_SCALARS = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}


def _mapping(value: Any) -> Mapping[Any, Any]:  # noqa: ANN401 - unpickled
    return value if isinstance(value, dict) else {}


def _items(value: Any) -> list[Any]:  # noqa: ANN401 - unpickled
    return list(value) if isinstance(value, (list, tuple)) else []


def _ints(value: Any) -> list[int]:  # noqa: ANN401 - unpickled
    return [n if type(n) is int else 0 for n in _items(value)]
