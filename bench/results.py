"""What a bench measured, group by group, in one JSON file: an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
import pathlib
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Results"]

_ROOT = pathlib.Path(__file__).resolve().parent.parent


@dataclass(slots=True)
class Results:
    """Groups by name, each with the day and the commit of its run; written to `path` (unless None) after each."""

    path: pathlib.Path | None
    machine: Mapping[str, object]
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, path: pathlib.Path | None, machine: Mapping[str, object]) -> Results:
        """With what `path` holds already, unless it is of another machine."""
        found = cls(path, machine)
        if path is not None and path.exists():
            held = json.loads(path.read_text())
            if held.get("machine") == found._lasting():
                found.groups = held["groups"]
        return found

    def add(self, name: str, measured: Mapping[str, Any]) -> None:
        """A group that ended; in the place of an earlier run of it."""
        self.groups[name] = {"date": self.machine["date"], "commit": _commit(), **measured}
        if self.path is not None:
            document = {"machine": self._lasting(), "groups": self.groups}
            self.path.write_text(json.dumps(document, indent=1) + "\n")

    def document(self, order: Iterable[str]) -> dict[str, Any]:
        """For `tables.markdown`: the groups there are, in that order, as one."""
        names = [name for name in order if name in self.groups]
        groups = [self.groups[name] for name in names]
        when = {key: ", ".join(dict.fromkeys(str(group[key]) for group in groups)) for key in ("date", "commit")}
        return {
            "groups": names,
            "machine": {**self.machine, **when, "seconds": sum(group["seconds"] for group in groups)},
            "imports": groups[-1]["imports"],
            "faults": [fault for group in groups for fault in group["faults"]],
            "experiments": [experiment for group in groups for experiment in group["experiments"]],
        }

    def _lasting(self) -> dict[str, object]:
        return {key: value for key, value in self.machine.items() if key != "date"}


def _commit() -> str:
    """Of the sources that were measured."""
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.stdout.strip() or time.strftime("not in git, %H:%M")
