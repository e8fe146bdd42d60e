"""Restricted unpickling: honest files pass, bombs end early and flat, nothing is ever run."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import subprocess
import sys
import time
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest

from merge_stream.containers.pickle_guard import check_pickle
from merge_stream.containers.pickle_reader import (
    Recorder,
    StorageRecord,
    described,
    dotted_name,
    is_class,
    is_instance,
    read_pickle,
)
from merge_stream.errors import CorruptCheckpointError, MergeStreamError, TruncatedFileError, UnsafePickleError

SHARED = Path(__file__).resolve().parents[3] / "shared" / "fixtures"
DATA = Path(__file__).resolve().parents[1] / "data"


def real_pickles() -> list[tuple[str, bytes]]:
    """data.pkl of real checkpoint files, the smaller ones."""
    found = []
    for root in (DATA, SHARED / "fsdp", SHARED / "fsdp_old"):
        for path in sorted(root.rglob("model_world_size_*.pt")):
            if path.stat().st_size and zipfile.is_zipfile(path) and "evil" not in str(path):
                with zipfile.ZipFile(path) as archive:
                    name = next(n for n in archive.namelist() if n.endswith("/data.pkl"))
                    found.append((str(path), archive.read(name)))
    return found


def long4(n: int) -> bytes:
    return struct.pack("<I", n)


SHARED_TUPLES = b"(K\x01t" + b"2\x86" * 60  # t = (t, t), 60 times, from DUP
MEMO_TUPLES = b")q\x00" + b"h\x00h\x00\x86q\x00" * 60
NESTED_TUPLES = b"K\x01" + b"\x85" * 200_000
MAGIC_LIKE = b"\x8a\x0a" + b"\x01" * 10

BOMBS = {
    "steps that build nothing: POP": b"\x80\x04" + b"N0" * 4_000_000 + b"N.",
    "steps that build nothing: PROTO": b"\x80\x04" * 4_000_000 + b"N.",
    "steps that build nothing: DUP": b"\x80\x04N" + b"20" * 3_000_000 + b".",
    "steps that build nothing: memo": b"\x80\x04N" + b"q\x00" * 4_000_000 + b".",
    "steps that build nothing: BUILD": b"\x80\x04ccollections\nOrderedDict\n)Rq\x00" + b"h\x00b" * 3_000_000 + b".",
    "steps that build nothing: frames": b"\x80\x04" + b"\x95" + bytes(8) + (b"\x95" + bytes(8)) * 2_200_000 + b"N.",
    "memo index 2**31": b"\x80\x02}r" + long4(1 << 31) + b".",
    "memo index a little too high": b"\x80\x02Nr" + long4(1000) + b".",
    "bytearray of 2**60 bytes": b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + b"abc.",
    "unicode of 2**62 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"abc.",
    "bytes of 4 GB": b"\x80\x03B" + long4(0xFFFFFFF0) + b".",
    "frame of 2**40 bytes": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.",
    "int of 255 bytes": b"\x80\x02\x8a\xff" + b"\x01" * 255 + b".",
    "int of 10 bytes that is not torch's magic": b"\x80\x02" + MAGIC_LIKE + b".",
    "int of 2**31 bytes": b"\x80\x02\x8b" + long4(1 << 31) + b"\x01.",
    "text int": b"I" + b"9" * 4000 + b"\n.",
    "text long": b"L" + b"9" * 100_000 + b"L\n.",
    "text memo index": b"Np1000000000\n.",
    "text persistent id": b"Pabc\n.",
    "instance": b"(ios\nsystem\n.",
    "extension": b"\x80\x02\x82\x01.",
    "out-of-band buffer": b"\x80\x05\x97.",
    "shared tuples as key, from DUP": b"\x80\x02}" + SHARED_TUPLES + b"Ns.",
    "shared tuples as key, from the memo": b"\x80\x02}" + MEMO_TUPLES + b"Ns.",
    "shared tuples among SETITEMS": b"\x80\x02}(K\x01N" + MEMO_TUPLES + b"Nu.",
    "shared tuples in DICT": b"\x80\x02(" + MEMO_TUPLES + b"Nd.",
    "shared tuples in a frozenset": b"\x80\x04(" + MEMO_TUPLES + b"\x91.",
    "shared tuples in a set": b"\x80\x04\x8f(" + MEMO_TUPLES + b"\x90.",
    "shared tuples through torch.Size": b"\x80\x02})q\x00" + b"ctorch\nSize\nh\x00h\x00\x86\x85Rq\x00" * 60 + b"Ns.",
    "deeply nested tuple": b"\x80\x02" + NESTED_TUPLES + b".",
    "shared tuples that are no key": b"\x80\x02" + MEMO_TUPLES + b".",
    "deeply nested arguments": b"\x80\x02cx\nFoo\nq\x00)Rq\x01" + b"0h\x00h\x01\x85Rq\x01" * 100_000 + b".",
    "deeply nested tuple as key": b"\x80\x02}" + NESTED_TUPLES + b"Ns.",
    "deeply nested frozensets": b"\x80\x04(K\x01\x91"
    + b"(K\x012\x910" * 10
    + b"}"
    + b"(K\x01\x91" * 3
    + b"\x85" * 200
    + b"Ns.",
    "many tuples as keys": b"\x80\x02}("
    + b"".join(b"M" + struct.pack("<H", i) + b"K\x01\x86N" for i in range(30_000))
    + b"u.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bomb_is_refused_at_once(name: str) -> None:
    start = time.perf_counter()
    with pytest.raises(CorruptCheckpointError) as caught:
        read_pickle(BOMBS[name], "bomb.pt")
    assert time.perf_counter() - start < 1
    assert "bomb.pt" in caught.value.message
    assert caught.value.hint


CHILD = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from merge_stream.containers.pickle_reader import read_pickle
from merge_stream.errors import MergeStreamError
data = sys.stdin.buffer.read()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = used + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    read_pickle(data, "bomb.pt")
    print("read")
except MergeStreamError as error:
    print(type(error).__name__)
"""


