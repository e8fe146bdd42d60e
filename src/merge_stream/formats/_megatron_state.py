"""The state of a run beside Megatron's weights: the trainer's arguments, the iteration.

    torch_dist, zarr   common.pt (up to core 0.18), a dict; then the bytes item common_state/shard_0_1, [dict]
    fsdp_dtensor       the bytes item `args`

Arguments decide what values mean (`_megatron_raw.settings_of`), so that a file which cannot be read is an error. A save
without any of them is none: other trainers write no arguments.

Facts: megatron-core 0.9 to 0.19 (real files).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from merge_stream.containers.pickle_reader import dotted_name, is_instance
from merge_stream.containers.torch_file import open_torch_file
from merge_stream.errors import CorruptCheckpointError, IncompleteShardsError
from merge_stream.formats._dcp_metadata import ARGUMENTS, COMMON_STATE, DcpMetadata
from merge_stream.storage.base import ByteTree

__all__ = ["common_state"]

_COMMON, _NAMESPACE = "common.pt", "argparse.Namespace"


def common_state(tree: ByteTree, meta: DcpMetadata | None) -> Mapping[str, Any]:
    """The first state that holds arguments; nothing where none has any.

    IncompleteShardsError when one is named and not there, CorruptCheckpointError when something else is in its place.
    """
    places: list[tuple[str, int, int | None]] = [(_COMMON, 0, None)] if _COMMON in tree.files else []
    for name in sorted(meta.values) if meta is not None else ():
        if meta is not None and (name.startswith(COMMON_STATE) or name == ARGUMENTS):
            if name not in meta.stored:
                msg = f"{tree.label}: the metadata names {name!r} and does not say where it is stored"
                raise IncompleteShardsError(msg, hint="a metadata file is missing or damaged")
            places += [(chunk.file, chunk.start, chunk.nbytes) for chunk in meta.stored[name]]
    for file, start, nbytes in places:
        if file not in tree.files:
            msg = f"{tree.label} lacks {file}, which holds the common state"
            raise IncompleteShardsError(msg, hint="copy the files of all ranks")
        opened = open_torch_file(tree, file, offset=start, nbytes=nbytes)
        root = opened.root
        root = root[0] if isinstance(root, list) and len(root) == 1 else root
        if is_instance(root) and dotted_name(root) == _NAMESPACE:  # `args` alone
            root = {"args": root}
        if not isinstance(root, dict):
            msg = f"{opened.where} is no common state of a run: it holds {type(root).__name__}"
            raise CorruptCheckpointError(msg, hint="metadata and data are of two different saves")
        if "args" in root:
            return root
    return {}
