"""Truths for quantized output: what compressed-tensors itself makes of some odd weights.

    python -m tests.makers.compressed FOLDER

writes one safetensors file for each scheme; those in tests/data/quantize were written with compressed-tensors 0.20.0
and torch 2.13.0 on a CPU. Each holds the tensors that its `compress` returns for `sources`, with the scales of its own
`calculate_qparams` and `generate_gparam` for plain minima and maxima. `sources.safetensors` keeps what `odd_weights`
were, whatever random numbers become in later versions of torch. Tests need the files alone.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

__all__ = ["PRESETS", "compressed", "odd_weights", "sources"]

PRESETS = {
    "fp8": "FP8",
    "fp8-block": "FP8_BLOCK",
    "fp8-dynamic": "FP8_DYNAMIC",
    "int4": "W4A16",
    "int8": "W8A8",
    "mxfp4": "MXFP4A16",
    "mxfp8": "MXFP8A16",
    "nvfp4": "NVFP4A16",
}
"""Our names, and those of the presets of compressed-tensors (its block form has other names and no `_inv`)."""


def odd_weights() -> dict[str, torch.Tensor]:
    """Rows of zeros, denormals, spikes, ties, huge and tiny values; a mild weight; zeros; tiny values."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(16, 256, generator=generator)
    rows[0] = 0
    rows[1] = 1e-41
    rows[2] *= 1e30
    rows[3, 5] = 1e4
    rows[4] = torch.linspace(-448, 448, 256)
    rows[5] = -0.0
    rows[6] *= 1e-38
    rows[7] = torch.arange(256) / 1024
    rows[8, 0] = torch.finfo(torch.float16).max
    rows[9, 64:200] = 0
    rows[10] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 32)
    rows[11] = -rows[10]
    rows[12] = torch.arange(-128, 128) / 2
    rows[13] = (torch.arange(256) % 16 - 8) + 0.5
    rows[14] = 2.0 ** (torch.arange(256) % 40 - 20)
    rows[15] = 1.75 * 2.0 ** (torch.arange(256) // 32 - 4)
    mild = torch.randn(24, 256, generator=generator) * 0.02
    mild[3, 7] = 0.75
    weights = {
        "odd": rows,
        "mild": mild,
        "zeros": torch.zeros(4, 128),
        "tiny": torch.randn(4, 128, generator=generator) * 1e-40,
    }
    return weights | {f"{name}_bf16": weights[name].bfloat16().float() for name in ("odd", "mild")}


def compressed(scheme: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that compressed-tensors makes of `weight` (float32, 2-D), by their names without `NAME.`."""
    quantization = importlib.import_module("compressed_tensors.quantization")
    utils = importlib.import_module("compressed_tensors.quantization.utils")
    base = importlib.import_module("compressed_tensors.compressors.base")
    form = importlib.import_module("compressed_tensors.compressors.format")
    preset = quantization.preset_name_to_scheme(PRESETS[scheme], ["Linear"])
    args = preset.weights
    low, high = _extremes(weight, args)
    state = {"weight": weight.clone()}
    more: dict[str, Any] = {}
    if args.strategy == "tensor_group":
        more["global_scale"] = state["weight_global_scale"] = utils.generate_gparam(weight.min(), weight.max())
    state["weight_scale"], _ = utils.calculate_qparams(low, high, args, **more)
    name = form.infer_module_format(torch.nn.Linear, preset).value
    found: dict[str, torch.Tensor] = base.BaseCompressor.get_value_from_registry(name).compress(state, preset)
    return found


def _extremes(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if args.strategy == "tensor":
        return weight.min(), weight.max()
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy == "block":
        height, width = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % width, 0, -weight.shape[0] % height))
        blocks = padded.unflatten(0, (-1, height)).unflatten(2, (-1, width))
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.unflatten(1, (-1, args.group_size))
    return groups.amin(2), groups.amax(2)


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    """A weight of 136 rows, of which those below row 128 are others: blocks at the edges are smaller."""
    times = -(-136 // len(weight))
    rows = weight.repeat(times, 1)[:136, :160] * 2.0 ** (torch.arange(136)[:, None] // 16)
    return rows.clamp(-1e30, 1e30).contiguous()


def sources(scheme: str, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights that a scheme's file was made of, from the odd ones."""
    if scheme == "fp8-block":
        return {name: _blocks(weights[name]) for name in ("odd", "mild_bf16", "zeros", "tiny")}
    return weights


def main() -> None:
    """Write the files."""
    folder, weights = Path(sys.argv[1]), odd_weights()
    for scheme in PRESETS:
        tensors = {
            f"{name}.{part}": tensor.contiguous()
            for name, weight in sources(scheme, weights).items()
            for part, tensor in compressed(scheme, weight).items()
        }
        _save(tensors, folder / f"{scheme}.safetensors")
    _save(weights, folder / "sources.safetensors")


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, path)
    path.chmod(0o644)


if __name__ == "__main__":
    main()
