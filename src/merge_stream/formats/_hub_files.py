"""The files of a model in the Hub's naming: one file, or a numbered set with or without index.

    STEM.EXT                                             one file
    STEM-00001-of-00003.EXT ...                          one complete set, with
    STEM.EXT.index.json                                  {"weight_map": {tensor: file}}
    STEM.VARIANT.EXT, STEM.VARIANT-0000X-of-0000N.EXT, STEM.EXT.index.VARIANT.json

Index and files must agree both ways. Weights of another set in the same folder (a file that the
index does not name, another count) are refused: they are the rest of an older save, and only the
user knows which one is meant. Without an index the numbers in the names must be complete.

Facts: transformers 4.57 and 5.24 (STEM.EXT is `model.safetensors` or `pytorch_model.bin`); torch 2.13
consolidation writes `model-00001-of-00001.safetensors` with an index. An index may name files of any name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from merge_stream.containers.json_file import read_json
from merge_stream.errors import AmbiguousCheckpointError, CorruptCheckpointError, IncompleteShardsError
from merge_stream.formats._catalog import listed
from merge_stream.storage.base import ByteTree

__all__ = ["HubSet", "check_index", "chosen_set", "homes", "hub_sets", "weight_files"]

_NUMBERED = re.compile(r"(.*-)?\d{5}")  # ColossalAI's `pytorch_model.NAME-00001.bin`: only its index tells the set
_INDEX_LIMIT = 1 << 28
_COPY = "copy the missing files into the folder, or pass their folder as a further --input"


@dataclass(slots=True)
class HubSet:
    """The files of one variant: `numbered` by their count, `single` the unnumbered one."""

    index: str | None = None
    single: str | None = None
    numbered: dict[int, dict[int, str]] = field(default_factory=dict)

    def groups(self) -> Iterator[list[str]]:
        """Each set of files that could be the whole model."""
        if self.single:
            yield [self.single]
        for files in self.numbered.values():
            yield [files[number] for number in sorted(files)]


def hub_sets(tree: ByteTree, stem: str, ext: str) -> dict[str, HubSet]:
    """Files of the folder itself by variant ("" is the plain model)."""
    variant = r"(?:\.(?P<variant>[^./]+?))?"
    weights = re.compile(rf"{stem}{variant}(?:-(?P<number>\d{{5}})-of-(?P<count>\d{{5}}))?\.{ext}")
    listing = re.compile(rf"{stem}\.{ext}\.index{variant}\.json")
    sets: dict[str, HubSet] = {}
    for name in tree.files:
        if match := weights.fullmatch(name):
            if _NUMBERED.fullmatch(match["variant"] or ""):
                continue
            entry = sets.setdefault(match["variant"] or "", HubSet())
            if match["number"]:
                entry.numbered.setdefault(int(match["count"]), {})[int(match["number"])] = name
            else:
                entry.single = name
        elif match := listing.fullmatch(name):
            sets.setdefault(match["variant"] or "", HubSet()).index = name
    return sets


def chosen_set(tree: ByteTree, sets: Mapping[str, HubSet]) -> tuple[str, HubSet]:
    """The plain model, else the only variant."""
    if "" in sets or len(sets) == 1:
        variant = "" if "" in sets else next(iter(sets))
        return variant, sets[variant]
    raise AmbiguousCheckpointError(
        f"{tree.label} holds several variants of a model: {listed(sorted(sets))}",
        hint="keep the files of one variant in a folder of their own and pass that",
    )


def weight_files(tree: ByteTree, chosen: HubSet) -> Sequence[str]:
    """The files to read: those the index names, or one complete set; refuses a second set."""
    groups = list(chosen.groups())
    if chosen.index is None:
        if len(groups) > 1:
            _refuse_two(tree, listed(groups[0]), listed(groups[1]))
        if not chosen.single:
            _check_numbers(tree, next(iter(chosen.numbered)), groups[0])
        return groups[0]
    wanted = list(dict.fromkeys(_weight_map(tree, chosen.index).values()))
    if outside := [name for name in wanted if name.startswith("/") or ".." in name.split("/")]:
        raise CorruptCheckpointError(
            f"{tree.label}/{chosen.index} points out of the folder, to {listed(map(ascii, outside))}",
            hint="an index names files of its own folder: this one was damaged, or made to mislead",
        )
    if missing := [name for name in wanted if name not in tree.files]:
        raise IncompleteShardsError(
            f"{tree.label} lacks {len(missing)} of {len(wanted)} files that {chosen.index} names: {listed(missing)}",
            hint=_COPY,
        )
    if stale := [name for group in groups for name in group if name not in set(wanted)]:
        _refuse_two(tree, f"{chosen.index} ({listed(wanted)})", listed(stale))
    return wanted


def homes(tree: ByteTree, contents: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Tensor -> its file, from {file: tensors in it}; a tensor in two files is refused."""
    home: dict[str, str] = {}
    for file, names in contents.items():
        for name in names:
            if home.setdefault(name, file) != file:
                raise CorruptCheckpointError(
                    f"{tree.label}: tensor {name!r} stands in two files, {home[name]} and {file}",
                    hint="the files are of two different saves",
                )
    return home


def check_index(tree: ByteTree, index: str, home: Mapping[str, str]) -> None:
    """The index names exactly the tensors that the files hold, in the files that hold them."""
    weight_map = _weight_map(tree, index)
    where = f"{tree.label}/{index}"
    hint = "index and weights are of two different saves; write the index anew or remove it"
    if gone := [name for name in weight_map if name not in home]:
        files = listed(dict.fromkeys(weight_map[name] for name in gone))
        raise IncompleteShardsError(f"{where} names tensors that {files} do not hold: {listed(gone)}", hint=hint)
    if extra := [name for name in home if name not in weight_map]:
        files = listed(dict.fromkeys(home[name] for name in extra))
        raise CorruptCheckpointError(f"{where} lacks tensors that stand in {files}: {listed(extra)}", hint=hint)
    for name, file in weight_map.items():
        if home[name] != file:
            raise CorruptCheckpointError(f"{where} says {name!r} is in {file}, it is in {home[name]}", hint=hint)


def _weight_map(tree: ByteTree, index: str) -> dict[str, str]:
    where = f"{tree.label}/{index}"
    found = read_json(tree, index, _INDEX_LIMIT).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise CorruptCheckpointError(f"{where} has no weight_map of tensor names to file names")
    return found


def _check_numbers(tree: ByteTree, count: int, names: Sequence[str]) -> None:
    numbers = [int(name.rpartition("-of-")[0][-5:]) for name in names]
    stem, ext = names[0].rpartition("-of-")[0][:-5], names[0].rpartition(".")[2]
    if missing := [f"{stem}{n:05d}-of-{count:05d}.{ext}" for n in range(1, count + 1) if n not in numbers]:
        raise IncompleteShardsError(
            f"{tree.label} lacks {len(missing)} of {count} files: {listed(missing)}", hint=_COPY
        )
    if len(numbers) > count:
        raise CorruptCheckpointError(f"{tree.label} holds {len(numbers)} files of a set of {count}: {listed(names)}")


def _refuse_two(tree: ByteTree, first: str, second: str) -> NoReturn:
    raise AmbiguousCheckpointError(
        f"{tree.label} holds two sets of weights: {first}; and {second}",
        hint="one is the rest of an older save: move it out of the folder",
    )
