"""The scheme `fp8-dynamic` against torch's own arithmetic."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from merge_stream.encodings._e4m3 import decode_e4m3, encode_e4m3
from merge_stream.encodings.base import scheme_named
from merge_stream.errors import UnsupportedError

SCHEME = scheme_named("fp8-dynamic")
EPSILON = float(np.finfo(np.float32).eps)
ODD_SHAPES = [(1, 1), (3, 5), (7, 130), (2, 70_000), (129, 65)]


def encoded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Codes (as bytes) and scales."""
    if weight.dtype == torch.bfloat16:
        values: np.ndarray = weight.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    else:
        values = weight.numpy()
    codes, scales = np.empty(values.size, np.uint8), np.empty(4 * len(values), np.uint8)
    bad = SCHEME.encode(values, (codes, scales), 0.0)
    return (
        torch.from_numpy(codes).reshape(weight.shape),
        torch.from_numpy(scales.view(np.float32)).reshape(-1, 1),
        bad,
    )


def by_torch(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule of compressed-tensors in torch."""
    wide = weight.float()
    scale = wide.abs().amax(1, keepdim=True) / 448
    scale = torch.where(scale == 0, EPSILON, scale)
    codes = (wide / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scale


def odd_weight(dtype: torch.dtype) -> torch.Tensor:
    """Rows of zeros, of denormals, of the largest values, of one spike, of ties between codes, of random values."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(12, 96, generator=generator)
    rows[0] = 0
    rows[1] = 1e-41
    rows[2] *= 1e30
    rows[3, 5] = 1e4
    rows[4] = torch.linspace(-448, 448, 96)
    rows[5] = -0.0
    rows[6] *= 1e-38
    rows[7] = torch.arange(96) / 1024
    rows[8, 0] = torch.finfo(torch.float16).max
    return rows.clamp(-60000, 60000).to(dtype) if dtype == torch.float16 else rows.to(dtype)


@pytest.mark.parametrize("lower", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_every_code_is_that_of_torch(lower: int) -> None:
    values = ((np.arange(1 << 16, dtype=np.uint32) << 16) | np.uint32(lower)).view(np.float32)
    wanted = torch.from_numpy(values.copy()).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    codes = np.empty(1 << 16, np.uint8)
    with np.errstate(all="ignore"):
        encode_e4m3(np.abs(values), values, np.empty(1 << 16, np.uint32), codes)
    told = np.abs(values) < 1 << 24  # no quotient is larger than 672, and a weight with NaN is refused
    assert np.array_equal(codes[told], wanted[told])


def test_case_123_values_out_of_range_saturate() -> None:
    """Where ml_dtypes makes NaN of 465, and versions of torch differ; a weight with inf or NaN is refused."""
    values = np.array([447, 448, 464, 465, 480, -480, 1e4, -0.0, 2.0**-9, 2.0**-10, 1e-40], "f4")
    codes = np.empty(len(values), np.uint8)
    encode_e4m3(np.abs(values), values, np.empty(len(values), np.uint32), codes)
    found = decode_e4m3(codes)
    wanted = [448, 448, 448, 448, 448, -448, 448, 0, 2.0**-9, 0, 0]
    assert np.array_equal(found, np.array(wanted, "f4"))
    assert np.signbit(found[7])


def test_every_code_decodes_as_in_torch() -> None:
    codes = np.arange(256, dtype=np.uint8)
    wanted = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(decode_e4m3(codes), wanted, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_and_scales_are_those_of_torch(dtype: torch.dtype) -> None:
    weight = odd_weight(dtype)
    codes, scales, bad = encoded(weight)
    wanted, scale = by_torch(weight)
    assert not bad
    assert torch.equal(scales, scale)
    assert torch.equal(codes, wanted)


@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_any_shape(shape: tuple[int, int]) -> None:
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    codes, scales, bad = encoded(weight)
    wanted, scale = by_torch(weight)
    assert not bad
    assert torch.equal(scales, scale)
    assert torch.equal(codes, wanted)


@pytest.mark.parametrize(("value", "count"), [(float("nan"), 1), (float("inf"), 2), (float("-inf"), 1)])
def test_values_that_are_not_finite_are_counted(value: float, count: int) -> None:
    weight = torch.ones(4, 8)
    weight.view(-1)[torch.arange(count) * 9] = value
    assert encoded(weight)[2] == count


def test_a_float64_source() -> None:
    weight = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    codes, scales, _ = encoded(weight)
    wanted, scale = by_torch(weight)
    assert torch.equal(codes, wanted)
    assert torch.equal(scales, scale)


def test_decoding_gives_what_engines_compute_with() -> None:
    weight = odd_weight(torch.float32)
    codes, scales, _ = encoded(weight)
    outs = (codes.numpy().reshape(-1), scales.numpy().reshape(-1).view(np.uint8))
    assert np.array_equal(SCHEME.decode(outs, 96, 0.0), (codes.view(torch.float8_e4m3fn).float() * scales).numpy())


def test_a_scheme_that_is_not_there() -> None:
    with pytest.raises(UnsupportedError) as caught:
        scheme_named("fp9")
    assert "'fp9'" in caught.value.message
    assert "fp8-dynamic" in caught.value.hint
