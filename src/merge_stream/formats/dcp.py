"""PyTorch distributed checkpoints (DCP): `.metadata` + `*.distcp`.

    .metadata                          which tensor has which chunks, and where each chunk lies
    __0.metadata, __1.metadata ...     the same, one for each rank (`use_collectives=False`): united here
    __R_i.distcp                       chunks one after another; each is a whole torch.save file

One format for plain `dcp.save`, accelerate's `pytorch_model_fsdp_0/`, torchtitan's `step-N/` and VeOmni:
they differ in the container (see `_roots`) and in what stands beside the model. Optimizer state,
schedulers, random states and Python values are counted by name and never read.

Of each chunk the head is read (its pickle and the place of its data); equal heads of chunks of equal
length say the same and are looked up. A name in the metadata only selects a file of the folder.

Facts (torch 2.3 to 2.13; fsdp_formats.md 5.4): a replicated tensor is written once, spread over
ranks; an empty local shard is a chunk of size zero whose offset is the tensor's size; `length` and
`offset` of a chunk are exact; `transform_descriptors` is there only with extensions (zstd). A folder
of Megatron's `torch_dist` looks the same and names its parameters otherwise.
"""

from __future__ import annotations

import re
from collections import Counter

from merge_stream.errors import (
    IncompleteShardsError,
    UnknownFormatError,
    UnsupportedError,
)
from merge_stream.formats._catalog import FileTable, clean_names, config_dirs, listed
from merge_stream.formats._dcp_metadata import DcpMetadata, metadata_files, rank_metadata_files, read_metadata
from merge_stream.formats._dcp_tensors import ModelChunks
from merge_stream.formats._names import noise_kind
from merge_stream.formats._roots import naming_of, refuse_flat_parameters, select_model
from merge_stream.formats.base import CheckpointFormat, Detection
from merge_stream.options import OpenOptions
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.ref import Catalog
from merge_stream.units import counted

__all__ = ["MEMBER", "Dcp"]

_DETECT_LIMIT = 4_000_000  # metadata above it is not read to detect a folder
_OPTIMIZER_FOLDER = re.compile(r"(optimizer|optim)(_\d+)?")
_MEGATRON = re.compile(r"(self_attention\.linear_qkv|mlp\.linear_fc1|embedding\.word_embeddings)\b")

_NODES = "With node-local disks give every node's folder: --input A --input B; else copy the file again"


class Dcp:
    """A folder with `.metadata` (or `__R.metadata`) and `*.distcp`."""

    name = "dcp"
    summary = "PyTorch distributed checkpoint (.metadata + *.distcp): FSDP, accelerate, torchtitan, VeOmni"

    def detect(self, tree: ByteTree) -> Detection | None:
        """By file names; small metadata is read to leave out folders without any model tensor."""
        files = metadata_files(tree)
        count = _shard_count(tree)
        if not files:
            return Detection(f"{counted(count, 'file')} *.distcp without .metadata", rank=60) if count else None
        if not count and tree.read(files[0], 0, min(1, tree.files[files[0]].nbytes)) != b"\x80":
            return None  # a file of another program (Flutter keeps a text `.metadata`)
        evidence = f"{listed(files, most=2)} and {counted(count, 'file')} *.distcp"
        if _is_megatron_folder(tree):
            return Detection(f"{evidence}, of Megatron", rank=10)
        if sum(tree.files[name].nbytes for name in files) > _DETECT_LIMIT:
            folder = tree.label.rstrip("/").rpartition("/")[2]
            return None if _OPTIMIZER_FOLDER.fullmatch(folder) else Detection(evidence, rank=60)
        meta = read_metadata(tree)
        model = any(noise_kind(".".join(meta.path(name))) is None for name in meta.tensors)
        return Detection(evidence, rank=60) if model else None

    def open(self, tree: ByteTree, options: OpenOptions) -> Catalog:
        """Every model tensor with the place of each chunk."""
        if not metadata_files(tree):
            raise IncompleteShardsError(
                f"{tree.label} holds {_shard_count(tree)} files *.distcp but not their .metadata",
                hint=f".metadata is written last, by rank 0: it is on the first node. {_NODES}",
            )
        if _is_megatron_folder(tree):
            _refuse_megatron(tree, "common.pt or sharded_backend in metadata.json")
        meta = read_metadata(tree)
        selection = select_model({name: meta.path(name) for name in meta.tensors}, options.root, tree.label)
        if not selection.names:
            raise UnknownFormatError(
                f"{tree.label} is a DCP folder without model tensors: {dict(selection.ignored)}",
                hint="it holds the optimizer's state; pass the folder of the model",
            )
        refuse_flat_parameters(selection.names.values(), tree.label)
        for name in selection.names.values():
            if _MEGATRON.search(name):
                _refuse_megatron(tree, repr(name))
        clean = clean_names(selection.names.values(), tree.label)
        table = FileTable(tree)
        chunks = ModelChunks(tree, meta, selection.names, table)
        tensors = {}
        for key, name in selection.names.items():
            tensors[clean[name]] = chunks.tensor(key, clean[name])
        return Catalog(
            format=self.name,
            root=tree.label,
            tensors=tensors,
            files=table.files,
            facts={
                "metadata": (
                    f"{counted(len(metadata_files(tree)), 'file')}, version {meta.version or 'none (torch before 2.9)'}"
                ),
                "container": selection.root or "none",
                "chunks": chunks.count,
            },
            ignored=selection.ignored + _values(meta),
            notes=(*_left_out(tree), *selection.notes),
            naming=naming_of(tensors.keys()),
            config_dirs=config_dirs(tree),
            metadata_nbytes=meta.nbytes + chunks.read_nbytes,
            checksums=(chunks.checksums,),
        )


def _left_out(tree: ByteTree) -> tuple[str, ...]:
    """A remark when ranks wrote metadata too, in an earlier save."""
    ranks = rank_metadata_files(tree)
    if not ranks or ranks == metadata_files(tree):
        return ()
    return (f".metadata was used; {listed(ranks, most=3)} are of another save and were left out",)


def _values(meta: DcpMetadata) -> Counter[str]:
    """Python values beside the tensors by kind."""
    return Counter(noise_kind(".".join(meta.path(name))) or "Python value" for name in meta.values)


def _shard_count(tree: ByteTree) -> int:
    return sum(name.endswith(".distcp") and "/" not in name for name in tree.files)


def _is_megatron_folder(tree: ByteTree) -> bool:
    return "common.pt" in tree.files or (
        "metadata.json" in tree.files
        and tree.files["metadata.json"].nbytes < 1 << 20
        and b"sharded_backend" in tree.read("metadata.json")
    )


def _refuse_megatron(tree: ByteTree, sign: str) -> None:
    raise UnsupportedError(
        f"{tree.label} is a Megatron distributed checkpoint ({sign}), not a plain DCP folder",
        hint="leave --format out, or give --format megatron",
    )


MEMBER: CheckpointFormat = Dcp()
