"""The Markdown of a comparison, and where it stands in a page."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.measure import Spread

__all__ = ["markdown", "replace_between_markers"]

_BEGIN = "<!-- {writer} writes from here -->"
_END = "<!-- to here -->"


def markdown(result: Mapping[str, Any]) -> str:
    """Machine, one table for each experiment, the ratios below it."""
    return "\n".join(_lines(result))


def replace_between_markers(page: pathlib.Path, text: str, *, writer: str = "bench.compare") -> None:
    """Put `text` between the markers of `writer` in `page`, or at its end when it has none."""
    old = page.read_text() if page.exists() else ""
    begin = _BEGIN.format(writer=writer)
    if begin in old and _END in old.split(begin, 1)[1]:
        before, rest = old.split(begin, 1)
        after = rest.split(_END, 1)[1]
    else:
        before, after = old.rstrip() + "\n\n", "\n"
    page.write_text(f"{before}{begin}\n\n{text}\n{_END}{after}")


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    yield "| machine | |"
    yield "|---|---|"
    for key, value in result["machine"].items():
        yield f"| {key} | {value} |"
    yield f"| resident after imports, MB | {_imports(result['imports'])} |"
    yield f"| outputs of all ways | {'equal, byte for byte' if not result['faults'] else '**see below**'} |"
    for fault in result["faults"]:
        yield f"\n**{fault.splitlines()[0]}**"
    for experiment in result["experiments"]:
        yield ""
        yield f"### {experiment['title']}, {experiment['cache']}"
        yield ""
        yield f"{experiment['about']}. Smallest / median / largest of {_rounds(experiment)} rounds."
        yield ""
        yield "| way | wall, s | CPU, s | peak memory, MB |"
        yield "|---|---|---|---|"
        for name, runs in experiment["runs"].items():
            memory = Spread.of(r["tree"] / 1e6 for r in runs)
            yield f"| {name} | {_spread(runs, 'wall')} | {_spread(runs, 'cpu')} | {memory.text(0)} |"
        yield ""
        yield "| ratio | smallest / median / largest | goal | |"
        yield "|---|---|---|---|"
        for ratio in experiment["ratios"]:
            goal = ratio["goal"]
            verdict = "" if goal is None else ("met" if ratio["median"] <= goal else "**missed**")
            numbers = Spread(ratio["min"], ratio["median"], ratio["max"]).text(3)
            yield f"| {ratio['title']} | {numbers} | {'' if goal is None else f'{goal:.3f}'} | {verdict} |"


def _spread(runs: Sequence[Mapping[str, float]], key: str) -> str:
    return Spread.of(r[key] for r in runs).text(2)


def _rounds(experiment: Mapping[str, Any]) -> int:
    return len(next(iter(experiment["runs"].values())))


def _imports(imports: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {peak / 1e6:.0f}" for name, peak in imports.items())
