"""Hostile folders: paths inside files, special files, names that mislead, zips and headers that lie."""

from __future__ import annotations

import io
import json
import os
import socket
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from merge_stream.containers.safetensors_file import read_header
from merge_stream.containers.torch_file import open_torch_file
from merge_stream.errors import (
    CheckpointError,
    CorruptCheckpointError,
    MergeStreamError,
    TruncatedFileError,
    UnknownFormatError,
    UnsafePickleError,
    UnsupportedError,
)
from merge_stream.opening import open_checkpoint
from merge_stream.storage.memory import MemoryTree

DATA = Path(__file__).resolve().parents[1] / "data"
INDEX = "model.safetensors.index.json"


def weights(*names: str, **changed: object) -> bytes:
    document = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * k, 4 * k + 4]} for k, name in enumerate(names)
    }
    for name, value in changed.items():
        document[names[0]][name] = value
    text = json.dumps(document).encode()
    return struct.pack("<Q", len(text)) + text + bytes(4 * len(names))


def refused(folder: Path, kind: type[MergeStreamError], words: str) -> MergeStreamError:
    with pytest.raises(kind, match=words) as caught:
        open_checkpoint([folder])
    assert caught.value.hint
    return caught.value


class TestPathsInsideFiles:
    @pytest.mark.parametrize("path", ["/etc/passwd", "../secret.safetensors", "a/../../secret.safetensors"])
    def test_an_index_selects_only_files_of_its_folder(self, tmp_path: Path, path: str) -> None:
        folder = tmp_path / "in"
        folder.mkdir()
        (tmp_path / "secret.safetensors").write_bytes(weights("w"))
        (folder / INDEX).write_text(json.dumps({"weight_map": {"w": path}}))
        refused(folder, CorruptCheckpointError, "points out of the folder")

    def test_a_link_to_a_regular_file_is_followed(self, tmp_path: Path) -> None:
        folder = tmp_path / "in"
        folder.mkdir()
        (tmp_path / "blob").write_bytes(weights("w"))
        (folder / "model.safetensors").symlink_to(tmp_path / "blob")
        assert list(open_checkpoint([folder]).tensors) == ["w"]

    def test_a_link_in_a_circle_or_to_nothing_is_no_file(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").symlink_to(tmp_path / "model.safetensors")
        (tmp_path / "pytorch_model.bin").symlink_to(tmp_path / "absent")
        refused(tmp_path, UnknownFormatError, "is empty")


class TestSpecialFiles:
    def fifo(self, path: Path) -> None:
        os.mkfifo(path)

    def device(self, path: Path) -> None:
        path.symlink_to("/dev/zero")

    def socket(self, path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as here:
            os.chdir(path.parent)
            here.bind(path.name)

    def folder(self, path: Path) -> None:
        path.mkdir()

    @pytest.mark.timeout(20)
    @pytest.mark.parametrize("kind", ["fifo", "device", "socket", "folder"])
    @pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", ".metadata", "config.json"])
    def test_they_are_never_opened(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str) -> None:
        monkeypatch.chdir(tmp_path)
        getattr(self, kind)(tmp_path / name)
        refused(tmp_path, UnknownFormatError, "is empty")


class TestNames:
    @pytest.mark.parametrize(
        "name", ["a\nerror: all is well", "a\x00b", "\u202egnp.w", "a\u200bb", "w" * 5000, "\x1b[2Jw"]
    )
    def test_what_misleads_is_refused_and_shown_escaped(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "model.safetensors").write_bytes(weights(name))
        error = refused(tmp_path, CorruptCheckpointError, "tensor")
        assert error.message.isprintable()
        assert error.message.isascii()
        assert len(error.message) < 500

    def test_letters_of_any_language_are_names(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").write_bytes(weights("couche.é.权重"))
        assert list(open_checkpoint([tmp_path]).tensors) == ["couche.é.权重"]


def rezipped(change: Callable[[zipfile.ZipFile, list[tuple[str, bytes]]], None]) -> bytes:
    path = sorted(DATA.glob("fsdp/verl_fsdp2_w2_legacy/ckpt/*rank_0.pt")) or sorted(DATA.rglob("*rank_0.pt"))
    with zipfile.ZipFile(next(p for p in (*path, *DATA.rglob("*rank_0.pt")) if zipfile.is_zipfile(p))) as archive:
        records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        change(archive, records)
    return out.getvalue()


class TestZips:
    def opened(self, data: bytes) -> object:
        return open_torch_file(MemoryTree({"m.pt": data}), "m.pt")

    def test_a_deflated_bomb_is_not_inflated(self) -> None:
        def bomb(archive: zipfile.ZipFile, records: list[tuple[str, bytes]]) -> None:
            archive.writestr(records[0][0], bytes(50_000_000), zipfile.ZIP_DEFLATED)

        with pytest.raises(UnsupportedError, match="compressed"):
            self.opened(rezipped(bomb))

    def test_two_records_of_one_name(self) -> None:
        def twice(archive: zipfile.ZipFile, records: list[tuple[str, bytes]]) -> None:
            for name, data in (*records, records[0]):
                archive.writestr(name, data)

        with pytest.raises(CorruptCheckpointError, match="same name"):
            self.opened(rezipped(twice))

    @pytest.mark.parametrize("field", [20, 24, 42], ids=["packed", "size", "place"])
    @pytest.mark.parametrize("value", [1, 0x7FFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF])
    def test_a_directory_that_lies(self, field: int, value: int) -> None:
        def plain(archive: zipfile.ZipFile, records: list[tuple[str, bytes]]) -> None:
            for name, data in records:
                archive.writestr(name, data)

        data = bytearray(rezipped(plain))
        at = data.index(b"PK\x01\x02")
        data[at + field : at + field + 4] = struct.pack("<I", value)
        with pytest.raises((CorruptCheckpointError, UnsupportedError)) as caught:
            self.opened(bytes(data))
        assert "m.pt" in caught.value.message


class TestHeaders:
    @pytest.mark.parametrize(("changed", "words"), [
        ({"shape": [-1]}, "shape"), ({"shape": [2**62, 4]}, "shape"), ({"shape": [1] * 65}, "shape"),
        ({"shape": [True]}, "shape"),
        ({"data_offsets": [4, 0]}, "offsets"), ({"data_offsets": [0, 2**63]}, "offsets"),
        ({"data_offsets": [8, 12]}, "hole"),
    ])  # fmt: skip
    def test_sizes_that_lie(self, changed: dict[str, object], words: str) -> None:
        with pytest.raises(CorruptCheckpointError, match=words):
            read_header(MemoryTree({"m": weights("w", **changed)}), "m")

    def test_overlapping_tensors(self) -> None:
        data = weights("w", "v").replace(b"[4, 8]", b"[0, 4]")
        with pytest.raises(CorruptCheckpointError, match="overlaps"):
            read_header(MemoryTree({"m": data}), "m")

    @pytest.mark.parametrize(
        "text", [b'{"a":1,"a":2}', b'{"a":' + b"[" * 100_000, b'{"a":NaN}', b"{" + b'"a":{' * 5000]
    )
    def test_json_that_is_none(self, text: bytes) -> None:
        with pytest.raises(CorruptCheckpointError, match="header cannot be parsed"):
            read_header(MemoryTree({"m": struct.pack("<Q", len(text)) + text}), "m")

    @pytest.mark.parametrize("claimed", [99_999_999, 2**40, 2**64 - 1])
    def test_a_length_that_lies(self, claimed: int) -> None:
        with pytest.raises((TruncatedFileError, CorruptCheckpointError), match="claims"):
            read_header(MemoryTree({"m": struct.pack("<Q", claimed) + b"{}"}), "m")


def test_a_bit_that_renames_a_tensor_of_dcp_metadata_is_found(tmp_path: Path) -> None:
    source = next(DATA.glob("fsdp/dcp_tp*/ckpt"))
    metadata = (source / ".metadata").read_bytes()
    for path in source.glob("*.distcp"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / ".metadata").write_bytes(metadata)
    assert open_checkpoint([tmp_path]).tensors
    name = b"model.layers.0.input_layernorm.weight"
    places = [k for k in range(len(metadata)) if metadata.startswith(name, k)]
    assert len(places) > 1
    for at in places:
        for byte in (0, 14, len(name) - 1):
            changed = bytearray(metadata)
            changed[at + byte] ^= 1
            (tmp_path / ".metadata").write_bytes(changed)
            with pytest.raises(CheckpointError):
                open_checkpoint([tmp_path])


def test_a_pickle_that_asks_for_code_is_named_and_not_run(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02cos\nsystem\nX\x08\x00\x00\x00touch /xR.")
    error = refused(tmp_path, UnsafePickleError, r"os\.system")
    assert "nothing of it was run" in error.message
