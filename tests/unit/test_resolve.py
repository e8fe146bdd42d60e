"""Extents are looked at together, and the one that is wrong is named all the same."""

from __future__ import annotations

import numpy as np
import pytest

from merge_stream.errors import CorruptCheckpointError
from merge_stream.planning import resolve
from merge_stream.planning.resolve import check_shards
from merge_stream.tensors.dtype import F32
from merge_stream.tensors.ref import Catalog, ShardTable, SourceFile, TensorRef

COUNT = 50


def catalog(offsets: dict[str, int]) -> Catalog:
    """Tensors of [4, 2] in two ranks' files of 4000 bytes; their second halves at `offsets`, or one after another."""
    start, stop = np.array([[0, 0], [2, 0]], dtype=np.int64), np.array([[2, 2], [4, 2]], dtype=np.int64)
    tensors = {}
    for k in range(COUNT):
        name = f"layers.{k}.weight"
        places = np.array([16 * k, offsets.get(name, 16 * k)], dtype=np.int64)
        table = ShardTable(start, stop, np.array([0, 1], dtype=np.int32), places)
        tensors[name] = TensorRef(name, F32, (4, 2), table)
    files = tuple(SourceFile(f"/rank{k}", f"rank{k}", 4000, 0) for k in range(2))
    return Catalog("by hand", "/", tensors, files)


@pytest.mark.parametrize("at_once", [1, 7, 1 << 16])
@pytest.mark.parametrize("offset", [3985, 1 << 40, -1])
def test_a_shard_beyond_the_end_of_its_file_is_named(
    monkeypatch: pytest.MonkeyPatch, at_once: int, offset: int
) -> None:
    monkeypatch.setattr(resolve, "_AT_ONCE", at_once)
    made = catalog({"layers.31.weight": offset})
    with pytest.raises(
        CorruptCheckpointError, match=f"layers.31.weight: its shard in rank1 ends at byte {offset + 16}, .* has 4000"
    ):
        check_shards(made, made.tensors)


@pytest.mark.parametrize("at_once", [1, 7, 1 << 16])
def test_the_last_byte_of_a_file_is_inside(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(resolve, "_AT_ONCE", at_once)
    made = catalog({f"layers.{COUNT - 1}.weight": 4000 - 16})
    check_shards(made, made.tensors)
