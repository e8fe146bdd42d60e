"""Folders of runs of ours that have not ended: what is in them looks like a model and is none yet.

OUT.partial, or OUT/.merge-stream, holds `plan.json`, `lock` and `journal` beside the folder `model`
(`engine.staging`). Searches pass them by (`storage.local`); here they are told when they are named.
A whole staging store in such a folder is a source like any other.
"""

from __future__ import annotations

import os

from merge_stream.errors import UnknownFormatError

__all__ = ["INNER_FOLDER", "WORK_FILES", "refuse_unfinished"]

INNER_FOLDER = ".merge-stream"
WORK_FILES = ("plan.json", "lock", "journal")
_MODEL = "model"
_DEPTH = 3


def refuse_unfinished(folder: str | os.PathLike[str]) -> None:
    """UnknownFormatError when `folder` is, lies in, or holds nothing but what an unfinished run has written."""
    path = os.path.abspath(os.fspath(folder))
    inner = os.path.join(path, INNER_FOLDER)
    if _is_work(inner) and set(os.listdir(path)) <= {INNER_FOLDER, "lost+found"}:
        raise _error(path, inner)
    above, below = path, ""
    for _ in range(_DEPTH + 1):
        if below.split("/", 1)[0] in {"", _MODEL} and _is_work(above):
            raise _error(path, above)
        above, name = os.path.split(above)
        below = f"{name}/{below}".rstrip("/")


def _error(folder: str, work: str) -> UnknownFormatError:
    """The error for `folder`, which is part of the work folder `work`."""
    msg = f"{folder} is no checkpoint and no model, but what a run of merge-stream that has not ended wrote so far"
    return UnknownFormatError(
        msg, hint=f"give that run's command again: it continues, and {work} goes when its output is whole"
    )


def _is_work(folder: str) -> bool:
    return all(os.path.isfile(os.path.join(folder, name)) for name in WORK_FILES)
