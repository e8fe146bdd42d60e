"""Where the bytes of a DCP chunk lie: each chunk is a whole torch.save file inside a `.distcp` file.

    chunk  [ PK data.pkl | .format_version | byteorder | PK data/0 + padding ][ bytes ][ directory ]
           `------------------------ head: all but the bytes ---------------'

A checkpoint has few kinds of chunks and very many of each. Two chunks of equal length whose heads
are equal, byte for byte, hold the same record at the same place, so the first one is opened as any
torch file (directory, restricted pickle, bounds) and the others cost one read and one comparison.
A head may only be reused when the pickle is its first record, so that it lies inside the head.

Facts (torch 2.3 to 2.13): the root folder is `archive/`, data.pkl comes first and holds one tensor,
data is aligned relative to the chunk, not to the file; an older writer (torch 2.6) may save the
storage longer than the view. Local headers carry no checksum of the data (flag 8).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from merge_stream.containers.torch_file import open_torch_file
from merge_stream.containers.torch_tensor import locate, plain_tensor
from merge_stream.errors import CorruptCheckpointError
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.dtype import DType

__all__ = ["ChunkPlace", "ChunkReader"]

_HEAD = 2048  # the heads that were seen have 768 to 1024 bytes


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Element type, shape and byte offset (in its file) of a chunk's data."""

    dtype: DType
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Known:
    head: bytes
    dtype: DType
    shape: tuple[int, ...]


class ChunkReader:
    """Places of chunks; `opened` counts those whose head was not known yet, `read_nbytes` what was read."""

    def __init__(self, tree: ByteTree) -> None:
        self._tree = tree
        self._known: dict[int, list[_Known]] = {}
        self.opened = 0
        self.read_nbytes = 0

    def place(self, file: str, start: int, nbytes: int, *, tensor: str) -> ChunkPlace:
        """The chunk of `tensor` at [start, start + nbytes) of `file`; an error tells both."""
        head = self._tree.read(file, start, min(nbytes, _HEAD))
        self.read_nbytes += len(head)
        for known in self._known.get(nbytes, ()):
            if head.startswith(known.head):
                return ChunkPlace(known.dtype, known.shape, start + len(known.head))
        chunk = open_torch_file(self._tree, file, offset=start, nbytes=nbytes)
        view = plain_tensor(chunk.root, repr(tensor), chunk.where)
        if view is None:
            raise CorruptCheckpointError(
                f"{chunk.where} holds no tensor; the metadata says that a chunk of {tensor!r} is there",
                hint="metadata and data are of two different saves",
            )
        offset = locate(view, chunk, repr(tensor))
        self.opened += 1
        self.read_nbytes += chunk.metadata_nbytes
        length = offset - start
        if 0 < length <= len(head) and _begins_with_pickle(head):
            self._known.setdefault(nbytes, []).append(_Known(head[:length], view.dtype, view.shape))
        return ChunkPlace(view.dtype, view.shape, offset)


def _begins_with_pickle(head: bytes) -> bool:
    """True when the first record of the zip is data.pkl."""
    if len(head) < 30 or not head.startswith(b"PK\x03\x04"):
        return False
    (name_nbytes,) = struct.unpack_from("<H", head, 26)
    return head[30 : 30 + name_nbytes].endswith(b"/data.pkl")
