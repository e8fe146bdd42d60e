"""The frame around every command: results on stdout, errors as words, signals, progress."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from merge_stream.errors import DiskSpaceError, InterruptedRunError, MergeStreamError

if TYPE_CHECKING:
    from merge_stream.console import Console
    from merge_stream.engine.executor import StopFlag

__all__ = ["exit_code_of", "full_disk", "running", "show"]


def exit_code_of(app: click.Command, argv: Sequence[str]) -> int:
    """Run a command line; returns its exit code. The last place where an exception can arrive."""
    as_json = "--json" in argv
    try:
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
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _complain(f"{where}{error.strerror or error}", _os_hint(error), 1, as_json)
        return 1
    except MemoryError:
        _complain(
            "the system gave no more memory",
            "lower --max-mem, or raise the limit of the process (ulimit -v)",
            4,
            as_json,
        )
        return 4
    except Exception:  # noqa: BLE001 - no promise covers it: shown whole, and still one JSON object
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
def full_disk(out: str) -> Iterator[None]:
    """Tell that the disk of OUT is full, or a limit is met, as what it is."""
    hints = {
        errno.ENOSPC: "free some space; the same command continues where it stopped",
        errno.EDQUOT: "the quota is used up: free some of it; the same command continues where it stopped",
        errno.EFBIG: "raise the limit of file sizes (`ulimit -f`), choose a file system that allows larger files, or "
        "lower --max-shard-size; with the limit raised, the same command continues where it stopped",
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
    click.echo(json.dumps(value, indent=1))


def _print_lines(lines: Sequence[str]) -> None:
    click.echo("\n".join(lines))


def _usage_hint(error: click.UsageError, argv: Sequence[str]) -> str:
    ctx = error.ctx
    command = ctx.command_path if ctx is not None else "merge-stream"
    return f"see `{command} --help`" if argv else "see `merge-stream --help`"


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
    sys.stderr.write(f"error: {message}\n" + (f"hint: {hint}\n" if hint else ""))
    if as_json:
        _print_json({"ok": False, "error": message, "hint": hint, "exit_code": code})
