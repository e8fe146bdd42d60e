"""What a checkpoint format is: the protocol, and the words detection answers in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from merge_stream.options import OpenOptions
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.ref import Catalog

__all__ = ["CheckpointFormat", "Detection"]


@dataclass(frozen=True, slots=True)
class Detection:
    """A format recognised a folder.

    `evidence` says by what, for people ("4 files model_world_size_4_rank_*.pt").
    `rank` orders formats that recognise the same folder: the highest wins (a trainer's
    shards win over a consolidated copy in the same folder).
    """

    evidence: str
    rank: int = 50


class CheckpointFormat(Protocol):
    """One trainer's on-disk convention.

    Called in this order, once each:

    1. `detect(tree)` looks at names, and at most at a few bytes; None when it is not this format.
       It may raise when the folder is clearly meant but unusable (says what to do).
    2. `open(tree, options)` reads metadata only and returns the whole catalog, or raises
       CheckpointError. It runs no code from the checkpoint and reads no bulk bytes.

    A format may have `own_options`: names of fields of OpenOptions that mean nothing elsewhere
    and that it heeds ("tag", "weights", "exclude_frozen", "no_mtp").
    """

    name: str
    summary: str

    def detect(self, tree: ByteTree) -> Detection | None:
        """Recognise the folder itself (never its parents or children)."""
        ...

    def open(self, tree: ByteTree, options: OpenOptions) -> Catalog:
        """Describe every tensor of the folder."""
        ...
