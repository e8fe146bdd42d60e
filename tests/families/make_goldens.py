"""Remake the goldens of one transformers version: what it saves, and where each element comes from.

    PYTHONPATH=/tmp/tf5:/tmp/tfs:. .venv/bin/python -m tests.families.make_goldens [NAME ...]

Run it once with transformers 5.24.0 and once with 4.57.6 (huggingface_hub 0.36.2, tokenizers
0.22.2) in front of the path; torch comes from .venv. The elements of a tiny model's state
dict are numbered, transformers' own saving runs over them, and the numbers in the result
tell source, offset, sizes and strides of each tensor.

Two things are corrected, because 5.24's saving differs there from every repository (see
hf_output.md 2.1, 2.4): the prefix that the model's `from config` lost (`vision_model.` of
CLIP and SigLIP towers, `thinker.`), and the experts of Qwen3-VL-MoE (hidden size first).
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from tests.families.models import MODELS, build

HERE = pathlib.Path(__file__).resolve().parent / "goldens"
MAJOR = int(transformers.__version__.split(".")[0])


def numbered(state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[tuple[int, str]]]:
    """The same tensors with every element numbered, and the first number of each."""
    made, starts, at = {}, [], 0
    for name, tensor in state.items():
        made[name] = torch.arange(at, at + tensor.numel(), dtype=torch.int64).reshape(tensor.shape)
        starts.append((at, name))
        at += tensor.numel()
    return made, starts


def saved_by_5(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, revert_weight_conversion

    conversions = get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = [
        c for c in conversions if not isinstance(c, PrefixChange) or c.prefix_to_remove == "vision_model"
    ]
    saved = revert_weight_conversion(model, state) if model._weight_conversions else dict(state)
    if "thinker" in model.config.model_type:
        return {f"thinker.{name}": tensor for name, tensor in saved.items()}
    if model.config.model_type == "qwen3_vl_moe":
        for name in list(saved):
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                saved[name] = saved[name].transpose(1, 2)
    return saved


def saved_by_4(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, state_dict=state)
        saved = load_file(f"{folder}/model.safetensors")
    if "thinker" in model.config.model_type:  # 4.57 saves the thinker alone without its prefix and reads both
        return {f"thinker.{name}": tensor for name, tensor in saved.items()}
    return saved


def origin(tensor: torch.Tensor, starts: list[tuple[int, str]], state: dict[str, torch.Tensor]) -> list[Any]:
    """[source, offset, size, stride] of an output, from the numbers in it."""
    first = int(tensor.flatten()[0])
    start, source = max(pair for pair in starts if pair[0] <= first)
    stride = []
    for dim, extent in enumerate(tensor.shape):
        stride.append(int(tensor.select(dim, 1).flatten()[0]) - first if extent > 1 else 0)
    offset = first - start
    seen = torch.as_strided(state[source].flatten(), tuple(tensor.shape), stride, offset)
    assert torch.equal(seen, tensor), source
    return [source, offset, list(tensor.shape), stride]


def golden(name: str) -> dict[str, Any]:
    model = build(name)
    plain = model.state_dict()
    state, starts = numbered(plain)
    saved = (saved_by_5 if MAJOR >= 5 else saved_by_4)(model, dict(state))
    config = {"model_type": model.config.model_type, "architectures": [type(model).__name__]}
    for key in ("text_config",):
        nest = getattr(model.config, key, None)
        if nest is not None and nest is not model.config:
            config[key] = {"model_type": nest.model_type}
    return {
        "transformers": transformers.__version__,
        "config": config,
        "sources": {n: list(t.shape) for n, t in plain.items()},
        "outputs": {n: origin(t, starts, state) for n, t in sorted(saved.items())},
    }


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    HERE.mkdir(exist_ok=True)
    for name in sys.argv[1:] or MODELS:
        try:
            made = golden(name)
        except AttributeError as error:
            if "module transformers has no attribute" not in str(error):
                print(f"{name}: {type(error).__name__}: {error}")
            else:
                print(f"{name}: not in {transformers.__version__}")
            continue
        except Exception as error:  # noqa: BLE001 - one family that cannot be built must not end the others
            print(f"{name}: {type(error).__name__}: {error}")
            continue
        (HERE / f"{name}.tf{MAJOR}.json").write_text(json.dumps(made, separators=(",", ":")) + "\n")
    print("done")


if __name__ == "__main__":
    main()
