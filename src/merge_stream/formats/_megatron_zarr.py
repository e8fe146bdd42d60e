"""`zarr` distributed checkpoints of megatron-core up to 0.15: a zarr v2 array for each key, uncompressed.

    decoder.layers.mlp.linear_fc1.weight/.zarray      {"shape", "chunks", "dtype": "bfloat16", "compressor": null, ...}
    decoder.layers.mlp.linear_fc1.weight/0.1.0        one chunk, row-major, padded at the array's edge
    decoder.layers.mlp.linear_fc1._extra_state/shard_0_4.pt    objects: skipped

Facts: megatron-core 0.9 (real files): keys and shapes as in `torch_dist`; `bfloat16` is written as the dtype's name,
raw 2-byte little-endian. zarr would fill a missing chunk; here it is an error.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

from merge_stream.containers.json_file import read_json
from merge_stream.errors import CorruptCheckpointError, IncompleteShardsError, TruncatedFileError, UnsupportedError
from merge_stream.formats._catalog import FileTable, listed
from merge_stream.formats._megatron_names import noise_of
from merge_stream.formats._megatron_raw import Raw
from merge_stream.formats._megatron_state import common_state
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.box import Box
from merge_stream.tensors.dtype import DType, dtype_named, dtype_of_torch
from merge_stream.tensors.ref import ShardTable, TensorRef

__all__ = ["read_zarr"]

_ARRAY = re.compile(r"(.+)/\.zarray")
_TYPES = {"<f4": "F32", "<f8": "F64", "<f2": "F16", "<i8": "I64", "<i4": "I32", "<i2": "I16", "|i1": "I8", "|u1": "U8"}
_JSON_LIMIT = 1 << 20
_MOST_CHUNKS = 1 << 22
_COPY = "the copy is not whole: copy the folder again"


def read_zarr(tree: ByteTree, table: FileTable) -> Raw:
    """Every array that is a weight."""
    raw = Raw()
    for path in tree.files:
        match = _ARRAY.fullmatch(path)
        if match is None:
            continue
        if kind := noise_of(match[1]):
            raw.ignored[kind] += 1
        else:
            raw.tensors[match[1]] = _array(tree, match[1], table)
            raw.metadata_nbytes += tree.files[path].nbytes
    raw.facts["arrays"] = len(raw.tensors)
    raw.learn(common_state(tree, None))
    return raw


def _array(tree: ByteTree, key: str, table: FileTable) -> TensorRef:
    where = f"{tree.label}/{key}/.zarray"
    meta = read_json(tree, f"{key}/.zarray", _JSON_LIMIT)
    shape, chunks = _sizes(meta.get("shape")), _sizes(meta.get("chunks"))
    dtype = _dtype(meta.get("dtype"))
    if shape is None or chunks is None or len(shape) != len(chunks) or 0 in chunks or meta.get("zarr_format") != 2:
        raise CorruptCheckpointError(f"{where} describes no zarr v2 array", hint=_COPY)
    if dtype is None:
        msg = f"{where}: the type {meta.get('dtype')!r:.40} has no safetensors name"
        raise UnsupportedError(msg, hint="save the model in bf16, fp16 or fp32")
    if meta.get("compressor") is not None or meta.get("filters") or meta.get("order", "C") != "C":
        msg = f"{where}: the array is compressed, filtered or column-major, which Megatron does not write"
        raise UnsupportedError(msg, hint="copy it with zarr to an uncompressed array first")
    separator = meta.get("dimension_separator", ".")
    counts = [-(-n // c) for n, c in zip(shape, chunks, strict=True)]
    total = 1
    for count in counts:
        total *= count
    if total > _MOST_CHUNKS:
        raise CorruptCheckpointError(f"{where} describes {total} chunks", hint=_COPY)
    nbytes = dtype.itemsize
    for c in chunks:
        nbytes *= c
    rows: list[tuple[Box, int, int]] = []
    missing = []
    for index in itertools.product(*(range(count) for count in counts)):
        name = f"{key}/{separator.join(map(str, index)) if index else '0'}"
        if name not in tree.files:
            missing.append(name)
            continue
        if tree.files[name].nbytes != nbytes:
            has = tree.files[name].nbytes
            msg = f"{tree.label}/{name} has {has} bytes, a chunk of {list(chunks)} {dtype} has {nbytes}"
            raise TruncatedFileError(msg, hint=_COPY)
        rows += _rows(shape, chunks, index, table.index(name), dtype.itemsize)
    if missing:
        msg = f"{tree.label} lacks {len(missing)} of {total} chunks of {key}: {listed(missing, most=3)}"
        raise IncompleteShardsError(msg, hint=f"{_COPY} (zarr itself would read such chunks as zeros)")
    return TensorRef(key, dtype, shape, ShardTable.of(rows, len(shape)))


def _rows(
    shape: tuple[int, ...], chunks: tuple[int, ...], index: tuple[int, ...], file: int, itemsize: int
) -> list[tuple[Box, int, int]]:
    """The boxes of a chunk: itself, or what of a chunk at the edge lies inside, cut where padding interrupts it."""
    start = tuple(i * c for i, c in zip(index, chunks, strict=True))
    stop = tuple(min(a + c, n) for a, c, n in zip(start, chunks, shape, strict=True))
    inside = tuple(b - a for a, b in zip(start, stop, strict=True))
    cut = [k for k, (n, c) in enumerate(zip(inside, chunks, strict=True)) if n != c]
    if not cut or cut == [0]:
        return [(Box(start, stop), file, 0)]
    depth = max(cut)  # all dims up to the last padded one are walked through one by one
    strides = [1] * len(chunks)
    for k in range(len(chunks) - 2, -1, -1):
        strides[k] = strides[k + 1] * chunks[k + 1]
    rows = []
    for lead in itertools.product(*(range(inside[k]) for k in range(depth))):
        offset = sum(i * s for i, s in zip(lead, strides, strict=False)) * itemsize
        low = (*(a + i for a, i in zip(start, lead, strict=False)), *start[depth:])
        high = (*(a + i + 1 for a, i in zip(start, lead, strict=False)), *stop[depth:])
        rows.append((Box(low, high), file, offset))
    return rows


def _sizes(value: Any) -> tuple[int, ...] | None:  # noqa: ANN401 - json
    if isinstance(value, list) and len(value) <= 8 and all(type(n) is int and 0 <= n < 1 << 40 for n in value):
        return tuple(value)
    return None


def _dtype(value: Any) -> DType | None:  # noqa: ANN401 - json
    if not isinstance(value, str):
        return None
    return dtype_named(_TYPES[value]) if value in _TYPES else dtype_of_torch(value)
