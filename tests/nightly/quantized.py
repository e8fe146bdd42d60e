"""Quantized models in transformers 5.24 on a CPU: logits equal to those of the weights that we say they stand for.

    PYTHONPATH=tf5:tfs:ct .venv/bin/python -m tests.nightly.quantized

Each scheme, of a Llama, a Qwen3-MoE and (mxfp4) a gpt-oss of a few layers with random weights: written by
merge-stream, loaded with `dequantize=True`, beside a plain folder that holds codes x scales. Known failures of
transformers are expected as such, so that a version which mends them is noticed. Prints a table; exit code 1 when
anything is not as expected.
"""

from __future__ import annotations

import importlib
import json
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from merge_stream import cli
from merge_stream.encodings.base import Part, Scheme, schemes, weights_in
from merge_stream.tensors.dtype import dtype_of_torch
from merge_stream.verification.quantized import scheme_of_folder

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
EXPERTS = {"moe_intermediate_size": 128, "head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2}
OSS = {"intermediate_size": 256, "head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", SIZES),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**SIZES, **EXPERTS}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {**SIZES, **OSS, "layer_types": ["full_attention"] * 2}),
}
SETTINGS = {"compressed-tensors": "CompressedTensorsConfig", "fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
FAILS = {("qwen3_moe", "int8"): "error", ("qwen3_moe", "mxfp8"): "error", ("qwen3_moe", "nvfp4"): "wrong"}
ROUNDED = {("qwen3_moe", "int4"): 0.1}
"""What is rounded to bf16 on the way; all others are equal."""
WRONG = 0.5
TOKENS = torch.arange(24)[None]


def main() -> None:
    """Write, load, compare."""
    library = importlib.import_module("transformers")
    unexpected = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, (config, model, settings) in MODELS.items():
            torch.manual_seed(0)
            source = pathlib.Path(folder, kind)
            made = getattr(library, model)(getattr(library, config)(**settings))
            made.bfloat16().save_pretrained(source)
            for scheme in schemes():
                if scheme.transposed == (kind == "gpt_oss"):
                    told = outcome(library, source, scheme)
                    wanted = FAILS.get((kind, scheme.name), "equal")
                    print(f"{kind:10} {scheme.name:14} {told}", flush=True)
                    if not told.startswith(wanted):
                        unexpected.append(f"{kind} {scheme.name}: {told}, expected {wanted}")
    print("\n".join(unexpected) or "all as expected")
    sys.exit(bool(unexpected))


def outcome(library: Any, source: pathlib.Path, scheme: Scheme) -> str:
    """What loading gave: "equal ...", "wrong ..." or "error ..."."""
    out, plain = (source.parent / f"{source.name}-{scheme.name}{end}" for end in ("", "-plain"))
    name = scheme.name.removesuffix("-gpt-oss")
    if cli.run([str(source), str(out), "--quantize", name, "--force", "-q"]):
        return "error: merge-stream did not write it"
    write_plain(source, out, plain)
    how = getattr(library, SETTINGS[settings_of(out)["quant_method"]])(dequantize=True)
    try:
        got = logits(library, out, quantization_config=how)
    except Exception as error:  # noqa: BLE001 - whatever a loader raises is the result
        return f"error: {type(error).__name__} {str(error)[:80]!r}"
    difference = float((got - logits(library, plain)).abs().max())
    bound = ROUNDED.get((source.name, scheme.name), 0.0)
    return f"{'equal' if difference <= bound else 'wrong' if difference > WRONG else 'near'}: {difference:.3g}"


def logits(library: Any, folder: pathlib.Path, **more: Any) -> torch.Tensor:
    """Of a model that has every key, and no other one."""
    load = library.AutoModelForCausalLM.from_pretrained
    model, told = load(folder, dtype=torch.bfloat16, output_loading_info=True, **more)
    left = {key: names for key, names in told.items() if names}
    if left:
        raise KeyError(str(left))
    with torch.no_grad():
        found: torch.Tensor = model.eval()(TOKENS).logits.float()
    return found


def settings_of(folder: pathlib.Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def write_plain(source: pathlib.Path, out: pathlib.Path, plain: pathlib.Path) -> None:
    """The folder with codes x scales instead of quantized weights."""
    scheme = scheme_of_folder(out)
    assert scheme is not None
    tensors, sources = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    stored = {}
    for name, tensor in tensors.items():
        dtype = dtype_of_torch(str(tensor.dtype).removeprefix("torch."))
        assert dtype is not None
        stored[name] = Part(name, dtype, tuple(tensor.shape))
    weights = weights_in(scheme, stored)
    parts = {part.name for name, shape in weights.items() for part in scheme.parts(name, shape)}
    written = {name: tensor for name, tensor in tensors.items() if name not in parts}
    for name, shape in weights.items():
        outs = [
            tensors[part.name].contiguous().view(-1).view(torch.uint8).numpy()
            for part in scheme.parts(name, shape)
            if part.per
        ]
        largest = float(sources[name].float().abs().max())
        if scheme.shares:
            largest = 448 * 6 / float(tensors[f"{name}_global_scale"])
        values = torch.from_numpy(np.ascontiguousarray(scheme.decode(outs, shape[-1], largest))).reshape(shape)
        written[name] = (values.transpose(-1, -2) if scheme.transposed else values).bfloat16().contiguous()
    plain.mkdir()
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    save_file(written, plain / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main()
