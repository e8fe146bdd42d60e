"""DCP in safetensors form: sizes come from the shards, and missing shards are told apart from replicas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from merge_stream.containers.safetensors_file import HeaderEntry, build_header
from merge_stream.errors import AmbiguousCheckpointError, CorruptCheckpointError, IncompleteShardsError
from merge_stream.formats.dcp_safetensors import MEMBER
from merge_stream.storage.memory import MemoryTree
from merge_stream.tensors.dtype import DTYPES
from tests.formats.naive import OPTIONS, assert_equal, copied, fixture, opened

F32, BF16 = DTYPES[1], DTYPES[2]
Shards = dict[str, tuple[list[int], list[int]]]


def shard(tensors: Shards, dtype: str = "F32", info: object = None) -> bytes:
    """A shard file; `tensors` is {name: (offsets, shape)}."""
    kind = F32 if dtype == "F32" else BF16
    entries, position = [], 0
    for name, (_, shape) in tensors.items():
        nbytes = kind.itemsize
        for n in shape:
            nbytes *= n
        entries.append(HeaderEntry(name, kind, tuple(shape), position, position + nbytes))
        position += nbytes
    told = {name: {"saved_offsets": offsets} for name, (offsets, _) in tensors.items()} if info is None else info
    return build_header(entries, {"DCP_SHARDING_INFO": json.dumps(told)}) + bytes(position)


def file(rank: int, output: int = 1, count: int = 1) -> str:
    return f"shard-{rank + 1:05d}-model-{output:05d}-of-{count:05d}.safetensors"


def test_the_shards_of_a_real_save_rebuild_every_tensor() -> None:
    case = fixture("fsdp/dcp_hf_w2")
    catalog = opened(MEMBER, case / "ckpt")
    assert_equal(catalog, case / "expected_state.safetensors")
    assert len(catalog.files) == 4


def test_the_shards_below_a_consolidated_save_rebuild_every_tensor() -> None:
    case = fixture("fsdp/dcp_hf_w2_consolidated")
    assert_equal(opened(MEMBER, case / "ckpt" / "sharded"), case / "expected_state.safetensors")
    assert MEMBER.detect(MemoryTree({"model-00001-of-00001.safetensors": b""})) is None


def test_size_is_the_largest_extent_and_empty_shards_are_dropped() -> None:
    tree = MemoryTree(
        {
            file(0): shard({"w": ([0, 0], [3, 2]), "b": ([0], [1])}),
            file(1): shard({"w": ([3, 0], [2, 2]), "b": ([1], [0])}),
            file(2): shard({"w": ([5, 0], [0, 2]), "b": ([1], [0])}),
        }
    )
    catalog = MEMBER.open(tree, OPTIONS)
    assert catalog.tensors["w"].shape == (5, 2)
    assert catalog.tensors["b"].shape == (1,)
    assert (len(catalog.tensors["w"].shards), len(catalog.tensors["b"].shards)) == (2, 1)


def test_a_second_copy_of_a_shard_is_a_replica_and_noise_is_counted() -> None:
    tree = MemoryTree(
        {
            file(0): shard({"w": ([0], [2]), "optimizer.w": ([0], [2])}),
            file(1): shard({"w": ([0], [2])}),
        }
    )
    catalog = MEMBER.open(tree, OPTIONS)
    replicas = catalog.tensors["w"].replicas
    assert replicas is not None
    assert (len(catalog.tensors["w"].shards), len(replicas)) == (1, 1)
    assert catalog.ignored == {"optimizer state": 1}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_file_of_a_real_save_is_named(rank: int, tmp_path: Path) -> None:
    folder = copied("fsdp/dcp_hf_w2", tmp_path)
    (folder / file(rank, 2, 2)).unlink()
    with pytest.raises(IncompleteShardsError, match=file(rank, 2, 2)) as caught:
        opened(MEMBER, folder)
    assert "--input" in caught.value.hint


def test_an_output_file_without_any_shard_is_missing() -> None:
    with pytest.raises(IncompleteShardsError, match="model-00001-of-00002"):
        MEMBER.open(MemoryTree({file(0, 2, 2): shard({"w": ([0], [2])})}), OPTIONS)


def test_a_hole_in_the_ranks_is_missing_and_a_rank_without_items_is_not() -> None:
    first, last = shard({"w": ([0], [2])}), shard({"w": ([4], [2])})
    with pytest.raises(IncompleteShardsError, match=f"{file(1)}.*'w' has a hole"):
        MEMBER.open(MemoryTree({file(0): first, file(2): last}), OPTIONS)
    quiet = MEMBER.open(MemoryTree({file(0): first, file(2): shard({"w": ([2], [2])})}), OPTIONS)
    assert quiet.tensors["w"].shape == (4,)


def test_shards_of_two_saves_are_ambiguous() -> None:
    tree = MemoryTree({file(0): shard({"w": ([0], [2])}), file(0, 1, 2): shard({"w": ([0], [2])})})
    with pytest.raises(AmbiguousCheckpointError, match=r"of-00001.*of-00002"):
        MEMBER.open(tree, OPTIONS)


@pytest.mark.parametrize(
    ("info", "word"),
    [
        ({}, "saved_offsets None"),
        ([], "no JSON object"),
        ({"w": {"saved_offsets": [0, 0]}}, r"saved_offsets \[0, 0\]"),
        ({"w": {"saved_offsets": [-1]}}, r"saved_offsets \[-1\]"),
        ({"w": {"saved_offsets": [True]}}, r"saved_offsets \[True\]"),
    ],
)
def test_sharding_information_that_does_not_fit_is_refused(info: object, word: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=word):
        MEMBER.open(MemoryTree({file(0): shard({"w": ([0], [2])}, info=info)}), OPTIONS)


def test_a_file_without_sharding_information_is_refused() -> None:
    data = build_header([HeaderEntry("w", F32, (2,), 0, 8)]) + bytes(8)
    with pytest.raises(CorruptCheckpointError, match="DCP_SHARDING_INFO"):
        MEMBER.open(MemoryTree({file(0): data}), OPTIONS)


def test_two_element_types_or_ranks_of_one_tensor_are_refused() -> None:
    first = shard({"w": ([0], [2])})
    for second in (shard({"w": ([2], [2])}, "BF16"), shard({"w": ([2, 0], [2, 1])})):
        with pytest.raises(CorruptCheckpointError, match="'w' is"):
            MEMBER.open(MemoryTree({file(0): first, file(1): second}), OPTIONS)