def in_a_small_process(data: bytes, headroom: int = 64 << 20) -> str:
    source = str(Path(__file__).resolve().parents[2] / "src")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, source, str(headroom)], input=data, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return done.stdout.decode().strip()


@pytest.mark.parametrize(
    "name",
    ["memo index 2**31", "bytearray of 2**60 bytes", "int of 2**31 bytes", "shared tuples as key, from the memo",
     "deeply nested tuple as key", "bytes of 4 GB"],
)  # fmt: skip
def test_bomb_needs_no_memory(name: str) -> None:
    assert in_a_small_process(BOMBS[name]) in {"UnsafePickleError", "TruncatedFileError", "CorruptCheckpointError"}


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02" + b"]" * 300_000 + b"a" * 299_999 + b".",
        b"\x80\x02" + b"}K\x01" * 200_000 + b"N" + b"s" * 200_000 + b".",
    ],
    ids=["lists", "dicts"],
)
def test_deep_nesting_without_keys_is_harmless(data: bytes) -> None:
    assert in_a_small_process(data, 512 << 20) == "read"


def test_deep_nesting_of_recorders_is_freed_without_recursion() -> None:
    # class at memo 0, the last one at memo 1, each holds the one before it in its state
    data = b"\x80\x02cx\nFoo\nq\x00)Rq\x01" + b"0h\x00)R}K\x01h\x01sbq\x01" * 100_000 + b"."
    assert in_a_small_process(data, 512 << 20) == "read"


