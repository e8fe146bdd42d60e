"""A comparison finds one bit among millions, says where and how large it is, and takes NaN for NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest

from merge_stream.encodings.cast import Cast
from merge_stream.engine.assembler import Assembler, slab_bytes
from merge_stream.engine.budget import MemoryBudget
from merge_stream.engine.compare import Difference, Pair, Tolerance, compare_pairs
from merge_stream.engine.events import Silent
from merge_stream.engine.executor import StopFlag
from merge_stream.planning.plan import Assembly, ParameterPlan, ResolvedTake
from merge_stream.storage.memory import MemorySource
from merge_stream.tensors.box import Box
from merge_stream.tensors.dtype import DTYPES, DType, dtype_named
from merge_stream.tensors.ref import ShardTable, SourceFile

Ints = tuple[int, ...]
EXACT = Tolerance()


def dtype(name: str) -> DType:
    found = dtype_named(name)
    assert found is not None
    return found


def parameter(name: str, kind: DType, shape: Ints, file: int) -> ParameterPlan:
    whole = Box.whole(shape)
    take = ResolvedTake(ShardTable.of([(whole, file, 0)], len(shape)), whole, whole)
    return ParameterPlan(name, shape, Assembly(shape, kind, (take,)), kind, 0, 0)


def compared(
    kind: DType,
    shape: Ints,
    wanted: np.ndarray,
    got: np.ndarray,
    *,
    tolerance: Tolerance = EXACT,
    segment: int = 1 << 16,
    workers: int = 2,
    first_only: bool = False,
) -> list[Difference]:
    source = MemorySource({"a": wanted.tobytes(), "b": got.tobytes()})
    files = [SourceFile(n, n, wanted.nbytes, 0) for n in "ab"]
    pair = Pair("t", parameter("t", kind, shape, 0), parameter("t", kind, shape, 1))

    def assembler() -> Assembler:
        return Assembler(source, files, Cast("keep"))

    return compare_pairs(
        [pair],
        assembler,
        assembler,
        budget=MemoryBudget(slots=workers, slab_bytes=slab_bytes(segment, compare=True)),
        segment_bytes=segment,
        observer=Silent(),
        stop=StopFlag(),
        tolerance=tolerance,
        first_only=first_only,
    )


F32 = dtype("F32")


@pytest.mark.parametrize("at", [0, 1, 65_535, 65_536, 99_999, 299_999])
@pytest.mark.parametrize("segment", [4096, 1 << 16, 1 << 21])
def test_one_ulp_is_found_with_its_index_and_size(at: int, segment: int) -> None:
    wanted = np.random.default_rng(0).standard_normal(300_000).astype(np.float32)
    got = wanted.copy()
    got[at] = np.nextafter(got[at], np.float32(np.inf))
    (d,) = compared(F32, (300, 1000), wanted, got, segment=segment)
    assert (d.count, d.size, d.first) == (1, 300_000, (at // 1000, at % 1000))
    assert d.max_abs == float(got[at]) - float(wanted[at])
    assert d.max_rel == pytest.approx(d.max_abs / abs(float(wanted[at])))
    assert (d.first_wanted, d.first_got) == (float(wanted[at]), float(got[at]))
    assert f"first at {[at // 1000, at % 1000]}" in str(d)


def test_many_differences_are_counted_over_all_tiles_and_the_first_is_the_first() -> None:
    wanted = np.zeros(100_000, dtype=np.float32)
    got = wanted.copy()
    places = np.random.default_rng(0).choice(100_000, 1234, replace=False)
    got[places] = np.arange(1, 1235)
    (d,) = compared(F32, (100_000,), wanted, got, segment=1000, workers=4)
    assert (d.count, d.first, d.max_abs) == (1234, (int(places.min()),), 1234.0)
    assert d.max_rel == math.inf  # of zero


@pytest.mark.parametrize("kind", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0,), (4, 0), (7,)])
def test_every_type_and_shape(kind: DType, shape: Ints) -> None:
    n = math.prod(shape)
    bits = np.random.default_rng(3).integers(0, 2 if kind.kind == "bool" else 256, n * kind.itemsize, dtype=np.uint8)
    assert compared(kind, shape, bits, bits.copy()) == []
    if n:
        other = bits.copy()
        other[(n - 1) * kind.itemsize] ^= 1
        (d,) = compared(kind, shape, bits, other)
        assert (d.count, d.size) == (1, n)
        assert d.first == tuple(s - 1 for s in shape)


def test_large_integers_that_differ_by_one_differ_by_one() -> None:
    """float64 cannot tell 2**53 from 2**53 + 1."""
    for name, base in (("I64", 2**62), ("U64", 2**63), ("I64", -(2**60))):
        kind = dtype(name)
        wanted = np.array([base], dtype=kind.numpy())
        (d,) = compared(kind, (1,), wanted, wanted + np.array(1, dtype=kind.numpy()))
        assert (d.count, d.max_abs) == (1, 1.0)


def test_complex_values_are_told_by_their_size() -> None:
    wanted, got = np.array([3 + 4j], dtype=np.complex64), np.array([3 + 5j], dtype=np.complex64)
    (d,) = compared(dtype("C64"), (1,), wanted, got)
    assert (d.max_abs, d.first_wanted, round(d.first_got, 3)) == (1.0, 5.0, 5.831)


class TestNotANumber:
    nan, other = np.array([0x7FC00000], dtype=np.uint32), np.array([0x7FC00001], dtype=np.uint32)
    one = np.array([1.0], dtype=np.float32)

    def test_equal_bits_are_equal(self) -> None:
        assert compared(F32, (1,), self.nan, self.nan.copy()) == []

    def test_other_bits_differ_by_nothing(self) -> None:
        """Bits decide, and the size of the difference is zero."""
        (d,) = compared(F32, (1,), self.nan, self.other)
        assert (d.count, d.max_abs, d.max_rel) == (1, 0.0, 0.0)
        assert compared(F32, (1,), self.nan, self.other, tolerance=Tolerance(1e-30, 0)) == []

    @pytest.mark.parametrize("tolerance", [EXACT, Tolerance(1e9, 1e9)])
    def test_a_number_is_never_close_to_it(self, tolerance: Tolerance) -> None:
        for pair in ((self.nan, self.one), (self.one, self.nan)):
            (d,) = compared(F32, (1,), *pair, tolerance=tolerance)
            assert (d.count, d.max_abs) == (1, math.inf)


class TestTolerance:
    def check(self, wanted: list[float], got: list[float], atol: float, rtol: float) -> int:
        arrays = [np.array(x, dtype=np.float32) for x in (wanted, got)]
        found = compared(F32, (len(wanted),), *arrays, tolerance=Tolerance(atol, rtol))
        assert len(found) <= 1
        return found[0].count if found else 0

    def test_absolute_and_relative(self) -> None:
        assert self.check([1, 100], [1.25, 100.25], 0.25, 0) == 0
        assert self.check([1, 100], [1.25, 100.25], 0.2, 0) == 2
        assert self.check([1, 128], [1.25, 128.25], 0, 0.01) == 1
        assert self.check([-128], [-128.5], 0, 1 / 256) == 0

    def test_zeros_of_both_signs_are_close(self) -> None:
        assert self.check([0.0], [-0.0], 0, 0.1) == 0
        assert self.check([0.0], [-0.0], 0, 0) == 1  # but not of equal bits

    def test_nothing_finite_is_close_to_infinity(self) -> None:
        """Although any error is <= rtol * infinity."""
        assert self.check([math.inf], [1.0], 0, 0.1) == 1
        assert self.check([1.0], [math.inf], 0, 0.1) == 1
        assert self.check([math.inf], [-math.inf], 1e9, 1e9) == 1
        assert self.check([math.inf, -math.inf], [math.inf, -math.inf], 0, 0.1) == 0


def test_first_only_stops_reading_at_the_first_difference() -> None:
    wanted = np.zeros(1 << 18, dtype=np.float32)
    got = wanted + 1
    (d,) = compared(F32, (1 << 18,), wanted, got, segment=4096, workers=1, first_only=True)
    assert d.count == 1024  # one tile


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "F64"])
def test_a_nan_of_any_kind_is_no_warning_and_no_number(name: str) -> None:
    """Signaling NaNs make numpy warn; warnings are errors here."""
    kind = dtype(name)
    bits = {"F32": 0x7F800001, "F16": 0x7C01, "BF16": 0x7F81, "F64": 0x7FF0000000000001}[name]
    unsigned = f"u{kind.itemsize}"
    one = np.array([1.0, 2.0, 3.0, 4.0]).astype(kind.numpy())
    other = one.copy()
    other.view(unsigned)[1] = bits
    for tolerance in (EXACT, Tolerance(1.0, 1.0)):
        (found,) = compared(kind, (4,), one, other, tolerance=tolerance)
        assert (found.count, found.max_abs, found.max_rel) == (1, math.inf, math.inf)
        assert math.isnan(found.first_got)
    quiet = other.copy()
    quiet.view(unsigned)[1] |= 1 << {"F32": 22, "F16": 9, "BF16": 6, "F64": 51}[name]
    (found,) = compared(kind, (4,), other, quiet)
    assert (found.count, found.max_abs, found.max_rel) == (1, 0.0, 0.0)
    assert compared(kind, (4,), other, quiet, tolerance=Tolerance(0.1, 0.0)) == []


def test_infinities_of_two_signs_are_infinitely_far() -> None:
    one, other = np.array([np.inf, 1.0], np.float32), np.array([-np.inf, 1.0], np.float32)
    (found,) = compared(F32, (2,), one, other, tolerance=Tolerance(1.0, 1.0))
    assert (found.count, found.max_abs, found.max_rel) == (1, math.inf, math.inf)
