"""Finding the members of an extension point: one file in one folder, or an installed entry point.

A member is a module-level object named `MEMBER` (lower-case modules whose names do not
start with "_" and are not "base"). Third parties register the same objects under the
entry-point groups `merge_stream.formats`, `merge_stream.architectures`,
`merge_stream.encodings`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from importlib.metadata import entry_points
from typing import Any

__all__ = ["members_of"]


@functools.cache
def members_of(kind: str) -> tuple[Any, ...]:
    """All members of "formats", "architectures" or "encodings", sorted by their `name`."""
    package = importlib.import_module(f"merge_stream.{kind}")
    found: list[Any] = []
    for info in pkgutil.iter_modules(package.__path__):
        if info.name == "base" or info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        if hasattr(module, "MEMBER"):
            found.append(module.MEMBER)
    found.extend(point.load() for point in entry_points(group=f"merge_stream.{kind}"))
    return tuple(sorted(found, key=lambda member: str(member.name)))
