"""Arrays of zarr v3 as they stand on disk: where each chunk lies, and the metadata that says so.

Known before a byte is written: an array of one chunk is one file, `NAME/c.0.0`, the values with
their CRC-32C behind them; a larger one is one shard, whose index stands at its beginning:

    index: offset and length of each chunk, CRC-32C | chunk, CRC-32C | chunk, CRC-32C | ...

Chunks are bands of rows of at most a MiB, cut evenly, so that the last one is hardly padded;
in a shard each begins at a page. Element types that zarr-python 3.1 does not know (bf16, 8-bit
floats) stand as unsigned integers of their size, and the attribute `dtype` names them.

Reading refuses whatever was not laid out by these rules: a changed digit in the metadata
contradicts the rest of it.

Facts: zarr v3 core specification 3.1, codecs `bytes`, `crc32c` and `sharding_indexed` 1.0;
read by zarr-python 3.0 and 3.1.
"""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np

from merge_stream.errors import CorruptCheckpointError, UnsupportedError
from merge_stream.tensors.dtype import DTYPES, DType, dtype_named

__all__ = [
    "ADAPTER_GROUP",
    "CHECKSUM_NBYTES",
    "StoredArray",
    "array_metadata",
    "index_of",
    "lay_out_array",
    "read_array",
]

Ints = tuple[int, ...]

