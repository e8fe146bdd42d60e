"""The number one as a source: a file that is shipped with the package and holds nothing else.

Some trainers store the weight of a norm less one. What is written is then the sum of two sources, and each has its
place in a file: no byte of the output comes from nowhere.
"""

from __future__ import annotations

from importlib import resources

from merge_stream.storage.local import time_of_change
from merge_stream.tensors.box import Box
from merge_stream.tensors.ref import ShardTable, SourceFile

__all__ = ["COUNT", "ones_file", "ones_table"]

COUNT = 1024
"""Numbers in the file, fp32, little-endian."""


def ones_file() -> SourceFile:
    """The file as a source."""
    with resources.as_file(resources.files(__package__) / "ones.f32") as path:
        info = path.stat()
        return SourceFile(str(path), path.name, info.st_size, time_of_change(info))


def ones_table(length: int, file: int) -> ShardTable:
    """A vector of `length` ones; every run of `COUNT` is the same range of source file number `file`."""
    starts = range(0, length, COUNT)
    return ShardTable.of([(Box((low,), (min(low + COUNT, length),)), file, 0) for low in starts], 1)
