"""The one table of element types agrees with torch, safetensors and numpy."""

from __future__ import annotations

import safetensors.torch
import torch

from merge_stream.tensors.dtype import DTYPES, dtype_named, dtype_of_storage, dtype_of_torch


def test_torch_has_every_type_with_that_size_and_kind() -> None:
    for d in DTYPES:
        real = getattr(torch, d.torch_name)
        assert real.itemsize == d.itemsize
        assert real.is_complex == (d.kind == "complex")
        assert real.is_floating_point == (d.kind in {"float", "quantized"})


def test_safetensors_writes_these_names() -> None:
    for d in DTYPES:
        data = safetensors.torch.save(
            {"x": torch.zeros(2, dtype=torch.uint8).repeat(d.itemsize).view(getattr(torch, d.torch_name))}
        )
        assert f'"dtype":"{d.name}"' in data[: 8 + int.from_bytes(data[:8], "little")].decode()


def test_numpy_views_have_the_item_size() -> None:
    for d in DTYPES:
        assert d.numpy().itemsize == d.itemsize


def test_numpy_reads_the_values_that_torch_reads() -> None:
    """One byte pattern for each type, so that two 8-bit floats cannot be mixed up."""
    for d in DTYPES:
        raw = bytearray([0x01 if d.kind == "bool" else 0x53] * d.itemsize)
        by_torch = torch.frombuffer(raw, dtype=getattr(torch, d.torch_name))
        wide = torch.complex128 if d.kind == "complex" else torch.float64
        by_numpy = memoryview(raw)
        import numpy as np

        value = np.frombuffer(by_numpy, d.numpy()).astype(np.complex128 if d.kind == "complex" else np.float64)
        assert value[0] == by_torch.to(wide)[0].item()


def test_names_are_unique_and_found() -> None:
    assert len({d.name for d in DTYPES}) == len(DTYPES) == len({d.torch_name for d in DTYPES})
    for d in DTYPES:
        assert dtype_named(d.name) is d
        assert dtype_of_torch(d.torch_name) is d
        assert not d.storage or dtype_of_storage(d.storage) is d


def test_aliases_of_torch() -> None:
    for alias in ("float", "double", "half", "long", "int"):
        found = dtype_of_torch(alias)
        assert found is not None
        assert getattr(torch, alias) is getattr(torch, found.torch_name)


def test_unknown_names_are_none() -> None:
    assert dtype_named("F4") is None
    assert dtype_of_torch("qint8") is None
    assert dtype_of_storage("Storage") is None
    assert dtype_of_storage("") is None
