"""How much memory the C unpickler will take for a pickle: an upper bound, before it sees a byte.

Two bounds, in bytes of CPython 3.11 to 3.14 on 64 bits (object, garbage collector's header, rounding to
16, growth of lists, dicts and sets, and the stack and memo of the unpickler):

    rough   every byte counts as if it were the opcode of its value: a histogram, 3 ms for a megabyte.
            Two to three times the truth for honest files, and mostly all that is needed
    exact   opcode by opcode (about 0.2 us each), made only where the rough bound does not fit;
            1.0 to 1.5 times the truth

Neither frees what POP removes. Costs that neither can see (how many elements a REDUCE copies, gaps in the
memo, sets, classes) are told by the scan of `pickle_guard`, which knows them.
"""

from __future__ import annotations

import numpy as np

__all__ = ["CLASS_BYTES", "COPIED_WEIGHT", "LARGE_PAIR_BYTES", "SET_MEMBER_BYTES", "PickleCost"]

CLASS_BYTES = 1600
"""A recorder class with its names."""
SET_MEMBER_BYTES = 144
"""A member of a set, just after the set has grown."""
LARGE_PAIR_BYTES = 90
"""An entry of a large dict, while it grows."""
COPIED_WEIGHT = 15
"""Arguments of a call up to this weight are in the cost of the call."""

_STACK = 9
_SHARE = 45  # of a dict entry, for each of key and value
_PAIR = 70
_STEP = 1 << 16


def _table(costs: dict[str, int]) -> list[int]:
    table = [0] * 256
    for codes, cost in costs.items():
        for code in codes:
            table[ord(code)] = cost
    return table


# what an opcode costs by itself; the second table has those with elements after a mark: cost of each element
_COST = _table({
    "MJG": 32, "]": 64, "}": 64, "\x8f": 240,
    "X\x8c\x8dUT": 80, "BC\x8e\x96": 64, "\x8a\x8b": 48, "\x85": 48, "\x86\x87": 64,
    "t": 56, "R\x81\x92o": 200, "Q": 220, "qr\x94": 24, "s": 170, "u": 100, "a": 64, "e": 64,
    "l": 64, "d": 340, "\x91": 240,
})  # fmt: skip
_ELEMENT = _table({"t": 8, "e": 10, "l": 10, "o": 8, "\x91": 0, "\x90": 0, "1": 0, "u": _PAIR // 2, "d": _PAIR // 2})
_MARKED = frozenset(map(ord, "telo1ud\x90\x91"))
_LENGTH = _table({"K\x80qh": 2, "M": 3, "Jrj": 5, "G\x95": 9})
_COUNTED = _table({"XTB\x8b": 4, "\x8cUC\x8a": 1, "\x8d\x8e\x96": 8})
_DEPTH = _table({
    "N\x88\x89]})\x8fKMJGXTB\x8b\x8cUC\x8a\x8d\x8e\x96hj2c": 1, "\x860\x81Rba\x93": -1, "\x87s\x92": -2,
})  # fmt: skip
_PUSHES = frozenset(code for code in range(256) if _DEPTH[code] == 1)
_ROUGH = np.array(
    [4.0 + _COST[code] + (_STACK + _SHARE) * (code in _PUSHES or code in _MARKED) for code in range(256)],
    dtype=np.float64,
)


class PickleCost:
    """Bound of one pickle that is scanned piece by piece; positions given are those of opcodes."""

    def __init__(self, start: int) -> None:
        self.start = start
        self._rough_at = start
        self._rough = 0.0
        self._exact_at = start
        self._exact = 0
        self._depth = self._deepest = self._widest = 0
        self._marks: list[int] = []

    def rough(self, data: bytes | bytearray, stop: int) -> int:
        """Bound for what the opcodes up to `stop` build."""
        for at in range(self._rough_at, min(stop, len(data)), _STEP):
            count = min(_STEP, stop - at, len(data) - at)
            counts = np.bincount(np.frombuffer(data, np.uint8, count, at), minlength=256)
            self._rough += float(counts @ _ROUGH)
        self._rough += 4.0 * max(0, stop - max(len(data), self._rough_at))  # of a long value, not yet read
        self._rough_at = stop
        return int(self._rough)

    def exact(self, data: bytes | bytearray, stop: int) -> int:
        """The closer bound; `data` must hold the opcodes up to `stop`, and have passed the guard."""
        cost, at, depth, marks = self._exact, self._exact_at, self._depth, self._marks
        deepest, widest = self._deepest, self._widest
        while at < stop:
            op = data[at]
            cost += _COST[op]
            depth += _DEPTH[op]
            deepest = max(deepest, depth)
            if field := _COUNTED[op]:
                n = int.from_bytes(data[at + 1 : at + 1 + field], "little")
                at += 1 + field
                cost += n if n < 16 or data[at : at + n].isascii() else 4 * n
                at += n
            elif op == 0x28:  # MARK
                marks.append(depth)
                at += 1
            elif op in _MARKED:
                n = depth - marks.pop()
                depth -= n
                widest = max(widest, n)
                cost += n * (_ELEMENT[op] if n <= 128 or op not in {0x75, 0x64} else LARGE_PAIR_BYTES // 2)
                depth += op in {0x74, 0x6C, 0x64, 0x91, 0x6F}
                at += 1
            elif op == 0x30 and marks and marks[-1] == depth + 1:  # POP of a mark
                marks.pop()
                depth += 1
                at += 1
            elif op == 0x63:  # GLOBAL
                at = data.index(b"\n", data.index(b"\n", at) + 1) + 1
            else:
                at += _LENGTH[op] or 1
        self._exact, self._exact_at, self._depth, self._deepest, self._widest = cost, at, depth, deepest, widest
        return cost + cost // 32 + _STACK * deepest + 8 * widest  # what goes into a list is copied first
