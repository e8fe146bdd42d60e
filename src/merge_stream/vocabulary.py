"""Rows that a trainer added to embedding and head, and nobody else knows of.

Tensor parallelism pads a vocabulary, and its savers leave the padding in. Megatron never tells it elsewhere: any
config.json has the true size. ColossalAI raises `vocab_size` to match, so only a base model's config tells, and
only multiples of 64 are believed to be padding. The rows cut off are told.

Padding is less than the multiple that a trainer pads to: `--make-vocab-size-divisible-by`, 128 as a rule, times
tensor-parallel ranks. Arguments may tell it, but the rows may be those of an earlier run with more ranks. So rows
beyond any multiple in use are no padding and stay, and the config is refused later as that of another model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from merge_stream.architectures.structure import text_value
from merge_stream.errors import CheckpointError
from merge_stream.output.config_patch import with_vocabulary
from merge_stream.output.model_info import ModelFolder
from merge_stream.tensors.ref import Catalog
from merge_stream.tensors.tables import first_rows

__all__ = ["with_true_vocabulary"]

_PADDED_TO = 64
_LARGEST_MULTIPLE = 1 << 13  # 128 x 64 ranks
_EMBEDDED = (
    "embed_tokens.weight",
    "lm_head.weight",
    "lm_head.bias",
    "wte.weight",
    "word_embeddings.weight",
    "output_layer.weight",
)


def with_true_vocabulary(catalog: Catalog, folder: ModelFolder) -> tuple[Catalog, ModelFolder]:
    """Catalog and folder with the vocabulary that the config tells, when the checkpoint's is that one padded.

    CheckpointError when the trainer tells more tokens than the config: they would be cut off.
    """
    if not catalog.padded_vocabulary:
        return catalog, folder
    told = folder.base_config
    if told is None and (catalog.padded_vocabulary == "any" or folder.config_origin == "base model"):
        told = folder.info.config
    true = text_value(told, "vocab_size")
    if true is None:
        return catalog, folder
    tokens, multiple = catalog.vocabulary
    most = max(multiple, _LARGEST_MULTIPLE)
    padded = {
        name: tensor.shape[0]
        for name, tensor in catalog.tensors.items()
        if name.endswith(_EMBEDDED) and tensor.shape and true < tensor.shape[0] <= true + most
    }
    rows = next(iter(padded.values()), 0)
    if not padded or any(count != rows for count in padded.values()):
        return catalog, folder
    if catalog.padded_vocabulary == "base" and rows % _PADDED_TO:
        return catalog, folder
    where = folder.info.config_path or "config.json"
    if tokens > true:
        msg = f"the trainer's arguments say a vocabulary of {tokens} tokens, {where} says vocab_size {true}"
        raise CheckpointError(msg, hint=f"set vocab_size to {tokens}, or pass the --base-model that was trained")
    tensors = {name: first_rows(t, true) if name in padded else t for name, t in catalog.tensors.items()}
    note = f"{', '.join(padded)}: {rows} rows are a vocabulary of {true} with padding, which is cut off"
    if multiple and rows - true > multiple:
        note += (
            f"; its arguments pad to a multiple of {multiple}, so make sure that vocab_size {true} of {where} is right"
        )
    config: dict[str, Any] = dict(folder.info.config or {})
    if "vocab_size" in config:
        config["vocab_size"] = true
    data = with_vocabulary(folder.config_bytes, true) if folder.config_bytes is not None else None
    info = replace(folder.info, config=config or folder.info.config)
    catalog = replace(catalog, tensors=tensors, notes=(*catalog.notes, note))
    return catalog, replace(folder, info=info, config_bytes=data)
