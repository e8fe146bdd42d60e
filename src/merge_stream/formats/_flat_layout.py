"""Metadata of flat parameters: which parameters lie end to end under one stored key, read from either library.

fairscale 0.4.13, `FullyShardedDataParallel.local_metadata_dict()`, a value of each rank's own:

    {"param_metadata": [{"fsdp_path": "decoder.layers.0", "no_broadcast_optim_state": False,
                         "params": {"flat_param_0": {"names": [...], "shapes": [...], "numels": [...], "padding": 2}},
                         "shared_param_info": [(name, further name), ...]}, ...],
     "buffer_names": [...]}

torch_xla (source of April 2026), `XlaFullyShardedDataParallel.get_shard_metadata()`:

    {"shard_info":   {unit: {stored name: {"_orig_name": ..., "_orig_size": ...}}},
     "flatten_info": {flat parameter: ([names], [shapes], [numels])},
     "buffer_info":  {name: {"_orig_dtype": ...}}, "world_size": 2, "rank": 0}

A pair of `shared_param_info` has the last words of its names swapped (fairscale 0.4.13 takes the module of one and
the word of the other), which only shows where they differ; and its names are relative to the unit. Both are put
right here. torch_xla, and fairscale's units that do not flatten, record no ties: the further name is lost there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from merge_stream.containers.pickle_reader import described, dotted_name
from merge_stream.errors import CorruptCheckpointError

__all__ = ["FlatLayout", "FlatParam", "Slot", "is_metadata", "read_layout"]

_HINT = "the file is damaged, or the metadata is of another version of the library: please report it"
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_fpw_module"})
_SHARD = "_fsdp_shard"
_FAIRSCALE_KEYS = {"param_metadata", "buffer_names"}
_XLA_KEYS = {"shard_info", "flatten_info", "world_size", "rank"}


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter inside a flat one: elements [start, stop) of it, row-major."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class FlatParam:
    """What the ranks share out under one stored key: `size` elements without padding, filled by `slots` in order."""

    slots: tuple[Slot, ...]
    size: int


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """One rank's metadata.

    params    stored key -> what lies there; the same on all ranks, and so are `buffers` and `ties`
    buffers   stored keys that every rank holds whole, or None where all other keys are (torch_xla)
    ties      further name -> name of the parameter that it is
    padding   stored key -> elements of this rank's shard that are padding (fairscale; torch_xla does not say)
    narrowed  stored keys of buffers that the trainer had cast when it saved them -> their own dtype
    rank, world_size  as stated (torch_xla), or None
    """

    library: str
    params: Mapping[str, FlatParam]
    buffers: frozenset[str] | None
    ties: Mapping[str, str]
    padding: Mapping[str, int] = field(default_factory=dict)
    narrowed: Mapping[str, str] = field(default_factory=dict)
    rank: int | None = None
    world_size: int | None = None


def is_metadata(value: object) -> bool:
    """Whether a value of the file's root is such metadata, by its keys."""
    return isinstance(value, dict) and (value.keys() >= _FAIRSCALE_KEYS or value.keys() >= _XLA_KEYS)


def read_layout(value: Mapping[str, Any], where: str) -> FlatLayout:
    """The layout that the metadata tells; CorruptCheckpointError when it contradicts itself."""
    try:
        return _fairscale(value, where) if value.keys() >= _FAIRSCALE_KEYS else _xla(value, where)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        msg = f"{where}: the shard metadata is malformed ({type(error).__name__}: {str(error)[:100]})"
        raise CorruptCheckpointError(msg, hint=_HINT) from error


def _fairscale(value: Mapping[str, Any], where: str) -> FlatLayout:
    params: dict[str, FlatParam] = {}
    padding: dict[str, int] = {}
    units: list[tuple[str, Any]] = []
    for unit in value["param_metadata"]:
        path = _text(unit["fsdp_path"])
        for name, content in unit["params"].items():
            key = _joined(path, _text(name))
            if key in params:
                _corrupt(f"{where}: the shard metadata has two flat parameters {key!r}")
            names = [_joined(path, _text(inner)) for inner in content["names"]]
            params[key] = _flat_param(key, names, content["shapes"], content["numels"], where)
            padding[key] = _whole(content["padding"])
        units.append((path, unit["shared_param_info"]))
    known = _all_names(params, where)
    ties: dict[str, str] = {}
    for path, pairs in units:
        for source, further in pairs:
            first, second = _tie(path, _text(source), _text(further), known, where)
            if ties.setdefault(second, first) != first or second in known:
                _corrupt(f"{where}: the shard metadata ties {second!r} to {first!r}, but it is something else already")
    buffers = frozenset(_text(name) for name in value["buffer_names"])
    return FlatLayout("fairscale", params, buffers, ties, padding)


