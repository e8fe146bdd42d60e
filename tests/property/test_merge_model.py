"""The central promise: a merge of any checkpoint equals what 30 lines of numpy and torch make of it.

Each random test stands there twice: with few examples for `make check`, with many (marked slow) for `make test`.
Neither has a fixed seed (one was seen to miss a whole kind of takes); `TestByHand` is what must not depend on luck.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from merge_stream.encodings.cast import Cast
from merge_stream.engine.budget import MemoryBudget
from merge_stream.engine.events import Silent
from merge_stream.engine.executor import Executed, StopFlag, execute
from merge_stream.errors import InterruptedRunError
from merge_stream.options import DtypeName, MergeOptions
from merge_stream.planning.plan import Plan
from merge_stream.planning.planner import Resolved, make_plan
from merge_stream.planning.resolve import check_shards, resolve
from merge_stream.storage.memory import MemorySink, MemorySource
from merge_stream.tensors.box import Box, boxes_of_range
from merge_stream.tensors.dtype import DTYPES, DType
from merge_stream.tensors.parameter import Parameter, Take, identity
from merge_stream.tensors.ref import Catalog, ShardTable, SourceFile, TensorRef
from merge_stream.testing.faulty import FaultySink
from merge_stream.testing.staging import MemoryStaging
from merge_stream.testing.strategies import Example, checkpoints

Ints = tuple[int, ...]
FEW = settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
MANY = settings(max_examples=500, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@dataclasses.dataclass(frozen=True)
class Way:
    """How a plan is executed; nothing of it may be seen in the result. `bounce` is what a lease has for detours."""

    segment: int
    workers: int
    bounce: int

    def budget(self) -> MemoryBudget:
        side = -(-max(self.segment, 64) // 64) * 64 + 128
        return MemoryBudget(slots=self.workers, slab_bytes=2 * side + self.bounce)


WAYS = st.builds(
    Way,
    segment=st.sampled_from([1, 8, 64, 100, 300, 1000, 4096, 1 << 20]),
    workers=st.integers(1, 4),
    bounce=st.sampled_from([64, 128, 1000, 1 << 16]),
)
DTYPE_NAMES = st.sampled_from(get_args(DtypeName))


# ------------------------------------------------------------------------------------- the model
def naive(example: Example, parameter: Parameter) -> np.ndarray:
    """The parameter's elements as unsigned integers, by whole-array numpy."""
    unit = next(iter(example.values[take.source].dtype for take in parameter.takes))
    made = np.zeros(parameter.view, unit)
    for take in parameter.takes:
        source = example.values[take.source]
        if take.split:
            source = source.reshape((*take.split, *source.shape[1:]))
        part = source[tuple(slice(a, b) for a, b in zip(take.source_box.start, take.source_box.stop, strict=True))]
        if take.permute:
            part = np.transpose(part, take.permute)
        made[tuple(slice(a, b) for a, b in zip(take.dest_box.start, take.dest_box.stop, strict=True))] = part
    return made.reshape(parameter.shape)


def cast_by_torch(bits: np.ndarray, source: DType, target: DType) -> np.ndarray:
    """What `Tensor.to` makes of these bits."""
    if source == target or bits.size == 0:
        return np.zeros(bits.shape, f"u{target.itemsize}") if bits.size == 0 else bits
    values = torch.frombuffer(bytearray(bits.tobytes()), dtype=getattr(torch, source.torch_name))
    out = values.to(getattr(torch, target.torch_name)).view(torch.uint8).numpy()
    return out.view(f"u{target.itemsize}").reshape(bits.shape)


def assert_same(got: np.ndarray, wanted: np.ndarray, dtype: DType, *, cast: bool) -> None:
    """Equal bits; after a cast any NaN is as good as another."""
    unlike = got != wanted
    if cast:
        unlike &= ~(np.isnan(got.view(dtype.numpy())) & np.isnan(wanted.view(dtype.numpy())))
    assert not unlike.any()


# --------------------------------------------------------------------------------- the real thing
def planned(example: Example, dtype: DtypeName, shard_size: int = 10**9) -> Plan:
    check_shards(example.catalog, example.catalog.tensors)
    resolved = [Resolved(p, resolve(example.catalog, p)) for p in example.parameters]
    return make_plan(example.catalog, resolved, Cast(dtype), MergeOptions(dtype=dtype, max_shard_size=shard_size))


