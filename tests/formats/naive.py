"""The naive reader: rebuild every tensor of a catalog by plain file reads, and compare with the trainer's own state."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from merge_stream.containers.safetensors_file import read_header
from merge_stream.formats.base import CheckpointFormat
from merge_stream.options import OpenOptions
from merge_stream.storage.local import LocalTree
from merge_stream.tensors.ref import Catalog, ShardTable, TensorRef

DATA = Path(__file__).resolve().parents[1] / "data"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "fixtures"
OPTIONS = OpenOptions()


def fixture(name: str) -> Path:
    """A fixture folder: copied to tests/data, or in the shared folder, else the test is skipped."""
    for root in (DATA, SHARED):
        if (root / name / "check.json").exists():
            return root / name
    pytest.skip(f"fixture {name} is not on this machine")


def copied(name: str, tmp_path: Path) -> Path:
    """A private copy of the fixture's checkpoint, to be damaged."""
    shutil.copytree(fixture(name) / "ckpt", tmp_path / "ckpt")
    return tmp_path / "ckpt"


def opened(member: CheckpointFormat, *folders: Path, options: OpenOptions = OPTIONS) -> Catalog:
    """Detect and open; the format must recognise the folder."""
    tree = LocalTree.of(folders)
    assert member.detect(tree) is not None
    return member.open(tree, options)


def values(catalog: Catalog, tensor: TensorRef, table: ShardTable) -> tuple[bytes, np.ndarray]:
    """The tensor's bytes as the table places them, and how often each element was written."""
    item = tensor.dtype.itemsize
    out = np.zeros((*tensor.shape, item), np.uint8)
    hits = np.zeros(tensor.shape, np.int64)
    for k in range(len(table)):
        box, file, offset = table.row(k)
        with Path(catalog.files[file].path).open("rb") as stream:
            stream.seek(offset)
            data = stream.read(box.size * item)
        where = box.slices((0,) * len(tensor.shape))
        out[where] = np.frombuffer(data, np.uint8).reshape(*box.shape, item)
        hits[where] += 1
    return out.tobytes(), hits


def assert_equal(catalog: Catalog, expected: Path) -> None:
    """Every tensor of the expected file is in the catalog, bit-equal, and nothing else; each element once."""
    header = read_header(LocalTree.of([expected.parent]), expected.name)
    content = expected.read_bytes()
    assert set(catalog.tensors) == set(header.tensors)
    for name, wanted in header.tensors.items():
        tensor = catalog.tensors[name]
        assert (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape), name
        data, hits = values(catalog, tensor, tensor.shards)
        assert (hits == 1).all(), name
        assert data == content[wanted.offset : wanted.offset + wanted.nbytes], name
        if tensor.replicas is not None:
            copy, hits = values(catalog, tensor, tensor.replicas)
            mask = np.repeat((hits > 0).ravel(), tensor.dtype.itemsize)
            assert (np.frombuffer(copy, np.uint8)[mask] == np.frombuffer(data, np.uint8)[mask]).all(), name
