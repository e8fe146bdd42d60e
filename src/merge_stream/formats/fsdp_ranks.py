"""FSDP rank files: one torch.save of the sharded state dict for each rank.

verl (`model_world_size_W_rank_R.pt`, beside them `fsdp_config.json` and `huggingface/`) and
accelerate with use_dcp=False (`pytorch_model_fsdp_0_rankR.bin`). FSDP1, FSDP2, HSDP, tensor and
expert parallelism, any mesh, written by torch 2.1 to 2.13, whatever torch is installed here.

    names -> RankSet      which files (`_rank_files`)
    files -> RankIndex    who holds which box (`_rank_index`, `_device_mesh`, `_placements`, `_sharded_tensor`)
    index -> Catalog      one table for each tensor; copies on other ranks go to `replicas`

Replicas are resolved by placement: the lowest coordinate is read. Only several groups of ranks on
disjoint meshes are compared (`_mesh_groups`).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from merge_stream.containers.pickle_reader import described, dotted_name
from merge_stream.containers.torch_file import TorchFile, open_torch_file
from merge_stream.errors import (
    CorruptCheckpointError,
    IncompleteShardsError,
    UnknownFormatError,
    UsageError,
)
from merge_stream.formats._alike_ranks import AlikeRanks
from merge_stream.formats._catalog import FileTable, clean_names, config_dirs, listed
from merge_stream.formats._hidden_tensors import note_on_hidden
from merge_stream.formats._mesh_groups import GroupResolver
from merge_stream.formats._names import noise_kind
from merge_stream.formats._rank_files import RankSet, choose_rank_set, ranks_text, recognise
from merge_stream.formats._rank_index import Group, RankFile, RankIndex
from merge_stream.formats._roots import naming_of, refuse_flat_parameters, select_model
from merge_stream.formats._stored_checksums import ZipRecords
from merge_stream.formats.base import Detection
from merge_stream.options import OpenOptions
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.box import Box
from merge_stream.tensors.ref import Catalog, ShardTable, TensorRef
from merge_stream.tensors.tables import moved, stacked
from merge_stream.units import counted

__all__ = ["MEMBER", "FsdpRanks"]

_MOST_DEPTH = 8
_MOST_ENTRIES = 1 << 20


class FsdpRanks:
    """Rank files of FSDP trainers."""

    name = "fsdp"
    summary = "FSDP rank files: verl model_world_size_N_rank_R.pt, accelerate pytorch_model_fsdp_0_rankR.bin"

    def detect(self, tree: ByteTree) -> Detection | None:
        """By the names of the rank files."""
        evidence = recognise(tree.files)
        return Detection(evidence, rank=70) if evidence else None

    def open(self, tree: ByteTree, options: OpenOptions) -> Catalog:
        """Index every rank's file."""
        if not recognise(tree.files):
            msg = f"{tree.label} holds no model_world_size_N_rank_R.pt and no pytorch_model_fsdp_0_rankR.bin"
            raise UnknownFormatError(msg, hint="pass the folder that holds the rank files themselves")
        chosen = choose_rank_set(tree)
        index = RankIndex(tree, tp_first=options.tp_first)
        names = _Names(options.root)
        files = FileTable(tree)
        numbers = np.full(max(chosen.files) + 1, -1, dtype=np.int32)
        metadata = 0
        forms: set[str] = set()
        alike = AlikeRanks(tree, index)
        with _no_cycles():
            for rank, name in chosen.files.items():
                numbers[rank] = files.index(name)
                if nbytes := alike.take(rank, name):
                    metadata += nbytes
                    continue
                file = open_torch_file(tree, name)
                source = RankFile(rank, name, file)
                index.add_file(source, names.of(file))
                for key, value in names.odd(file):
                    index.add_hidden(value, key, file.where)
                alike.learn(source)
                metadata += file.metadata_nbytes
                forms.add(file.producer.get("writer", "torch < 2.9"))
        if not index.tensors:
            msg = f"the rank files of {tree.label} hold no tensors"
            raise IncompleteShardsError(msg, hint="the trainer was told to save something else than the model")
        _require_ranks(tree, chosen, index)
        resolver = GroupResolver(tree, chosen.files)
        assembler = _Assembler(resolver, numbers)
        tensors = {name: assembler.tensor(name, groups) for name, groups in index.tensors.items()}
        return Catalog(
            format=self.name,
            root=tree.label,
            tensors=tensors,
            files=files.files,
            facts=_facts(chosen, index, options, forms),
            ignored={**names.ignored, **index.ignored},
            notes=(*chosen.notes, *names.notes, *assembler.notes(), *note_on_hidden(index.hidden)),
            naming=naming_of(tensors),
            config_dirs=config_dirs(tree),
            metadata_nbytes=metadata + resolver.compared_nbytes,
            checksums=(ZipRecords(tree, tuple(chosen.files.values())),),
        )


