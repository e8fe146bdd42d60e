"""Folding equals peft's `merge_and_unload` bit by bit, whatever the memory, the workers and the interruptions."""

from __future__ import annotations

import pathlib
import tempfile
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from merge_stream.api import merge
from merge_stream.engine.events import Phase, Progress, Warned
from merge_stream.engine.executor import StopFlag
from merge_stream.engine.fold import _multiply
from merge_stream.engine.fold_norms import RowNorms, column_norms
from merge_stream.errors import InterruptedRunError
from merge_stream.options import LoraChoice, MergeOptions
from merge_stream.tensors.dtype import DType, dtype_named
from tests.lora.goldens import NAMES, differences, golden, read_model, write_state

FOLD = MergeOptions(lora=LoraChoice("merge"), layout="as-is")
SEVERAL_TILES = [
    "conv1d_dora",
    "dora_bf16_fp32",
    "dora_fp32_bf16",
    "embedding_dora",
    "embedding_fp32",
    "experts_bf16_bf16",
    "experts_transposed",
    "lora_bias",
    "vanilla",
    "wide_bf16",
]


@pytest.mark.parametrize("name", NAMES)
def test_fold_is_bit_equal_to_peft(name: str, tmp_path: pathlib.Path) -> None:
    made = golden(name)
    merge(write_state(tmp_path / "ckpt", made), tmp_path / "out", FOLD)
    got = read_model(tmp_path / "out")
    assert set(got) == set(made.merged)
    assert not differences(got, made.merged, got)


@pytest.mark.parametrize("name", SEVERAL_TILES)
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_segments_workers_and_interruptions_change_no_bit(name: str, data: st.DataObject) -> None:
    made = golden(name)
    with tempfile.TemporaryDirectory() as folder:
        where = pathlib.Path(folder)
        ckpt = write_state(where / "ckpt", made)
        _run(ckpt, where / "out", data, StopFlag(), after=data.draw(st.integers(0, 6)))
        _run(ckpt, where / "out", data, StopFlag(), after=1 << 30)
        got = read_model(where / "out")
        assert not differences(got, made.merged, got)


def _run(ckpt: pathlib.Path, out: pathlib.Path, data: st.DataObject, stop: StopFlag, after: int) -> None:
    """One run with segments of a few elements to whole tensors, ended after some of them."""
    if out.exists():
        return
    seen = 0

    def watch(event: Phase | Progress | Warned) -> None:
        nonlocal seen
        seen += isinstance(event, Progress)
        if seen > after:
            stop.set("the test")

    small = (7000, 40000) if sum(f.stat().st_size for f in ckpt.iterdir()) > 100_000 else (24, 100, 1000)
    segment = data.draw(st.sampled_from([*small, 1 << 20]))
    options = MergeOptions(lora=FOLD.lora, layout="as-is", workers=data.draw(st.integers(1, 3)))
    with mock.patch("merge_stream.engine.memory._SEGMENTS", (segment,) * 2):
        try:
            merge(ckpt, out, options, observer=watch, stop=stop)
        except InterruptedRunError:
            assert after < 1 << 30


@pytest.mark.parametrize("rank", [8, 192, 200, 256, 512])
def test_products_of_large_ranks_are_near_those_of_torch(rank: int) -> None:
    """Bit-equal with MKL on AVX-512; elsewhere torch itself sums in another order."""
    generator = torch.Generator().manual_seed(rank)
    a, b = torch.randn(rank, 1024, generator=generator), torch.randn(64, rank, generator=generator)
    got = np.empty((64, 1024), np.float32)
    _multiply(b.numpy(), a.numpy(), got)
    assert np.allclose(got, (b @ a).numpy(), rtol=0, atol=1e-6 * rank)


@pytest.mark.parametrize("kind", ["F32", "BF16"])
@given(rows=st.integers(1, 40), width=st.integers(1, 200), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_row_norms_are_those_of_torch(kind: str, rows: int, width: int, seed: int) -> None:
    values = _values(rows, width, kind, seed)
    sums = RowNorms(rows, width, _type(kind))
    for row in range(0, rows, 7):
        for column in range(0, width, 64):
            sums.add(values[row : row + 7, column : column + 64].float().numpy().copy(), row, column)
    wanted = torch.linalg.norm(values, dim=1).float().numpy()
    assert np.array_equal(sums.norms(), wanted)


@given(rows=st.integers(2, 40), width=st.integers(2, 200), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_norms_of_a_transposed_matrix_are_those_of_torch(rows: int, width: int, seed: int) -> None:
    values = _values(width, rows, "F32", seed).T
    sums = np.zeros(rows, np.float32)
    for column in range(0, width, 16):
        column_norms(sums, values[:, column : column + 16].T.numpy().copy())
    assert np.array_equal(np.sqrt(sums), torch.linalg.norm(values, dim=1).numpy())


def _values(rows: int, width: int, kind: str, seed: int) -> torch.Tensor:
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    return values.to({"F32": torch.float32, "BF16": torch.bfloat16}[kind])


def _type(name: str) -> DType:
    found = dtype_named(name)
    assert found is not None
    return found
