"""One rank's file of flat shards, reduced to numbers: its metadata, and where its tensors lie."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from merge_stream.containers.pickle_reader import described, dotted_name
from merge_stream.containers.torch_file import TorchFile, open_torch_file
from merge_stream.containers.torch_tensor import PlainTensor, locate, plain_tensor
from merge_stream.errors import (
    AmbiguousCheckpointError,
    CorruptCheckpointError,
    IncompleteShardsError,
    UnsupportedError,
    UsageError,
)
from merge_stream.formats._catalog import listed
from merge_stream.formats._flat_layout import FlatLayout, is_metadata, read_layout
from merge_stream.formats._hidden_tensors import IN_LISTS, HiddenTensor, hidden_tensors, refuse_hidden_weights
from merge_stream.formats._names import noise_kind
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.dtype import DType

__all__ = ["MIXED", "FlatRank", "Held", "open_rank"]

MIXED = "the files are of different runs, or a save did not finish"
_MODEL_PART = re.compile(r"model_part-(\d+)")


class Held(NamedTuple):
    """A tensor in one rank's file: offset in bytes; `crc` of exactly its bytes, or 0."""

    dtype: DType
    shape: tuple[int, ...]
    offset: int
    crc: int


@dataclass(frozen=True, slots=True, eq=False)
class FlatRank:
    """What one rank holds: `held` by stored key, `root` the key of its state dict ("" for the top)."""

    where: str
    number: int
    layout: FlatLayout
    held: Mapping[str, Held]
    root: str
    ignored: Counter[str]
    hidden: tuple[HiddenTensor, ...]
    metadata_nbytes: int


def open_rank(tree: ByteTree, name: str, number: int, root: str | None) -> FlatRank:
    """Read the metadata of the file `name`; `number` is its rank where the metadata does not say it.

    Refused: a file without metadata or without a flat parameter that it tells of, several state dicts of
    which none is called model (`root` chooses), tensor-parallel parts, and weights in lists or objects.
    """
    file = open_torch_file(tree, name)
    where = file.where
    if not isinstance(file.root, dict):
        msg = f"{where} holds a {dotted_name(file.root)}, wanted a dict with model and shard_metadata"
        raise CorruptCheckpointError(msg, hint=MIXED)
    found = {str(key): value for key, value in file.root.items() if is_metadata(value)}
    chosen = "shard_metadata" if "shard_metadata" in found else next(iter(found), None)
    if chosen is None:
        raise CorruptCheckpointError(f"{where} holds no shard metadata, but other rank files do", hint=MIXED)
    if len(found) > 1 and chosen != "shard_metadata":
        msg = f"{where} holds the metadata of several models: {listed(found)}"
        raise AmbiguousCheckpointError(msg, hint="call the one that is meant shard_metadata")
    _refuse_model_part(name, file)
    layout = read_layout(found[chosen], where)
    container, values = _weights(file, layout, root, chosen)
    ignored: Counter[str] = Counter()
    if container:
        top = container.partition(".")[0]
        ignored.update(noise_kind(key) or "other entries" for key in map(str, file.root) if key not in {top, chosen})
    held: dict[str, Held] = {}
    hidden: list[HiddenTensor] = []
    for key, value in values.items():
        name_of = key if isinstance(key, str) else f"[{described(key)}]"
        told = key in layout.params or key in (layout.buffers or ())
        kind = None if told else noise_kind(name_of)
        if kind:
            ignored[kind] += 1
        elif isinstance(key, str) and (view := plain_tensor(value, repr(key), where)) is not None:
            held[key] = Held(view.dtype, view.shape, locate(view, file, repr(key)), _crc(view, file))
        elif container or not isinstance(value, dict):
            inside = hidden_tensors(value, name_of, where)
            hidden += inside
            ignored[IN_LISTS if inside else "values that are no tensors"] += len(inside) or 1
    refuse_hidden_weights(hidden, where)
    rank = number if layout.rank is None else layout.rank
    return FlatRank(where, rank, layout, held, container, ignored, tuple(hidden), file.metadata_nbytes)


def _refuse_model_part(name: str, file: TorchFile) -> None:
    part = _MODEL_PART.search(name)
    cfg = file.root.get("cfg")
    common = cfg.get("common") if isinstance(cfg, dict) else None
    size = common.get("model_parallel_size") if isinstance(common, dict) else None
    if (type(size) is int and size > 1) or (part and size != 1):
        says = (
            f"cfg says model_parallel_size {size}" if type(size) is int else "cfg does not say that there is only one"
        )
        msg = f"{file.where} is one tensor-parallel part of a model of metaseq or fairseq: {says}"
        hint = "join the parts with metaseq's own consolidate_fsdp_shards first; the result is merged as it is"
        raise UnsupportedError(msg, hint=hint)


def _weights(file: TorchFile, layout: FlatLayout, root: str | None, metadata: str) -> tuple[str, Mapping[Any, Any]]:
    """(its key, the state dict that the metadata is of); every flat parameter must be in it."""
    if root is not None:
        value: Any = file.root
        for key in root.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, dict):
            there = [str(key) for key, each in file.root.items() if isinstance(each, dict) and key != metadata]
            raise UsageError(
                f"{file.where} holds nothing below the root {root!r}", hint=f"roots there are: {listed(there)}"
            )
        chosen, values = root, value
    else:
        wanted = layout.params.keys()
        inner = {str(key): each for key, each in file.root.items() if isinstance(each, dict) and key != metadata}
        fits = {key: each for key, each in {"": file.root, **inner}.items() if wanted & each.keys()}
        if len(fits) > 1 and "model" not in fits:
            msg = f"{file.where} holds several state dicts that could be the model: {listed(fits)}"
            raise AmbiguousCheckpointError(msg, hint="say which with --root KEY")
        chosen = "model" if "model" in fits else next(iter(fits), "")
        values = fits.get(chosen, file.root)
    missing = [key for key in layout.params if key not in values]
    if missing or not layout.params:
        what = f"{len(missing)} of {len(layout.params)} flat parameters of its metadata are" if missing else "all is"
        msg = f"{file.where}: {what} missing in {chosen or 'the file'}: {listed(missing, most=3)}"
        raise IncompleteShardsError(
            msg, hint="the trainer left them out: save model.local_state_dict() of the whole model"
        )
    return chosen, values


def _crc(view: PlainTensor, file: TorchFile) -> int:
    """Checksum of exactly the view's bytes where the file has it, else 0."""
    storage = file.storages.get(view.storage)
    whole = storage is not None and not view.offset and math.prod(view.shape) * view.dtype.itemsize == storage.nbytes
    return storage.crc32 if storage is not None and whole else 0
