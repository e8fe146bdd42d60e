"""What quantization takes beside a lease is told to the projection: `--max-mem` holds with any number of workers."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from merge_stream import api
from merge_stream.encodings.base import Scheme, row_nbytes, schemes, temporaries
from merge_stream.engine.compare_quantized import QuantizationError, _measure
from merge_stream.engine.memory import plan_memory
from merge_stream.options import MergeOptions
from merge_stream.planning.plan import QuantizedPart
from tests.folder.models import checkpoint, llama, llama_config

SHAPES = [(4000, 64), (300, 4096), (3, 200_000)]


def peak_of(run: Callable[[], object]) -> int:
    """Bytes that a second run allocates at its peak (the first one makes tables)."""
    run()
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scheme", schemes(), ids=lambda scheme: scheme.name)
def test_no_scheme_takes_more_than_is_told(scheme: Scheme, shape: tuple[int, int], dtype: type[np.generic]) -> None:
    shape = (shape[0], -(-shape[1] // 128) * 128)
    values = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    parts = [QuantizedPart(0, p.per, row_nbytes(p, shape)) for p in scheme.parts("w", shape) if p.per]
    outs = [np.empty(-(-shape[0] // p.per) * p.row_nbytes, np.uint8) for p in parts]
    assert peak_of(lambda: scheme.encode(values, outs, 5.0)) <= temporaries(shape[1], compared=False)
    error = QuantizationError("w", values.size)
    assert peak_of(lambda: _measure(scheme, parts, outs, values, error, 5.0)) <= temporaries(shape[1], compared=True)


@pytest.fixture
def small_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a fresh process: the one of the tests has been larger than any projection here."""
    for name in ("resident", "peak_rss"):
        monkeypatch.setattr(f"merge_stream.engine.memory.{name}", lambda: 50_000_000)


@pytest.mark.usefixtures("small_process")
def test_the_projection_counts_it_for_each_worker() -> None:
    plain = plan_memory(2_000_000_000, workers=5)
    more = plan_memory(2_000_000_000, workers=5, beside=3_000_000)
    assert more.projected - more.reserved - (plain.projected - plain.reserved) == pytest.approx(15e6, abs=2e6)


@pytest.mark.usefixtures("small_process")
def test_a_merge_projects_more_with_quantization(tmp_path: Path) -> None:
    catalog = api.open_checkpoint([checkpoint(tmp_path / "ckpt", llama(), llama_config())])
    options = MergeOptions(verify=True, workers=3)
    plain = api.make_plan(catalog, options).memory
    job = api.make_plan(catalog, replace(options, quantize="fp8-dynamic"))
    assert job.columns == 16
    more = job.memory.projected - job.memory.reserved - (plain.projected - plain.reserved)
    assert more == 3 * temporaries(16, compared=True)
