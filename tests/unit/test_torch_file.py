"""torch.save files as byte ranges: both forms, every dtype, inside larger files, and damaged ones."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from merge_stream.containers.pickle_reader import StorageRecord
from merge_stream.containers.torch_file import TorchFile, open_torch_file
from merge_stream.containers.torch_tensor import PlainTensor, locate, plain_tensor
from merge_stream.errors import (
    CorruptCheckpointError,
    MergeStreamError,
    TruncatedFileError,
    UnsafePickleError,
    UnsupportedError,
)
from merge_stream.storage.memory import MemoryTree

NAME = "model.pt"


def saved(value: Any, *, legacy: bool = False) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def opened(data: bytes, *, offset: int = 0, nbytes: int | None = None) -> TorchFile:
    return open_torch_file(MemoryTree({NAME: data}), NAME, offset=offset, nbytes=nbytes)


def bytes_of(data: bytes, file: TorchFile, name: str) -> bytes:
    view = plain_tensor(file.root[name], name, NAME)
    assert view is not None
    at = locate(view, file, name)
    return data[at : at + int(np.prod(view.shape)) * view.dtype.itemsize]


def located(file: TorchFile, name: str) -> int:
    view = plain_tensor(file.root[name], name, file.where)
    assert view is not None
    return locate(view, file, name)


def raw(tensor: torch.Tensor) -> bytes:
    return (
        tensor.contiguous().view(torch.uint8).numpy().tobytes()
        if tensor.dim()
        else tensor.reshape(1).view(torch.uint8).numpy().tobytes()
    )


DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("legacy", [False, True])
class TestBothForms:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype(self, dtype: torch.dtype, legacy: bool) -> None:
        if legacy and dtype in (torch.uint16, torch.uint32, torch.uint64):
            dtype = torch.uint8  # torch cannot save the wider ones in the legacy form
        tensor = (torch.arange(24).reshape(4, 6) % 2).to(dtype)
        data = saved({"w": tensor, "scalar": tensor[0, 1].clone()}, legacy=legacy)
        file = opened(data)
        assert bytes_of(data, file, "w") == raw(tensor)
        assert bytes_of(data, file, "scalar") == raw(tensor[0, 1])
        view = plain_tensor(file.root["w"], "w", NAME)
        assert view is not None
        assert view.dtype.torch_name == str(dtype).removeprefix("torch.")

    def test_views_parameters_ties_and_attributes(self, legacy: bool) -> None:
        base = torch.arange(60.0).reshape(10, 6)
        marked = torch.ones(3)
        marked.note = "x"  # type: ignore[attr-defined]
        state = {
            "rows": base[2:5],
            "parameter": torch.nn.Parameter(base[7:]),
            "empty": torch.zeros(0, 6),
            "one": base[3:4, :].as_strided((1, 6), (999, 1)),
            "marked": marked,
            "tied": base[2:5],
        }
        data = saved(state, legacy=legacy)
        file = opened(data)
        for name, tensor in state.items():
            assert bytes_of(data, file, name) == raw(tensor.detach()), name
        assert plain_tensor(file.root["tied"], "", "") == plain_tensor(file.root["rows"], "", "")

    def test_truncation_at_every_stage(self, legacy: bool) -> None:
        data = saved({"w": torch.arange(500.0)}, legacy=legacy)
        for cut in [*range(40), *range(40, len(data), 37), len(data) - 1]:
            with pytest.raises(CorruptCheckpointError) as caught:
                opened(data[:cut])
            assert NAME in caught.value.message
            assert caught.value.hint

    def test_inside_a_larger_file(self, legacy: bool) -> None:
        """A chunk of a DCP .distcp file is a complete torch.save file; offsets are those of the large file."""
        data = saved({"w": torch.arange(7.0)}, legacy=legacy)
        around = b"x" * 1001 + data + b"PK\x05\x06" * 30
        file = opened(around, offset=1001, nbytes=len(data))
        assert bytes_of(around, file, "w") == raw(torch.arange(7.0))

    def test_other_ends_of_the_range(self, legacy: bool) -> None:
        data = saved({"w": torch.arange(7.0)}, legacy=legacy)
        for offset, nbytes in ((0, len(data) + 1), (-1, 10), (len(data) + 1, None), (0, -5)):
            with pytest.raises(TruncatedFileError):
                opened(data, offset=offset, nbytes=nbytes)


class TestZip:
    def test_storages_are_those_of_zipfile(self) -> None:
        state = {f"t{k}": torch.full((k,), float(k)) for k in range(300)}
        data = saved(state)
        file = opened(data)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for info in archive.infolist():
                key = info.filename.removeprefix("archive/data/")
                if key.isdigit():
                    n_name, n_extra = struct.unpack_from("<2H", data, info.header_offset + 26)
                    wanted = (info.header_offset + 30 + n_name + n_extra, info.file_size, info.CRC)
                    assert tuple(file.storages[key]) == wanted
        assert 0 < file.metadata_nbytes < len(data) + 70_000

    def test_other_alignment_is_followed(self) -> None:
        from torch.utils.serialization import config

        before = config.save.storage_alignment
        config.save.storage_alignment = 4096
        try:
            data = saved({"w": torch.arange(70.0), "v": torch.ones(3)})
        finally:
            config.save.storage_alignment = before
        file = opened(data)
        assert bytes_of(data, file, "w") == raw(torch.arange(70.0))
        assert file.storages["1"].offset % 4096 == 0

    def test_zip_stored_by_another_tool_is_read_by_its_local_headers(self) -> None:
        source = zipfile.ZipFile(io.BytesIO(saved({"w": torch.arange(9.0), "v": torch.ones(2)})))
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as target:
            for name in source.namelist():
                target.writestr(name, source.read(name))
        file = opened(buffer.getvalue())
        assert bytes_of(buffer.getvalue(), file, "w") == raw(torch.arange(9.0))

    def test_compressed_records_are_refused_with_words(self) -> None:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as target:
            target.writestr("a/data.pkl", b"\x80\x02}." * 50)
        with pytest.raises(UnsupportedError, match="compressed"):
            opened(buffer.getvalue())

    def test_no_checksum_is_no_error(self) -> None:
        torch.serialization.set_crc32_options(False)
        try:
            data = saved({"w": torch.arange(9.0)})
        finally:
            torch.serialization.set_crc32_options(True)
        file = opened(data)
        assert bytes_of(data, file, "w") == raw(torch.arange(9.0))
        assert file.storages["0"].crc32 == 0

    def test_damaged_pickle_is_found_by_its_checksum(self) -> None:
        data = saved({"w": torch.arange(9.0)})
        bad = data.replace(b"FloatStorage", b"HalfStorage_"[:12], 1)
        with pytest.raises(CorruptCheckpointError, match="checksum"):
            opened(bad)

    def test_big_endian_is_refused(self) -> None:
        data = saved({"w": torch.arange(9.0)})
        with pytest.raises(UnsupportedError, match="byte order"):
            opened(data.replace(b"little", b"bigbig"))

    def test_zip_without_data_pkl(self) -> None:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as target:
            target.writestr("x/readme", b"hello")
        with pytest.raises(CorruptCheckpointError, match=r"no data\.pkl"):
            opened(buffer.getvalue())

    @pytest.mark.parametrize("edit", ["duplicate", "overlap", "outside", "count", "size"])
    def test_lying_directory(self, edit: str) -> None:
        data = bytearray(saved({"w": torch.arange(9.0), "v": torch.ones(2)}))
        entries = [at for at in range(len(data)) if data[at : at + 4] == b"PK\x01\x02"]
        w = next(at for at in entries if data[at + 46 :].startswith(b"archive/data/0"))
        v = next(at for at in entries if data[at + 46 :].startswith(b"archive/data/1"))
        if edit == "duplicate":
            data[v + 46 + 13] = ord("0")
        elif edit == "overlap":
            data[v + 42 : v + 46] = data[w + 42 : w + 46]
        elif edit == "outside":
            data[v + 42 : v + 46] = struct.pack("<L", 1 << 30)
        elif edit == "count":
            end = bytes(data).rfind(b"PK\x06\x06")  # torch always writes the zip64 end record
            data[end + 24 : end + 40] = struct.pack("<2Q", 9999, 9999)
        else:
            data[w + 20 : w + 28] = struct.pack("<2L", 1 << 20, 1 << 20)
        with pytest.raises(CorruptCheckpointError):
            opened(bytes(data))

    def test_any_changed_byte_gives_our_errors_only(self) -> None:
        data = saved({"w": torch.arange(9.0), "v": torch.ones(2)})
        for at in range(len(data)):
            for value in (0, 255, data[at] ^ 1):
                bad = bytearray(data)
                bad[at] = value
                try:
                    file = opened(bytes(bad))
                    for name in ("w", "v"):
                        view = plain_tensor(file.root.get(name), name, NAME)
                        if view is not None:
                            assert locate(view, file, name) <= len(data)
                except MergeStreamError:
                    pass

    def test_huge_file_has_zip64_fields(self, tmp_path: Path) -> None:
        """A sparse file of more than 4 GiB, patched together from torch's own rules."""
        from merge_stream.containers.torch_zip import read_directory
        from merge_stream.storage.local import LocalTree

        path = tmp_path / "big.pt"
        sizes = {"data.pkl": 8, "byteorder": 6, "data/0": (1 << 32) + 64, "data/1": 100, "version": 2}
        with path.open("wb") as stream:
            write_zip64(stream, sizes)
        tree = LocalTree.of([tmp_path])
        directory = read_directory(tree, "big.pt", start=0, nbytes=path.stat().st_size)
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                record = directory.records[info.filename.removeprefix("big/")]
                with path.open("rb") as stream:
                    stream.seek(info.header_offset + 26)
                    n_name, n_extra = struct.unpack("<2H", stream.read(4))
                assert record[:2] == (info.header_offset + 30 + n_name + n_extra, info.file_size)
                assert record.offset % 64 == 0


