"""PyTorch DCP: real saves are rebuilt bit for bit, and every contradiction is an error that names the file."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as torch_metadata

from merge_stream.errors import (
    CorruptCheckpointError,
    IncompleteShardsError,
    MergeStreamError,
    TruncatedFileError,
    UnknownFormatError,
    UnsafePickleError,
    UnsupportedError,
    UsageError,
)
from merge_stream.formats._dcp_chunks import ChunkReader
from merge_stream.formats._dcp_metadata import read_metadata
from merge_stream.formats.dcp import MEMBER
from merge_stream.options import OpenOptions
from merge_stream.storage.local import LocalTree
from merge_stream.storage.memory import MemoryTree
from merge_stream.tensors.ref import Catalog
from tests.formats.naive import OPTIONS, assert_equal, copied, fixture, opened, values

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed warns about the missing process group
TP = "fsdp/dcp_tp_2x2_norms1d"
CASES = [
    (TP, ""),
    ("dcp_per_rank_w3", ""),
    ("fsdp/dcp_accel_fsdp1_w2", "pytorch_model_fsdp_0"),
    ("fsdp/dcp_accel_fsdp2_w2", "pytorch_model_fsdp_0"),
    ("fsdp/dcp_fsdp1_mesh_w2", ""),
    ("fsdp/dcp_fsdp2_w2_flat", ""),
    ("fsdp/dcp_fsdp2_w2_threads", ""),
    ("fsdp/dcp_fsdp2_w2_titan", ""),
    ("fsdp/dcp_fsdp2_w2_vl", ""),
    ("fsdp/dcp_fsdp2_w3_uneven_nested", ""),
    ("fsdp/dcp_hsdp2_2x2", ""),
    ("fsdp/dcp_titan_llama3_w2", "step-7"),
    ("fsdp_tf4/dcp_fsdp2_w2_vl", ""),
    ("fsdp_old/torch-2.3.1-w2-dcp_fsdp1_nomesh", ""),
    ("fsdp_old/torch-2.4.0-w2-dcp_fsdp1_nomesh", ""),
    ("fsdp_old/torch-2.6.0-w2-dcp_fsdp1_mesh", ""),
    ("fsdp_old/torch-2.6.0-w2-dcp_fsdp2", ""),
    ("fsdp_old/torch-2.9.1-w2-dcp_fsdp1_nomesh", ""),
    ("fsdp_old/torch-2.10.0-w2-dcp_fsdp1_nomesh", ""),
    ("fsdp_old/torch-2.13.0-w2-dcp_fsdp1_nomesh", ""),
]


def saved(folder: Path, state: dict[str, Any], **kwargs: Any) -> Path:
    """A real save of one process."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, **kwargs), no_dist=True)
    return folder


def edited(folder: Path, change: Callable[[torch_metadata.Metadata], object], name: str = ".metadata") -> Path:
    """Change the metadata of a save, by torch's own classes."""
    with (folder / name).open("rb") as stream:
        meta = pickle.load(stream)
    change(meta)
    with (folder / name).open("wb") as stream:
        pickle.dump(meta, stream)
    return folder


def refusal(
    folder: Path, error: type[MergeStreamError], *words: str, options: OpenOptions = OPTIONS
) -> MergeStreamError:
    with pytest.raises(error) as caught:
        MEMBER.open(LocalTree.of([folder]), options)
    for word in words:
        assert word in caught.value.message
    return caught.value


def array(catalog: Catalog, name: str) -> np.ndarray:
    tensor = catalog.tensors[name]
    data, hits = values(catalog, tensor, tensor.shards)
    assert (hits == 1).all()
    return np.frombuffer(data, tensor.dtype.numpy()).reshape(tensor.shape)


@pytest.mark.parametrize(("case", "sub"), CASES, ids=[case.replace("fsdp/", "") for case, _ in CASES])
def test_a_real_save_is_rebuilt_bit_for_bit(case: str, sub: str) -> None:
    root = fixture(case)
    catalog = opened(MEMBER, root / "ckpt" / sub)
    expected = root / "expected_state.safetensors"
    assert_equal(catalog, expected if expected.exists() else root / "expected" / "model.safetensors")
    assert catalog.naming == ("torchtitan" if "titan_llama3" in case else "hf")


def test_only_files_with_model_tensors_are_sources_and_the_rest_is_counted() -> None:
    catalog = opened(MEMBER, fixture("fsdp/dcp_fsdp2_w2_titan") / "ckpt")
    assert catalog.ignored["optimizer state"] > 100
    assert {f.name for f in catalog.files} <= {"__0_0.distcp", "__1_0.distcp"}


