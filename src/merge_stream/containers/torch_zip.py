"""Directory of a torch.save zip: name -> byte range, nothing trusted, hardly anything read.

Facts (torch 2.1 to 2.13): every record is stored, its data begins at a multiple of 64 bytes
(`.storage_alignment`, written since 2.9, may say otherwise) from the start of the zip, padded by
the extra field of the local header; sizes stand in the central directory only (flag 8: a data
descriptor of 16, in zip64 of 24 bytes follows the data). Above 4 GiB the central directory has
zip64 fields, and the local header one before the padding.

Where the data begins stands only in the local header, and one read for each record is too many
(512 ranks x 1138 tensors). So it is computed twice, by the writer's padding rule and backwards
from the next header; when both agree nothing is read, otherwise the local header is.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, NoReturn

from merge_stream.errors import CorruptCheckpointError, TruncatedFileError, UnsupportedError
from merge_stream.storage.base import ByteTree

__all__ = [
    "EntryPlaces",
    "RawDirectory",
    "Record",
    "ZipDirectory",
    "entry_places",
    "read_directory",
    "read_raw_directory",
]

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LENGTHS = struct.Struct("<3H")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_BIG = 0xFFFFFFFF
_TAIL = 1 << 16
_RECORD_BYTES = 700  # of memory: entry, place, names
_RETRY = "the file is cut or damaged: copy it again from where it was saved"


class Record(NamedTuple):
    """Stored bytes of one record: absolute `offset` in the file, size, CRC-32 (0: not computed)."""

    offset: int
    nbytes: int
    crc32: int


class ZipDirectory(NamedTuple):
    """Records by name without the root folder ("data.pkl", "data/7"); bytes of metadata read.

    `by_rule`: all places follow from the directory and its position alone, no local header was read.
    """

    records: dict[str, Record]
    metadata_nbytes: int
    by_rule: bool


class RawDirectory(NamedTuple):
    """The directory as it stands in the file: its position, its bytes, its number of records."""

    at: int
    data: bytes
    records: int


class _Entry(NamedTuple):
    name: str
    header: int
    nbytes: int
    crc32: int
    name_nbytes: int


class _Range:
    """The zip as a byte range of a file: bounds-checked reads, and words for messages."""

    def __init__(self, tree: ByteTree, name: str, start: int, nbytes: int) -> None:
        self.tree, self.name, self.start, self.nbytes = tree, name, start, nbytes
        path = tree.files[name].path
        whole = start == 0 and nbytes == tree.files[name].nbytes
        self.where = path if whole else f"{path} at byte {start}"
        self.read_nbytes = 0
        tail = min(nbytes, _TAIL)
        self._tail_at = nbytes - tail
        self._tail = self._fetch(self._tail_at, tail)

    def _fetch(self, at: int, nbytes: int) -> bytes:
        self.read_nbytes += nbytes
        return self.tree.read(self.name, self.start + at, nbytes)

    def read(self, at: int, nbytes: int) -> bytes:
        """Bytes at `at` of the zip; from the tail where that holds them."""
        if at < 0 or nbytes < 0 or at + nbytes > self.nbytes:
            self.fail(f"bytes {at} to {at + nbytes} are named, but the zip has {self.nbytes}")
        if at >= self._tail_at:
            return self._tail[at - self._tail_at : at - self._tail_at + nbytes]
        return self._fetch(at, nbytes)

    def end_record(self) -> int:
        """Position of the end-of-directory record, or -1."""
        found = self._tail.rfind(b"PK\x05\x06")
        return self._tail_at + found if 0 <= found <= len(self._tail) - _END.size else -1

    def fail(self, what: str) -> NoReturn:
        """Corrupt, with the file's name."""
        msg = f"{self.where} is no sound torch.save zip: {what}"
        raise CorruptCheckpointError(msg, hint=_RETRY)


def read_raw_directory(tree: ByteTree, name: str) -> RawDirectory:
    """The directory of a file that is one zip; the errors of `read_directory`."""
    zone = _Range(tree, name, 0, tree.files[name].nbytes)
    count, at, size = _end_of_directory(zone)
    tree.allowance.require(3 * size, zone.where)
    return RawDirectory(at, zone.read(at, size), count)


