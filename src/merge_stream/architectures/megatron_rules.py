"""Rules for Megatron's other fused tensors: gate and up, stacks of experts, delta nets; copies and exchanged halves.

They speak of the canonical names (`formats/_megatron_names`) and yield takes only; sizes come from the config and are
compared with the shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from merge_stream.architectures.megatron_qkv import OTHER_MODEL
from merge_stream.architectures.rules import filled, matching
from merge_stream.errors import CheckpointError
from merge_stream.tensors.box import Box
from merge_stream.tensors.parameter import Parameter, Take, identity

__all__ = ["Copies", "DeltaNet", "ExpertHalves", "Halves", "InterleavedExperts", "SwappedColumns"]

Ints = tuple[int, ...]
Shapes = Mapping[str, Ints]


@dataclass(frozen=True, slots=True)
class SwappedColumns:
    """[rows, 2n] whose two halves stand the other way round in the repository."""

    pattern: str
    to: str

    def apply(self, shapes: Shapes) -> Iterator[tuple[tuple[str, ...], tuple[Parameter, ...]]]:
        """The second half before the first."""
        for name, shape, match in matching(self.pattern, shapes):
            if len(shape) != 2 or shape[1] % 2:
                raise CheckpointError(f"{name} {list(shape)} has no two halves", hint="files of two saves are mixed")
            rows, half = shape[0], shape[1] // 2
            left, right = Box((0, 0), (rows, half)), Box((0, half), (rows, 2 * half))
            takes = (Take(name, left, right), Take(name, right, left))
            yield (name,), (Parameter(filled(self.to, match.groupdict()), shape, shape, takes),)


@dataclass(frozen=True, slots=True)
class InterleavedExperts:
    """[E, 2F, h] (or biases [E, 2F]) of gates, then ups -> [E, h, 2F] (or [E, 2F]) of a gate, an up, a gate ..."""

    pattern: str
    to: str

    def apply(self, shapes: Shapes) -> Iterator[tuple[tuple[str, ...], tuple[Parameter, ...]]]:
        """The hidden size comes first, too."""
        for name, shape, match in matching(self.pattern, shapes):
            if len(shape) < 2 or shape[1] % 2:
                raise CheckpointError(f"{name} {list(shape)} is no stack of two halves", hint="files are mixed")
            experts, half, rest = shape[0], shape[1] // 2, shape[2:]
            none = (0,) * len(rest)
            takes = []
            for part in (0, 1):
                box = Box((0, 0, part * half, *none), (experts, 1, (part + 1) * half, *rest))
                place = Box((0, *none, 0, part), (experts, *rest, half, part + 1))
                permute = (0, *range(3, 3 + len(rest)), 2, 1)
                takes.append(Take(name, box, place, split=(experts, 1), permute=permute))
            to = filled(self.to, match.groupdict())
            yield (name,), (Parameter(to, (experts, *rest, 2 * half), (experts, *rest, half, 2), tuple(takes)),)


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """in_proj of a gated delta net: rows of queries, keys, values, gates z, then beta and alpha, head after head each.

    in_proj_qkvz   for each key head its query, its key, its values, its z
    in_proj_ba     for each key head its beta, its alpha
    """

    pattern: str
    qkvz: str
    ba: str
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int

    def apply(self, shapes: Shapes) -> Iterator[tuple[tuple[str, ...], tuple[Parameter, ...]]]:
        """Two parameters."""
        share = self.value_heads // self.key_heads
        wide = (self.key_width, self.key_width, share * self.value_width, share * self.value_width)
        for name, shape, match in matching(self.pattern, shapes):
            needed = self.key_heads * (sum(wide) + 2 * share)
            if len(shape) != 2 or shape[0] != needed:
                told = f"{self.key_heads} x {self.key_width} and {self.value_heads} x {self.value_width}"
                msg = f"{name} is {list(shape)}, the config's heads ({told}) need {needed} rows"
                raise CheckpointError(msg, hint=OTHER_MODEL)
            holes = match.groupdict()
            first = self._by_head(filled(self.qkvz, holes), name, shape[1], wide, 0)
            second = self._by_head(filled(self.ba, holes), name, shape[1], (share, share), self.key_heads * sum(wide))
            yield (name,), (first, second)

    def _by_head(self, to: str, source: str, columns: int, sections: Ints, start: int) -> Parameter:
        takes, at = [], 0
        for head in range(self.key_heads):
            begin = start
            for rows in sections:
                low = begin + head * rows
                takes.append(Take(source, Box((low, 0), (low + rows, columns)), Box((at, 0), (at + rows, columns))))
                begin += self.key_heads * rows
                at += rows
        return Parameter(to, (at, columns), (at, columns), tuple(takes))


@dataclass(frozen=True, slots=True)
class Halves:
    """linear_fc1 of a gated MLP: the first half of the rows is the gate, the second up."""

    pattern: str
    first: str
    second: str

    def apply(self, shapes: Shapes) -> Iterator[tuple[tuple[str, ...], tuple[Parameter, ...]]]:
        """Two parameters for each fused one."""
        for name, shape, match in matching(self.pattern, shapes):
            if not shape or shape[0] % 2:
                raise CheckpointError(f"{name} {list(shape)} has no two halves", hint="files of two saves are mixed")
            half, rest = shape[0] // 2, shape[1:]
            none = (0,) * len(rest)
            parts = []
            for to, low in ((self.first, 0), (self.second, half)):
                box = Box((low, *none), (low + half, *rest))
                take = Take(name, box, Box.whole((half, *rest)))
                parts.append(Parameter(filled(to, match.groupdict()), (half, *rest), (half, *rest), (take,)))
            yield (name,), tuple(parts)


@dataclass(frozen=True, slots=True)
class ExpertHalves:
    """A stack [E, 2F, h] (or of biases [E, 2F]): gate and up of each expert {e}."""

    pattern: str
    first: str
    second: str

    def apply(self, shapes: Shapes) -> Iterator[tuple[tuple[str, ...], tuple[Parameter, ...]]]:
        """Two parameters for each expert."""
        for name, shape, match in matching(self.pattern, shapes):
            if len(shape) < 2 or shape[1] % 2:
                raise CheckpointError(
                    f"{name} {list(shape)} is no stack of two halves", hint="files of two saves are mixed"
                )
            half, rest = shape[1] // 2, shape[2:]
            none = (0,) * len(rest)
            parts = []
            for e in range(shape[0]):
                for to, low in ((self.first, 0), (self.second, half)):
                    box = Box((e, low, *none), (e + 1, low + half, *rest))
                    view = (1, half, *rest)
                    take = Take(name, box, Box.whole(view))
                    name_of = filled(to, {**match.groupdict(), "e": e})
                    parts.append(Parameter(name_of, (half, *rest), view, (take,)))
            yield (name,), tuple(parts)


@dataclass(frozen=True, slots=True)
class Copies:
    """Whole tensors that the repository has once more for each `{i}` that `present` is there for: source -> name.

    The source itself is left to the other rules.
    """

    present: str
    copies: Mapping[str, str]

    def apply(self, shapes: Shapes) -> Iterator[tuple[tuple[str, ...], tuple[Parameter, ...]]]:
        """Nothing: copies are added behind all other rules (`added`)."""
        del shapes
        return iter(())

    def added(self, shapes: Shapes) -> Iterator[Parameter]:
        """The copies."""
        for _, _, match in matching(self.present, shapes):
            for source, to in self.copies.items():
                if source in shapes:
                    yield identity(filled(to, match.groupdict()), shapes[source], source)
