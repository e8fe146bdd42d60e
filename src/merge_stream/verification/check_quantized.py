"""Quantization settings against the tensors: settings without quantized weights, weights without settings, and
forms that engines refuse or misread.

Facts (transformers 5.24, vLLM 0.33, SGLang 0.5.23, llama.cpp's converter): block fp8 is
`weight` + `weight_scale_inv` of 128 x 128 blocks; no file of per-tensor `quant_method: fp8`
satisfies both transformers (weight_scale_inv) and vLLM (weight_scale); transformers takes
the block size from the numbers of rows, so odd rows are dequantized wrongly without an error.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

from merge_stream.encodings.base import Scheme, scheme_that_wrote, weights_in, without_suffix
from merge_stream.output.config_patch import OutputTensor, holds_quantized
from merge_stream.planning.quantize import is_linear
from merge_stream.verification.finding import CheckedFolder, Finding, listed, some

__all__ = ["check_quantized"]

_SETTINGS_FILES = ("hf_quant_config.json", "quant_config.json", "quantize_config.json")
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
_LINEAR = re.compile(r"(?P<module>.+)\.(?P<last>[^.]+)\.weight(_packed)?")
_EIGHT_BITS = frozenset({"F8_E4M3", "F8_E5M2"})
_BLOCK = 128


def check_quantized(folder: CheckedFolder) -> Iterator[Finding]:
    """Findings about quantization."""
    key = next((k for k in ("quantization_config", "compression_config") if folder.config.get(k)), None)
    settings = folder.config.get(key or "")
    quantized = holds_quantized(OutputTensor(n, t.dtype, 0) for n, t in folder.tensors.items())
    files = [name for name in _SETTINGS_FILES if name in folder.tree.files]
    if folder.tensors and not quantized:
        if key is not None:
            method = settings.get("quant_method") if isinstance(settings, dict) else None
            text = f"config.json has {key} ({method}), and all tensors are plain: loaders look for scales"
            yield Finding("error", "quantized", "settings", "transformers, vLLM, SGLang, TGI", text, "remove the key")
        if files:
            text = f"{listed(files)} stands beside plain weights, and vLLM believes it"
            yield Finding("error", "quantized", "settings", "vLLM", text, "remove it")
        return
    if quantized and key is None and not files:
        text = "there are quantized tensors, and no quantization_config says how to read them"
        yield Finding("error", "quantized", "settings", "all: garbage without an error", text)
        return
    if isinstance(settings, dict):
        method = settings.get("quant_method")
        if method == "fp8":
            yield from _fp8(folder, settings)
        elif method == "compressed-tensors":
            yield from _compressed(folder, settings)
        scheme = scheme_that_wrote(settings)
        if scheme is not None:
            if method != "fp8":
                yield from _parts(folder, scheme)
            yield from _unnamed(folder, settings)
        yield from _fused_layers(folder)


def _fp8(folder: CheckedFolder, settings: dict[str, Any]) -> Iterator[Finding]:
    if not settings.get("activation_scheme"):
        yield Finding("error", "quantized", "fp8", "vLLM", "quantization_config has no activation_scheme")
    weights = {n: t for n, t in folder.tensors.items() if t.dtype.name in _EIGHT_BITS and n.endswith(".weight")}
    block = settings.get("weight_block_size")
    if not block:
        text = (
            "fp8 with one scale for a tensor: transformers wants weight_scale_inv, vLLM weight_scale; no file fits both"
        )
        yield Finding(
            "error", "quantized", "fp8", "transformers or vLLM", text, "use block scales or compressed-tensors"
        )
        return
    bare = [name for name in weights if f"{name}_scale_inv" not in folder.tensors]
    if bare:
        text = f"{some(len(bare), 'fp8 weight')} without weight_scale_inv: {listed(bare)}"
        yield Finding("error", "quantized", "fp8-scales", "all: wrong weights", text)
    wrong, odd = [], []
    for name, tensor in weights.items():
        scale = folder.tensors.get(f"{name}_scale_inv")
        if scale is not None and len(tensor.shape) == 2:
            wanted = tuple(-(-n // b) for n, b in zip(tensor.shape, block, strict=False))
            if scale.shape != wanted:
                wrong.append(f"{name}_scale_inv {list(scale.shape)} instead of {list(wanted)}")
        if any(extent > _BLOCK and extent % _BLOCK for extent in tensor.shape[-2:]):
            odd.append(f"{name} {list(tensor.shape)}")
    if wrong:
        yield Finding("error", "quantized", "fp8-scales", "all", f"scales of another shape: {listed(wrong)}")
    if odd:
        text = f"dims that are no multiple of {_BLOCK}: {listed(odd)}; transformers dequantizes them wrongly or raises"
        yield Finding("error", "quantized", "fp8-blocks", "transformers, vLLM (merged layers)", text)
    excluded = settings.get("modules_to_not_convert") or settings.get("ignored_layers") or []
    gates = [
        n.removesuffix(".weight")
        for n, t in folder.tensors.items()
        if n.endswith(".mlp.gate.weight") and t.dtype.name not in _EIGHT_BITS
    ]
    unnamed = [gate for gate in gates if not any(str(e) in gate for e in excluded)]
    if unnamed:
        text = f"plain router weights that modules_to_not_convert does not name: {listed(unnamed)}"
        yield Finding("error", "quantized", "excluded", "vLLM (Qwen3-MoE: looks for an fp8 gate)", text)


def _compressed(folder: CheckedFolder, settings: dict[str, Any]) -> Iterator[Finding]:
    groups = settings.get("config_groups") or {}
    if len(groups) > 1:
        text = f"{len(groups)} config_groups, llama.cpp's converter takes one"
        yield Finding("warning", "quantized", "groups", "llama.cpp", text)
    for group in groups.values():
        weights = group.get("weights") or {}
        strategy, form = weights.get("strategy"), str(group.get("format") or settings.get("format"))
        if strategy == "tensor" and weights.get("type") == "float":
            text = "one fp8 scale for a tensor: llama.cpp's converter asserts channel or block"
            yield Finding("warning", "quantized", "strategy", "llama.cpp", text)
        if form.startswith("nvfp4"):
            yield Finding("warning", "quantized", "nvfp4", "llama.cpp, TGI", f"{form} is not supported")
            if any(".experts." in name and name.endswith("_packed") for name in folder.tensors):
                text = "nvfp4 experts load in transformers 5.24 with wrong values (the global scale is ignored)"
                yield Finding("warning", "quantized", "nvfp4", "transformers (MoE)", text)
        if form.startswith("mxfp"):
            yield Finding("warning", "quantized", "mxfp", "llama.cpp, TGI", f"{form} is not supported")


def _parts(folder: CheckedFolder, scheme: Scheme) -> Iterator[Finding]:
    """Every part of a quantized weight is there in its type and shape; scales may be of another floating type."""
    wrong = []
    weights = weights_in(scheme, folder.tensors)
    for name, shape in weights.items():
        for part in scheme.parts(name, shape)[1:]:
            there = folder.tensors.get(part.name)
            if there is None:
                wrong.append(f"{part.name} is not there")
            elif there.shape != part.shape or (there.dtype != part.dtype and there.dtype.kind != part.dtype.kind):
                wrong.append(
                    f"{part.name} is {there.dtype} {list(there.shape)} instead of {part.dtype} {list(part.shape)}"
                )
    alone = sorted(name for name in folder.tensors if _is_part_alone(scheme, name, weights))
    if alone:
        wrong.append(f"no codes beside {listed(alone)}")
    if wrong:
        text = f"{some(len(weights), f'weight of {scheme.name}')}, and scales that are not its own: {listed(wrong)}"
        yield Finding("error", "quantized", "scales", "all: wrong weights", text)


def _unnamed(folder: CheckedFolder, settings: dict[str, Any]) -> Iterator[Finding]:
    """Every plain linear layer is named."""
    named = [str(name) for name in settings.get("ignore") or settings.get("modules_to_not_convert") or []]
    plain = [n.removesuffix(".weight") for n, t in folder.tensors.items() if is_linear(n) and t.dtype.kind == "float"]
    unnamed = [module for module in plain if module not in named and not any(n.startswith("re:") for n in named)]
    if unnamed:
        text = f"plain linear layers that the settings do not name: {listed(unnamed)}; loaders look for their scales"
        yield Finding("error", "quantized", "excluded", "transformers, vLLM, SGLang", text)


def _is_part_alone(scheme: Scheme, name: str, weights: Collection[str]) -> bool:
    weight = without_suffix(scheme, name)
    return weight != name and weight.endswith(".weight") and weight not in weights


def _fused_layers(folder: CheckedFolder) -> Iterator[Finding]:
    """q/k/v and gate/up are one layer in vLLM and SGLang: all parts quantized, or none."""
    parts: dict[str, dict[str, bool]] = defaultdict(dict)
    for name, tensor in folder.tensors.items():
        match = _LINEAR.fullmatch(name)
        if match and len(tensor.shape) == 2:
            parts[match["module"]][match["last"]] = tensor.dtype.kind != "float"
    mixed = [
        f"{module}.{'/'.join(group)}"
        for module, there in parts.items()
        for group in _FUSED
        if len({there[p] for p in group if p in there}) > 1
    ]
    if mixed:
        text = f"layers that engines fuse are quantized in part: {listed(mixed)}"
        yield Finding("error", "quantized", "fused-layers", "vLLM, SGLang", text)
