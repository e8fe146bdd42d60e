"""JSON objects from a checkpoint folder: bounded, and every defect told with the file's name."""

from __future__ import annotations

import json
from typing import Any

from merge_stream.containers.json_cost import json_cost
from merge_stream.errors import CorruptCheckpointError
from merge_stream.storage.base import ByteTree

__all__ = ["read_json"]

_KINDS = {
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "the null",
}


def read_json(tree: ByteTree, name: str, limit: int) -> dict[str, Any]:
    """The JSON object in a file of at most `limit` bytes.

    CorruptCheckpointError when it is larger, no JSON, no object, nested too deeply, or when
    one key stands in an object twice with different values; MemoryLimitTooSmallError when it, or
    what it becomes in memory, does not fit in the allowance of the tree.
    """
    where = f"{tree.label}/{name}"
    nbytes = tree.entry(name).nbytes
    if nbytes > limit:
        raise CorruptCheckpointError(f"{where} has {nbytes} bytes, at most {limit} were expected of such a file")
    tree.allowance.require(nbytes, where)
    text = tree.read(name)
    tree.allowance.require(json_cost(text), where)
    try:
        document = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_consistent)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CorruptCheckpointError(
            f"{where} is no valid JSON: {reason}", hint="the file is damaged or half written: copy it again"
        ) from None
    if not isinstance(document, dict):
        raise CorruptCheckpointError(f"{where} holds {_KINDS[type(document)]} of JSON, wanted an object")
    return document


def _consistent(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        for key, value in pairs:
            if result[key] != value:
                raise ValueError(f"{key[:200]!r} stands there twice with different values")
    return result
