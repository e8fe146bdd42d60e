"""A source whose chunks carry checksums: no byte of one is handed out unless the whole chunk is right.

A read of whole chunks is checked in flight, with one more short read for the checksum. A read of a
part of a chunk reads all of that chunk, in blocks, so it is right everywhere and fast where reads
end with chunks.
"""

from __future__ import annotations

from collections.abc import Mapping

import google_crc32c
import numpy as np

from merge_stream.errors import CorruptCheckpointError
from merge_stream.storage.base import ByteSource
from merge_stream.tensors.staged import ChunkSums

__all__ = ["CheckedSource"]

_BLOCK = 64 << 10
_CHECKSUM = 4


class CheckedSource:
    """Reads of files that `sums` names are checked, others pass; CorruptCheckpointError names tensor and chunk."""

    def __init__(self, source: ByteSource, sums: Mapping[str, ChunkSums]) -> None:
        self._source = source
        self._sums = sums

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with checked bytes."""
        sums = self._sums.get(path)
        if sums is None:
            self._source.read_into(path, offset, buffer)
            return
        done = 0
        while done < len(buffer):
            number, within = divmod(offset + done - sums.start, sums.stride)
            count = min(len(buffer) - done, sums.chunk_nbytes - within)
            if number < 0 or count <= 0:
                msg = f"byte {offset + done} of {path} belongs to no chunk"
                raise ValueError(msg)
            self._read_chunk(path, sums, number, within, buffer[done : done + count])
            done += count

    def close(self) -> None:
        """Close the source below."""
        self._source.close()

    def _read_chunk(self, path: str, sums: ChunkSums, number: int, within: int, into: memoryview) -> None:
        """Read `into` from a chunk, `within` bytes behind its start, and check the chunk."""
        start = sums.start + number * sums.stride
        before = self._skim(path, start, within, 0)
        self._source.read_into(path, start + within, into)
        crc = google_crc32c.extend(before, np.frombuffer(into, np.uint8))  # takes no memoryview
        behind = within + len(into)
        crc = self._skim(path, start + behind, sums.chunk_nbytes - behind, crc)
        stated = bytearray(_CHECKSUM)
        self._source.read_into(path, start + sums.chunk_nbytes, memoryview(stated))
        if int.from_bytes(stated, "little") != crc:
            msg = (
                f"{sums.name}: chunk {sums.place(number)} is damaged: bytes {start} to {start + sums.chunk_nbytes} of "
                f"{path} have the CRC-32C {crc:08x}, stored with them is {int.from_bytes(stated, 'little'):08x}"
            )
            raise CorruptCheckpointError(msg, hint="copy the store again from where it is whole, or stage it anew")

    def _skim(self, path: str, start: int, nbytes: int, crc: int) -> int:
        """The checksum carried on over bytes that nobody wants."""
        block = bytearray(min(nbytes, _BLOCK))
        for low in range(0, nbytes, _BLOCK):
            part = memoryview(block)[: min(_BLOCK, nbytes - low)]
            self._source.read_into(path, start + low, part)
            crc = google_crc32c.extend(crc, np.frombuffer(part, np.uint8))
        return int(crc)
