"""Rules for Megatron's attention: groups of queries, key and value in one tensor, norms of heads, rotary order.

They speak of the canonical names (`formats/_megatron_names`) and yield takes only. Head counts come from the config
and are checked against the shapes: a tensor-parallel rank's part may end inside a group, so rows are placed globally.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.rules import filled, matching
from merge_stream.architectures.structure import text_value
from merge_stream.errors import CheckpointError, UnsupportedError
from merge_stream.tensors.box import Box
from merge_stream.tensors.parameter import Parameter, Take, identity

__all__ = ["OTHER_MODEL", "HeadNorm", "Heads", "QkvConcat", "QkvGroups", "heads_of"]

Ints = tuple[int, ...]
Shapes = Mapping[str, Ints]
OTHER_MODEL = (
    "config.json is of another model (pass the right --base-model), or files of tensor-parallel ranks are missing"
)
"""Hint where rows are not those that the config's sizes need."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, key-value groups, elements of a head."""

    queries: int
    groups: int
    width: int


def heads_of(model: ModelInfo) -> Heads:
    """The attention's shape from the config; UnsupportedError when it does not tell."""
    queries = text_value(model.config, "num_attention_heads", "n_head")
    groups = text_value(model.config, "num_key_value_heads", "num_query_groups") or queries
    width = text_value(model.config, "head_dim")
    hidden = text_value(model.config, "hidden_size", "n_embd")
    if width is None and hidden and queries:
        width = hidden // queries
    if not queries or not groups or not width or queries % groups:
        where = model.config_path or "config.json"
        msg = f"{where} does not tell the heads ({queries} queries, {groups} groups, {width})"
        raise UnsupportedError(msg, hint="pass the --base-model that was trained")
    return Heads(queries, groups, width)


@dataclass(frozen=True, slots=True)
class QkvGroups:
    """linear_qkv: for each group its query heads, one key head, one value head, one below the other.

    `gated` (Qwen3-Next): each query head of the group is followed, behind all of them, by as many rows of gates,
    which the repository keeps beside their heads.
    `turned`: Megatron's rotary pairs are rows 2k and 2k + 1 of a head, the repository's k and k + width / 2.
    """

    pattern: str
    q: str
    k: str
    v: str
    heads: Heads
    gated: bool = False
    turned: bool = False

    def apply(self, shapes: Shapes) -> Iterator[tuple[tuple[str, ...], tuple[Parameter, ...]]]:
        """Three parameters for each fused one."""
        for name, shape, match in matching(self.pattern, shapes):
            queries, groups, width = self.heads.queries, self.heads.groups, self.heads.width
            share = queries // groups
            parts = 2 * share + 2 if self.gated else share + 2
            if not shape or shape[0] != groups * parts * width:
                rows, needed = shape[0] if shape else 0, groups * parts * width
                told = f"{queries} query heads and {groups} groups of {width}"
                msg = f"{name} has {rows} rows, the config's {told} need {needed}"
                raise CheckpointError(msg, hint=OTHER_MODEL)
            holes = match.groupdict()
            split = (groups, parts, width)
            key = _turned if self.turned else _rows
            yield (
                (name,),
                (
                    self._queries(filled(self.q, holes), name, shape, split, share),
                    key(filled(self.k, holes), name, shape, split, (parts - 2, parts - 1)),
                    _rows(filled(self.v, holes), name, shape, split, (parts - 1, parts)),
                ),
            )

    def _queries(self, to: str, source: str, shape: Ints, split: Ints, share: int) -> Parameter:
        if self.turned and self.gated:
            msg = f"{source}: rotary pairs of neighbours in an attention with gates are not known"
            raise UnsupportedError(msg, hint="--layout as-is writes the tensors under Megatron's names")
        if not self.gated:
            return (_turned if self.turned else _rows)(to, source, shape, split, (0, share))
        groups, parts, width = split
        rest = shape[1:]
        none = (0,) * len(rest)
        takes = tuple(
            Take(
                source,
                Box((0, half * share, 0, 0, *none), (groups, (half + 1) * share, 1, width, *rest)),
                Box((0, 0, half, 0, *none), (groups, share, half + 1, width, *rest)),
                split=(groups, parts, 1, width),
            )
            for half in (0, 1)
        )
        return Parameter(to, (groups * share * 2 * width, *rest), (groups, share, 2, width, *rest), takes)


