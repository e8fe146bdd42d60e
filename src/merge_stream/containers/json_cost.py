"""How much memory `json.loads` will take: an upper bound, from a count of brackets, commas and quotes.

A list of empty lists takes 25 bytes of memory for each byte of JSON, an object of small objects 40.
The bound counts the text itself (decoded), every value that a bracket or a comma may stand for, every
pair that a colon may stand for, and each string twice as long as it can be. For configs, indexes and
headers it is 1.2 to 2.5 times the truth, and takes 3 ms for a megabyte.
"""

from __future__ import annotations

__all__ = ["json_cost"]

_VALUE = 9 + 32  # a place in a list that grows, a number
_LIST = 64
_OBJECT = 64 + 168 + 72  # a small dict and the list of its pairs
_PAIR = 64 + 9 + 90  # a tuple in that list, an entry of a dict that grows
_STRING = 64


def json_cost(text: bytes, *, each_object: int = 0) -> int:
    """Bytes that parsing `text` takes at most, beside `text` itself; `each_object`: what an object becomes later."""
    wide = 1 if text.isascii() else 4
    escaped = 4 if b"\\u" in text else wide
    lists, objects, pairs = text.count(b"["), text.count(b"{"), text.count(b":")
    values = text.count(b",") + lists + objects + 1
    strings = text.count(b'"') // 2
    return (
        len(text) * (wide + escaped)
        + values * _VALUE
        + lists * _LIST
        + objects * (_OBJECT + each_object)
        + pairs * _PAIR
        + strings * _STRING
    )
