"""Geometry of placements against a naive replay with index lists, and against torch's own functions."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merge_stream.containers.pickle_reader import Recorder, read_pickle
from merge_stream.errors import CorruptCheckpointError, UnsupportedError
from merge_stream.formats._device_mesh import Mesh, decode_mesh
from merge_stream.formats._placements import REPLICATE, Placement, boxes_on, decode_placements, execution_order


def mesh_of(*shape: int) -> Mesh:
    return Mesh(shape, tuple(range(math.prod(shape))))


def chunked(rows: np.ndarray, pieces: int) -> list[np.ndarray]:
    """Like torch.chunk, with empty pieces at the end."""
    size = -(-len(rows) // pieces)
    return [rows[k * size : (k + 1) * size] for k in range(pieces)]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[int], list[int]]:
    """(mesh sizes, tensor shape, tensor dim or -1 for each mesh dim, order in which the splits were applied)."""
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    dims = [draw(st.integers(-1, len(shape) - 1)) for _ in sizes]
    return sizes, shape, dims, draw(st.permutations(range(len(sizes))))


def encoded(sizes: tuple[int, ...], dims: list[int], applied: list[int]) -> list[Placement]:
    """What torch writes: a split is strided by the mesh dims to its right that split the same dim before it."""
    placements = []
    for m, dim in enumerate(dims):
        earlier = [j for j in range(m + 1, len(sizes)) if dims[j] == dim and applied.index(j) < applied.index(m)]
        factor = math.prod(sizes[j] for j in earlier) if earlier and dim >= 0 else 0
        placements.append(Placement(dim, factor))
    return placements


@given(layouts(), st.booleans())
@settings(max_examples=250, deadline=None)
def test_boxes_are_those_of_a_replay_with_index_lists(layout: Any, stated: bool) -> None:
    sizes, shape, dims, applied = layout
    placements = encoded(sizes, dims, applied)
    order_stated = None
    if stated:  # shard_order of torch 2.10 and later
        order_stated = tuple((d, tuple(m for m in applied if dims[m] == d)) for d in range(len(shape)) if d in dims)
    order = execution_order(placements, sizes, order_stated)
    assert order is not None
    boxes = boxes_on(mesh_of(*sizes), shape, order)
    covered = np.zeros(shape, dtype=int)
    for k, coordinate in enumerate(itertools.product(*map(range, sizes))):
        rows = [np.arange(n) for n in shape]
        for m in applied:
            if dims[m] >= 0:
                rows[dims[m]] = chunked(rows[dims[m]], sizes[m])[coordinate[m]]
        got = [np.arange(a, b) for a, b in zip(boxes.start[k], boxes.stop[k], strict=True)]
        assert all(np.array_equal(a, b) for a, b in zip(rows, got, strict=True))
        assert boxes.first[k] == all(c == 0 for c, d in zip(coordinate, dims, strict=True) if d < 0)
        if boxes.first[k]:
            covered[np.ix_(*got)] += 1
    assert (covered == 1).all()


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    st.lists(st.integers(0, 13), min_size=1, max_size=3).map(tuple),
    st.data(),
)
@settings(max_examples=80, deadline=None)
def test_plain_shards_as_torch_computes_them(
    sizes: tuple[int, ...], shape: tuple[int, ...], data: st.DataObject
) -> None:
    torch_utils = pytest.importorskip("torch.distributed.tensor._utils")
    from torch.distributed.tensor import Replicate, Shard

    dims = [data.draw(st.integers(-1, len(shape) - 1)) for _ in sizes]
    theirs = [Replicate() if d < 0 else Shard(d) for d in dims]
    order = execution_order([Placement(d) for d in dims], sizes, None)
    assert order is not None
    boxes = boxes_on(mesh_of(*sizes), shape, order)
    for k, coordinate in enumerate(itertools.product(*map(range, sizes))):
        local, offset = torch_utils._compute_local_shape_and_global_offset(shape, sizes, list(coordinate), theirs)
        assert tuple(boxes.stop[k] - boxes.start[k]) == tuple(local)
        if math.prod(local):
            assert tuple(boxes.start[k]) == tuple(offset)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_strided_shards_as_torch_computes_them(fsdp: int, tp: int, times: int, width: int) -> None:
    torch_utils = pytest.importorskip("torch.distributed.tensor._utils")
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    shape = (fsdp * tp * times, width)
    order = execution_order([Placement(0, tp), Placement(0)], (fsdp, tp), None)
    assert order is not None
    boxes = boxes_on(mesh_of(fsdp, tp), shape, order)
    for k, coordinate in enumerate(itertools.product(range(fsdp), range(tp))):
        local, offset = torch_utils._compute_local_shape_and_global_offset(
            shape, (fsdp, tp), list(coordinate), [_StridedShard(0, split_factor=tp), Shard(0)]
        )
        assert tuple(boxes.stop[k] - boxes.start[k]) == tuple(local)
        assert tuple(boxes.start[k]) == tuple(offset)


def test_uneven_fsdp_4_tp_2_as_seen_in_torch_2_13() -> None:
    """9 rows, tp split first: the true local rows by rank are 2, 1, 2, 1, 1, 1, 0, 1."""
    order = execution_order([Placement(0, 2), Placement(0)], (4, 2), None)
    assert order == {0: (1, 0)}
    boxes = boxes_on(mesh_of(4, 2), (9,), order)
    assert (boxes.stop - boxes.start).ravel().tolist() == [2, 1, 2, 1, 1, 1, 0, 1]


def test_undecodable_orders_are_none() -> None:
    assert execution_order([Placement(0, 3), Placement(0)], (2, 2), None) is None
    assert execution_order([Placement(0, 2)], (2,), None) is None
    assert execution_order([Placement(0), Placement(0)], (2, 2), ((1, (0, 1)),)) is None
    assert execution_order([Placement(0), Placement(0)], (2, 2), ((0, (0,)),)) is None


def test_last_first_is_torch_2_3_fsdp2_with_tp() -> None:
    assert execution_order([Placement(0), Placement(0)], (2, 4), None, last_first=True) == {0: (1, 0)}
    assert execution_order([Placement(0), Placement(0)], (2, 4), None) == {0: (0, 1)}


def test_scalar_on_a_mesh() -> None:
    boxes = boxes_on(mesh_of(2, 2), (), {})
    assert boxes.start.shape == (4, 0)
    assert boxes.first.tolist() == [True, False, False, False]


def test_hand_made_mesh_gives_pieces_by_ascending_rank() -> None:
    boxes = boxes_on(Mesh((4,), (3, 1, 0, 2)), (8,), {0: (0,)})
    assert dict(zip((3, 1, 0, 2), boxes.start.ravel().tolist(), strict=True)) == {0: 0, 1: 2, 2: 4, 3: 6}


def test_permuted_hsdp_mesh() -> None:
    mesh = Mesh((2, 2), (0, 2, 1, 3))
    boxes = boxes_on(mesh, (4,), {0: (1,)})
    assert dict(zip(mesh.ranks, boxes.start.ravel().tolist(), strict=True)) == {0: 0, 2: 2, 1: 0, 3: 2}
    assert dict(zip(mesh.ranks, boxes.first.tolist(), strict=True)) == {0: True, 2: True, 1: False, 3: False}


def placement(name: str, **fields: Any) -> Recorder:
    data = f"\x80\x02ctorch.distributed.tensor.placement_types\n{name}\n)\x81.".encode("latin-1")
    record: Recorder = read_pickle(data, "x")[0]
    record.state = fields or None
    return record


class TestDecodePlacements:
    def test_known_ones(self) -> None:
        records = (
            placement("Replicate"),
            placement("Shard", dim=-1),
            placement("_StridedShard", dim=0, split_factor=2),
        )
        found = decode_placements(records, mesh_of(2, 2, 2), 2, "w", "f")
        assert found == (REPLICATE, Placement(1), Placement(0, 2))
        assert [str(p) for p in found] == ["Replicate()", "Shard(1)", "_StridedShard(0, 2)"]

    @pytest.mark.parametrize("name", ["Partial", "_Partial", "_NormPartial", "MaskPartial"])
    def test_partial_is_refused_by_name(self, name: str) -> None:
        """Case 49."""
        with pytest.raises(UnsupportedError, match=rf"layer\.w has the placement {name}\(reduce_op='sum'\)"):
            decode_placements((placement(name, reduce_op="sum"),), mesh_of(2), 1, "layer.w", "f")

    def test_partial_over_a_single_rank_is_a_copy(self) -> None:
        assert decode_placements((placement("Partial", reduce_op="sum"),), mesh_of(1), 1, "w", "f") == (REPLICATE,)

    @pytest.mark.parametrize("record", [placement("Shard", dim=2), placement("Shard"), placement("Odd"), 3, None])
    def test_unknown_ones(self, record: object) -> None:
        with pytest.raises(UnsupportedError):
            decode_placements((record,), mesh_of(2), 2, "w", "f")

    def test_too_few_belong_to_the_last_dims_in_torch_2_3_only(self) -> None:
        old = Mesh((2, 2), (0, 1, 2, 3), order_unrecorded=True)
        assert decode_placements((placement("Shard", dim=0),), old, 1, "w", "f") == (REPLICATE, Placement(0))
        with pytest.raises(CorruptCheckpointError):
            decode_placements((placement("Shard", dim=0),), mesh_of(2, 2), 1, "w", "f")
        with pytest.raises(CorruptCheckpointError):
            decode_placements((placement("Replicate"),) * 3, old, 1, "w", "f")


def device_mesh(**state: Any) -> Recorder:
    record = Recorder()
    record.state = state
    return record


def part(**state: Any) -> Recorder:
    return device_mesh(**state)


def no_reads(_: object) -> list[int]:
    pytest.fail("the ranks are in the pickle")


class TestDeviceMesh:
    def axes(self, *pairs: tuple[tuple[int, ...], tuple[int, ...]]) -> Recorder:
        return part(axes=tuple(part(shape=a, stride=b) for a, b in pairs))

    def test_torch_2_13(self) -> None:
        record = device_mesh(
            _layout=self.axes(((2,), (2,)), ((2,), (1,))),
            _flatten_rank_map=(0, 1, 2, 3),
            _rank=1,
            _mesh_dim_names=("a", "b"),
        )
        mesh = decode_mesh(record, 1, "f", no_reads)
        assert (mesh.shape, mesh.ranks, mesh.names, str(mesh)) == ((2, 2), (0, 1, 2, 3), ("a", "b"), "2 x 2 (a, b)")

    @pytest.mark.parametrize(("rank", "ranks"), [(0, (0, 2)), (1, (1, 3)), (2, (0, 2)), (3, (1, 3))])
    def test_sliced_mesh_is_the_translate_that_holds_the_rank(self, rank: int, ranks: tuple[int, ...]) -> None:
        new = device_mesh(_layout=self.axes(((2,), (2,))), _flatten_rank_map=(0, 1, 2, 3), _rank=rank)
        old = device_mesh(_layout=part(shape=(2,), stride=(2,)), _flatten_rank_map=(0, 1, 2, 3))
        assert decode_mesh(new, rank, "f", no_reads).ranks == ranks
        assert decode_mesh(old, rank, "f", no_reads).ranks == ranks

    def test_flattened_axis(self) -> None:
        """dp_shard x cp flattened to one axis of a ("dp_shard", "tp", "cp") mesh."""
        record = device_mesh(_layout=self.axes(((2, 2), (4, 1))), _flatten_rank_map=tuple(range(8)), _rank=3)
        mesh = decode_mesh(record, 3, "f", no_reads)
        assert (mesh.shape, mesh.ranks) == ((4,), (2, 3, 6, 7))
        nested = device_mesh(_layout=part(shape=((2, 2),), stride=((4, 1),)), _flatten_rank_map=tuple(range(8)))
        assert decode_mesh(nested, 3, "f", no_reads).ranks == (2, 3, 6, 7)

    def test_renamed_rank_files_are_found(self) -> None:
        record = device_mesh(_layout=self.axes(((4,), (1,))), _flatten_rank_map=(0, 1, 2, 3), _rank=1)
        with pytest.raises(CorruptCheckpointError, match="named rank 2, but rank 1 wrote it"):
            decode_mesh(record, 2, "f", no_reads)
        record = device_mesh(
            _layout=part(shape=(4,), stride=(1,)), _flatten_rank_map=(0, 1, 2, 3), _coordinate_on_dim=[1]
        )
        assert decode_mesh(record, 1, "f", no_reads).ranks == (0, 1, 2, 3)
        with pytest.raises(CorruptCheckpointError, match="stands at"):
            decode_mesh(record, 2, "f", no_reads)

    @pytest.mark.parametrize(
        "record",
        [
            None,
            3,
            part(),
            part(_layout=3),
            part(_layout=part(axes=())),
            part(_layout=part(shape=(2,), stride=(1, 1)), _flatten_rank_map=(0, 1)),
            part(_layout=part(shape=(2,), stride=(5,)), _flatten_rank_map=(0, 1)),
            part(_layout=part(shape=(1 << 40,), stride=(1,)), _flatten_rank_map=(0, 1)),
            part(_layout=part(shape=(2,), stride=(0,)), _flatten_rank_map=(0, 1)),
            part(_layout=part(shape=(2,), stride=(1,)), _flatten_rank_map=(7, 8)),
            part(_layout=part(shape=(2,), stride=(1,))),
            part(mesh=3),
        ],
    )
    def test_damaged_ones(self, record: Any) -> None:
        with pytest.raises(CorruptCheckpointError):
            decode_mesh(record, 0, "f", no_reads)
