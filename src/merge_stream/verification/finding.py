"""What a check finds, and the folder as the checks see it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from merge_stream.containers.json_file import read_json
from merge_stream.containers.safetensors_file import SafetensorsFile, StoredTensor
from merge_stream.errors import MergeStreamError
from merge_stream.storage.local import LocalTree
from merge_stream.units import counted, format_bytes

__all__ = ["About", "Checked", "CheckedFolder", "Finding", "Severity", "listed", "some"]

Severity = Literal["error", "warning", "note"]
About = Literal["files", "config", "names", "quantized", "beside", "adapter"]

_SHOWN = 3
_JSON_LIMIT = 200_000_000


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know: `loaders` are those it concerns, with the rule in `text`; `hint` what to do."""

    severity: Severity
    about: About
    rule: str
    loaders: str
    text: str
    hint: str = ""

    def line(self) -> str:
        """For a person."""
        return f"{self.severity}: {self.text} [{self.loaders}]" + (f"\n    -> {self.hint}" if self.hint else "")


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a check; `ok` when no finding is an error."""

    out: str
    findings: tuple[Finding, ...]
    files: int = 0
    tensors: int = 0
    nbytes: int = 0
    dtypes: Mapping[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True when no engine that is known here refuses or misreads the folder."""
        return all(finding.severity != "error" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "ok": self.ok,
            "out": self.out,
            "files": self.files,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "dtypes": dict(self.dtypes),
            "findings": [asdict(finding) for finding in self.findings],
        }

    def lines(self) -> list[str]:
        """For a person."""
        types = ", ".join(f"{count} {name}" for name, count in self.dtypes.items())
        count = {kind: sum(f.severity == kind for f in self.findings) for kind in ("error", "warning", "note")}
        told = ", ".join(counted(n, kind) for kind, n in count.items() if n) or "nothing to say"
        held = f"{counted(self.tensors, 'tensor')} ({types or 'none'}) in {counted(self.files, 'file')}"
        return [
            f"{'ok' if self.ok else 'NOT OK'}: {self.out}",
            f"  {held}, {format_bytes(self.nbytes)}; {told}",
            *(f"  {finding.line()}" for finding in self.findings),
        ]


@dataclass(slots=True)
class CheckedFolder:
    """A model folder: files, links that lead nowhere, sub-folders; headers and tensors once they were read."""

    tree: LocalTree
    broken_links: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    headers: dict[str, SafetensorsFile] = field(default_factory=dict)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def json(self, name: str) -> dict[str, Any] | str | None:
        """A JSON object of the folder; None when there is no such file, a text when it cannot be read."""
        if name not in self.tree.files:
            return None
        try:
            return read_json(self.tree, name, _JSON_LIMIT)
        except MergeStreamError as error:
            return error.message
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"

    def json_value(self, name: str) -> Any:  # noqa: ANN401 - any JSON
        """Any JSON value of a small file; None when it is not there or broken."""
        try:
            return json.loads(self.tree.read(name)) if name in self.tree.files else None
        except (ValueError, OSError, MergeStreamError, RecursionError):
            return None

    @property
    def names(self) -> list[str]:
        """Files of the folder itself."""
        return [name for name in self.tree.files if "/" not in name]


def listed(names: list[str]) -> str:
    """The first names, and how many more."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def some(count: int, word: str) -> str:
    """A count with its word."""
    return f"{count} {word}{'' if count == 1 else 's'}"
