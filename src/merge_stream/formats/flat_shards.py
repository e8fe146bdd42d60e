"""Flat parameters whose metadata was saved with them: FSDP of fairscale (fairseq, metaseq) and of torch_xla.

    checkpoint_last-shard0.pt ...           {"model": ..., "shard_metadata": ...}, a file for each rank
    rank-0-of-4.pth ...                     the same, of torch_xla

Each rank holds one equal part of many parameters laid end to end, the last ones padded. `_flat_files` finds the
files, `_flat_layout` reads the metadata; here every parameter becomes boxes of the ranks' parts. Which part a rank
holds follows from the sizes alone, and all sizes, paddings and totals must agree with it.

    flat parameter   |  embed.weight   | fc1.weight | fc1.bias |       size elements
    ranks            |   rank 0   |   rank 1   |   rank 2   ::::       part elements each, :::: padding

Refused: a rank that is missing, metadata that differs between ranks, tensor-parallel parts (metaseq's model_part),
experts that only one rank holds, and flat parameters without metadata. Buffers are those of rank 0, as in the
libraries' own consolidation. Values are kept as they are stored.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from merge_stream.containers.torch_file import open_torch_file
from merge_stream.errors import (
    AmbiguousCheckpointError,
    CorruptCheckpointError,
    IncompleteShardsError,
    UnknownFormatError,
    UnsupportedError,
)
from merge_stream.formats._catalog import FileTable, clean_names, config_dirs, listed
from merge_stream.formats._flat_files import FlatSet, flat_sets
from merge_stream.formats._flat_rank import MIXED, FlatRank, open_rank
from merge_stream.formats._flat_tables import FlatTables
from merge_stream.formats._hidden_tensors import note_on_hidden
from merge_stream.formats._rank_files import ranks_text
from merge_stream.formats._roots import naming_of, refuse_flat_parameters
from merge_stream.formats._stored_checksums import ZipRecords
from merge_stream.formats.base import CheckpointFormat, Detection
from merge_stream.options import OpenOptions
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.ref import Catalog

__all__ = ["MEMBER", "FlatShards"]

_EXPERTS = re.compile(r"-rank-\d+-shard\d+\.")
_COPY = "copy the missing files here; if they lie on the disks of other nodes, name each folder with --input"


class FlatShards:
    """Rank files of flat parameters that carry their metadata."""

    name = "flat_shards"
    summary = "flat parameters with shard_metadata: fairscale (fairseq, metaseq) *-shardN.pt, torch_xla rank-N-of-M.pth"

    def detect(self, tree: ByteTree) -> Detection | None:
        """By what one file of each set holds; flat parameters without metadata are recognised to be explained."""
        bare: FlatSet | None = None
        for found in flat_sets(tree):
            if not found.bare:
                return Detection(f"{len(found.files)} files {found.pattern} with shard metadata", rank=60)
            bare = bare or found
        return Detection(f"{len(bare.files)} files {bare.pattern} of flat parameters", rank=6) if bare else None

    def open(self, tree: ByteTree, options: OpenOptions) -> Catalog:
        """Every parameter inside the flat ones, its ties, and the buffers."""
        chosen = _chosen(tree)
        table = FileTable(tree)
        ranks: dict[int, FlatRank] = {}
        places: dict[int, int] = {}
        for number, name in chosen.files.items():
            rank = open_rank(tree, name, number, options.root)
            _require_alike(next(iter(ranks.values()), rank), rank)
            if rank.number in ranks:
                msg = f"{ranks[rank.number].where} and {rank.where} are both of rank {rank.number}"
                hint = "model parallelism with sharding_groups, or two runs in one folder: one folder for each group"
                raise AmbiguousCheckpointError(msg, hint=hint)
            ranks[rank.number], places[rank.number] = rank, table.index(name)
        _require_ranks(tree, chosen, ranks)
        every = [ranks[number] for number in sorted(ranks)]
        tables = FlatTables(every, [places[rank.number] for rank in every])
        tables.fill()
        clean = clean_names(tables.tensors, tree.label)
        tensors = {
            clean[name]: dataclasses.replace(tensor, name=clean[name]) for name, tensor in tables.tensors.items()
        }
        return Catalog(
            format=self.name,
            root=tree.label,
            tensors=tensors,
            files=table.files,
            facts=_facts(every, tables),
            ignored=every[0].ignored,
            notes=(*tables.notes(), *note_on_hidden(hidden for rank in every for hidden in rank.hidden)),
            naming=naming_of(tensors),
            config_dirs=config_dirs(tree),
            metadata_nbytes=sum(rank.metadata_nbytes for rank in every),
            checksums=(ZipRecords(tree, tuple(chosen.files.values())),),
        )


def _chosen(tree: ByteTree) -> FlatSet:
    """The one set of files that is meant."""
    every = list(flat_sets(tree))
    sets = [found for found in every if not found.bare]
    names = [name for found in sets for name in found.files.values()]
    experts = [name for name in names if _EXPERTS.search(name)]
    if experts:
        msg = f"{tree.label} holds experts that only one rank has ({listed(experts, most=2)}), a mixture of fairseq"
        raise UnsupportedError(msg, hint="fairseq numbers them only in the running job: consolidate them with it first")
    if len(sets) > 1:
        msg = f"{tree.label} holds the flat shards of {len(sets)} checkpoints: {listed(s.pattern for s in sets)}"
        hint = (
            "pass one file of the one you mean, such as checkpoint_last-shard0.pt, or put it into a folder of its own"
        )
        raise AmbiguousCheckpointError(msg, hint=hint)
    if sets:
        return sets[0]
    if not every:
        msg = f"{tree.label} holds no torch file with flat parameters and their shard_metadata"
        raise UnknownFormatError(msg, hint='wanted {"model": ..., "shard_metadata": ...} in a file for each rank')
    name = next(iter(every[0].files.values()))
    file = open_torch_file(tree, name)
    refuse_flat_parameters(_strings(file.root), file.where)
    refuse_flat_parameters((k for v in file.root.values() if isinstance(v, dict) for k in _strings(v)), file.where)
    raise UnknownFormatError(f"{file.where} holds no shard_metadata", hint="pass the folder of the rank files")


def _strings(mapping: Mapping[Any, Any]) -> Iterable[str]:
    return [key for key in mapping if isinstance(key, str)]


def _require_alike(first: FlatRank, rank: FlatRank) -> None:
    """The metadata of all ranks says the same."""
    one, two = first.layout, rank.layout
    if one.library != two.library or one.world_size != two.world_size:
        msg = f"{rank.where} is of {two.library}, world size {two.world_size or 'not told'}; {first.where} is not"
        raise CorruptCheckpointError(msg, hint=MIXED)
    for what, a, b in (
        ("flat parameter", one.params, two.params),
        ("tie", one.ties, two.ties),
        ("buffer", dict.fromkeys(one.buffers or ()), dict.fromkeys(two.buffers or ())),
    ):
        if a != b:
            key = next(k for k in (*a, *b) if a.get(k, k) != b.get(k, k) or (k in a) != (k in b))
            msg = f"the shard metadata of {rank.where} and {first.where} differ on the {what} {key!r}"
            raise CorruptCheckpointError(msg, hint=MIXED)
    if first.held.keys() != rank.held.keys():
        key = min(first.held.keys() ^ rank.held.keys())
        msg = f"{key!r} is in only one of {rank.where} and {first.where}"
        raise IncompleteShardsError(msg, hint=MIXED)


def _require_ranks(tree: ByteTree, chosen: FlatSet, ranks: Mapping[int, FlatRank]) -> None:
    """Every rank that the metadata (torch_xla) or the numbers of the files (fairscale) tell of is there."""
    stated = next(iter(ranks.values())).layout.world_size
    world = stated or max(ranks) + 1
    missing = set(range(world)) - set(ranks)
    if missing and not stated and not chosen.counted:
        msg = (
            f"the files {chosen.pattern} in {tree.label} do not tell their ranks: their numbers are {ranks_text(ranks)}"
        )
        hint = "call them NAME-shard0.pt, NAME-shard1.pt ... by rank; files of other checkpoints go elsewhere"
        raise AmbiguousCheckpointError(msg, hint=hint)
    if missing:
        msg = (
            f"{len(missing)} of {world} files {chosen.pattern} are missing in {tree.label}: have ranks "
            f"{ranks_text(ranks)}, missing ranks {ranks_text(missing)}"
        )
        raise IncompleteShardsError(msg, hint=_COPY)


def _facts(every: Sequence[FlatRank], tables: FlatTables) -> dict[str, str | int]:
    first = every[0]
    dtypes = {str(tensor.on_disk) for tensor in tables.tensors.values()}
    return {
        "trainer": f"FSDP of {first.layout.library}",
        "world size": len(every),
        "ranks": ranks_text(rank.number for rank in every),
        "container": first.root or "none",
        "dtypes": ", ".join(sorted(dtypes)),
        "stored as": ", ".join(f"{count} {kind}" for kind, count in tables.kinds.most_common()),
    }


MEMBER: CheckpointFormat = FlatShards()
