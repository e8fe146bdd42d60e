"""The frame around every command: results on stdout, errors as words, signals, progress."""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import resource
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from merge_stream.errors import DiskSpaceError, InterruptedRunError, MergeStreamError, ResourceError
from merge_stream.units import format_bytes, one_line, printable

if TYPE_CHECKING:
    from merge_stream.console import Console
    from merge_stream.engine.executor import StopFlag

__all__ = ["exit_code_of", "full_disk", "running", "show"]


def exit_code_of(app: click.Command, argv: Sequence[str]) -> int:
    """Run a command line; returns its exit code. The last place where an exception can arrive."""
    as_json = "--json" in argv
    try:
        _require_address_space()
        app.main(args=list(argv), prog_name="merge-stream", standalone_mode=False)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        sys.stderr.write(error.format_message() + "\n")
        return 2
    except click.UsageError as error:
        _complain(error.format_message(), _usage_hint(error, argv), 2, as_json)
        return 2
    except click.Abort:
        return 130
    except MergeStreamError as error:
        _complain(error.message, error.hint, error.exit_code, as_json)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        _complain("interrupted; nothing was written", "", 130, as_json)
        return 130
    except SystemExit as error:
        return int(error.code or 0)
    except Exception as error:  # noqa: BLE001 - the last two kinds: what the system refuses, and bugs
        if _is_out_of_memory(error):
            _complain("the system gave no more memory", _memory_hint(), 4, as_json)
            return 4
        if isinstance(error, OSError):
            where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, (str, bytes)) else ""
            _complain(f"{where}{error.strerror or error}", _os_hint(error), 1, as_json)
            return 1
        # no promise covers it: shown whole, and still one JSON object
        traceback.print_exc()
        _complain("merge-stream failed in a way it should not", "please report the lines above as a bug", 1, as_json)
        return 1
    return 0


@contextmanager
def running(given: dict[str, Any], allowed: int) -> Iterator[tuple[Console, StopFlag]]:
    """Progress and signal handlers around one command's work."""
    from merge_stream.console import Console
    from merge_stream.engine.executor import StopFlag

    stop = StopFlag()

    def on_signal(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
        stop.set(signal.Signals(number).name)
        if not stop.working:
            msg = f"stopped by {signal.Signals(number).name}"
            raise InterruptedRunError(msg, hint="what was written before is kept; the same command continues it")

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with Console(quiet=given["quiet"], allowed=allowed) as console:
            yield console, stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def full_disk(out: str, *, smaller: str = ", or lower --max-shard-size") -> Iterator[None]:
    """Tell that the disk of `out` is full, or a limit is met, as what it is; `smaller` is how files become so."""
    hints = {
        errno.ENOSPC: "free some space; the same command continues where it stopped",
        errno.EDQUOT: "the quota is used up: free some of it; the same command continues where it stopped",
        errno.EFBIG: "raise the limit of file sizes (`ulimit -f`), or choose a file system that allows larger files"
        f"{smaller}; with the limit raised, the same command continues where it stopped",
    }
    try:
        yield
    except OSError as error:
        if error.errno not in hints:
            raise
        msg = f"{out} could not be written: {(error.strerror or str(error)).lower()}"
        raise DiskSpaceError(msg, hint=hints[error.errno]) from error


def show(given: dict[str, Any], value: dict[str, Any], lines: Sequence[str]) -> None:
    """The result: one JSON object with --json, else lines, none with -q."""
    if given["as_json"]:
        _print_json(value)
    elif not given["quiet"]:
        _print_lines(lines)


def _print_json(value: dict[str, Any]) -> None:
    click.echo(json.dumps(_in_json(value), indent=1, allow_nan=False))


def _in_json(value: object) -> object:
    """The value with what JSON cannot say put into words: "NaN", "Infinity", and bytes of names that are no UTF-8."""
    if isinstance(value, float):
        return value if math.isfinite(value) else "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    if isinstance(value, str):
        return printable(value) if any("\ud800" <= c <= "\udfff" for c in value) else value
    if isinstance(value, Mapping):
        return {_in_json(key): _in_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_in_json(item) for item in value]
    return value


def _print_lines(lines: Sequence[str]) -> None:
    click.echo("\n".join(map(one_line, lines)))


def _usage_hint(error: click.UsageError, argv: Sequence[str]) -> str:
    ctx = error.ctx
    command = ctx.command_path if ctx is not None else "merge-stream"
    return f"see `{command} --help`" if argv else "see `merge-stream --help`"


_LEAST_ADDRESS_SPACE = 100 << 20
"""Bytes that numpy and its BLAS map when they are loaded; without them the BLAS ends the process by itself."""


def _require_address_space() -> None:
    """ResourceError when a limit of the address space (`ulimit -v`) leaves no room to load the packages."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return
    try:
        mmap.mmap(-1, _LEAST_ADDRESS_SPACE).close()  # not touched, so it takes no memory
    except (OSError, MemoryError):
        msg = f"the limit of the process's address space (ulimit -v), {format_bytes(limit)}, is too small to start"
        raise ResourceError(msg, hint=_memory_hint()) from None


def _is_out_of_memory(error: Exception) -> bool:
    """True for all the forms in which a refused allocation arrives, also while a package is loaded."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    known: BaseException | None = error
    while known is not None:
        if any(words in str(known) for words in _REFUSED_MEMORY):
            return True
        known = known.__cause__ or known.__context__
    return False


_REFUSED_MEMORY = (
    "can't start new thread",
    "failed to map segment",
    "cannot allocate memory",
    "Cannot allocate memory",
)


def _memory_hint() -> str:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return "lower --max-mem, give --workers 1, or end other programs"
    return (
        f"raise the limit of the process's address space (ulimit -v, in kB; now {limit >> 10}, 400000 is enough for "
        "most models), or lower --max-mem and give --workers 1"
    )


def _os_hint(error: OSError) -> str:
    hints = {
        errno.EACCES: "check the permissions of that file for this user",
        errno.EPERM: "check the permissions of that file for this user",
        errno.ENOSPC: "free some space; the same command continues where it stopped",
        errno.EDQUOT: "the quota is used up; the same command continues where it stopped",
        errno.EROFS: "choose an OUT on a disk that can be written",
        errno.EIO: "the disk or its connection failed; the same command continues where it stopped",
    }
    return hints.get(error.errno or 0, "")


def _complain(message: str, hint: str, code: int, as_json: bool) -> None:
    sys.stderr.write(f"error: {one_line(message)}\n" + (f"hint: {one_line(hint)}\n" if hint else ""))
    if as_json:
        _print_json({"ok": False, "error": message, "hint": hint, "exit_code": code})
