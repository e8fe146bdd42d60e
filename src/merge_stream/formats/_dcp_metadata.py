"""The `.metadata` of a DCP folder as plain records, every field checked.

    Metadata.state_dict_metadata   name -> TensorStorageMetadata(properties, size, chunks) | BytesStorageMetadata
    Metadata.storage_data          MetadataIndex(fqn, offset, index) -> _StorageInfo(relative_path, offset, length)
    Metadata.planner_data          name -> path of container keys (None with a planner that does not flatten)

Several files (`__R.metadata`) are united: each lists the chunks of its rank only, with the true size.

Facts (torch 2.3 to 2.13): dtypes are globals `torch.<name>` inside `TensorProperties`, whose state is
a tuple (dtype, layout, requires_grad, memory format, pin_memory); `version` is there from 2.9 on,
`storage_meta` from 2.4 on; `transform_descriptors` is in the state only when extensions were used;
Bytes entries have offset None; `planner_data` paths may hold ints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from merge_stream.containers.pickle_reader import dotted_name, is_class, is_instance, read_pickle
from merge_stream.containers.pickle_source import PickleSource
from merge_stream.errors import CorruptCheckpointError, IncompleteShardsError, UnsupportedError
from merge_stream.formats._catalog import listed
from merge_stream.storage.allowance import MetadataAllowance
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.dtype import DType, dtype_of_torch

__all__ = [
    "ARGUMENTS",
    "COMMON_STATE",
    "DcpMetadata",
    "StoredChunk",
    "TensorEntry",
    "metadata_files",
    "rank_metadata_files",
    "read_metadata",
]

Ints = tuple[int, ...]

COMMON_STATE = "common_state/"
ARGUMENTS = "args"
_READ = (COMMON_STATE, "rng_state/")
_RANK_FILE = re.compile(r"__(\d+)\.metadata")
_SHARD_FILE = re.compile(r"__(\d+)_\d+\.distcp")
_LARGEST = 1 << 62
_DRAINED_BYTES = 170  # of memory for each entry beside the unpickled one, which goes as ours comes
_HINT = "the metadata is damaged, or was written by a version of torch that is not known here"


@dataclass(slots=True)
class TensorEntry:
    """A tensor: `chunks` maps the offset of each chunk to its size; `empty` are offsets of chunks without elements."""

    dtype: DType
    size: Ints
    chunks: dict[Ints, Ints] = field(default_factory=dict)
    empty: set[Ints] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """Where the torch.save file of one chunk lies: bytes [start, start + nbytes) of `file`."""

    offsets: Ints
    file: str
    start: int
    nbytes: int


@dataclass(slots=True)
class DcpMetadata:
    """All metadata files of a folder, united; `values` are names of Python values.

    Those are never read, but for Megatron's arguments, common and random states: their places are in `stored` too.
    """

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    values: set[str] = field(default_factory=set)
    stored: dict[str, list[StoredChunk]] = field(default_factory=dict)
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    version: str = ""
    nbytes: int = 0

    def path(self, name: str) -> tuple[str, ...]:
        """Container keys and own name of an entry; the name alone when the planner recorded none."""
        return self.paths.get(name, (name,))


def metadata_files(tree: ByteTree) -> list[str]:
    """Names of the folder's metadata: `.metadata`, else one file for each rank, in order of rank."""
    return [".metadata"] if ".metadata" in tree.files else rank_metadata_files(tree)


def rank_metadata_files(tree: ByteTree) -> list[str]:
    """Names of `__R.metadata` in order of rank."""
    ranks = {int(match[1]): name for name in tree.files if (match := _RANK_FILE.fullmatch(name))}
    return [ranks[rank] for rank in sorted(ranks)]


def read_metadata(tree: ByteTree) -> DcpMetadata:
    """Read and unite the folder's metadata files; a rank whose file is missing is an error."""
    names = metadata_files(tree)
    if names != [".metadata"]:
        _check_ranks(tree, names)
    result = DcpMetadata()
    for name in names:
        where = f"{tree.label}/{name}"
        _add(result, _document(tree, name, where), where, tree.allowance)
        result.nbytes += tree.entry(name).nbytes
    return result


