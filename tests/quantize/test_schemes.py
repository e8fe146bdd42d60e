"""Every scheme against what compressed-tensors 0.20 itself made of the same weights, byte for byte.

The truths were written by tests/makers/compressed.py. And rules that hold for all schemes.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from merge_stream.encodings.base import Scheme, row_nbytes, scheme_named, scheme_that_wrote, schemes, weights_in
from merge_stream.engine.largest import largest_of
from tests.makers import compressed as maker

TRUTHS = Path(__file__).parent.parent / "data" / "quantize"
WEIGHTS = load_file(TRUTHS / "sources.safetensors")
ORACLE = importlib.util.find_spec("compressed_tensors") is not None
BY_LIBRARY = [scheme for scheme in schemes() if scheme.name in maker.PRESETS]
ODD_SHAPES = [(1, 1), (3, 5), (7, 130), (2, 70_000), (129, 65), (256, 384)]
PLAIN = [scheme for scheme in schemes() if not scheme.transposed]
ids = pytest.mark.parametrize("scheme", PLAIN, ids=lambda scheme: scheme.name)
by_library = pytest.mark.parametrize("scheme", BY_LIBRARY, ids=lambda scheme: scheme.name)


def encoded(scheme: Scheme, values: np.ndarray) -> tuple[dict[str, bytes], int]:
    """The bytes of each part by its suffix, and the number of values that are not finite."""
    parts = scheme.parts("w", values.shape)
    largest = float(np.abs(values.astype(np.float32)).max()) if scheme.measured else 0.0
    outs = [np.zeros(_nbytes(p.shape, p.dtype.itemsize), np.uint8) for p in parts if p.per]
    bad = scheme.encode(values, outs, largest)
    whole = iter(scheme.whole(values.shape, largest))
    rows = iter(outs)
    return {p.name: next(rows).tobytes() if p.per else next(whole) for p in parts}, bad


def _nbytes(shape: tuple[int, ...], itemsize: int) -> int:
    return int(np.prod(shape)) * itemsize


def decoded(scheme: Scheme, values: np.ndarray, parts: dict[str, bytes]) -> np.ndarray:
    largest = float(np.abs(values.astype(np.float32)).max()) if scheme.measured else 0.0
    outs = [np.frombuffer(parts[p.name], np.uint8) for p in scheme.parts("w", values.shape) if p.per]
    return scheme.decode(outs, values.shape[1], largest)


def library_name(scheme: Scheme, part: str) -> str:
    """The block form of compressed-tensors differs in the name of its scales alone."""
    return "weight" + part.removeprefix("w").replace("_scale_inv", "_scale")


def assert_equal(scheme: Scheme, values: np.ndarray, wanted: dict[str, torch.Tensor]) -> None:
    parts, bad = encoded(scheme, values)
    assert not bad
    assert {library_name(scheme, name) for name in parts} == set(wanted)
    for part in scheme.parts("w", values.shape):
        truth = wanted[library_name(scheme, part.name)]
        assert tuple(truth.shape) == part.shape
        assert str(truth.dtype).removeprefix("torch.") == part.dtype.torch_name
        assert parts[part.name] == truth.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("scheme", "name"),
    [(scheme, name) for scheme in BY_LIBRARY for name in sorted(maker.sources(scheme.name, WEIGHTS))],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_bytes_are_those_of_compressed_tensors(scheme: Scheme, name: str) -> None:
    source = maker.sources(scheme.name, WEIGHTS)[name]
    stored = load_file(TRUTHS / f"{scheme.name}.safetensors")
    wanted = {key.partition(".")[2]: tensor for key, tensor in stored.items() if key.startswith(f"{name}.")}
    assert_equal(scheme, source.numpy(), wanted)
    if name.endswith("_bf16"):
        assert_equal(scheme, source.bfloat16().view(torch.uint16).numpy().view(ml_dtypes.bfloat16), wanted)
    assert_equal(scheme, source.double().numpy(), wanted)


@pytest.mark.skipif(not ORACLE, reason="compressed-tensors is not installed")
@by_library
def test_bytes_are_those_of_the_library_that_is_installed(scheme: Scheme) -> None:
    generator = torch.Generator().manual_seed(11)
    for scale in (1e-3, 1.0, 3e4):
        weight = torch.randn(256, 512, generator=generator) * scale
        assert_equal(scheme, weight.numpy(), maker.compressed(scheme.name, weight))


@ids
def test_every_truth_has_its_scheme(scheme: Scheme) -> None:
    assert scheme.name in maker.PRESETS
    assert scheme_named(scheme.name) is scheme
    assert scheme_that_wrote(scheme.settings(["lm_head"])) is scheme


@ids
@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_any_shape_is_taken_or_refused_with_a_reason(scheme: Scheme, shape: tuple[int, int]) -> None:
    values = np.random.default_rng(1).standard_normal(shape, np.float32)
    if scheme.fits(shape):
        assert any(str(extent) in scheme.fits(shape) for extent in shape)
        return
    parts, bad = encoded(scheme, values)
    assert not bad
    found = decoded(scheme, values, parts)
    assert found.shape == shape
    assert found.dtype == np.float32
    assert float(np.abs(found - values).max()) < 0.7


@ids
def test_bytes_do_not_depend_on_where_rows_are_cut(scheme: Scheme) -> None:
    values = np.random.default_rng(2).standard_normal((384, 256), np.float32)
    wanted, _ = encoded(scheme, values)
    largest = float(np.abs(values).max()) if scheme.measured else 0.0
    for cuts in ([128], [256], [128, 256]):
        found: dict[str, bytes] = {}
        for low, high in zip([0, *cuts], [*cuts, 384], strict=True):
            parts = [p for p in scheme.parts("w", values.shape) if p.per]
            outs = [np.zeros(-(-(high - low) // p.per) * row_nbytes(p, values.shape), np.uint8) for p in parts]
            scheme.encode(values[low:high], outs, largest)
            for part, out in zip(parts, outs, strict=True):
                found[part.name] = found.get(part.name, b"") + out.tobytes()
        assert all(found[name] == wanted[name] for name in found)


@ids
@pytest.mark.parametrize(("value", "count"), [(float("nan"), 1), (float("inf"), 2), (float("-inf"), 1)])
def test_values_that_are_not_finite_are_counted(scheme: Scheme, value: float, count: int) -> None:
    """Each in a group of its own; the count is exact or more than nothing."""
    values = np.ones((256, 256), np.float32)
    values[[0, 200][:count], [3, 255][:count]] = value
    if scheme.measured:  # the pass before finds them
        assert not np.isfinite(largest_of(values))
    else:
        assert encoded(scheme, values)[1] == count


@ids
def test_a_double_that_float32_cannot_hold_counts_as_infinite(scheme: Scheme) -> None:
    values = np.ones((128, 256))
    values[5, 70] = -1e300
    if scheme.measured:
        assert not np.isfinite(largest_of(values))
    else:
        assert encoded(scheme, values)[1] == 1


@pytest.mark.parametrize("scheme", [s for s in PLAIN if s.name in {"mxfp8", "mxfp4"}], ids=lambda scheme: scheme.name)
def test_the_largest_finite_values_are_no_infinity(scheme: Scheme) -> None:
    """Their exponent is that of an infinite group: only a look at the values tells them apart."""
    values = np.full((1, 128), np.finfo(np.float32).max)
    assert encoded(scheme, values)[1] == 0
    values[0, 7] = np.inf
    assert encoded(scheme, values)[1] == 1


@ids
def test_the_weights_of_a_model_are_found_by_their_codes(scheme: Scheme) -> None:
    shape = (256, 384)
    parts = scheme.parts("model.layers.0.mlp.up_proj.weight", shape)
    others = {"model.norm.weight": parts[0].__class__("model.norm.weight", parts[-1].dtype, (384,))}
    assert weights_in(scheme, {p.name: p for p in parts} | others) == {"model.layers.0.mlp.up_proj.weight": shape}


@ids
@settings(max_examples=40, deadline=None)
@given(
    power=st.integers(-40, 40),
    seed=st.integers(0, 2**32 - 1),
    rows=st.sampled_from([1, 2, 3, 127, 128, 130]),
    groups=st.integers(1, 3),
)
def test_codes_do_not_depend_on_the_unit(scheme: Scheme, power: int, seed: int, rows: int, groups: int) -> None:
    """A weight times a power of two has the same codes; what it stands for is the same times that power."""
    values = np.random.default_rng(seed).standard_normal((rows, 128 * groups)).astype(np.float32)
    if scheme.fits(values.shape):
        values = np.resize(values, (128, 128 * groups))
    values[rows // 2, ::3] = 0
    moved = values * np.float32(2.0**power)
    first, _ = encoded(scheme, values)
    other, _ = encoded(scheme, moved)
    codes = scheme.parts("w", values.shape)[0].name
    assert first[codes] == other[codes]
    assert np.array_equal(decoded(scheme, values, first) * np.float32(2.0**power), decoded(scheme, moved, other))


@ids
def test_no_value_is_further_from_its_code_than_half_a_step(scheme: Scheme) -> None:
    """Each code is the nearest: no neighbour of a code in its region stands for something nearer."""
    values = np.random.default_rng(7).standard_normal((128, 256)).astype(np.float32)
    parts, _ = encoded(scheme, values)
    found = decoded(scheme, values, parts)
    there = np.abs(found - values)
    side = {"fp8-block": 128, "int4": 128, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}.get(scheme.name, 256)
    rows = 128 if scheme.name in {"fp8-block", "fp8"} else 1
    for top in range(0, 128, rows):
        for left in range(0, 256, side):
            region = (slice(top, top + rows), slice(left, left + side))
            levels = np.unique(np.concatenate([found[region].ravel(), -found[region].ravel()]))
            nearest = np.abs(values[region].ravel()[:, None] - levels[None]).min(axis=1)
            assert float((there[region].ravel() - nearest).max()) <= 1e-6 * np.abs(values[region]).max()
