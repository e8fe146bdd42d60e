"""Segments tile the data section of every output file exactly once, whatever their size."""

from __future__ import annotations

import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from merge_stream.encodings.cast import Cast
from merge_stream.options import DtypeName, MergeOptions
from merge_stream.planning.plan import Plan
from merge_stream.planning.planner import Resolved, make_plan
from merge_stream.planning.resolve import resolve
from merge_stream.planning.segments import segments_of, tiles_of
from merge_stream.tensors.box import Box, row_major_strides
from merge_stream.tensors.dtype import DTYPES
from merge_stream.tensors.parameter import identity
from merge_stream.tensors.ref import Catalog, ShardTable, SourceFile, TensorRef
from merge_stream.testing.strategies import Example, checkpoints, shapes

FEW = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
Ints = tuple[int, ...]


def planned(example: Example, dtype: DtypeName, shard_size: int) -> Plan:
    resolved = [Resolved(p, resolve(example.catalog, p)) for p in example.parameters]
    return make_plan(example.catalog, resolved, Cast(dtype), MergeOptions(dtype=dtype, max_shard_size=shard_size))


def run_of(box: Box, view: Ints) -> tuple[int, int]:
    """First flat index of a box and the one behind its last."""
    strides = row_major_strides(view)
    first = sum(a * s for a, s in zip(box.start, strides, strict=True))
    return first, sum((b - 1) * s for b, s in zip(box.stop, strides, strict=True)) + 1


@FEW
@given(shapes(), st.integers(1, 400))
def test_tiles_are_contiguous_runs_in_order_and_none_is_too_large(view: Ints, most: int) -> None:
    at = 0
    for box in tiles_of(view, most):
        first, stop = run_of(box, view)
        assert (first, stop - first) == (at, box.size)
        assert 0 < box.size <= most
        at = stop
    assert at == math.prod(view)


@FEW
@given(st.integers(1, 10_000), st.integers(1, 50), st.integers(50, 5_000))
def test_tiles_of_a_matrix_are_about_equal(rows: int, width: int, most: int) -> None:
    """A short last tile would be a read, a write and a journal line for almost nothing."""
    sizes = [box.size for box in tiles_of((rows, width), most)]
    assert max(sizes) - min(sizes) <= max(len(sizes), 1) * width
    assert len(sizes) <= math.ceil(rows / (most // width))


@FEW
@given(checkpoints(), st.integers(1, 3000), st.sampled_from(["keep", "bf16", "fp32"]), st.sampled_from([1, 500, 10**9]))
def test_segments_tile_the_data_sections(
    example: Example, segment_bytes: int, dtype: DtypeName, shard_size: int
) -> None:
    plan = planned(example, dtype, shard_size)
    at = [len(output.header) for output in plan.outputs]
    elements = dict.fromkeys(range(len(plan.parameters)), 0)
    segments = list(segments_of(plan, segment_bytes))
    assert [s.output for s in segments] == sorted(s.output for s in segments)
    for segment in sorted(segments, key=lambda s: (s.output, s.start)):
        assert segment.start == at[segment.output]
        assert segment.stop > segment.start
        position, cost = segment.start, 0
        for tile in segment.tiles:
            p = plan.parameters[tile.parameter]
            assert p.output == segment.output
            assert tile.start == position
            assert tile.nbytes == tile.box.size * p.dtype.itemsize
            first, stop = run_of(tile.box, p.source.view)
            assert (first, stop) == (elements[tile.parameter], elements[tile.parameter] + tile.box.size)
            assert p.start + first * p.dtype.itemsize == tile.start
            elements[tile.parameter] = stop
            position += tile.nbytes
            cost += tile.box.size * max(p.dtype.itemsize, p.source.dtype.itemsize)
        assert position == segment.stop
        at[segment.output] = segment.stop
        # one element is the least that can be moved
        assert cost <= segment_bytes or (len(segment.tiles) == 1 and segment.tiles[0].box.size == 1)
    assert at == [output.nbytes for output in plan.outputs]
    assert all(elements[k] == p.size for k, p in enumerate(plan.parameters))


@FEW
@given(checkpoints(), st.integers(64, 3000))
def test_a_lease_is_large_enough_for_any_segment(example: Example, segment_bytes: int) -> None:
    """Output bytes, and the source values of one tile, each rounded as a lease rounds."""
    plan = planned(example, "bf16", 10**9)
    for segment in segments_of(plan, segment_bytes):
        out = segment.stop - segment.start
        assert out <= segment_bytes
        for tile in segment.tiles:
            values = tile.box.size * plan.parameters[tile.parameter].source.dtype.itemsize
            assert values <= segment_bytes


def test_small_tensors_share_a_segment() -> None:
    """20 000 biases must not be 20 000 writes."""
    shape = (16,)
    tensors = {}
    for k in range(1000):
        table = ShardTable.of([(Box.whole(shape), 0, k * 64)], 1)
        tensors[f"bias.{k}"] = TensorRef(f"bias.{k}", DTYPES[1], shape, table)
    catalog = Catalog("test", "memory", tensors, (SourceFile("f", "f", 64_000, 0),))
    resolved = [Resolved(p, resolve(catalog, p)) for p in (identity(name, shape) for name in tensors)]
    plan = make_plan(catalog, resolved, Cast("bf16"), MergeOptions(dtype="bf16"))
    assert [len(s.tiles) for s in segments_of(plan, 6400)] == [100] * 10


def test_work_follows_the_order_of_the_source() -> None:
    """Names sort against the order of storage; reading must still go forwards through the file."""
    shape, tensors = (4096,), {}
    for k in range(20):
        table = ShardTable.of([(Box.whole(shape), 0, k * 16384)], 1)
        tensors[f"w{19 - k:02d}"] = TensorRef(f"w{19 - k:02d}", DTYPES[1], shape, table)
    catalog = Catalog("test", "memory", tensors, (SourceFile("f", "f", 20 * 16384, 0),))
    resolved = [Resolved(p, resolve(catalog, p)) for p in (identity(name, shape) for name in tensors)]
    plan = make_plan(catalog, resolved, Cast("keep"), MergeOptions())
    names = [plan.parameters[t.parameter].name for s in segments_of(plan, 16384) for t in s.tiles]
    assert names == sorted(names, reverse=True)