class TestGlobals:
    @pytest.mark.parametrize("name", ["os system", "posix system", "nt system", "subprocess Popen", "builtins eval",
        "__builtin__ exec", "builtins __import__", "sys exit", "importlib import_module", "shutil rmtree",
        "socket socket", "ctypes CDLL", "runpy run_path", "pty spawn", "code interact", "operator attrgetter",
        "torch load", "torch.hub load", "os.path join", "pickle loads", "io open"])  # fmt: skip
    def test_dangerous_ones_are_refused_by_name(self, name: str) -> None:
        module, attribute = name.split()
        with pytest.raises(UnsafePickleError, match=rf"file\.pt.*{module}\.{attribute}"):
            read_pickle(f"\x80\x02c{module}\n{attribute}\n.".encode("latin-1"), "file.pt")

    def test_reduce_of_os_system_does_not_run(self, tmp_path: Path) -> None:
        class Evil:
            def __reduce__(self) -> object:
                return os.system, (f"touch {tmp_path}/pwned",)

        for protocol in (2, 3, 4, 5):
            with pytest.raises(UnsafePickleError, match=r"posix\.system"):
                read_pickle(pickle.dumps({"w": Evil()}, protocol), "evil.pt")
        assert not list(tmp_path.iterdir())

    def test_getattr_cannot_reach_a_module(self) -> None:
        data = b"\x80\x02c__builtin__\ngetattr\nctorch\nos\nX\x06\x00\x00\x00system\x86RX\x02\x00\x00\x00id\x85R."
        root, _, _ = read_pickle(data, "x")
        assert root.dotted == "torch.os.system"
        assert root.args == ("id",)

    def test_unknown_classes_read_as_plain_data(self) -> None:
        """Case 148: classes of the trainer that are not installed here."""
        data = pickle.dumps({"args": Namespace(lr=1.0, tags=["a"]), "step": 3}, 4).replace(
            __name__.encode(), b"x" * len(__name__)
        )
        root, _, _ = read_pickle(data, "common.pt")
        assert root["step"] == 3
        assert is_instance(root["args"])
        assert root["args"].state == {"lr": 1.0, "tags": ["a"]}
        assert dotted_name(root["args"]).endswith(".Namespace")

    def test_too_many_globals(self) -> None:
        data = b"\x80\x02" + b"".join(b"cm\nn%d\n0" % i for i in range(6000)) + b"N."
        with pytest.raises(UnsafePickleError, match="different classes"):
            read_pickle(data, "x")

    @pytest.mark.parametrize(
        "state",
        [b"}X\x06\x00\x00\x00dottedX\x01\x00\x00\x00xs", b"N}X\x06\x00\x00\x00dottedX\x01\x00\x00\x00xs\x86", b"K\x01"],
    )
    @pytest.mark.parametrize(
        "name", [b"torch\nSize", b"collections\nOrderedDict", b"torch\nFoo", b"__builtin__\ngetattr"]
    )
    def test_build_cannot_change_our_classes(self, state: bytes, name: bytes) -> None:
        before = read_pickle(b"\x80\x02ctorch\nFoo\n.", "x")[0].dotted
        with pytest.raises(CorruptCheckpointError):
            read_pickle(b"\x80\x02c" + name + b"\n" + state + b"b.", "x")
        assert read_pickle(b"\x80\x02ctorch\nFoo\n.", "x")[0].dotted == before == "torch.Foo"
        with pytest.raises(TypeError):
            Recorder.dotted = "x"

    def test_messages_describe_values_without_walking_them(self) -> None:
        endless: list[object] = []
        for _ in range(60):
            endless = [endless, endless]
        assert described(endless) == "list"
        assert described((1, 2)) == "(1, 2)"
        assert described("x" * 1000) == repr("x" * 60)
        assert described(Recorder) == ""

    def test_recorders_hash_by_identity(self) -> None:
        root, _, _ = read_pickle(b"\x80\x02}(cm\nA\n)RK\x01cm\nA\n)RK\x02u.", "x")
        assert len(root) == 2


class Namespace:
    """A trainer's own class."""

    def __init__(self, **values: object) -> None:
        self.__dict__.update(values)


class TestPlainValues:
    def test_what_torch_uses(self) -> None:
        import torch

        buffer = io.BytesIO()
        torch.save(OrderedDict(a=torch.zeros(2, 3), n=torch.Size([4, 5])), buffer)
        with zipfile.ZipFile(buffer) as archive:
            root, end, storages = read_pickle(archive.read("archive/data.pkl"), "x")
        assert end
        assert isinstance(root, dict)
        assert root["n"] == (4, 5)
        assert dotted_name(root["a"]) == "torch._utils._rebuild_tensor_v2"
        assert type(root["a"].args[0]) is StorageRecord
        assert (storages["0"].kind, storages["0"].numel) == ("FloatStorage", 6)

    def test_state_dict_attributes_do_not_disturb(self) -> None:
        state = OrderedDict(a=1)
        state._metadata = OrderedDict(version=1)  # type: ignore[attr-defined]
        root, _, _ = read_pickle(pickle.dumps(state, 2), "x")
        assert root == {"a": 1}

    def test_both_forms_of_enum_pickling(self) -> None:
        by_name = b"\x80\x04c__builtin__\ngetattr\nctorch.x\nENUM\n\x8c\x03RED\x86R."
        by_value = b"\x80\x04ctorch.x\nENUM\nK\x00\x85R."
        assert dotted_name(read_pickle(by_name, "x")[0]) == "torch.x.ENUM.RED"
        assert is_class(read_pickle(by_name, "x")[0])
        assert read_pickle(by_value, "x")[0].args == (0,)

    def test_named_tuples_and_subclasses(self) -> None:
        root, _, _ = read_pickle(b"\x80\x02ctorch.m\nTensorMeta\nK\x01K\x02\x86\x81.", "x")
        assert root.args == (1, 2)
        root, _, _ = read_pickle(b"\x80\x02cm\nMyList\n)\x81(K\x01K\x02e.", "x")
        assert root.items == [1, 2]
        root, _, _ = read_pickle(b"\x80\x02cm\nMyDict\n)\x81K\x01K\x02s.", "x")
        assert root.items == [(1, 2)]

    def test_several_pickles_back_to_back(self) -> None:
        data = pickle.dumps(1, 2) + pickle.dumps("two", 4) + b"rest"
        first, at, _ = read_pickle(data, "x")
        second, end, _ = read_pickle(data, "x", start=at)
        assert (first, second, data[end:]) == (1, "two", b"rest")

    @pytest.mark.parametrize("protocol", [2, 3, 4, 5])
    def test_equal_to_pickle_for_plain_data(self, protocol: int) -> None:
        value = {
            "n": [None, True, False, 0, 255, 65535, -1, 1 << 40, -(1 << 60), 0.5, "ä" * 300, b"x" * 300, "s"],
            "t": ((), (1,), (1, 2), (1, 2, 3), tuple(range(10))),
            ("a", 1): {"deep": [{}, [], [[]]]},
            3: {i: str(i) for i in range(3000)},
        }
        if protocol < 3:
            value["n"] = [x for x in value["n"] if not isinstance(x, bytes)]
        data = pickle.dumps(value, protocol)
        assert read_pickle(data, "x")[:2] == (value, len(data))

    @pytest.mark.parametrize(
        "pid",
        [
            b"K\x01",
            b"X\x07\x00\x00\x00storage\x85",
            b"(X\x06\x00\x00\x00modulectorch\nX\nNNNt",
            b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000NJ\xff\xff\xff\xfft",
        ],
        ids=["int", "short", "module", "negative"],
    )
    def test_foreign_persistent_ids_are_refused(self, pid: bytes) -> None:
        with pytest.raises(CorruptCheckpointError, match="persistent id"):
            read_pickle(b"\x80\x02" + pid + b"Q.", "x")


