"""Whether Megatron's rank files are those of one save, each in the folder of the process that wrote it.

Every file holds the arguments of its process, among them its number in the job (`args.rank`). In all of Megatron's
orders tensor-parallel ranks are neighbours, so that

    rank % TP          is the tensor-parallel rank
    rank // ETP % EP   is the expert rank; with context parallelism in older cores rank // (TP * CP) % EP
    rank               grows from stage to stage (`tp-cp-ep-dp-pp`, or `tp-cp-ep-pp-dp` with --use-tp-pp-dp-mapping)

Files that all have one number were written by one process, a converter, and tell nothing; nor do files without
arguments (verl, spring of 2025), of which only the first and the last stage are known by what they hold.

Facts: Megatron-LM main of 2026-08 and megatron-core 0.5 to 0.19 (`parallel_state.RankGenerator`, `args.rank` since
2019); real files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from merge_stream.containers.torch_zip import read_raw_directory
from merge_stream.errors import CorruptCheckpointError
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.ref import TensorRef

__all__ = ["LOCAL_EXPERT", "Coordinates", "RankFile", "local_experts", "require_one_save", "require_places"]

LOCAL_EXPERT = re.compile(
    r"(?P<head>.*\.mlp\.experts\.local_experts\.)(?P<e>\d{1,6})(?P<tail>\..+)"
    r"|(?P<head2>.*\.mlp\.experts\.linear_fc[12]\.(?:weight|bias))(?P<e2>\d{1,6})(?P<tail2>)"
)
Coordinates = tuple[int, int, int]
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
_ALIKE = (
    *_SIZES,
    "virtual_pipeline_model_parallel_size",
    "expert_tensor_parallel_size",
    "context_parallel_size",
    "world_size",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "num_experts",
    "padded_vocab_size",
)
"""Arguments that are the same in all processes of a job."""
_AXES = ("tensor-parallel ranks", "pipeline stages", "expert-parallel ranks")
_SAMPLES, _SAMPLE = 16, 4 << 10  # how many parts of two files are compared, bytes of each
_AGAIN = "copy the folders of all ranks again from where they were saved"
_OTHERS = "remove the folders of the other save, or copy those of this one again"


@dataclass(slots=True, eq=False)
class RankFile:
    """One rank: (tensor, pipeline, expert), arguments, iteration, tensors of each virtual stage."""

    name: str
    at: Coordinates
    arguments: Mapping[str, Any]
    iteration: object = None
    stages: list[dict[str, TensorRef]] = field(default_factory=list)
    nbytes: int = 0
    form: str = ""


def local_experts(part: Mapping[str, TensorRef]) -> int:
    """How many experts a rank holds."""
    return max((int(m["e"] or m["e2"]) + 1 for name in part if (m := LOCAL_EXPERT.fullmatch(name))), default=0)


def require_one_save(files: Sequence[RankFile], tree: ByteTree) -> None:
    """CorruptCheckpointError when files are of two saves, or two of them are of one rank."""
    first: dict[Coordinates, RankFile] = {}
    for file in files:
        if first.setdefault(file.at, file) is not file:
            msg = f"{tree.label}: {first[file.at].name} and {file.name} are both of tensor {file.at[0]}"
            raise CorruptCheckpointError(f"{msg} pipeline {file.at[1]} expert {file.at[2]}", hint=_OTHERS)
    _require_alike(files, tree)
    _require_sizes(files, tree)
    _require_own_files(files, tree)


def _require_alike(files: Sequence[RankFile], tree: ByteTree) -> None:
    """One iteration, and the same sizes in the arguments of all."""
    told: dict[str, list[object]] = {"iteration": [file.iteration for file in files]}
    told |= {key: [file.arguments.get(key) for file in files] for key in _ALIKE}
    for key, values in told.items():
        known = Counter(value for value in values if type(value) is int)
        if len(known) < 2:
            continue
        (most, _), (other, _) = known.most_common(2)
        one, two = files[values.index(most)].name, files[values.index(other)].name
        msg = f"{tree.label} holds files of two saves: {key} is {most} in {one} and {other} in {two}"
        count = sum(1 for value in values if value != most)
        raise CorruptCheckpointError(f"{msg} ({count} of {len(files)} files are not {most})", hint=_OTHERS)


def _require_sizes(files: Sequence[RankFile], tree: ByteTree) -> None:
    """No folder of a rank that the arguments do not have."""
    for axis, key in enumerate(_SIZES):
        stated = files[0].arguments.get(key)
        if type(stated) is not int or stated < 1:
            continue
        beyond = [file.name for file in files if file.at[axis] >= stated]
        if beyond:
            msg = f"{tree.label} holds {beyond[0]}, and the trainer's arguments say {stated} {_AXES[axis]}"
            more = f" ({len(beyond)} files are beyond that)" if len(beyond) > 1 else ""
            raise CorruptCheckpointError(msg + more, hint=_OTHERS)


def _require_own_files(files: Sequence[RankFile], tree: ByteTree) -> None:
    """No two ranks with pieces of their own have one and the same file: equal zip directories with their checksums,
    and equal bytes in samples (checksums can be switched off when torch saves).
    """
    seen: dict[tuple[int, bytes], RankFile] = {}
    for file in files:
        if file.form != "zip":
            continue
        size = tree.files[file.name].nbytes
        other = seen.setdefault((size, read_raw_directory(tree, file.name).data), file)
        if other is file or (other.at[:2] == file.at[:2] and not any(map(local_experts, file.stages))):
            continue  # expert ranks of a stage without experts are copies
        places = [size * k // _SAMPLES for k in range(_SAMPLES)]
        if all(
            tree.read(file.name, at, min(_SAMPLE, size - at)) == tree.read(other.name, at, min(_SAMPLE, size - at))
            for at in places
        ):
            msg = f"{tree.label}: {other.name} and {file.name} are the same file, each rank has one of its own"
            raise CorruptCheckpointError(
                msg, hint="one was copied over the other: copy the folders of both ranks again"
            )


# --------------------------------------------------------------------------------------- who wrote a file


def require_places(files: Sequence[RankFile], tree: ByteTree) -> None:
    """CorruptCheckpointError unless each file was written by a process that has the place of its folder."""
    ranks = [file.arguments.get("rank") for file in files]
    writers: dict[int, RankFile] = {}
    twice: list[str] = []
    for rank, file in zip(ranks, files, strict=True):
        if type(rank) is not int or rank < 0:
            return
        if writers.setdefault(rank, file) is not file:
            twice.append(f"{writers[rank].name} and {file.name} were both written by process {rank}")
    if len(writers) < 2:
        return
    if twice:
        raise CorruptCheckpointError(f"{tree.label}: {twice[0]}", hint=_AGAIN)
    found = next(_exchanged(writers), None)
    if found is not None:
        raise CorruptCheckpointError(
            f"{tree.label}: {found}: folders of ranks were exchanged", hint=f"give each its own name, or {_AGAIN}"
        )


def _exchanged(writers: Mapping[int, RankFile]) -> Iterator[str]:
    """What contradicts the numbers of the processes, in words."""
    tensor, experts, parts, context = _sizes_of(next(iter(writers.values())).arguments, writers)
    for rank, file in writers.items():
        if rank % tensor != file.at[0]:
            yield f"{file.name} was written by process {rank}, which was tensor-parallel rank {rank % tensor}"
    ways = [{rank: rank // below % experts for rank in writers} for below in (parts, tensor * context)]
    if not any(all(way[rank] == file.at[2] for rank, file in writers.items()) for way in ways):
        rank, file = next((rank, file) for rank, file in writers.items() if ways[0][rank] != file.at[2])
        yield f"{file.name} was written by process {rank}, which was expert rank {ways[0][rank]}"
    before: dict[tuple[int, int], tuple[int, RankFile]] = {}
    for rank, file in sorted(writers.items(), key=lambda item: item[1].at):
        last, other = before.get((file.at[0], file.at[2]), (-1, file))
        if rank < last:
            yield f"{other.name} was written by process {last}, {file.name} of a later stage by process {rank}"
        before[file.at[0], file.at[2]] = (rank, file)


def _sizes_of(arguments: Mapping[str, Any], writers: Mapping[int, RankFile]) -> tuple[int, int, int, int]:
    """Tensor-parallel and expert-parallel ranks, parts of an expert, context-parallel ranks."""

    def size(key: str, otherwise: int) -> int:
        stated = arguments.get(key)
        return stated if type(stated) is int and stated > 0 else otherwise

    tensor = size("tensor_model_parallel_size", max(file.at[0] for file in writers.values()) + 1)
    experts = size("expert_model_parallel_size", max(file.at[2] for file in writers.values()) + 1)
    return tensor, experts, size("expert_tensor_parallel_size", tensor), size("context_parallel_size", 1)
