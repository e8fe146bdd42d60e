"""ColossalAI: whole tensors in many oddly named files, with an index.

    pytorch_model-00001.bin, model-00001.safetensors          one set; `pytorch_model.PREFIX-00001.bin` with a prefix
    pytorch_model-stage-00001-shard-00001.bin                 pipeline: stage 1
    pytorch_model-stage-00001-00002-shard-00001.bin           experts: stage 1, expert-parallel rank 2
    pytorch_model.bin.index[.PREFIX].json                     which tensor is where
    tmp_index_files/pytorch_model.bin.index-stage-00001.json  one for each stage while a save is under way

Every plugin gathers before it writes, so no tensor is ever cut. Experts' ranks repeat what they share: the index
names one file, the others are replicas. A save that was killed has left the stages' own indices, and is merged
when they are all there. The folder of a run has the model in `modeling/`.

Facts: ColossalAI 0.5.0 (checkpoint_io/); `metadata.total_size` is in MB, and a second save removes only files of its
own base name, so the index counts and not the folder. fp32 masters are saved nowhere.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from merge_stream.containers.json_file import read_json
from merge_stream.containers.safetensors_file import read_header
from merge_stream.containers.torch_file import open_torch_file
from merge_stream.containers.torch_tensor import locate, plain_tensor
from merge_stream.errors import (
    AmbiguousCheckpointError,
    CorruptCheckpointError,
    IncompleteShardsError,
    UnsupportedError,
)
from merge_stream.formats._catalog import FileTable, clean_names, config_dirs, listed
from merge_stream.formats._names import noise_kind
from merge_stream.formats._roots import naming_of
from merge_stream.formats._stored_checksums import ZipRecords
from merge_stream.formats.base import CheckpointFormat, Detection
from merge_stream.options import OpenOptions
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.box import Box
from merge_stream.tensors.dtype import DType
from merge_stream.tensors.ref import Catalog, ShardTable, TensorRef
from merge_stream.tensors.tables import stacked
from merge_stream.units import counted

__all__ = ["MEMBER", "ColossalAI"]

_WEIGHTS = re.compile(
    r"(pytorch_model|model)(\.(?P<prefix>[^/]+?))?(-stage-(?P<stage>\d{5})(-(?P<rank>\d{5}))?-shard)?-\d{5}\.(bin|safetensors)"
)
_INDEX = re.compile(r"(pytorch_model\.bin|model\.safetensors)\.index(\.[^/]+)?\.json")
_STAGE_INDEX = re.compile(r"tmp_index_files/(.+)-stage-(\d{5})(?:-(\d{5}))?\.json")
_INDEX_LIMIT = 1 << 28
_SHOWN = 8
_COPY = "copy the missing files into the folder, or pass their folder as a further --input"


@dataclass(frozen=True, slots=True)
class _Index:
    """Which tensor is in which file, all files that are named, and where that was read."""

    names: tuple[str, ...]
    weight_map: Mapping[str, str]
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Stored:
    """A tensor of one file."""

    dtype: DType
    shape: tuple[int, ...]
    rows: ShardTable


@dataclass(slots=True)
class _Contents:
    tensors: dict[str, _Stored] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)
    metadata_nbytes: int = 0


class ColossalAI:
    """A sharded save of ColossalAI."""

    name = "colossalai"
    summary = "ColossalAI: pytorch_model[-stage-0000S[-0000E]-shard]-0000N.bin or model-0000N.safetensors, with index"

    def detect(self, tree: ByteTree) -> Detection | None:
        """By the names of files, and an index beside them."""
        weights = [name for name in tree.files if _WEIGHTS.fullmatch(name)]
        stages = [name for name in tree.files if _STAGE_INDEX.fullmatch(name)]
        indices = [name for name in tree.files if _INDEX.fullmatch(name)]
        if not weights:
            return None
        index = (indices or stages or ["no index"])[0]
        return Detection(f"{counted(len(weights), 'file')} like {weights[0]}, {index}", rank=25)

    def open(self, tree: ByteTree, options: OpenOptions) -> Catalog:  # noqa: ARG002 (nothing to override here)
        """Every tensor that the index names."""
        index = _index(tree)
        files = list(index.files)
        _require_files(tree, index, files)
        table = FileTable(tree)
        contents = {name: _contents(tree, name, table.index(name)) for name in files}
        known = {name for held in contents.values() for name in held.tensors}
        if strangers := sorted(known - set(index.weight_map)):
            msg = f"{tree.label}: {listed(strangers, most=3)} stand in files of the index, which does not name them"
            raise CorruptCheckpointError(msg, hint="files of two saves are mixed: remove those of the older one")
        clean = clean_names(index.weight_map, tree.label)
        tensors = {
            clean[name]: _tensor(name, clean[name], file, contents, tree) for name, file in index.weight_map.items()
        }
        found = [match for name in files if (match := _WEIGHTS.fullmatch(name))]
        facts: dict[str, str | int] = {"trainer": "ColossalAI", "files": len(files)}
        if stages := len({match["stage"] for match in found if match["stage"]}):
            facts["pipeline stages"] = stages
        if ranks := len({match["rank"] for match in found if match["rank"]}):
            facts["expert-parallel ranks"] = ranks
        ignored: Counter[str] = Counter()
        notes = index.notes
        if others := sorted(name for name in tree.files if _WEIGHTS.fullmatch(name) and name not in contents):
            ignored["weight file that the index does not name"] = len(others)
            notes = (*notes, f"the index does not name {listed(others, most=3)}: left out, as of an older save")
        for held in contents.values():
            ignored += held.ignored
        return Catalog(
            format=self.name,
            root=tree.label,
            tensors=tensors,
            files=table.files,
            facts=facts,
            ignored=ignored,
            notes=notes,
            naming=naming_of(tensors),
            config_dirs=config_dirs(tree),
            metadata_nbytes=sum(held.metadata_nbytes for held in contents.values()),
            checksums=(ZipRecords(tree, tuple(name for name in files if name.endswith(".bin"))),),
            padded_vocabulary="base",
        )


MEMBER: CheckpointFormat = ColossalAI()


def _index(tree: ByteTree) -> _Index:
    """The final index; without one, those of the stages."""
    final = [name for name in tree.files if _INDEX.fullmatch(name)]
    if len(final) > 1:
        msg = f"{tree.label} holds {len(final)} indices: {listed(final)}"
        raise AmbiguousCheckpointError(msg, hint="two models are in one folder; move one of them out")
    if final:
        whole = _weight_map(tree, final[0])
        return _Index((final[0],), whole, tuple(dict.fromkeys(whole.values())))
    parts = {name: match for name in tree.files if (match := _STAGE_INDEX.fullmatch(name))}
    if not parts:
        msg = f"{tree.label} holds weight files of ColossalAI, but no index that says which tensor is where"
        hint = "an unfinished save, or a part of the copy: copy pytorch_model.bin.index.json, or take an earlier save"
        raise IncompleteShardsError(msg, hint=hint)
    if len({match[1] for match in parts.values()}) > 1:
        msg = f"{tree.label} holds stage indices of two saves: {listed(parts)}"
        raise AmbiguousCheckpointError(msg, hint="remove those of the older one")
    stages = {int(match[2]) for match in parts.values()}
    ranks = {int(match[3] or 0) for match in parts.values()}
    wanted = ((stage, rank) for stage in range(1, max(stages) + 1) for rank in sorted(ranks))
    there = {(int(match[2]), int(match[3] or 0)) for match in parts.values()}
    if missing := list(islice((place for place in wanted if place not in there), _SHOWN + 1)):
        named = ", ".join(f"stage {stage}" + (f" rank {rank}" if rank else "") for stage, rank in missing[:_SHOWN])
        named += " and more" if len(missing) > _SHOWN else ""
        msg = f"{tree.label}: the save was interrupted, and the indices of {named} are missing"
        raise IncompleteShardsError(msg, hint="take an earlier save: this one is not whole")
    weight_map: dict[str, str] = {}
    files: dict[str, None] = {}  # ranks of experts repeat what they share: a file may hold nothing else
    for name in parts:
        of_stage = _weight_map(tree, name)
        files |= dict.fromkeys(of_stage.values())
        weight_map |= {key: file for key, file in of_stage.items() if key not in weight_map}
    if lost := [name for name in tree.files if _is_of_stage(name) and name not in files]:
        msg = f"{tree.label}: the save was interrupted, and {listed(sorted(lost), most=3)} stand in no stage's index"
        raise IncompleteShardsError(msg, hint="take an earlier save: this one is not whole")
    note = f"the save was interrupted before its index was written; it is put together from {len(parts)} stage indices"
    return _Index(tuple(parts), weight_map, tuple(files), (note,))


def _is_of_stage(name: str) -> bool:
    match = _WEIGHTS.fullmatch(name)
    return match is not None and match["stage"] is not None


def _weight_map(tree: ByteTree, name: str) -> dict[str, str]:
    where = f"{tree.label}/{name}"
    found = read_json(tree, name, _INDEX_LIMIT).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
        raise CorruptCheckpointError(f"{where} has no weight_map of tensor names to file names", hint="copy it again")
    if parts := [file for file in found.values() if ".*." in file]:
        msg = (
            f"{where} names parts of tensors ({parts[0]}), a form that no ColossalAI writes and that is not known here"
        )
        raise UnsupportedError(msg, hint="save with gather_dtensor=True")
    return found


def _require_files(tree: ByteTree, index: _Index, files: Iterable[str]) -> None:
    wanted = list(files)
    if missing := [name for name in wanted if name not in tree.files]:
        msg = f"{tree.label} lacks {len(missing)} of {len(wanted)} files that {index.names[0]} names: {listed(missing)}"
        raise IncompleteShardsError(msg, hint=_COPY)


def _contents(tree: ByteTree, name: str, number: int) -> _Contents:
    """The tensors of a file, safetensors or torch."""
    held = _Contents()
    if name.endswith(".safetensors"):
        header = read_header(tree, name)
        held.metadata_nbytes = header.data_start
        for key, tensor in header.tensors.items():
            rows = ShardTable.of([(Box.whole(tensor.shape), number, tensor.offset)], len(tensor.shape))
            held.tensors[key] = _Stored(tensor.dtype, tensor.shape, rows)
        return held
    file = open_torch_file(tree, name)
    held.metadata_nbytes = file.metadata_nbytes
    if not isinstance(file.root, dict):
        raise CorruptCheckpointError(f"{file.where} holds no state dict", hint="copy the file again")
    for key, value in file.root.items():
        view = plain_tensor(value, repr(key), file.where)
        if view is None:
            held.ignored[noise_kind(str(key)) or "Python value"] += 1
            continue
        rows = ShardTable.of([(Box.whole(view.shape), number, locate(view, file, repr(key)))], len(view.shape))
        held.tensors[str(key)] = _Stored(view.dtype, view.shape, rows)
    return held


def _tensor(name: str, clean: str, file: str, contents: Mapping[str, _Contents], tree: ByteTree) -> TensorRef:
    """The tensor in the file that the index names; what other files repeat are replicas."""
    stored = contents[file].tensors.get(name)
    if stored is None:
        msg = f"{tree.label}: the index says {name} is in {file}, which does not hold it"
        raise IncompleteShardsError(msg, hint="files of two saves are mixed, or a save did not finish")
    copies = []
    for other, held in contents.items():
        copy = held.tensors.get(name) if other != file else None
        if copy is None:
            continue
        if (copy.dtype, copy.shape) != (stored.dtype, stored.shape):
            two = f"{stored.dtype} {list(stored.shape)} in {file}, {copy.dtype} {list(copy.shape)} in {other}"
            raise CorruptCheckpointError(f"{tree.label}: {name} is {two}", hint="files of two saves are mixed")
        copies.append(copy.rows)
    replicas = stacked(copies, len(stored.shape)) if copies else None
    return TensorRef(clean, stored.dtype, stored.shape, stored.rows, replicas)
