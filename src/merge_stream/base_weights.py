"""The weights of a base model, for an adapter that comes without them."""

from __future__ import annotations

import json
import os

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.lora import unwrap
from merge_stream.architectures.lora_base import join_base
from merge_stream.errors import CheckpointError
from merge_stream.opening import open_checkpoint
from merge_stream.options import OpenOptions
from merge_stream.tensors.box import Box
from merge_stream.tensors.ref import Catalog, ShardTable, TensorRef

__all__ = ["fits_base", "refuse_without_base", "with_base_weights"]


def refuse_without_base(catalog: Catalog, base_model: str | None) -> None:
    """CheckpointError when an adapter alone is to be folded and no base model is given."""
    if base_model is None:
        msg = f"{catalog.root} holds LoRA tensors and none of the weights they belong to"
        raise CheckpointError(
            msg, hint="--base-model DIR folds them into the weights there, --lora keep writes the adapter alone"
        )


def with_base_weights(
    catalog: Catalog, base_model: str | None, folder: str, model: ModelInfo, *, max_mem: int
) -> Catalog:
    """An adapter alone joined with the weights of the model it belongs to; only their headers are read here.

    `folder` is where the files of `base_model` lie: its own folder, or its snapshot in the Hub's cache. A snapshot
    that holds no weights is a CheckpointError that says how to get them: they are never fetched unasked.
    """
    refuse_without_base(catalog, base_model)
    if not (base_model is not None and os.path.isdir(base_model)) and not _holds_weights(folder):
        msg = f"the weights of {base_model} are needed to fold the adapter, and only its small files are here"
        hint = (
            f"`hf download {_download(base_model)}` brings them into the Hub's cache; then run the same command again"
        )
        raise CheckpointError(msg, hint=hint)
    base = open_checkpoint([folder], OpenOptions(format="hugging_face"), max_mem=max_mem)
    return join_base(catalog, base, model)


def fits_base(catalog: Catalog, name: str, model: ModelInfo) -> int:
    """How many modules of an adapter alone the base model has, told from headers; CheckpointError when it lacks one."""
    tensors = {}
    for number, (tensor, header) in enumerate((model.base_tensors or {}).items()):
        whole = ShardTable.of([(Box.whole(header.shape), number, 0)], len(header.shape))
        tensors[tensor] = TensorRef(tensor, header.dtype, header.shape, whole)
    join_base(catalog, Catalog(format="hugging_face", root=name, tensors=tensors, files=()), model)
    return len({module.module for module in unwrap(catalog).modules})


def _holds_weights(folder: str) -> bool:
    """Whether all weight files of a snapshot are there; links count when they lead to a file."""
    index = os.path.join(folder, "model.safetensors.index.json")
    if os.path.isfile(index):
        with open(index, encoding="utf-8") as file:
            weight_map = json.load(file).get("weight_map")
        return isinstance(weight_map, dict) and all(
            os.path.isfile(os.path.join(folder, str(name))) for name in set(weight_map.values())
        )
    return bool(folder) and any(
        name.endswith(".safetensors") and os.path.isfile(os.path.join(folder, name)) for name in os.listdir(folder)
    )


def _download(base_model: str | None) -> str:
    """Arguments of `hf download` for ORG/NAME or ORG/NAME@REVISION."""
    repo, _, revision = str(base_model).partition("@")
    return f"{repo} --revision {revision}" if revision else repo
