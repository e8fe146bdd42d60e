"""Megatron's rank files are those of one save, each in the folder of its process; else nothing is written."""

from __future__ import annotations

import itertools
import pathlib
import shutil

import pytest
import torch

from merge_stream.api import merge
from merge_stream.errors import CorruptCheckpointError, IncompleteShardsError, MergeStreamError
from merge_stream.options import MergeOptions
from tests.cases.naive import assert_holds
from tests.cases.test_section_g import MIXTURE, arguments, mixture, stages
from tests.formats.naive import DATA
from tests.makers.megatron_files import STEP, Llama, fused, llama, tensor_part, write_ranks

Tensors = dict[str, torch.Tensor]
Coordinates = tuple[int, ...]


def said(case: pathlib.Path) -> str:
    """What a merge of the case says; nothing is written."""
    base = case / "hf"
    with pytest.raises(MergeStreamError) as caught:
        merge(case / "ckpt", case / "out", MergeOptions(base_model=str(base) if base.exists() else None))
    assert not (case / "out").exists()
    assert caught.value.hint
    assert isinstance(caught.value, (CorruptCheckpointError, IncompleteShardsError))
    return str(caught.value)


def exchange(first: pathlib.Path, second: pathlib.Path) -> None:
    spare = first.with_name("spare")
    first.rename(spare)
    second.rename(first)
    spare.rename(second)


@pytest.mark.parametrize(
    ("name", "first", "second", "wanted"),
    [
        ("legacy_llama_tp2_pp2", "00_001", "01_001", "written by process 3, which was tensor-parallel rank 1"),
        ("legacy_llama_tp2_pp2", "00_000", "00_001", "written by process 2, mp_rank_00_001"),
        ("legacy_qwen3moe_weight1_ep2", "00_000", "00_001", "written by process 1, which was expert rank 1"),
    ],
)
def test_exchanged_folders_of_real_saves_are_refused(
    name: str, first: str, second: str, wanted: str, tmp_path: pathlib.Path
) -> None:
    """All shapes fit; only the process that wrote a file tells its place."""
    case = shutil.copytree(DATA / "megatron" / name, tmp_path / "case")
    step = case / "ckpt" / STEP
    exchange(step / f"mp_rank_{first}", step / f"mp_rank_{second}")
    assert wanted in said(case)


# ------------------------------------------------------------------------------- numbers of processes


def pipeline(of: Llama, tensor: int, counts: list[int]) -> dict[Coordinates, Tensors]:
    return {
        (rank, stage): {name: tensor_part(name, value, rank, tensor) for name, value in state.items()}
        for stage, state in enumerate(stages(fused(llama(of), of), counts))
        for rank in range(tensor)
    }


def merged(folder: pathlib.Path) -> None:
    merge(folder / "ckpt", folder / "out", MergeOptions(base_model=str(folder / "hf")))


SIZES = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 3,
    "context_parallel_size": 2,
    "world_size": 24,
}


@pytest.mark.parametrize("below", [8, 4], ids=["tp-cp-dp-pp", "tp-cp-pp-dp"])
def test_both_orders_of_processes_are_known(below: int, tmp_path: pathlib.Path) -> None:
    """Two context-parallel and two data-parallel ranks; a stage in the middle in another's folder is refused."""
    of = Llama(layers=4)
    states = pipeline(of, 2, [1, 1, 1, 1])
    processes = {at: at[0] + below * at[1] for at in states}
    write_ranks(tmp_path, states, arguments(of, **SIZES | {"pipeline_model_parallel_size": 4}), of.config, processes)
    merged(tmp_path)
    assert_holds(tmp_path / "out", llama(of))
    shutil.rmtree(tmp_path / "out")
    for rank in (0, 1):
        exchange(*(tmp_path / "ckpt" / STEP / f"mp_rank_0{rank}_00{stage}" for stage in (1, 2)))
    assert f"written by process {2 * below}, mp_rank_00_002" in said(tmp_path)


@pytest.mark.parametrize("below", [2, 4], ids=["now", "older cores with CP 2"])
def test_expert_ranks_are_told_by_processes(below: int, tmp_path: pathlib.Path) -> None:
    """TP 2, EP 2, all experts cut in two."""
    of = Llama(**MIXTURE)
    tensors, whole, experts = mixture(of)
    states: dict[Coordinates, Tensors] = {}
    for rank, expert in itertools.product((0, 1), (0, 1)):
        state = {name: tensor_part(name, value, rank, 2) for name, value in whole.items()}
        for k, n in itertools.product((0, 1), (0, 1)):
            part = tensor_part(f"linear_fc{n + 1}.weight", experts[2 * expert + k][n], rank, 2)
            state[f"decoder.layers.0.mlp.experts.linear_fc{n + 1}.weight{k}"] = part
        states[rank, expert] = state
    sizes = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "context_parallel_size": 2}
    processes = {at: at[0] + below * at[1] for at in states}
    write_ranks(tmp_path, states, arguments(of, num_experts=4, **sizes), of.config, processes)
    merged(tmp_path)
    assert_holds(tmp_path / "out", tensors)
    shutil.rmtree(tmp_path / "out")
    for rank in (0, 1):
        exchange(*(tmp_path / "ckpt" / STEP / f"mp_rank_0{rank}_00{expert}" for expert in (0, 1)))
    assert "expert rank" in said(tmp_path)


