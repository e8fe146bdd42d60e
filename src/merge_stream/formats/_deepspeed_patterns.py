r"""Patterns of parameter names that a checkpoint brings: regular expressions of strangers, matched in bounded time.

DeepSpeed writes one pattern for each parameter (`^model\.norm\.weight$`, 0.19), Megatron-DeepSpeed a few with
`\d+` and `.*` (0.14 on); both match from the start of the name (checkpoint/ds_to_universal.py). Exact names are looked
up, so many parameters are no square. What Python's `re` may need for ever for is refused: repeated groups, counted
repeats, references, look-around, more than three places with a choice, very long patterns or names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from merge_stream.errors import CorruptCheckpointError

__all__ = ["NamePatterns"]

_EXACT = re.compile(r"\^?((?:[\w\-/]|\\[^\w])*)\$")
_PART = re.compile(r"\\.|\[\^?\]?[^\]]*\]|.", re.DOTALL)
_MOST_PATTERN = 500
_MOST_NAME = 400
_MOST_CHOICES = 3
_MOST_GENERAL = 1000
_MOST_STEPS = 10**10
_DAMAGED = "the file is damaged, or was written by an unknown DeepSpeed: copy it again"


@dataclass(slots=True)
class NamePatterns:
    """Values by pattern; `find` gives that of the first pattern that matches a name.

    CorruptCheckpointError for a pattern that is none, or that could take too long.
    """

    where: str
    exact: dict[str, object] = field(default_factory=dict)
    general: list[tuple[re.Pattern[str], int, object]] = field(default_factory=list)
    steps: int = 0

    @classmethod
    def of(cls, patterns: object, where: str) -> NamePatterns:
        """From a list of patterns, or a dict of patterns and values; nothing for None."""
        found = cls(where)
        if patterns is None:
            return found
        pairs: Iterable[tuple[object, object]]
        if isinstance(patterns, Mapping):
            pairs = patterns.items()
        elif isinstance(patterns, (list, tuple, set, frozenset)):
            pairs = ((text, True) for text in patterns)
        else:
            raise found.malformed(patterns)
        for text, value in pairs:
            found._add(text, value)
        return found

    def find(self, name: str) -> object | None:
        """The value of a pattern that matches the start of the name, or None."""
        value = self.exact.get(name)
        if value is not None or not self.general:
            return value
        for pattern, choices, value in self.general:
            self.steps += len(name) ** choices
            if len(name) > _MOST_NAME or self.steps > _MOST_STEPS:
                msg = f"{self.where}: matching the names with its parameter patterns would take too long"
                raise CorruptCheckpointError(f"{msg} ({name[:80]!r} ...)", hint=_DAMAGED)
            if pattern.match(name):
                return value
        return None

    def _add(self, text: object, value: object) -> None:
        if not isinstance(text, str) or len(text) > _MOST_PATTERN:
            raise self.malformed(text)
        if exact := _EXACT.fullmatch(text):
            self.exact.setdefault(re.sub(r"\\(.)", r"\1", exact[1]), value)
            return
        choices = _choices(text)
        if choices is None or choices > _MOST_CHOICES or len(self.general) >= _MOST_GENERAL:
            raise self.malformed(text)
        try:
            self.general.append((re.compile(text), choices, value))
        except (re.error, OverflowError, RecursionError):
            raise self.malformed(text) from None

    def malformed(self, text: object) -> CorruptCheckpointError:
        """The error for a pattern that cannot be used."""
        msg = f"{self.where}: a parameter pattern is malformed, or could take for ever: {repr(text)[:80]}"
        return CorruptCheckpointError(msg, hint=_DAMAGED)


def _choices(text: str) -> int | None:
    """At how many places a matcher has a choice; None for what is not taken."""
    count = 0
    before = ""
    parts = _PART.findall(text)
    for k, part in enumerate(parts):
        repeat = part in {"*", "+", "?"}
        if before == "(" and part == "?":
            if parts[k + 1 : k + 2] != [":"]:
                return None
        elif (repeat and before in {")", "*", "+", "?"}) or part == "{" or re.fullmatch(r"\\[1-9]", part):
            return None
        elif repeat or part == "|":
            count += 1
        before = part
    return count
