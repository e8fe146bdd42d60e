"""`--check-crc`: bit rot in the files of real trainers is told by file, record and tensor, before a byte is written."""

from __future__ import annotations

import hashlib
import json
import pathlib
import threading
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import google_crc32c
import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from merge_stream.api import make_plan, merge, open_checkpoint
from merge_stream.engine.budget import MemoryBudget
from merge_stream.engine.events import Phase, Progress, Silent
from merge_stream.engine.executor import StopFlag
from merge_stream.engine.joint_reads import SEEK
from merge_stream.engine.stored_checksums import check_stored, ranges_read, refuse_broken
from merge_stream.errors import CorruptCheckpointError, UnsupportedError
from merge_stream.options import MergeOptions
from merge_stream.storage.memory import MemorySource
from merge_stream.tensors.box import Box
from merge_stream.tensors.dtype import dtype_named
from merge_stream.tensors.ref import Catalog, ShardTable, SourceFile, TensorRef
from merge_stream.tensors.stored_checksum import ChecksumAlgorithm, StoredRecord
from tests.cli.tool import tool
from tests.makers.dtensor import Spread, write_bin, write_dcp, write_hub, write_ranks

DOWN = "model.layers.0.mlp.down_proj.weight"
TENSORS = {
    DOWN: torch.arange(4096, dtype=torch.float32).reshape(64, 64),
    "model.layers.0.mlp.up_proj.weight": torch.arange(4096, dtype=torch.float32).reshape(64, 64) + 0.5,
    "model.norm.weight": torch.arange(64, dtype=torch.float32) + 10_000,
}
OPTIONS: dict[str, Any] = {"write_config": False, "layout": "as-is", "check_crc": True}


def rot(path: pathlib.Path, wanted: bytes, *, at: int = 0) -> int:
    """Flip one bit of the only place that holds `wanted`; returns where."""
    data = bytearray(path.read_bytes())
    assert data.count(wanted) == 1
    where = data.index(wanted) + at
    data[where] ^= 0x10
    path.write_bytes(data)
    return where


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def ranks(folder: pathlib.Path) -> pathlib.Path:
    return write_ranks(folder, (2,), {name: Spread(value, [Shard(0)]) for name, value in TENSORS.items()})


def real_dcp(folder: pathlib.Path) -> pathlib.Path:
    """What `dcp.save` itself writes: several zips in one file, Python values beside the tensors."""
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "assuming the intent is to save in a single process"
        save({**TENSORS, "step": 7}, checkpoint_id=folder, no_dist=True)
    return folder


def test_whole_files_pass_and_say_how_much_was_checked(tmp_path: pathlib.Path) -> None:
    report = merge(ranks(tmp_path / "ckpt"), tmp_path / "out", MergeOptions(**OPTIONS))
    nbytes = sum(value.nbytes for value in TENSORS.values())
    assert report.source_checksums == {
        "records": 6,
        "files": 2,
        "nbytes": nbytes,
        "bare_records": 0,
        "bare_files": 0,
    }
    assert "6 stored checksums of 2 files (33.0 kB) are right" in report.verified
    # once to check, once to merge; then with what lies between small tensors (engine.joint_reads)
    assert 0 <= report.read_nbytes - 2 * nbytes < len(TENSORS) * 2 * SEEK


@pytest.mark.parametrize("make", [ranks, real_dcp, lambda f: write_bin(f / "pytorch_model.bin", TENSORS)])
def test_every_record_that_pythons_zipfile_finds_broken_is_found(tmp_path: pathlib.Path, make: Any) -> None:
    ckpt = make(tmp_path / "ckpt")
    part = raw(TENSORS[DOWN][:32])  # a tensor or its first half
    path = next(p for p in sorted(ckpt.iterdir()) if part in p.read_bytes())
    where = rot(path, part, at=1000)
    if zipfile.is_zipfile(path) and path.suffix != ".distcp":
        assert "/data/" in str(zipfile.ZipFile(path).testzip())
    with pytest.raises(CorruptCheckpointError) as caught:
        merge(ckpt, tmp_path / "out", MergeOptions(**OPTIONS))
    text = caught.value.message
    assert "1 of " in text
    assert str(path) in text
    assert f"it holds {DOWN}" in text
    first, last = (int(n) for n in text.partition("(bytes ")[2].partition(")")[0].split(" to "))
    assert first <= where < last
    wanted = zlib.crc32(
        bytes(a ^ (0x10 if k == where - first else 0) for k, a in enumerate(path.read_bytes()[first:last]))
    )
    assert f"has crc32 {zlib.crc32(path.read_bytes()[first:last]):08x}, wanted {wanted:08x}" in text
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_without_the_option_the_same_file_is_merged(tmp_path: pathlib.Path) -> None:
    """Why the option is there: the bytes alone tell nothing."""
    ckpt = ranks(tmp_path / "ckpt")
    rot(ckpt / "model_world_size_2_rank_0.pt", raw(TENSORS["model.norm.weight"][:32]))
    assert merge(ckpt, tmp_path / "out", MergeOptions(**OPTIONS | {"check_crc": False})).source_checksums is None


