"""Bands: where a parameter may be cut.

A store is written chunk by chunk, and a chunk that is read can only be checked as a whole. So
tiles of such a parameter are made of whole bands: runs of neighbouring elements in row-major
order, at most `band` of them, none of which reaches over the end of a run of `run` elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Bands"]


@dataclass(frozen=True, slots=True)
class Bands:
    """Every run of `run` elements is cut in pieces of `band`, the last one shorter.

    `stride` is the room in bytes that each band takes in the output file, its own bytes, padding
    and checksum; 0: bands follow one another without a gap, and a tile may hold several.
    """

    band: int
    run: int
    stride: int = 0

    def fits(self, elements: int) -> bool:
        """True when a tile of that many elements holds a band."""
        return min(self.band, self.run) <= elements

    def cuts(self, size: int, most: int) -> Iterator[tuple[int, int]]:
        """[start, stop) of each tile of `size` elements: one band each, or as many as `most` elements hold."""
        step = self.band if self.stride else max(most // self.band, 1) * self.band
        for run in range(0, size, self.run):
            end = min(run + self.run, size)
            for start in range(run, end, step):
                yield start, min(start + step, end)
