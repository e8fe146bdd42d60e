"""Output files follow the rule of huggingface_hub, on a table made by hand from its code.

`split_state_dict_into_shards_factory` of huggingface_hub 1.5 to 2.4 goes over the tensors in the order given: a tensor
larger than the limit becomes a file at once, without closing the current one; the current one closes when the next
tensor would overflow it.
"""

from __future__ import annotations

import random

import pytest

from merge_stream.planning.layout import Placed, file_name, split_in_files
from merge_stream.tensors.dtype import DType, dtype_named

MAX = 10
F32, BF16, U8, F64 = (d for d in map(dtype_named, ("F32", "BF16", "U8", "F64")) if d is not None)


def files(sizes: str, most: int = MAX) -> list[str]:
    """Of sizes "a4 b7" the names of each file, for tensors of these sizes in natural order."""
    placed = [Placed(word[0], U8, int(word[1:])) for word in sizes.split()]
    return ["".join(t.name for t in group) for group in split_in_files(placed, most)]


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ("", []),
        ("a1", ["a"]),
        ("a4 b6", ["ab"]),  # full to the last byte
        ("a4 b7", ["a", "b"]),
        ("a10 b10", ["a", "b"]),
        ("a11", ["a"]),  # larger than the limit: a file of its own
        ("a3 b11 c3", ["b", "ac"]),  # which does not close the current file, and is numbered before it
        ("a3 b11 c8", ["b", "a", "c"]),
        ("a11 b12 c1", ["a", "b", "c"]),
        ("a9 b2 c8", ["a", "bc"]),  # never looks back to fill an earlier file
        ("a0 b10 c0", ["abc"]),  # empty tensors cost nothing
        ("a10 b0 c1", ["ab", "c"]),
        ("a5 b5 c5 d5 e5", ["ab", "cd", "e"]),
    ],
)
def test_files_are_those_of_the_hub(sizes: str, wanted: list[str]) -> None:
    assert files(sizes) == wanted


def test_the_library_says_the_same() -> None:
    base = pytest.importorskip("huggingface_hub.serialization._base")
    rng = random.Random(7)
    for _ in range(200):
        sizes = {chr(97 + k): rng.choice([0, 1, 3, 5, 9, 10, 11, 30]) for k in range(rng.randint(1, 12))}
        split = base.split_state_dict_into_shards_factory(
            sizes,
            get_storage_size=lambda n: n,
            get_storage_id=lambda _: None,
            filename_pattern="m{suffix}",
            max_shard_size=MAX,
        )
        wanted = ["".join(names) for names in split.filename_to_tensors.values()]
        assert files(" ".join(f"{k}{n}" for k, n in sizes.items())) == wanted


def test_names_are_numbered_from_one_and_a_single_file_is_not() -> None:
    assert file_name(0, 1) == "model.safetensors"
    assert file_name(0, 3) == "model-00001-of-00003.safetensors"
    assert file_name(2, 3) == "model-00003-of-00003.safetensors"


def test_tensors_go_to_files_in_natural_order_whatever_order_they_come_in() -> None:
    names = [f"layers.{k}.{w}" for k in range(12) for w in ("bias", "weight")]
    shuffled = random.Random(1).sample(names, len(names))
    (group,) = split_in_files([Placed(n, U8, 1) for n in shuffled], 100)
    assert [t.name for t in group] == names


def test_names_that_differ_in_leading_zeros_only_have_a_fixed_order() -> None:
    """The layout is decided by names and sizes alone, or a resumed run would have another plan."""
    placed = [Placed(n, U8, 1) for n in ("h.1", "h.01", "h.001")]
    for order in (placed, placed[::-1]):
        (group,) = split_in_files(order, 100)
        assert [t.name for t in group] == ["h.001", "h.01", "h.1"]


def test_inside_a_file_larger_items_stand_first_so_all_are_aligned() -> None:
    kinds: list[DType] = [U8, BF16, F64, F32, U8, F32]
    (group,) = split_in_files([Placed(f"t.{k}", d, d.itemsize * (k + 1)) for k, d in enumerate(kinds)], 1000)
    assert [t.name for t in group] == ["t.2", "t.3", "t.5", "t.1", "t.0", "t.4"]
    at = 0
    for t in group:
        assert at % t.dtype.itemsize == 0
        at += t.nbytes
