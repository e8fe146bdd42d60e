"""Megatron's files of each rank: `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`, verl's `model.pt`.

    files            -> RankFile     coordinates (tensor, pipeline, expert) and one state dict for each virtual stage
    virtual stages   -> layer numbers of the whole model
    parts of a name  -> one tensor: joined over tensor-parallel ranks, experts numbered over expert-parallel ones

`mp_rank_00_001` is a pipeline or an expert rank: the arguments tell, or else whether both files hold the embedding.
A grid of TP x EP need not be full: process r is tensor rank r % TP, and of the experts part r % ETP of expert rank
r // ETP % EP, so with expert tensor parallelism 1 only a diagonal is written.

Facts: megatron-core 0.12 to 0.19 (real files), Megatron-LM's own GPTModel before it (documented nesting;
`_megatron_classic`): layer numbers are local to a virtual stage; stages are walked chunk by chunk, each over all
pipeline ranks. Experts have local numbers. Files of several rounds of saving stand in folders of their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from merge_stream.containers.torch_file import open_torch_file
from merge_stream.containers.torch_tensor import plain_tensor
from merge_stream.errors import CorruptCheckpointError, IncompleteShardsError, UnsupportedError
from merge_stream.formats._catalog import FileTable, listed
from merge_stream.formats._deepspeed_local import plain_ref
from merge_stream.formats._deepspeed_states import StatesFile
from merge_stream.formats._megatron_classic import classic_tensors
from merge_stream.formats._megatron_names import noise_of
from merge_stream.formats._megatron_raw import GATES, Raw, arguments_of, facts_of, vocabulary_of
from merge_stream.formats._megatron_saves import (
    LOCAL_EXPERT,
    Coordinates,
    RankFile,
    local_experts,
    require_one_save,
    require_places,
)
from merge_stream.formats._megatron_tp import TOWER, grouped_stack, has_gates, join_parts, tower_of
from merge_stream.formats._stored_checksums import ZipRecords
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.ref import TensorRef
from merge_stream.tensors.tables import stacked

__all__ = ["read_ranks"]

_FILE = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?/(?:model_optim_rng|model)\.pt")
_MODEL = re.compile(r"model(\d{0,3})")
_LAYER = re.compile(r"(?P<stem>(?:language_model\.)?decoder\.layers)\.(?P<n>\d{1,6})\.(?P<rest>.+)")
_MOST_RANKS = 1 << 20
_FIRST = re.compile(r"(language_model\.)?embedding\.word_embeddings\.weight")
_LAST = re.compile(r"(language_model\.)?decoder\.final_(layernorm|norm)\.weight")
_ORDER = "folders of stages were exchanged, or are of two saves: copy the folders of all ranks again"
_COPY = "copy the folders of all ranks here; if they lie on other nodes, name each node's folder with --input"


def read_ranks(tree: ByteTree, table: FileTable) -> Raw:
    """Every tensor of the model, joined over all ranks."""
    raw = Raw()
    names = {name: match for name in tree.files if (match := _FILE.fullmatch(name))}
    files = [_read(tree, name, table, raw) for name in names]
    _place(files, [match.groups() for match in names.values()], tree)
    arguments = files[0].arguments
    grid = {file.at: file for file in files}
    require_one_save(files, tree)
    _require_grid(grid, arguments, tree)
    require_places(files, tree)
    raw.facts |= facts_of(arguments, files[0].iteration)
    raw.vocabulary = vocabulary_of(arguments)
    raw.facts.setdefault("ranks", len(files))
    if any(file.at[0] for file in files):
        raw.facts[GATES] = {True: "yes", False: "no", None: "assumed"}[has_gates(arguments)]
    raw.metadata_nbytes = sum(file.nbytes for file in files)
    raw.checksums = (ZipRecords(tree, tuple(names)),)
    arguments = {**arguments, TOWER: tower_of(name for file in files for stage in file.stages for name in stage)}
    for name, tensor in _joined(grid, arguments, tree):
        if name in raw.tensors:
            known = raw.tensors[name]
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                two = f"{known.dtype} {list(known.shape)} and {tensor.dtype} {list(tensor.shape)}"
                raise CorruptCheckpointError(f"{tree.label}: {name} is {two}", hint="files of two saves are mixed")
            raw.tensors[name] = TensorRef(name, known.dtype, known.shape, known.shards, tensor.shards, known.stored)
        else:
            raw.tensors[name] = tensor
    return raw


def _read(tree: ByteTree, name: str, table: FileTable, raw: Raw) -> RankFile:
    source = StatesFile(name, table.index(name), open_torch_file(tree, name))
    root = source.file.root
    arguments: Mapping[str, Any] = {}
    iteration: Any = None
    if isinstance(root, list):  # verl, spring of 2025: a state dict for each virtual stage
        states, version = root, 3.0
    elif isinstance(root, dict):
        keys = [key for key in root if isinstance(key, str) and _MODEL.fullmatch(key)]
        keys.sort(key=lambda key: int(key[5:] or 0))
        states, arguments = [root[key] for key in keys], arguments_of(root.get("args"))
        iteration = root.get("iteration")
        stated = root.get("checkpoint_version", 0)
        version = float(stated) if isinstance(stated, (int, float)) else 0.0
    else:
        states, version = [], 0.0
    if not states or not all(isinstance(state, dict) for state in states):
        msg = f"{source.where} holds no state dict of a model"
        raise CorruptCheckpointError(msg, hint="it is no Megatron checkpoint, or of a form that is not known here")
    file = RankFile(name, (0, 0, 0), arguments, iteration, nbytes=source.file.metadata_nbytes)
    file.form = source.file.producer.get("form", "")
    for state in states:
        if isinstance(state.get("language_model"), dict) or "encoder" in state or "transformer" in state:
            file.stages.append(classic_tensors(state, arguments, version, source, raw.ignored))
        else:
            file.stages.append(_plain(state, source, raw))
    return file


def _plain(state: Mapping[Any, Any], source: StatesFile, raw: Raw) -> dict[str, TensorRef]:
    tensors: dict[str, TensorRef] = {}
    for key, value in state.items():
        if not isinstance(key, str) or noise_of(key):
            raw.ignored[noise_of(str(key)) or "Python value"] += 1
            continue
        view = plain_tensor(value, repr(key), source.where)
        if view is None:
            raw.ignored["Python value"] += 1
        else:
            short = key.removeprefix("module.")
            tensors[short] = plain_ref(short, view, source)
    return tensors


# --------------------------------------------------------------------------------------- coordinates


def _place(files: Sequence[RankFile], numbers: Sequence[tuple[Any, ...]], tree: ByteTree) -> None:
    """Coordinates of each file; the second of two numbers is a pipeline or an expert rank."""
    counts = {sum(part is not None for part in parts) for parts in numbers}
    if len(counts) > 1:
        msg = f"{tree.label} holds folders of two kinds: {listed(sorted(file.name for file in files), most=4)}"
        raise CorruptCheckpointError(msg, hint="files of two saves are mixed: remove those of the other one")
    is_expert = counts == {2} and _second_is_expert(files, numbers)
    for file, parts in zip(files, numbers, strict=True):
        tensor, second, third = (int(part or 0) for part in parts)
        file.at = (tensor, 0, second) if is_expert else (tensor, second, third)


def _second_is_expert(files: Sequence[RankFile], numbers: Sequence[tuple[Any, ...]]) -> bool:
    arguments = files[0].arguments
    stages, experts = arguments.get("pipeline_model_parallel_size"), arguments.get("expert_model_parallel_size")
    if type(stages) is int and stages > 1:
        return False
    if type(experts) is int and experts > 1:
        return True
    first = [file for file, parts in zip(files, numbers, strict=True) if int(parts[0]) == int(numbers[0][0])]
    embeddings = [any("word_embeddings" in name for stage in file.stages for name in stage) for file in first]
    return len(first) > 1 and all(embeddings)


def _require_grid(grid: Mapping[Coordinates, RankFile], arguments: Mapping[str, Any], tree: ByteTree) -> None:
    """All ranks are there; the arguments tell how many, else the numbers in the names."""

    def size(key: str, axis: int) -> int:
        stated = arguments.get(key)
        seen = max(at[axis] for at in grid) + 1
        return max(stated, seen) if type(stated) is int and 0 < stated < 1 << 16 else seen

    tensor, stages = size("tensor_model_parallel_size", 0), size("pipeline_model_parallel_size", 1)
    experts = size("expert_model_parallel_size", 2)
    if tensor * stages * experts > _MOST_RANKS:
        msg = f"{tree.label} has {len(grid)} files, and names or arguments tell {tensor} tensor-parallel ranks"
        raise CorruptCheckpointError(f"{msg} x {stages} stages x {experts} expert ranks", hint="no job has as many")
    of_stage, of_expert = {at[:2] for at in grid}, {at[1:] for at in grid}
    missing = [f"tensor {t} pipeline {p}" for t in range(tensor) for p in range(stages) if (t, p) not in of_stage]
    held = sorted({stage for _, stage in of_stage})
    missing += [f"expert {e} pipeline {p}" for e in range(experts) for p in held if (p, e) not in of_expert]
    parts = _expert_parts(arguments, tensor, tree)
    full = {(t, e) for t in range(tensor) for e in range(experts)}
    for stage in range(stages) if not missing else ():
        there = {(at[0], at[2]) for at in grid if at[1] == stage}
        if parts:
            processes = range(math.lcm(tensor, parts * experts))
            least = {(r % tensor, r // parts % experts) for r in processes}
            if not there >= least:
                missing += [f"tensor {t} expert {e} pipeline {stage}" for t, e in sorted(least - there)]
        elif len(there) not in {len(full), max(tensor, experts)}:
            missing.append(f"{len(full) - len(there)} of {tensor} x {experts} tensor and expert ranks")
    if missing:
        msg = f"{tree.label} lacks the files of ranks: {listed(missing, most=4)} (it has {len(grid)} files)"
        raise IncompleteShardsError(msg, hint=_COPY)


def _expert_parts(arguments: Mapping[str, Any], tensor: int, tree: ByteTree) -> int:
    """Over how many tensor-parallel ranks an expert is cut, by the arguments; 0 where they do not tell."""
    parts = arguments.get("expert_tensor_parallel_size")
    if type(parts) is not int or parts < 1:
        return 0
    if tensor % parts:
        msg = (
            f"{tree.label}: experts over {parts} tensor-parallel ranks, everything else over {tensor}: files of several"
        )
        raise UnsupportedError(f"{msg} processes have one name", hint="save with --ckpt-format torch_dist")
    return parts


# --------------------------------------------------------------------------------------- joining


def _joined(
    grid: Mapping[Coordinates, RankFile], arguments: Mapping[str, Any], tree: ByteTree
) -> Iterator[tuple[str, TensorRef]]:
    """Every tensor with its global name, virtual stage by virtual stage."""
    counts = {len(file.stages) for file in grid.values()}
    if len(counts) != 1:
        msg = f"{tree.label}: ranks have {sorted(counts)} virtual stages"
        raise CorruptCheckpointError(msg, hint="files of two saves are mixed")
    first_layer = 0
    first = last = -1  # stages that hold the embedding and the norm behind all layers
    for virtual in range(counts.pop()):
        for stage in range(max(at[1] for at in grid) + 1):
            here = {(at[0], at[2]): file.stages[virtual] for at, file in sorted(grid.items()) if at[1] == stage}
            numbers = {int(m["n"]) for part in here.values() for name in part if (m := _LAYER.fullmatch(name))}
            if numbers != set(range(len(numbers))):
                msg = f"{tree.label}: pipeline stage {stage} holds layers {sorted(numbers)[:8]}, wanted 0 and up"
                raise CorruptCheckpointError(msg, hint="files of two saves are mixed")
            yield from _stage(here, arguments, first_layer, tree)
            if numbers and last >= 0:
                msg = f"pipeline stage {last} holds the last norm, and stage {stage} holds layers behind it"
                raise CorruptCheckpointError(f"{tree.label}: {msg}", hint=_ORDER)
            if first < 0 and _holds(_FIRST, here):
                first = stage
                if first_layer:
                    msg = f"pipeline stage {stage} holds the embedding, and stages before it hold {first_layer} layers"
                    raise CorruptCheckpointError(f"{tree.label}: {msg}", hint=_ORDER)
            last = stage if _holds(_LAST, here) else last
            first_layer += len(numbers)


def _holds(what: re.Pattern[str], here: Mapping[tuple[int, int], Mapping[str, TensorRef]]) -> bool:
    return any(what.fullmatch(name) for part in here.values() for name in part)


def _stage(
    here: Mapping[tuple[int, int], Mapping[str, TensorRef]],
    arguments: Mapping[str, Any],
    first_layer: int,
    tree: ByteTree,
) -> Iterator[tuple[str, TensorRef]]:
    experts = max(expert for _, expert in here) + 1
    ranks = max(tensor for tensor, _ in here) + 1
    cut = _expert_parts(arguments, ranks, tree) or (ranks if len(here) == experts * ranks else 1)
    shared: dict[str, dict[int, list[TensorRef]]] = {}
    own: dict[str, dict[int, list[TensorRef]]] = {}
    grouped: dict[str, dict[int, dict[int, TensorRef]]] = {}
    for (tensor, expert), part in here.items():
        local = local_experts(part)
        for name, ref in part.items():
            if match := LOCAL_EXPERT.fullmatch(name):
                number = expert * local + int(match["e"] or match["e2"])
                head, tail = match["head"] or match["head2"], match["tail"] or match["tail2"]
                own.setdefault(f"{head}{number}{tail}", {}).setdefault(tensor % cut, []).append(ref)
            elif ".mlp.experts.weight" in name:
                grouped.setdefault(name, {}).setdefault(expert, {})[tensor % cut] = ref
            else:
                shared.setdefault(name, {}).setdefault(tensor, []).append(ref)
    for wanted, found in ((ranks, shared), (cut, own)):
        for name, parts in found.items():
            if set(parts) != set(range(wanted)):
                msg = f"{tree.label}: {name} is in the files of tensor-parallel ranks {sorted(parts)} of {wanted}"
                raise CorruptCheckpointError(msg, hint="files of two saves are mixed")
            yield _global(name, first_layer), _with_copies(name, [parts[k] for k in range(wanted)], arguments, tree)
    for name, by_expert in grouped.items():
        fused = name.replace("experts.weight1", "experts.gate_up_proj").replace("experts.weight2", "experts.down_proj")
        yield _global(fused, first_layer), _grouped(name, by_expert, experts, arguments, tree)


def _with_copies(
    name: str, parts: Sequence[Sequence[TensorRef]], arguments: Mapping[str, Any], tree: ByteTree
) -> TensorRef:
    """The tensor of the first file of each part; what other files hold too are its copies."""
    first, *copies = (
        join_parts(name, [refs[min(k, len(refs) - 1)] for refs in parts], arguments, tree.label)
        for k in range(max(map(len, parts)))
    )
    tables = [first.replicas] if first.replicas is not None else []
    for copy in copies:
        if (copy.dtype, copy.shape) != (first.dtype, first.shape):
            two = f"{first.dtype} {list(first.shape)} and {copy.dtype} {list(copy.shape)}"
            raise CorruptCheckpointError(f"{tree.label}: {name} is {two}", hint="files of two saves are mixed")
        tables.append(copy.shards)
    replicas = stacked(tables, len(first.shape)) if tables else None
    return TensorRef(first.name, first.dtype, first.shape, first.shards, replicas, first.stored)


def _grouped(
    name: str,
    by_expert: Mapping[int, Mapping[int, TensorRef]],
    experts: int,
    arguments: Mapping[str, Any],
    tree: ByteTree,
) -> TensorRef:
    """`weight1`, `weight2` of the old GroupedMLP: [E, h, 2F] and [E, F, h] in memory, whatever the shape says."""
    if set(by_expert) != set(range(experts)) or any(len(parts) != 1 for parts in by_expert.values()):
        msg = f"{tree.label}: {name} is cut over tensor-parallel ranks as well, which is not known for grouped weights"
        raise UnsupportedError(msg, hint="save a distributed checkpoint (--ckpt-format torch_dist)")
    return grouped_stack(name, [by_expert[e][0] for e in range(experts)], arguments, tree.label)


def _global(name: str, first_layer: int) -> str:
    match = _LAYER.fullmatch(name)
    return f"{match['stem']}.{int(match['n']) + first_layer}.{match['rest']}" if match else name