class EntryPlaces(NamedTuple):
    """Where things stand in the bytes of a directory: `sums` the CRC-32 of each record, `texts` its name; `root` is
    the length of the folder that all names begin with.
    """

    sums: dict[str, int]
    texts: list[int]
    root: int


def entry_places(raw: RawDirectory) -> EntryPlaces:
    """Of a directory that `read_directory` took, by the names that `ZipDirectory` has."""
    sums: dict[str, int] = {}
    texts: list[int] = []
    position = root = 0
    for k in range(raw.records):
        lengths = _LENGTHS.unpack_from(raw.data, position + 28)
        text = position + _CENTRAL.size
        name = raw.data[text : text + lengths[0]]
        if not k:
            root = name.find(b"/") + 1
        sums[name[root:].decode("utf-8", "replace")] = position + 16
        texts.append(text)
        position = text + sum(lengths)
    return EntryPlaces(sums, texts, root)


def read_directory(tree: ByteTree, name: str, *, start: int, nbytes: int) -> ZipDirectory:
    """Records of the zip at [start, start + nbytes) of a file, with absolute offsets.

    TruncatedFileError when its end is missing; CorruptCheckpointError when the directory
    contradicts itself or the size; UnsupportedError for compressed or encrypted records;
    MemoryLimitTooSmallError when it does not fit in the allowance of the tree.
    """
    zone = _Range(tree, name, start, nbytes)
    count, at, size = _end_of_directory(zone)
    tree.allowance.require(2 * size + count * _RECORD_BYTES, zone.where)
    entries = _entries(zone, zone.read(at, size), count)
    first = offsets = _data_offsets(entries, at, 64)
    directory = {entry.name: k for k, entry in enumerate(entries)}
    if ".storage_alignment" in directory and len(entries) > len(offsets):
        offsets = _data_offsets(entries, at, _alignment(zone, entries[directory[".storage_alignment"]]))
    records: dict[str, Record] = {}
    for k, entry in enumerate(entries):
        offset = offsets[k] if k in offsets else _from_local_header(zone, entry)
        limit = entries[k + 1].header if k + 1 < len(entries) else at
        if offset + entry.nbytes > limit:
            zone.fail(f"record {entry.name} ({entry.nbytes} bytes at {offset}) runs into what follows it at {limit}")
        records[entry.name] = Record(start + offset, entry.nbytes, entry.crc32)
    aligned = ".storage_alignment" not in directory or len(first) == len(entries)
    return ZipDirectory(records, zone.read_nbytes, by_rule=aligned and len(offsets) == len(entries))


def _end_of_directory(zone: _Range) -> tuple[int, int, int]:
    """(number of records, position of the directory, its size)."""
    end = zone.end_record()
    if end < 0:
        msg = (
            f"{zone.where} is cut: it begins as a torch.save zip, but its last bytes (the zip's directory) are missing"
        )
        raise TruncatedFileError(f"{msg}; it has {zone.nbytes} bytes", hint=_RETRY)
    _, disk, start_disk, here, count, size, at, comment = _END.unpack(zone.read(end, _END.size))
    if end + _END.size + comment != zone.nbytes:
        zone.fail(f"it has {zone.nbytes} bytes, but its end record says {end + _END.size + comment}")
    if end >= _LOCATOR.size and zone.read(end - _LOCATOR.size, 4) == b"PK\x06\x07":
        _, locator_disk, end64, _ = _LOCATOR.unpack(zone.read(end - _LOCATOR.size, _LOCATOR.size))
        magic, _, _, _, disk, start_disk, here, count, size, at = _END64.unpack(zone.read(end64, _END64.size))
        if magic != b"PK\x06\x06" or locator_disk:
            zone.fail("its zip64 end record is not where the locator says")
        end = end64
    if disk or start_disk or here != count:
        zone.fail("it is part of a zip of several volumes")
    if at + size > end:
        zone.fail(f"its directory ({size} bytes at {at}) overlaps its end at {end}")
    if count * _CENTRAL.size > size:
        zone.fail(f"its directory of {size} bytes cannot hold {count} records")
    return count, at, size


