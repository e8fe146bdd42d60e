"""Rows that a trainer added to embedding and head, and nobody else knows of.

Tensor parallelism pads a vocabulary, and some savers leave the padding in, with `vocab_size` in config.json raised
to match. Only a config that the user gave tells the true size, so only with `--base-model` are rows cut off, and
only for formats whose trainers pad.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from merge_stream.architectures.structure import text_value
from merge_stream.output.config_patch import with_vocabulary
from merge_stream.output.model_info import ModelFolder
from merge_stream.tensors.ref import Catalog
from merge_stream.tensors.tables import first_rows

__all__ = ["with_true_vocabulary"]

_PADDED_TO = 64
_MOST_ADDED = 1 << 16
_EMBEDDED = ("embed_tokens.weight", "lm_head.weight", "wte.weight", "word_embeddings.weight", "lm_head.bias")


def with_true_vocabulary(catalog: Catalog, folder: ModelFolder) -> tuple[Catalog, ModelFolder]:
    """Catalog and folder with the vocabulary of the base model's config, when the checkpoint's is that one padded."""
    base = folder.base_config or folder.info.config
    true = text_value(base, "vocab_size")
    if (
        not catalog.padded_vocabulary
        or true is None
        or (folder.base_config is None and folder.config_origin != "base model")
    ):
        return catalog, folder
    padded = {
        name: tensor.shape[0]
        for name, tensor in catalog.tensors.items()
        if name.endswith(_EMBEDDED) and tensor.shape and true < tensor.shape[0] < true + _MOST_ADDED
    }
    if not padded or len(set(padded.values())) != 1 or next(iter(padded.values())) % _PADDED_TO:
        return catalog, folder
    rows = next(iter(padded.values()))
    tensors = {name: first_rows(t, true) if name in padded else t for name, t in catalog.tensors.items()}
    note = f"{', '.join(padded)}: {rows} rows are the {true} of the base model's config with padding, which is cut off"
    config: dict[str, Any] = dict(folder.info.config or {})
    if folder.info.config is not None and "vocab_size" in config:
        config["vocab_size"] = true
    data = with_vocabulary(folder.config_bytes, true) if folder.config_bytes is not None else None
    info = replace(folder.info, config=config or folder.info.config)
    catalog = replace(catalog, tensors=tensors, notes=(*catalog.notes, note))
    return catalog, replace(folder, info=info, config_bytes=data)
