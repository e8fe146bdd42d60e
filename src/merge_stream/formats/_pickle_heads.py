"""Where the opcodes of a pickle stand that was read before: what may differ in one that is compared with it.

For `_alike_ranks`: the ends of whole entries near the start, the bytes of numbers and texts there, and the numbers
of devices anywhere. Nothing is built or run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pickletools

__all__ = ["PickleHead", "device_numbers", "head_of"]

_INTS = {"BININT": 4, "BININT1": 1, "BININT2": 2}  # -> bytes of the number
_TEXTS = {"BINUNICODE": 4, "SHORT_BINUNICODE": 1}  # -> bytes of the length
_DROPS = frozenset({"POP", "POP_MARK", "DUP"})  # torch.save writes none
_CUDA = b"X\x04\x00\x00\x00cuda"
_TEXT1, _TEXT4, _LINES = -2, -4, -1


@dataclass(frozen=True, slots=True)
class PickleHead:
    """The start of a pickle, by opcodes.

    `cuts` are positions after a whole (key, value) pair of the outermost dict, `free` is true for bytes that are the
    argument of an int or the text of a string, `texts` are the places of strings, `device` is how
    `torch.device("cuda", 3)` begins once both are in the memo.
    """

    cuts: tuple[int, ...]
    free: np.ndarray
    texts: tuple[tuple[int, int], ...]
    device: bytes


@functools.cache
def _lengths() -> list[int]:
    """Bytes of each opcode with its argument; negative where the argument tells it."""
    import pickletools

    lengths = [1] * 256
    for opcode in pickletools.opcodes:
        given = opcode.arg.n if opcode.arg else 0
        told = {-1: _LINES, -2: _TEXT1, -3: _TEXT4, -4: _TEXT4}
        lengths[ord(opcode.code)] = 1 + given if given >= 0 else told.get(given, _LINES)
    return lengths


def head_of(data: bytes) -> PickleHead:
    """The start of a pickle that was read before; it may end anywhere."""
    from pickletools import markobject

    free = np.zeros(len(data), dtype=bool)
    cuts: list[int] = []
    texts: list[tuple[int, int]] = []
    memo: dict[str, int] = {}  # of a class or text: its number in the memo
    last = ""
    stack: list[bool] = []  # true for a mark
    whole = False  # the last opcode may have ended a value of the outermost dict
    for name, arg, at, opcode in _opcodes(data):
        if name in _DROPS:  # a value that can be used later and is not in the dict: nothing after it is compared
            break
        if whole and name in _TEXTS:  # the next key
            cuts.append(at)
        if name in _INTS:
            free[at + 1 : at + 1 + _INTS[name]] = True
        elif name == "LONG1":
            free[at + 2 : at + 2 + data[at + 1]] = True
        elif name in _TEXTS:
            start = at + 1 + _TEXTS[name]
            texts.append((start, start + int.from_bytes(data[at + 1 : start], "little")))
            free[slice(*texts[-1])] = True
        if name == "BINPUT" and last:
            memo.setdefault(last, arg)
        last = str(arg) if name == "GLOBAL" or name in _TEXTS else ""
        if name == "MARK":
            stack.append(True)
        else:
            if opcode.stack_before and markobject in opcode.stack_before:
                while not stack.pop():
                    pass
                del stack[len(stack) - opcode.stack_before.index(markobject) :]
            elif opcode.stack_before:
                del stack[-len(opcode.stack_before) :]
            stack += [False] * len(opcode.stack_after)
        if name not in {"BINPUT", "LONG_BINPUT", "MEMOIZE"}:
            pairs = len(stack) >= 4 and stack[:2] == [False, True] and not any(stack[2:]) and len(stack) % 2 == 0
            whole = pairs and name in {"REDUCE", "BUILD"}
    device, kind = memo.get("torch device", -1), memo.get("cuda", -1)
    known = device >= 0 and kind >= 0
    return PickleHead(tuple(cuts), free, tuple(texts), bytes([0x68, device, 0x68, kind]) if known else b"")


def _opcodes(data: bytes) -> Iterator[tuple[str, Any, int, pickletools.OpcodeInfo]]:
    """(name, argument, position, opcode) as far as `data` goes."""
    import pickletools

    with contextlib.suppress(ValueError, IndexError):
        for opcode, arg, at in pickletools.genops(data):
            yield opcode.name, arg, at or 0, opcode


def device_numbers(data: bytes, head: PickleHead) -> np.ndarray:
    """Places of d in `torch.device("cuda", d)`, and in "cuda:d" as the location of a storage.

    The pickle was read before, so each opcode begins where the one before ends.
    """
    places: list[int] = []
    oldest = older = last = 0  # the three opcodes before
    i, stop = 0, len(data)
    device, lengths = head.device, _lengths()
    while i < stop:
        op = data[i]
        if op == 0x4B:
            if data[last] == 0x68:
                named = device and data[older:i] == device
            else:
                named = device and data[oldest:last] == device[:2] + _CUDA
            if named and _ends_call(data, i + 2):
                places.append(i + 1)
        elif op == 0x58 and data.startswith(b"cuda:", i + 5):
            end = i + 5 + data[i + 1]
            if _ends_location(data, end):
                places += range(i + 10, end)
        oldest, older, last = older, last, i
        length = lengths[op]
        if length > 0:
            i += length
        elif length == _TEXT4:
            i += 5 + int.from_bytes(data[i + 1 : i + 5], "little")
        elif length == _TEXT1:
            i += 2 + data[i + 1]
        else:  # GLOBAL, two lines
            i = data.index(b"\n", data.index(b"\n", i) + 1) + 1
    return np.array(places, dtype=np.int64)


def _after_put(data: bytes, at: int) -> int:
    """The position after a BINPUT or LONG_BINPUT, or -1."""
    length = {0x71: 2, 0x72: 5}.get(data[at], 0)
    return at + length if length else -1


def _ends_call(data: bytes, at: int) -> bool:
    """TUPLE2, put, REDUCE."""
    return data[at] == 0x86 and (after := _after_put(data, at + 1)) > 0 and data[after] == 0x52


def _ends_location(data: bytes, at: int) -> bool:
    """Put, number of elements, TUPLE, put, BINPERSID."""
    count = _after_put(data, at)
    if count < 0 or data[count] not in {0x4A, 0x4B, 0x4D}:
        return False
    end = count + _lengths()[data[count]]
    return data[end] == 0x74 and (after := _after_put(data, end + 1)) > 0 and data[after] == 0x51
