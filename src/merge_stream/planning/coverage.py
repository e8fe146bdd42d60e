"""Proof that boxes tile a tensor exactly once: in bounds, disjoint, complete.

The same three rules hold for the shards of a source tensor and for the takes of a
parameter (DCP validates its plans by them too). Cost: one sort when the boxes differ
along one dim only, which is every one-dimensional split; pairwise in blocks otherwise.
"""

from __future__ import annotations

import math

import numpy as np

__all__ = ["tiling_fault"]

_BLOCK = 256


def tiling_fault(shape: tuple[int, ...], start: np.ndarray, stop: np.ndarray) -> str | None:
    """None when boxes [start, stop) (int64 [n, ndim]) tile `shape`; else what is wrong, in words."""
    n, total = len(start), math.prod(shape)
    if total == 0:
        return None if n == 0 else f"{n} regions lie in an empty tensor"
    if n == 0:
        return "no shard holds any part of it"
    extents = np.array(shape, dtype=np.int64)
    if len(shape) == 0:
        return None if n == 1 else f"the one element is held {n} times"
    bad = np.flatnonzero(((start < 0) | (stop > extents) | (start >= stop)).any(axis=1))
    if len(bad):
        k = int(bad[0])
        return f"region {_text(start[k], stop[k])} does not lie inside {list(shape)}"
    split = np.flatnonzero(~((start == 0) & (stop == extents)).all(axis=0))
    if len(split) == 0:
        return None if n == 1 else f"the whole tensor is held {n} times"
    if len(split) == 1:
        return _line_fault(int(split[0]), shape, start[:, split[0]], stop[:, split[0]])
    clash = _first_overlap(start[:, split], stop[:, split])
    if clash is not None:
        i, j = clash
        return f"regions {_text(start[i], stop[i])} and {_text(start[j], stop[j])} overlap"
    covered = int(np.prod(stop - start, axis=1).sum())
    if covered != total:
        return f"{n} regions cover {covered} of {total} elements"
    return None


def _line_fault(dim: int, shape: tuple[int, ...], start: np.ndarray, stop: np.ndarray) -> str | None:
    order = np.argsort(start, kind="stable")
    begins, ends = start[order], stop[order]
    expected = np.concatenate(([0], ends))
    found = np.concatenate((begins, [shape[dim]]))
    wrong = np.flatnonzero(expected != found)
    if not len(wrong):
        return None
    k = int(wrong[0])
    wanted, got = int(expected[k]), int(found[k])
    if got > wanted:
        return f"indices {wanted} to {got - 1} of dim {dim} (size {shape[dim]}) are in no shard"
    return (
        f"indices {got} to {min(wanted, int(ends[min(k, len(ends) - 1)])) - 1} of dim {dim} are in more than one shard"
    )


def _first_overlap(start: np.ndarray, stop: np.ndarray) -> tuple[int, int] | None:
    cuts = [len(np.unique(column)) for column in start.T]
    columns = np.argsort(cuts, kind="stable")[::-1]  # sweep along the dim that is cut most
    order = np.lexsort(start.T[columns[::-1]])
    start, stop = start[order][:, columns], stop[order][:, columns]
    n = len(start)
    for low in range(0, n, _BLOCK):
        high = min(low + _BLOCK, n)
        # boxes are sorted by their first column: later ones that start behind the block's end cannot overlap
        last = int(np.searchsorted(start[:, 0], stop[low:high, 0].max(), side="left"))
        a0, a1 = start[low:high, None, :], stop[low:high, None, :]
        b0, b1 = start[None, low:last, :], stop[None, low:last, :]
        hit = ((a0 < b1) & (b0 < a1)).all(axis=2)
        these, those = np.nonzero(hit)
        other = np.flatnonzero(these != those)
        if len(other):
            return int(order[low + these[other[0]]]), int(order[low + those[other[0]]])
    return None


def _text(start: np.ndarray, stop: np.ndarray) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(start.tolist(), stop.tolist(), strict=True)) + "]"
