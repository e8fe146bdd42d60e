"""Pre-scan of a pickle: one pass over its opcodes that refuses what is built to do harm.

`pickle_reader` unpickles with the C unpickler, which is fast and trusts the stream. Running code
is made impossible there (nothing is imported, nothing but recorders is called). What is left are
streams that exhaust memory, time or the C stack. This scan ends them before the C unpickler sees
a byte, in time linear in the pickle (about 0.15 us for an opcode) and without allocating more
than one number for each stack and memo entry.

Threats to CPython's C unpickler (3.11 to 3.14), and what ends them here:

1. `LONG_BINPUT` with a huge index: the memo table grows to twice that index at once.
   -> an index may not exceed the number of bytes before it.
2. Claimed lengths (BINUNICODE8, BINBYTES8, BYTEARRAY8, FRAME ...): BYTEARRAY8 allocates first.
   -> every length must end inside the data.
3. Integers: text forms are quadratic, and ints beyond 64 bits can be made with one hash in any
   number, so that a dict becomes quadratic. -> no text opcodes, LONG1/LONG4 of at most 9 bytes
   (2**10 collisions); the one exception is the magic number of torch's legacy files.
4. Tuples in tuples: `t = (t, t)` from the memo hashes, compares and prints in 2**n steps; nested
   deeply it overflows the C stack (tuple hashing is recursive and unchecked). -> the stack is
   simulated with one weight for each element: 1, but 1.25 * sum + 1 for a tuple, so that weight
   bounds both the steps and the depth (1.25**depth); no tuple may weigh more than 1e6.
   Tuples of ints as dict keys or set members can be made to collide at will. -> for keys that are
   tuples, (number of keys) * (sum of weights) may not exceed 1e8, which bounds the steps even if
   all of them collide. Lists, dicts and recorders weigh 1: they do not hash, or hash by identity.
5. Steps that build nothing, in any number (POP, DUP, PROTO, FRAME, a memo index that is stored anew, BUILD
   without an object): they cost time and no memory. -> at most 200,000, where torch needs hardly any, and
   BUILD at most once for each object. All other steps are bounded by the memory that they are charged with.
6. Absurd depth of the stack, EXT opcodes (code registry), out-of-band buffers, protocol 0
   opcodes other than GLOBAL: never written by torch.save or DCP, refused.

Strings hash with a secret of the process and cannot be made to collide. Deep nesting of lists,
dicts and recorders is harmless here: CPython's trashcan frees it without recursion. The memory that
the result takes is bounded by the allowance of the source (`pickle_source`, `pickle_cost`); the scan
counts what needs its stack. Not bounded here: lists and dicts that hold one another many times. Who
reads the result must not print, compare or walk them without a limit (`pickle_reader.described` is
for messages).

Wherever the C unpickler succeeds, the simulated stack is the true one; where the simulation
cannot follow, the C unpickler would fail too.
"""

from __future__ import annotations

import struct

from merge_stream.containers.pickle_cost import CLASS_BYTES, COPIED_WEIGHT, LARGE_PAIR_BYTES, SET_MEMBER_BYTES
from merge_stream.containers.pickle_source import PickleSource
from merge_stream.errors import CorruptCheckpointError, TruncatedFileError, UnsafePickleError

__all__ = ["check_pickle"]

_U32 = struct.Struct("<I").unpack_from
_MOST_STACK = 4_000_000
_MOST_MARKS = 100_000
_MOST_IDLE = 200_000
"""Steps that build nothing, up to a microsecond each; torch's pickles have one PROTO, and a FRAME for each 64 kB."""
_MOST_TUPLE = 1e6
_MOST_KEY_COST = 1e8
_LONGEST_NAME = 1024
_MOST_CLASSES = 5000  # the reader makes no more
_LEGACY_MAGIC = bytes.fromhex("6cfc9c46f9206aa85019")

# opcodes that push one element of weight 1 and have a fixed length -> that length
_FIXED = [0] * 256
for _code, _length in {
    "N": 1, "\x88": 1, "\x89": 1, "]": 1, "}": 1, ")": 1, "\x8f": 1, "K": 2, "M": 3, "J": 5, "G": 9,
}.items():  # fmt: skip
    _FIXED[ord(_code)] = _length

