"""Which command the words of a command line mean: one of them, else `merge`."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence

import click

from merge_stream.errors import UsageError

__all__ = ["Commands"]


class Commands(click.Group):
    """A first word that is no command means `merge`; options may stand before the word."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The command goes first, and is `merge` where none is named."""
        if args and args[0] not in {"-h", "--help", "--version"}:
            at = self._first_word(args)
            word = args[at] if at is not None else ""
            if at is not None and word in self.commands:
                args = [word, *args[:at], *args[at + 1 :]]
            else:
                _refuse_near_miss(word, self.commands)
                args = ["merge", *args]
        return super().parse_args(ctx, args)

    def _first_word(self, args: Sequence[str]) -> int | None:
        """Index of the first argument that is neither an option nor the value of one."""
        valued = {
            name
            for command in self.commands.values()
            for option in command.params
            if isinstance(option, click.Option) and not option.is_flag
            for name in option.opts
        }
        skip = False
        for at, text in enumerate(args):
            if skip or (text.startswith("-") and text != "--"):
                skip = not skip and text.replace("_", "-") in valued
            else:
                return at + 1 if text == "--" and at + 1 < len(args) else at
        return None


def _refuse_near_miss(word: str, commands: Iterable[str]) -> None:
    """UsageError when `word` is no path but much like a command."""
    if not word or os.path.lexists(word) or os.sep in word:
        return
    close = difflib.get_close_matches(word, [*commands, "help", "version"], n=1)
    if close:
        meant = f"--{close[0]}" if close[0] in {"help", "version"} else close[0]
        msg = f"there is no command `{word}`, and no folder of that name"
        raise UsageError(msg, hint=f"did you mean `merge-stream {meant}`? A merge is: merge-stream CKPT OUT")
