"""Small parameters are read together, and nothing of that shows in what is written."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, replace

import numpy as np
import pytest

from merge_stream.encodings.cast import Cast
from merge_stream.engine import joint_reads
from merge_stream.engine.assembler import slab_bytes
from merge_stream.engine.budget import MemoryBudget
from merge_stream.engine.events import Silent
from merge_stream.engine.executor import Executed, StopFlag, execute
from merge_stream.options import DtypeName, MergeOptions
from merge_stream.planning.plan import Plan, ResolvedTake
from merge_stream.planning.planner import Resolved, make_plan
from merge_stream.planning.resolve import check_shards, resolve
from merge_stream.storage.memory import MemorySink, MemorySource
from merge_stream.tensors.box import Box
from merge_stream.tensors.dtype import F32
from merge_stream.tensors.parameter import identity
from merge_stream.tensors.ref import Catalog, ShardTable, SourceFile, TensorRef
from merge_stream.tensors.staged import ChunkSums
from merge_stream.testing.staging import MemoryStaging

RANKS = 4
ROWS, COLUMNS = 8, 4


@dataclass(frozen=True)
class Model:
    """Tensors of [8, 4] in rank files, by rows, with `gap` bytes between two shards."""

    catalog: Catalog
    contents: dict[str, bytes]
    values: dict[str, np.ndarray]


def model(count: int, gap: int) -> Model:
    rng = np.random.default_rng(count)
    files = [bytearray() for _ in range(RANKS)]
    tensors, values = {}, {}
    rows = ROWS // RANKS
    for k in range(count):
        name = f"layers.{k}.weight"
        values[name] = rng.standard_normal((ROWS, COLUMNS), dtype=np.float32)
        shards = []
        for rank, file in enumerate(files):
            file.extend(b"\xee" * gap)
            box = Box((rank * rows, 0), ((rank + 1) * rows, COLUMNS))
            shards.append((box, rank, len(file)))
            file.extend(values[name][box.slices((0, 0))].tobytes())
        tensors[name] = TensorRef(name, F32, (ROWS, COLUMNS), ShardTable.of(shards, 2))
    sources = tuple(SourceFile(f"rank{k}", f"rank{k}", len(file), 0) for k, file in enumerate(files))
    catalog = Catalog("by hand", "memory", tensors, sources)
    return Model(catalog, {f"rank{k}": bytes(file) for k, file in enumerate(files)}, values)


@dataclass(frozen=True)
class Merged:
    """What a merge wrote, read and told."""

    values: dict[str, np.ndarray]
    reads: list[tuple[str, int, int]]
    executed: Executed


def planned(made: Model, dtype: DtypeName) -> Plan:
    check_shards(made.catalog, made.catalog.tensors)
    resolved = [
        Resolved(p, resolve(made.catalog, p)) for p in (identity(n, t.shape) for n, t in made.catalog.tensors.items())
    ]
    return make_plan(made.catalog, resolved, Cast(dtype), MergeOptions(dtype=dtype))


def merged(made: Model, plan: Plan, dtype: DtypeName, segment_bytes: int = 1 << 20) -> Merged:
    sink, source = MemorySink(), MemorySource(made.contents)
    executed = execute(
        plan,
        MemoryStaging(plan, sink),
        source,
        Cast(dtype),
        budget=MemoryBudget(slots=1, slab_bytes=slab_bytes(segment_bytes)),
        segment_bytes=segment_bytes,
        observer=Silent(),
        stop=StopFlag(),
    )
    values = {
        p.name: np.frombuffer(sink.contents[plan.outputs[p.output].name], p.dtype.numpy(), p.size, p.start)
        for p in plan.parameters
    }
    return Merged({name: flat.reshape(ROWS, COLUMNS) for name, flat in values.items()}, source.reads, executed)


@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_one_read_of_each_file_for_many_tensors(dtype: DtypeName) -> None:
    made = model(300, gap=500)
    plan = planned(made, dtype)
    got = merged(made, plan, dtype)
    assert len(got.reads) == RANKS
    assert got.executed.read_nbytes == sum(nbytes for _, _, nbytes in got.reads)
    wanted = plan.parameters[0].dtype.numpy()
    for name, values in made.values.items():
        np.testing.assert_array_equal(got.values[name], values.astype(wanted))


def test_tensors_that_lie_far_apart_are_not_read_over() -> None:
    made = model(20, gap=joint_reads.SEEK + 1)
    got = merged(made, planned(made, "keep"), "keep")
    assert len(got.reads) == 20 * RANKS
    assert got.executed.read_nbytes == sum(values.nbytes for values in made.values.values())
    for name, values in made.values.items():
        np.testing.assert_array_equal(got.values[name], values)


def test_a_stretch_fits_the_lease() -> None:
    """Tensors of one segment of 64 KiB span two MB of each file."""
    made = model(400, gap=4000)
    got = merged(made, planned(made, "keep"), "keep", segment_bytes=64 << 10)
    assert max(nbytes for _, _, nbytes in got.reads) <= slab_bytes(64 << 10) - (64 << 10)
    assert len(got.reads) < 400
    for name, values in made.values.items():
        np.testing.assert_array_equal(got.values[name], values)


def test_the_number_of_extents_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_reads, "_MOST_EXTENTS", 10)
    made = model(50, gap=0)
    got = merged(made, planned(made, "keep"), "keep")
    assert len(got.reads) == -(-50 // 3) * RANKS
    for name, values in made.values.items():
        np.testing.assert_array_equal(got.values[name], values)


def test_layouts_of_many_ranks_take_little_memory() -> None:
    """Experts of one stack, each a box of its own in a table of many rows."""
    ranks, experts = 512, 600
    shards = [(Box((0, k), (experts, k + 1)), k, 0) for k in range(ranks)]
    table = ShardTable.of(shards, 2)
    lease = MemoryBudget(slots=1, slab_bytes=1 << 20).lease()
    with lease as slab:
        values = slab.take(ranks * 4)
        joint = joint_reads.JointReads(lambda *_: None, frozenset())
        tracemalloc.start()
        try:
            for e in range(experts):
                take = ResolvedTake(table, Box((e, 0), (e + 1, ranks)), Box((0, 0), (1, ranks)), (), None, None)
                assert joint.add([take], (1, ranks), 4, 0)
                joint.read(values, slab)
            held, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert held < 2 << 20
    assert peak < 4 << 20


def test_files_with_checksums_are_read_where_tensors_are_alone() -> None:
    """What lies between two chunks belongs to none of them and cannot be checked."""
    made = model(10, gap=8)
    plan = planned(made, "keep")
    sums = ChunkSums("any", 0, 40, 32, (1,))
    alone = replace(plan, chunk_sums=dict.fromkeys(made.contents, sums))
    got = merged(made, alone, "keep")
    assert sorted({nbytes for _, _, nbytes in got.reads}) == [ROWS * COLUMNS * 4 // RANKS]


def test_an_overflow_is_told_of_the_tensor_that_has_it() -> None:
    made = model(5, gap=0)
    contents = {path: bytearray(data) for path, data in made.contents.items()}
    at = int(made.catalog.tensors["layers.3.weight"].shards.offset[0])
    contents["rank0"][at : at + 4] = np.float32(1e30).tobytes()
    broken = replace(made, contents={path: bytes(data) for path, data in contents.items()})
    got = merged(broken, planned(broken, "fp16"), "fp16")
    assert got.executed.overflows == {"layers.3.weight": 1}
