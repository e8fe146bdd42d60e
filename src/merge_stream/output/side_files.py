"""The files beside the weights: tokenizer, processor, templates, code, licence, byte for byte.

Rule: every regular file of the folder that is neither weights nor the trainer's own, up to
a size limit. Never re-serialised: transformers 5.24 writes tokenizers and generation
configs that 4.57 cannot load or that lost their lists of end tokens. `*.py` is copied and
never imported. Links to files are followed (a Hub snapshot is made of them), links to
folders are not.

The checkpoint's folder comes first, the base model gives what it lacks, with two
exceptions: tokenizer files belong together, so the base gives them only when the checkpoint
has no vocabulary of its own; and the README of the base model describes another model.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from merge_stream.errors import SourceChangedError
from merge_stream.storage.base import FileEntry
from merge_stream.storage.local import natural_key
from merge_stream.units import format_bytes

__all__ = [
    "LARGEST",
    "SideFile",
    "SidePlan",
    "copy_side_files",
    "is_side_file",
    "lacking",
    "list_folder",
    "plan_side_files",
]

LARGEST = 256_000_000
"""Bytes; a larger file is no side file."""
_CHUNK = 1 << 20
_MOST_ENTRIES = 100_000

# Sub-folders that belong to a model: transformers' further templates, sentence-transformers' modules ("1_Pooling").
_SUBFOLDERS = re.compile(r"additional_chat_templates|\d+_[A-Za-z]+")

_WEIGHTS = re.compile(
    r".*\.(bin|pt|pth|gguf|ggml|onnx|onnx_data|safetensors|ckpt|h5|hdf5|msgpack|npz|npy|tflite|mlmodel|pkl|pickle"
    r"|distcp|nemo|tar|gz|tgz|zip|zst|parquet|arrow)|.*\.index\.json|consolidated.*|params\.json",
    re.IGNORECASE,
)
_TRAINER = re.compile(
    r"config\.json|\..*|optimizer.*|scheduler.*|rng_state.*|random_states.*|extra_state.*|trainer_state\.json"
    r"|training_args.*|train_state.*|fsdp_config\.json|lora_train_meta\.json|adapter_.*|latest|latest_.*"
    r"|zero_to_fp32\.py|.*\.log|events\.out\.tfevents.*|.*\.lock|.*\.tmp|.*\.partial|.*~|metadata\.json"
    r"|common\.pt|dataloader.*"
)
_QUANTIZATION = frozenset(
    {"hf_quant_config.json", "quant_config.json", "quantize_config.json", "quantization_config.json"}
)
_TOKENIZER = re.compile(
    r"tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..*|merges\.txt|.*\.tiktoken|tekken\.json"
    r"|spiece\.model|sentencepiece.*|source\.spm|target\.spm|chat_template\..*|additional_chat_templates/.*"
    r"|normalizer\.json"
)
_VOCABULARY = re.compile(
    r"tokenizer\.(json|model)|vocab\..*|.*\.tiktoken|tekken\.json|spiece\.model|source\.spm|sentencepiece.*"
)


@dataclass(frozen=True, slots=True)
class SideFile:
    """A file to copy: `name` in the output, absolute `path`, size, and whose it is ("checkpoint", "base model")."""

    name: str
    path: str
    nbytes: int
    origin: str


@dataclass(frozen=True, slots=True)
class SidePlan:
    """What will stand beside the weights.

    `files` are copied; `quantization` (settings of quantized weights, such as
    hf_quant_config.json) only beside weights that are quantized, since vLLM believes them.
    """

    files: tuple[SideFile, ...] = ()
    quantization: tuple[SideFile, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all files that are copied."""
        return sum(file.nbytes for file in self.files)

    def for_quantized(self) -> SidePlan:
        """The plan for an output that holds quantized tensors."""
        return SidePlan((*self.files, *self.quantization), (), self.notes)


def list_folder(folder: str) -> dict[str, FileEntry]:
    """The regular files of a folder and of its sub-folders that belong to a model, by name relative to it."""
    found = dict(_scan(folder, ""))
    return {name: found[name] for name in sorted(found, key=natural_key)}


def is_side_file(name: str) -> bool:
    """True for a name (relative to the folder) that belongs beside the weights; quantization settings too."""
    folder, _, last = name.rpartition("/")
    if folder and not _SUBFOLDERS.fullmatch(folder):
        return False
    is_own_config = bool(folder) and last == "config.json"
    return not _WEIGHTS.fullmatch(last) and (is_own_config or not _TRAINER.fullmatch(last))