def test_files_of_one_process_tell_nothing(tmp_path: pathlib.Path) -> None:
    """A converter writes all files."""
    of = Llama(layers=2)
    states = pipeline(of, 2, [1, 1])
    write_ranks(tmp_path, states, arguments(of), of.config, dict.fromkeys(states, 0))
    merged(tmp_path)
    assert_holds(tmp_path / "out", llama(of))


def test_two_files_of_one_process_beside_others_are_refused(tmp_path: pathlib.Path) -> None:
    """A rank's file of another step of equal shape was copied over its neighbour's."""
    of = Llama(layers=2)
    states = pipeline(of, 2, [1, 1])
    write_ranks(tmp_path, states, arguments(of), of.config, dict(zip(states, (0, 0, 2, 3), strict=True)))
    assert (
        "mp_rank_00_000/model_optim_rng.pt and mp_rank_01_000/model_optim_rng.pt were both written by process 0"
        in said(tmp_path)
    )


def test_without_numbers_the_ends_of_the_model_tell_stages(tmp_path: pathlib.Path) -> None:
    """Embedding first, the last norm last; verl's files of spring 2025 hold no arguments."""
    of = Llama(layers=3)
    states = pipeline(of, 1, [1, 1, 1])
    for number, order in enumerate([(2, 1, 0), (1, 0, 2), (0, 2, 1)]):
        case = tmp_path / str(number)
        write_ranks(case, {(0, stage): states[0, held] for stage, held in enumerate(order)}, {}, of.config)
        assert "holds the embedding, and stages before it" in said(case) or "layers behind it" in said(case)


# ------------------------------------------------------------------------------- files of several saves


def test_files_of_two_iterations_are_refused(tmp_path: pathlib.Path) -> None:
    of = Llama(layers=2)
    write_ranks(tmp_path, pipeline(of, 2, [1, 1]), arguments(of), of.config)
    path = tmp_path / "ckpt" / STEP / "mp_rank_01_001" / "model_optim_rng.pt"
    torch.save(torch.load(path, weights_only=False) | {"iteration": 90}, path)
    assert "iteration is 100 in mp_rank_00_000/model_optim_rng.pt and 90 in mp_rank_01_001" in said(tmp_path)


@pytest.mark.parametrize(
    ("place", "old", "wanted"),
    [
        ((0, 2), {"pipeline_model_parallel_size": 3}, "pipeline_model_parallel_size is 2 in mp_rank_00_000"),
        ((0, 4), {}, "holds mp_rank_00_004/model_optim_rng.pt, and the trainer's arguments say 2 pipeline stages"),
        (
            (2, 1),
            {},
            "holds mp_rank_02_001/model_optim_rng.pt, and the trainer's arguments say 2 tensor-parallel ranks",
        ),
        ((0,), {}, "folders of two kinds"),
        ((99_999_999, 0), {}, "99999999"),
    ],
    ids=str,
)
def test_a_folder_of_an_older_run_is_named(
    place: Coordinates, old: dict[str, int], wanted: str, tmp_path: pathlib.Path
) -> None:
    of = Llama(layers=2)
    states = pipeline(of, 2, [1, 1])
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    write_ranks(tmp_path, states, arguments(of, **sizes), of.config)
    stale = {name: tensor + 1 for name, tensor in states[0, 1].items()}
    write_ranks(tmp_path, {place: stale}, arguments(of, **sizes | old), of.config)
    assert wanted in said(tmp_path)


@pytest.mark.parametrize("name", ["mp_rank_000_001/model_optim_rng.pt", "mp_rank_00_001/model.pt"])
def test_two_files_of_one_rank_are_refused(name: str, tmp_path: pathlib.Path) -> None:
    """Whichever was read, the other would be left out without a word."""
    of = Llama(layers=2)
    write_ranks(tmp_path, pipeline(of, 1, [1, 1]), arguments(of), of.config)
    step = tmp_path / "ckpt" / STEP
    (step / name).parent.mkdir(exist_ok=True)
    shutil.copyfile(step / "mp_rank_00_000" / "model_optim_rng.pt", step / name)
    assert "are both of tensor 0 pipeline 1" in said(tmp_path)


def test_numbers_that_no_job_has_take_no_time(tmp_path: pathlib.Path) -> None:
    """No arguments, and a folder of rank 10^12: ranks up to there are not listed."""
    of = Llama(layers=2)
    states = pipeline(of, 2, [1, 1])
    write_ranks(tmp_path, states, {}, of.config)
    write_ranks(tmp_path, {(10**12, 0): {"output_layer.weight": torch.ones(3)}}, {}, of.config)
    assert "no job has as many" in said(tmp_path)


@pytest.mark.parametrize(("lost", "wanted"), [("01", "tensor-parallel ranks are missing"), ("00", "tensor 0")])
def test_a_tensor_rank_that_is_missing_without_arguments(lost: str, wanted: str, tmp_path: pathlib.Path) -> None:
    """Rows tell that there were more ranks than files."""
    of = Llama()
    states = {(rank,): {n: tensor_part(n, t, rank, 2) for n, t in fused(llama(of), of).items()} for rank in (0, 1)}
    write_ranks(tmp_path, states, {}, of.config)
    shutil.rmtree(tmp_path / "ckpt" / STEP / f"mp_rank_{lost}")
    base = tmp_path / "hf"
    with pytest.raises(MergeStreamError, match=wanted):
        merge(tmp_path / "ckpt", tmp_path / "out", MergeOptions(base_model=str(base)))
