"""What `inspect` tells: a checkpoint described from its metadata."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from merge_stream.tensors.ref import Catalog
from merge_stream.units import counted, format_bytes

__all__ = ["Description", "describe"]


_NO_CONFIG = "none beside it: a merge needs --base-model DIR or --no-config"


@dataclass(slots=True)
class Description:
    """A checkpoint in numbers; `tensors` maps names to [type, shape, shards] when asked for."""

    format: str
    root: str
    facts: Mapping[str, str | int]
    tensor_count: int
    nbytes: int
    parameters: int
    dtypes: Mapping[str, int]
    files: int
    shards: int
    replicas: int
    ignored: Mapping[str, int]
    notes: Sequence[str]
    config_dirs: Sequence[str]
    tensors: Mapping[str, tuple[str, Sequence[int], int]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {"ok": True, **asdict(self)}

    def lines(self) -> list[str]:
        """For a person."""
        types = ", ".join(f"{count} {name}" for name, count in self.dtypes.items()) or "none"
        text = [
            f"{self.root}",
            f"  format      {self.format}",
            *(f"  {key:<11} {value}" for key, value in self.facts.items()),
            f"  tensors     {self.tensor_count} ({types}), {self.parameters:,} elements, {format_bytes(self.nbytes)}",
            f"  stored in   {counted(self.files, 'file')}, {counted(self.shards, 'shard')}"
            + (f", {counted(self.replicas, 'further copy', 'further copies')}" if self.replicas else ""),
        ]
        if self.ignored:
            text.append("  ignored     " + ", ".join(f"{count} {kind}" for kind, count in self.ignored.items()))
        text.append(
            "  config      "
            + (", ".join(self.config_dirs) or ("the base model's" if "base model" in self.facts else _NO_CONFIG))
        )
        text += [f"  note: {note}" for note in self.notes]
        text += [
            f"    {name}  {dtype} {list(shape)}  {counted(shards, 'shard')}"
            for name, (dtype, shape, shards) in self.tensors.items()
        ]
        return text


def base_facts(catalog: Catalog, base_model: str, *, max_mem: int) -> tuple[dict[str, str | int], tuple[str, ...]]:
    """(facts, remarks) about `--base-model`, a folder or a name on the Hub, resolved as a merge does; headers only.

    CheckpointError or HubError when it is none; CheckpointError when an adapter alone does not belong to it.
    """
    from merge_stream.architectures.lora import is_adapter_alone
    from merge_stream.base_weights import fits_base
    from merge_stream.output.model_info import find_model_folder
    from merge_stream.storage.allowance import MetadataAllowance

    folder = find_model_folder(catalog.config_dirs, base_model, write_config=True, allowance=MetadataAllowance(max_mem))
    tensors = folder.info.base_tensors
    held = counted(len(tensors), "tensor") if tensors else "no weights"
    facts: dict[str, str | int] = {"base model": f"{folder.base_id or folder.base_folder}: {held}"}
    if tensors and is_adapter_alone(catalog):
        count = fits_base(catalog, base_model, folder.info)
        facts["adapter"] = f"fits {counted(count, 'module')} of the base model"
    return facts, folder.notes


def describe(
    catalog: Catalog, *, every_tensor: bool, base_model: str | None = None, max_mem: int = 8_000_000_000
) -> Description:
    """Count what a catalog holds; with `base_model` tell of that too."""
    told, remarks = base_facts(catalog, base_model, max_mem=max_mem) if base_model is not None else ({}, ())
    tensors = catalog.tensors.values()
    return Description(
        format=catalog.format,
        root=catalog.root,
        facts={**catalog.facts, **_lora_facts(catalog), **told},
        tensor_count=len(catalog.tensors),
        nbytes=catalog.nbytes,
        parameters=sum(t.size for t in tensors),
        dtypes=dict(Counter(t.dtype.name for t in tensors)),
        files=len(catalog.files),
        shards=sum(len(t.shards) for t in tensors),
        replicas=sum(len(t.replicas) for t in tensors if t.replicas is not None),
        ignored=dict(catalog.ignored),
        notes=(*catalog.notes, *remarks),
        config_dirs=catalog.config_dirs,
        tensors={t.name: (t.dtype.name, t.shape, len(t.shards)) for t in tensors} if every_tensor else {},
    )


def _lora_facts(catalog: Catalog) -> dict[str, str | int]:
    if catalog.staged is not None:
        return {"LoRA": catalog.staged.lora} if catalog.staged.lora else {}
    count = sum(".lora_" in name for name in catalog.tensors)
    return {"LoRA": f"{counted(count, 'tensor')} of adapters; a merge folds them (--lora)"} if count else {}
