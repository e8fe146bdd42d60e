"""Plain Hugging Face safetensors as a source: to re-shard, cast or verify a model.

    model.safetensors                                    one file
    model-00001-of-00003.safetensors ...                 one complete set, with
    model.safetensors.index.json                         {"weight_map": {tensor: file}}
    model.VARIANT.safetensors, model.VARIANT-0000X-of-0000N.safetensors, model.safetensors.index.VARIANT.json

Index and files must agree both ways. Weights of another set in the same folder (a file that the
index does not name, another count) are refused: they are the rest of an older save, and only the
user knows which one is meant. Without an index the numbers in the names must be complete.

Facts: transformers 4.57 and 5.24 (file names, variants); torch 2.13 `dcp` consolidation writes
`model-00001-of-00001.safetensors` with an index. An index may name files of any name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from merge_stream.containers.json_file import read_json
from merge_stream.containers.safetensors_file import SafetensorsFile, read_header
from merge_stream.errors import (
    AmbiguousCheckpointError,
    CorruptCheckpointError,
    IncompleteShardsError,
    UnknownFormatError,
)
from merge_stream.formats._catalog import FileTable, clean_names, config_dirs, listed
from merge_stream.formats.base import CheckpointFormat, Detection
from merge_stream.options import OpenOptions
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.box import Box
from merge_stream.tensors.ref import Catalog, ShardTable, TensorRef

__all__ = ["MEMBER", "HuggingFace"]

_INDEX_LIMIT = 1 << 28
_WEIGHTS = re.compile(r"model(?:\.(?P<variant>[^./]+?))?(?:-(?P<number>\d{5})-of-(?P<count>\d{5}))?\.safetensors")
_INDEX = re.compile(r"model\.safetensors\.index(?:\.(?P<variant>[^./]+))?\.json")


@dataclass(slots=True)
class _Set:
    """The files of one variant: `numbered` by their count, `single` the unnumbered one."""

    index: str | None = None
    single: str | None = None
    numbered: dict[int, dict[int, str]] = field(default_factory=dict)

    def groups(self) -> Iterator[list[str]]:
        if self.single:
            yield [self.single]
        for files in self.numbered.values():
            yield [files[number] for number in sorted(files)]


class HuggingFace:
    """`model*.safetensors` in a folder."""

    name = "hugging_face"
    summary = "Hugging Face safetensors (model*.safetensors, with or without index)"

    def detect(self, tree: ByteTree) -> Detection | None:
        """By file names alone; weights must be there, or an index that asks for them."""
        sets = _sets(tree)
        if not sets:
            return None
        count = sum(len(group) for entry in sets.values() for group in entry.groups())
        indexes = [entry.index for entry in sets.values() if entry.index]
        return Detection(f"{count} files model*.safetensors" + "".join(f", {name}" for name in indexes), rank=20)

    def open(self, tree: ByteTree, options: OpenOptions) -> Catalog:  # noqa: ARG002  (nothing to override here)
        """Every tensor of the model, after index and headers were compared."""
        sets = _sets(tree)
        if not sets:
            raise UnknownFormatError(f"{tree.label} holds no model*.safetensors", hint="pass the model's own folder")
        variant, chosen = _chosen(sets, tree)
        weight_map = _weight_map(tree, chosen.index) if chosen.index else None
        names = _files_of(tree, chosen, weight_map)
        headers = {name: read_header(tree, name) for name in names}
        home = _home_of_tensors(tree, headers)
        if weight_map is not None and chosen.index is not None:
            _check_index(tree, chosen.index, weight_map, home)
        clean = clean_names(home, tree.label)
        table = FileTable(tree)
        tensors = {}
        for stored, name in home.items():
            tensor = headers[name].tensors[stored]
            rows = ShardTable.of([(Box.whole(tensor.shape), table.index(name), tensor.offset)], len(tensor.shape))
            tensors[clean[stored]] = TensorRef(clean[stored], tensor.dtype, tensor.shape, rows)
        others = sorted(v or "without variant" for v in sets if v != variant)
        return Catalog(
            format=self.name,
            root=tree.label,
            tensors=tensors,
            files=table.files,
            facts={"files": len(names), "index": chosen.index or "none", "variant": variant or "none"},
            notes=(f"other variants in the folder were left out: {listed(others)}",) if others else (),
            config_dirs=config_dirs(tree),
            metadata_nbytes=sum(header.data_start for header in headers.values()),
        )


def _sets(tree: ByteTree) -> dict[str, _Set]:
    """Files of the folder itself by variant ("" is the plain model)."""
    sets: dict[str, _Set] = {}
    for name in tree.files:
        if match := _WEIGHTS.fullmatch(name):
            entry = sets.setdefault(match["variant"] or "", _Set())
            if match["number"]:
                entry.numbered.setdefault(int(match["count"]), {})[int(match["number"])] = name
            else:
                entry.single = name
        elif match := _INDEX.fullmatch(name):
            sets.setdefault(match["variant"] or "", _Set()).index = name
    return sets


def _chosen(sets: Mapping[str, _Set], tree: ByteTree) -> tuple[str, _Set]:
    if "" in sets or len(sets) == 1:
        variant = "" if "" in sets else next(iter(sets))
        return variant, sets[variant]
    raise AmbiguousCheckpointError(
        f"{tree.label} holds several variants of a model: {listed(sorted(sets))}",
        hint="keep the files of one variant in a folder of their own and pass that",
    )


def _weight_map(tree: ByteTree, index: str) -> dict[str, str]:
    where = f"{tree.label}/{index}"
    found = read_json(tree, index, _INDEX_LIMIT).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise CorruptCheckpointError(f"{where} has no weight_map of tensor names to file names")
    return found


def _files_of(tree: ByteTree, chosen: _Set, weight_map: Mapping[str, str] | None) -> Sequence[str]:
    """The files to read: those the index names, or one complete set; refuses a second set."""
    groups = list(chosen.groups())
    if weight_map is None:
        if len(groups) > 1:
            _refuse_two(tree, listed(groups[0]), listed(groups[1]))
        names = groups[0]
        count = next(iter(chosen.numbered), 1)
        if not chosen.single and sorted(chosen.numbered[count]) != list(range(1, count + 1)):
            prefix = names[0].rpartition("-of-")[0][:-5]
            missing = [n for n in range(1, count + 1) if n not in chosen.numbered[count]]
            raise IncompleteShardsError(
                f"{tree.label} lacks {len(missing)} of {count} files: "
                + listed(f"{prefix}{n:05d}-of-{count:05d}.safetensors" for n in missing),
                hint="copy the missing files into the folder, or pass their folder as a further --input",
            )
        return names
    wanted = list(dict.fromkeys(weight_map.values()))
    missing_files = [name for name in wanted if name not in tree.files]
    if missing_files:
        raise IncompleteShardsError(
            f"{tree.label} lacks {len(missing_files)} of {len(wanted)} files that {chosen.index} names: "
            + listed(missing_files),
            hint="copy the missing files into the folder, or pass their folder as a further --input",
        )
    stale = [name for group in groups for name in group if name not in set(wanted)]
    if stale:
        _refuse_two(tree, f"{chosen.index} ({listed(wanted)})", listed(stale))
    return wanted


def _refuse_two(tree: ByteTree, first: str, second: str) -> None:
    raise AmbiguousCheckpointError(
        f"{tree.label} holds two sets of weights: {first}; and {second}",
        hint="one is the rest of an older save: move it out of the folder",
    )


def _home_of_tensors(tree: ByteTree, headers: Mapping[str, SafetensorsFile]) -> dict[str, str]:
    home: dict[str, str] = {}
    for file, header in headers.items():
        for name in header.tensors:
            if home.setdefault(name, file) != file:
                raise CorruptCheckpointError(
                    f"{tree.label}: tensor {name!r} stands in two files, {home[name]} and {file}",
                    hint="the files are of two different saves",
                )
    return home


def _check_index(tree: ByteTree, index: str, weight_map: Mapping[str, str], home: Mapping[str, str]) -> None:
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


MEMBER: CheckpointFormat = HuggingFace()
