"""`--max-mem` bounds the reading of metadata: small files that become large are refused before they do."""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from merge_stream.containers.json_cost import json_cost
from merge_stream.containers.json_file import read_json
from merge_stream.containers.pickle_guard import check_pickle
from merge_stream.containers.pickle_reader import read_pickle
from merge_stream.containers.pickle_source import PickleSource
from merge_stream.containers.safetensors_file import read_header
from merge_stream.containers.torch_file import open_torch_file
from merge_stream.errors import CorruptCheckpointError, MemoryLimitTooSmallError, MergeStreamError
from merge_stream.formats._dcp_metadata import read_metadata
from merge_stream.storage.allowance import MetadataAllowance
from merge_stream.storage.local import LocalTree
from merge_stream.storage.memory import MemoryTree

DATA = Path(__file__).resolve().parents[1] / "data"
SETS = b"\x80\x02](" + b"\x8f" * 150_000 + b"e."


class Noted(MetadataAllowance):
    """An allowance of `limit` bytes, that does not look at the process."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.asked = 0

    def room(self) -> int:
        return self.limit_bytes

    def require(self, nbytes: int, where: str) -> None:
        self.asked = max(self.asked, nbytes)
        if nbytes > self.limit_bytes:
            self.refuse(nbytes, where)


def torch_zip(pickled: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", b"little")
    return out.getvalue()


def source_of(data: bytes, limit: int) -> PickleSource:
    return PickleSource(lambda at, n: data[at : at + n], len(data), "bomb.pt", Noted(limit))


def peak_of(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        kept = call()
        return tracemalloc.get_traced_memory()[1]
    except MergeStreamError:
        return tracemalloc.get_traced_memory()[1]
    finally:
        kept = None  # noqa: F841 - alive until the peak was read
        tracemalloc.stop()


PICKLES = {
    "sets": SETS,
    "nones": b"\x80\x02](" + b"N" * 1_000_000 + b"e.",
    "lists": b"\x80\x02](" + b"]" * 300_000 + b"e.",
    "dicts": b"\x80\x02](" + b"}K\x01K\x02s" * 60_000 + b"e.",
    "memo": b"\x80\x02](" + b"".join(b"K\x01r" + struct.pack("<I", i) for i in range(200_000)) + b"e.",
    "gaps in the memo": b"\x80\x02](" + b"N" * 500_000 + b"r" + struct.pack("<I", 500_000) + b"e.",
    "wide text": b"\x80\x04](\x8d" + struct.pack("<Q", 3_000_004) + b"a" * 3_000_000 + "\U0001f600".encode() + b"e.",
    "a set that grows": b"\x80\x04\x8f(" + b"".join(b"J" + struct.pack("<i", i) for i in range(100_000)) + b"\x90.",
    "copied arguments": b"\x80\x02cx\nFoo\nq\x00(" + b"N" * 50_000 + b"tq\x010](" + b"h\x00h\x01R" * 300 + b"e.",
    "copied keywords": b"\x80\x04cx\nFoo\nq\x00}q\x01("
    + b"".join(b"X\x04\x00\x00\x00" + b"%04dN" % i for i in range(3000))
    + b"u0]("
    + b"h\x00)h\x01\x92" * 300
    + b"e.",
}

CASES = [
    pytest.param(name, marks=pytest.mark.slow) if name in {"nones", "gaps in the memo", "memo", "lists"} else name
    for name in PICKLES
]


@pytest.mark.parametrize("name", CASES)
def test_what_a_pickle_builds_is_within_what_was_counted(name: str) -> None:
    data = PICKLES[name]
    need = 1 << 20
    while True:  # the smallest power of two that is let pass
        try:
            check_pickle(source_of(data, need), 0, "bomb.pt")
            break
        except MemoryLimitTooSmallError:
            need *= 2
    assert peak_of(lambda: read_pickle(source_of(data, need), "bomb.pt")) <= need * 1.05 + (1 << 20)


@pytest.mark.parametrize("name", CASES)
def test_a_bomb_is_refused_before_it_grows(name: str) -> None:
    limit = 8 << 20
    data = PICKLES[name]

    def read() -> object:
        with pytest.raises(MemoryLimitTooSmallError, match=r"bomb\.pt"):
            read_pickle(source_of(data, limit), "bomb.pt")
        return None

    assert peak_of(read) < limit + (48 << 20)  # the scan of one window is beside it
    with pytest.raises(MemoryLimitTooSmallError) as caught:
        read_pickle(source_of(data, limit), "bomb.pt")
    assert "--max-mem" in caught.value.hint


def test_the_hint_names_a_bound_that_works() -> None:
    data = torch_zip(SETS)
    with pytest.raises(MemoryLimitTooSmallError) as caught:
        open_torch_file(MemoryTree({"m.pt": data}, allowance=MetadataAllowance(1)), "m.pt")
    enough = int(caught.value.hint.split("--max-mem ")[1].split("M")[0]) * 1_000_000
    open_torch_file(MemoryTree({"m.pt": data}, allowance=MetadataAllowance(enough)), "m.pt")


def test_a_sparse_file_is_read_as_far_as_it_makes_sense(tmp_path: Path) -> None:
    with (tmp_path / ".metadata").open("wb") as file:
        file.write(b"\x80\x02")
        file.truncate(3 << 30)
    tree = LocalTree.of([tmp_path], MetadataAllowance(4_000_000_000))
    assert peak_of(lambda: read_metadata(tree)) < 8 << 20
    with pytest.raises(CorruptCheckpointError, match="no pickle opcode"):
        read_metadata(tree)


def test_a_value_longer_than_memory_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / ".metadata").open("wb") as file:
        file.write(b"\x80\x04\x8d" + struct.pack("<Q", (3 << 30) - 100))
        file.truncate(3 << 30)
    tree = LocalTree.of([tmp_path], MetadataAllowance(500_000_000))
    with pytest.raises(MemoryLimitTooSmallError, match="metadata"):
        read_metadata(tree)


@pytest.mark.parametrize("text", [
    "[" + ",".join(["[]"] * 200_000) + "]", "[" + ",".join(["{}"] * 200_000) + "]",
    json.dumps({f"k{i}": i for i in range(100_000)}), json.dumps([{"a": {"b": 1.5}}] * 60_000),
    json.dumps(["\U0001f600" * 20] * 10_000), json.dumps(["\U0001f600" + "a" * 100] * 10_000, ensure_ascii=False),
    "[" + ",".join(map(str, range(300_000))) + "]",
])  # fmt: skip
def test_what_json_becomes_is_within_what_was_counted(text: str) -> None:
    data = b'{"x":' + text.encode() + b"}"
    tree = MemoryTree({"c.json": data}, allowance=Noted(1 << 40))
    peak = peak_of(lambda: read_json(tree, "c.json", 1 << 30))
    assert peak <= json_cost(data) + len(data)
    assert json_cost(data) < 12 * peak
    with pytest.raises(MemoryLimitTooSmallError, match=r"c\.json"):
        read_json(MemoryTree({"c.json": data}, allowance=Noted(len(data) + 1)), "c.json", 1 << 30)


def test_a_large_safetensors_header_is_counted_before_it_is_parsed() -> None:
    document = {f"m.{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(30_000)}
    text = json.dumps(document).encode()
    data = struct.pack("<Q", len(text)) + text
    allowance = Noted(1 << 40)
    peak = peak_of(lambda: read_header(MemoryTree({"m.safetensors": data}, allowance=allowance), "m.safetensors"))
    assert peak <= allowance.asked + 2 * len(data)
    with pytest.raises(MemoryLimitTooSmallError, match=r"m\.safetensors"):
        read_header(MemoryTree({"m.safetensors": data}, allowance=Noted(allowance.asked - 1)), "m.safetensors")


def test_a_zip_directory_is_counted_before_it_is_read() -> None:
    data = torch_zip(pickle.dumps({}, 2))
    with pytest.raises(MemoryLimitTooSmallError, match=r"m\.pt"):
        open_torch_file(MemoryTree({"m.pt": data}, allowance=Noted(500)), "m.pt")


def test_a_long_pickle_is_read_in_blocks_and_gives_the_same(tmp_path: Path) -> None:
    value = {f"layer.{i}.weight": (i, [float(i)], "x" * (i % 300)) for i in range(60_000)}
    data = pickle.dumps(value, 2)
    assert len(data) > 5 << 20
    source = source_of(data, 1 << 40)
    assert not source.whole
    assert read_pickle(source, "x")[0] == value
    for cut in (len(data) - 1, 5 << 20, (4 << 20) + 7):
        with pytest.raises(CorruptCheckpointError):
            read_pickle(source_of(data[:cut], 1 << 40), "x")


def test_honest_files_count_a_few_times_what_they_take() -> None:
    for path in sorted(DATA.glob("fsdp/*/ckpt/.metadata")):
        data = path.read_bytes()
        peak = peak_of(lambda data=data: read_pickle(data, "x"))
        read_pickle(source_of(data, 4 * peak), "x")


@pytest.mark.memory
def test_the_whole_process_stays_below_max_mem(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(torch_zip(b"\x80\x02](" + b"\x8f" * 3_900_000 + b"e."))
    script = (
        "import sys\nfrom merge_stream.cli import run\nfrom merge_stream.engine.memory import peak_rss\n"
        "code = run(['plan', sys.argv[1], '--max-mem', '250M'])\n"
        "print(code, peak_rss())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    code, peak = done.stdout.split()[-2:]
    assert int(code) == 4
    assert "--max-mem 250 MB is too small to read" in done.stderr
    assert int(peak) < 250_000_000


def test_random_programs_stay_within_what_was_counted() -> None:
    rng = random.Random(5)
    pieces = (b"N", b"K\x01", b")", b"]", b"}", b"\x8f", b"M\x01\x02", b"\x85", b"\x86", b"2", b"(NNe", b"q\x00",
              b"h\x00", b"X\x03\x00\x00\x00abc", b"(K\x01NK\x02Nu", b"(K\x01K\x02t", b"0", b"(K\x05\x90")  # fmt: skip
    for _ in range(60):
        data = b"\x80\x04](" + b"".join(rng.choice(pieces) for _ in range(3000)) + b"e."
        need = 1 << 12
        while need < 1 << 30:
            source = source_of(data, need)
            try:
                check_pickle(source, 0, "x")
                break
            except MemoryLimitTooSmallError:
                need *= 2
            except MergeStreamError:
                break
        assert peak_of(lambda data=data: read_pickle(data, "x")) <= max(need, 1 << 18) * 1.05 + (1 << 17)