def run(plan: Plan, example: Example, staging: MemoryStaging, way: Way, dtype: DtypeName) -> Executed:
    source = MemorySource(example.contents)
    return execute(
        plan,
        staging,
        source,
        Cast(dtype),
        budget=way.budget(),
        segment_bytes=way.segment,
        observer=Silent(),
        stop=StopFlag(),
    )


def check_against_model(example: Example, way: Way, dtype: DtypeName, shard_size: int) -> None:
    plan = planned(example, dtype, shard_size)
    sink = MemorySink()
    staging = MemoryStaging(plan, sink)
    executed = run(plan, example, staging, way, dtype)
    assert executed.written_nbytes == sum(p.nbytes for p in plan.parameters)
    assert {p.name for p in plan.parameters} == {p.name for p in example.parameters}
    wanted = {p.name: naive(example, p) for p in example.parameters}
    for p in plan.parameters:
        data = sink.contents[plan.outputs[p.output].name][p.start : p.start + p.nbytes]
        got = np.frombuffer(data, f"u{p.dtype.itemsize}").reshape(p.shape)
        cast = p.dtype != p.source.dtype
        model = cast_by_torch(wanted[p.name], p.source.dtype, p.dtype) if cast else wanted[p.name]
        assert_same(got, model, p.dtype, cast=cast)


def check_resume(example: Example, ways: list[Way], stops: list[int], dtype: DtypeName) -> None:
    plan = planned(example, dtype)
    whole = MemoryStaging(plan)
    run(plan, example, whole, ways[0], dtype)
    sink = MemorySink()
    ranges = MemoryStaging(plan, sink).ranges
    for way, writes in zip(ways, stops, strict=False):
        staging = MemoryStaging(plan, sink, tuple(ranges))
        # the last write of a killed run is torn: half of it is there, nothing notes it
        broken = FaultySink(sink, fail_at=writes, error=lambda: InterruptedRunError("killed"), stays=True)
        staging.sink = broken
        with contextlib.suppress(InterruptedRunError):
            run(plan, example, staging, way, dtype)
        for written in staging.writes:
            assert not staging.done.covers(written.output, written.start, written.stop)
        ranges = staging.ranges
    last = MemoryStaging(plan, sink, tuple(ranges))
    run(plan, example, last, ways[-1], dtype)
    assert isinstance(whole.sink, MemorySink)
    assert sink.contents == whole.sink.contents


SIZES = st.sampled_from([1, 100, 5000, 10**9])


class TestEqualsTheModel:
    @FEW
    @given(checkpoints(), WAYS, DTYPE_NAMES, SIZES)
    def test_any_checkpoint_in_any_way(self, example: Example, way: Way, dtype: DtypeName, shard_size: int) -> None:
        check_against_model(example, way, dtype, shard_size)

    @pytest.mark.slow
    @MANY
    @given(checkpoints(), WAYS, DTYPE_NAMES, SIZES)
    def test_many_checkpoints(self, example: Example, way: Way, dtype: DtypeName, shard_size: int) -> None:
        check_against_model(example, way, dtype, shard_size)


def by_hand(parameter: Parameter, shapes: dict[str, Ints], cuts: Callable[[Ints], list[Box]]) -> Example:
    """Sources of ascending numbers, each cut in the same way, all in one file."""
    contents, tensors = bytearray(), {}
    values: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        array = np.arange(math.prod(shape), dtype=np.uint32).reshape(shape) + 1000 * (len(values) + 1)
        rows = []
        for box in cuts(shape):
            rows.append((box, 0, len(contents)))
            contents += array[box.slices((0,) * len(shape))].tobytes()
        tensors[name] = TensorRef(name, DTYPES[1], shape, ShardTable.of(rows, len(shape)))
        values[name] = array
    catalog = Catalog("by hand", "memory", tensors, (SourceFile("f", "f", len(contents), 0),))
    return Example(catalog, {"f": bytes(contents)}, values, (parameter,))


def whole(shape: Ints) -> list[Box]:
    return [Box.whole(shape)]


def halves(shape: Ints, axis: int) -> list[Box]:
    middle = shape[axis] // 2
    return [
        Box((0,) * len(shape), (*shape[:axis], middle, *shape[axis + 1 :])),
        Box(tuple(middle if k == axis else 0 for k in range(len(shape))), shape),
    ]