def test_a_folder_with_optimizer_state_only_is_told_apart() -> None:
    folder = fixture("fsdp/dcp_accel_fsdp2_w2") / "ckpt" / "optimizer_0"
    assert MEMBER.detect(LocalTree.of([folder])) is None
    refusal(folder, UnknownFormatError, "without model tensors", "optimizer state")


def test_large_metadata_of_an_optimizer_folder_is_told_apart_by_its_name(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("merge_stream.formats.dcp._DETECT_LIMIT", 10)
    for name, found in (("optimizer_0", False), ("pytorch_model_fsdp_0", True)):
        saved(tmp_path / name, {"w": torch.ones(2)})
        assert (MEMBER.detect(LocalTree.of([tmp_path / name])) is not None) is found


def test_node_local_folders_are_overlaid(tmp_path: Path) -> None:
    folder = copied(TP, tmp_path)
    other = tmp_path / "node1"
    other.mkdir()
    for name in ("__1_0.distcp", "__3_0.distcp"):
        shutil.move(folder / name, other / name)
    assert_equal(opened(MEMBER, folder, other), fixture(TP) / "expected_state.safetensors")
    assert "--input" in refusal(folder, IncompleteShardsError, "__1_0.distcp", "__3_0.distcp").hint


def test_metadata_of_each_rank_is_united(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    saved(tmp_path, {"model": {"a.w": whole.clone()}})
    with (tmp_path / ".metadata").open("rb") as stream:
        meta = pickle.load(stream)
    (tmp_path / ".metadata").unlink()
    ((key, info),) = [(k, v) for k, v in meta.storage_data.items()]
    for rank in range(2):
        part = tmp_path / f"rank{rank}"
        saved(part, {"model": {"a.w": whole[rank * 3 : rank * 3 + 3].clone()}})
        shutil.move(part / "__0_0.distcp", tmp_path / f"__{rank}_0.distcp")
        chunk = torch_metadata.ChunkStorageMetadata(torch.Size([rank * 3, 0]), torch.Size([3, 4]))
        tensor = dataclasses.replace(meta.state_dict_metadata["model.a.w"], chunks=[chunk])
        index = dataclasses.replace(key, offset=chunk.offsets, index=rank)
        length = (tmp_path / f"__{rank}_0.distcp").stat().st_size
        place = dataclasses.replace(info, relative_path=f"__{rank}_0.distcp", offset=0, length=length)
        own = dataclasses.replace(meta, state_dict_metadata={"model.a.w": tensor}, storage_data={index: place})
        (tmp_path / f"__{rank}.metadata").write_bytes(pickle.dumps(own))
        shutil.rmtree(part)
    catalog = opened(MEMBER, tmp_path)
    assert (array(catalog, "a.w") == whole.numpy()).all()
    assert str(catalog.facts["metadata"]).startswith("2 files")
    # a copy of the same chunk by another rank is a replica
    (tmp_path / "__2.metadata").write_bytes((tmp_path / "__0.metadata").read_bytes())
    replicas = opened(MEMBER, tmp_path).tensors["a.w"].replicas
    assert replicas is not None
    assert len(replicas) == 1
    (tmp_path / "__2.metadata").unlink()
    (tmp_path / "__0.metadata").unlink()
    refusal(tmp_path, IncompleteShardsError, "__0.metadata")
    shutil.copy(tmp_path / "__1.metadata", tmp_path / "__0.metadata")
    (tmp_path / "__1.metadata").unlink()
    refusal(tmp_path, IncompleteShardsError, "__1.metadata")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5, 3), (3, 0, 2)])
def test_any_dtype_and_shape_of_a_plain_save(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    value = torch.ones(shape).to(dtype)
    catalog = opened(MEMBER, saved(tmp_path, {"x.weight": value, "step": 3}))
    tensor = catalog.tensors["x.weight"]
    assert tensor.shape == shape
    assert values(catalog, tensor, tensor.shards)[0] == bytes(value.contiguous().view(-1).view(torch.uint8).tolist())


def test_views_are_placed_and_what_is_not_row_major_is_refused_by_name(tmp_path: Path) -> None:
    base = torch.arange(60.0).reshape(10, 6)
    state = {"rows.w": base[2:5], "columns.w": base[:, 1:3], "tied.w": base}
    catalog = opened(MEMBER, saved(tmp_path / "good", state))
    for name, wanted in state.items():
        assert (array(catalog, name) == wanted.numpy()).all(), name
    refusal(saved(tmp_path / "turned", {"turned.w": base.T}), UnsupportedError, "'turned.w'", "row")


def test_many_chunks_in_several_files_and_the_unused_file(tmp_path: Path) -> None:
    state = {f"layers.{k}.weight": torch.full((k + 1, 3), float(k)) for k in range(40)}
    catalog = opened(MEMBER, saved(tmp_path, state, thread_count=3))
    assert len(list(tmp_path.glob("*.distcp"))) == 3
    assert all((array(catalog, name) == value.numpy()).all() for name, value in state.items())
    small = saved(tmp_path / "own", {"model": {"a.w": torch.ones(3)}, "optimizer": {"b": torch.ones(3)}})
    assert [f.name for f in opened(MEMBER, small).files] == ["__0_0.distcp"]


def test_wrappers_are_removed_and_two_names_that_become_one_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "good", {"model": {"_orig_mod.layers.0._checkpoint_wrapped_module.w": torch.ones(2)}})
    assert set(opened(MEMBER, tmp_path / "good").tensors) == {"layers.0.w"}
    saved(tmp_path / "bad", {"_orig_mod.w.x": torch.ones(2), "w.x": torch.ones(2)})
    refusal(tmp_path / "bad", CorruptCheckpointError, "_orig_mod.w.x")


