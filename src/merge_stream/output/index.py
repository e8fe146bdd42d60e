"""`model.safetensors.index.json`: which tensor stands in which file, as the hub writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping

__all__ = ["INDEX_NAME", "build_index"]

INDEX_NAME = "model.safetensors.index.json"


def build_index(weight_map: Mapping[str, str], *, total_size: int, total_parameters: int) -> bytes:
    """The bytes of the index; only written when there is more than one file.

    `total_size` is the sum of tensor bytes (headers not counted), `total_parameters` the
    number of elements of the parameters that are stored. Layout of huggingface_hub 2.4 and
    transformers 5.24: two spaces, sorted keys, a final newline.
    """
    document = {
        "metadata": {"total_parameters": total_parameters, "total_size": total_size},
        "weight_map": dict(weight_map),
    }
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
