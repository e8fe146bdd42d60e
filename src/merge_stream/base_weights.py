"""The weights of a base model, for an adapter that comes without them."""

from __future__ import annotations

import os

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.lora_base import join_base
from merge_stream.errors import CheckpointError
from merge_stream.opening import open_checkpoint
from merge_stream.options import OpenOptions
from merge_stream.tensors.ref import Catalog

__all__ = ["refuse_without_base", "with_base_weights"]


def refuse_without_base(catalog: Catalog, base_model: str | None) -> None:
    """CheckpointError when an adapter alone is to be folded and no base model is given."""
    if base_model is None:
        msg = f"{catalog.root} holds LoRA tensors and none of the weights they belong to"
        raise CheckpointError(
            msg, hint="--base-model DIR folds them into the weights there, --lora keep writes the adapter alone"
        )


def with_base_weights(catalog: Catalog, base_model: str | None, model: ModelInfo, *, max_mem: int) -> Catalog:
    """An adapter alone joined with the weights of the model it belongs to; only their headers are read here."""
    refuse_without_base(catalog, base_model)
    if base_model is None or not os.path.isdir(base_model):
        msg = f"the weights of {base_model} are needed to fold the adapter, not only its headers"
        raise CheckpointError(msg, hint="`hf download ORG/NAME` prints the folder to pass as --base-model")
    base = open_checkpoint([base_model], OpenOptions(format="hugging_face"), max_mem=max_mem)
    return join_base(catalog, base, model)
