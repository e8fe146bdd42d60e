"""What a person sees when memory is short."""

from __future__ import annotations

import pytest

from merge_stream import console as module
from merge_stream.console import Console
from merge_stream.engine.events import Parked, Phase, Progress, Warned


def test_parked_slabs_are_told_once_and_stand_in_the_progress_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_EVERY_SECONDS", 0.0)
    with Console(quiet=False, allowed=100_000_000) as console:
        console(Phase("merging", 1000))
        console(Parked(2, 3, "the container"))
        console(Progress(10))
        console(Parked(1, 3, "the container"))
        console(Progress(10))
        console(Parked(3, 3, "the container"))
        console(Progress(10))
    first, note, one, two, none = capsys.readouterr().err.splitlines()
    assert first == "merging: 1.00 kB"
    assert note == "note: the container is short of memory: slabs are parked until that is over"
    assert one.endswith("of 100 MB, 1 of 3 slabs parked (the container is short of memory)")
    assert two.endswith("of 100 MB, 2 of 3 slabs parked (the container is short of memory)")
    assert none.endswith("of 100 MB")


@pytest.mark.parametrize("slabs", [1, 3])
def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str], slabs: int) -> None:
    with Console(quiet=True, allowed=1) as console:
        console(Phase("merging", 1000))
        console(Parked(slabs, 3, "the host"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("fancy", [False, True])
def test_names_are_shown_as_they_are_and_never_act(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fancy: bool
) -> None:
    """Markup, emoji codes, escapes and line breaks in a name: on a terminal as in a log."""
    if fancy:
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        monkeypatch.setenv("TERM", "xterm")
    with Console(quiet=False, allowed=1) as console:
        console(Phase("[red]x[/red] \x1b[5m", 1000))
        console(Warned("[bold]name[/bold] :smile: [/] \x1b[2J\nerror: nothing is wrong"))
        console(Progress(1000))
    shown = capsys.readouterr().err
    assert r"[bold]name[/bold] :smile: [/] \x1b[2J\x0aerror: nothing is wrong" in shown
    assert "[red]x[/red] \\x1b[5m" in shown