def _tie(path: str, source: str, further: str, known: frozenset[str], where: str) -> tuple[str, str]:
    """(name, further name) of a pair, with the last words of the two in their own places."""
    above_one, _, last_one = source.rpartition(".")
    above_two, _, last_two = further.rpartition(".")
    first = _joined(path, _joined(above_one, last_two))
    if first not in known:
        _corrupt(f"{where}: the shard metadata ties {further!r} to {first!r}, which no flat parameter holds")
    return first, _joined(path, _joined(above_two, last_one))


def _xla(value: Mapping[str, Any], where: str) -> FlatLayout:
    params: dict[str, FlatParam] = {}
    flat = dict(value["flatten_info"])
    for unit, stored in value["shard_info"].items():
        for name, content in stored.items():
            key = _joined(_text(unit), _text(name))
            own = _joined(unit, _text(content["_orig_name"]))
            shape = _shape(content["_orig_size"])
            if own in flat:
                names, shapes, numels = flat.pop(own)
                above = own.rpartition(".")[0]
                inner = [_unwrapped(_joined(above, _text(each))) for each in names]
                param = _flat_param(key, inner, shapes, numels, where)
                if math.prod(shape) != param.size:
                    _corrupt(
                        f"{where}: the parameters of {own!r} have {param.size} elements together, but its size is "
                        f"{list(shape)}"
                    )
            elif own.rpartition(".")[2].startswith("flat_param_"):
                _corrupt(f"{where}: the shard metadata does not say what is in {own!r}")
            else:
                param = _flat_param(key, [_unwrapped(own)], [shape], [math.prod(shape)], where)
            params[key] = param
    if flat:
        _corrupt(f"{where}: the shard metadata says what is in {next(iter(flat))!r}, but not who holds it")
    _all_names(params, where)
    narrowed = {
        _text(name).replace("_fpw_module.", ""): dotted_name(content["_orig_dtype"]).removeprefix("torch.")
        for name, content in value.get("buffer_info", {}).items()
    }
    rank, world = _whole(value["rank"]), _whole(value["world_size"])
    if rank >= world:
        _corrupt(f"{where}: the shard metadata says rank {rank} of {world}")
    return FlatLayout("torch_xla", params, None, {}, {}, narrowed, rank, world)


def _flat_param(key: str, names: list[str], shapes: Any, numels: Any, where: str) -> FlatParam:  # noqa: ANN401
    slots: list[Slot] = []
    at = 0
    for name, stated, numel in zip(names, shapes, numels, strict=True):
        shape = _shape(stated)
        if math.prod(shape) != numel:
            _corrupt(f"{where}: {name!r} in {key!r} has the shape {list(shape)}, but {described(numel)} elements")
        slots.append(Slot(name, shape, at, at + numel))
        at += numel
    return FlatParam(tuple(slots), at)


def _all_names(params: Mapping[str, FlatParam], where: str) -> frozenset[str]:
    known: set[str] = set()
    for param in params.values():
        for slot in param.slots:
            if slot.name in known:
                _corrupt(f"{where}: the shard metadata has the parameter {slot.name!r} twice")
            known.add(slot.name)
    return frozenset(known)


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _text(value: object) -> str:
    if type(value) is not str:
        raise TypeError(f"{described(value)} instead of a name")
    return value


def _whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{described(value)} instead of a count")
    return value


def _shape(value: object) -> tuple[int, ...]:
    return tuple(_counts(value))


def _counts(value: object) -> Iterator[int]:
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"{described(value)} instead of a shape")
    return (_whole(each) for each in value)


def _corrupt(msg: str) -> NoReturn:
    raise CorruptCheckpointError(msg, hint=_HINT)
