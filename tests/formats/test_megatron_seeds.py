"""Random states tell exchanged files of a torch_dist save; a common state that cannot be read is an error."""

from __future__ import annotations

import io
import itertools
import pathlib
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from merge_stream.api import merge
from merge_stream.errors import CorruptCheckpointError, MergeStreamError
from merge_stream.formats._dcp_metadata import read_metadata
from merge_stream.options import MergeOptions
from merge_stream.storage.local import LocalTree
from tests.cases.naive import assert_holds
from tests.cases.test_section_g import arguments
from tests.makers.megatron_files import STEP, Llama, fused, llama, write_config, write_dist

SEED, STAGES, RANKS = 1234, 3, 2


def cuda_state(seed: int) -> torch.Tensor:
    """What `torch.cuda.get_rng_state` gives: seed and offset, 8 bytes each, little-endian (torch 2.13)."""
    return torch.frombuffer(bytearray(seed.to_bytes(8, "little") + (4096).to_bytes(8, "little")), dtype=torch.uint8)


def state(stage: int, rank: int, step: int) -> list[dict[str, Any]]:
    """`get_rng_state` of Megatron-LM; `step` is what a stage adds to the seed."""
    seed = SEED + step * stage
    seeds = {"data": seed, "model": seed + 2718 + rank, "expert": seed + 1024}
    states = {f"{kind}-parallel-rng": cuda_state(value) for kind, value in seeds.items()}
    return [{"random_rng_state": (3, (1, 2), None), "cuda_rng_state": cuda_state(seed), "rng_tracker_states": states}]


def saved(folder: pathlib.Path, of: Llama, step: int = 100) -> dict[tuple[int, int], pathlib.Path]:
    """A checkpoint with a file for each item: those of the random states by (stage, rank)."""
    place = folder / "ckpt" / STEP
    items: dict[str, Any] = {name: tensor.contiguous() for name, tensor in fused(llama(of), of).items()}
    names = {at: f"rng_state/shard_{at[0]}.{at[1]}_{STAGES}.{RANKS}" for at in itertools.product(range(3), range(2))}
    items |= {name: state(*at, step) for at, name in names.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group is there
        writer = FileSystemWriter(place, single_file_per_rank=False)
        planner = DefaultSavePlanner(flatten_state_dict=False)
        dcp.save(items, storage_writer=writer, no_dist=True, planner=planner)
    (place / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    write_config(folder, of.config)
    stored = read_metadata(LocalTree.of([place])).stored
    return {at: place / stored[name][0].file for at, name in names.items()}


def merged(folder: pathlib.Path) -> None:
    merge(folder / "ckpt" / STEP, folder / "out", MergeOptions(base_model=str(folder / "hf")))


def exchange(first: pathlib.Path, second: pathlib.Path) -> None:
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)


@pytest.mark.parametrize(
    ("one", "two", "wanted"),
    [
        ((1, 0), (1, 1), "holds the random state of tensor-parallel rank 1, .metadata says 0"),
        ((0, 1), (2, 1), "holds the random state of pipeline stage 2, .metadata says 0"),
        ((0, 0), (2, 1), "files of ranks were exchanged"),
    ],
)
def test_exchanged_files_are_refused(
    one: tuple[int, int], two: tuple[int, int], wanted: str, tmp_path: pathlib.Path
) -> None:
    files = saved(tmp_path, Llama())
    exchange(files[one], files[two])
    with pytest.raises(CorruptCheckpointError, match=wanted):
        merged(tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("step", [100, 0, 7])
def test_states_in_order_and_those_of_other_programs_are_no_matter(step: int, tmp_path: pathlib.Path) -> None:
    of = Llama()
    saved(tmp_path, of, step)
    merged(tmp_path)
    assert_holds(tmp_path / "out", llama(of))


def damaged(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[:-64])


def test_arguments_that_cannot_be_read_are_an_error(tmp_path: pathlib.Path) -> None:
    """They tell whether norms are stored less one, which no shape shows."""
    of = Llama()
    write_dist(tmp_path, fused(llama(of), of), of.config, arguments(of, apply_layernorm_1p=True))
    damaged(tmp_path / "ckpt" / STEP / "common.pt")
    with pytest.raises(MergeStreamError, match=r"common\.pt"):
        merged(tmp_path)


@pytest.mark.parametrize("held", [["args"], torch.zeros(2)], ids=["list", "tensor"])
def test_something_else_in_place_of_the_common_state_is_an_error(held: object, tmp_path: pathlib.Path) -> None:
    of = Llama()
    write_dist(tmp_path, fused(llama(of), of), of.config, arguments(of))
    buffer = io.BytesIO()
    torch.save(held, buffer)
    (tmp_path / "ckpt" / STEP / "common.pt").write_bytes(buffer.getvalue())
    with pytest.raises(CorruptCheckpointError, match="no common state"):
        merged(tmp_path)


def test_a_common_state_that_is_named_and_not_stored_is_an_error(tmp_path: pathlib.Path) -> None:
    of = Llama()
    write_dist(tmp_path, fused(llama(of), of), of.config, common=arguments(of))
    path = tmp_path / "ckpt" / STEP / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if not k.fqn.startswith("common_state")}
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(MergeStreamError, match="does not say where it is stored"):
        merged(tmp_path)


@pytest.mark.parametrize(
    ("name", "size", "wanted"),
    [
        ("decoder.layers.mlp.linear_fc1.weight", (1 << 40, 0), "more layers"),
        ("decoder.layers.mlp.linear_fc1.weight", (1 << 40, 8, 8), "more layers"),
        ("decoder.layers.0.mlp.experts.experts.linear_fc1.weight", (1 << 40, 8, 0), "more experts"),
        ("decoder.layers.mlp.experts.experts.linear_fc1.weight", (2, 1 << 40, 8, 0), "more experts"),
    ],
    ids=str,
)
def test_stacks_that_no_model_has_take_no_time(
    name: str, size: tuple[int, ...], wanted: str, tmp_path: pathlib.Path
) -> None:
    """A hostile `.metadata`: a tensor of no bytes, or of none that are stored, with 2^40 layers or experts."""
    of = Llama()
    write_dist(tmp_path, fused(llama(of), of), of.config)
    path = tmp_path / "ckpt" / STEP / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    other = metadata.state_dict_metadata["output_layer.weight"]
    chunk = ChunkStorageMetadata(torch.Size((0,) * len(size)), torch.Size(size))
    entry = TensorStorageMetadata(other.properties, torch.Size(size), [chunk] if 0 in size else [])
    metadata.state_dict_metadata[name] = entry
    metadata.planner_data = None
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match=wanted):
        merged(tmp_path)