def write_zip64(stream: io.BufferedWriter, sizes: dict[str, int]) -> None:
    """A zip as torch's writer lays it out, data as holes."""
    central = b""
    cursor = 0
    for short, size in sizes.items():
        name = f"big/{short}".encode()
        big_size, big_at = size >= 0xFFFFFFFF, cursor >= 0xFFFFFFFF
        extra = b""
        if big_size or big_at:
            values = (struct.pack("<2Q", size, size) if big_size else b"") + (
                struct.pack("<Q", cursor) if big_at else b""
            )
            extra = struct.pack("<2H", 1, len(values)) + values
        start = cursor + 30 + len(name) + len(extra) + 4
        padding = -start % 64
        stream.seek(cursor)
        header = struct.pack(
            "<4s5H3L2H", b"PK\x03\x04", 0, 0x0808, 0, 0, 0, 0, 0, 0, len(name), len(extra) + 4 + padding
        )
        stream.write(header + name + extra + struct.pack("<2sH", b"FB", padding) + b"Z" * padding)
        stream.seek(start + padding + size)
        zip64 = big_size or big_at
        stream.write(struct.pack("<4sLQQ" if zip64 else "<4sLLL", b"PK\x07\x08", 0, size, size))
        clipped = min(size, 0xFFFFFFFF)
        central += struct.pack(
            "<4s6H3L5H2L", b"PK\x01\x02", 0, 0, 0x0808, 0, 0, 0, 0, clipped, clipped, len(name), len(extra), 0, 0, 0, 0,
            min(cursor, 0xFFFFFFFF),
        ) + name + extra  # fmt: skip
        cursor = stream.tell()
    stream.write(central)
    end64 = stream.tell()
    stream.write(
        struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, len(sizes), len(sizes), len(central), cursor)
    )
    stream.write(struct.pack("<4sLQL", b"PK\x06\x07", 0, end64, 1))
    stream.write(struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, len(sizes), len(sizes), len(central), 0xFFFFFFFF, 0))


