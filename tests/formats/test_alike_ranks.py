"""Rank files that are compared instead of read: the same catalog, the same errors, whatever a file holds."""

from __future__ import annotations

import io
import pickletools
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from merge_stream.errors import MergeStreamError
from merge_stream.formats._alike_ranks import AlikeRanks
from merge_stream.opening import open_checkpoint
from merge_stream.tensors.ref import ShardTable
from tests.makers.dtensor import Spread, write_ranks

EVEN = {
    "model.embed_tokens.weight": ((48, 6), [Shard(0)]),
    "model.a.weight": ((24, 24), [Shard(0)]),
    "model.a.bias": ((24,), [Shard(0)]),
    "model.b.weight": ((24, 4), [Replicate()]),
}


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks that were taken in by comparison."""
    taken: list[int] = []
    take = AlikeRanks.take

    def noted(self: AlikeRanks, rank: int, name: str) -> int:
        nbytes = take(self, rank, name)
        if nbytes:
            taken.append(rank)
        return nbytes

    monkeypatch.setattr(AlikeRanks, "take", noted)
    return taken


def one_dim(folder: Path, ranks: int, *, uneven: bool = False) -> Path:
    """FSDP2 over all ranks; where uneven, the last piece of the first tensor is shorter."""
    shapes = {name: ((47, 6) if uneven and shape == (48, 6) else shape, where) for name, (shape, where) in EVEN.items()}
    tensors = {name: Spread(torch.randn(shape), where) for name, (shape, where) in shapes.items()}
    return write_ranks(folder, (ranks,), {**tensors, "model.c.weight": torch.ones(5)})


def two_dims(folder: Path) -> Path:
    tensors = {
        "model.a.weight": Spread(torch.randn(16, 8), [Shard(0), Shard(1)]),
        "model.b.weight": Spread(torch.randn(16, 8), [Replicate(), Shard(0)]),
        "model.c.weight": Spread(torch.randn(16), [Shard(0), Replicate()]),
    }
    return write_ranks(folder, (4, 2), tensors)


def table(of: ShardTable | None) -> Any:
    return of and [column.tolist() for column in (of.start, of.stop, of.file, of.offset)]


def outcome(folder: Path) -> Any:
    """The catalog in plain values, or the error."""
    try:
        catalog = open_checkpoint([folder])
    except MergeStreamError as error:
        return type(error).__name__, str(error)
    tensors = {n: (str(t.dtype), t.shape, table(t.shards), table(t.replicas)) for n, t in catalog.tensors.items()}
    sums = [list(reader.ranges(catalog)) if hasattr(reader, "ranges") else None for reader in catalog.checksums]
    return tensors, dict(catalog.facts), dict(catalog.ignored), catalog.notes, sums


def read_in_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(AlikeRanks, "take", lambda _self, _rank, _name: 0)
        return outcome(folder)


def test_equal_pieces_are_compared(tmp_path: Path, compared: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = one_dim(tmp_path / "ckpt", 24)
    found = outcome(folder)
    assert compared == [*range(1, 10), *range(11, 24)]  # 0 and 10 are read: a name of another length
    assert found == read_in_full(folder, monkeypatch)
    assert len(found[0]["model.a.weight"][2][0]) == 24


def test_a_shorter_last_piece_is_read(tmp_path: Path, compared: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = one_dim(tmp_path / "ckpt", 6, uneven=True)
    found = outcome(folder)
    assert compared == [1, 2, 3, 4]
    assert found == read_in_full(folder, monkeypatch)


def test_meshes_of_two_dims(tmp_path: Path, compared: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = two_dims(tmp_path / "ckpt")
    found = outcome(folder)
    assert len(compared) >= 4
    assert found == read_in_full(folder, monkeypatch)


@pytest.mark.parametrize("make", [lambda folder: one_dim(folder, 4), two_dims], ids=["1-D", "2-D"])
def test_files_that_changed_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    folder = make(tmp_path / "ckpt")
    first, second = sorted(folder.glob("*.pt"))[1:3]
    content = first.read_bytes(), second.read_bytes()
    second.write_bytes(content[0])
    first.write_bytes(content[1])
    found = outcome(folder)
    assert found[0] == "CorruptCheckpointError"
    assert found == read_in_full(folder, monkeypatch)


class Opened:
    """A rank file whose data.pkl can be changed; its checksum is taken out, so that nothing else sees the change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = bytearray(path.read_bytes())
        with zipfile.ZipFile(io.BytesIO(self.content)) as archive:
            info = next(i for i in archive.infolist() if i.filename.endswith("/data.pkl"))
            at = archive.start_dir
        while self.content[at + 46 : at + 46 + len(info.filename)] != info.filename.encode():
            at += 46 + sum(struct.unpack("<3H", self.content[at + 28 : at + 34]))
        self.content[at + 16 : at + 20] = bytes(4)
        lengths = struct.unpack("<2H", self.content[info.header_offset + 26 : info.header_offset + 30])
        self.start = info.header_offset + 30 + sum(lengths)
        self.pickled = bytes(self.content[self.start : self.start + info.file_size])

    def write(self, pickled: bytes) -> None:
        assert len(pickled) == len(self.pickled)
        self.content[self.start : self.start + len(pickled)] = pickled
        self.path.write_bytes(self.content)


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda folder: one_dim(folder, 3), two_dims], ids=["1-D", "2-D"])
def test_any_changed_byte_gives_what_reading_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compared: list[int], make: Any
) -> None:
    """Bytes of opcodes, numbers and texts are changed in one file; comparing may never accept what reading refuses."""
    folder = make(tmp_path / "ckpt")
    file = Opened(folder / next(p.name for p in sorted(folder.glob("*.pt")) if "rank_1" in p.name))
    random.seed(5)
    numbers = [
        (at + 1, 1 if op.name == "BININT1" else 2)
        for op, _, at in pickletools.genops(file.pickled)
        if op.name in {"BININT1", "BININT2"} and at is not None
    ]
    texts = [
        at + 5 + random.randrange(len(str(arg)))
        for op, arg, at in pickletools.genops(file.pickled)
        if op.name == "BINUNICODE" and arg and at is not None
    ]
    places = [
        *(at for at, _ in numbers),
        *(at + n - 1 for at, n in numbers if n > 1),
        *texts,
        *random.sample(range(len(file.pickled)), 120),
    ]
    accepted = 0
    for place in places:
        for value in {(file.pickled[place] + 1) % 256, random.randrange(256)}:
            changed = bytearray(file.pickled)
            changed[place] = value
            file.write(bytes(changed))
            compared.clear()
            found = outcome(folder)
            accepted += 1 in compared and bytes(changed) != file.pickled
            assert found == read_in_full(folder, monkeypatch), (place, value)
    assert accepted  # some of these are numbers in the mesh that mean nothing


def test_a_name_that_differs_is_no_other_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = one_dim(tmp_path / "ckpt", 3)
    file = Opened(folder / "model_world_size_3_rank_1.pt")
    file.write(file.pickled.replace(b"model.b.weight", b"model.d.weight"))
    found = outcome(folder)
    assert found[0] == "IncompleteShardsError"
    assert "model.b.weight" in found[1] or "model.d.weight" in found[1]
    assert found == read_in_full(folder, monkeypatch)
