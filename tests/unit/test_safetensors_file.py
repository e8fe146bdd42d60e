"""Safetensors headers: the library is the oracle both ways, and no lie in a header is believed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from merge_stream.containers.json_file import read_json
from merge_stream.containers.safetensors_file import HeaderEntry, build_header, parse_header, read_header
from merge_stream.errors import CorruptCheckpointError, MergeStreamError, TruncatedFileError, UnsupportedError
from merge_stream.storage.local import LocalTree
from merge_stream.storage.memory import MemoryTree
from merge_stream.tensors.dtype import DTYPES, DType, dtype_named

NUMPY = [d for d in DTYPES if d.kind in {"float", "int", "bool"} and d.name != "BF16"]
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).filter(lambda n: n != "__metadata__")
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def raw(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def spec(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def refusal(data: bytes, error: type[MergeStreamError] = CorruptCheckpointError) -> str:
    with pytest.raises(error) as caught:
        parse_header(data, len(data), "x.safetensors")
    assert "x.safetensors" in caught.value.message
    assert caught.value.hint
    return caught.value.message


@given(st.dictionaries(names, st.tuples(st.sampled_from(NUMPY), shapes), max_size=8))
def test_a_file_of_the_library_is_parsed_equal(model: dict[str, tuple[DType, tuple[int, ...]]]) -> None:
    arrays = {
        name: np.random.default_rng(k).integers(0, 2, shape).astype(dtype.numpy())
        for k, (name, (dtype, shape)) in enumerate(model.items())
    }
    data = safetensors.numpy.save(arrays, {"format": "pt"})
    found = read_header(MemoryTree({"m.safetensors": data}), "m.safetensors")
    assert found.metadata == {"format": "pt"}
    assert found.tensors.keys() == arrays.keys()
    for name, tensor in found.tensors.items():
        assert (tensor.dtype, tensor.shape) == model[name]
        assert data[tensor.offset : tensor.offset + tensor.nbytes] == arrays[name].tobytes()


@given(st.dictionaries(names, st.tuples(st.sampled_from(NUMPY), shapes), max_size=8), st.sampled_from([1, 8, 64, 4096]))
def test_a_built_header_is_accepted_by_the_library(model: dict[str, tuple[DType, tuple[int, ...]]], align: int) -> None:
    entries, data = [], b""
    for k, (name, (dtype, shape)) in enumerate(sorted(model.items(), key=lambda item: -item[1][0].itemsize)):
        values = np.random.default_rng(k).integers(0, 2, shape).astype(dtype.numpy()).tobytes()
        entries.append(HeaderEntry(name, dtype, shape, len(data), len(data) + len(values)))
        data += values
    header = build_header(entries, align=align)
    assert len(header) % align == 0
    loaded = safetensors.numpy.load(header + data)
    assert {name: (a.dtype, a.shape) for name, a in loaded.items()} == {
        name: (dtype.numpy(), shape) for name, (dtype, shape) in model.items()
    }
    parsed = parse_header(header, len(header) + len(data), "x")
    assert parsed.data_start == len(header)
    assert [(n, t.dtype, t.shape, t.offset - len(header)) for n, t in parsed.tensors.items() if t.nbytes] == [
        (e.name, e.dtype, e.shape, e.start) for e in entries if e.stop > e.start
    ]


def test_safe_open_reads_a_built_file_with_its_metadata(tmp_path: Path) -> None:
    entries = [HeaderEntry("w", dtype_named("BF16") or DTYPES[0], (2, 3), 0, 12)]
    (tmp_path / "m.safetensors").write_bytes(build_header(entries) + bytes(12))
    with safetensors.safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert str(file.get_slice("w").get_dtype()) == "BF16"
    found = read_header(LocalTree.of([tmp_path]), "m.safetensors")
    assert found.data_start % 64 == 0


def test_a_header_longer_than_the_first_read_is_read_whole() -> None:
    arrays = {f"layers.{k}.some_quite_long_name_of_a_weight": np.full(2, k) for k in range(2000)}
    tree = MemoryTree({"m": safetensors.numpy.save(arrays)})
    assert len(read_header(tree, "m").tensors) == 2000


def test_entries_that_do_not_tile_are_not_built() -> None:
    f32 = DTYPES[1]
    with pytest.raises(ValueError, match="lies at"):
        build_header([HeaderEntry("a", f32, (2,), 4, 12)])
    with pytest.raises(ValueError, match="twice"):
        build_header([HeaderEntry("a", f32, (0,), 0, 0), HeaderEntry("a", f32, (0,), 0, 0)])


@pytest.mark.parametrize("nbytes", [0, 7])
def test_a_file_too_short_for_its_length_field_is_truncated(nbytes: int) -> None:
    assert f"{nbytes} bytes" in refusal(bytes(nbytes), TruncatedFileError)


def test_a_header_length_beyond_the_file_or_the_limit_is_refused() -> None:
    assert "claims 500 bytes" in refusal((500).to_bytes(8, "little") + b"{}", TruncatedFileError)
    assert "limit" in refusal((2**63).to_bytes(8, "little") + b"{}")


def test_a_cut_data_section_is_truncated_and_a_longer_file_is_corrupt() -> None:
    assert "end at byte" in refusal(raw({"w": spec()}, bytes(7)), TruncatedFileError)
    assert "end at byte" in refusal(raw({"w": spec()}, bytes(9)))


@pytest.mark.parametrize(
    ("header", "word"),
    [
        (b"[]", "no JSON object"),
        (b"PK\x03\x04", "no JSON object"),
        (b"{", "cannot be parsed"),
        (b'{"w": NaN}', "NaN"),
        (b'{"\xff": 1}', "cannot be parsed"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "cannot be parsed"),
        (b'{"\\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}', "Unicode"),
        ({"__metadata__": []}, "wanted an object"),
        ({"__metadata__": {"format": 1}}, "wanted a string"),
        ({"w": 3}, "described by"),
        ({"w": {"dtype": "F32"}}, "described by"),
        ({"w": spec(shape=[-2])}, "shape"),
        ({"w": spec(shape=[True])}, "shape"),
        ({"w": spec(shape=[2.0])}, "shape"),
        ({"w": spec(shape=[2**63, 0], offsets=[0, 0])}, "shape"),
        ({"w": spec(shape=[1] * 65, offsets=[0, 4])}, "shape"),
        ({"w": spec(shape="ab")}, "shape"),
        ({"w": spec(offsets=[0])}, "offsets"),
        ({"w": spec(offsets=[8, 0])}, "offsets"),
        ({"w": spec(offsets=[0, 4])}, "needs 8 bytes"),
        ({"w": spec(offsets=[4, 12])}, "hole"),
        ({"a": spec(), "b": spec(offsets=[4, 12])}, "overlaps"),
        ({"a": spec(), "b": spec(offsets=[0, 8])}, "overlaps"),
        ({"a": spec(), "b": spec(offsets=[12, 20])}, "hole"),
        ({"a": spec(), "e": spec(shape=[0], offsets=[4, 4])}, "overlaps"),
    ],
)
def test_a_lie_in_the_header_is_refused(header: object, word: str) -> None:
    assert word in refusal(raw(header, bytes(12)))


def test_an_unknown_element_type_is_named() -> None:
    assert "'F4'" in refusal(raw({"w": spec(dtype="F4")}, bytes(8)), UnsupportedError)


@given(st.binary(max_size=200), st.integers(0, 300))
def test_random_bytes_raise_only_our_errors(data: bytes, size: int) -> None:
    for text in (data, raw(b"{" + data)):
        try:
            parse_header(text, size, "x")
        except MergeStreamError:
            continue


@given(st.data())
def test_a_flipped_byte_of_a_real_header_never_gives_a_tensor_outside_the_file(data: st.DataObject) -> None:
    content = bytearray(safetensors.numpy.save({"a": np.zeros((2, 3)), "b": np.zeros(4, np.int8), "c": np.zeros(())}))
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = parse_header(bytes(content), len(content), "x")
    except MergeStreamError:
        return
    assert sum(t.nbytes for t in found.tensors.values()) == len(content) - found.data_start
    assert all(t.nbytes == math.prod(t.shape) * t.dtype.itemsize for t in found.tensors.values())


def test_read_json_gives_the_object_and_names_the_file_in_every_refusal() -> None:
    tree = MemoryTree(
        {
            "good.json": b'\xef\xbb\xbf{"a": 1, "a": 1}',
            "list.json": b"[1]",
            "cut.json": b'{"a":',
            "double.json": b'{"a": 1, "a": 2}',
            "deep.json": b"[" * 200_000,
            "latin.json": b'{"a": "\xe9"}',
        }
    )
    assert read_json(tree, "good.json", 100) == {"a": 1}
    for name in ("list.json", "cut.json", "double.json", "deep.json", "latin.json"):
        with pytest.raises(CorruptCheckpointError, match=name):
            read_json(tree, name, 1_000_000)
    with pytest.raises(CorruptCheckpointError, match="at most 5"):
        read_json(tree, "good.json", 5)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":SPEC,"a":SPEC}',
        '{"a":SPEC,"b":{"dtype":"F32","shape":[0],"data_offsets":[8,8],"dtype":"F32"}}',
        '{"__metadata__":{"k":"v","k":"v"},"a":SPEC}',
        '{"a:b":SPEC,"a:b":SPEC}',
        '{"a":SPEC,"\\u0061":SPEC}',
        '{"\\u003a":SPEC,":":SPEC}',
    ],
)
def test_a_name_that_stands_twice_is_refused_wherever_it_stands(text: str) -> None:
    header = text.replace("SPEC", '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}').encode()
    assert "twice" in refusal(len(header).to_bytes(8, "little") + header + bytes(8))


def test_colons_in_names_and_metadata_are_no_second_name() -> None:
    document = {"__metadata__": {"a:b": "c:d"}, "x:y": spec(), "é:": spec(offsets=(8, 16))}
    header = json.dumps(document).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(16)
    assert set(parse_header(data, len(data), "x").tensors) == {"x:y", "é:"}