def test_root_chooses_and_an_unknown_root_lists_those_there(tmp_path: Path) -> None:
    saved(
        tmp_path,
        {"actor": {"x.w": torch.ones(2)}, "critic": {"x.w": torch.zeros(2)}, "optimizer": {"x": torch.ones(1)}},
    )
    assert "--root" in refusal(tmp_path, MergeStreamError, "actor, critic").hint
    catalog = opened(MEMBER, tmp_path, options=OpenOptions(root="critic"))
    assert (array(catalog, "x.w") == 0).all()
    assert "actor" in refusal(tmp_path, UsageError, "'nope'", options=OpenOptions(root="nope")).hint


def test_a_missing_file_is_named() -> None:
    folder = fixture("fsdp/bad_dcp_missing_file") / "ckpt"
    assert "--input" in refusal(folder, IncompleteShardsError, "__1_0.distcp").hint


def test_chunks_without_metadata_are_told_where_it_is(tmp_path: Path) -> None:
    folder = copied(TP, tmp_path)
    (folder / ".metadata").unlink()
    assert MEMBER.detect(LocalTree.of([folder])) is not None
    assert "first node" in refusal(folder, IncompleteShardsError, "4 files *.distcp", ".metadata").hint


def test_metadata_of_other_programs_and_of_other_saves(tmp_path: Path) -> None:
    (tmp_path / "flutter").mkdir()
    (tmp_path / "flutter" / ".metadata").write_text("# This file tracks properties of this Flutter project.")
    assert MEMBER.detect(LocalTree.of([tmp_path / "flutter"])) is None
    folder = copied(TP, tmp_path)
    (folder / "__0.metadata").write_bytes(b"stale")
    catalog = opened(MEMBER, folder)
    assert_equal(catalog, fixture(TP) / "expected_state.safetensors")
    assert "__0.metadata" in catalog.notes[0]


def test_a_cut_file_is_truncated(tmp_path: Path) -> None:
    folder = copied(TP, tmp_path)
    path = folder / "__2_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    refusal(folder, TruncatedFileError, "__2_0.distcp")


