"""Goldens of `make_goldens` as checkpoints on disk."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

HERE = pathlib.Path(__file__).resolve().parents[1] / "data" / "lora"
NAMES = sorted(path.stem for path in HERE.glob("*.safetensors"))
PREFIX = "base_model.model."


@dataclasses.dataclass(frozen=True)
class Golden:
    """A trainer's state dict, what peft folds it to, its adapter file, both configurations."""

    state: dict[str, torch.Tensor]
    merged: dict[str, torch.Tensor]
    adapter: dict[str, torch.Tensor]
    settings: dict[str, Any]
    config: dict[str, Any]

    @property
    def original(self) -> dict[str, torch.Tensor]:
        """The model before training."""
        plain = {}
        for name, tensor in self.state.items():
            if "lora_" not in name and ".modules_to_save." not in name:
                clean = name.removeprefix(PREFIX).replace(".original_module", "")
                plain[".".join(s for s in clean.split(".") if s != "base_layer")] = tensor
        return plain


def golden(name: str) -> Golden:
    """Read one golden."""
    with safe_open(HERE / f"{name}.safetensors", "pt") as file:
        told = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
    state = {key.removeprefix("state/"): t for key, t in tensors.items() if key.startswith("state/")}
    merged = {key.removeprefix("merged/"): t for key, t in tensors.items() if key.startswith("merged/")}
    merged |= {key: state[PREFIX + key] for key in json.loads(told["unchanged"])}
    adapter = {}
    for key in json.loads(told["adapter"]):
        adapter[key] = next(state[k] for k in state if _in_file(k, told["name"]) == key)
    config = json.loads(told["config.json"])
    if name == "wide_bf16":  # one matrix, to stay small: no whole model of its family
        config["model_type"] = "one_matrix"
    return Golden(state, merged, adapter, json.loads(told["adapter_config.json"]), config)


def _in_file(name: str, adapter: str) -> str:
    """Name in an adapter's file."""
    name = name.replace(f".modules_to_save.{adapter}.", ".")
    name = name.replace(f".lora_magnitude_vector.{adapter}.weight", ".lora_magnitude_vector")
    return name.replace(f".{adapter}.", ".") if f".{adapter}." in name else name.removesuffix(f".{adapter}")


def write_state(folder: pathlib.Path, made: Golden, *, settings: bool = True) -> pathlib.Path:
    """A full state dict with LoRA in it, as `model.safetensors`, and what stands beside it."""
    folder.mkdir(parents=True)
    save_file({name: t.contiguous() for name, t in made.state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(made.config))
    if settings:
        (folder / "adapter_config.json").write_text(json.dumps(made.settings))
    return folder


def write_base(folder: pathlib.Path, made: Golden) -> pathlib.Path:
    """The model before training, as a Hugging Face folder."""
    folder.mkdir(parents=True)
    save_file({name: t.contiguous() for name, t in made.original.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(made.config))
    return folder


def write_adapter(folder: pathlib.Path, made: Golden) -> pathlib.Path:
    """The adapter's own folder, as peft writes it."""
    folder.mkdir(parents=True)
    save_file({name: t.contiguous() for name, t in made.adapter.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(made.settings))
    return folder


def read_model(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's output files."""
    return {name: t for path in sorted(folder.glob("model*.safetensors")) for name, t in load_file(path).items()}


def differences(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], names: Iterable[str]) -> list[str]:
    """Tensors that are not bit-equal, and by how much."""
    found = []
    for name in names:
        a, b = got[name], wanted[name]
        if a.dtype != b.dtype or a.shape != b.shape:
            found.append(f"{name}: {a.dtype} {tuple(a.shape)} instead of {b.dtype} {tuple(b.shape)}")
        elif not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            unlike = (a != b).sum().item()
            found.append(f"{name}: {unlike} of {a.numel()} differ, most {(a.float() - b.float()).abs().max().item()}")
    return found
