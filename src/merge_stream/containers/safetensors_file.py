"""Safetensors headers: parse one without trusting it, build one before any data exists.

    [ 8 bytes: n, little endian ][ n bytes: JSON, padded with spaces ][ data section ]

A parsed header is consistent: every tensor lies inside the file, the tensors tile the data
section (disjoint, no holes, ends with the file), sizes equal shape x item size, names are
unique. Anything else is refused with the file, the tensor, what was wanted and what was found.

Format facts (safetensors 0.4 to 0.8): the reader's limit for the JSON is 100 000 000 bytes;
offsets in the JSON count from the start of the data section; `__metadata__` holds strings
only; 0-d shapes are `[]`, empty tensors have two equal offsets.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from merge_stream.containers.json_cost import json_cost
from merge_stream.errors import CorruptCheckpointError, TruncatedFileError, UnsupportedError
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.dtype import DTYPES, DType, dtype_named

__all__ = ["HeaderEntry", "SafetensorsFile", "StoredTensor", "build_header", "parse_header", "read_header"]

Ints = tuple[int, ...]

_HEADER_LIMIT = 100_000_000
_FIRST_READ = 1 << 16
_MOST_DIMS = 64  # what numpy can view
_LARGEST_DIM = 1 << 62
_TENSOR_BYTES = 420  # of memory: a StoredTensor, its shape, its place in two dicts and a list
_CUT = "the file is cut or was not copied whole: copy it again"
_FOREIGN = "the file is damaged or no safetensors file: copy it again, or write it anew"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: `offset` counts from the start of the file."""

    dtype: DType
    shape: Ints
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A parsed header; `tensors` are in the order of their data."""

    name: str
    nbytes: int
    data_start: int
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """A tensor to be written: `start` and `stop` count from the start of the data section."""

    name: str
    dtype: DType
    shape: Ints
    start: int
    stop: int


def read_header(tree: ByteTree, name: str) -> SafetensorsFile:
    """Read and check the header of a file of `tree`; reads no tensor data beyond the first 64 KiB.

    MemoryLimitTooSmallError when the header does not fit in the allowance of the tree.
    """
    nbytes = tree.entry(name).nbytes
    where = f"{tree.label}/{name}"
    data = tree.read(name, 0, min(nbytes, _FIRST_READ))
    header_stop = 8 + _header_length(data, nbytes, where)
    tree.allowance.require(3 * header_stop, where)
    if header_stop > len(data):
        data += tree.read(name, len(data), header_stop - len(data))
    tree.allowance.require(json_cost(data[8:header_stop], each_object=_TENSOR_BYTES), where)
    return parse_header(data, nbytes, where)


def parse_header(data: bytes, file_nbytes: int, where: str) -> SafetensorsFile:
    """Check the header at the start of `data` against a file of `file_nbytes` bytes called `where`."""
    data_start = 8 + _header_length(data, file_nbytes, where)
    if len(data) < data_start:
        raise TruncatedFileError(f"{where}: header of {data_start} bytes wanted, {len(data)} found", hint=_CUT)
    document = _parsed(data[8:data_start], where)
    metadata = _checked_metadata(document.pop("__metadata__", {}), where)
    tensors = [
        (name, _sound_tensor(spec, data_start) or _checked_tensor(spec, data_start, f"{where}: tensor {name!r}"))
        for name, spec in document.items()
    ]
    # Empty tensors share their offset with a neighbour: by start, then by size.
    tensors.sort(key=lambda item: (item[1].offset, item[1].nbytes))
    _check_tiling(tensors, data_start, file_nbytes, where)
    return SafetensorsFile(where, file_nbytes, data_start, dict(tensors), metadata)


def build_header(
    entries: Iterable[HeaderEntry], metadata: Mapping[str, str] | None = None, *, align: int = 64
) -> bytes:
    """The bytes before the data section, so long that the data starts at a multiple of `align`.

    `entries` come in the order of their data and tile it from 0 on; `metadata` is
    `{"format": "pt"}` unless given (transformers asks for it).
    """
    document: dict[str, object] = {"__metadata__": dict(metadata) if metadata is not None else {"format": "pt"}}
    position = 0
    for entry in entries:
        nbytes = math.prod(entry.shape) * entry.dtype.itemsize
        if entry.name in document:
            raise ValueError(f"{entry.name!r} twice in one header")
        if entry.start != position or entry.stop - entry.start != nbytes:
            wanted = f"[{position}, {position + nbytes})"
            raise ValueError(f"{entry.name!r} lies at [{entry.start}, {entry.stop}), wanted {wanted}")
        position = entry.stop
        document[entry.name] = {
            "dtype": entry.dtype.name,
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.stop],
        }
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % align)
    if len(text) > _HEADER_LIMIT:
        raise UnsupportedError(
            f"a safetensors header of {len(text)} bytes is above the {_HEADER_LIMIT} that readers accept",
            hint="choose a smaller --max-shard-size, so that fewer tensors stand in one file",
        )
    return len(text).to_bytes(8, "little") + text


def _header_length(data: bytes, file_nbytes: int, where: str) -> int:
    if len(data) < 8:
        raise TruncatedFileError(f"{where} has {len(data)} bytes, a safetensors file has at least 8", hint=_CUT)
    length = int.from_bytes(data[:8], "little")
    if length > _HEADER_LIMIT:
        raise CorruptCheckpointError(
            f"{where}: the header claims {length} bytes, the limit is {_HEADER_LIMIT}", hint=_FOREIGN
        )
    if 8 + length > file_nbytes:
        raise TruncatedFileError(
            f"{where}: the header claims {length} bytes, but the file has {file_nbytes}", hint=_CUT
        )
    return length


def _parsed(text: bytes, where: str) -> dict[str, object]:
    if not text.startswith(b"{"):
        raise CorruptCheckpointError(
            f"{where}: the header is no JSON object, it starts with {text[:16]!r}", hint=_FOREIGN
        )
    try:
        document = json.loads(text.decode("utf-8"), parse_constant=_no_constant)
        if text.count(b":") != _pairs(document):
            document = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CorruptCheckpointError(f"{where}: the header cannot be parsed: {reason}", hint=_FOREIGN) from None
    # the text starts with "{" and was parsed to its end, so this is a dict
    names: dict[str, object] = document
    for name in names:
        if not name.isascii() and any("\ud800" <= c <= "\udfff" for c in name):
            raise CorruptCheckpointError(f"{where}: the name {name!r} is no Unicode text", hint=_FOREIGN)
    return names


def _pairs(document: dict[str, object]) -> int:
    """Names of the header and of the objects in it.

    Every pair that was read has a colon. So when there are no more colons than names, no name stood there twice;
    when there are, they may be in strings, and the slow way finds out.
    """
    return len(document) + sum(len(value) for value in document.values() if type(value) is dict)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice[:200]!r} stands there twice")
    return result


def _no_constant(word: str) -> object:
    raise ValueError(f"{word} is no JSON")


def _checked_metadata(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise CorruptCheckpointError(
            f"{where}: __metadata__ is {type(value).__name__}, wanted an object", hint=_FOREIGN
        )
    for key, word in value.items():
        if not isinstance(word, str):
            found = type(word).__name__
            raise CorruptCheckpointError(f"{where}: __metadata__[{key!r}] is {found}, wanted a string", hint=_FOREIGN)
    return value


def _sound_tensor(spec: object, data_start: int) -> StoredTensor | None:
    """The tensor, when nothing is wrong with its description; None leaves it to `_checked_tensor` to say what is."""
    if type(spec) is not dict or len(spec) != 3:
        return None
    name, shape, offsets = spec.get("dtype"), spec.get("shape"), spec.get("data_offsets")
    dtype = dtype_named(name) if type(name) is str else None
    if dtype is None or type(shape) is not list or type(offsets) is not list or len(offsets) != 2:
        return None
    nbytes = dtype.itemsize
    for extent in shape:
        if type(extent) is not int or not 0 <= extent < _LARGEST_DIM:
            return None
        nbytes *= extent
    start, stop = offsets
    if type(start) is not int or type(stop) is not int or not 0 <= start <= stop < _LARGEST_DIM:
        return None
    if stop - start != nbytes or len(shape) > _MOST_DIMS:
        return None
    return StoredTensor(dtype, tuple(shape), data_start + start, nbytes)


def _checked_tensor(spec: object, data_start: int, where: str) -> StoredTensor:
    if not isinstance(spec, dict) or spec.keys() != {"dtype", "shape", "data_offsets"}:
        found = sorted(spec) if isinstance(spec, dict) else type(spec).__name__
        raise CorruptCheckpointError(
            f"{where} is described by {found}, wanted dtype, shape, data_offsets", hint=_FOREIGN
        )
    name = spec["dtype"]
    dtype = dtype_named(name) if isinstance(name, str) else None
    if dtype is None:
        known = ", ".join(d.name for d in DTYPES)
        raise UnsupportedError(f"{where} has element type {name!r}", hint=f"known types are {known}")
    shape, offsets = _sizes(spec["shape"]), _sizes(spec["data_offsets"])
    if shape is None or len(shape) > _MOST_DIMS:
        raise CorruptCheckpointError(f"{where} has the shape {str(spec['shape'])[:200]}", hint=_FOREIGN)
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CorruptCheckpointError(f"{where} has the offsets {str(spec['data_offsets'])[:200]}", hint=_FOREIGN)
    start, stop = offsets
    nbytes = math.prod(shape) * dtype.itemsize
    if stop - start != nbytes:
        raise CorruptCheckpointError(
            f"{where}: shape {list(shape)} of {dtype} needs {nbytes} bytes, its offsets hold {stop - start}",
            hint=_FOREIGN,
        )
    return StoredTensor(dtype, shape, data_start + start, nbytes)


def _sizes(value: object) -> Ints | None:
    """The list as a tuple when it holds sizes only (a bool is none), else None."""
    if not isinstance(value, list) or any(type(n) is not int or not 0 <= n < _LARGEST_DIM for n in value):
        return None
    return tuple(value)


def _check_tiling(tensors: list[tuple[str, StoredTensor]], data_start: int, file_nbytes: int, where: str) -> None:
    position, before = data_start, "the header"
    for name, tensor in tensors:
        if tensor.offset != position:
            what = "overlaps" if tensor.offset < position else "leaves a hole after"
            raise CorruptCheckpointError(
                f"{where}: tensor {name!r} {what} {before}: starts at byte {tensor.offset}, wanted {position}",
                hint=_FOREIGN,
            )
        position, before = tensor.offset + tensor.nbytes, f"tensor {name!r}"
    if position > file_nbytes:
        raise TruncatedFileError(f"{where} has {file_nbytes} bytes, its tensors end at byte {position}", hint=_CUT)
    if position < file_nbytes:
        raise CorruptCheckpointError(
            f"{where} has {file_nbytes} bytes, but its tensors end at byte {position}", hint=_FOREIGN
        )
