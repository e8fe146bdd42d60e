"""A base model by its name on the Hub: its small files and the headers of its weights, never the weights.

    ORG/NAME[@REVISION] -> files of that commit -> side files into the Hub's own cache
                                                -> safetensors headers by ranged requests

The weights of a cached snapshot are used when they are all there. Offline, the cache is all
there is.
"""

from __future__ import annotations

import fnmatch
import glob
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from merge_stream.architectures.base import BaseTensor
from merge_stream.errors import CheckpointError, HubError
from merge_stream.output.hub import client, speaking_clearly
from merge_stream.output.index import INDEX_NAME
from merge_stream.output.side_files import LARGEST, is_side_file
from merge_stream.tensors.dtype import dtype_named
from merge_stream.units import counted

if TYPE_CHECKING:
    from huggingface_hub import HfApi

__all__ = ["HubBase", "fetch_base"]

_SINGLE = "model.safetensors"
_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class HubBase:
    """`folder` is the snapshot in the cache; `tensors` is None when it must (or can only) be read from there."""

    folder: str
    repo: str
    tensors: Mapping[str, BaseTensor] | None
    notes: tuple[str, ...] = ()


def fetch_base(name: str) -> HubBase:
    """Everything of the base model but its weights; HubError when it cannot be had, with the reason."""
    repo, _, revision = name.partition("@")
    wanted = f"--base-model {name}"
    hint = "or give the folder of a downloaded model: --base-model DIR"
    try:
        api = client(wanted)
    except HubError as error:
        folder = _cached(repo, revision)
        if folder is None:
            raise HubError(f"{error.message}; no folder {repo} is here", hint=f"{error.hint}; {hint}") from error
        return HubBase(folder, repo, None, (f"the Hub is not asked: {repo} is taken from its cache",))

    with speaking_clearly(f"{wanted} is no folder here, and could not be read from the Hub", hint):
        info = api.model_info(repo, revision=revision or None, files_metadata=True)
        there = {s.rfilename: s.size or 0 for s in info.siblings or ()}
        if "config.json" not in there:
            msg = f"{repo} on the Hub has no config.json (it holds {counted(len(there), 'file')})"
            raise CheckpointError(msg, hint="name the repository of the model itself")
        small = [n for n, size in there.items() if size <= LARGEST and (is_side_file(n) or n == "config.json")]
        small += [n for n in (INDEX_NAME,) if n in there]
        folder = api.snapshot_download(repo, revision=revision or None, allow_patterns=[glob.escape(n) for n in small])
        weights = _weight_files(folder, there)
        if not weights or all(os.path.exists(os.path.join(folder, file)) for file in weights):
            return HubBase(folder, repo, None)
        tensors = _headers(api, repo, os.path.basename(folder), weights)
    return HubBase(
        folder,
        repo,
        tensors,
        (f"names are those of {repo} on the Hub ({counted(len(weights), 'header')} read, no weights)",),
    )


def _weight_files(folder: str, there: Mapping[str, int]) -> list[str]:
    if INDEX_NAME in there:
        with open(os.path.join(folder, INDEX_NAME), encoding="utf-8") as file:
            return sorted(set(json.load(file)["weight_map"].values()))
    if _SINGLE in there:
        return [_SINGLE]
    return sorted(fnmatch.filter(there, "model-?????-of-?????.safetensors"))


def _headers(api: HfApi, repo: str, revision: str, files: Sequence[str]) -> dict[str, BaseTensor]:
    with ThreadPoolExecutor(_REQUESTS) as pool:
        found = list(pool.map(lambda file: api.parse_safetensors_file_metadata(repo, file, revision=revision), files))
    tensors: dict[str, BaseTensor] = {}
    for file, header in zip(files, found, strict=True):
        for name, tensor in header.tensors.items():
            dtype = dtype_named(tensor.dtype)
            if dtype is None:
                msg = f"{repo}/{file}: tensor {name!r} has element type {tensor.dtype!r}, which is not known here"
                raise CheckpointError(msg)
            tensors[name] = BaseTensor(dtype, tuple(tensor.shape))
    return tensors


def _cached(repo: str, revision: str) -> str | None:
    """The snapshot of a repository in the Hub's cache, found without the client."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    folder = os.path.join(os.path.expanduser(cache), "models--" + repo.replace("/", "--"))
    commit = revision or "main"
    ref = os.path.join(folder, "refs", commit)
    if os.path.isfile(ref):
        with open(ref, encoding="utf-8") as file:
            commit = file.read().strip()
    snapshot = os.path.join(folder, "snapshots", commit)
    return snapshot if os.path.isfile(os.path.join(snapshot, "config.json")) else None
