"""Python's collector of cycles, at rest while metadata becomes objects.

It looks at all objects again and again while they grow to millions, which took half the time of opening a
file of a million tensors. Reading and planning make no cycles that are dropped, so nothing is lost.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["without_collector"]

P = ParamSpec("P")
R = TypeVar("R")


def without_collector(function: Callable[P, R]) -> Callable[P, R]:
    """The function, with the collector at rest until it returns (and as before afterwards)."""

    @functools.wraps(function)
    def at_rest(*args: P.args, **kwargs: P.kwargs) -> R:
        if not gc.isenabled():
            return function(*args, **kwargs)
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            gc.enable()

    return at_rest
