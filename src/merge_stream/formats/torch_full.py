"""Whole state dicts in torch.save files: FULL_STATE_DICT of FSDP, `pytorch_model.bin`, `model.pt`.

    pytorch_model.bin, or pytorch_model-00001-of-00002.bin ... [+ pytorch_model.bin.index.json]
    pytorch_model_fsdp.bin, pytorch_model_fsdp_1.bin         accelerate's FULL_STATE_DICT
    model.pt, model.pth, consolidated.00.pth, ...            names that people give
    anything.pt | .pth | .bin | .ckpt                        when it is the only one in the folder and holds a model

The state dict may be nested (`{"model": ...}`, `{"state_dict": ...}`, see `_roots`); what stands
beside the model is counted and never read. Files that trainers write beside a model (optimizer,
scheduler, random states, arguments, one rank's part) are not candidates, whatever they hold.
Several tensors may share one storage (tied weights): each is a tensor of its own here.

Facts (torch 2.1 to 2.13, accelerate 1.15, transformers 4.57 and 5.24): FSDP1 of world size 1 wraps
tensors in `_rebuild_from_type_v2`; parameters saved as such are `_rebuild_parameter`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from merge_stream.containers.pickle_reader import Recorder, dotted_name
from merge_stream.containers.torch_file import TorchFile, open_torch_file
from merge_stream.containers.torch_tensor import locate, plain_tensor
from merge_stream.errors import (
    AmbiguousCheckpointError,
    CorruptCheckpointError,
    MemoryLimitTooSmallError,
    MergeStreamError,
    UnknownFormatError,
    UnsupportedError,
)
from merge_stream.formats._catalog import FileTable, clean_names, config_dirs, listed
from merge_stream.formats._hidden_tensors import (
    IN_LISTS,
    HiddenTensor,
    hidden_tensors,
    note_on_hidden,
    refuse_hidden_weights,
)
from merge_stream.formats._hub_files import check_index, chosen_set, homes, hub_sets, weight_files
from merge_stream.formats._names import noise_kind
from merge_stream.formats._roots import Selection, naming_of, refuse_flat_parameters, select_model
from merge_stream.formats._stored_checksums import ZipRecords
from merge_stream.formats.base import CheckpointFormat, Detection
from merge_stream.options import OpenOptions
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.box import Box
from merge_stream.tensors.ref import Catalog, ShardTable, TensorRef

__all__ = ["MEMBER", "TorchFull"]

_HUB = re.compile(r"pytorch_model(\.[^./]+?)?(-\d{5}-of-\d{5})?\.bin")
_KNOWN = re.compile(
    r"pytorch_model_fsdp(_\d+)?\.bin"
    r"|(pytorch_model|model|model_state_dict|full_state_dict|state_dict)\.(pt|pth|bin|ckpt)"
    r"|consolidated(\.\d+)?\.(pt|pth)"
)
_TORCH = re.compile(r"[^/]+\.(pt|pth|bin|ckpt)")
_PART = re.compile(r"consolidated\.\d+\.pth?")
# what DeepSpeed, Megatron, verl and per-rank saves are made of: one of these is never a whole model
_OTHERS = re.compile(
    r".*_?rank_?\d+.*|.*_model_states\..*|layer_\d+-model.*|zero_.*|bf16_zero.*|mp_rank_.*|model_world_size_.*"
    r"|common\.pt|model_optim_rng\.pt|distrib_optim\.pt|expert_\d+.*"
)
_BESIDE = re.compile(
    r".*optim.*|.*scheduler.*|(random|rng|extra|trainer|train|dataloader|dl|sampler|loader)_?stat.*|rng.*|scaler.*|data\.pt"
    r"|sampler.*|dataloader.*|training_args.*|args\..*|adapter_.*|custom_checkpoint.*|tokenizer.*|vocab.*|metadata\..*"
)
_TENSORS = ("torch._utils._rebuild_", "torch._tensor._rebuild_", "torch.distributed.")
_MOST_ENTRIES = 5_000_000
_DEEPEST = 8


@dataclass(slots=True)
class _Contents:
    """One opened file: its tensors by stored key, their paths, and what else stands there, by its path too."""

    file: TorchFile
    leaves: dict[str, Recorder] = field(default_factory=dict)
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)


class TorchFull:
    """One whole state dict in one or several torch.save files."""

    name = "torch_full"
    summary = "whole state dict in torch.save files (pytorch_model*.bin, pytorch_model_fsdp.bin, model.pt)"

    def detect(self, tree: ByteTree) -> Detection | None:
        """By known names; another single file only when it holds tensors of a model."""
        folder = tree.label.rstrip("/").rpartition("/")[2]
        if folder.startswith("mp_rank_"):
            return None  # Megatron: each such folder holds a part, called model.pt in old verl
        candidates = _candidates(tree)
        if candidates:
            return Detection(f"whole state dict in {listed(candidates, most=3)}", rank=15)
        lone = _lone(tree)
        return Detection(f"{lone}, the only torch file, holds a state dict", rank=5) if lone else None

    def open(self, tree: ByteTree, options: OpenOptions) -> Catalog:
        """Every tensor of the model's state dict."""
        names, index = _files(tree)
        contents = {name: _contents(tree, name) for name in names}
        chosen = {name: _selected(tree, name, found, options.root) for name, found in contents.items()}
        home = homes(tree, {name: selection.names.values() for name, selection in chosen.items()})
        if index:
            check_index(tree, index, home)
        clean = clean_names(home, tree.label)
        table = FileTable(tree)
        ignored: Counter[str] = Counter()
        hidden: list[HiddenTensor] = []
        tensors: dict[str, TensorRef] = {}
        for name, selection in chosen.items():
            hidden += _left_out(contents[name], selection.root)
            ignored += contents[name].ignored + selection.ignored
            for key, stored in selection.names.items():
                tensors[clean[stored]] = _tensor(contents[name], key, clean[stored], table.index(name))
        first = contents[names[0]].file
        return Catalog(
            format=self.name,
            root=tree.label,
            tensors=tensors,
            files=table.files,
            facts={"files": len(names), "container": chosen[names[0]].root or "none", **first.producer},
            ignored=ignored,
            notes=(
                *dict.fromkeys(note for selection in chosen.values() for note in selection.notes),
                *note_on_hidden(hidden),
            ),
            naming=naming_of(tensors.keys()),
            config_dirs=config_dirs(tree),
            metadata_nbytes=sum(found.file.metadata_nbytes for found in contents.values()),
            checksums=(ZipRecords(tree, tuple(names)),),
        )