@contextlib.contextmanager
def _no_cycles() -> Iterator[None]:
    """Without the cycle collector: it would walk all recorders again and again (a fifth of the time) for nothing."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class _Names:
    """Which values of a state dict are the model's, and their clean names; the same for all ranks."""

    def __init__(self, root: str | None) -> None:
        self.ignored: dict[str, int] = {}
        self.notes: tuple[str, ...] = ()
        self._root = root
        self._keys: tuple[Any, ...] = ()
        self._clean: dict[str, str] = {}
        self._odd: list[Any] = []
        self._first = True

    def of(self, file: TorchFile) -> Iterator[tuple[str, Any]]:
        """(clean name, value) of the model's entries."""
        values = file.root
        if not isinstance(values, dict):
            msg = f"{file.where} holds a {dotted_name(values)}, wanted a state dict"
            raise CorruptCheckpointError(msg, hint="this is no rank file of a model")
        if self._root is not None or any(isinstance(value, dict) for value in values.values()):
            return self._nested(file, values)
        keys = tuple(values)
        if keys != self._keys:
            strings = [key for key in keys if isinstance(key, str)]
            self._odd = [key for key in keys if not isinstance(key, str)]
            refuse_flat_parameters(strings, file.where)
            kinds = {key: noise_kind(key) for key in strings}
            if self._first:
                for kind in filter(None, kinds.values()):
                    self.ignored[kind] = self.ignored.get(kind, 0) + 1
            self._keys = keys
            self._clean = clean_names([key for key in strings if not kinds[key]], file.where)
        self._first = False
        return ((clean, values[key]) for key, clean in self._clean.items())

    def odd(self, file: TorchFile) -> Iterator[tuple[str, Any]]:
        """(key in words, value) under the keys of a flat state dict that are no strings."""
        return ((f"[{described(key)}]", file.root[key]) for key in self._odd)

    def _nested(self, file: TorchFile, values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
        flat = dict(islice(_flattened(values, (), _MOST_DEPTH), _MOST_ENTRIES))
        paths = {"\0".join(path): path for path in flat}
        selected = select_model(paths, self._root, file.where)
        refuse_flat_parameters(selected.names.values(), file.where)
        if self._first:
            self.ignored, self.notes, self._first = dict(selected.ignored), selected.notes, False
        clean = clean_names(selected.names.values(), file.where)
        return ((clean[name], flat[paths[key]]) for key, name in selected.names.items())


def _flattened(values: Mapping[Any, Any], path: tuple[str, ...], depth: int) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in values.items():
        name = key if isinstance(key, str) else described(key)
        if isinstance(value, dict) and depth:
            yield from _flattened(value, (*path, name), depth - 1)
        else:
            yield (*path, name), value


class _Place(NamedTuple):
    """Boxes, files, and the rows of the group that they are of."""

    start: np.ndarray
    stop: np.ndarray
    file: np.ndarray
    rows: np.ndarray


class _Assembler:
    """From groups of ranks to tensors; collects what the user should know."""

    def __init__(self, resolver: GroupResolver, numbers: np.ndarray) -> None:
        self._resolver = resolver
        self._numbers = numbers
        self._joined: list[str] = []
        self._drifted: list[str] = []
        self._places: dict[tuple[int, bytes], tuple[_Place, _Place]] = {}
        self._complete: set[tuple[int, bytes]] = set()

    def tensor(self, name: str, groups: list[Group]) -> TensorRef:
        """One tensor of the catalog."""
        if len(groups) > 1:
            self._resolver.require_alike(name, groups)
        for group in groups:
            key = (id(group.layout), group.ranks.tobytes())
            if key not in self._complete:
                _require_complete(name, group)
                if group.layout is not None:
                    self._complete.add(key)
        slices = [groups] if len(groups) == 1 else self._resolver.slices(name, groups)
        dtype, shape = groups[0].dtype, groups[0].shape
        shards: list[ShardTable] = []
        replicas: list[ShardTable] = []
        for k, copies in enumerate(slices):
            for j, group in enumerate(copies):
                first, others = self._tables(name, group)
                if len(slices) > 1:
                    shift = (k * shape[0], *(0 for _ in shape[1:]))
                    first, others = moved(first, shift), moved(others, shift)
                (replicas if j else shards).append(first)
                replicas.append(others)
        if len(slices) > 1:
            self._joined.append(name)
            shape = (shape[0] * len(slices), *shape[1:])
        further = [table for table in replicas if len(table)]
        return TensorRef(
            name,
            dtype,
            shape,
            shards[0] if len(shards) == 1 else stacked(shards, len(shape)),
            stacked(further, len(shape)) if further else None,
        )

    def notes(self) -> tuple[str, ...]:
        """Remarks on what was joined, and on copies that differ."""
        notes = []
        if self._joined:
            notes.append(
                f"{counted(len(self._joined), 'tensor')} joined from expert-parallel slices of separate meshes, on dim "
                f"0 in the order of their ranks: {listed(self._joined, most=3)}"
            )
        if self._drifted:
            notes.append(
                f"{counted(len(self._drifted), 'tensor')} that every rank holds whole: values differ between ranks, "
                f"the lowest rank's copy is used: {listed(self._drifted, most=3)}"
            )
        return tuple(notes)

    def _tables(self, name: str, group: Group) -> tuple[ShardTable, ShardTable]:
        """(first copies, further copies), empty boxes left out; tensors of one layout share all but the offsets."""
        offsets = np.array(group.offsets, dtype=np.int64)
        key = (id(group.layout), group.ranks.tobytes())
        places = self._places.get(key)
        if places is None:
            places = self._placed(name, group)
            if group.layout is not None:
                self._places[key] = places
        one, two = (ShardTable(p.start, p.stop, p.file, offsets[p.rows]) for p in places)
        return one, two

    def _placed(self, name: str, group: Group) -> tuple[_Place, _Place]:
        ranks = np.array(group.ranks, dtype=np.int64)
        n, ndim = len(ranks), len(group.shape)
        if group.layout is not None:
            place = np.array([group.layout.place[rank] for rank in group.ranks], dtype=np.int64)
            boxes = group.layout.boxes
            start, stop, first = boxes.start[place], boxes.stop[place], boxes.first[place]
        elif group.boxes is not None:
            start = np.array([box.start for box in group.boxes], dtype=np.int64).reshape(n, ndim)
            stop = np.array([box.stop for box in group.boxes], dtype=np.int64).reshape(n, ndim)
            owner: dict[Box, int] = {}
            first = np.array([owner.setdefault(box, k) == k for k, box in enumerate(group.boxes)], dtype=bool)
        else:
            start = np.zeros((n, ndim), dtype=np.int64)
            stop = np.broadcast_to(np.array(group.shape, dtype=np.int64), (n, ndim))
            first = np.arange(n) == ranks.argmin()
            if len(set(filter(None, group.crcs))) > 1:
                if ndim > 1:
                    msg = f"{name} {list(group.shape)} is a plain tensor that every rank holds, with different values"
                    hint = "parts of one tensor were saved without saying so: save DTensors, or a full state dict"
                    raise CorruptCheckpointError(msg, hint=hint)
                self._drifted.append(name)
        filled = (stop > start).all(axis=1)
        files = self._numbers[ranks]
        rows = np.flatnonzero(filled & first), np.flatnonzero(filled & ~first)
        one, two = (_Place(start[r], stop[r], files[r], r) for r in rows)
        return one, two


def _require_complete(name: str, group: Group) -> None:
    """Every rank of the mesh, or every box of the ShardedTensor, is there."""
    if group.layout is not None:
        missing = set(group.layout.mesh.ranks) - set(group.ranks)
        if missing:
            msg = (
                f"{name} is missing in the files of ranks {ranks_text(missing)}, which are in its device mesh "
                f"(it is in those of ranks {ranks_text(group.ranks)})"
            )
            raise IncompleteShardsError(msg, hint="the rank files are of different runs, or a save did not finish")
    if group.boxes is not None:
        there = set(group.boxes)
        absent = [box for box in group.wanted if box not in there]
        if absent:
            msg = (
                f"{len(absent)} of {len(group.wanted)} shards of {name} are in no file (have those of ranks "
                f"{ranks_text(group.ranks)}); the first covers {list(absent[0].start)} to {list(absent[0].stop)}"
            )
            hint = "copy the files of the other ranks here, or name each node's folder with --input"
            raise IncompleteShardsError(msg, hint=hint)


def _require_ranks(tree: ByteTree, chosen: RankSet, index: RankIndex) -> None:
    """Every rank that a mesh names has a file."""
    named = {rank for mesh in index.meshes for rank in mesh.ranks}
    missing = named - set(chosen.files)
    if missing:
        msg = (
            f"the device meshes in {tree.label} name ranks that have no file: have ranks {ranks_text(chosen.files)}, "
            f"missing ranks {ranks_text(missing)}"
        )
        if chosen.world_size:
            msg = f"{msg}; the names say world size {chosen.world_size}"
        hint = "copy the missing files here; if they lie on the disks of other nodes, name each folder with --input"
        raise IncompleteShardsError(msg, hint=hint)


def _facts(chosen: RankSet, index: RankIndex, options: OpenOptions, forms: set[str]) -> dict[str, str | int]:
    names = options.mesh_dim_names
    meshes = sorted(index.meshes, key=lambda mesh: (-len(mesh.ranks), mesh.ranks))
    if names and meshes and all(len(names) != len(mesh.shape) for mesh in meshes):
        msg = f"--mesh-dim-names gives {len(names)} names, but the device mesh is {meshes[0]}"
        raise UsageError(msg, hint="give one name for each dim of the mesh, outermost first")
    shown = {str(replace(mesh, names=names) if len(names) == len(mesh.shape) else mesh): None for mesh in meshes}
    writers = sorted({mesh.writer for mesh in meshes})
    version = chosen.fsdp_version or (1 if index.kinds["ShardedTensor"] else 0)
    facts: dict[str, str | int] = {"trainer": chosen.trainer, "world size": chosen.world_size or len(chosen.files)}
    facts["ranks"] = ranks_text(chosen.files)
    if meshes:
        facts["device mesh"] = ", ".join(shown)
        facts["mesh dims"] = (
            ", ".join(dict.fromkeys(name for mesh in meshes for name in names or mesh.names)) or "unnamed"
        )
    facts["torch"] = ", ".join(writers) if writers else ", ".join(sorted(forms)).replace("torch ", "")
    if version:
        facts["FSDP"] = version
    dtypes = {str(group.dtype) for groups in index.tensors.values() for group in groups}
    facts["dtypes"] = ", ".join(sorted(dtypes))
    facts["stored as"] = ", ".join(kind for kind, _ in index.kinds.most_common())
    return facts


MEMBER = FsdpRanks()
