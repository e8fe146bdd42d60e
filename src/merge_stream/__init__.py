"""merge-stream: sharded trainer checkpoints to one Hugging Face model, on a CPU box, within a memory bound.

The public functions are those of `merge_stream.api`; they are imported on first use, so
that `import merge_stream` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from merge_stream.api import Job, Staged, execute, finalize, make_plan, merge, open_checkpoint, push, verify
    from merge_stream.errors import MergeStreamError
    from merge_stream.options import MergeOptions, OpenOptions
    from merge_stream.output.hub import PushTarget
    from merge_stream.report import Report
    from merge_stream.through_store import finalize_store, stage
    from merge_stream.verification.check import check_folder

__version__ = "0.1.0"
__all__ = [
    "Job",
    "MergeOptions",
    "MergeStreamError",
    "OpenOptions",
    "PushTarget",
    "Report",
    "Staged",
    "__version__",
    "check_folder",
    "execute",
    "finalize",
    "finalize_store",
    "make_plan",
    "merge",
    "open_checkpoint",
    "push",
    "stage",
    "verify",
]

_HOME = {
    "MergeOptions": "options",
    "OpenOptions": "options",
    "MergeStreamError": "errors",
    "PushTarget": "output.hub",
    "Report": "report",
    "check_folder": "verification.check",
    "finalize_store": "through_store",
    "stage": "through_store",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the module holds
    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME.get(name, 'api')}"), name)