class TestForeignFiles:
    @pytest.mark.parametrize(
        ("data", "words"),
        [
            (b"", "empty"),
            (b"PK", "beginning"),
            (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
            (b"\x1f\x8b\x08" + b"x" * 50, "gzip"),
            (b"<!doctype html>" + b" " * 50, "web page"),
            (b"\x00" * 500, "zeros"),
            (b"hello world, this is not a checkpoint", "not a torch"),
            (b"\x80\x02}q\x00.", "not a torch"),
        ],
    )
    def test_say_what_they_are(self, data: bytes, words: str) -> None:
        with pytest.raises(CorruptCheckpointError, match=words) as caught:
            opened(data)
        assert caught.value.hint

    def test_code_is_refused_in_both_forms(self) -> None:
        class Evil:
            def __reduce__(self) -> object:
                return eval, ("1/0",)

        for legacy in (False, True):
            with pytest.raises(UnsafePickleError, match="eval"):
                opened(saved({"w": Evil()}, legacy=legacy))


class TestLegacy:
    def test_pickles_longer_than_the_first_read(self) -> None:
        state = {f"a_rather_long_parameter_name_number_{k}.weight": torch.ones(2) for k in range(9000)}
        data = saved(state, legacy=True)
        file = opened(data)
        assert len(file.storages) == 9000
        assert bytes_of(data, file, "a_rather_long_parameter_name_number_8999.weight") == raw(torch.ones(2))

    def test_shifted_storages_are_found(self) -> None:
        data = saved({"w": torch.arange(9.0), "v": torch.ones(2)}, legacy=True)
        at = data.index(struct.pack("<q", 9))
        with pytest.raises(CorruptCheckpointError, match="elements in the stream"):
            opened(data[:at] + struct.pack("<q", 8) + data[at + 8 :])

    def test_big_endian_is_refused(self) -> None:
        data = saved({"w": torch.arange(9.0)}, legacy=True)
        at = data.index(b"little_endian")
        flag = data.index(b"\x88", at)
        with pytest.raises(UnsupportedError, match="big-endian"):
            opened(data[:flag] + b"\x89" + data[flag + 1 :])


class TestTensors:
    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda: torch.arange(6.0).reshape(2, 3).t(), r"stride \[1, 3\]"),
            (lambda: torch.arange(12.0).reshape(3, 4)[:, :2], r"stride \[4, 1\]"),
            (lambda: torch.zeros(3, device="meta"), "meta tensor"),
            (lambda: torch.eye(3).to_sparse(), "sparse"),
            (lambda: torch.complex(torch.ones(2), torch.ones(2)).conj(), "conjugated"),
            (lambda: torch.zeros(2, dtype=torch.complex128), "cannot hold"),
        ],
        ids=["transposed", "columns", "meta", "sparse", "conj", "complex128"],
    )
    def test_what_cannot_be_copied_is_named(self, make: Callable[[], torch.Tensor], words: str) -> None:
        file = opened(saved({"layer.w": make()}))
        with pytest.raises(UnsupportedError, match=words) as caught:
            located(file, "layer.w")
        assert "layer.w" in caught.value.message
        assert caught.value.hint

    def test_values_that_are_no_tensors(self) -> None:
        file = opened(saved({"a": 1, "b": [1], "c": None}))
        assert [plain_tensor(value, "x", NAME) for value in file.root.values()] == [None] * 3

    def test_view_outside_its_storage(self) -> None:
        data = saved({"w": torch.arange(9.0)})
        file = opened(data)
        view = plain_tensor(file.root["w"], "w", NAME)
        assert view is not None
        for bad in (view._replace(offset=1), view._replace(shape=(10,)), view._replace(storage="7")):
            with pytest.raises(CorruptCheckpointError):
                locate(bad, file, "w")

    def test_empty_tensor_without_storage(self) -> None:
        file = opened(saved({"w": torch.arange(9.0)}))
        view = plain_tensor(file.root["w"], "w", NAME)
        assert view is not None
        assert locate(PlainTensor(view.dtype, (0, 4), (4, 1), "gone", 0), file, "w") == 0

    def test_malformed_record(self) -> None:
        file = opened(saved({"w": torch.arange(9.0)}))
        storage = file.root["w"].args[0]
        assert isinstance(storage, StorageRecord)
        for args in ((), (storage, 0, (9,)), (storage, -1, (9,), (1,)), (storage, 0, (9,), (1, 1)), (1, 0, (9,), (1,))):
            file.root["w"].args = args
            with pytest.raises(CorruptCheckpointError, match="malformed"):
                plain_tensor(file.root["w"], "w", NAME)
