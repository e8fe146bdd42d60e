"""Region algebra: flat ranges become few contiguous boxes, and intersections are those of index sets."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merge_stream.tensors.box import Box, boxes_of_range, row_major_strides
from merge_stream.testing.strategies import shapes

FEW = settings(max_examples=150, deadline=None, derandomize=True)


def indices(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


def flat(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    return sum(i * s for i, s in zip(index, row_major_strides(shape), strict=True))


@FEW
@given(st.data(), shapes(most_elements=200))
def test_a_flat_range_becomes_at_most_2n_minus_1_contiguous_boxes_in_order(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    boxes = list(boxes_of_range(shape, start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    places = [sorted(flat(i, shape) for i in indices(b)) for b in boxes]
    assert all(p == list(range(p[0], p[-1] + 1)) for p in places)  # contiguous
    assert [k for p in places for k in p] == list(range(start, stop))  # in order, without a gap


@FEW
@given(st.data(), st.integers(0, 4))
def test_the_common_region_is_that_of_the_index_sets(data: st.DataObject, ndim: int) -> None:
    def box() -> Box:
        edges = [sorted(data.draw(st.tuples(st.integers(0, 4), st.integers(0, 4)))) for _ in range(ndim)]
        return Box(tuple(e[0] for e in edges), tuple(e[1] for e in edges))

    a, b = box(), box()
    common = a & b
    assert (indices(common) if common else set()) == indices(a) & indices(b)
    assert common is None or common.size == len(indices(common))


def test_a_scalar_has_one_element() -> None:
    whole = Box.whole(())
    assert (whole.size, whole.shape, whole & whole) == (1, (), whole)
    assert list(boxes_of_range((), 0, 1)) == [whole]
    assert list(boxes_of_range((), 0, 0)) == []


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (2, 0, 4)])
def test_an_empty_tensor_has_no_boxes(shape: tuple[int, ...]) -> None:
    assert Box.whole(shape).size == 0
    assert list(boxes_of_range(shape, 0, 0)) == []
    assert Box.whole(shape) & Box.whole(shape) is None


def test_shift_and_slices_are_relative() -> None:
    box = Box((2, 3), (4, 7))
    assert box.shifted((-2, 1)) == Box((0, 4), (2, 8))
    assert box.slices((1, 3)) == (slice(1, 3), slice(0, 4))
    assert box.shifted((5, 5)).shape == box.shape


def test_strides_of_row_major_arrays() -> None:
    assert row_major_strides((2, 3, 4)) == (12, 4, 1)
    assert row_major_strides(()) == ()
