"""What stands beside the weights: config, the base model's tensors, and where each side file comes from.

Priority, file by file: the checkpoint's own folder (verl's `huggingface/`), then
`--base-model`. So a vocabulary or rope setting that training changed is kept, and
anything taken from the base model is told.

    config.json        checkpoint's folder, else base model
    side files         checkpoint's folder, what it lacks from the base model
    names and shapes   safetensors headers of the base model (never its data)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from merge_stream.architectures.base import BaseTensor, ModelInfo
from merge_stream.containers.json_file import read_json
from merge_stream.containers.safetensors_file import read_header
from merge_stream.errors import CheckpointError, CorruptCheckpointError, UsageError
from merge_stream.output.hub import looks_like_hub_name
from merge_stream.output.index import INDEX_NAME
from merge_stream.output.model_card import hub_id_of
from merge_stream.output.side_files import SidePlan, lacking, list_folder, plan_side_files
from merge_stream.storage.allowance import MetadataAllowance
from merge_stream.storage.base import FileEntry
from merge_stream.storage.local import LocalTree
from merge_stream.units import counted

__all__ = ["ModelFolder", "find_model_folder"]

_CONFIG = "config.json"
_PROCESSORS = frozenset({"preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"})
_CONFIG_LIMIT = 50_000_000
_INDEX_LIMIT = 500_000_000


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """What is known beside the weights.

    info          config (parsed) and base tensors, for the architectures
    config_bytes  config.json as it stands in its folder, or None when none is written
    config_origin whose it is, as `SideFile.origin`
    side_files    what is copied
    notes         remarks for the user
    base_id       name of the base model on the Hub, or ""
    base_readme   path of the base model's card, or ""
    base_config   the base model's config.json, where the checkpoint's own is used; None otherwise
    base_folder   where the base model's files lie: its folder, or its snapshot in the Hub's cache; "" without one
    """

    info: ModelInfo
    config_bytes: bytes | None = None
    side_files: SidePlan = field(default_factory=SidePlan)
    notes: tuple[str, ...] = ()
    base_id: str = ""
    base_readme: str = ""
    config_origin: str = "checkpoint"
    base_config: Mapping[str, Any] | None = None
    base_folder: str = ""


def find_model_folder(
    config_dirs: Sequence[str],
    base_model: str | None,
    *,
    write_config: bool,
    allowance: MetadataAllowance | None = None,
) -> ModelFolder:
    """Read what is needed to name the tensors and to complete the folder; no tensor data.

    `write_config=False` (`--no-config`) means weights alone: the checkpoint's config is not
    even read, so that a wrong one can be got round; a given base model still tells names.

    CheckpointError when there is no config.json or the base model's folder is none;
    CorruptCheckpointError when a config, an index or a header is broken.
    """
    folders = [str(Path(folder).absolute()) for folder in config_dirs if Path(folder).is_dir()]
    listings = {folder: list_folder(folder) for folder in folders} if write_config else {}
    base = _base(base_model)
    base_folder, base_listing = base.folder, base.listing
    notes = list(base.notes)
    with_config = [folder for folder, listing in listings.items() if _CONFIG in listing]
    config_folder = with_config[0] if with_config else None
    if config_folder is None and _CONFIG in base_listing:
        config_folder = base_folder
        if write_config and listings:
            notes.append(f"config.json is taken from the base model {base_folder}")
    if config_folder is None and write_config:
        _refuse_without_config(config_dirs, base_folder)

    config: dict[str, Any] | None = None
    config_path, config_bytes = "", None
    if config_folder is not None:
        listing = listings.get(config_folder, base_listing)
        tree = LocalTree(config_folder, listing, {}, allowance)
        config = read_json(tree, _CONFIG, _CONFIG_LIMIT)
        config_path = f"{config_folder}/{_CONFIG}"
        config_bytes = tree.read(_CONFIG) if write_config else None
    base_tensors = base.tensors
    if base_folder and base_tensors is None:
        base_tensors = _base_tensors(LocalTree(base_folder, base_listing, {}, allowance), notes)
    side_files = SidePlan()
    if write_config:
        own = [listings[folder] for folder in (with_config[:1] or folders)]
        same = base_folder in (with_config[:1] or folders)
        side_files = plan_side_files(own, base_listing if base_folder and not same else None)
        if base_folder and with_config and not same:
            notes.append("config and side files are the checkpoint's own; --base-model gives names, and what it lacks")
        notes += _processor_remark(config or {}, side_files, with_base=bool(base_folder))
    info = ModelInfo(config, config_path, base_tensors)
    readme = base_listing["README.md"].path if "README.md" in base_listing else ""
    origin = "checkpoint" if config_folder in listings else "base model"
    base_config = None
    if base_folder and config_folder != base_folder and _CONFIG in base_listing:
        base_config = read_json(LocalTree(base_folder, base_listing, {}, allowance), _CONFIG, _CONFIG_LIMIT)
    every = (*notes, *side_files.notes)
    return ModelFolder(info, config_bytes, side_files, every, base.name, readme, origin, base_config, base_folder)


@dataclass(frozen=True, slots=True)
class _Base:
    """The base model: its folder and files, and tensors where they are not in the folder."""

    folder: str = ""
    listing: Mapping[str, FileEntry] = field(default_factory=dict)
    tensors: Mapping[str, BaseTensor] | None = None
    name: str = ""
    notes: tuple[str, ...] = ()


def _base(base_model: str | None) -> _Base:
    if base_model is None:
        return _Base()
    if not base_model:
        raise UsageError("the name of the base model is empty", hint="name its folder, or leave --base-model out")
    if not Path(base_model).exists() and looks_like_hub_name(base_model):
        from merge_stream.output.hub_base import fetch_base

        found = fetch_base(base_model)
        return _Base(found.folder, list_folder(found.folder), found.tensors, found.repo, found.notes)
    if not Path(base_model).is_dir():
        kind = "a file, not a folder" if Path(base_model).exists() else "not there"
        msg = f"the base model folder {base_model} is {kind}"
        hint = "pass a folder with config.json, tokenizer and, where present, the safetensors files, or ORG/NAME"
        raise CheckpointError(msg, hint=hint)
    folder = str(Path(base_model).absolute())
    listing = list_folder(folder)
    if _CONFIG not in listing:
        msg = f"the base model folder {folder} has no config.json (it holds {counted(len(listing), 'file')})"
        raise CheckpointError(
            msg, hint="pass the folder of the model itself; in a Hub cache that is snapshots/REVISION"
        )
    return _Base(folder, listing, name=hub_id_of(folder))


def _processor_remark(config: Mapping[str, Any], side_files: SidePlan, *, with_base: bool) -> list[str]:
    """A model that sees or hears needs a processor's settings, which trainers often leave behind."""
    if not any(isinstance(config.get(key), dict) for key in ("vision_config", "audio_config")):
        return []
    if any(file.name in _PROCESSORS for file in side_files.files):
        return []
    return [lacking("preprocessor_config.json", with_base=with_base)]


