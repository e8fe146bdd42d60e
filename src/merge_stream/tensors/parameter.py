"""Output parameters as regions of source tensors: the words between names and bytes.

    source tensor --split leading dim--> view --source_box--> permute --> dest_box of the parameter's view

A `Take` moves a box, it never computes. Everything an architecture does (rename, split,
concatenate, transpose, permute rows) is a list of takes, so every output byte has a known
source.
"""

from __future__ import annotations

from dataclasses import dataclass

from merge_stream.tensors.box import Box

__all__ = ["Mapping", "Parameter", "Take", "Tie", "identity"]

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Take:
    """These elements of that tensor become those elements of this parameter.

    source      name in the catalog
    source_box  region of the source, in the coordinates of its view
    dest_box    region of the parameter, in the coordinates of the parameter's view
    split       the source's leading dim is seen as these factors (their product is its
                extent); empty: the source's own shape
    permute     axis k of dest_box is axis permute[k] of source_box; empty: same order
    """

    source: str
    source_box: Box
    dest_box: Box
    split: Ints = ()
    permute: Ints = ()


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of the Hugging Face model.

    `view` is the shape (same number of elements, same row-major order) whose coordinates
    the takes' dest boxes use; the takes tile it exactly once (the planner checks).
    """

    name: str
    shape: Ints
    view: Ints
    takes: tuple[Take, ...]


@dataclass(frozen=True, slots=True)
class Tie:
    """Two parameters that may be one: `name` may be left out when it equals `twin`.

    `by_config` tells whether the config declares them tied; the planner's probe then
    compares the bytes.
    """

    name: str
    twin: str
    by_config: bool


@dataclass(frozen=True, slots=True)
class Mapping:
    """What an architecture makes of a catalog: the parameters, possible ties, remarks for the user."""

    architecture: str
    parameters: tuple[Parameter, ...]
    ties: tuple[Tie, ...] = ()
    notes: tuple[str, ...] = ()


def identity(name: str, shape: Ints, source: str | None = None) -> Parameter:
    """A parameter that is a whole source tensor (of the same name, unless told)."""
    box = Box.whole(shape)
    return Parameter(name, shape, shape, (Take(source or name, box, box),))