def test_exit_code_hint_and_json(tmp_path: pathlib.Path) -> None:
    ckpt = ranks(tmp_path / "ckpt")
    rot(ckpt / "model_world_size_2_rank_1.pt", raw(TENSORS[DOWN][32:]))
    words = ("--no-config", "--layout", "as-is", "--check-crc", "--json")
    for command in ("merge", "plan"):
        ended = tool(command, ckpt, tmp_path / "out", *words)
        ended.refused(5, "model_world_size_2_rank_1.pt", DOWN, "hint: copy these files again")
        assert ended.json["exit_code"] == 5
    assert not (tmp_path / "out.partial").exists()


def test_plan_counts_the_bytes_that_are_checked(tmp_path: pathlib.Path) -> None:
    ckpt = ranks(tmp_path / "ckpt")
    words = ("--no-config", "--layout", "as-is", "--json")
    plain = tool("plan", ckpt, tmp_path / "out", *words).json
    checked = tool("plan", ckpt, tmp_path / "out", *words, "--check-crc").json
    assert checked["read_nbytes"] == 2 * plain["read_nbytes"]
    assert checked["source_checksums"]["records"] == 6
    assert checked["fingerprint"] == plain["fingerprint"]


def test_verify_checks_the_reference_first(tmp_path: pathlib.Path) -> None:
    ckpt = ranks(tmp_path / "ckpt")
    merge(ckpt, tmp_path / "out", MergeOptions(**OPTIONS))
    words = ("verify", tmp_path / "out", "--against", ckpt, "--check-crc")
    assert "6 stored checksums of 2 files" in tool(*words).out
    rot(ckpt / "model_world_size_2_rank_0.pt", raw(TENSORS[DOWN][:32]))
    tool(*words).refused(5, "model_world_size_2_rank_0.pt", DOWN)


@pytest.mark.parametrize("rotten", ["optimizer state", "unused copy"])
def test_only_what_the_plan_reads_is_checked(tmp_path: pathlib.Path, rotten: str) -> None:
    whole = [Replicate()]
    ckpt = write_ranks(tmp_path / "ckpt", (2,), {name: Spread(v, whole) for name, v in TENSORS.items()}, names=("ddp",))
    other = ckpt / "optim_world_size_2_rank_0.pt"
    torch.save({"exp_avg": torch.ones(64)}, other)
    if rotten == "optimizer state":
        rot(other, raw(torch.ones(64)))
    else:
        rot(ckpt / "model_world_size_2_rank_1.pt", raw(TENSORS[DOWN]))
    report = merge(ckpt, tmp_path / "out", MergeOptions(**OPTIONS))
    assert report.source_checksums is not None
    assert report.source_checksums["records"] == 3
    if rotten == "unused copy":  # which is read when copies are compared
        with pytest.raises(CorruptCheckpointError, match="rank_1"):
            make_plan(open_checkpoint([ckpt]), MergeOptions(**OPTIONS, check_replicas=True))