# opcodes that push one element of weight 1 and carry their length -> bytes of the length field
_COUNTED = [0] * 256
for _code, _length in {
    "X": 4, "\x8c": 1, "\x8d": 8, "B": 4, "C": 1, "\x8e": 8, "\x96": 8, "U": 1, "T": 4,
}.items():  # fmt: skip
    _COUNTED[ord(_code)] = _length

_REFUSED = {
    ord(code): name
    for code, name in {
        "I": "INT", "L": "LONG", "F": "FLOAT", "S": "STRING", "V": "UNICODE", "g": "GET", "p": "PUT", "P": "PERSID",
        "i": "INST", "\x82": "EXT1", "\x83": "EXT2", "\x84": "EXT4", "\x97": "NEXT_BUFFER", "\x98": "READONLY_BUFFER",
    }.items()
}  # fmt: skip


def check_pickle(data: bytes | PickleSource, start: int, where: str) -> int:
    """Scan the pickle that begins at `start`; the position after its STOP opcode.

    UnsafePickleError when it is built to do harm, TruncatedFileError when `data` ends before it
    does, CorruptCheckpointError when it is no pickle, MemoryLimitTooSmallError when what it builds
    does not fit in the allowance of the source. `where` names the file in messages.
    """
    source = data if isinstance(data, PickleSource) else PickleSource.of(data, where)
    try:
        return _scan(source, start, where)
    except (IndexError, KeyError, TypeError, struct.error):
        pass
    msg = f"{where}: the pickle at byte {start} is broken: it ends early, or uses values it has not made"
    raise TruncatedFileError(msg, hint="the file is cut or damaged: copy it again from where it was saved")