class TestBroken:
    @pytest.mark.parametrize("data", [b"", b"\x80", b"\x80\x02", b"\x80\x02}", b"\x80\x02X\x05\x00\x00\x00ab"])
    def test_ends_early(self, data: bytes) -> None:
        with pytest.raises(TruncatedFileError):
            read_pickle(data, "cut.pt")

    @pytest.mark.parametrize("data", [b"\x80\x09N.", b"\xff\xff", b"\x80\x02h\x07.", b"\x80\x02t.", b"\x80\x02)R."])
    def test_no_pickle(self, data: bytes) -> None:
        with pytest.raises(CorruptCheckpointError):
            read_pickle(data, "bad.pt")

    def test_every_prefix_of_a_real_one(self) -> None:
        data = pickle.dumps({"a": [1, (2, 3)], "b": "text"}, 2)
        for cut in range(len(data)):
            with pytest.raises(CorruptCheckpointError):
                read_pickle(data[:cut], "cut.pt")


def test_real_files_pass_and_scan_to_their_end() -> None:
    found = real_pickles()
    assert found
    for path, data in found:
        assert check_pickle(data, 0, path) == len(data)
        root, _, storages = read_pickle(data, path)
        assert isinstance(root, dict)
        assert storages


def test_mutated_real_files_give_data_or_our_errors_only() -> None:
    """4000 mutations, one to five bytes each: no other exception, no hang, no crash."""
    source = random.Random(20240607)
    pickles = [data for _, data in real_pickles()]
    pickles = source.sample(pickles, min(8, len(pickles)))
    start = time.perf_counter()
    read = refused = 0
    for _ in range(4000):
        data = bytearray(source.choice(pickles)[:3000] + b"." * 3)
        for _ in range(source.randint(1, 5)):
            at = source.randrange(len(data))
            if source.random() < 0.3:
                del data[at]
            elif source.random() < 0.3:
                data.insert(at, source.choice(b"}](tR\x81bues012\x85\x86\x87hjqrXK.Q"))
            else:
                data[at] = (
                    source.choice(b"}](tR\x81bues012\x85\x86\x87hjqrXK.Q\x94\x93\x95")
                    if source.random() < 0.5
                    else source.randrange(256)
                )
        try:
            read_pickle(bytes(data), "mutant.pt")
            read += 1
        except MergeStreamError:
            refused += 1
    assert refused > 1000
    assert time.perf_counter() - start < 60


def test_random_programs_that_pass_the_guard_are_quick() -> None:
    """Random opcode sequences, repeated so that any growth compounds: accepted ones unpickle in no time."""
    source = random.Random(7)
    plain = [bytes([code]) for code in b")}]2(tR\x81sua0b\x91\x90\x8fdl\x85\x86\x87"]
    longer = [b"K\x01", b"q\x00", b"q\x01", b"h\x00", b"h\x01", b"ctorch\nSize\n", b"cm\nA\n"]
    pieces = plain + longer
    accepted = 0
    for _ in range(3000):
        setup = b"K\x01q\x00q\x01" + b"".join(source.choice(pieces) for _ in range(source.randint(0, 4)))
        body = b"".join(source.choice(pieces) for _ in range(source.randint(1, 8)))
        start = time.perf_counter()
        try:
            read_pickle(b"\x80\x04" + setup + body * 80 + b"}h\x00Ns}h\x01Ns.", "random.pt")
            accepted += 1
        except MergeStreamError:
            pass
        assert time.perf_counter() - start < 2, (setup, body)
    assert accepted > 50
