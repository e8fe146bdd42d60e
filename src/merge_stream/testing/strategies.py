"""Hypothesis strategies: shapes, tilings, and whole random checkpoints in memory.

    @given(checkpoints())
    def test_...(example): MemorySource(example.contents), example.catalog, example.parameters

An example holds the truth too (`values`), so a test can build the expected model by itself.
Hypothesis is imported when a strategy is asked for: only tests have it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from merge_stream.tensors.box import Box, boxes_of_range
from merge_stream.tensors.dtype import DTYPES, DType
from merge_stream.tensors.parameter import Parameter, Take
from merge_stream.tensors.ref import Catalog, ShardTable, SourceFile, TensorRef

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = ["Example", "checkpoints", "flat_shards", "grid_shards", "shapes", "shards"]

Ints = tuple[int, ...]


@dataclass(slots=True)
class Example:
    """A checkpoint of `contents` (path -> bytes), what its catalog says, and what is made of it.

    values       source name -> the true tensor, as unsigned integers of its item size
    parameters   what a merge writes
    """

    catalog: Catalog
    contents: dict[str, bytes]
    values: dict[str, np.ndarray]
    parameters: tuple[Parameter, ...]


@dataclass(slots=True)
class _Files:
    """Rank files under construction: shards are appended with gaps, so no offset is a round number by luck."""

    draw: DrawFn
    rng: np.random.Generator
    chunks: list[bytearray]
    tensors: dict[str, TensorRef] = field(default_factory=dict)
    values: dict[str, np.ndarray] = field(default_factory=dict)

    def put(self, k: int, data: bytes, gap: int) -> int:
        """Append to file k; returns the offset."""
        self.chunks[k] += b"\xee" * gap
        self.chunks[k] += data
        return len(self.chunks[k]) - len(data)


def shapes(*, most_dims: int = 5, most_elements: int = 300) -> SearchStrategy[Ints]:
    """Shapes with zeros, ones, primes and no dims at all."""
    from hypothesis import strategies as st

    extents = st.sampled_from([1, 2, 3, 4, 5, 7, 13, 2, 3, 1, 0])
    return (
        st.lists(extents, max_size=most_dims)
        .map(tuple)
        .filter(lambda s: math.prod(max(n, 1) for n in s) <= most_elements)
    )


def grid_shards(shape: Ints) -> SearchStrategy[list[Box]]:
    """The boxes of a mesh: each dim is cut somewhere, evenly or not."""
    from hypothesis import strategies as st

    inner = [st.lists(st.integers(0, n), max_size=2) for n in shape]
    return st.tuples(*inner).map(
        lambda cuts: _grid([sorted({0, n, *some}) for n, some in zip(shape, cuts, strict=True)])
    )


def flat_shards(shape: Ints) -> SearchStrategy[list[Box]]:
    """The boxes of flat ranges, as FSDP1 and ZeRO cut a flattened tensor."""
    from hypothesis import strategies as st

    size = math.prod(shape)

    def boxes(cuts: Sequence[int]) -> list[Box]:
        edges = sorted({0, size, *cuts})
        return [b for low, high in itertools.pairwise(edges) for b in boxes_of_range(shape, low, high)]

    return st.lists(st.integers(0, size), max_size=4).map(boxes)


def shards(shape: Ints) -> SearchStrategy[list[Box]]:
    """Boxes that tile `shape` exactly once, none empty, in any order."""
    from hypothesis import strategies as st

    return st.one_of(grid_shards(shape), flat_shards(shape)).flatmap(st.permutations).map(list)


def checkpoints(*, dtypes: Sequence[DType] = DTYPES, most_parameters: int = 3) -> SearchStrategy[Example]:
    """Random checkpoints with parameters made of whole, sliced, joined, split and permuted sources."""
    from hypothesis import strategies as st

    @st.composite
    def build(draw: DrawFn) -> Example:
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        files = _Files(draw, rng, [bytearray() for _ in range(draw(st.integers(1, 4)))])
        count = draw(st.integers(1, most_parameters))
        made = tuple(_parameter(files, f"layers.{k}.weight", draw(st.sampled_from(dtypes))) for k in range(count))
        sources = tuple(SourceFile(f"rank{k}", f"rank{k}", len(c), 0) for k, c in enumerate(files.chunks))
        contents = {f"rank{k}": bytes(c) for k, c in enumerate(files.chunks)}
        return Example(Catalog("random", "memory", files.tensors, sources), contents, files.values, made)

    return build()


def _sliced(shape: Ints) -> list[SearchStrategy[list[Box]]]:
    """For each dim: slices along it, which in the last dim means columns."""
    from hypothesis import strategies as st

    found = []
    for axis, extent in enumerate(shape):
        if extent > 1:
            cuts = [[[0, n]] for n in shape]
            cuts[axis] = [[0, k, extent] for k in range(1, extent)]
            found.append(st.tuples(*map(st.sampled_from, cuts)).map(_grid))
    return found


def _grid(cuts: Sequence[Sequence[int]]) -> list[Box]:
    """The cells between the cuts of each dim, empty ones left out."""
    sides = [list(itertools.pairwise(edges)) for edges in cuts]
    cells = [Box(tuple(a for a, _ in cell), tuple(b for _, b in cell)) for cell in itertools.product(*sides)]
    return [cell for cell in cells if cell.size]


def _parameter(files: _Files, name: str, dtype: DType) -> Parameter:
    """A parameter whose view is tiled by takes, each from a source of its own."""
    from hypothesis import strategies as st

    draw = files.draw
    view = draw(shapes())
    whole = [Box.whole(view)] if math.prod(view) else []
    boxes = draw(st.one_of(st.just(whole), grid_shards(view), *_sliced(view)))
    takes = tuple(_take(files, f"{name}.{k}", box, dtype) for k, box in enumerate(boxes))
    if not takes:
        _source(files, f"{name}.empty", view, dtype)
        takes = (Take(f"{name}.empty", Box.whole(view), Box.whole(view)),)
    return Parameter(name, _joined(draw, view), view, takes)


def _joined(draw: DrawFn, view: Ints) -> Ints:
    """The view's shape, with some neighbouring dims joined in one."""
    from hypothesis import strategies as st

    shape = list(view[:1])
    for extent in view[1:]:
        if draw(st.integers(0, 3)) == 0:
            shape[-1] *= extent
        else:
            shape.append(extent)
    return tuple(shape)


