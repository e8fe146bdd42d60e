"""Tensors of a state dict that no name leads to: in lists, in objects, under keys that are no strings.

A model's state dict has a name for each tensor. What lies elsewhere is counted and named to the user; what
looks like weights there is refused, since leaving it out would be a silent loss: two dims or more, of floating
point, or of any type inside of an object, which may be a quantized weight of a framework (a `Float8Tensor` of
Transformer Engine keeps codes as uint8 beside a scale). A value that holds more than a million others is refused too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from merge_stream.containers.pickle_reader import Recorder, described
from merge_stream.containers.torch_tensor import plain_tensor
from merge_stream.errors import CorruptCheckpointError, UnsupportedError
from merge_stream.formats._catalog import listed

__all__ = ["IN_LISTS", "HiddenTensor", "hidden_tensors", "note_on_hidden", "refuse_hidden_weights"]

IN_LISTS = "tensors in lists or objects"
_TENSORS = ("torch._utils._rebuild_", "torch._tensor._rebuild_", "torch.distributed.")
_MOST = 1_000_000


class HiddenTensor(NamedTuple):
    """Where it lies ("ema.shadow[3]"), its shape in words, whether it looks like a weight, the object's class or ""."""

    name: str
    shape: str
    is_weight: bool
    inside: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.shape}" + (f" in a {self.inside}" if self.inside else "")


def hidden_tensors(value: Any, name: str, where: str) -> list[HiddenTensor]:  # noqa: ANN401 - any unpickled value
    """Every tensor inside `value`, which is at `name`, each once; CorruptCheckpointError when it is too large."""
    found = []
    stack: list[tuple[str, Any, str]] = [(name, value, "")]
    seen: set[int] = set()
    while stack:
        at, inside, owner = stack.pop()
        if id(inside) in seen:
            continue
        if isinstance(inside, Recorder) and inside.dotted.startswith(_TENSORS):
            found.append(_hidden(inside, at, where, owner))
        elif isinstance(inside, Recorder | Mapping | list | tuple | set | frozenset):
            seen.add(id(inside))
            own = described(inside) if isinstance(inside, Recorder) else owner
            below = [(place, held, own) for place, held in _below(inside, at)]
            if len(stack) + len(below) > _MOST:
                msg = f"{where}: {name} holds more than a million values"
                raise CorruptCheckpointError(msg, hint="leave it out of the state dict before saving")
            stack += below
    return sorted(found)


def refuse_hidden_weights(found: Iterable[HiddenTensor], where: str) -> None:
    """UnsupportedError when some of them look like weights."""
    weights = [str(tensor) for tensor in found if tensor.is_weight]
    if weights:
        count = f"{len(weights)} tensor{'s' if len(weights) > 1 else ''}"
        msg = f"{where}: {count} without a name of a parameter would be lost: {listed(weights, most=3)}"
        hint = "save a state dict that has a name for each tensor: no list, no object, keys that are strings"
        raise UnsupportedError(msg, hint=hint)


def note_on_hidden(found: Iterable[HiddenTensor]) -> tuple[str, ...]:
    """A remark that names what was left out, if anything was."""
    names = list(dict.fromkeys(map(str, found)))
    if not names:
        return ()
    one = len(names) == 1
    which = "1 tensor without a name of its own was" if one else f"{len(names)} tensors without names of their own were"
    return (f"{which} left out: {listed(names, most=3)}",)


def _below(value: Any, at: str) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    if isinstance(value, Mapping):
        for key, inside in value.items():
            yield f"{at}[{key if isinstance(key, str) else described(key)}]", inside
    elif isinstance(value, list | tuple | set | frozenset):
        for number, inside in enumerate(value):
            yield f"{at}[{number}]", inside
    elif isinstance(value, Recorder):
        yield from _below(value.args, at)
        yield from _below(value.items or (), at)
        if isinstance(value.state, Mapping | list | tuple):
            yield from _below(value.state, at)


def _hidden(record: Recorder, at: str, where: str, owner: str) -> HiddenTensor:
    try:
        plain = plain_tensor(record, at, where)
    except UnsupportedError:
        plain = None
    if plain is None:  # a tensor of several ranks, or of a kind that only weights have
        return HiddenTensor(at, f"({record.dotted})", is_weight=True, inside=owner)
    of_weights = bool(owner) or plain.dtype.kind in {"float", "quantized"}
    return HiddenTensor(at, str(list(plain.shape)), len(plain.shape) > 1 and of_weights, owner)
