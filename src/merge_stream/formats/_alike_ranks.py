"""Rank files that are alike: the first of a kind is read record by record, the others are compared with it.

The ranks of one save hold the same tensors in equal pieces, so that their files differ in hardly
more than the values: the checksums in the zip's directory, and in the pickle the numbers of the rank itself, which
stand in the device mesh of the first tensors (`_rank`, `_coordinate_on_dim`), and the device ("cuda:3"). A file is
*alike* when

    directory   stands at the same place and is equal but for checksums and the name of the folder (the file's own):
                all records lie at the same places
    pickle      is equal but for arguments of int opcodes and the text of strings near its start, so that it has
                the same opcodes (what the pre-scan allowed once, it allows again)
    values      built up to the last difference are equal but for what is inside of device meshes
    meshes      are those of the first file, and hold this rank where the file says

and then each tensor has the layout, the shape and the offset that it has in the first file, and only its
checksum is another. Everything else is read record by record and becomes a kind of its own: ranks with a
shorter last piece, ranks 10, 100 and 256 (their names and numbers take more bytes), ShardedTensors.

For 1138 tensors that is 1 ms for a file instead of 60.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from merge_stream.containers.pickle_reader import Recorder, StorageRecord, is_class, read_pickle
from merge_stream.containers.torch_file import TorchFile
from merge_stream.containers.torch_zip import RawDirectory, entry_places, read_directory, read_raw_directory
from merge_stream.errors import MergeStreamError
from merge_stream.formats._device_mesh import Mesh
from merge_stream.formats._rank_index import Group, RankFile, RankIndex
from merge_stream.storage.base import ByteTree

if TYPE_CHECKING:
    import pickletools

__all__ = ["AlikeRanks"]

_MOST_KINDS = 8
_MOST_HEAD = 24 << 10  # bytes of a pickle in which ranks may differ
_MOST_STEPS = 100_000
_NEAR = 4 << 10  # most bytes between data.pkl and byteorder
_INTS = {"BININT": 4, "BININT1": 1, "BININT2": 2}  # -> bytes of the number
_TEXTS = {"BINUNICODE": 4, "SHORT_BINUNICODE": 1}  # -> bytes of the length
_PLAIN = (int, bool, float, str, bytes, type(None))
_DROPS = frozenset({"POP", "POP_MARK", "DUP"})  # torch.save writes none
_MESH = "DeviceMesh"
_DEVICE = "torch.device"
_CUDA = b"X\x04\x00\x00\x00cuda"
_TEXT1, _TEXT4, _LINES = -2, -4, -1


@dataclass(frozen=True, slots=True)
class _Head:
    """The start of a pickle, by opcodes.

    `cuts` are positions after a whole (key, value) pair of the outermost dict, `free` is true for bytes that are the
    argument of an int or the text of a string, `texts` are the places of strings, `device` is how
    `torch.device("cuda", 3)` begins once both are in the memo.
    """

    cuts: tuple[int, ...]
    free: np.ndarray
    texts: tuple[tuple[int, int], ...]
    device: bytes


@dataclass(slots=True)
class _Kind:
    """The first file of a kind; checksums are places in the bytes of the directory."""

    file: TorchFile
    directory: RawDirectory
    roots: np.ndarray  # places of the bytes of the folder, which is the file's own name, record by record
    blanks: np.ndarray  # places of those and of the checksums
    pickled: bytes  # data.pkl
    order: bytes  # byteorder
    start: int  # of data.pkl in the file
    order_at: int  # of byteorder, from there
    pickle_sum: int
    pairs: list[tuple[Any, Any]]  # the first of the outermost dict
    meshes: list[tuple[Any, Mesh]]
    added: list[tuple[Group, int]]
    sums: np.ndarray  # of each tensor's storage, -1 where it is larger than the tensor
    shapes: list[tuple[Group, tuple[int, ...]]]
    stored_as: Counter[str]
    names: frozenset[str]
    plain: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))  # the directory with those left out
    head: _Head | None = None
    devices: np.ndarray | None = None  # places of the numbers of devices in the pickle


class AlikeRanks:
    """Takes in the files of ranks that are like one before."""

    def __init__(self, tree: ByteTree, index: RankIndex) -> None:
        self._tree = tree
        self._index = index
        self._kinds: list[_Kind] = []

    def take(self, rank: int, name: str) -> int:
        """Index the file of a rank if it is like one before; the bytes read of it, or 0 when it is not.

        CorruptCheckpointError when a mesh in it contradicts the rank.
        """
        if not self._kinds:
            return 0
        try:
            directory = read_raw_directory(self._tree, name)
        except MergeStreamError:
            return 0  # told when the file is read record by record
        for kind in self._kinds:
            if self._is_alike(kind, rank, name, directory):
                self._add(kind, rank, directory)
                return len(directory.data) + kind.order_at + len(kind.order)
        return 0

    def learn(self, source: RankFile) -> None:
        """Remember the file that `index` added last as a kind, where it can be compared with."""
        tree, index, file = self._tree, self._index, source.file
        if len(self._kinds) == _MOST_KINDS or not index.is_plain or file.producer.get("form") != "zip":
            return
        if any(isinstance(value, dict) for value in file.root.values()):
            return
        parsed = read_directory(tree, source.name, start=0, nbytes=tree.files[source.name].nbytes)
        pickled, order = parsed.records["data.pkl"], parsed.records.get("byteorder")
        end = pickled.offset + pickled.nbytes
        if not parsed.by_rule or order is None or not end <= order.offset <= end + _NEAR or order.nbytes > _NEAR:
            return
        raw = read_raw_directory(tree, source.name)
        wanted = order.offset + order.nbytes - pickled.offset
        tree.allowance.require(2 * wanted + 6 * len(raw.data), file.where)
        both = tree.read(source.name, pickled.offset, wanted)
        places = entry_places(raw)
        sums = [-1 if a.storage is None else places.sums.get(f"data/{a.storage}", -1) for a in index.added]
        roots = np.array(places.texts, dtype=np.int64)[:, None] + np.arange(places.root)
        kind = _Kind(
            file=replace(file, root=None),
            directory=raw,
            roots=roots,
            blanks=np.concatenate(
                [
                    (np.array(list(places.sums.values()), dtype=np.int64)[:, None] + np.arange(4)).reshape(-1),
                    roots.reshape(-1),
                ]
            ),
            pickled=both[: pickled.nbytes],
            order=both[order.offset - pickled.offset :],
            start=pickled.offset,
            order_at=order.offset - pickled.offset,
            pickle_sum=places.sums["data.pkl"],
            pairs=list(itertools.islice(file.root.items(), _MOST_HEAD // 64)),
            meshes=list(index.decoded),
            added=[(a.group, a.offset) for a in index.added],
            sums=np.array(sums, dtype=np.int64),
            shapes=list({(id(a.group.layout), a.local): (a.group, a.local) for a in index.added}.values()),
            stored_as=Counter(a.stored_as for a in index.added),
            names=frozenset(key for key in file.root if isinstance(key, str)),
        )
        kind.plain = _blanked(raw, kind.blanks)
        self._kinds.insert(0, kind)

    def _is_alike(self, kind: _Kind, rank: int, name: str, directory: RawDirectory) -> bool:
        if (directory.at, directory.records) != (kind.directory.at, kind.directory.records):
            return False
        if len(directory.data) != len(kind.directory.data):
            return False
        roots = np.frombuffer(directory.data, np.uint8)[kind.roots]
        if not np.array_equal(_blanked(directory, kind.blanks), kind.plain) or (roots != roots[:1]).any():
            return False
        where = self._tree.files[name].path
        self._tree.allowance.require(2 * kind.order_at, where)
        data = self._tree.read(name, kind.start, kind.order_at + len(kind.order))
        if data[kind.order_at :] != kind.order:
            return False
        data = data[: len(kind.pickled)]
        stated = int.from_bytes(directory.data[kind.pickle_sum : kind.pickle_sum + 4], "little")
        if stated and zlib.crc32(data) != stated:
            return False
        own: dict[int, Any] = {}
        if data != kind.pickled:
            found = _own_meshes(kind, data, where)
            if found is None:
                return False
            own = found
        source = RankFile(rank, name, replace(kind.file, where=where))
        if any(self._index.mesh_of(source, own.get(id(record), record)) is not mesh for record, mesh in kind.meshes):
            return False
        return all(
            group.layout is None or group.layout.extents[group.layout.place[rank]] == local
            for group, local in kind.shapes
        )

    def _add(self, kind: _Kind, rank: int, directory: RawDirectory) -> None:
        data = np.frombuffer(directory.data, np.uint8)
        places = np.maximum(kind.sums, 0)
        crcs = np.zeros(len(places), dtype=np.int64)
        for k in range(4):
            crcs |= data[places + k].astype(np.int64) << (8 * k)
        crcs[kind.sums < 0] = 0
        for (group, offset), crc in zip(kind.added, crcs.tolist(), strict=True):
            group.add(rank, offset, crc)
        self._index.kinds.update(kind.stored_as)


def _blanked(directory: RawDirectory, places: np.ndarray) -> np.ndarray:
    data = np.frombuffer(directory.data, np.uint8).copy()
    data[places] = 0
    return data


def _own_meshes(kind: _Kind, data: bytes, where: str) -> dict[int, Any] | None:
    """The meshes of `data` by the ids of the kind's own; None when more differs than meshes and devices."""
    differ = np.flatnonzero(np.frombuffer(data, np.uint8) != np.frombuffer(kind.pickled, np.uint8))
    if kind.head is None:
        kind.head = _head_of(kind.pickled[:_MOST_HEAD])
    head = kind.head
    inside = differ[differ < len(head.free)]
    if not head.free[inside].all():
        return None
    cut = next((cut for cut in head.cuts if cut > differ[-1]), 0)
    if not cut and not any(name.startswith("cuda:") for name in kind.names):
        # tensors that were saved from GPUs name the device in each record
        if kind.devices is None:
            kind.devices = _device_numbers(kind.pickled, head)
        others = np.setdiff1d(differ, kind.devices, assume_unique=True)
        last = int(others[-1]) if len(others) else 0
        cut = next((cut for cut in head.cuts if cut > last), 0)
    if not cut:
        return None
    for start, stop in head.texts:
        text = kind.pickled[start:stop]
        if text != data[start:stop] and text.decode("utf-8", "replace") in kind.names:
            return None  # a text from the memo may be the name of a later tensor
    try:
        root, _, _ = read_pickle(data[:cut] + b"u.", where)
    except MergeStreamError:
        return None
    if not isinstance(root, dict) or len(root) > len(kind.pairs):
        return None
    ours = list(root.items())
    return _paired(kind.pairs[: len(ours)], ours)


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