def test_records_without_a_checksum_are_counted_not_failed(tmp_path: pathlib.Path) -> None:
    """`torch.serialization.set_crc32_options(False)` writes zeros."""
    torch.serialization.set_crc32_options(False)
    try:
        ckpt = ranks(tmp_path / "ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    report = merge(ckpt, tmp_path / "out", MergeOptions(**OPTIONS))
    assert report.source_checksums is not None
    assert report.source_checksums["records"] == 0
    assert report.source_checksums["bare_records"] == 6
    assert report.warnings == ["--check-crc could check nothing: the files that are read hold no checksums"]


def test_some_files_without_checksums(tmp_path: pathlib.Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        ckpt = ranks(tmp_path / "ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    fresh = ranks(tmp_path / "fresh")
    (fresh / "model_world_size_2_rank_1.pt").replace(ckpt / "model_world_size_2_rank_1.pt")
    report = merge(ckpt, tmp_path / "out", MergeOptions(**OPTIONS))
    assert "3 stored checksums of 1 file (16.5 kB) are right; 3 records hold none" in report.verified


@pytest.mark.parametrize(
    "make", [lambda f: write_bin(f / "pytorch_model.bin", TENSORS, legacy=True), lambda f: write_hub(f, TENSORS)]
)
def test_containers_without_checksums_say_so(tmp_path: pathlib.Path, make: Any) -> None:
    report = merge(make(tmp_path / "ckpt"), tmp_path / "out", MergeOptions(**OPTIONS))
    assert any("hold no checksums" in text for text in report.warnings)
    assert report.source_checksums is not None
    assert report.source_checksums["bare_files"] == 1


def manifest(ckpt: pathlib.Path, **more: object) -> None:
    """integrity.json as Megatron-core 0.20 writes it."""
    files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(ckpt.iterdir())}
    (ckpt / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": files} | more, indent=2))


def test_integrity_json_beside_the_files(tmp_path: pathlib.Path) -> None:
    ckpt = write_dcp(tmp_path / "ckpt", 2, TENSORS)
    manifest(ckpt)
    report = merge(ckpt, tmp_path / "out", MergeOptions(**OPTIONS))
    assert report.source_checksums is not None
    assert report.source_checksums["records"] == 12  # six zips, six whole files
    with zipfile.ZipFile(ckpt / "__1_0.distcp") as packed:
        serial = packed.read(next(n for n in packed.namelist() if n.endswith("serialization_id")))
    rot(ckpt / "__1_0.distcp", serial)  # outside of all records that hold tensors
    with pytest.raises(CorruptCheckpointError, match=f"the whole file .* has sha256 .*{DOWN}"):
        merge(ckpt, tmp_path / "out2", MergeOptions(**OPTIONS))


def test_safetensors_with_integrity_json(tmp_path: pathlib.Path) -> None:
    ckpt = write_hub(tmp_path / "ckpt", TENSORS)
    manifest(ckpt)
    rot(ckpt / "model.safetensors", raw(TENSORS[DOWN]))
    with pytest.raises(CorruptCheckpointError, match=f"{DOWN}, .* and model.norm.weight|{DOWN}"):
        merge(ckpt, tmp_path / "out", MergeOptions(**OPTIONS))


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"algorithm": "md5"}, UnsupportedError, "'md5', known is sha256"),
        ({"files": ["x"]}, CorruptCheckpointError, "no table `files`"),
        ({"files": {"model.safetensors": "12"}}, CorruptCheckpointError, "wanted 64 hex digits"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_told(
    tmp_path: pathlib.Path, more: dict[str, object], error: type[Exception], words: str
) -> None:
    ckpt = write_hub(tmp_path / "ckpt", TENSORS)
    manifest(ckpt, **more)
    with pytest.raises(error, match=words):
        merge(ckpt, tmp_path / "out", MergeOptions(**OPTIONS))
    merge(ckpt, tmp_path / "out", MergeOptions(**OPTIONS | {"check_crc": False}))


class _Kept:
    """A format's own reader: the way in for containers that are to come."""

    def __init__(self, algorithm: ChecksumAlgorithm, digest: str, nbytes: int) -> None:
        self.record = StoredRecord("/a", "c/0/0", 0, nbytes, algorithm, digest)

    def __call__(self, paths: frozenset[str]) -> Iterator[StoredRecord]:
        assert paths == {"/a"}
        yield self.record


def _crc32c(data: bytes) -> str:
    return f"{google_crc32c.value(data):08x}"


def _xxh3(data: bytes) -> str:
    import xxhash

    return str(xxhash.xxh3_64_hexdigest(data))


@pytest.mark.parametrize(
    ("algorithm", "truth"),
    [
        ("crc32", lambda data: f"{zlib.crc32(data):08x}"),
        ("crc32c", _crc32c),
        ("xxh3-64", _xxh3),
        ("sha256", lambda data: hashlib.sha256(data).hexdigest()),
    ],
)
def test_every_algorithm_in_pieces_and_with_progress(algorithm: ChecksumAlgorithm, truth: Any) -> None:
    data = np.random.default_rng(1).integers(0, 256, 1_000_003, dtype=np.uint8).tobytes()
    table = ShardTable.of([(Box.whole((len(data),)), 0, 0)], 1)
    u8 = dtype_named("U8")
    assert u8 is not None
    tensors = {"t": TensorRef("t", u8, (len(data),), table)}
    seen: list[int] = []
    peak = threading.Lock()

    def observer(event: object) -> None:
        with peak:
            seen.append(
                event.nbytes if isinstance(event, Progress) else -event.total if isinstance(event, Phase) else 0
            )

    def found(digest: str) -> Any:
        catalog = Catalog(
            "x", "/", tensors, (SourceFile("/a", "a", len(data), 0),), checksums=(_Kept(algorithm, digest, len(data)),)
        )
        return check_stored(
            catalog,
            {0: np.array([[5, 6]])},
            source=MemorySource({"/a": data}),
            budget=MemoryBudget(slots=2, slab_bytes=70_000),
            segment_bytes=65_536,
            observer=observer,
            stop=StopFlag(),
        )

    findings = found(truth(data))
    assert not findings.broken
    assert findings.records == 1
    assert sum(seen) == 0  # the phase's total is what progress adds up to
    with pytest.raises(CorruptCheckpointError, match=r"c/0/0 .*it holds t"):
        refuse_broken(found(truth(data[:-1] + b"?")))


def test_ranges_are_those_of_the_boxes_that_are_taken(tmp_path: pathlib.Path) -> None:
    ckpt = ranks(tmp_path / "ckpt")
    catalog = open_checkpoint([ckpt])
    job = make_plan(catalog, MergeOptions(write_config=False, layout="as-is"), observer=Silent())
    found = ranges_read(p.source for p in job.plan.parameters)
    assert sum(int((spans[:, 1] - spans[:, 0]).sum()) for spans in found.values()) == catalog.nbytes
    for number, spans in found.items():
        held = zipfile.ZipFile(catalog.files[number].path)
        assert len(spans) <= sum("/data/" in name for name in held.namelist())
