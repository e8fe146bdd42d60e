"""The five steps of a merge, and `merge`, which takes them in a row. Read this file first.

    open_checkpoint(paths)   -> Catalog   which trainer wrote this, and what does it hold?
    make_plan(catalog)       -> Job       what is written, where does each byte come from?
    execute(job, out)        -> Staged    move the bytes, within the memory bound
    finalize(staged)         -> Report    check, add config and side files, make it visible
    verify(out, against)     -> Verdict   is a model equal to a reference or a checkpoint?

`inspect` on the command line stops after the first, `plan` after the second.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from merge_stream.engine.events import Observer, Silent
from merge_stream.engine.executor import StopFlag
from merge_stream.errors import VerificationError
from merge_stream.job import Job, make_plan
from merge_stream.opening import open_checkpoint
from merge_stream.options import MergeOptions, OpenOptions
from merge_stream.report import Report
from merge_stream.steps import Staged, execute, finalize, merge_directly
from merge_stream.verification.verdict import verify

if TYPE_CHECKING:
    from merge_stream.output.hub import Pushed, PushTarget

__all__ = [
    "Job",
    "Staged",
    "execute",
    "finalize",
    "make_plan",
    "merge",
    "open_checkpoint",
    "push",
    "verify",
]


def merge(
    checkpoint: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    options: MergeOptions | None = None,
    *,
    opening: OpenOptions | None = None,
    observer: Observer | None = None,
    stop: StopFlag | None = None,
) -> Report:
    """Merge a sharded checkpoint (a folder, or node-local parts of one) into the Hugging Face folder `out`."""
    paths = [checkpoint] if isinstance(checkpoint, (str, os.PathLike)) else list(checkpoint)
    options = options or MergeOptions()
    observer = observer or Silent()
    opening = opening or OpenOptions()
    if options.staging == "zarr":
        from merge_stream.through_store import merge_through_store

        return merge_through_store(paths, out, options, opening=opening, observer=observer, stop=stop)
    return merge_directly(paths, out, options, opening=opening, observer=observer, stop=stop)


def push(out: str | os.PathLike[str], target: PushTarget, *, quiet: bool = False) -> Pushed:
    """Upload the finished model folder `out`; VerificationError when its files do not make a whole model.

    HubError tells how to go on when the upload fails; `out` is never changed.
    """
    from merge_stream.output.hub import push_folder
    from merge_stream.verification.check import check_folder

    found = check_folder(out)
    broken = [finding for finding in found.findings if finding.severity == "error" and finding.about == "files"]
    if broken:
        msg = f"{os.fspath(out)} is no whole model: {broken[0].text}"
        raise VerificationError(msg, hint="`merge-stream check OUT` tells everything; nothing was uploaded")
    return push_folder(out, target, quiet=quiet)
