"""From the folders a user gives to an open checkpoint: detection, and a bounded search below.

The given folder itself is looked at first; only when no format knows it are its folders
searched, three levels deep. Exactly one checkpoint must be found.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from merge_stream.architectures.lora_settings import SETTINGS_FILES
from merge_stream.architectures.user_rules import NAMING, read_rules
from merge_stream.collector import without_collector
from merge_stream.discovery import members_of
from merge_stream.errors import AmbiguousCheckpointError, UnknownFormatError, UsageError
from merge_stream.formats._flat_files import flat_sets, other_sets
from merge_stream.formats._stored_checksums import INTEGRITY_FILE, IntegrityFile
from merge_stream.formats.base import CheckpointFormat, Detection
from merge_stream.options import OpenOptions
from merge_stream.storage.allowance import DEFAULT_LIMIT, MetadataAllowance
from merge_stream.storage.local import LocalTree
from merge_stream.storage.unfinished import refuse_unfinished
from merge_stream.tensors.ref import Catalog
from merge_stream.tensors.stored_checksum import ChecksumReader

__all__ = ["Found", "find_checkpoint", "open_checkpoint"]

_DEPTH = 3
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Found:
    """A recognised folder: `folder` is relative to what was given ("" is that itself)."""

    folder: str
    tree: LocalTree
    format: CheckpointFormat
    detection: Detection


@without_collector
def open_checkpoint(
    paths: Sequence[str | os.PathLike[str]], options: OpenOptions | None = None, *, max_mem: int = DEFAULT_LIMIT
) -> Catalog:
    """Detect the format of `paths` (one folder, or node-local parts of one checkpoint) and read its metadata.

    MemoryLimitTooSmallError when a file's metadata would take the process beyond `max_mem` bytes.
    """
    options = options or OpenOptions()
    for path in paths:
        refuse_unfinished(path)
    given, tree = _tree_of(paths, MetadataAllowance(max_mem))
    found = find_checkpoint(tree, options.format)
    _require_meaning(found, options)
    catalog = found.format.open(found.tree, options)
    notes = catalog.notes
    if found.folder:
        notes = (f"the checkpoint is in {found.folder}/ below the given folder", *notes)
    dirs = dict.fromkeys((*catalog.config_dirs, *_config_dirs(tree)))
    facts = {"detected by": found.detection.evidence, **catalog.facts}
    beside = dict(catalog.beside)
    beside |= {n: t.files[n].path for t in (tree, found.tree) for n in SETTINGS_FILES if n in t.files}
    if options.rules is not None:
        read_rules(options.rules)  # a mistake in it is told before anything else
        beside[NAMING] = os.path.abspath(options.rules)
    return dataclasses.replace(
        catalog,
        beside=beside,
        naming=NAMING if options.rules is not None else catalog.naming,
        checksums=(*catalog.checksums, *_integrity(found.tree)),
        notes=(*given, *notes),
        config_dirs=tuple(dirs),
        facts=facts,
        root=catalog.root or found.tree.label,
    )


def _integrity(tree: LocalTree) -> tuple[ChecksumReader, ...]:
    return (IntegrityFile(tree),) if INTEGRITY_FILE in tree.files else ()


def _require_meaning(found: Found, options: OpenOptions) -> None:
    """UsageError for an option that means nothing for this format."""
    known: frozenset[str] = getattr(found.format, "own_options", frozenset())
    for name in ("tag", "weights", "exclude_frozen", "no_mtp"):
        if getattr(options, name) and name not in known:
            msg = f"--{name.replace('_', '-')} means nothing for a {found.format.name} checkpoint ({found.tree.label})"
            raise UsageError(msg, hint="leave the option out")


def find_checkpoint(tree: LocalTree, format_name: str | None = None) -> Found:
    """The one checkpoint in `tree` or below; errors tell what was seen."""
    formats = _formats(format_name)
    found: list[Found] = []
    level = [""]
    for _ in range(_DEPTH + 1):
        below: list[str] = []
        for folder in level:
            here = tree.subtree(folder)
            best = _best(here, formats)
            if best is not None:
                found.append(Found(folder, here, *best))
            else:
                below += [f"{folder}/{name}" if folder else name for name in here.folders()]
        if found and level == [""]:
            break
        level = below
    if len(found) == 1:
        return found[0]
    if not found:
        raise _unknown(tree, format_name)
    lines = "".join(f"\n  {f.folder}/  {f.format.name}: {f.detection.evidence}" for f in found[:_SHOWN])
    more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    msg = f"{tree.label} holds {len(found)} checkpoints:{lines}{more}"
    latest = shlex.join(["merge-stream", "inspect", _path_of(found[-1])])
    raise AmbiguousCheckpointError(msg, hint=f"pass one of them, for example:\n  {latest}")


def _path_of(found: Found) -> str:
    """The folder as it can be given again; of node-local parts the one that holds the first file."""
    if os.path.isdir(found.tree.label):
        return found.tree.label
    name, entry = next(iter(found.tree.files.items()))
    return entry.path.removesuffix(name).rstrip("/")


def _formats(name: str | None) -> tuple[CheckpointFormat, ...]:
    members: tuple[CheckpointFormat, ...] = members_of("formats")
    if name is None:
        return members
    chosen = tuple(m for m in members if m.name == name)
    if not chosen:
        msg = f"there is no format {name!r}"
        raise UsageError(msg, hint="the formats are " + ", ".join(m.name for m in members))
    return chosen


def _best(tree: LocalTree, formats: Sequence[CheckpointFormat]) -> tuple[CheckpointFormat, Detection] | None:
    hits = [(f, d) for f in formats if (d := f.detect(tree)) is not None]
    if not hits:
        return None
    return max(hits, key=lambda hit: hit[1].rank)


def _tree_of(
    paths: Sequence[str | os.PathLike[str]], allowance: MetadataAllowance
) -> tuple[tuple[str, ...], LocalTree]:
    """(remarks, tree) of what the user gave: folders, or one file of a checkpoint."""
    texts = [os.fspath(p) for p in paths]
    if len(texts) == 1 and os.path.isfile(texts[0]):
        folder, name = os.path.split(os.path.abspath(texts[0]))
        tree = LocalTree.of([folder], allowance)
        alone = tree.only(name)
        if name not in alone.files:
            msg = f"{texts[0]} cannot be read"
            raise UnknownFormatError(msg)
        if _best(alone, _formats(None)) is not None and not _is_part(name):
            return (), alone
        beside = other_sets(tree.files, name)
        own = LocalTree(tree.label, {k: v for k, v in tree.files.items() if k not in beside}, {}, allowance)
        if beside and next(flat_sets(own), None) is not None:
            return (f"{name} is one file of a checkpoint: the files called alike in {folder} were taken",), own
        return (f"{name} is one file of a checkpoint: its folder {folder} was taken",), tree
    return (), LocalTree.of(texts, allowance)


def _is_part(name: str) -> bool:
    words = ("_rank", "-shard", "-of-")
    return name.endswith((".distcp", ".metadata")) or any(word in name for word in words)


def _config_dirs(tree: LocalTree) -> Iterator[str]:
    """Folders of a config.json in the given folder itself or its `huggingface/`."""
    for name in ("huggingface/config.json", "config.json"):
        if name in tree.files:
            yield os.path.dirname(tree.files[name].path)


def _unknown(tree: LocalTree, format_name: str | None) -> UnknownFormatError:
    names = list(tree.files)
    if not names:
        return UnknownFormatError(f"{tree.label} is empty", hint="pass the folder that holds the checkpoint's files")
    top = sorted({n.split("/", 1)[0] + ("/" if "/" in n else "") for n in names})
    seen = ", ".join(top[:_SHOWN]) + (f" and {len(top) - _SHOWN} more" if len(top) > _SHOWN else "")
    what = f"is not a {format_name} checkpoint" if format_name else "is no checkpoint that is known here"
    if any(n == ".metadata" or n.endswith("/.metadata") for n in names):
        msg = f"{tree.label} holds a distributed checkpoint of an optimizer ({seen}), and no model"
        return UnknownFormatError(msg, hint="pass the model's folder, usually beside it (pytorch_model_fsdp_0)")
    if "config.json" in tree.files and not any(n.endswith((".safetensors", ".pt", ".bin", ".distcp")) for n in names):
        parent = os.path.dirname(os.path.abspath(tree.label))
        msg = f"{tree.label} holds config and tokenizer ({seen}), but no weights"
        return UnknownFormatError(msg, hint=f"the shards are usually one folder above: {parent}")
    formats = _formats(format_name)
    width = max(len(m.name) for m in formats)
    lines = "".join(f"\n  {m.name:<{width}}  {m.summary}" for m in formats)
    which = "this" if format_name else "one of these"
    hint = f"a checkpoint's folder looks like {which}:{lines}"
    return UnknownFormatError(f"{tree.label} {what}: it holds {seen}", hint=hint)
