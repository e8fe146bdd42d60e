"""The exceptions of merge-stream: one class for one broken promise.

    MergeStreamError                     exit 1
    ├── UsageError                       exit 2   options that contradict each other
    ├── OutputExistsError                exit 1   OUT is there and --overwrite was not given
    ├── OutputBusyError                  exit 1   another run holds OUT
    ├── PlanMismatchError                exit 1   the partial folder belongs to another plan
    ├── UnsupportedError                 exit 1   understood, and refused with a reason
    ├── HubError                         exit 1   the Hub cannot be reached, or refuses
    ├── VerificationError                exit 3   the output differs from what it should be
    ├── ResourceError                    exit 4
    │   ├── MemoryLimitTooSmallError              --max-mem cannot hold the smallest plan
    │   └── DiskSpaceError                        the output does not fit on its disk
    ├── CheckpointError                  exit 5
    │   ├── UnknownFormatError                    nothing in the folder looks like a checkpoint
    │   ├── AmbiguousCheckpointError              more than one checkpoint could be meant
    │   ├── IncompleteShardsError                 files, ranks or regions are missing
    │   ├── CorruptCheckpointError                a file contradicts itself or another file
    │   │   ├── TruncatedFileError                a file ends before its content does
    │   │   └── UnsafePickleError                 a pickle asks for more than data
    │   └── SourceChangedError                    a source file changed during the run
    └── InterruptedRunError              exit 130 a signal ended the run; it can be resumed

Every message says what is wrong, where, what was wanted and what was found; `hint`
says what to do. Only the command line prints them.
"""

from __future__ import annotations

__all__ = [
    "AmbiguousCheckpointError",
    "CheckpointError",
    "CorruptCheckpointError",
    "DiskSpaceError",
    "HubError",
    "IncompleteShardsError",
    "InterruptedRunError",
    "MemoryLimitTooSmallError",
    "MergeStreamError",
    "OutputBusyError",
    "OutputExistsError",
    "PlanMismatchError",
    "ResourceError",
    "SourceChangedError",
    "TruncatedFileError",
    "UnknownFormatError",
    "UnsafePickleError",
    "UnsupportedError",
    "UsageError",
    "VerificationError",
]


class MergeStreamError(Exception):
    """Base of all errors this package raises on purpose.

    `message` is the sentence for the user, `hint` (may be empty) what to do about it.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UsageError(MergeStreamError):
    """Options or arguments that cannot be meant together."""

    exit_code = 2


class OutputExistsError(MergeStreamError):
    """OUT holds something, and `--overwrite` was not given."""


class OutputBusyError(MergeStreamError):
    """Another run holds the lock of OUT."""


class PlanMismatchError(MergeStreamError):
    """The partial folder was made by a plan with another fingerprint."""


class UnsupportedError(MergeStreamError):
    """The input was understood and cannot be converted; the message says why."""


class HubError(MergeStreamError):
    """The Hub cannot be reached, or refuses; what is on disk is whole."""


class VerificationError(MergeStreamError):
    """A written or given model differs from what it should be."""

    exit_code = 3


class ResourceError(MergeStreamError):
    """Memory or disk does not suffice."""

    exit_code = 4


class MemoryLimitTooSmallError(ResourceError):
    """`--max-mem` is below what the smallest plan needs."""


class DiskSpaceError(ResourceError):
    """The target disk has less free space than the output needs."""


class CheckpointError(MergeStreamError):
    """The input is incomplete, corrupt or not what it was said to be."""

    exit_code = 5


class UnknownFormatError(CheckpointError):
    """No format recognises the folder."""


class AmbiguousCheckpointError(CheckpointError):
    """Several checkpoints could be meant."""


class IncompleteShardsError(CheckpointError):
    """Files, ranks or regions of a tensor are missing."""


class CorruptCheckpointError(CheckpointError):
    """A file contradicts itself or another file of the checkpoint."""


class TruncatedFileError(CorruptCheckpointError):
    """A file ends before its content does."""


class UnsafePickleError(CorruptCheckpointError):
    """A pickle asks for code, or is built to exhaust memory or time."""


class SourceChangedError(CheckpointError):
    """A source file is not the one that was planned with."""


class InterruptedRunError(MergeStreamError):
    """SIGINT or SIGTERM ended the run; the partial folder can be resumed."""

    exit_code = 130
