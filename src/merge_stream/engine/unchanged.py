"""Source files stay the ones that were planned with, or the run ends with the name of the one that changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from merge_stream.errors import CorruptCheckpointError, SourceChangedError, VerificationError
from merge_stream.planning.plan import Plan
from merge_stream.storage.local import time_of_change

__all__ = ["sources_unchanged"]


@contextmanager
def sources_unchanged(plan: Plan) -> Iterator[None]:
    """SourceChangedError after the block when a source file of `plan` is gone or has another size or time of change.

    Then errors inside the block (a file that ended early, values that differ) are told as what they come from.
    """
    try:
        yield
    except (OSError, CorruptCheckpointError, VerificationError) as error:
        _check(plan, error)
        raise
    _check(plan, None)


def _check(plan: Plan, cause: Exception | None) -> None:
    for file in plan.files:
        try:
            info = os.stat(file.path)
        except OSError as error:
            msg = f"{file.name} cannot be seen any more while it is merged ({error.strerror})"
            hint = "bring the file or its disk back; the same command continues if the file is the same as before"
            raise SourceChangedError(msg, hint=hint) from error
        if (info.st_size, time_of_change(info)) != (file.nbytes, file.mtime_ns):
            msg = f"{file.name} changed while it was merged (size or time of change differ from the start)"
            raise SourceChangedError(msg, hint="let the trainer finish, then run again with --restart") from cause
