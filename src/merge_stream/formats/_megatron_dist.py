"""Megatron's DCP folders: `torch_dist` of megatron-core, `fsdp_dtensor` of Megatron-FSDP, `torch_dcp`.

    torch_dist     keys without prefix (or `module.`), metadata.json written last, common.pt up to 0.18
    fsdp_dtensor   keys `model.module.`, fp32 main weights, no metadata.json
    torch_dcp      keys `model.`

Bytes items (`X._extra_state/shard_0_4`, `common_state`, `rng_state`) are skipped by type. With `--weights master`
the fp32 masters of a fully reshardable optimizer (`optimizer.state.param.<key>`, shape and chunks of the weight; core
0.15 and newer) or of a flattened one (`optimizer.state.fp32_param.<key>`, core up to 0.15; `_megatron_flat`) take the
place of the weights; other optimizers keep them in buffers without names.

Facts: megatron-core 0.9 to 0.19 (real files).
"""

from __future__ import annotations

import re

from merge_stream.errors import CorruptCheckpointError, IncompleteShardsError, UnsupportedError
from merge_stream.formats._catalog import FileTable, listed
from merge_stream.formats._dcp_metadata import DcpMetadata, metadata_files, read_metadata
from merge_stream.formats._dcp_tensors import ModelChunks
from merge_stream.formats._megatron_flat import unflattened
from merge_stream.formats._megatron_names import noise_of
from merge_stream.formats._megatron_raw import Raw
from merge_stream.formats._megatron_seeds import require_own_seeds
from merge_stream.formats._megatron_state import common_state
from merge_stream.options import OpenOptions
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.dtype import F32

__all__ = ["read_dist"]

_MASTER = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<kind>param|fp32_param)\.(?P<key>.+)")
_MODULE = "leave --weights master out: the weights of the model are there"


def read_dist(tree: ByteTree, table: FileTable, options: OpenOptions, *, unprefixed: bool) -> Raw:
    """Every model tensor of the folder; `unprefixed` for torch_dist."""
    if not metadata_files(tree):
        msg = f"{tree.label} has no .metadata, which is written when all ranks are through"
        raise IncompleteShardsError(msg, hint="the save did not finish, or the file was not copied")
    meta = read_metadata(tree)
    raw = Raw(metadata_nbytes=meta.nbytes)
    keys = [key for key in meta.tensors if noise_of(key) is None]
    plain = [key for key in keys if not key.startswith("model")]
    if plain and unprefixed is False:
        msg = f"{tree.label} has no metadata.json, which Megatron-core writes last: the save did not finish"
        raise IncompleteShardsError(msg, hint="take an earlier iteration, or copy the file if it was left behind")
    masters = _masters(tree, meta, keys) if options.weights == "master" and unprefixed else {}
    require_own_seeds(tree, meta)
    chunks = ModelChunks(tree, meta, dict.fromkeys((*keys, *masters.values())), table)
    raw.tensors = {key: chunks.tensor(key, key) for key in keys}
    if masters:
        raw.facts["weights"] = "fp32 masters"
        raw.twins = {key: raw.tensors[key] for key in masters if meta.tensors[key].dtype != F32}
    for key, source in masters.items():
        if _is_flat(source):
            raw.tensors[key] = unflattened(key, chunks.tensor(source, source), meta.tensors[key].size)
        else:
            raw.tensors[key] = chunks.tensor(source, key)
    raw.metadata_nbytes += chunks.read_nbytes
    raw.checksums = (chunks.checksums,)
    raw.facts["chunks"] = chunks.count
    for key in (*meta.tensors, *meta.values):
        if kind := noise_of(key):
            raw.ignored[kind] += 1
    if not unprefixed and options.weights != "master" and _all_wide(raw):
        raw.module_dtype = "config"
    raw.learn(common_state(tree, meta))
    return raw


def _masters(tree: ByteTree, meta: DcpMetadata, keys: list[str]) -> dict[str, str]:
    """Key of each weight that has one -> key of its fp32 master."""
    there = set(keys)
    found: dict[str, str] = {}
    for name in meta.tensors:
        match = _MASTER.fullmatch(name)
        if match is None or match["key"] not in there:
            continue
        if found.setdefault(match["key"], name) != name:
            raise CorruptCheckpointError(f"{tree.label} has two masters of {match['key']}", hint=_MODULE)
    if not found:
        buffers = any(".gbuf_idx_" in key for key in meta.tensors)
        what = "in buffers without names" if buffers else "not saved"
        msg = f"{tree.label}: the optimizer's fp32 masters are {what}, so they cannot be taken"
        raise UnsupportedError(msg, hint=_MODULE)
    for key, master in found.items():
        if not _is_flat(master) and meta.tensors[master].size != meta.tensors[key].size:
            msg = f"{tree.label}: {master} is {list(meta.tensors[master].size)}, {key} {list(meta.tensors[key].size)}"
            raise UnsupportedError(msg, hint=_MODULE)
    lost = [key for key in keys if key not in found and meta.tensors[key].dtype != F32]
    if lost:
        msg = f"{tree.label}: the optimizer has no masters of {listed(lost, most=3)}"
        raise UnsupportedError(msg, hint=_MODULE)
    return found


def _is_flat(master: str) -> bool:
    match = _MASTER.fullmatch(master)
    return match is not None and match["kind"] == "fp32_param"


def _all_wide(raw: Raw) -> bool:
    return bool(raw.tensors) and all(tensor.dtype == F32 for tensor in raw.tensors.values())
