"""Which files a staging store consists of, known before the first byte."""

from __future__ import annotations

from collections.abc import Mapping

from merge_stream.containers.zarr_array import ADAPTER_GROUP, array_metadata, lay_out_array
from merge_stream.formats.zarr_store import GROUP, ROOT, SEAL, SIDE_FILES, metadata_bytes
from merge_stream.output.model_info import ModelFolder
from merge_stream.planning.plan import Plan
from merge_stream.planning.store_layout import arrays_of

__all__ = ["BASE_README", "CONFIG", "metadata_of_nodes", "nodes_with_a_file", "store_files"]

CONFIG = "config.json"
BASE_README = "base_model_README.md"
_MOST_METADATA = 0.02
"""Share of the tensors' bytes up to which each array has metadata of its own, beside that in the root."""
_FACTS = 64 << 10
"""Bytes that the root tells beside the arrays, and those of the seal without its list."""
_DIGEST = 80


def metadata_of_nodes(plan: Plan) -> dict[str, bytes]:
    """Zarr metadata of every array, and of the adapter's group, by name."""
    texts = {p.name: metadata_bytes(array_metadata(lay_out_array(p.name, p.dtype, p.shape))) for p in plan.parameters}
    if any(name.startswith(f"{ADAPTER_GROUP}/") for name in texts):
        texts[ADAPTER_GROUP] = metadata_bytes(GROUP)
    return texts


def nodes_with_a_file(plan: Plan, texts: Mapping[str, bytes]) -> frozenset[str]:
    """Names whose metadata stands in a file of its own too: all of them, or the group alone where they are many."""
    if sum(map(len, texts.values())) <= _MOST_METADATA * sum(p.nbytes for p in plan.parameters):
        return frozenset(texts)
    return frozenset(name for name in texts if name == ADAPTER_GROUP)


def store_files(plan: Plan, folder: ModelFolder) -> dict[str, int]:
    """Every file of the store and its bytes; of root and seal an upper bound."""
    texts = metadata_of_nodes(plan)
    files = {a.array.file: a.array.file_nbytes for output in plan.outputs for a in arrays_of(plan, output)}
    files |= {f"{name}/{ROOT}": len(texts[name]) for name in nodes_with_a_file(plan, texts)}
    beside = (*folder.side_files.files, *folder.side_files.quantization)
    side = {f.name: f.nbytes for f in beside}
    if folder.config_bytes is not None:
        side[CONFIG] = len(folder.config_bytes)
    if folder.base_readme:
        side[BASE_README] = 0
    files |= {f"{SIDE_FILES}/{name}": nbytes for name, nbytes in side.items()}
    root = _FACTS + sum(len(name.encode()) + len(text) + 4 for name, text in texts.items())
    told = _FACTS + sum(len(name.encode()) + _DIGEST for name in side)
    return {**files, ROOT: root, SEAL: told}