def _head_of(data: bytes) -> _Head:
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
    return _Head(tuple(cuts), free, tuple(texts), bytes([0x68, device, 0x68, kind]) if known else b"")


def _opcodes(data: bytes) -> Iterator[tuple[str, Any, int, pickletools.OpcodeInfo]]:
    """(name, argument, position, opcode) as far as `data` goes."""
    import pickletools

    with contextlib.suppress(ValueError, IndexError):
        for opcode, arg, at in pickletools.genops(data):
            yield opcode.name, arg, at or 0, opcode


def _device_numbers(data: bytes, head: _Head) -> np.ndarray:
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


def _paired(theirs: Any, ours: Any) -> dict[int, Any] | None:  # noqa: ANN401 - unpickled values
    """Device meshes of `ours` by the ids of those of `theirs`; None when the values differ in more than those."""
    found: dict[int, Any] = {}
    todo = [(theirs, ours, False)]
    for _ in range(_MOST_STEPS):
        if not todo:
            return found
        a, b, free = todo.pop()  # free: inside of a mesh, where all may differ
        if isinstance(a, Recorder) and isinstance(b, Recorder) and a.dotted == b.dotted:
            if a.dotted.rpartition(".")[2] == _MESH:
                if id(a) in found:
                    if found[id(a)] is not b:
                        return None
                    continue
                found[id(a)] = b
                todo.append((a.state, b.state, True))
            elif a.dotted != _DEVICE or len(a.args) != len(b.args):
                todo += [(a.args, b.args, free), (a.state, b.state, free), (a.items, b.items, free)]
        elif isinstance(a, dict) and type(a) is type(b) and len(a) == len(b):
            todo += [(x, y, free) for x, y in zip(a, b, strict=True)]
            todo += [(x, y, free) for x, y in zip(a.values(), b.values(), strict=True)]
        elif isinstance(a, (list, tuple)) and type(a) is type(b) and len(a) == len(b):
            todo += [(x, y, free) for x, y in zip(a, b, strict=True)]
        elif not (_equal(a, b) or (free and type(a) is type(b) and type(a) in _PLAIN)):
            return None
    return None


def _equal(a: Any, b: Any) -> bool:  # noqa: ANN401 - unpickled values
    """Two values that hold no others."""
    if is_class(a) and is_class(b):
        return bool(a.dotted == b.dotted)
    if isinstance(a, StorageRecord) and isinstance(b, StorageRecord):
        return (a.kind, a.key, a.numel) == (b.kind, b.key, b.numel)
    return type(a) is type(b) and type(a) in _PLAIN and bool(a == b)