def _candidates(tree: ByteTree) -> list[str]:
    """Files of the folder with a known name of a whole model."""
    return [name for name in tree.files if _HUB.fullmatch(name) or _KNOWN.fullmatch(name)]


def _lone(tree: ByteTree) -> str | None:
    """The only torch file of the folder, when no other trainer's files are there and it holds a model."""
    torch_files = [name for name in tree.files if _TORCH.fullmatch(name)]
    if any(_OTHERS.fullmatch(name) for name in torch_files) or ".metadata" in tree.files:
        return None
    found = [name for name in torch_files if not _BESIDE.fullmatch(name)]
    if len(found) != 1:
        return None
    try:
        contents = _contents(tree, found[0])
        names = select_model(contents.paths, None, tree.label).names
    except MemoryLimitTooSmallError:
        raise
    except MergeStreamError:
        return None
    return found[0] if names else None


def _files(tree: ByteTree) -> tuple[Sequence[str], str | None]:
    """The files of the one model that is there, and their index; refuses two models."""
    sets = hub_sets(tree, "pytorch_model", "bin")
    others = [name for name in tree.files if _KNOWN.fullmatch(name) and not _HUB.fullmatch(name)]
    parts = [name for name in others if _PART.fullmatch(name)]
    if len(parts) > 1:
        raise UnsupportedError(
            f"{tree.label} holds {len(parts)} tensor-parallel parts of one model: {listed(parts)}",
            hint="join them with the model's own script first; only consolidated.00.pth alone is a whole model",
        )
    if bool(sets) + len(others) > 1:
        hub = [name for name in tree.files if _HUB.fullmatch(name)]
        raise AmbiguousCheckpointError(
            f"{tree.label} holds several whole models: {listed(hub[:1] + others)}",
            hint="move the one you mean into a folder of its own",
        )
    if sets:
        chosen = chosen_set(tree, sets)[1]
        return weight_files(tree, chosen), chosen.index
    lone = None if others else _lone(tree)
    if not others and lone is None:
        raise UnknownFormatError(
            f"{tree.label} holds no torch file with a known name, and not exactly one other with a model inside",
            hint="wanted pytorch_model.bin, pytorch_model_fsdp.bin, model.pt or one single .pt/.pth/.bin/.ckpt file",
        )
    return (others or [str(lone)]), None


