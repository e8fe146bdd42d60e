"""The vocabulary of naming rules: data about names and shapes, no arithmetic, no tensors.

    source names and shapes --whole-tensor rules--> parameters --renames, in order--> output names

A rule states what a family's repository has instead of what the trainer holds in memory.
It only ever yields takes, so whatever it says is streamed. Rules look at names and shapes,
never at the version of a library: fused experts are three-dimensional, whoever fused them.

Patterns are dotted names in which a dot is a dot and braces are holes:

    {i} {e}      a number; {i+1} and {i-1} in what a name becomes are the numbers after and before it
    {at} {rest}  anything, at least one character (every other name too)
    {k:w1|w3}    what the regular expression after the colon matches
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from merge_stream.errors import CheckpointError, IncompleteShardsError
from merge_stream.tensors.box import Box, row_major_strides
from merge_stream.tensors.parameter import Parameter, Take, identity

__all__ = [
    "Concat",
    "Converted",
    "Drop",
    "HiddenFirstExperts",
    "Rename",
    "Rule",
    "SplitExperts",
    "Transpose",
    "Unstack",
    "convert",
    "filled",
    "holes_of",
    "matching",
    "pattern_of",
    "take_of_view",
    "two_halves_in_rows",
]

Ints = tuple[int, ...]
Shapes = Mapping[str, Ints]

_HOLE = re.compile(r"\{(?P<name>[a-z_]+)(?P<shift>[+-]\d+)?(?::(?P<regex>[^{}]+))?\}")


@functools.cache
def pattern_of(template: str) -> re.Pattern[str]:
    """The regular expression of a template; a hole that stands twice must hold the same twice."""
    parts, last, seen = [], 0, set[str]()
    for hole in _HOLE.finditer(template):
        parts.append(re.escape(template[last : hole.start()]))
        last, name = hole.end(), hole["name"]
        inside = hole["regex"] or (r"\d+" if name in {"i", "e"} else ".+")
        parts.append(f"(?P={name})" if name in seen else f"(?P<{name}>{inside})")
        seen.add(name)
    return re.compile("".join(parts) + re.escape(template[last:]))


def matching(template: str, shapes: Shapes) -> Iterator[tuple[str, Ints, re.Match[str]]]:
    """Name, shape and match of all tensors whose whole name fits the template."""
    pattern = pattern_of(template)
    for name, shape in shapes.items():
        match = pattern.fullmatch(name)
        if match is not None:
            yield name, shape, match


def filled(template: str, holes: Mapping[str, str | int]) -> str:
    """The template with its holes filled."""

    def value(hole: re.Match[str]) -> str:
        held = holes[hole["name"]]
        if not hole["shift"]:
            return str(held)
        number = int(held) + int(hole["shift"])
        if number < 0:
            raise CheckpointError(f"{template} of number {held} would be number {number}", hint="correct the rule")
        return str(number)

    return _HOLE.sub(value, template)


def holes_of(template: str, *, shifted: bool = False) -> set[str]:
    """Names of the holes in a template; of those with a shift only, if told so."""
    return {hole["name"] for hole in _HOLE.finditer(template) if hole["shift"] or not shifted}


class Rule(Protocol):
    """What stands in memory and what the repository has instead."""

    def apply(self, shapes: Shapes) -> Iterator[tuple[tuple[str, ...], tuple[Parameter, ...]]]:
        """(sources used up, parameters made of them) for everything in `shapes` that the rule is about."""
        ...


@dataclass(frozen=True, slots=True)
class Rename:
    """A name that matches `pattern` becomes `to`, with the holes filled alike; applied to output names, in order."""

    pattern: str
    to: str

    def renamed(self, name: str) -> str:
        """The other name, or the same when the pattern does not match."""
        match = pattern_of(self.pattern).fullmatch(name)
        return filled(self.to, match.groupdict()) if match else name


@dataclass(frozen=True, slots=True)
class Drop:
    """A tensor that no repository of the family has; `reason` is told to the user."""

    pattern: str
    reason: str

    def apply(self, shapes: Shapes) -> Iterator[tuple[tuple[str, ...], tuple[Parameter, ...]]]:
        """Uses the tensor up and makes nothing."""
        for name, _, _ in matching(self.pattern, shapes):
            yield (name,), ()


@dataclass(frozen=True, slots=True)
class SplitExperts:
    """Two fused tensors -> three matrices for each expert.

        {at}.gate_up_proj [E, 2I, H]   gate is rows 0..I, up rows I..2I      gate, up [I, H]
        {at}.down_proj    [E, H, I]                                          down     [H, I]

    The other orientation, [E, H, 2I] and [E, I, H], is transposed on the way. The two
    shapes tell which it is, for they cannot fit both ways.
    """

    at: str
    gate: str
    up: str
    down: str

    def apply(self, shapes: Shapes) -> Iterator[tuple[tuple[str, ...], tuple[Parameter, ...]]]:
        """One triple of parameters for each expert; CheckpointError when the two shapes do not fit each other."""
        for fused, other, holes in _expert_pairs(self.at, shapes):
            in_rows = two_halves_in_rows(fused, shapes[fused], other, shapes[other])
            count, inner, hidden = shapes[other][0], shapes[other][2], shapes[other][1]
            if not in_rows:
                inner, hidden = hidden, inner
            parts = []
            for e in range(count):
                known: dict[str, str | int] = {**holes, "e": e}
                parts += [
                    _slice(filled(self.gate, known), fused, e, (0, inner), (0, hidden), flipped=not in_rows),
                    _slice(filled(self.up, known), fused, e, (inner, 2 * inner), (0, hidden), flipped=not in_rows),
                    _slice(filled(self.down, known), other, e, (0, hidden), (0, inner), flipped=not in_rows),
                ]
            yield (fused, other), tuple(parts)


@dataclass(frozen=True, slots=True)
class HiddenFirstExperts:
    """Fused experts that the repository keeps fused, hidden size first: [E, H, 2I] and [E, I, H].

    The pair [E, 2I, H] and [E, H, I] is transposed; a pair that is right already stays.
    """

    at: str

    def apply(self, shapes: Shapes) -> Iterator[tuple[tuple[str, ...], tuple[Parameter, ...]]]:
        """Both tensors under their own names."""
        for fused, other, _ in _expert_pairs(self.at, shapes):
            if two_halves_in_rows(fused, shapes[fused], other, shapes[other]):
                yield (fused, other), tuple(_permuted(n, n, shapes[n], (0, 2, 1)) for n in (fused, other))


@dataclass(frozen=True, slots=True)
class Unstack:
    """A tensor [E, rows, columns] -> one matrix `to` for each expert {e}."""

    pattern: str
    to: str

    def apply(self, shapes: Shapes) -> Iterator[tuple[tuple[str, ...], tuple[Parameter, ...]]]:
        """Only what has three dims is a stack."""
        for name, shape, match in matching(self.pattern, shapes):
            if len(shape) == 3:
                holes = match.groupdict()
                yield (
                    (name,),
                    tuple(
                        _slice(filled(self.to, {**holes, "e": e}), name, e, (0, shape[1]), (0, shape[2]))
                        for e in range(shape[0])
                    ),
                )


@dataclass(frozen=True, slots=True)
class Concat:
    """Several tensors, one below the other along `axis` -> one."""

    patterns: tuple[str, ...]
    to: str
    axis: int = 0

    def apply(self, shapes: Shapes) -> Iterator[tuple[tuple[str, ...], tuple[Parameter, ...]]]:
        """IncompleteShardsError when some of the parts are there and others are not."""
        for name, _, first in matching(self.patterns[0], shapes):
            names = tuple(filled(pattern, first.groupdict()) for pattern in self.patterns)
            lost = [n for n in names if n not in shapes]
            if lost:
                msg = f"{lost[0]} is missing, though {name} is there"
                raise IncompleteShardsError(msg, hint="pass the folder that holds all shards")
            yield names, (concatenated(filled(self.to, first.groupdict()), names, shapes, self.axis),)


@dataclass(frozen=True, slots=True)
class Transpose:
    """A tensor whose dims stand in another order in the repository: dim k there is dim `permute[k]` here."""

    pattern: str
    to: str
    permute: Ints = (1, 0)

    def apply(self, shapes: Shapes) -> Iterator[tuple[tuple[str, ...], tuple[Parameter, ...]]]:
        """Only what has as many dims as `permute`."""
        for name, shape, match in matching(self.pattern, shapes):
            if len(shape) == len(self.permute):
                yield (name,), (_permuted(filled(self.to, match.groupdict()), name, shape, self.permute),)


@dataclass(frozen=True, slots=True)
class Converted:
    """What rules make of a state dict: the parameters, and the tensors left out with the reason."""

    parameters: tuple[Parameter, ...]
    dropped: Mapping[str, str]

    @property
    def shapes(self) -> dict[str, Ints]:
        """Names and shapes of the parameters."""
        return {parameter.name: parameter.shape for parameter in self.parameters}


def convert(rules: Sequence[Rule | Rename], shapes: Shapes) -> Converted:
    """Apply the whole-tensor rules, keep what none is about, then rename everything.

    The order of the parameters is that of the sources. CheckpointError when shapes contradict a rule.
    """
    made: dict[str, tuple[Parameter, ...]] = {}
    dropped: dict[str, str] = {}
    left = dict(shapes)
    for rule in rules:
        if isinstance(rule, Rename):
            continue
        for used, parameters in rule.apply(dict(left)):
            for name in used:
                left.pop(name, None)
            made[used[0]] = parameters
            if isinstance(rule, Drop):
                dropped[used[0]] = rule.reason
    ordered = [
        parameter
        for name, shape in shapes.items()
        for parameter in ((identity(name, shape),) if name in left else made.get(name, ()))
    ]
    renames = [rule for rule in rules if isinstance(rule, Rename)]
    return Converted(tuple(_renamed(parameter, renames) for parameter in ordered), dropped)


def two_halves_in_rows(gate_up: str, first: Ints, down: str, second: Ints) -> bool:
    """True for [E, 2I, H] with [E, H, I], False for [E, H, 2I] with [E, I, H]; CheckpointError otherwise."""
    count, a, b = first
    others, c, d = second
    if count == others and (a, b) == (2 * d, c):
        return True
    if count == others and (a, b) == (d, 2 * c):
        return False
    msg = f"{gate_up} {list(first)} and {down} {list(second)} are not the two halves of the same experts"
    raise CheckpointError(msg, hint="pass the folder that holds all shards; `--layout as-is` writes them as they are")


def concatenated(to: str, names: Sequence[str], shapes: Shapes, axis: int) -> Parameter:
    """One parameter of whole sources, one after the other along `axis`."""
    takes, at = [], 0
    for name in names:
        shape = shapes[name]
        start = tuple(at if k == axis else 0 for k in range(len(shape)))
        whole = Box.whole(shape)
        takes.append(Take(name, whole, whole.shifted(start)))
        at += shape[axis]
    total = tuple(at if k == axis else n for k, n in enumerate(shapes[names[0]]))
    return Parameter(to, total, total, tuple(takes))


def _expert_pairs(at: str, shapes: Shapes) -> Iterator[tuple[str, str, dict[str, str]]]:
    for name, shape in shapes.items():
        match = pattern_of(f"{at}.gate_up_proj").fullmatch(name)
        if match is None or len(shape) != 3:
            continue
        down = name.removesuffix("gate_up_proj") + "down_proj"
        if len(shapes.get(down, ())) != 3:
            msg = f"{down} is missing, though {name} {list(shape)} is there"
            raise IncompleteShardsError(msg, hint="pass the folder that holds all shards")
        yield name, down, match.groupdict()


def _slice(to: str, source: str, e: int, rows: Ints, columns: Ints, *, flipped: bool = False) -> Parameter:
    """One matrix of a stack: `rows` x `columns` of the result; flipped: they are the stack's last and middle dim."""
    shape = (rows[1] - rows[0], columns[1] - columns[0])
    middle, last = (columns, rows) if flipped else (rows, columns)
    box = Box((e, middle[0], last[0]), (e + 1, middle[1], last[1]))
    take = Take(source, box, Box.whole((1, *shape)), permute=(0, 2, 1) if flipped else ())
    return Parameter(to, shape, (1, *shape), (take,))


