"""PyTorch DCP in safetensors form: each rank's part of each output file, without global shapes.

    shard-SSSSS-model-IIIII-of-NNNNN.safetensors     S = rank + 1, I = output file, N output files
        __metadata__  DCP_SHARDING_INFO = {tensor: {"saved_offsets": [...]}}   (JSON in a string)

The size of a tensor is the largest offset + shape over all shards; the planner checks that the
shards tile it. What cannot be seen in the files: a last rank of which nothing is there. What can
be seen is refused here: an output file without any shard, a hole in the rank numbers, a rank that
has one output file and not another although the tensors there are in fewer parts.

Facts (torch 2.13 `HuggingFaceStorageWriter(save_distributed=True)`, transformers 5
`save_pretrained(distributed_checkpoint=True)` before its consolidation): names are those in memory;
empty shards are present, with an offset equal to the size; a rank writes no file for an output file
of which it has no item, which happens with replicas (each is written by one rank only). With
consolidation on, the shards lie in `sharded/` and the finished model above.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from merge_stream.containers.safetensors_file import SafetensorsFile, StoredTensor, read_header
from merge_stream.errors import (
    AmbiguousCheckpointError,
    CorruptCheckpointError,
    IncompleteShardsError,
    UnknownFormatError,
)
from merge_stream.formats._catalog import FileTable, clean_names, config_dirs, listed
from merge_stream.formats._names import noise_kind
from merge_stream.formats.base import CheckpointFormat, Detection
from merge_stream.options import OpenOptions
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.box import Box
from merge_stream.tensors.ref import Catalog, ShardTable, TensorRef
from merge_stream.units import counted

__all__ = ["MEMBER", "DcpSafetensors"]

_SHARD = re.compile(r"shard-(\d{5,})-model-(\d{5,})-of-(\d{5,})\.safetensors")
_COPY = "copy the missing files into the folder, or pass their folder as a further --input"
_LARGEST = 1 << 62


@dataclass(slots=True)
class _Parts:
    """What the shard files say about one tensor."""

    name: str
    first: StoredTensor
    file: str
    shards: list[tuple[Box, int, int]] = field(default_factory=list)
    replicas: list[tuple[Box, int, int]] = field(default_factory=list)
    seen: set[Box] = field(default_factory=set)
    size: tuple[int, ...] = ()


class DcpSafetensors:
    """`shard-*-model-*-of-*.safetensors` of HuggingFaceStorageWriter."""

    name = "dcp_safetensors"
    summary = "PyTorch DCP in safetensors form (shard-*-model-*-of-*.safetensors)"

    def detect(self, tree: ByteTree) -> Detection | None:
        """By file names alone."""
        found = [match for name in tree.files if (match := _SHARD.fullmatch(name))]
        if not found:
            return None
        ranks = len({match[1] for match in found})
        return Detection(
            f"{counted(len(found), 'file')} shard-*-model-*-of-*.safetensors of {counted(ranks, 'rank')}", rank=55
        )

    def open(self, tree: ByteTree, options: OpenOptions) -> Catalog:  # noqa: ARG002  (nothing to override here)
        """Every tensor, with its size found from the shards."""
        names = _shard_files(tree)
        table = FileTable(tree)
        headers = {name: read_header(tree, name) for name in names}
        parts: dict[str, _Parts] = {}
        ignored: Counter[str] = Counter()
        for name, header in headers.items():
            offsets = _saved_offsets(header)
            for stored, tensor in header.tensors.items():
                if kind := noise_kind(stored):
                    ignored[kind] += 1
                    continue
                if stored not in parts:
                    parts[stored] = _Parts(stored, tensor, name, size=(0,) * len(tensor.shape))
                _add(parts[stored], tensor, offsets[stored], name, table.index(name))
        _check_ranks(tree, names, parts)
        clean = clean_names(parts, tree.label)
        tensors = {}
        for stored, part in parts.items():
            ndim = len(part.size)
            replicas = ShardTable.of(part.replicas, ndim) if part.replicas else None
            shards = ShardTable.of(part.shards, ndim)
            tensors[clean[stored]] = TensorRef(clean[stored], part.first.dtype, part.size, shards, replicas)
        ranks = sorted({rank for rank, _ in names.values()})
        return Catalog(
            format=self.name,
            root=tree.label,
            tensors=tensors,
            files=table.files,
            facts={"ranks": len(ranks), "files": len(names)},
            ignored=ignored,
            notes=(
                f"the shards carry no global shapes: sizes are what the {counted(len(ranks), 'rank')} found add up to",
            ),
            config_dirs=config_dirs(tree),
            metadata_nbytes=sum(header.data_start for header in headers.values()),
        )


def _shard_files(tree: ByteTree) -> dict[str, tuple[int, int]]:
    """File name -> (rank, output file) of the one set that is there, by output file and rank."""
    sets: dict[int, list[tuple[int, int, str]]] = {}
    for name in tree.files:
        if match := _SHARD.fullmatch(name):
            sets.setdefault(int(match[3]), []).append((int(match[2]), int(match[1]) - 1, name))
    if not sets:
        raise UnknownFormatError(f"{tree.label} holds no shard-*-model-*-of-*.safetensors", hint="pass their folder")
    if len(sets) > 1:
        first, second = (min(files)[2] for files in list(sets.values())[:2])
        raise AmbiguousCheckpointError(
            f"{tree.label} holds shards of two saves: {first} and {second}",
            hint="one is the rest of an older save: move it out of the folder",
        )
    ((count, files),) = sets.items()
    outputs = {output for output, _, _ in files}
    if missing := [n for n in range(1, count + 1) if n not in outputs]:
        raise IncompleteShardsError(
            f"{tree.label} lacks every shard of {len(missing)} of {count} output files: "
            + listed(f"shard-*-model-{n:05d}-of-{count:05d}.safetensors" for n in missing),
            hint=_COPY,
        )
    return {name: (rank, output) for output, rank, name in sorted(files)}


def _saved_offsets(header: SafetensorsFile) -> dict[str, tuple[int, ...]]:
    """Tensor -> offset of the shard, for every tensor of the file."""
    text = header.metadata.get("DCP_SHARDING_INFO")
    if text is None:
        raise CorruptCheckpointError(
            f"{header.name} has no DCP_SHARDING_INFO in its header, so the place of its shards is unknown",
            hint="the file was rewritten by another tool; use the files as the trainer wrote them",
        )
    try:
        info = json.loads(text)
    except (ValueError, RecursionError):
        info = None
    if not isinstance(info, dict):
        raise CorruptCheckpointError(f"{header.name}: DCP_SHARDING_INFO is no JSON object")
    result = {}
    for name, tensor in header.tensors.items():
        entry = info.get(name)
        offsets = entry.get("saved_offsets") if isinstance(entry, dict) else None
        if (
            not isinstance(offsets, list)
            or len(offsets) != len(tensor.shape)
            or any(type(n) is not int or not 0 <= n < _LARGEST for n in offsets)
        ):
            raise CorruptCheckpointError(
                f"{header.name}: tensor {name!r} of shape {list(tensor.shape)} has saved_offsets {str(offsets)[:200]}"
            )
        result[name] = tuple(offsets)
    return result


def _add(part: _Parts, tensor: StoredTensor, offsets: tuple[int, ...], file: str, index: int) -> None:
    if tensor.dtype is not part.first.dtype or len(tensor.shape) != len(part.first.shape):
        raise CorruptCheckpointError(
            f"tensor {part.name!r} is {tensor.dtype} of {len(tensor.shape)} dims in {file}, "
            f"but {part.first.dtype} of {len(part.first.shape)} dims in {part.file}",
            hint="the files are of two different saves",
        )
    box = Box(offsets, tuple(a + n for a, n in zip(offsets, tensor.shape, strict=True)))
    part.size = tuple(map(max, part.size, box.stop))
    if box.size:
        rows = part.replicas if box in part.seen else part.shards
        rows.append((box, index, tensor.offset))
        part.seen.add(box)


def _check_ranks(tree: ByteTree, names: Mapping[str, tuple[int, int]], parts: Mapping[str, _Parts]) -> None:
    """Refuse what the file names and the numbers of parts show to be missing."""
    every = {rank for rank, _ in names.values()}
    have: dict[int, set[int]] = {}
    for rank, output in names.values():
        have.setdefault(output, set()).add(rank)
    count = max(have)
    most: Counter[int] = Counter()
    incomplete: dict[int, str] = {}
    for name, part in parts.items():
        output = names[part.file][1]
        most[output] = max(most[output], len(part.shards))
        if output not in incomplete and sum(box.size for box, _, _ in part.shards) < Box.whole(part.size).size:
            incomplete[output] = name
    for output, ranks in sorted(have.items()):
        missing = sorted(set(range(max(every) + 1)) - ranks)
        if missing and (output in incomplete or most[output] < max(most.values())):
            files = (f"shard-{rank + 1:05d}-model-{output:05d}-of-{count:05d}.safetensors" for rank in missing)
            what = f"; tensor {incomplete[output]!r} has a hole" if output in incomplete else ""
            raise IncompleteShardsError(f"{tree.label} lacks {listed(files)}{what}", hint=_COPY)


MEMBER: CheckpointFormat = DcpSafetensors()
