"""Casts equal torch's bit by bit, count what they lose, and do not depend on how a tensor is cut."""

from __future__ import annotations

import itertools
from typing import get_args

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from merge_stream.encodings import cast
from merge_stream.encodings.cast import Cast, encoding_for
from merge_stream.options import DtypeName
from merge_stream.tensors.dtype import DTYPES, DType, dtype_named

FLOATS = [d for d in DTYPES if d.kind == "float"]
NAMES: dict[DtypeName, str] = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
PAIRS = [(s, n) for s, n in itertools.product(FLOATS, NAMES) if s.name != NAMES[n]]
IDS = [f"{s}-{n}" for s, n in PAIRS]


def target(name: DtypeName) -> DType:
    found = dtype_named(NAMES[name])
    assert found is not None
    return found


def patterns(source: DType) -> np.ndarray:
    """Bits worth a look: all of a 16-bit type; else random ones, borders of all targets, and halves between."""
    if source.itemsize == 2:
        return np.arange(1 << 16, dtype=np.uint16)
    rng = np.random.default_rng(1)
    kind = np.dtype(np.float32 if source.itemsize == 4 else np.float64)
    borders = [torch.finfo(getattr(torch, d.torch_name)) for d in FLOATS]
    marks = [v for f in borders for v in (f.max, f.tiny, f.smallest_normal, f.eps, 1 + f.eps / 2, 1 + 1.5 * f.eps)]
    marks += [65504, 65519.996, 65520, 65536, 3.3961775e38, 1e-45, 5.96e-8, 2.98e-8, 2.99e-8, 0.0, np.inf, np.nan]
    with np.errstate(over="ignore", under="ignore"):
        base = np.array([*marks, *(-m for m in marks)]).astype(kind)
        near = [base]
        for _ in range(3):
            near += [np.nextafter(near[-1], end.astype(kind)) for end in (np.array(np.inf), np.array(-np.inf))]
        values = (rng.standard_normal(20_000) * 10.0 ** rng.integers(-30, 30, 20_000)).astype(kind)
    unit = np.dtype(f"u{source.itemsize}")
    noise = rng.integers(0, np.iinfo(unit).max, 50_000, dtype=unit, endpoint=True)
    return np.concatenate([*(n.view(unit) for n in near), values.view(unit), noise])


def encoded(name: DtypeName, source: DType, bits: np.ndarray) -> tuple[np.ndarray, int]:
    out = np.zeros(len(bits) * target(name).itemsize, dtype=np.uint8)
    lost = Cast(name).encode(bits.view(source.numpy()), out.view(target(name).numpy()))
    return out.view(f"u{target(name).itemsize}"), lost


@pytest.mark.parametrize(("source", "name"), PAIRS, ids=IDS)
def test_equal_to_torch_bit_by_bit_and_nan_stays_nan(source: DType, name: DtypeName) -> None:
    bits = patterns(source)
    got, lost = encoded(name, source, bits)
    theirs = torch.frombuffer(bytearray(bits.tobytes()), dtype=getattr(torch, source.torch_name))
    cast = theirs.to(getattr(torch, target(name).torch_name))
    wanted = cast.view(torch.uint8).numpy().view(got.dtype)
    nan = torch.isnan(theirs).numpy()
    assert nan.any()
    assert (got[~nan] == wanted[~nan]).all()
    assert np.isnan(got.view(target(name).numpy())[nan]).all()
    assert lost == int((torch.isinf(cast) & torch.isfinite(theirs)).sum())


@pytest.mark.parametrize(("source", "name"), PAIRS, ids=IDS)
def test_how_a_tensor_is_cut_changes_nothing(source: DType, name: DtypeName) -> None:
    bits = patterns(source)
    whole, lost = encoded(name, source, bits)
    for step in (1, 3, 7, 1000, 65_537):
        part = bits[: 50 * step]
        pieces = [encoded(name, source, part[k : k + step]) for k in range(0, len(part), step)]
        assert (np.concatenate([p for p, _ in pieces]) == whole[: len(part)]).all()
        if len(part) == len(bits):
            assert sum(n for _, n in pieces) == lost


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20))
def test_overflows_are_counted_exactly(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    out = np.zeros(len(array), dtype=np.float16)
    lost = Cast("fp16").encode(array, out)
    assert lost == sum(abs(v) >= 65520 and not np.isinf(v) for v in array.tolist())


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)])
def test_what_is_looked_for_in_the_bits_are_infinities_and_nan(dtype: np.dtype) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):
        finite = np.isfinite(every)
    assert not cast._holds_special(every[finite])
    for special in every[~finite]:
        assert cast._holds_special(np.array([1, special, -1], dtype))


def test_infinities_and_nan_of_the_source_are_no_loss() -> None:
    array = np.array([np.inf, -np.inf, np.nan, 65504], dtype=np.float32)
    out = np.zeros(4, dtype=np.float16)
    assert Cast("fp16").encode(array, out) == 0
    assert out.tolist()[:2] == [np.inf, -np.inf]


def test_scratch_does_not_grow_with_the_tile() -> None:
    """What numpy allocates is outside of the lease, so it must be small, also for 16 workers at once."""
    import tracemalloc

    values = np.full(1 << 21, 1e6, dtype=np.float64)
    out = np.zeros(1 << 21, dtype=np.float16)
    tracemalloc.start()
    assert Cast("fp16").encode(values, out) == 1 << 21
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("name", get_args(DtypeName))
def test_only_floats_are_ever_cast(name: DtypeName) -> None:
    encoding = encoding_for(name)
    for d in DTYPES:
        wanted = target(name) if d.kind == "float" and name != "keep" else d
        assert encoding.target("any", d) is wanted