def _contents(tree: ByteTree, name: str) -> _Contents:
    """Open a file and flatten its nested dicts; framework state is counted, not entered."""
    file = open_torch_file(tree, name)
    if not isinstance(file.root, dict):
        raise UnsupportedError(
            f"{file.where} holds {dotted_name(file.root)}, wanted a dict of tensors",
            hint="save the state dict, not the object: torch.save(model.state_dict(), path)",
        )
    result = _Contents(file)
    stack: list[tuple[tuple[str, ...], Mapping[object, object]]] = [((), file.root)]
    entries = 0
    while stack:
        above, mapping = stack.pop()
        entries += len(mapping)
        if len(above) > _DEEPEST or entries > _MOST_ENTRIES:
            raise CorruptCheckpointError(f"{file.where}: its dicts are nested without end, or hold too many entries")
        below: list[tuple[tuple[str, ...], Mapping[object, object]]] = []
        for key, value in mapping.items():
            path = (*above, str(key))
            stored = ".".join(path)
            if kind := noise_kind(str(key)):
                result.ignored[kind] += 1
            elif isinstance(value, dict):
                below.append((path, value))
            elif isinstance(value, Recorder) and value.dotted.startswith(_TENSORS):
                if stored in result.paths:
                    raise CorruptCheckpointError(f"{file.where} holds {stored!r} twice, in nested dicts")
                result.leaves[stored], result.paths[stored] = value, path
            else:
                result.values[stored] = value
        stack.extend(reversed(below))
    return result


def _selected(tree: ByteTree, name: str, contents: _Contents, root: str | None) -> Selection:
    where = f"{tree.label}/{name}"
    selection = select_model(contents.paths, root, where)
    if not selection.names:
        others = Counter({"Python value": len(contents.values)}) if contents.values else Counter[str]()
        raise UnknownFormatError(
            f"{where} holds no tensors of a model (it holds {dict(contents.ignored + others + selection.ignored)})",
            hint="pass the folder of the model's own file",
        )
    refuse_flat_parameters(selection.names.values(), where)
    return selection


def _left_out(contents: _Contents, root: str) -> list[HiddenTensor]:
    """Counts the values that are neither tensors nor dicts; the tensors inside those that stand in the model."""
    found: list[HiddenTensor] = []
    for stored, value in contents.values.items():
        inside = (
            hidden_tensors(value, stored, contents.file.where) if f"{stored}.".startswith(root and f"{root}.") else []
        )
        contents.ignored[IN_LISTS if inside else "Python value"] += len(inside) or 1
        found += inside
    refuse_hidden_weights(found, contents.file.where)
    return found


def _tensor(contents: _Contents, key: str, name: str, index: int) -> TensorRef:
    value, where = contents.leaves[key], contents.file.where
    view = plain_tensor(value, repr(key), where)
    if view is None:
        kind = dotted_name(value).rpartition(".")[2]
        raise UnsupportedError(
            f"{where}: {key!r} is a {kind}, one rank's part of a tensor; a whole state dict was wanted",
            hint="pass the folder with the files of all ranks, as the trainer named them",
        )
    offset = locate(view, contents.file, repr(key))
    rows = ShardTable.of([(Box.whole(view.shape), index, offset)], len(view.shape))
    return TensorRef(name, view.dtype, view.shape, rows)


MEMBER: CheckpointFormat = TorchFull()