ADAPTER_GROUP = "lora_adapter"
"""The group of the arrays of an adapter that is kept beside the model."""
CHECKSUM_NBYTES = 4
_PAGE = 4096
_LARGEST_CHUNK = (1 << 20) - _PAGE
"""A chunk and its checksum fill at most a MiB, so a small memory bound can hold one."""
_MOST_PADDING = 0.03
_ENTRY = np.dtype("<u8")
_HINT = "the store is damaged, or was not written by `merge-stream stage`: stage it again"
_RESERVED = {"zarr.json", "merge_stream.json", "side_files", ADAPTER_GROUP}


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array and its file.

    chunk         shape of a chunk: leading dims of one, a band of one dim, whole further dims
    grid          number of chunks in each dim, none for an array without elements
    chunk_nbytes  bytes of a chunk without its checksum, padding included
    data_start    where the first chunk begins: behind the index of a shard, else 0
    stride        from one chunk to the next in the file
    """

    name: str
    dtype: DType
    shape: Ints
    chunk: Ints
    grid: Ints
    chunk_nbytes: int
    data_start: int
    stride: int

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return math.prod(self.grid)

    @property
    def file(self) -> str:
        """Its file, relative to the store; 0-d arrays have the key `c`."""
        return f"{self.name}/" + ".".join(["c", *("0" for _ in self.shape)])

    @property
    def file_nbytes(self) -> int:
        """Size of the file; 0 when there is none."""
        if not self.chunks:
            return 0
        return self.chunk_nbytes + CHECKSUM_NBYTES if self.chunks == 1 else self.data_start + self.chunks * self.stride

    @property
    def run(self) -> int:
        """Elements of one pass over the banded dim: chunks never reach from one run into the next."""
        axis = max((k for k, n in enumerate(self.grid) if n > 1), default=0)
        return math.prod(self.shape[axis:])

    @property
    def band(self) -> int:
        """Elements of a chunk without padding."""
        return math.prod(self.chunk)


@functools.lru_cache(maxsize=4096)
def lay_out_array(name: str, dtype: DType, shape: Ints) -> StoredArray:
    """Chunk grid and places of an array; UnsupportedError for a name that zarr or a file system cannot hold."""
    _check_name(name)
    chunk = _chunk_of(shape, max(_LARGEST_CHUNK // dtype.itemsize, 1))
    return _placed(name, dtype, shape, chunk)


def array_metadata(array: StoredArray) -> dict[str, Any]:
    """The content of its zarr.json."""
    inner: list[dict[str, Any]] = [{"name": "bytes"}, {"name": "crc32c"}]
    if array.dtype.itemsize > 1:
        inner[0]["configuration"] = {"endian": "little"}
    codecs, outer = inner, array.chunk
    if array.chunks > 1:
        index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        told = {
            "chunk_shape": list(array.chunk),
            "codecs": inner,
            "index_codecs": index,
            "index_location": "start",
        }
        codecs = [{"name": "sharding_indexed", "configuration": told}]
        outer = tuple(c * n for c, n in zip(array.chunk, array.grid, strict=True))
    plain = _zarr_type(array.dtype)
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(array.shape),
        "data_type": plain,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(outer)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": _fill_value(array.dtype),
        "codecs": codecs,
        **({"attributes": {"dtype": array.dtype.name}} if plain != array.dtype.torch_name else {}),
    }


def index_of(array: StoredArray) -> bytes:
    """The bytes before the first chunk of a shard."""
    offsets = array.data_start + np.arange(array.chunks, dtype=_ENTRY) * array.stride
    table = np.stack([offsets, np.full(array.chunks, array.chunk_nbytes + CHECKSUM_NBYTES, dtype=_ENTRY)], axis=1)
    entries = table.astype(_ENTRY).tobytes()
    crc: int = google_crc32c.value(entries)
    return (entries + crc.to_bytes(CHECKSUM_NBYTES, "little")).ljust(array.data_start, b"\0")


def read_array(name: str, metadata: object, where: str) -> StoredArray:
    """The array that zarr metadata describes; CorruptCheckpointError unless `array_metadata` gives the very same."""
    array = None
    with contextlib.suppress(KeyError, TypeError, ValueError, IndexError, AttributeError):
        array = _stated(name, metadata)
    if array is None or array_metadata(array) != metadata:
        msg = f"{where}: the zarr metadata of {name!a} is not that of a staged tensor: {str(metadata)[:200]!a}"
        raise CorruptCheckpointError(msg, hint=_HINT)
    return array


def _stated(name: str, metadata: Any) -> StoredArray | None:  # noqa: ANN401 - any JSON
    """The array with the stated shape and type, laid out by our rules."""
    shape = tuple(metadata["shape"])
    if len(shape) > 64 or any(type(n) is not int or not 0 <= n < 1 << 62 for n in shape):
        return None
    stored = metadata.get("attributes", {}).get("dtype")
    plain = metadata["data_type"]
    dtype = dtype_named(stored) if stored else next((d for d in DTYPES if d.torch_name == plain), None)
    if dtype is None or _zarr_type(dtype) != plain or math.prod(shape) * dtype.itemsize >= 1 << 62:
        return None
    return lay_out_array(name, dtype, shape)


def _check_name(name: str) -> None:
    name = name.removeprefix(f"{ADAPTER_GROUP}/")
    unfit = (
        not name
        or "/" in name
        or "\0" in name
        or not name.strip(".")
        or name.startswith("__")
        or name in _RESERVED
        or len(name.encode(errors="surrogatepass")) > 255
    )
    if unfit:
        msg = f"a zarr store cannot hold a tensor with the name {name[:300]!a}"
        raise UnsupportedError(msg, hint="merge without a store (--staging direct)")


def _chunk_of(shape: Ints, most: int) -> Ints:
    """Bands of the outermost dim below which everything fits, with little padding at the end."""
    axis, inner = len(shape), 1
    while axis > 0 and inner * max(shape[axis - 1], 1) <= most:
        axis -= 1
        inner *= max(shape[axis], 1)
    if axis == 0:
        return tuple(max(n, 1) for n in shape)
    rows = _even_rows(shape[axis - 1], most // inner)
    return (*(1,) * (axis - 1), rows, *(max(n, 1) for n in shape[axis:]))


def _even_rows(extent: int, most: int) -> int:
    """Rows of a band, at most `most`, so that the bands' rows are hardly more than `extent`."""
    bands = -(-extent // most)
    while True:
        rows = -(-extent // bands)
        if rows == 1 or bands * rows - extent <= _MOST_PADDING * extent:
            return rows
        bands += 1


def _placed(name: str, dtype: DType, shape: Ints, chunk: Ints) -> StoredArray:
    grid = tuple(-(-n // c) for n, c in zip(shape, chunk, strict=True))
    nbytes = math.prod(chunk) * dtype.itemsize
    if math.prod(grid) <= 1:
        return StoredArray(name, dtype, shape, chunk, grid, nbytes, 0, nbytes + CHECKSUM_NBYTES)
    index = math.prod(grid) * 2 * _ENTRY.itemsize + CHECKSUM_NBYTES
    return StoredArray(name, dtype, shape, chunk, grid, nbytes, _paged(index), _paged(nbytes + CHECKSUM_NBYTES))


def _paged(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _zarr_type(dtype: DType) -> str:
    """The element type in zarr metadata; unsigned integers where zarr-python has no such type."""
    if dtype.name == "BF16" or dtype.kind == "quantized":
        return f"uint{dtype.itemsize * 8}"
    return dtype.torch_name


def _fill_value(dtype: DType) -> object:
    if dtype.kind == "complex":
        return [0.0, 0.0]
    if dtype.kind == "bool":
        return False
    return 0.0 if dtype.kind == "float" and dtype.name != "BF16" else 0