def plan_side_files(checkpoint: Sequence[Mapping[str, FileEntry]], base: Mapping[str, FileEntry] | None) -> SidePlan:
    """Choose from listed folders: those of the checkpoint in order of priority, then the base model's."""
    chosen: dict[str, SideFile] = {}
    quantization: dict[str, SideFile] = {}
    notes: list[str] = []
    for listing in checkpoint:
        _choose(listing, "checkpoint", chosen, quantization, notes)
    if base is not None:
        has_tokenizer = any(_VOCABULARY.fullmatch(name) for name in chosen)
        offered = {
            name: entry
            for name, entry in base.items()
            if not (has_tokenizer and _TOKENIZER.fullmatch(name)) and not name.lower().startswith("readme")
        }
        before = set(chosen)
        _choose(offered, "base model", chosen, quantization, notes)
        taken = [name for name in chosen if name not in before]
        if checkpoint and before and taken:
            notes.append(f"the checkpoint's folder lacks {', '.join(taken)}: taken from the base model")
    if not any(_VOCABULARY.fullmatch(name) for name in chosen):
        notes.append(lacking("tokenizer", with_base=base is not None))
    return SidePlan(tuple(chosen.values()), tuple(quantization.values()), tuple(notes))


def lacking(what: str, *, with_base: bool) -> str:
    """The remark about a file that a model needs and that is nowhere."""
    where = ", nor in the base model" if with_base else ": --base-model gives the one of the original model"
    return f"there is no {what} beside the checkpoint{where}"


def copy_side_files(plan: SidePlan, into_folder: str) -> tuple[str, ...]:
    """Copy the planned files into a folder in bounded chunks; their names, in order.

    Modes are those the umask asks for. SourceChangedError when a file no longer has the
    size it was planned with.
    """
    for file in plan.files:
        target = Path(into_folder, file.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(file.path, "rb") as source, open(target, "wb") as sink:
            copied = 0
            while chunk := source.read(_CHUNK):
                sink.write(chunk)
                copied += len(chunk)
            sink.flush()
            os.fsync(sink.fileno())
        if copied != file.nbytes:
            msg = f"{file.path} had {file.nbytes} bytes when the run was planned, now {copied}"
            raise SourceChangedError(msg, hint="run again when nothing writes to that folder any more")
    return tuple(file.name for file in plan.files)


def _scan(folder: str, prefix: str) -> Iterator[tuple[str, FileEntry]]:
    with os.scandir(folder) as entries:
        for count, item in enumerate(entries):
            if count >= _MOST_ENTRIES:
                return
            if item.is_dir(follow_symlinks=False):
                if not prefix and _SUBFOLDERS.fullmatch(item.name):
                    yield from _scan(item.path, f"{item.name}/")
                continue
            if item.is_symlink() and not _stays(item.path, folder):
                continue  # a link to a file elsewhere: it may be anything of the user's
            try:
                info = item.stat()
            except OSError:
                continue  # a link that leads nowhere
            if stat.S_ISREG(info.st_mode):
                entry = FileEntry(str(Path(item.path).absolute()), info.st_size, info.st_mtime_ns)
                yield prefix + item.name, entry


def _stays(link: str, folder: str) -> bool:
    """True when a link ends in its own folder, or in the blobs of the Hub cache that the folder is a snapshot of."""
    target, home = os.path.realpath(link), os.path.realpath(folder)
    cache = os.path.dirname(os.path.dirname(home))
    inside = [home, *([os.path.join(cache, "blobs")] if os.path.basename(os.path.dirname(home)) == "snapshots" else [])]
    return any(target.startswith(place.rstrip("/") + "/") for place in inside)


def _choose(
    listing: Mapping[str, FileEntry],
    origin: str,
    chosen: dict[str, SideFile],
    quantization: dict[str, SideFile],
    notes: list[str],
) -> None:
    for name, entry in listing.items():
        if not is_side_file(name):
            continue
        last = name.rpartition("/")[2]
        if entry.nbytes > LARGEST:
            notes.append(f"{entry.path} is left out: {format_bytes(entry.nbytes)} are too much for a side file")
            continue
        target = quantization if last in _QUANTIZATION else chosen
        target.setdefault(name, SideFile(name, entry.path, entry.nbytes, origin))