BY_HAND: dict[str, tuple[Parameter, dict[str, Ints]]] = {
    "whole": (identity("w", (6, 8), "a"), {"a": (6, 8)}),
    "rows of a fused tensor": (
        Parameter("w", (2, 8), (2, 8), (Take("a", Box((3, 0), (5, 8)), Box.whole((2, 8))),)),
        {"a": (6, 8)},
    ),
    "columns of a tensor": (
        Parameter("w", (6, 3), (6, 3), (Take("a", Box((0, 4), (6, 7)), Box.whole((6, 3))),)),
        {"a": (6, 8)},
    ),
    "joined along rows": (
        Parameter(
            "w",
            (6, 4),
            (6, 4),
            (
                Take("a", Box.whole((2, 4)), Box((0, 0), (2, 4))),
                Take("b", Box.whole((4, 4)), Box((2, 0), (6, 4))),
            ),
        ),
        {"a": (2, 4), "b": (4, 4)},
    ),
    "joined along columns": (
        Parameter(
            "w",
            (4, 6),
            (4, 6),
            (
                Take("a", Box.whole((4, 2)), Box((0, 0), (4, 2))),
                Take("b", Box.whole((4, 4)), Box((0, 2), (4, 6))),
            ),
        ),
        {"a": (4, 2), "b": (4, 4)},
    ),
    "transposed": (
        Parameter("w", (8, 6), (8, 6), (Take("a", Box.whole((6, 8)), Box.whole((8, 6)), permute=(1, 0)),)),
        {"a": (6, 8)},
    ),
    "4-D, rotated axes": (
        Parameter(
            "w",
            (4, 2, 6, 3),
            (4, 2, 6, 3),
            (Take("a", Box.whole((6, 3, 4, 2)), Box.whole((4, 2, 6, 3)), (), (2, 3, 0, 1)),),
        ),
        {"a": (6, 3, 4, 2)},
    ),
    "rope: heads of interleaved pairs": (
        Parameter(
            "w",
            (12, 5),
            (2, 2, 3, 5),
            (Take("a", Box.whole((2, 3, 2, 5)), Box.whole((2, 2, 3, 5)), (2, 3, 2), (0, 2, 1, 3)),),
        ),
        {"a": (12, 5)},
    ),
}
CUTS: dict[str, Callable[[Ints], list[Box]]] = {
    "one file": whole,
    "rows": lambda shape: halves(shape, 0),
    "columns": lambda shape: halves(shape, len(shape) - 1),
    "flat": lambda shape: [
        box
        for low, high in itertools.pairwise((0, 3, math.prod(shape) // 2 + 1, math.prod(shape)))
        for box in boxes_of_range(shape, low, high)
    ],
}


class TestByHand:
    """The kinds of takes that architectures are made of, so that none depends on luck."""

    @pytest.mark.parametrize("segment", [4, 20, 100, 4096])
    @pytest.mark.parametrize("cut", CUTS)
    @pytest.mark.parametrize("kind", BY_HAND)
    def test_every_kind_of_take_over_every_kind_of_shard(self, kind: str, cut: str, segment: int) -> None:
        parameter, sources = BY_HAND[kind]
        example = by_hand(parameter, sources, CUTS[cut])
        for bounce in (64, 1 << 16):
            check_against_model(example, Way(segment, 2, bounce), "keep", 10**9)


class TestResume:
    @FEW
    @given(checkpoints(), st.lists(WAYS, min_size=3, max_size=3), st.lists(st.integers(0, 6), max_size=3), DTYPE_NAMES)
    def test_killed_runs_resumed_in_other_ways_give_the_same_bytes(
        self, example: Example, ways: list[Way], stops: list[int], dtype: DtypeName
    ) -> None:
        """And no run writes a range that was done when it began."""
        check_resume(example, ways, stops, dtype)

    @pytest.mark.slow
    @MANY
    @given(checkpoints(), st.lists(WAYS, min_size=3, max_size=3), st.lists(st.integers(0, 20), max_size=3), DTYPE_NAMES)
    def test_many_killed_runs(self, example: Example, ways: list[Way], stops: list[int], dtype: DtypeName) -> None:
        check_resume(example, ways, stops, dtype)