def test_cut_metadata_is_refused(tmp_path: Path) -> None:
    folder = copied(TP, tmp_path)
    data = (folder / ".metadata").read_bytes()
    for size in (0, 1, 100, len(data) // 2, len(data) - 1):
        (folder / ".metadata").write_bytes(data[:size])
        refusal(folder, CorruptCheckpointError, ".metadata")


@pytest.mark.parametrize("path", ["../__0_0.distcp", "/etc/passwd", "a/../../x", "gone.distcp"])
def test_a_path_in_the_metadata_only_selects_files_of_the_folder(path: str, tmp_path: Path) -> None:
    folder = copied(TP, tmp_path)

    def change(meta: torch_metadata.Metadata) -> None:
        for info in meta.storage_data.values():
            info.relative_path = path

    error = IncompleteShardsError if path == "gone.distcp" else CorruptCheckpointError
    refusal(edited(folder, change), error, path)


def _first(meta: torch_metadata.Metadata) -> Any:
    return next(iter(meta.state_dict_metadata.values()))


def _storage(meta: torch_metadata.Metadata) -> Any:
    return next(iter(meta.storage_data.values()))


CHANGES: dict[str, tuple[Callable[[Any], object], type[MergeStreamError], str]] = {
    "dtype": (lambda m: setattr(_first(m).properties, "dtype", torch.bfloat16), CorruptCheckpointError, "BF16"),
    "unknown dtype": (
        lambda m: setattr(_first(m).properties, "dtype", torch.complex128),
        UnsupportedError,
        "complex128",
    ),
    "no dtype": (lambda m: setattr(_first(m).properties, "dtype", 3), CorruptCheckpointError, "no dtype"),
    "size": (lambda m: setattr(_first(m), "size", torch.Size([3, 3])), CorruptCheckpointError, "beyond its end"),
    "dims": (lambda m: setattr(_first(m), "size", torch.Size([300])), CorruptCheckpointError, "dims"),
    "chunk size": (
        lambda m: setattr(_first(m).chunks[0], "sizes", torch.Size([1, 1])),
        CorruptCheckpointError,
        "the metadata says",
    ),
    "chunk offset": (
        lambda m: setattr(_first(m).chunks[0], "offsets", torch.Size([1, 0])),
        CorruptCheckpointError,
        "lists no chunk there",
    ),
    "chunk removed": (
        lambda m: m.storage_data.pop(next(iter(m.storage_data))),
        IncompleteShardsError,
        "does not say where",
    ),
    "offset": (lambda m: setattr(_storage(m), "offset", 7), CorruptCheckpointError, "distcp"),
    "length": (lambda m: setattr(_storage(m), "length", 64), CorruptCheckpointError, "distcp"),
    "beyond": (lambda m: setattr(_storage(m), "length", 1 << 40), TruncatedFileError, "distcp"),
    "negative": (lambda m: setattr(_storage(m), "offset", -1), CorruptCheckpointError, "distcp"),
    "zstd": (
        lambda m: setattr(_storage(m), "transform_descriptors", ["stream.zstd/1"]),
        UnsupportedError,
        "stream.zstd/1",
    ),
    "no storage": (lambda m: setattr(m, "storage_data", None), CorruptCheckpointError, "storage_data"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_metadata_that_contradicts_itself_or_the_data_is_refused(name: str, tmp_path: Path) -> None:
    change, error, word = CHANGES[name]
    refusal(edited(copied(TP, tmp_path), change), error, word)


def test_metadata_that_would_run_code_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    folder = copied(TP, tmp_path)

    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            import os

            return os.system, (f"touch {tmp_path}/marker",)

    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    refusal(folder, UnsafePickleError, ".metadata")
    assert not (tmp_path / "marker").exists()


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_flipped_bytes_of_metadata_and_chunks_raise_only_our_errors(data: st.DataObject) -> None:
    folder = fixture("dcp_per_rank_w3") / "ckpt"
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    name = data.draw(st.sampled_from(sorted(contents)))
    changed = bytearray(contents[name])
    changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    tree = MemoryTree(contents | {name: bytes(changed)})
    try:
        catalog = MEMBER.open(tree, OPTIONS)
    except MergeStreamError:
        return
    for tensor in catalog.tensors.values():
        sizes = (tensor.shards.stop - tensor.shards.start).prod(axis=1) * tensor.dtype.itemsize
        ends = np.array([catalog.files[k].nbytes for k in tensor.shards.file])
        assert (tensor.shards.offset + sizes <= ends).all()


def test_equal_heads_are_opened_once_and_only_when_the_pickle_is_in_them(tmp_path: Path) -> None:
    state = {f"layers.{k}.weight": torch.full((4, 3), float(k)) for k in range(20)} | {"x.bias": torch.ones(3)}
    folder = saved(tmp_path, state)
    tree = LocalTree.of([folder])
    reader = ChunkReader(tree)
    stored = read_metadata(tree).stored
    for name, (chunk,) in stored.items():
        place = reader.place(chunk.file, chunk.start, chunk.nbytes, tensor=name)
        data = (folder / chunk.file).read_bytes()[place.offset :][: state[name].numel() * 4]
        assert data == state[name].numpy().tobytes()
    assert reader.opened == 2


def test_flat_parameters_are_explained(tmp_path: Path) -> None:
    error = refusal(
        saved(tmp_path, {"model": {"layers.0._flat_param": torch.ones(4), "_flat_param": torch.ones(2)}}),
        UnsupportedError,
        "flat",
    )
    assert "SHARDED_STATE_DICT" in error.hint


@pytest.mark.parametrize("case", ["td_llama_tp2_pp2", "fsdp_llama_dp2"])
def test_megatron_folders_are_refused_with_a_word(case: str) -> None:
    folder = fixture(f"megatron/{case}") / "ckpt" / "iter_0000100"
    refusal(folder, UnsupportedError, "megatron")


def test_config_comes_from_the_folder_beside(tmp_path: Path) -> None:
    saved(tmp_path, {"x.w": torch.ones(2)})
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "config.json").write_text("{}")
    assert opened(MEMBER, tmp_path).config_dirs == (str(tmp_path / "huggingface"),)