def _entries(zone: _Range, directory: bytes, count: int) -> list[_Entry]:
    """The directory's records in the order of their place, root folder removed."""
    entries: list[_Entry] = []
    position = 0
    root = ""
    for _ in range(count):
        if position + _CENTRAL.size > len(directory):
            zone.fail(f"its directory ends after {len(entries)} of {count} records")
        magic, _, _, flags, method, _, _, crc, packed, size, n_name, n_extra, n_comment, disk, _, _, header = (
            _CENTRAL.unpack_from(directory, position)
        )
        text = position + _CENTRAL.size
        position = text + n_name + n_extra + n_comment
        if magic != b"PK\x01\x02" or position > len(directory):
            zone.fail(f"record {len(entries)} of its directory is damaged")
        name = directory[text : text + n_name].decode("utf-8", "replace")
        big = _BIG in (size, packed, header)
        if big:
            extra = directory[text + n_name : text + n_name + n_extra]
            size, packed, header = _zip64(zone, name, extra, (size, packed, header))
        if method or flags & 0x41 or packed != size or disk:
            msg = f"{zone.where}: record {name} is {'encrypted' if flags & 0x41 else 'compressed'} (method {method})"
            raise UnsupportedError(
                msg, hint="torch.save stores records as they are; this zip was packed again: unpack it"
            )
        if not entries:
            root = name[: name.find("/") + 1]
        if not name.startswith(root):
            zone.fail(f"record {name} lies outside its root folder {root}")
        entries.append(_Entry(name[len(root) :], header, size, crc, n_name))
    if len({entry.name for entry in entries}) != count:
        zone.fail("two records have the same name")
    entries.sort(key=lambda entry: entry.header)
    return entries


def _zip64(zone: _Range, name: str, extra: bytes, fields: tuple[int, int, int]) -> tuple[int, int, int]:
    """(size, packed size, header offset) with the values of the zip64 extra field put in."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            body = extra[at + 4 : at + 4 + length]
            wanted = sum(field == _BIG for field in fields)
            if len(body) >= 8 * wanted:
                values = iter(struct.unpack_from(f"<{wanted}Q", body))
                one, two, three = fields
                return (
                    next(values) if one == _BIG else one,
                    next(values) if two == _BIG else two,
                    next(values) if three == _BIG else three,
                )
        at += 4 + length
    return zone.fail(f"record {name} has no zip64 sizes")


def _data_offsets(entries: list[_Entry], end: int, alignment: int) -> dict[int, int]:
    """Index of record -> offset of its data, for those where both computations agree."""
    found: dict[int, int] = {}
    stop = end
    for k in range(len(entries) - 1, -1, -1):
        _, header, nbytes, _, name_nbytes = entries[k]
        # torch's writer: 30 fixed + name + 4 of the padding field, with zip64 4 and 8 for each value in it
        least = header + 34 + name_nbytes
        large = nbytes >= _BIG
        if large or header >= _BIG:
            least += 4 + 16 * large + 8 * (header >= _BIG)
        offset = -(-least // alignment) * alignment
        if stop - offset - nbytes in ((16, 24) if nbytes else (0, 16, 24)):  # miniz: no descriptor after nothing
            found[k] = offset
        stop = header
    return found


def _alignment(zone: _Range, entry: _Entry) -> int:
    if entry.nbytes > 8:
        return 64
    at = _from_local_header(zone, entry)
    text = zone.read(at, entry.nbytes)
    return max(1, min(int(text), 1 << 30)) if text.isdigit() else 64


def _from_local_header(zone: _Range, entry: _Entry) -> int:
    """Offset of the data as the local header says it."""
    local = _LOCAL.unpack(zone.read(entry.header, _LOCAL.size))
    if local[0] != b"PK\x03\x04":
        zone.fail(f"there is no record at {entry.header}, where its directory names {entry.name}")
    return entry.header + _LOCAL.size + int(local[9]) + int(local[10])
