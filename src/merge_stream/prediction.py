"""A model that is written without its layers of multi-token prediction (`--no-mtp`): its config must not count them."""

from __future__ import annotations

import json
from dataclasses import replace

from merge_stream.output.config_patch import without_prediction
from merge_stream.output.model_info import ModelFolder
from merge_stream.tensors.ref import Catalog

__all__ = ["with_true_prediction"]


def with_true_prediction(catalog: Catalog, folder: ModelFolder) -> ModelFolder:
    """The folder with a config that counts no such layers, where they were left out; what was changed is told."""
    if not catalog.no_prediction or folder.config_bytes is None:
        return folder
    data, keys = without_prediction(folder.config_bytes)
    if not keys:
        return folder
    info = replace(folder.info, config=json.loads(data.decode("utf-8-sig")))
    note = f"config.json: {', '.join(keys)} set to 0, for the layers of multi-token prediction are left out"
    return replace(folder, info=info, config_bytes=data, notes=(*folder.notes, note))
