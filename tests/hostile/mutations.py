"""Structured damage to files of real checkpoints: what a bad disk, a bad copy or a bad person would do."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
import zlib

__all__ = ["mutated"]

_NUMBERS = (0, 1, 2, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1)
_OPCODES = b"NK)]}(tuRbqrhjXcQs.\x85\x86\x87\x81\x80\x88\x89\x8f\x90\x91\x92\x93\x94\x8a02M J1eldoU"
_WORDS = (-1, 0, 2**62, 2**70, 1.5, None, True, [], {}, "..", "/etc/passwd", "a\nb", "\u202egnp", "x" * 5000, [[]] * 70)


def mutated(name: str, data: bytes, rng: random.Random) -> bytes:
    """`data` of the file `name` with one to four changes of one kind."""
    kinds = [_bytes, _numbers, _cut, _spliced]
    if data.startswith(b"PK"):
        kinds += [_in_zip] * 4 + [_zip_directory]
    elif name.endswith(".metadata"):
        kinds += [_opcodes] * 3
    elif name.endswith(".json"):
        kinds += [_document] * 3
    elif name.endswith(".safetensors"):
        kinds += [_header] * 4
    change = rng.choice(kinds)
    for _ in range(rng.choice((1, 1, 2, 4))):
        data = change(data, rng)
    return data


def _bytes(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        if out:
            out[rng.randrange(min(len(out), rng.choice((64, 4096, 1 << 30))))] ^= 1 << rng.randrange(8)
    return bytes(out)


def _numbers(data: bytes, rng: random.Random) -> bytes:
    kind = rng.choice(("<H", "<I", "<Q"))
    at = rng.randrange(max(len(data) - 8, 1))
    value = struct.pack(kind, rng.choice(_NUMBERS) & ((1 << (8 * struct.calcsize(kind))) - 1))
    return data[:at] + value + data[at + len(value) :]


def _cut(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] if rng.random() < 0.7 else data[:at] + data[at + rng.randrange(1, 64) :]


def _spliced(data: bytes, rng: random.Random) -> bytes:
    a, b, n = rng.randrange(len(data) + 1), rng.randrange(len(data) + 1), rng.randrange(1, 200)
    return data[:a] + data[b : b + n] + data[a + n * rng.randrange(2) :]


def _opcodes(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out)) if out else 0
        what = rng.randrange(4)
        if what == 0:
            out[at : at + 1] = bytes([rng.choice(_OPCODES)])
        elif what == 1:
            out[at:at] = bytes(rng.choice(_OPCODES) for _ in range(rng.randint(1, 5)))
        elif what == 2:
            del out[at : at + rng.randint(1, 4)]
        else:
            run = bytes(out[at : at + rng.randint(1, 40)])
            out[at:at] = run * rng.choice((1, 2, 50))
    return bytes(out)


def _in_zip(data: bytes, rng: random.Random) -> bytes:
    """The pickle inside changed, with a directory that fits it."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    except (
        zipfile.BadZipFile,
        ValueError,
        OSError,
        NotImplementedError,
        zlib.error,
        RuntimeError,
        struct.error,
        EOFError,
    ):
        return _bytes(data, rng)
    what = rng.randrange(8)
    if what == 0 and records:
        del records[rng.randrange(len(records))]
    elif what == 1 and records:
        at = rng.randrange(len(records))
        records[at] = (records[at][0], _cut(records[at][1], rng))
    else:
        records = [
            (n, rng.choice((_opcodes, _bytes, _numbers))(d, rng) if n.endswith("data.pkl") else d) for n, d in records
        ]
    out = io.BytesIO()
    compression = zipfile.ZIP_DEFLATED if rng.random() < 0.02 else zipfile.ZIP_STORED
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, content in records:
            archive.writestr(zipfile.ZipInfo(name), content, compression)
    return out.getvalue()


def _zip_directory(data: bytes, rng: random.Random) -> bytes:
    at = data.rfind(b"PK\x01\x02", 0, len(data) - rng.randrange(min(len(data), 4000)))
    if at < 0:
        return _bytes(data, rng)
    out = bytearray(data)
    out[min(at + rng.randrange(46), len(out) - 1)] = rng.randrange(256)
    return bytes(out)


def _replaced(value: object, rng: random.Random) -> object:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: _replaced(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], _replaced(value[at], rng), *value[at + 1 :]]
    if type(value) is int and rng.random() < 0.6:
        return value + rng.choice((-1, 1, 2**31, 2**62))
    return rng.choice(_WORDS)


def _document(data: bytes, rng: random.Random) -> bytes:
    try:
        return json.dumps(_replaced(json.loads(data), rng)).encode()
    except (ValueError, RecursionError):
        return _bytes(data, rng)


def _header(data: bytes, rng: random.Random) -> bytes:
    n = int.from_bytes(data[:8], "little")
    if not 0 < n < len(data):
        return _bytes(data, rng)
    text = _document(data[8 : 8 + n], rng)
    claimed = len(text) if rng.random() < 0.9 else rng.choice(_NUMBERS)
    return claimed.to_bytes(8, "little") + text + data[8 + n :]
