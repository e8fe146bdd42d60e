"""Megatron checkpoints: core's distributed ones (`torch_dist`, zarr), its FSDP, and a file for each rank.

    folder             -> layout          (`_megatron_folder`)
    layout             -> raw tensors     (`_megatron_dist`, `_megatron_zarr`, `_megatron_ranks`)
    raw tensors        -> canonical names (`_megatron_names`); what they are called in the repository is told later
                                          (`architectures/megatron`)

Neither Megatron nor Transformer Engine is imported, and no object of theirs is built. Optimizer states are never read;
extra states neither.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from merge_stream.containers.json_file import read_json
from merge_stream.errors import CorruptCheckpointError, IncompleteShardsError, UnknownFormatError
from merge_stream.formats._catalog import FileTable, clean_names, config_dirs
from merge_stream.formats._megatron_dist import read_dist
from merge_stream.formats._megatron_folder import locate
from merge_stream.formats._megatron_names import canonical
from merge_stream.formats._megatron_ranks import read_ranks
from merge_stream.formats._megatron_raw import ITERATION, ROTARY, settings_of, vocabulary_of
from merge_stream.formats._megatron_zarr import read_zarr
from merge_stream.formats.base import CheckpointFormat, Detection
from merge_stream.options import OpenOptions
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.ref import Catalog

__all__ = ["MEMBER", "Megatron"]

_VERL, _BRIDGE = "transformer_config.json", "run_config.yaml"
_YAML = re.compile(
    r"^  (?:(layernorm_zero_centered_gamma|rotary_interleaved): (true|false)"
    r"|(make_vocab_size_divisible_by|tensor_model_parallel_size|num_attention_heads|num_query_groups|kv_channels"
    r"|linear_(?:num_key_heads|key_head_dim|num_value_heads|value_head_dim)): (\d{1,9}))\s*$",
    re.MULTILINE,
)
_STEP = re.compile(r"(?:iter_|global_step_)(\d{1,18})")
_RANK_FILE = "model_optim_rng.pt"
_LIMIT = 1 << 20
_WORDS = {
    "torch_dist": "a Megatron-core distributed checkpoint",
    "dcp": "a DCP folder of Megatron",
    "zarr": "a Megatron-core checkpoint of zarr arrays",
    "ranks": "Megatron files of each rank",
}


class Megatron:
    """A run, an iteration, or the folder of the weights itself."""

    name = "megatron"
    summary = "Megatron: core torch_dist and zarr, Megatron-FSDP, mp_rank_*/model_optim_rng.pt; verl, NeMo 2 folders"
    own_options = frozenset({"weights", "no_mtp"})

    def detect(self, tree: ByteTree) -> Detection | None:
        """By trackers, metadata.json, names of files and, where need be, names in the metadata."""
        found = locate(tree)
        if found is None:
            if _RANK_FILE in tree.files:
                msg = f"{tree.label} is the folder of one rank of a Megatron checkpoint"
                raise IncompleteShardsError(msg, hint="pass the folder above it, which holds those of all ranks")
            return None
        where = f" in {found.folder}/" if found.folder else ""
        return Detection(f"{_WORDS[found.layout]}{where}", rank=80)

    def open(self, tree: ByteTree, options: OpenOptions) -> Catalog:
        """Every tensor under its canonical name."""
        found = locate(tree)
        if found is None:
            msg = f"{tree.label} holds no Megatron checkpoint"
            raise UnknownFormatError(msg, hint="pass the folder of a run or of one iteration")
        here = tree.subtree(found.folder)
        table = FileTable(here)
        if found.layout == "zarr":
            raw = read_zarr(here, table)
        elif found.layout == "ranks":
            raw = read_ranks(here, table)
        else:
            raw = read_dist(here, table, options, unprefixed=found.layout == "torch_dist")
        model = canonical(raw.tensors)
        twins = canonical(raw.twins).tensors
        if not model.tensors:
            msg = f"{here.label} holds no weights of a model: {dict(model.ignored)}"
            raise IncompleteShardsError(msg, hint="it holds the optimizer's state; pass the model's folder")
        prediction = [name for name in model.tensors if name.startswith("mtp.")] if options.no_mtp else []
        for name in prediction:
            del model.tensors[name]
        clean_names(model.tensors, here.label)
        ignored = raw.ignored + model.ignored
        if prediction:
            ignored["multi-token prediction (--no-mtp)"] = len(prediction)
        told = _settings(tree, found.folder)
        facts = {"layout": found.layout, **_agreed(settings_of(told), raw.facts, here.label), **raw.facts}
        settings = next((t.files[_BRIDGE].path for t in (here, tree) if _BRIDGE in t.files), None)
        has_adapters = any(".adapter." in name for name in model.tensors)
        dirs = [str(Path(here.label))]
        for folder in found.configs:
            dirs += config_dirs(tree.subtree(folder))
        return Catalog(
            format=self.name,
            root=here.label,
            tensors=model.tensors,
            files=table.files,
            facts=facts,
            ignored=ignored,
            notes=(*found.notes, *raw.notes, *model.notes, *_other_iteration(here.label, facts)),
            naming="megatron",
            beside={_BRIDGE: settings} if settings and has_adapters else {},
            config_dirs=tuple(dict.fromkeys((*config_dirs(here), *dirs[1:], *config_dirs(tree)))),
            metadata_nbytes=raw.metadata_nbytes,
            checksums=raw.checksums,
            twins={name: twin for name, twin in twins.items() if name in model.tensors},
            padded_vocabulary="any",
            vocabulary=raw.vocabulary if any(raw.vocabulary) else vocabulary_of(told),
            module_dtype=raw.module_dtype,
            no_prediction=options.no_mtp,
        )


MEMBER: CheckpointFormat = Megatron()


def _agreed(beside: Mapping[str, str], inside: Mapping[str, str | int], where: str) -> Mapping[str, str]:
    """Settings from files beside the checkpoint; CorruptCheckpointError when its own arguments say otherwise."""
    for key, value in beside.items():
        own = str(inside.get(key, value))
        if own != value and not (key == ROTARY and own.split(" ", 1)[0] == value):
            msg = f"{where}: {key} are {own} by the trainer's arguments, and {value} by {_VERL} or {_BRIDGE} beside it"
            raise CorruptCheckpointError(msg, hint="one of them is of another run: remove or correct that file")
    return beside


def _other_iteration(folder: str, facts: Mapping[str, str | int]) -> tuple[str, ...]:
    """A remark when the folder is named for another iteration than its files tell."""
    named = _STEP.fullmatch(Path(folder).name)
    told = facts.get(ITERATION)
    if named is None or told is None or int(named[1]) == told:
        return ()
    return (f"{folder} was renamed or holds files of another step: they say iteration {told}",)


def _settings(tree: ByteTree, folder: str) -> dict[str, Any]:
    """Settings of the model from files beside the weights: verl's transformer_config.json, Bridge's run_config.yaml."""
    told: dict[str, Any] = {}
    parts = folder.split("/") if folder else []
    for depth in range(len(parts) + 1):
        at = "".join(f"{part}/" for part in parts[:depth])
        if at + _VERL in tree.files:
            told |= read_json(tree, at + _VERL, _LIMIT)
        if at + _BRIDGE in tree.files:
            text = tree.read(at + _BRIDGE, 0, min(tree.files[at + _BRIDGE].nbytes, _LIMIT)).decode(errors="replace")
            for match in _YAML.finditer(text):
                told |= {match[1]: match[2] == "true"} if match[1] else {match[3]: int(match[4])}
    return told