def _permuted(to: str, source: str, shape: Ints, permute: Ints) -> Parameter:
    seen = tuple(shape[axis] for axis in permute)
    return Parameter(to, seen, seen, (Take(source, Box.whole(shape), Box.whole(seen), permute=permute),))


def _renamed(parameter: Parameter, renames: Sequence[Rename]) -> Parameter:
    name = parameter.name
    for rename in renames:
        name = rename.renamed(name)
    return parameter if name == parameter.name else replace(parameter, name=name)


def take_of_view(  # noqa: PLR0917 - a view is four things
    name: str, source: str, shape: Ints, offset: int, size: Ints, stride: Ints
) -> Parameter | None:
    """The parameter that is a strided view of a row-major source; None when the view is no box of it.

    Each dim of the view must run along one dim of the source; other dims of the source stand still.
    """
    steps, at, rest = row_major_strides(shape), [], offset
    for step in steps:
        at.append(rest // step if step else 0)
        rest -= at[-1] * step
    axes: list[int] = []
    for extent, step in zip(size, stride, strict=True):
        fits = [
            k
            for k, own in enumerate(steps)
            if own == step and k not in axes and at[k] + extent <= shape[k] and (extent > 1 or shape[k] == 1)
        ]
        if extent == 1 and not fits:
            fits = [k for k in range(len(shape)) if k not in axes and at[k] < shape[k]]
        if not fits:
            return None
        axes.append(fits[0])
    still = [k for k in range(len(shape)) if k not in axes]
    order = (*still, *axes)
    extents = dict(zip(axes, size, strict=True))
    box = Box(tuple(at), tuple(at[k] + extents.get(k, 1) for k in range(len(shape))))
    seen = tuple(box.shape[k] for k in order)
    permute = () if order == tuple(range(len(shape))) else order
    return Parameter(name, size, seen, (Take(source, box, Box.whole(seen), permute=permute),))
