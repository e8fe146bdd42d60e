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
from merge_stream.engine.largest import largest_of

__all__ = ["main"]

_SHAPES = ((512, 4096), (4096, 4096))
_PRESETS = {
    "fp8": "FP8",
    "fp8-block": "FP8_BLOCK",
    "fp8-dynamic": "FP8_DYNAMIC",
    "int4": "W4A16",
    "int8": "W8A8",
    "mxfp4": "MXFP4A16",
    "mxfp8": "MXFP8A16",
    "nvfp4": "NVFP4A16",
}
Run = Callable[[], object]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="CPU seconds of the quantization alone.")
    parser.add_argument("--repeat", type=int, default=7, help="Runs of each.")
    repeat = parser.parse_args().repeat
    print("| scheme | shape | source | merge-stream GB/s | formula in torch | compressed-tensors |")
    print("|---|---|---|---|---|---|")
    for scheme in (scheme for scheme in schemes() if not scheme.transposed):
        for shape in _SHAPES:
            for name, dtype in (("fp32", np.dtype(np.float32)), ("bf16", np.dtype(ml_dtypes.bfloat16))):
                values = np.random.default_rng(0).standard_normal(shape, np.float32).astype(dtype)
                runs = (_encoder(scheme, values), _formula(scheme, values), _library(scheme, values))
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
    """Both passes, where the scheme looks at the largest magnitude first."""
    outs = [np.empty(_nbytes(part), np.uint8) for part in scheme.parts("w", values.shape) if part.per]

    def run() -> object:
        return scheme.encode(values, outs, largest_of(values) if scheme.measured else 0.0)

    return run


def _nbytes(part: Part) -> int:
    return int(np.prod(part.shape)) * part.dtype.itemsize


def _weight(values: np.ndarray) -> Any:  # noqa: ANN401 - a tensor; torch is imported late
    import torch

    torch.set_num_threads(1)
    if values.dtype == np.float32:
        return torch.from_numpy(values)
    return torch.from_numpy(values.view(np.uint16)).view(torch.bfloat16)


def _formula(scheme: Scheme, values: np.ndarray) -> Run | None:
    """The few lines of torch that anybody would write; there for the schemes with a scale for each row."""
    import torch

    if scheme.name not in {"fp8-dynamic", "int8"}:
        return None
    weight, integers = _weight(values), scheme.name == "int8"

    def run() -> object:
        wide = weight.float()
        scale = wide.abs().amax(1, keepdim=True) / (127.5 if integers else 448)
        if integers:
            return (wide / scale).clamp(-128, 127).round().to(torch.int8)
        return torch.clamp(wide / scale, -448, 448).to(torch.float8_e4m3fn)

    return run


def _library(scheme: Scheme, values: np.ndarray) -> Run | None:
    """What compressed-tensors does from a weight to its tensors: minima and maxima, scales, `compress`."""
    try:
        quantization = importlib.import_module("compressed_tensors.quantization")
        utils = importlib.import_module("compressed_tensors.quantization.utils")
        base = importlib.import_module("compressed_tensors.compressors.base")
        form = importlib.import_module("compressed_tensors.compressors.format")
    except ImportError:
        return None
    import torch

    weight = _weight(values)
    preset = quantization.preset_name_to_scheme(_PRESETS[scheme.name], ["Linear"])
    compressor = base.BaseCompressor.get_value_from_registry(form.infer_module_format(torch.nn.Linear, preset).value)

    def run() -> object:
        wide = weight.float()
        low, high = _extremes(wide, preset.weights)
        state, more = {"weight": wide}, {}
        if preset.weights.strategy == "tensor_group":
            more = {"global_scale": utils.generate_gparam(wide.min(), wide.max())}
            state["weight_global_scale"] = more["global_scale"]
        state["weight_scale"], _ = utils.calculate_qparams(low, high, preset.weights, **more)
        return compressor.compress(state, preset)

    return run


def _extremes(weight: Any, args: Any) -> tuple[Any, Any]:  # noqa: ANN401 - tensors of torch, settings of the library
    if args.strategy == "tensor":
        return weight.min(), weight.max()
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy == "block":
        blocks = weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.unflatten(1, (-1, args.group_size))
    return groups.amin(2), groups.amax(2)


if __name__ == "__main__":
    main()