def _scan(source: PickleSource, start: int, where: str) -> int:
    data, stop = source.data, source.nbytes
    fixed, counted, u32 = _FIXED, _COUNTED, _U32
    stack: list[float] = []
    push, pop = stack.append, stack.pop
    memo: list[float] = []  # by index; None where nothing was stored
    remember = memo.append
    marks: list[int] = []
    keys = _Keys(where)
    extra = _Extra(where)
    made = built = 0
    i = start
    while True:
        if i >= stop:
            raise IndexError
        if i > start:
            source.passed(start, i, extra.nbytes)
        if extra.idle + max(built - made, 0) > _MOST_IDLE:
            raise _unsafe(where, i, f"has more than {_MOST_IDLE} steps that build nothing")
        if len(stack) > _MOST_STACK:
            raise _unsafe(where, i, f"has a stack of more than {_MOST_STACK} values")
        safe = source.window(i)
        while i < safe:
            op = data[i]
            if op == 0x72:  # r LONG_BINPUT
                (index,) = u32(data, i + 1)
                if index == len(memo):
                    remember(stack[-1])
                else:
                    extra.store(memo, index, stack[-1], i - start)
                i += 5
            elif op == 0x68:  # h BINGET
                push(memo[data[i + 1]])
                i += 2
            elif length := fixed[op]:
                push(1)
                i += length
            elif op == 0x28:  # ( MARK
                marks.append(len(stack))
                i += 1
            elif op == 0x58:  # X BINUNICODE
                push(1)
                i += 5 + u32(data, i + 1)[0]
            # R REDUCE, NEWOBJ: what a callable gives weighs at most as much as its arguments
            elif op == 0x52 or op == 0x81:  # noqa: PLR1714 - twice as fast
                weight = pop()
                stack[-1] = weight
                i += 1
                made += 1
                if weight > COPIED_WEIGHT:
                    extra.nbytes += int(8 * weight)
            elif op == 0x85:  # TUPLE1
                stack[-1] = weight = 1.25 * stack[-1] + 1
                i += 1
                if weight > _MOST_TUPLE:
                    raise _heavy(where, i)
            elif op == 0x86:  # TUPLE2
                weight = pop()
                stack[-1] = weight = 1.25 * (stack[-1] + weight) + 1
                i += 1
                if weight > _MOST_TUPLE:
                    raise _heavy(where, i)
            elif op == 0x74:  # t TUPLE
                at = marks.pop()
                weight = 1.25 * sum(stack[at:]) + 1
                del stack[at:]
                push(weight)
                i += 1
                if weight > _MOST_TUPLE:
                    raise _heavy(where, i)
            elif op == 0x6A:  # j LONG_BINGET
                push(memo[u32(data, i + 1)[0]])
                i += 5
            elif op == 0x62:  # b BUILD
                pop()
                i += 1
                built += 1
            elif op == 0x71:  # q BINPUT
                index = data[i + 1]
                if index == len(memo):
                    remember(stack[-1])
                else:
                    extra.store(memo, index, stack[-1], i - start)
                i += 2
            elif op == 0x75:  # u SETITEMS
                at = marks.pop()
                if max(stack[at::2], default=1) > 1:
                    keys.add(stack[at::2])
                extra.items += len(stack) - at
                del stack[at:]
                i += 1
            elif op == 0x51:  # Q BINPERSID
                stack[-1] = 1
                i += 1
            elif op == 0x63:  # c GLOBAL
                module = data.find(b"\n", i + 1, i + _LONGEST_NAME)
                end = data.find(b"\n", module + 1, module + _LONGEST_NAME)
                if module < 0 or end < 0:
                    raise _broken(
                        where, i, "a global without a name of sensible length", truncated=stop - i < 2 * _LONGEST_NAME
                    )
                push(1)
                extra.named()
                i = end + 1
            elif op == 0x73:  # s SETITEM
                pop()
                if (weight := pop()) > 1:
                    keys.add([weight])
                i += 1
            elif op == 0x87:  # TUPLE3
                weight = pop() + pop()
                stack[-1] = weight = 1.25 * (stack[-1] + weight) + 1
                i += 1
                if weight > _MOST_TUPLE:
                    raise _heavy(where, i)
            elif op == 0x61:  # a APPEND
                pop()
                i += 1
            elif length := counted[op]:
                claimed = int.from_bytes(data[i + 1 : i + 1 + length], "little")
                push(1)
                i += 1 + length + claimed
            elif op == 0x65:  # e APPENDS
                del stack[marks.pop() :]
                i += 1
            elif op == 0x94:  # MEMOIZE
                if extra.gaps:
                    extra.store(memo, len(memo) - extra.gaps, stack[-1], i - start)
                else:
                    remember(stack[-1])
                i += 1
            elif op == 0x93:  # STACK_GLOBAL
                pop()
                stack[-1] = 1
                extra.named()
                i += 1
            elif op in (0x8A, 0x8B):  # LONG1, LONG4
                field = 1 if op == 0x8A else 4
                claimed = int.from_bytes(data[i + 1 : i + 1 + field], "little")
                i += 1 + field
                if claimed > 9 and data[i : i + claimed] != _LEGACY_MAGIC:
                    raise _unsafe(where, i, f"holds an integer of {claimed} bytes")
                push(1)
                i += claimed
            elif op == 0x2E:  # . STOP
                pop()
                source.passed(start, i + 1, extra.nbytes)
                return i + 1
            elif op == 0x80:  # PROTO
                if data[i + 1] > 5:
                    raise _broken(where, i, f"pickle protocol {data[i + 1]} does not exist", truncated=False)
                extra.idle += 1
                i += 2
            elif op == 0x95:  # FRAME
                if i + 9 + int.from_bytes(data[i + 1 : i + 9], "little") > stop:
                    raise _broken(where, i, "a frame is longer than the data", truncated=True)
                extra.idle += 1
                i += 9
            else:
                i = _rare(data, i, stack, marks, keys, extra)


