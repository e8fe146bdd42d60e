"""`merge-stream bench`: what `merge_stream.benchmark` measures, on the command line."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from merge_stream import cli_options as opt
from merge_stream.cli_frame import show
from merge_stream.errors import InterruptedRunError, UsageError

__all__ = ["bench"]


@click.command(short_help="Measure this machine with a synthetic checkpoint.")
@click.option("--shape", default="llama-1b", show_default=True, metavar="NAME", help="Model whose shapes it has.")
@click.option("--ranks", type=click.IntRange(1, 4096), default=8, show_default=True, help="Ranks that wrote it.")
@click.option(
    "--sharding",
    type=click.Choice(["fsdp2", "shard1", "hsdp", "tp", "dcp"]),
    default="fsdp2",
    show_default=True,
    help="How it is cut.",
)
@click.option("--scale", type=click.FloatRange(0.001, 100), default=1.0, help="Layers and vocabulary times this.")
@click.option("--dtype", type=click.Choice(["keep", "bf16", "fp16"]), default="bf16", show_default=True)
@click.option("--max-mem", default="2G", show_default=True, metavar="SIZE", help="Of each merge.")
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True)
@click.option(
    "--work", type=opt.WORDS, metavar="DIR", help="Folder on the disk to measure; default: the temporary one."
)
@click.option("--baseline", type=opt.WORDS, metavar="FILE", help="Exit 1 when this run is worse than the ratios there.")
@click.option("--tolerance", type=click.FloatRange(min=1), default=1.25, show_default=True, help="How much worse.")
@click.option("--write-baseline", type=opt.WORDS, metavar="FILE", help="Write the ratios of this run.")
@opt.output
def bench(**given: Any) -> None:  # noqa: ANN401
    """Make a synthetic sharded checkpoint, merge it, and compare with the floor of the disk.

    Exit code 1 when a ratio is worse than --baseline allows, 3 when a value is wrong.
    """
    import pathlib
    import tempfile

    from merge_stream.benchmark.baseline import compare_with, load, require_writable
    from merge_stream.benchmark.run import Bench, measure, require_possible
    from merge_stream.benchmark.shapes import SHAPES
    from merge_stream.console import Console

    if given["shape"] not in SHAPES:
        msg = f"there is no shape {given['shape']!r}"
        raise UsageError(msg, hint=f"choose one of: {', '.join(SHAPES)}")
    work = pathlib.Path(given["work"] or tempfile.gettempdir())
    if not work.is_dir():
        msg = f"--work {work} is no folder"
        raise UsageError(msg, hint="make it, or name one on the disk to be measured")
    words = ("shape", "ranks", "scale", "dtype", "max_mem", "rounds")
    wanted = Bench(layout=given["sharding"], **{word: given[word] for word in words})
    before = load(given["baseline"], wanted) if given["baseline"] else None
    if given["write_baseline"]:
        require_writable(given["write_baseline"], given["baseline"])
    require_possible(wanted, work)
    with (
        _ended_by_signals(),
        Console(quiet=given["quiet"], allowed=0) as console,
        tempfile.TemporaryDirectory(prefix="merge-stream-bench-", dir=work) as folder,
    ):
        found = measure(wanted, pathlib.Path(folder), console.line)
    worse = compare_with(before, found, given["tolerance"]) if before is not None else []
    given["quiet"] = given["quiet"] and not worse
    show(given, {"ok": not worse, **found.as_json(), "worse": worse}, [*found.lines(), *worse])
    if given["write_baseline"]:
        pathlib.Path(given["write_baseline"]).write_text(json.dumps(found.as_json(), indent=2) + "\n", encoding="utf-8")
    if worse:
        raise SystemExit(1)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A signal becomes an error, once: the folder is removed on the way out, and nothing may come between."""

    def on_signal(number: int, _frame: object) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        msg = f"stopped by {signal.Signals(number).name}"
        raise InterruptedRunError(msg, hint="what it had made is removed; the same command begins anew")

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