def _document(tree: ByteTree, name: str, where: str) -> object:
    """The unpickled metadata: read as far as memory allows, and not held as bytes beside it."""
    source = PickleSource(lambda at, n: tree.read(name, at, n), tree.entry(name).nbytes, where, tree.allowance)
    return read_pickle(source, where)[0]


def _check_ranks(tree: ByteTree, names: list[str]) -> None:
    have = {int(name[2:].partition(".")[0]) for name in names}
    wanted = set(range(max(have) + 1)) | {int(m[1]) for name in tree.files if (m := _SHARD_FILE.fullmatch(name))}
    if missing := sorted(wanted - have):
        raise IncompleteShardsError(
            f"{tree.label} lacks {listed(f'__{rank}.metadata' for rank in missing)} (there are {listed(names)})",
            hint="each rank wrote its own metadata: give every node's folder with --input A --input B",
        )


def _add(result: DcpMetadata, document: object, where: str, allowance: MetadataAllowance) -> None:
    # Megatron-core pickles a subclass of its own
    fields = _fields(document, "MCoreMetadata" if _is(document, "MCoreMetadata") else "Metadata", where)
    entries, storage = fields.get("state_dict_metadata"), fields.get("storage_data")
    paths, version = fields.get("planner_data"), fields.get("version")
    if not isinstance(entries, dict) or not isinstance(storage, dict):
        raise CorruptCheckpointError(f"{where} has no state_dict_metadata or no storage_data", hint=_HINT)
    allowance.require(_DRAINED_BYTES * (len(entries) + len(storage)), where)
    entries_named = tuple(entries)
    for name, entry in _drained(entries):
        if type(name) is not str:
            raise CorruptCheckpointError(f"{where}: a name is {type(name).__name__}, wanted text", hint=_HINT)
        if _is(entry, "BytesStorageMetadata"):
            result.values.add(name)
        else:
            _add_tensor(result, name, entry, f"{where}: tensor {name!r}")
    if isinstance(paths, dict):
        for name, path in paths.items():
            if type(name) is not str or type(path) is not tuple or not path:
                raise CorruptCheckpointError(f"{where}: planner_data of {name!r} is no path of keys", hint=_HINT)
            if name in result.tensors and ".".join(map(str, path)) != name:
                raise CorruptCheckpointError(
                    f"{where}: tensor {name!r} is called {'.'.join(map(str, path))[:200]!r} in planner_data",
                    hint="one of the two names was changed: the file is damaged, copy it again",
                )
            result.paths[name] = tuple(map(str, path)) if all(type(p) in {str, int} for p in path) else (name,)
        if lost := [name for name in entries_named if paths and name in result.tensors and name not in paths]:
            raise CorruptCheckpointError(
                f"{where}: tensor {lost[0]!r} is not in planner_data, which names the others",
                hint="its name was changed in one of the two places: the file is damaged, copy it again",
            )
    for index, info in _drained(storage):
        _add_stored(result, index, info, where)
    result.version = version if type(version) is str else result.version