def _rare(  # noqa: PLR0917 - the state of the scan
    data: bytes | bytearray, i: int, stack: list[float], marks: list[int], keys: _Keys, extra: _Extra
) -> int:
    """The opcodes that honest files hardly contain."""
    op = data[i]
    extra.idle += 1
    if op == 0x32:  # 2 DUP
        stack.append(stack[-1])
    elif op == 0x30:  # 0 POP: takes the mark when nothing lies above it
        if marks and marks[-1] == len(stack):
            marks.pop()
        else:
            stack.pop()
    elif op == 0x31:  # 1 POP_MARK
        del stack[marks.pop() :]
    elif op == 0x6C:  # l LIST
        del stack[marks.pop() :]
        stack.append(1)
    elif op == 0x64:  # d DICT
        at = marks.pop()
        keys.add([weight for weight in stack[at::2] if weight > 1])
        extra.items += len(stack) - at
        del stack[at:]
        stack.append(1)
    elif op in (0x90, 0x91):  # ADDITEMS, FROZENSET
        at = marks.pop()
        members = stack[at:]
        keys.add([weight for weight in members if weight > 1])
        extra.nbytes += SET_MEMBER_BYTES * len(members)
        del stack[at:]
        if op == 0x91:
            stack.append(1.25 * sum(members) + 1)
            if stack[-1] > _MOST_TUPLE:
                raise _heavy(keys.where, i)
    elif op == 0x6F:  # o OBJ
        at = marks.pop()
        weight = 1.25 * sum(stack[at:]) + 1
        del stack[at:]
        stack.append(weight)
        extra.nbytes += int(8 * weight)
    elif op == 0x92:  # NEWOBJ_EX
        stack.pop()
        weight = stack.pop()
        stack[-1] = weight
        extra.nbytes += int(8 * weight) + LARGE_PAIR_BYTES * extra.items // 2  # the keywords may be any dict so far
    elif op in _REFUSED:
        raise _unsafe(keys.where, i, f"uses the opcode {_REFUSED[op]}, which no checkpoint needs")
    else:
        raise _broken(keys.where, i, f"0x{op:02x} is no pickle opcode", truncated=False)
    return i + 1


class _Extra:
    """Memory that only this scan can count: copies, classes, sets, gaps in the memo; and `idle` steps."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.nbytes = 0
        self.items = 0
        self.gaps = 0
        self.idle = 0
        self._names = 0

    def named(self) -> None:
        """A global was named."""
        if self._names < _MOST_CLASSES:
            self._names += 1
            self.nbytes += CLASS_BYTES

    def store(self, memo: list[float], index: int, weight: float, before: int) -> None:
        """The memo at an index that is not the next one, or by MEMOIZE."""
        if index > before:
            msg = f"stores at memo index {index} after {before} bytes"
            raise _unsafe(self.where, before, msg)
        have = len(memo)
        if index < have:
            self.gaps -= memo[index] is None
            self.idle += 1
            memo[index] = weight
            return
        memo.extend([None] * (index - have))  # type: ignore[list-item]
        memo.append(weight)
        self.gaps += index - have
        self.nbytes += 24 * (index - have)


class _Keys:
    """Cost of the dict keys and set members that are tuples."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._count = 0
        self._weight = 0.0

    def add(self, weights: list[float]) -> None:
        self._count += sum(1 for weight in weights if weight > 1)
        self._weight += sum(weight for weight in weights if weight > 1)
        if self._count * self._weight > _MOST_KEY_COST:
            msg = (
                f"{self.where}: the pickle has {self._count} tuples as dict keys that cost {self._weight:.3g} steps "
                "to hash; it is built to exhaust time or the stack"
            )
            raise UnsafePickleError(msg, hint="do not use this file; it was not written by a trainer")


def _unsafe(where: str, at: int, what: str) -> UnsafePickleError:
    msg = f"{where}: the pickle {what} (at byte {at}); it is built to do harm, or damaged"
    return UnsafePickleError(msg, hint="do not use this file; a trainer's torch.save does not write this")


def _heavy(where: str, at: int) -> UnsafePickleError:
    return _unsafe(where, at, "nests or repeats tuples in tuples without end")


def _broken(where: str, at: int, what: str, *, truncated: bool) -> CorruptCheckpointError:
    msg = f"{where}: the pickle is broken at byte {at}: {what}"
    kind = TruncatedFileError if truncated else CorruptCheckpointError
    return kind(msg, hint="the file is cut or damaged, or no checkpoint: copy it again from where it was saved")
