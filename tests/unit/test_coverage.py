"""Coverage is proved: any tiling is accepted, anything else is refused and named, and both are quick."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from merge_stream.planning.coverage import tiling_fault
from merge_stream.tensors.box import Box
from merge_stream.testing.strategies import shapes, shards

FEW = settings(max_examples=120, deadline=None, derandomize=True)
Ints = tuple[int, ...]


def fault(shape: Ints, boxes: list[Box]) -> str | None:
    start = np.array([b.start for b in boxes], dtype=np.int64).reshape(len(boxes), len(shape))
    stop = np.array([b.stop for b in boxes], dtype=np.int64).reshape(len(boxes), len(shape))
    return tiling_fault(shape, start, stop)


def really_tiles(shape: Ints, boxes: list[Box]) -> bool:
    """Count every element, the slow way; empty boxes and ones that leave the tensor are faults."""
    whole = Box.whole(shape)
    if not all(b.size and (b & whole) == b for b in boxes):
        return False
    count = np.zeros(shape, dtype=np.int64)
    for b in boxes:
        count[b.slices((0,) * len(shape))] += 1
    return bool((count == 1).all()) and (whole.size > 0 or not boxes)


@FEW
@given(st.data(), shapes())
def test_any_tiling_is_accepted(data: st.DataObject, shape: Ints) -> None:
    assert fault(shape, data.draw(shards(shape))) is None


@FEW
@given(st.data(), shapes())
def test_any_one_change_of_a_tiling_is_refused(data: st.DataObject, shape: Ints) -> None:
    assume(math.prod(shape))
    boxes = data.draw(shards(shape))
    k = data.draw(st.integers(0, len(boxes) - 1))
    victim = boxes[k]
    others = boxes[:k] + boxes[k + 1 :]
    changes = {"removed": others, "duplicated": [*boxes, victim]}
    if shape:
        axis = data.draw(st.integers(0, len(shape) - 1))
        one = tuple(int(a == axis) for a in range(len(shape)))
        back = tuple(-n for n in one)
        longer = Box(victim.start, tuple(b + d for b, d in zip(victim.stop, one, strict=True)))
        shorter = Box(victim.start, tuple(b - d for b, d in zip(victim.stop, one, strict=True)))
        changes |= {
            "shifted": [*others, victim.shifted(one)],
            "shifted back": [*others, victim.shifted(back)],
            "longer": [*others, longer],
            "shorter": [*others, shorter],
            "turned over": [*others, Box(victim.stop, victim.start)],
        }
    for name, changed in changes.items():
        assert fault(shape, changed), name


@FEW
@given(st.data(), shapes(most_dims=3, most_elements=40))
def test_random_boxes_are_judged_as_counting_judges_them(data: st.DataObject, shape: Ints) -> None:
    edges = [st.tuples(st.integers(-1, n + 1), st.integers(-1, n + 1)) for n in shape]
    boxes = data.draw(
        st.lists(st.tuples(*edges).map(lambda e: Box(tuple(a for a, _ in e), tuple(b for _, b in e))), max_size=5)
    )
    assert (fault(shape, boxes) is None) == really_tiles(shape, boxes)


@pytest.mark.parametrize(
    ("shape", "boxes", "words"),
    [
        ((8, 3), [((0, 0), (4, 3)), ((6, 0), (8, 3))], "indices 4 to 5 of dim 0 (size 8) are in no shard"),
        ((8, 3), [((0, 0), (5, 3)), ((4, 0), (8, 3))], "indices 4 to 4 of dim 0 are in more than one shard"),
        ((8, 3), [((0, 0), (4, 3))], "indices 4 to 7 of dim 0 (size 8) are in no shard"),
        ((8, 3), [((0, 0), (8, 3))] * 2, "the whole tensor is held 2 times"),
        ((8, 3), [((0, 0), (9, 3))], "region [0:9, 0:3] does not lie inside [8, 3]"),
        ((4, 4), [((0, 0), (2, 2)), ((1, 1), (4, 4))], "regions [0:2, 0:2] and [1:4, 1:4] overlap"),
        ((4, 4), [((0, 0), (2, 2)), ((2, 2), (4, 4))], "2 regions cover 8 of 16 elements"),
        ((4, 4), [], "no shard holds any part of it"),
        ((), [((), ())] * 2, "the one element is held 2 times"),
        ((0, 4), [((0, 0), (1, 4))], "1 regions lie in an empty tensor"),
    ],
)
def test_the_fault_is_named(shape: Ints, boxes: list[tuple[Ints, Ints]], words: str) -> None:
    assert fault(shape, [Box(*b) for b in boxes]) == words


@pytest.mark.parametrize("grid", [(20_000, 1), (1, 20_000), (140, 140), (4, 4096), (4096, 4), (16, 16, 64)])
def test_thousands_of_shards_of_one_tensor_take_less_than_a_second(grid: Ints) -> None:
    """Also when the dim that is cut most is not the first."""
    shape = tuple(3 * n for n in grid)
    index = np.array(list(itertools.product(*map(range, grid))), dtype=np.int64)
    index = np.random.default_rng(0).permutation(index)
    began = time.process_time()
    assert tiling_fault(shape, index * 3, index * 3 + 3) is None
    assert time.process_time() - began < 1.0
    assert "cover" in str(tiling_fault(shape, index[1:] * 3, index[1:] * 3 + 3)) or min(grid) == 1
