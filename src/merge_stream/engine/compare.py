"""Streamed comparison of tensors, tile by tile, in the same bound as a merge.

Bits decide: two tiles are equal when their bytes are. Only tiles that differ are looked at
as numbers, in blocks, for the size of the difference.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from merge_stream.engine.assembler import Assembler
from merge_stream.engine.budget import MemoryBudget
from merge_stream.engine.events import Observer, Progress
from merge_stream.engine.executor import StopFlag, run_workers
from merge_stream.planning.plan import ParameterPlan
from merge_stream.planning.segments import tiles_of
from merge_stream.tensors.box import Box, row_major_strides
from merge_stream.tensors.dtype import DType

__all__ = ["Difference", "Pair", "Tolerance", "compare_pairs"]

_BLOCK = 64 << 10


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|got - wanted| <= atol + rtol * |wanted| counts as equal; both zero: bits must be equal."""

    atol: float = 0.0
    rtol: float = 0.0

    @property
    def exact(self) -> bool:
        """True when only equal bits are equal."""
        return self.atol == 0 and self.rtol == 0


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Two tensors of one view and element type; `name` for messages."""

    name: str
    wanted: ParameterPlan
    got: ParameterPlan


@dataclass(slots=True)
class Difference:
    """How two tensors differ: `count` of `size` elements, largest errors, the first place."""

    name: str
    size: int
    count: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    first: tuple[int, ...] | None = None
    first_wanted: float = 0.0
    first_got: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.count} of {self.size} elements differ, max abs {self.max_abs:.6g}, "
            f"max rel {self.max_rel:.6g}, first at {list(self.first or ())}: wanted {self.first_wanted!r}, "
            f"got {self.first_got!r}"
        )


def compare_pairs(
    pairs: Sequence[Pair],
    wanted: Callable[[], Assembler],
    got: Callable[[], Assembler],
    *,
    budget: MemoryBudget,
    segment_bytes: int,
    observer: Observer,
    stop: StopFlag,
    tolerance: Tolerance = Tolerance(),
    first_only: bool = False,
) -> list[Difference]:
    """The tensors that differ, in the order of `pairs`.

    `wanted` and `got` make an assembler for each worker. `first_only` ends a tensor at its
    first tile that differs (for yes-or-no questions).
    """
    found: dict[int, Difference] = {}
    tell = threading.Lock()

    def items() -> Iterator[tuple[int, Box, int]]:
        for index, pair in enumerate(pairs):
            most = max(segment_bytes // _width(pair), 1)
            at = 0
            for box in tiles_of(pair.wanted.source.view, most):
                if first_only and index in found:
                    break
                yield index, box, at
                at += box.size

    def worker(work: Iterable[tuple[int, Box, int]]) -> None:
        a, b = wanted(), got()
        for index, box, at in work:
            stop.check()
            pair = pairs[index]
            nbytes = box.size * pair.wanted.dtype.itemsize
            with budget.lease() as lease:
                x, y = lease.take(nbytes), lease.take(nbytes)
                a.tile(pair.wanted, box, x, lease)
                b.tile(pair.got, box, y, lease)
                if not _same(x, y):
                    part = Difference(pair.name, pair.wanted.size)
                    _measure(x, y, pair.wanted.dtype, tolerance, at, part, pair.wanted.shape)
                    if part.count:
                        with tell:
                            _join(found, index, part)
            with tell:
                observer(Progress(nbytes))

    run_workers(items(), worker, budget.slots, stop)
    return [found[k] for k in sorted(found)]


def _width(pair: Pair) -> int:
    return max(p.dtype.itemsize if k else p.source.dtype.itemsize for p in (pair.wanted, pair.got) for k in (0, 1))


def _same(x: np.ndarray, y: np.ndarray) -> bool:
    whole = len(x) & ~7
    return bool(
        np.array_equal(x[:whole].view(np.uint64), y[:whole].view(np.uint64)) and np.array_equal(x[whole:], y[whole:])
    )


def _measure(  # noqa: PLR0917 - numbers of one tile
    x: np.ndarray,
    y: np.ndarray,
    dtype: DType,
    tolerance: Tolerance,
    at: int,
    into: Difference,
    shape: tuple[int, ...],
) -> None:
    a, b = x.view(dtype.numpy()), y.view(dtype.numpy())
    raw_a, raw_b = x.view(f"u{dtype.itemsize}"), y.view(f"u{dtype.itemsize}")
    wide = _wide(dtype)
    for low in range(0, len(a), _BLOCK):
        high = min(low + _BLOCK, len(a))
        with np.errstate(all="ignore"):
            p, q = a[low:high].astype(wide), b[low:high].astype(wide)  # a signaling NaN makes numpy warn
            error = np.abs(p - q)
            unlike = raw_a[low:high] != raw_b[low:high]
            if not tolerance.exact:
                near = np.isfinite(error) & (error <= tolerance.atol + tolerance.rtol * np.abs(p))
                unlike &= ~(near | (np.isnan(p) & np.isnan(q)) | (p == q))
            where = np.flatnonzero(unlike)
            if not len(where):
                continue
            error[np.isnan(p) & np.isnan(q)] = 0  # other bits, no other value
            relative = np.nan_to_num(error[where] / np.abs(p[where]), nan=0.0, posinf=np.inf)
            relative[~np.isfinite(error[where])] = np.inf  # a number beside NaN, or another infinity
            into.max_abs = max(into.max_abs, float(np.nan_to_num(error[where], nan=np.inf, posinf=np.inf).max()))
            into.max_rel = max(into.max_rel, float(relative.max()))
        if into.first is None:
            k = int(where[0])
            into.first = _index(at + low + k, shape)
            if dtype.kind == "complex":
                p, q = np.abs(p), np.abs(q)
            into.first_wanted, into.first_got = float(p[k]), float(q[k])
        into.count += len(where)


def _wide(dtype: DType) -> type[np.generic]:
    """A type that holds every value of `dtype`, so that a difference of one is seen as one."""
    if dtype.kind == "complex":
        return np.complex128
    return np.longdouble if dtype.kind == "int" and dtype.itemsize == 8 else np.float64


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(flat // s % n for s, n in zip(row_major_strides(shape), shape, strict=True))


def _join(found: dict[int, Difference], index: int, part: Difference) -> None:
    known = found.get(index)
    if known is None:
        found[index] = part
        return
    known.count += part.count
    known.max_abs, known.max_rel = max(known.max_abs, part.max_abs), max(known.max_rel, part.max_rel)
    if part.first is not None and (known.first is None or part.first < known.first):
        known.first, known.first_wanted, known.first_got = part.first, part.first_wanted, part.first_got
