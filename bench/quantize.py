"""CPU seconds of the quantization alone: source bytes encoded for each second of one core.

    python -m bench.quantize [--repeat 7]

Beside each scheme stand the same formula in torch and, where it is installed, compressed-tensors itself, one thread
each, on the same values. All run in turn, so that noise meets all alike. Two shapes, because to torch it matters
whether a weight fits the caches of the CPU: median, smallest and largest of the runs.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from merge_stream.encodings.base import Part, Scheme, schemes

__all__ = ["main"]

_SHAPES = ((512, 4096), (4096, 4096))
Run = Callable[[], object]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="CPU seconds of the quantization alone.")
    parser.add_argument("--repeat", type=int, default=7, help="Runs of each.")
    repeat = parser.parse_args().repeat
    print("| scheme | shape | source | merge-stream GB/s | formula in torch | compressed-tensors |")
    print("|---|---|---|---|---|---|")
    for scheme in schemes():
        for shape in _SHAPES:
            for name, dtype in (("fp32", np.dtype(np.float32)), ("bf16", np.dtype(ml_dtypes.bfloat16))):
                values = np.random.default_rng(0).standard_normal(shape, np.float32).astype(dtype)
                runs = (_encoder(scheme, values), _formula(values), _library(scheme, values))
                cells = " | ".join(_measured(runs, values.nbytes, repeat))
                print(f"| `{scheme.name}` | {shape[0]} x {shape[1]} | {name} | {cells} |")


def _measured(runs: tuple[Run | None, ...], nbytes: int, repeat: int) -> list[str]:
    speeds: list[list[float]] = [[] for _ in runs]
    for _ in range(repeat):
        for run, found in zip(runs, speeds, strict=True):
            if run is not None:
                run()
                start = time.process_time()
                run()
                run()
                found.append(2 * nbytes / (time.process_time() - start) / 1e9)
    return [f"{statistics.median(s):.2f} ({min(s):.2f} to {max(s):.2f})" if s else "-" for s in speeds]


def _encoder(scheme: Scheme, values: np.ndarray) -> Run:
    outs = [np.empty(_nbytes(part), np.uint8) for part in scheme.parts("w", values.shape) if part.per]
    return lambda: scheme.encode(values, outs, 5.0)


def _nbytes(part: Part) -> int:
    return int(np.prod(part.shape)) * part.dtype.itemsize


def _weight(values: np.ndarray) -> Any:  # noqa: ANN401 - a tensor; torch is imported late
    import torch

    torch.set_num_threads(1)
    if values.dtype == np.float32:
        return torch.from_numpy(values)
    return torch.from_numpy(values.view(np.uint16)).view(torch.bfloat16)


def _formula(values: np.ndarray) -> Run:
    import torch

    weight = _weight(values)

    def run() -> object:
        wide = weight.float()
        scale = wide.abs().amax(1, keepdim=True) / 448
        return torch.clamp(wide / scale, -448, 448).to(torch.float8_e4m3fn)

    return run


def _library(scheme: Scheme, values: np.ndarray) -> Run | None:
    try:
        compressors = importlib.import_module("compressed_tensors.compressors.base")
        quantization = importlib.import_module("compressed_tensors.quantization")
        utils = importlib.import_module("compressed_tensors.quantization.utils")
    except ImportError:
        return None
    settings, weight = scheme.settings([]), _weight(values)
    group = {key: value for key, value in settings["config_groups"]["group_0"].items() if value is not None}
    form = quantization.QuantizationScheme(**group)
    compressor = compressors.BaseCompressor.get_value_from_registry(settings["format"])

    def run() -> object:
        wide = weight.float()
        low, high = wide.amin(1, keepdim=True), wide.amax(1, keepdim=True)
        scale, _ = utils.calculate_qparams(low, high, form.weights)
        return compressor.compress({"weight": wide, "weight_scale": scale}, form)

    return run


if __name__ == "__main__":
    main()