def _rows(to: str, source: str, shape: Ints, split: Ints, part: Ints) -> Parameter:
    """Heads [part) of every group."""
    groups, _, width = split
    rest = shape[1:]
    box = Box((0, part[0], 0, *(0,) * len(rest)), (groups, part[1], width, *rest))
    view = (groups, part[1] - part[0], width, *rest)
    rows = groups * (part[1] - part[0]) * width
    return Parameter(to, (rows, *rest), view, (Take(source, box, Box.whole(view), split=split),))


def _turned(to: str, source: str, shape: Ints, split: Ints, part: Ints) -> Parameter:
    """Heads [part) of every group, rows 0, 2, 4 ... of each before rows 1, 3, 5 ..."""
    groups, _, width = split
    rest, count = shape[1:], part[1] - part[0]
    if width % 2:
        raise CheckpointError(f"{source}: heads of {width} rows have no pairs", hint="pass the right --base-model")
    none = (0,) * len(rest)
    box = Box((0, part[0], 0, 0, *none), (groups, part[1], width // 2, 2, *rest))
    view = (groups, count, 2, width // 2, *rest)
    permute = (0, 1, 3, 2, *range(4, 4 + len(rest)))
    take = Take(source, box, Box.whole(view), split=(*split[:2], width // 2, 2), permute=permute)
    return Parameter(to, (groups * count * width, *rest), view, (take,))


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """The norm of queries or keys, `heads` times `width` long: of one head, or over all of them.

    `turned` as in `QkvGroups`: elements 0, 2, 4 ... of each head before 1, 3, 5 ...
    """

    pattern: str
    to: str
    heads: int
    width: int
    turned: bool = False

    def apply(self, shapes: Shapes) -> Iterator[tuple[tuple[str, ...], tuple[Parameter, ...]]]:
        """CheckpointError for another length: a tensor-parallel part, or another kind of norm."""
        for name, shape, match in matching(self.pattern, shapes):
            if shape != (self.heads * self.width,):
                told = f"{self.heads} x {self.width}" if self.heads > 1 else str(self.width)
                msg = f"{name} is {list(shape)}, but this family's norm has {told} elements"
                raise CheckpointError(msg, hint="a tensor-parallel part, or pass the --base-model that was trained")
            to = filled(self.to, match.groupdict())
            if not self.turned:
                yield (name,), (identity(to, shape, name),)
                continue
            view, split = (self.heads, 2, self.width // 2), (self.heads, self.width // 2, 2)
            take = Take(name, Box.whole(split), Box.whole(view), split=split, permute=(0, 2, 1))
            yield (name,), (Parameter(to, shape, view, (take,)),)


@dataclass(frozen=True, slots=True)
class QkvConcat:
    """linear_qkv -> all query heads, then all key heads, then all value heads, in one tensor (Phi-3).

    `transposed`: the repository stores [in, out] (Conv1D of GPT-2).
    """

    pattern: str
    to: str
    heads: Heads
    transposed: bool = False

    def apply(self, shapes: Shapes) -> Iterator[tuple[tuple[str, ...], tuple[Parameter, ...]]]:
        """One parameter for each fused one."""
        queries, groups, width = self.heads.queries, self.heads.groups, self.heads.width
        share = queries // groups
        for name, shape, match in matching(self.pattern, shapes):
            if not shape or shape[0] != (queries + 2 * groups) * width:
                msg = f"{name} has the shape {list(shape)}, the config says {queries} and {groups} heads of {width}"
                raise CheckpointError(msg, hint=OTHER_MODEL)
            split, rest = (groups, share + 2, width), shape[1:]
            none = (0,) * len(rest)
            takes, at = [], 0
            for low, high in ((0, share), (share, share + 1), (share + 1, share + 2)):
                for group in range(groups):
                    box = Box((group, low, 0, *none), (group + 1, high, width, *rest))
                    place = Box((0, at, 0, *none), (1, at + high - low, width, *rest))
                    if self.transposed and rest:
                        place = Box((0, 0, at, 0), (rest[0], 1, at + high - low, width))
                        takes.append(Take(name, box, place, split=split, permute=(3, 0, 1, 2)))
                    else:
                        takes.append(Take(name, box, place, split=split))
                    at += high - low
            to = filled(self.to, match.groupdict())
            if self.transposed and rest:
                yield (name,), (Parameter(to, (rest[0], shape[0]), (rest[0], 1, at, width), tuple(takes)),)
            else:
                yield (name,), (Parameter(to, shape, (1, at, width, *rest), tuple(takes)),)
