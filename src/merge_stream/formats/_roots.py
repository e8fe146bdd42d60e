"""Where the model is in a nested state dict, and what stands beside it.

A trainer saves `{"model": {...}, "optimizer": {...}, "step": 7}`, or the model flat at the top, or
`{"app": {"model": ..., "optim": ...}}`. Every stored entry comes here as a path of keys; the last key
is a parameter's own name, dots and all ("model", "model.norm.weight").

    ("app", "model", "model.norm.weight")    container keys "app", "model"; parameter "model.norm.weight"

Rules, in this order: framework noise is counted out by name at every level; a container with a known
name goes before others; a single container is entered whatever its name; several unknown ones are an
error that lists them, and `--root` decides. Where paths are not known (or every key is one segment),
the joined names decide: `model.` is a container only when `model.model.` or a head below it exists,
because it is also how transformers' own names begin.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from merge_stream.errors import AmbiguousCheckpointError, CorruptCheckpointError, UnsupportedError, UsageError
from merge_stream.formats._catalog import listed
from merge_stream.formats._names import noise_kind
from merge_stream.units import counted

__all__ = ["Selection", "is_flat_key", "naming_of", "refuse_flat_parameters", "select_model"]

Path = tuple[str, ...]

# how trainers call the sub-tree of the model, the surest name first; "app" is the torch tutorial's AppState
_CONTAINERS = ("model", "state_dict", "model_state_dict", "module", "model_state", "app")
# FSDP1 of torch; fairscale and older torch number or name them
_FLAT = re.compile(r"_?flat_param(_\w+)?")
_TITAN_LAYER = re.compile(r"layers\.\d+\.(attention|attention_norm|feed_forward|moe)\.")


@dataclass(frozen=True, slots=True)
class Selection:
    """The model's entries: stored key -> name below `root` ("" is the top)."""

    root: str
    names: Mapping[str, str]
    ignored: Counter[str] = field(default_factory=Counter)
    notes: tuple[str, ...] = ()


def select_model(paths: Mapping[str, Path], root: str | None, where: str) -> Selection:
    """The sub-tree that is the model.

    `paths` are the tensors' (stored key -> path of keys); `root` is the user's choice, dots between
    keys. UsageError for a root that is not there, AmbiguousCheckpointError when several could be meant.
    """
    if root is not None:
        return _below(paths, root, where)
    ignored: Counter[str] = Counter()
    notes: list[str] = []
    taken: list[str] = []
    items = dict(paths)
    while True:
        items = _without_noise(items, ignored)
        containers = list(dict.fromkeys(path[0] for path in items.values() if len(path) > 1))
        if not containers or not any("." in path[-1] for path in items.values()):
            break
        if any(len(path) == 1 and "." in path[0] for path in items.values()):
            break  # parameters stand here, whatever is nested beside them
        known = [name for name in _CONTAINERS if name in containers]
        if len(containers) > 1 and not known:
            raise AmbiguousCheckpointError(
                f"{where} holds several state dicts that could be the model: {listed(containers)}",
                hint="say which with --root KEY",
            )
        chosen = known[0] if known else containers[0]
        others = [path[0] for path in items.values() if path[0] != chosen]
        if others:
            ignored["other entries"] += len(others)
            notes.append(f"entries beside {chosen!r} were left out: {listed(dict.fromkeys(others))}")
        items = {key: path[1:] for key, path in items.items() if path[0] == chosen and len(path) > 1}
        taken.append(chosen)
    names = {key: ".".join(path) for key, path in items.items()}
    prefix = _container_prefix(names.values())
    if prefix:
        names = {key: name[len(prefix) :] for key, name in names.items()}
        taken.append(prefix[:-1])
        names = {k: v[0] for k, v in _without_noise({k: (n,) for k, n in names.items()}, ignored).items()}
    return Selection(".".join(taken), _unique(names, where), ignored, tuple(notes))


def naming_of(names: Collection[str]) -> str:
    """Scheme "torchtitan" when the set of names is Meta's (torchtitan, original Llama), else "hf"."""
    if "tok_embeddings.weight" in names and any(_TITAN_LAYER.match(name) for name in names):
        return "torchtitan"
    return "hf"


def is_flat_key(key: object) -> bool:
    """Whether a stored name is that of flat parameters, or of a part of one, of any library."""
    leaf = key.rpartition(".")[2] if isinstance(key, str) else ""
    return bool(_FLAT.fullmatch(leaf)) or leaf.startswith("_fsdp_shard")


def refuse_flat_parameters(names: Iterable[str], where: str) -> None:
    """UnsupportedError for flat parameters without metadata, whose parts have no names."""
    for name in names:
        if is_flat_key(name):
            raise UnsupportedError(
                f"{where} holds flat parameters ({name!r}), as LOCAL_STATE_DICT of FSDP1 saves them: many parameters "
                "laid end to end and cut into equal parts; their names, shapes and order are not in the file, so they "
                "cannot be split",
                hint="load it with the training script and save again with SHARDED_STATE_DICT or FULL_STATE_DICT; of "
                "fairscale and torch_xla, rank files that hold shard_metadata beside model are merged",
            )


def _without_noise(items: Mapping[str, Path], ignored: Counter[str]) -> dict[str, Path]:
    kept = {}
    for key, path in items.items():
        if kind := noise_kind(".".join(path)):
            ignored[kind] += 1
        else:
            kept[key] = path
    return kept


def _unique(names: dict[str, str], where: str) -> dict[str, str]:
    owner: dict[str, str] = {}
    for key, name in names.items():
        if owner.setdefault(name, key) != key:
            raise CorruptCheckpointError(f"{where}: {owner[name]!r} and {key!r} are both the parameter {name!r}")
    return names


def _below(paths: Mapping[str, Path], root: str, where: str) -> Selection:
    keys = root.rstrip(".")
    ignored: Counter[str] = Counter()
    below: dict[str, Path] = {}
    for key, path in paths.items():
        for depth in range(1, len(path)):
            if ".".join(path[:depth]) == keys:
                below[key] = (".".join(path[depth:]),)
                break
    if not below and all(len(path) == 1 for path in paths.values()):
        # a flat state dict, or one without recorded paths: the names are all there is
        below = {k: (p[0][len(keys) + 1 :],) for k, p in paths.items() if p[0].startswith(keys + ".")}
    if not below:
        roots = dict.fromkeys(path[0] if len(path) > 1 else path[0].split(".", 1)[0] for path in paths.values())
        raise UsageError(
            f"{where} holds no tensors below the root {root!r}", hint=f"roots there are: {listed(roots, most=30)}"
        )
    names = {key: path[0] for key, path in _without_noise(below, ignored).items()}
    outside = [key for key in paths if key not in below]
    notes: tuple[str, ...] = ()
    if outside:
        ignored["entries outside the root"] = len(outside)
        count = counted(len(outside), "entry", "entries")
        notes = (f"{count} outside the root {keys!r} left out: {listed(outside, most=3)}",)
    return Selection(keys, _unique(names, where), ignored, notes)


def _container_prefix(names: Collection[str]) -> str:
    """The `model.` or the like that every name begins with, when it cannot belong to the names themselves."""
    for container in ("state_dict.", "model_state_dict.", "model."):
        if names and all(name.startswith(container) for name in names):
            rest = {name[len(container) :].split(".", 1)[0] for name in names}
            if container != "model." or rest & {"model", "lm_head", "module", "_orig_mod", "tok_embeddings"}:
                return container
    return ""