def _drained(mapping: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """The items in order, each let go when it was given out: a large checkpoint is never held twice."""
    items = list(mapping.items())
    mapping.clear()
    items.reverse()
    while items:
        yield items.pop()


def _add_tensor(result: DcpMetadata, name: str, value: object, where: str) -> None:
    fields = _fields(value, "TensorStorageMetadata", where)
    dtype, size = _dtype(fields.get("properties"), where), _ints(fields.get("size"))
    chunks = fields.get("chunks")
    if size is None or type(chunks) is not list:
        raise CorruptCheckpointError(f"{where} has no size or no chunks", hint=_HINT)
    entry = result.tensors.get(name)
    if entry is None:
        entry = result.tensors[name] = TensorEntry(dtype, size)
    elif entry.dtype is not dtype or entry.size != size:
        raise CorruptCheckpointError(
            f"{where} is {dtype} {list(size)}, another metadata file says {entry.dtype} {list(entry.size)}",
            hint="the metadata files are of two different saves",
        )
    for chunk in chunks:
        place = _fields(chunk, "ChunkStorageMetadata", where)
        offsets, sizes = _ints(place.get("offsets")), _ints(place.get("sizes"))
        if offsets is None or sizes is None or not len(offsets) == len(sizes) == len(size):
            raise CorruptCheckpointError(
                f"{where} of size {list(size)} has a chunk of {len(sizes or ())} dims", hint=_HINT
            )
        if any(a + n > whole for a, n, whole in zip(offsets, sizes, size, strict=True)):
            raise CorruptCheckpointError(
                f"{where} of size {list(size)} has a chunk of {list(sizes)} at {list(offsets)}, beyond its end",
                hint=_HINT,
            )
        if 0 in sizes:
            entry.empty.add(offsets)
        elif entry.chunks.setdefault(offsets, sizes) != sizes:
            raise CorruptCheckpointError(
                f"{where} has two chunks at {list(offsets)}: {list(sizes)} and {list(entry.chunks[offsets])}",
                hint="the metadata files are of two different saves",
            )


def _dtype(properties: object, where: str) -> DType:
    """The dtype of TensorProperties, whose state is a tuple (or a dict, should torch change its mind)."""
    state = getattr(properties, "state", None) if _is(properties, "TensorProperties") else None
    found = state[0] if type(state) is tuple and state else state.get("dtype") if type(state) is dict else None
    name = dotted_name(found) if is_class(found) else ""
    dtype = dtype_of_torch(name.removeprefix("torch.")) if name.startswith("torch.") else None
    if dtype is None and name:
        raise UnsupportedError(f"{where} has element type {name}", hint="this type has no safetensors name")
    if dtype is None:
        raise CorruptCheckpointError(f"{where} has no dtype", hint=_HINT)
    return dtype


def _add_stored(result: DcpMetadata, index: object, info: object, where: str) -> None:
    key = _fields(index, "MetadataIndex", where)
    name, offset = key.get("fqn"), key.get("offset")
    if type(name) is not str:
        raise CorruptCheckpointError(f"{where}: an entry of storage_data has no name", hint=_HINT)
    is_read = name in result.values and (name.startswith(_READ) or name == ARGUMENTS)
    if name not in result.tensors and not is_read:
        return
    place = _fields(info, "_StorageInfo", where)
    if transforms := place.get("transform_descriptors"):
        raise UnsupportedError(
            f"{where}: tensor {name!r} is stored through {str(transforms)[:100]}, and a compressed chunk cannot be "
            "read in part",
            hint="save the checkpoint again without `_extensions`",
        )
    offsets = () if is_read else _ints(offset)
    file, start, length = place.get("relative_path"), place.get("offset"), place.get("length")
    if offsets is None or type(file) is not str or type(start) is not int or type(length) is not int:
        raise CorruptCheckpointError(f"{where}: storage of {name!r} is incomplete", hint=_HINT)
    if not (0 <= start < _LARGEST and 0 <= length < _LARGEST):
        raise CorruptCheckpointError(
            f"{where}: a chunk of {name!r} lies at {start} with {length} bytes in {file[:200]!r}", hint=_HINT
        )
    result.stored.setdefault(name, []).append(StoredChunk(offsets, file, start, length))


def _is(value: object, name: str) -> bool:
    return is_instance(value) and dotted_name(value).rpartition(".")[2] == name


def _fields(value: object, name: str, where: str) -> Mapping[str, Any]:
    """State of a recorded dataclass of torch: a dict, or (None, dict) where it has slots."""
    state = getattr(value, "state", None) if _is(value, name) else None
    if type(state) is tuple and len(state) == 2:
        state = state[1]
    if not isinstance(state, dict):
        raise CorruptCheckpointError(f"{where} holds {dotted_name(value)} where a {name} is wanted", hint=_HINT)
    return state


def _ints(value: object) -> Ints | None:
    """A tuple of sizes, or None."""
    if type(value) is not tuple or any(type(n) is not int or not 0 <= n < _LARGEST for n in value):
        return None
    return value