def _take(files: _Files, name: str, dest: Box, dtype: DType) -> Take:
    """A source that holds `dest` somewhere inside, perhaps permuted, perhaps with its leading dims joined."""
    from hypothesis import strategies as st

    draw = files.draw
    ndim = len(dest.shape)
    permute = draw(st.one_of(st.just(()), st.permutations(range(ndim)).map(tuple))) if ndim else ()
    moved = [permute.index(axis) for axis in range(ndim)] if permute else range(ndim)
    inner = tuple(dest.shape[axis] for axis in moved)
    margins = st.sampled_from([0, 0, 0, 1, 3])
    start = tuple(draw(margins) for _ in inner)
    seen = tuple(a + n + draw(margins) for a, n in zip(start, inner, strict=True))
    joined = draw(st.integers(0, ndim)) if draw(st.booleans()) else 0
    shape = (math.prod(seen[:joined]), *seen[joined:]) if joined else seen
    _source(files, name, shape, dtype)
    box = Box(start, tuple(a + n for a, n in zip(start, inner, strict=True)))
    return Take(name, box, dest, seen[:joined], permute)


def _source(files: _Files, name: str, shape: Ints, dtype: DType) -> None:
    """A tensor of random bits, its shards spread over the files, some of them twice."""
    from hypothesis import strategies as st

    draw = files.draw
    unit = np.dtype(f"u{dtype.itemsize}")
    bits = files.rng.integers(0, 2 if dtype.kind == "bool" else 256, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    values = bits.view(unit).reshape(shape)
    rows: list[tuple[Box, int, int]] = []
    copies: list[tuple[Box, int, int]] = []
    for box in draw(shards(shape)):
        data = values[box.slices((0,) * len(shape))].tobytes()
        for table in (rows, copies) if draw(st.integers(0, 4)) == 0 else (rows,):
            k = draw(st.integers(0, len(files.chunks) - 1))
            table.append((box, k, files.put(k, data, draw(st.sampled_from([0, 1, 7, 64])))))
    replicas = ShardTable.of(copies, len(shape)) if copies else None
    files.tensors[name] = TensorRef(name, dtype, shape, ShardTable.of(rows, len(shape)), replicas)
    files.values[name] = values
