"""What a staging store tells beside its tensors: enough to finish a model without the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["ChunkSums", "StagedFacts"]


@dataclass(frozen=True, slots=True)
class ChunkSums:
    """Where the checksums of a file of tensor `name` stand: chunk k is `chunk_nbytes` bytes at `start + k * stride`.

    Its CRC-32C, 4 bytes, little endian, stands right behind it; `grid` counts the chunks in each dim.
    """

    name: str
    start: int
    stride: int
    chunk_nbytes: int
    grid: tuple[int, ...]

    def place(self, number: int) -> list[int]:
        """Index of chunk `number` in the grid, for messages."""
        place = []
        for extent in reversed(self.grid):
            number, k = divmod(number, extent)
            place.append(k)
        return place[::-1]


@dataclass(frozen=True, slots=True)
class StagedFacts:
    """Facts of the checkpoint and decisions that were made when it was staged.

    format, facts, step   of the checkpoint, for the model card
    architecture, layout  how its tensors were named
    keep_wide             tensors that a cast to 16 bits leaves in their type
    materialized          the head is written although it is tied (`--materialize-tied`)
    origins               whose each side file was
    base_id, lora         for the model card
    partial               what was left out on purpose (`Catalog.partial`)
    module_dtype          `Catalog.module_dtype` of the checkpoint
    adapter_config        adapter_config.json of the adapter that is kept beside the model, or ""
    fingerprint           of the plan that was staged; known once the store is sealed
    """

    format: str
    facts: Mapping[str, str | int]
    step: int | None
    architecture: str
    layout: str
    keep_wide: tuple[str, ...]
    materialized: bool
    has_config: bool
    origins: Mapping[str, str] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    base_id: str = ""
    lora: str = ""
    partial: str = ""
    module_dtype: Literal["", "config"] = ""
    adapter_config: str = ""
    fingerprint: str = ""
