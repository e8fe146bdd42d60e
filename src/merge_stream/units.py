"""Sizes, durations, counts and names as people write them.

`G` and `GB` are 10^9 bytes, `Gi` and `GiB` 2^30 (likewise K, M, T), as the Hugging
Face hub counts; a bare number is bytes. No library parses all of these spellings
rightly (pydantic reads "50%" as 50 bytes, humanfriendly "32Gi" as 32 * 10^9).
"""

from __future__ import annotations

import re
from decimal import Decimal

from merge_stream.errors import UsageError

__all__ = ["counted", "format_bytes", "format_duration", "one_line", "parse_bytes", "parse_memory", "printable"]

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgtp]?)(?P<binary>i?)b?", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def parse_bytes(text: str) -> int:
    """Bytes of a size such as "5GB", "512M", "1.5GiB" or "4096"; UsageError otherwise."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match["binary"] and not match["unit"]):
        msg = f"{text!r} is not a size"
        raise UsageError(msg, hint="write for example 32G, 32GB (10^9), 32GiB (2^30), 500M or plain bytes")
    base = 1024 if match["binary"] else 1000
    size = int(Decimal(match["number"]) * base ** _POWER[match["unit"].lower()])
    if size <= 0:
        msg = f"{text!r} is not a size above zero"
        raise UsageError(msg)
    return size


def parse_memory(text: str, *, total: int) -> int:
    """Like `parse_bytes`, and "80%" is that share of `total` bytes."""
    text = text.strip()
    if not text.endswith("%"):
        return parse_bytes(text)
    try:
        share = float(text[:-1])
    except ValueError:
        share = -1.0
    if not 0 < share <= 100:
        msg = f"{text!r} is not a share of memory"
        raise UsageError(msg, hint="write a percentage above 0% and up to 100%, or a size such as 32G")
    return int(total * share / 100)


def format_bytes(size: float) -> str:
    """A size for people: "3.60 GB", decimal units, three significant digits."""
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if abs(value) < 999.5:
            break
        value, unit = value / 1000, larger
    if unit == "B":
        return f"{int(value)} B"
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def format_duration(seconds: float) -> str:
    """A duration for people: "0.8 s", "2 min 05 s", "3 h 20 min"."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def counted(number: int, word: str, words: str = "") -> str:
    """A number with its word: "1 file", "3 files", "2 copies" (`words` where the plural is not `word` and an s)."""
    return f"{number} {word if number == 1 else words or word + 's'}"


def printable(text: str) -> str:
    r"""The text with everything escaped that a terminal or a JSON reader could trip over; line breaks and tabs stay.

    Bytes of a file name that are no UTF-8 become "\xff", control characters and those that turn the
    direction of writing "\x1b", "\u202e".
    """
    if text.isprintable():
        return text
    return _UNPRINTABLE.sub(lambda match: _escaped(match[0]), text)


def one_line(text: str) -> str:
    r"""`printable`, and a line break becomes "\x0a": a name with one in it cannot pass for a line of ours.

    Line breaks of our own lists stay, which two spaces or a tab follow.
    """
    return _BREAK.sub(r"\\x0a", printable(text)) if "\n" in text else printable(text)


_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)
_BREAK = re.compile(r"\n(?!  |\t)")


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # how Python holds a byte of a file name that is no UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
