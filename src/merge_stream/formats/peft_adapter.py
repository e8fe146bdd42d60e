"""A peft adapter's own folder: LoRA factors, and what was trained whole, without the model.

    adapter_model.safetensors
    adapter_config.json

`--lora keep` copies it, `--base-model DIR` folds it into that model. `adapter_model.bin` is an
ordinary state dict (format torch_full).

Facts: peft 0.21 (`save_pretrained`); transformers' Trainer puts these files beside the shards of
a full checkpoint too, so a folder that also holds shards is not this format.
"""

from __future__ import annotations

from merge_stream.containers.safetensors_file import read_header
from merge_stream.formats._catalog import FileTable, clean_names, config_dirs
from merge_stream.formats.base import CheckpointFormat, Detection
from merge_stream.options import OpenOptions
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.ref import Catalog, ShardTable, TensorRef

__all__ = ["MEMBER", "PeftAdapter"]

_FILE = "adapter_model.safetensors"
_SHARDS = (".distcp", ".metadata", "_model_states.pt")


class PeftAdapter:
    """`adapter_model.safetensors` in a folder."""

    name = "peft_adapter"
    summary = "PEFT adapter alone (adapter_model.safetensors, adapter_config.json)"

    def detect(self, tree: ByteTree) -> Detection | None:
        """By file names alone; any full checkpoint in the folder or below wins."""
        if _FILE not in tree.files or any(n.endswith(_SHARDS) or "_rank_" in n for n in tree.files):
            return None
        return Detection(_FILE, rank=5)

    def open(self, tree: ByteTree, options: OpenOptions) -> Catalog:  # noqa: ARG002  (nothing to override here)
        """Every tensor of the adapter under the names in its file."""
        header = read_header(tree, _FILE)
        clean = clean_names(header.tensors, tree.label)
        table = FileTable(tree)
        tensors = {}
        for stored, tensor in header.tensors.items():
            rows = ShardTable.whole(tensor.shape, table.index(_FILE), tensor.offset)
            tensors[clean[stored]] = TensorRef(clean[stored], tensor.dtype, tensor.shape, rows)
        return Catalog(
            format=self.name,
            root=tree.label,
            tensors=tensors,
            files=table.files,
            facts={"files": 1},
            config_dirs=config_dirs(tree),
            metadata_nbytes=header.data_start,
        )


MEMBER: CheckpointFormat = PeftAdapter()
