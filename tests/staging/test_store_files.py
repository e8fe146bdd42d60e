"""What a store is on disk: a zarr group that anybody can read, hardly larger than its tensors."""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from merge_stream.containers import zarr_array
from merge_stream.containers.zarr_array import array_metadata, lay_out_array, read_array
from merge_stream.errors import CorruptCheckpointError, UnsupportedError
from merge_stream.options import MergeOptions
from merge_stream.tensors.dtype import DTYPES
from merge_stream.through_store import finalize_store, stage
from tests.staging.conftest import TALL, WIDE

PLAIN = MergeOptions(layout="as-is", write_config=False)


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The bytes of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)


def assert_readable(store: pathlib.Path, truth: dict[str, torch.Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group = zarr.open_group(store, mode="r")
        assert sorted(group.array_keys()) == sorted(truth)
        for name, tensor in truth.items():
            values = group[name][...]
            assert np.shape(values) == tuple(tensor.shape), name
            np.testing.assert_array_equal(np.asarray(values).reshape(-1).view(np.uint8), bits(tensor), name)


def test_zarr_python_reads_every_tensor_by_its_name(plain: pathlib.Path, plain_store: pathlib.Path) -> None:
    assert_readable(plain_store, load_file(plain / "model.safetensors"))


def test_types_that_zarr_has_keep_their_name_others_are_told_by_an_attribute(plain_store: pathlib.Path) -> None:
    group = zarr.open_group(plain_store, mode="r")
    assert group[TALL].dtype == np.float32
    assert group[WIDE].dtype == np.uint16
    assert group[WIDE].attrs["dtype"] == "BF16"
    assert group["float8_e4m3fn"].dtype == np.uint8
    assert group["float8_e4m3fn"].attrs["dtype"] == "F8_E4M3"


def test_an_array_is_read_by_its_own_path_too(plain: pathlib.Path, plain_store: pathlib.Path) -> None:
    """Readers that know nothing of consolidated metadata find a zarr.json beside each array."""
    truth = load_file(plain / "model.safetensors")[TALL]
    np.testing.assert_array_equal(zarr.open_array(plain_store / TALL, mode="r")[...], truth.numpy())


def test_a_store_is_at_most_a_tenth_larger_than_its_tensors(plain: pathlib.Path, plain_store: pathlib.Path) -> None:
    payload = sum(t.numel() * t.element_size() for t in load_file(plain / "model.safetensors").values())
    assert folder_nbytes(plain_store) <= 1.1 * payload


def test_thousands_of_small_tensors_are_at_most_a_tenth_larger(tmp_path: pathlib.Path) -> None:
    """They have no zarr.json of their own, which would be a tenth of each by itself."""
    (tmp_path / "ckpt").mkdir()
    truth = {f"h.{k}.weight": torch.full((2048,), float(k)).to(torch.bfloat16) for k in range(300)}
    save_file(truth, tmp_path / "ckpt" / "model.safetensors")
    stage(tmp_path / "ckpt", tmp_path / "store", PLAIN)
    files = [name for _, _, names in os.walk(tmp_path / "store") for name in names]
    assert len(files) == 300 + 2
    assert_readable(tmp_path / "store", truth)
    assert (
        folder_nbytes(tmp_path / "store") - os.path.getsize(tmp_path / "store" / "merge_stream.json")
        <= 1.1 * sum(t.numel() * 2 for t in truth.values()) + 2000
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_metadata_of_every_type_is_understood(dtype: Any) -> None:
    array = lay_out_array("w", dtype, (3000, 1000))
    told = json.loads(json.dumps(array_metadata(array)))
    assert read_array("w", told, "here") == array
    if dtype.name != "C64":
        assert zarr.core.metadata.v3.ArrayV3Metadata.from_dict(told).shape == (3000, 1000)


@pytest.mark.parametrize("name", ["a/b", "", "..", "__secret", "zarr.json", "side_files", "x" * 300, "a\0b"])
def test_names_that_no_store_can_hold_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match="cannot hold") as caught:
        lay_out_array(name, DTYPES[0], (1,))
    assert "--staging direct" in caught.value.hint


@given(
    shape=st.lists(st.integers(1, 40_000), max_size=4).map(tuple),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=300, deadline=None)
def test_padding_is_small_and_a_chunk_fits_a_mib(shape: tuple[int, ...], dtype: Any) -> None:
    array = lay_out_array("w", dtype, shape)
    assert array.chunk_nbytes + zarr_array.CHECKSUM_NBYTES <= 1 << 20
    payload = int(np.prod(shape, dtype=object)) * dtype.itemsize
    assert array.file_nbytes <= 1.1 * payload + 4096
    assert array.band * array.chunks >= int(np.prod(shape, dtype=object))


@given(data=st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shapes_with_any_chunks_come_back(data: st.DataObject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few bytes, so that small tensors have many, in every dim."""
    lay_out_array.cache_clear()
    monkeypatch.setattr(zarr_array, "_LARGEST_CHUNK", data.draw(st.integers(8, 200)))
    shapes = data.draw(st.lists(st.lists(st.integers(0, 7), max_size=4).map(tuple), min_size=1, max_size=5))
    kinds = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8])
    truth = {f"t{k}": torch.randint(0, 250, shape).to(data.draw(kinds)) for k, shape in enumerate(shapes)}
    with tempfile.TemporaryDirectory() as folder:
        at = pathlib.Path(folder)
        (at / "ckpt").mkdir()
        save_file(truth, at / "ckpt" / "model.safetensors")
        stage(at / "ckpt", at / "store", PLAIN)
        assert_readable(at / "store", truth)
        finalize_store(at / "store", at / "out", PLAIN)
        with safe_open(at / "out" / "model.safetensors", framework="pt") as file:
            for name, tensor in truth.items():
                assert torch.equal(file.get_tensor(name), tensor)
    lay_out_array.cache_clear()


def test_metadata_that_is_not_ours_is_refused() -> None:
    told = array_metadata(lay_out_array("w", DTYPES[1], (3000, 1000)))
    for change in (
        {"fill_value": 1.0},
        {"shape": [3000, 1001]},
        {"shape": [3000, True]},
        {"shape": "x"},
        {"shape": [1 << 70]},
        {"shape": [1] * 65},
        {"data_type": "float64"},
        {"codecs": []},
        {"more": 1},
        {"attributes": {"dtype": "BF16"}},
        {"attributes": []},
    ):
        with pytest.raises(CorruptCheckpointError, match="is not that of a staged tensor"):
            read_array("w", {**told, **change}, "here")
    for other in (None, [], 3, "x"):
        with pytest.raises(CorruptCheckpointError, match="is not that of a staged tensor"):
            read_array("w", other, "here")


def folder_nbytes(folder: pathlib.Path) -> int:
    """Bytes of all files below."""
    return sum(os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(folder) for name in names)
