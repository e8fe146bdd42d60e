"""Where in a Megatron run the weights are: trackers, verl's folders, NeMo's.

    latest_checkpointed_iteration.txt   "100" -> iter_0000100/ or global_step_100/, "release" -> release/
    dist_ckpt/ + huggingface/           verl, 2025-06 until 0.9
    model/dist_ckpt/, model/huggingface/, ckpt_contents.json    verl 0.9.1
    model/mp_rank_*/model.pt, hf_config_and_tokenizer/          verl, spring of 2025
    weights/ + context/                 NeMo 2

The innermost folder has one of four layouts: a DCP folder of Megatron's (`torch_dist`, or one of its FSDP), zarr
arrays, or a folder for each rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from merge_stream.containers.json_file import read_json
from merge_stream.errors import AmbiguousCheckpointError, CorruptCheckpointError, IncompleteShardsError
from merge_stream.formats._catalog import listed
from merge_stream.storage.base import ByteTree

__all__ = ["Layout", "Located", "locate"]

Layout = Literal["torch_dist", "dcp", "zarr", "ranks"]

_TRACKER = "latest_checkpointed_iteration.txt"
_RANK_FILE = re.compile(r"mp_rank_\d+(_\d+)*/(model_optim_rng|model)\.pt")
_EMBEDDING_ARRAY = re.compile(r"[^/]*embedding\.word_embeddings\.weight/\.zarray")
_NAMES = (b"linear_qkv", b"linear_fc1", b"word_embeddings", b"linear_kv_down_proj")
_SCANNED = 1 << 20
_JSON_LIMIT = 1 << 20
_MOST_TEXT = 64


@dataclass(frozen=True, slots=True)
class Located:
    """The folder of the weights (relative to the tree), its layout, folders that may hold a config."""

    folder: str
    layout: Layout
    configs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def locate(tree: ByteTree) -> Located | None:
    """Where the weights are; None when this is no folder of Megatron's.

    IncompleteShardsError when a tracker names a folder that is not there, AmbiguousCheckpointError for a step with
    both actor and critic.
    """
    return _located(tree, "", (), depth=4)


def _located(tree: ByteTree, folder: str, configs: tuple[str, ...], depth: int) -> Located | None:
    here = tree.subtree(folder)
    if layout := _layout(here):
        return Located(folder, layout, configs)
    if depth == 0:
        return None
    beside = tuple(
        _joined(folder, name)
        for name in ("huggingface", "model/huggingface", "hf_config_and_tokenizer", "context")
        if any(path.startswith(f"{name}/") for path in here.files)
    )
    below: str | None = None
    notes: tuple[str, ...] = ()
    if _TRACKER in here.files:
        below = _tracked(here)
    else:
        inner = [name for name in ("dist_ckpt", "model/dist_ckpt", "model", "weights") if _layout(here.subtree(name))]
        roles = [name for name in ("actor", "critic") if any(path.startswith(f"{name}/") for path in here.files)]
        if inner:
            below = inner[0]
        elif len(roles) == 1:
            below = roles[0]
        elif roles and all(_located(tree, _joined(folder, role), (), depth - 1) for role in roles):
            msg = f"{here.label} holds an actor and a critic"
            raise AmbiguousCheckpointError(msg, hint=f"pass one of them: {here.label}/actor or {here.label}/critic")
    if below is None:
        return None
    found = _located(tree, _joined(folder, below), (*beside, *configs), depth - 1)
    if found is None:
        return None
    return Located(found.folder, found.layout, found.configs, (*notes, *found.notes))


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _layout(tree: ByteTree) -> Layout | None:
    """The layout of a folder that holds weights itself."""
    backend = _backend(tree)
    if backend == "zarr" or (backend is None and _has_zarr(tree)):
        return "zarr"
    if any(_RANK_FILE.fullmatch(name) for name in tree.files):
        return "ranks"
    has_metadata = ".metadata" in tree.files
    if backend == "torch_dist" or (has_metadata and "common.pt" in tree.files):
        return "torch_dist"
    if backend is not None:
        msg = f"{tree.label}/metadata.json says sharded_backend {backend!r}, which is not known here"
        raise CorruptCheckpointError(msg, hint="known are torch_dist and zarr")
    if has_metadata:
        head = tree.read(".metadata", 0, min(tree.files[".metadata"].nbytes, _SCANNED))
        if any(name in head for name in _NAMES):
            return "dcp"
    return None


def _backend(tree: ByteTree) -> str | None:
    entry = tree.files.get("metadata.json")
    if entry is None or entry.nbytes > _JSON_LIMIT:
        return None
    try:
        value = read_json(tree, "metadata.json", _JSON_LIMIT).get("sharded_backend")
    except CorruptCheckpointError:
        return None
    return value if isinstance(value, str) else None


def _has_zarr(tree: ByteTree) -> bool:
    return any(_EMBEDDING_ARRAY.fullmatch(name) for name in tree.files)


def _tracked(tree: ByteTree) -> str | None:
    """The folder that the tracker names."""
    data = tree.read(_TRACKER, 0, min(tree.files[_TRACKER].nbytes, _MOST_TEXT))
    try:
        text = data.decode().strip()
    except UnicodeDecodeError:
        text = ""
    if text == "release":
        names = ["release"]
    elif text.isdecimal() and len(text) <= 18:
        names = [f"iter_{int(text):07d}", f"global_step_{int(text)}"]
    else:
        msg = f"{tree.label}/{_TRACKER} says {text[:40]!r}, wanted a number or release"
        raise CorruptCheckpointError(msg, hint="pass the folder of one iteration")
    folders = {path.split("/", 1)[0] for path in tree.files if "/" in path}
    for name in names:
        if name in folders:
            return name
    there = sorted(name for name in folders if name.startswith(("iter_", "global_step_", "release")))
    if not there:
        return None
    msg = f"{tree.label}/{_TRACKER} names {names[0]}, which is not there"
    raise IncompleteShardsError(msg, hint=f"pass the folder of one iteration; there are {listed(there)}")
