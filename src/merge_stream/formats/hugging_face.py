"""Plain Hugging Face safetensors as a source: to re-shard, cast or verify a model.

    model.safetensors, or model-00001-of-00003.safetensors ... [+ model.safetensors.index.json]

Names, variants, index and what is refused: see `_hub_files`. Every tensor is one contiguous run of
one file, so headers and index are all that is read.
"""

from __future__ import annotations

from merge_stream.containers.safetensors_file import read_header
from merge_stream.errors import UnknownFormatError
from merge_stream.formats._catalog import FileTable, clean_names, config_dirs, listed
from merge_stream.formats._hub_files import check_index, chosen_set, homes, hub_sets, weight_files
from merge_stream.formats.base import CheckpointFormat, Detection
from merge_stream.options import OpenOptions
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.ref import Catalog, ShardTable, TensorRef
from merge_stream.units import counted

__all__ = ["MEMBER", "HuggingFace"]


_ADAPTERS = frozenset({"adapter_model.safetensors", "lora_adapter/adapter_model.safetensors"})


class HuggingFace:
    """`model*.safetensors` in a folder."""

    name = "hugging_face"
    summary = "Hugging Face safetensors (model*.safetensors, with or without index)"

    def detect(self, tree: ByteTree) -> Detection | None:
        """By file names alone; weights must be there, or an index that asks for them."""
        sets = hub_sets(tree, "model", "safetensors")
        if not sets:
            return None
        count = sum(len(group) for entry in sets.values() for group in entry.groups())
        indexes = [entry.index for entry in sets.values() if entry.index]
        return Detection(
            f"{counted(count, 'file')} model*.safetensors" + "".join(f", {name}" for name in indexes), rank=20
        )

    def open(self, tree: ByteTree, options: OpenOptions) -> Catalog:  # noqa: ARG002  (nothing to override here)
        """Every tensor of the model, after index and headers were compared."""
        sets = hub_sets(tree, "model", "safetensors")
        if not sets:
            raise UnknownFormatError(f"{tree.label} holds no model*.safetensors", hint="pass the model's own folder")
        variant, chosen = chosen_set(tree, sets)
        names = weight_files(tree, chosen)
        headers = {name: read_header(tree, name) for name in names}
        home = homes(tree, {name: header.tensors for name, header in headers.items()})
        if chosen.index:
            check_index(tree, chosen.index, home)
        clean = clean_names(home, tree.label)
        table = FileTable(tree)
        tensors = {}
        for stored, name in home.items():
            tensor = headers[name].tensors[stored]
            rows = ShardTable.whole(tensor.shape, table.index(name), tensor.offset)
            tensors[clean[stored]] = TensorRef(clean[stored], tensor.dtype, tensor.shape, rows)
        others = sorted(v or "without variant" for v in sets if v != variant)
        return Catalog(
            format=self.name,
            root=tree.label,
            tensors=tensors,
            files=table.files,
            facts={"files": len(names), "index": chosen.index or "none", "variant": variant or "none"},
            notes=(
                *((f"other variants in the folder were left out: {listed(others)}",) if others else ()),
                *_adapters_beside(tree),
            ),
            config_dirs=config_dirs(tree),
            metadata_nbytes=sum(header.data_start for header in headers.values()),
        )


def _adapters_beside(tree: ByteTree) -> tuple[str, ...]:
    """A remark on an adapter beside the model, such as `--lora keep` writes: only the model itself is the source."""
    found = sorted(name for name in tree.files if name in _ADAPTERS)
    return tuple(
        f"the adapter {name} is not taken: its folder as CKPT, with --base-model and this folder, folds it"
        for name in found
    )


MEMBER: CheckpointFormat = HuggingFace()