def _refuse_without_config(config_dirs: Sequence[str], base_folder: str) -> None:
    looked = ", ".join(dict.fromkeys([*config_dirs, *([base_folder] if base_folder else [])]))
    where = f"(looked in {looked})" if looked else "beside the shards or in huggingface/"
    msg = f"the checkpoint has no config.json {where}"
    raise CheckpointError(
        msg,
        hint="pass `--base-model DIR` with the config.json and tokenizer of the model that was trained, "
        "or `--no-config` to write the weights alone",
    )


def _base_tensors(tree: LocalTree, notes: list[str]) -> dict[str, BaseTensor] | None:
    """Names, dtypes and shapes of the base model's files; None when it has no safetensors files."""
    folder, listing = tree.label, tree.files
    if INDEX_NAME in listing:
        weight_map = read_json(tree, INDEX_NAME, _INDEX_LIMIT).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            msg = f"{folder}/{INDEX_NAME} has no weight_map of names to files"
            raise CorruptCheckpointError(msg, hint="the file is damaged: copy it again")
        files = sorted(set(weight_map.values()))
        absent = [file for file in files if file not in listing]
        if absent:
            notes.append(
                f"the base model's index names {counted(len(absent), 'file')} not in {folder} (such as {absent[0]}): "
                "its names are not used"
            )
            return None
    else:
        files = [
            name
            for name in listing
            if name.endswith(".safetensors") and "/" not in name and not name.startswith(("adapter", "consolidated"))
        ]
        if "model.safetensors" in files:
            files = ["model.safetensors"]
        weight_map = None
    found = {
        name: BaseTensor(tensor.dtype, tensor.shape)
        for file in files
        for name, tensor in read_header(tree, file).tensors.items()
    }
    if weight_map is not None and set(weight_map) - set(found):
        lost = sorted(set(weight_map) - set(found))
        msg = f"{folder}/{INDEX_NAME} names {lost[0]} in {weight_map[lost[0]]}, which does not hold it"
        raise CorruptCheckpointError(msg, hint="the index and the files of the base model belong to different models")
    return found or None
