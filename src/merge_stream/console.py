"""What a person sees while a run goes: progress on a terminal, plain lines elsewhere, nothing with -q.

All of it goes to stderr; stdout is for results. On a terminal rich draws a bar; in a log a
line appears when a phase begins and every ten seconds.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Self

from merge_stream.engine.events import Event, Noted, Parked, Phase, Progress, Warned
from merge_stream.engine.memory import resident
from merge_stream.units import format_bytes, format_duration, one_line

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

__all__ = ["Console"]

_EVERY_SECONDS = 10.0
_REFRESH_SECONDS = 0.2


class Console:
    """An observer that tells a person; use as a context manager. `allowed` bytes are shown beside those in use."""

    def __init__(self, *, quiet: bool, allowed: int) -> None:
        self._quiet = quiet
        self._allowed = allowed
        self._lock = threading.Lock()
        self._phase = Phase("")
        self._done = 0
        self._fresh = 0
        self._began = self._told = time.monotonic()
        self._parked = ""
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._fancy = not quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def __enter__(self) -> Self:
        if self._fancy:
            import rich.progress  # noqa: F401 - now, so that its memory counts before the bound is fitted
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_bar()

    def __call__(self, event: Event) -> None:
        """Show an event."""
        with self._lock:
            if isinstance(event, Noted):
                self.line(f"note: {event.text}")
            elif isinstance(event, Warned):
                self.line(f"warning: {event.text}")
            elif isinstance(event, Parked):
                self._park(event)
            elif isinstance(event, Phase):
                self._begin(event)
            else:
                self._advance(event)

    def line(self, text: str) -> None:
        """A line on stderr (none when quiet or empty)."""
        if text and not self._quiet:
            text = one_line(text)
            if self._bar is not None:
                self._bar.console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)
            else:
                sys.stderr.write(text + "\n")
                sys.stderr.flush()

    def _park(self, event: Parked) -> None:
        if not self._parked:
            self.line(f"note: {event.why} is short of memory: slabs are parked until that is over")
        idle = event.slots - event.slabs
        self._parked = f", {idle} of {event.slots} slabs parked ({event.why} is short of memory)" if idle else ""

    def _begin(self, phase: Phase) -> None:
        self._stop_bar()
        self._phase, self._done, self._fresh = phase, 0, 0
        self._began = self._told = time.monotonic()
        if self._fancy and phase.total:
            self._start_bar()
        elif phase.total:
            self.line(f"{phase.name}: {format_bytes(phase.total)}")
        else:
            self.line(phase.name)

    def _advance(self, event: Progress) -> None:
        self._done += event.nbytes
        self._fresh += 0 if event.resumed else event.nbytes
        now = time.monotonic()
        if self._bar is not None and self._task is not None:
            if now - self._told >= _REFRESH_SECONDS or self._done >= self._phase.total:
                self._told = now
                self._bar.update(self._task, completed=self._done, note=self._note(now))
        elif now - self._told >= _EVERY_SECONDS:
            self._told = now
            share = f"{100 * self._done / self._phase.total:.0f} % " if self._phase.total else ""
            self.line(f"{self._phase.name}: {share}{format_bytes(self._done)}, {self._note(now)}")

    def _note(self, now: float) -> str:
        seconds = max(now - self._began, 1e-6)
        rate = self._fresh / seconds
        left = (self._phase.total - self._done) / rate if rate else 0.0
        memory = f"memory {format_bytes(resident())} of {format_bytes(self._allowed)}"
        return f"{format_bytes(rate)}/s, {format_duration(left)} left, {memory}{self._parked}"

    def _start_bar(self) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, DownloadColumn, TextColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            DownloadColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=RichConsole(stderr=True),
            auto_refresh=False,
        )
        self._task = self._bar.add_task(one_line(self._phase.name), total=self._phase.total, note="")
        self._bar.start()

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.refresh()
            self._bar.stop()
            self._bar = self._task = None
