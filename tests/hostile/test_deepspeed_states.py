"""DeepSpeed's state files as a stranger may write them: refused in words, in bounded time and memory."""

from __future__ import annotations

import collections
import shutil
import sys
import time
import tracemalloc
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from merge_stream.errors import CorruptCheckpointError, IncompleteShardsError, MergeStreamError, UnsupportedError
from merge_stream.formats._deepspeed_files import missing_text
from merge_stream.formats._deepspeed_patterns import NamePatterns
from merge_stream.formats._deepspeed_tensor_parallel import TensorParallelRules
from tests.cases.naive import assert_holds, merged, numbered
from tests.formats.naive import DATA
from tests.makers.zero_files import ZeroRun, write_zero

TENSORS = {"model.a": numbered(5), "model.b": numbered(7, 3, first=20), "model.c": numbered(3, 7, first=50)}
Change = Callable[[dict[str, Any]], object]


def changed(path: Path, change: Change) -> None:
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


@pytest.fixture(params=[2, 3], ids=["stage 2", "stage 3"])
def ckpt(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_zero(tmp_path / "ckpt", ZeroRun([TENSORS], stage=request.param)) / "global_step7"


@pytest.fixture(autouse=True)
def soon_and_small() -> Iterator[None]:
    """No word of a file makes a list as long as it says."""
    tracemalloc.start()
    begun = time.process_time()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.process_time() - begun < 10
    assert peak < 64 << 20


def refusal(ckpt: Path, tmp_path: Path, *, error: type[MergeStreamError] = CorruptCheckpointError) -> str:
    with pytest.raises(error) as caught:
        merged(ckpt, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert caught.value.hint
    return caught.value.message


OPTIMIZER_OF_ONE_RANK: dict[str, tuple[Any, str]] = {
    "partition_count is 10^9": (10**9, "has partition_count"),
    "partition_count is 2^70": (2**70, "has partition_count"),
    "partition_count is a list of 10^9": ([10**9], "has partition_count"),
    "partition_count of another run": (4, "has partition_count"),
}


@pytest.mark.parametrize("what", OPTIMIZER_OF_ONE_RANK)
def test_ranks_of_different_partition_counts_are_of_two_runs(ckpt: Path, tmp_path: Path, what: str) -> None:
    value, words = OPTIMIZER_OF_ONE_RANK[what]
    path = ckpt / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    changed(path, lambda state: state["optimizer_state_dict"].update(partition_count=value))
    assert words in refusal(ckpt, tmp_path)


def test_a_count_of_ranks_that_nobody_has_is_counted_and_not_listed(ckpt: Path, tmp_path: Path) -> None:
    for path in ckpt.glob("*optim_states.pt"):
        changed(path, lambda state: state["optimizer_state_dict"].update(partition_count=[10**9]))
    message = refusal(ckpt, tmp_path, error=IncompleteShardsError)
    assert "ranks 0-1 of 1000000000" in message
    assert "2-999999999 are missing" in message


def test_numbers_that_are_missing() -> None:
    assert not missing_text([0, 1, 2], 3)
    assert missing_text([1, 4, 99], 7) == "0, 2-3, 5-6"
    assert missing_text([], 10**18) == f"0-{10**18 - 1}"


def test_model_parallel_ranks_in_file_names_are_no_lengths(ckpt: Path, tmp_path: Path) -> None:
    name = next(path.name for path in ckpt.glob("*model_states.pt"))
    shutil.copy(ckpt / name, ckpt / name.replace("mp_rank_00", "mp_rank_999999999999"))
    assert "not of 1-999999999998" in refusal(ckpt, tmp_path, error=IncompleteShardsError)


@pytest.mark.parametrize("step", [float("nan"), float("inf"), -float("inf")])
def test_a_step_that_is_no_number(ckpt: Path, tmp_path: Path, step: float) -> None:
    def change(state: dict[str, Any]) -> None:
        held = state["optimizer_state_dict"]
        base = held.get("base_optimizer_state") or held["optimizer_state_dict"]
        base["state"][0]["step"] = torch.tensor(step)

    changed(ckpt / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", change)
    assert f"is at step {step}" in refusal(ckpt, tmp_path)


def test_a_rank_with_more_groups_of_masters(ckpt: Path, tmp_path: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        held = state["optimizer_state_dict"]
        flats = held.get("fp32_flat_groups") or held["single_partition_of_fp32_groups"]
        flats.append(torch.zeros(2))

    changed(ckpt / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", change)
    assert "groups of masters 2" in refusal(ckpt, tmp_path)


def test_ranks_that_list_the_parameters_in_another_order_are_refused(tmp_path: Path) -> None:
    """Stage 3 has no 16-bit weights that would prove the order, so both lists must be the same one."""
    ckpt = write_zero(tmp_path / "ckpt", ZeroRun([TENSORS], stage=3)) / "global_step7"

    def turn(state: dict[str, Any]) -> None:
        state["param_shapes"][0] = collections.OrderedDict(reversed(state["param_shapes"][0].items()))

    changed(ckpt / "zero_pp_rank_1_mp_rank_00_model_states.pt", turn)
    assert "lists other parameters" in refusal(ckpt, tmp_path)


@pytest.mark.parametrize(
    "shape", [(2**62, 4), (2**63,), (2**31, 2**31, 2**31), (-1, 5), (5.0,), "5", None, (1,) * 3000]
)
def test_shapes_that_no_flat_tensor_fills(ckpt: Path, tmp_path: Path, shape: object) -> None:
    for path in ckpt.glob("*model_states.pt"):
        changed(path, lambda state: state["param_shapes"][0].update({"model.b": shape}))
    assert "model" in refusal(ckpt, tmp_path)


@pytest.mark.parametrize("padding", [-1, -10, 10**9, -(10**9), 2**70])
def test_paddings_that_contradict_the_ranks(tmp_path: Path, padding: int) -> None:
    ckpt = write_zero(tmp_path / "ckpt", ZeroRun([TENSORS])) / "global_step7"
    path = ckpt / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    changed(path, lambda state: state["optimizer_state_dict"].update(group_paddings=[padding]))
    assert "group 0" in refusal(ckpt, tmp_path)


def test_gaps_that_would_lay_parameters_over_each_other(tmp_path: Path) -> None:
    """fp32 runs have no 16-bit weights that would tell."""
    ckpt = write_zero(tmp_path / "ckpt", ZeroRun([TENSORS], dtype=torch.float32)) / "global_step7"
    for path in ckpt.glob("*optim_states.pt"):
        changed(path, lambda state: state["optimizer_state_dict"].update(param_alignment_paddings=[[-2, 2, 0]]))
    assert "alignment gap of -2" in refusal(ckpt, tmp_path)


def test_masters_without_a_shape_are_not_dropped(tmp_path: Path) -> None:
    """Without `param_shapes` the shapes are those of `module`; names that it lacks are an error."""
    ckpt = write_zero(tmp_path / "ckpt", ZeroRun([TENSORS])) / "global_step7"

    def change(state: dict[str, Any]) -> None:
        state.update(param_shapes=None, module={})

    changed(ckpt / "mp_rank_00_model_states.pt", change)
    for path in ckpt.glob("*optim_states.pt"):
        changed(path, _with_slices)
    assert "no file tells its shape" in refusal(ckpt, tmp_path, error=IncompleteShardsError)


class _Address:
    """Stands for deepspeed.utils.tensor_fragment.fragment_address."""

    def __init__(self, numel: int, start: int) -> None:
        self.numel, self.start = numel, start


def _with_slices(state: dict[str, Any]) -> None:
    state["optimizer_state_dict"]["param_slice_mappings"] = [{"model.a": _Address(5, 0)}]


@pytest.mark.parametrize(
    "text", ["..", "../..", "global_step7/..", "global_step7\n/../x", "", "/", "\x00", "x" * 10**5]
)
def test_what_latest_says_is_only_the_name_of_a_tag_that_is_there(tmp_path: Path, text: str) -> None:
    run = tmp_path / "run"
    write_zero(run, ZeroRun([TENSORS]))
    (run / "latest").write_text(text)
    with pytest.raises(IncompleteShardsError) as caught:
        merged(run, tmp_path / "out")
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 500
    assert "--tag" in str(caught.value.hint)


def test_a_deep_and_wide_client_state_is_not_looked_at(ckpt: Path, tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    client = {"deep": deep, "wide": list(range(10_000)), "model": {"model.a": torch.ones(5)}, "module2": torch.ones(3)}
    for path in ckpt.glob("*model_states.pt"):
        changed(path, lambda state: state.update(client))
    merged(ckpt, tmp_path / "out")
    assert_holds(tmp_path / "out", TENSORS)


class TestPatterns:
    """`universal_checkpoint_info` holds regular expressions."""

    @pytest.mark.parametrize(
        "pattern",
        [
            "(a|a)+$", "(a+)+$", "(?:a*)*b", "(a?){40}b", "a?a?a?a?a?b", ".*.*.*.*.*x", "(a|a)(a|a)(a|a)(a|a)b",
            "a{1000}", r"(a)\1", "(?=a+)+", "(", "[", "x" * 501, 7, None, ["a"], b"a",
        ],
    )  # fmt: skip
    def test_what_could_take_for_ever_is_refused(self, pattern: object) -> None:
        with pytest.raises(CorruptCheckpointError, match="could take for ever") as caught:
            NamePatterns.of([pattern], "file.pt").find("a" * 60)
        assert caught.value.hint

    def test_long_names_and_many_of_them_are_bounded(self) -> None:
        patterns = NamePatterns.of([r".*.*.*z"], "file.pt")
        with pytest.raises(CorruptCheckpointError, match="take too long"):
            patterns.find("a" * 401)
        with pytest.raises(CorruptCheckpointError, match="take too long"):
            [patterns.find("a" * 300) for _ in range(10_000)]

    def test_exact_names_are_looked_up(self) -> None:
        """20000 parameters with a pattern each, as AutoTP of a mixture of experts writes them."""
        names = [f"model.layers.{k // 100}.mlp.experts.{k % 100}.up_proj.weight" for k in range(20_000)]
        patterns = NamePatterns.of({"^" + name.replace(".", r"\.") + "$": name for name in names}, "file.pt")
        assert [patterns.find(name) for name in names] == names
        assert patterns.find("model.layers.0.mlp.experts.0.up_proj.weightx") is None

    @pytest.mark.parametrize(
        ("pattern", "name"),
        [
            (r"\d+.self_attention.dense.weight", "12.self_attention.dense.weight"),
            (r"transformer\.layers\.\d+\.(mlp|attn)\.bias", "transformer.layers.3.attn.bias"),
            (r".*\.[qkv]_proj", "model.layers.0.self_attn.q_proj.weight"),
            ("word_embeddings", "word_embeddings.weight"),
        ],
    )
    def test_those_of_megatron_deepspeed_match_from_the_start(self, pattern: str, name: str) -> None:
        patterns = NamePatterns.of([pattern], "file.pt")
        assert patterns.find(name) is True
        assert patterns.find(f"x.y{name}") is (True if pattern.startswith(".*") else None)

    @pytest.mark.parametrize("value", [7, "abc", b"x", [7], {1: 2}])
    @pytest.mark.parametrize("key", ["vocabulary_parameter_patterns", "parameter_with_sub_params"])
    def test_other_things_than_lists_of_patterns(self, key: str, value: object) -> None:
        info = {"tp_replicated_parameter_patterns": [], key: value}
        with pytest.raises(CorruptCheckpointError) as caught:
            TensorParallelRules({"universal_checkpoint_info": info}, 2, "file.pt")
        assert caught.value.hint

    def test_a_record_that_says_nothing_of_the_parts_is_none(self, tmp_path: Path) -> None:
        """The default of DeepSpeed's lists is "joined row by row", which would double what is replicated."""
        shutil.copytree(DATA / "deepspeed" / "tp2_z0_w2" / "ckpt", tmp_path / "ckpt")
        for path in (tmp_path / "ckpt").rglob("*model_states.pt"):
            changed(path, lambda state: state.update(universal_checkpoint_info={"universal_checkpoint_version": 0.4}))
        message = refusal(tmp_path / "ckpt", tmp_path, error=UnsupportedError)
        assert "says nothing" in message

    @pytest.mark.parametrize("pieces", [7, [7], [{"shape": [1]}], [{"locations": ["a"]}], None])
    def test_pieces_that_are_none(self, tmp_path: Path, pieces: object) -> None:
        shutil.copytree(DATA / "deepspeed" / "tp2_z0_w2" / "ckpt", tmp_path / "ckpt")

        def change(state: dict[str, Any]) -> None:
            params = state["universal_checkpoint_info"]["affine_map"]["params"]
            next(iter(params.values()))["ranks"][0]["pieces"] = pieces

        for path in (tmp_path / "ckpt").rglob("*model_states.pt"):
            changed(path, change)
        with pytest.raises(MergeStreamError) as caught:
            merged(tmp_path / "ckpt", tmp_path / "out")
        assert "q_proj" in caught.value.message
        assert caught.value.hint


@pytest.mark.parametrize("value", [None, 7, [], [torch.zeros(3)]])
def test_masters_of_stage_0_that_are_none_are_no_missing_masters(tmp_path: Path, value: object) -> None:
    """An optimizer without its masters is damage; no optimizer at all is a save of the 16-bit weights."""
    shutil.copytree(DATA / "deepspeed" / "z0_bf16_fused_w2" / "ckpt", tmp_path / "ckpt")
    for path in (tmp_path / "ckpt").rglob("*model_states.pt"):
        changed(path, lambda state: state["optimizer"].update(fp32_groups_flat=value))
    assert "fp32_groups_flat of its optimizer is" in refusal(tmp_path / "ckpt", tmp_path)


def test_a_number_of_experts_that_nobody_has(tmp_path: Path) -> None:
    shutil.copytree(DATA / "deepspeed" / "moe_z2_ep2_w4" / "ckpt", tmp_path / "ckpt")
    for path in (tmp_path / "ckpt").rglob("mp_rank_00_model_states.pt"):
        changed(path, lambda state: state.update(num_experts=[10**9] * len(state["num_experts"])))
    assert "wanted 1000000000" in refusal(tmp_path / "ckpt", tmp_path, error=IncompleteShardsError)


_OF_DEEPSPEED: dict[str, dict[str, tuple[type, ...]]] = {
    "deepspeed": {},
    "deepspeed.runtime": {},
    "deepspeed.runtime.zero": {},
    "deepspeed.runtime.zero.config": {"ZeroStageEnum": (int,)},
    "deepspeed.runtime.fp16": {},
    "deepspeed.runtime.fp16.loss_scaler": {"LossScaler": (), "DynamicLossScaler": ()},
}


class TestExpertsInStage3:
    """AutoEP: `ds_zero_partition_groups` and `ds_autoep_layers` say which ranks hold which experts."""

    @pytest.fixture
    def ckpt(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The names that its pickles hold are there, so that torch can read and write them."""
        for name, members in _OF_DEEPSPEED.items():
            module = types.ModuleType(name)
            for member in members:
                vars(module)[member] = type(member, members[member], {"__module__": name})
            monkeypatch.setitem(sys.modules, name, module)
        shutil.copytree(DATA / "deepspeed" / "autoep_z3_ep2_w4" / "ckpt", tmp_path / "ckpt")
        return tmp_path / "ckpt" / "global_step3"

    @pytest.mark.parametrize("ranks", [[0, 1], [0], [0, 2, 10**9], [], None, "02", [2, 0]])
    def test_ranks_that_do_not_agree(self, ckpt: Path, tmp_path: Path, ranks: object) -> None:
        def change(state: dict[str, Any]) -> None:
            state["optimizer_state_dict"]["ds_zero_partition_groups"][1]["partition_ranks"] = ranks

        changed(ckpt / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", change)
        message = refusal(ckpt, tmp_path)
        assert "do not agree" in message or "ds_zero_partition_groups holds" in message

    def test_as_many_groups_as_flat_tensors(self, ckpt: Path, tmp_path: Path) -> None:
        for path in ckpt.glob("*optim_states.pt"):
            changed(path, lambda state: state["optimizer_state_dict"]["ds_zero_partition_groups"].pop(0))
        assert "1 ds_zero_partition_groups and 2 flat tensors" in refusal(ckpt, tmp_path)

    def test_without_the_layers_nothing_tells_the_place(self, ckpt: Path, tmp_path: Path) -> None:
        for path in ckpt.glob("*model_states.pt"):
            changed(path, lambda state: state.pop("ds_autoep_layers"))
        assert "does not tell why" in refusal(ckpt, tmp_path, error=UnsupportedError)

    def test_ranks_that_share_a_part_hold_the_same_experts(self, ckpt: Path, tmp_path: Path) -> None:
        def change(state: dict[str, Any]) -> None:
            state["ds_autoep_layers"][0]["ep_rank"] = 1

        changed(ckpt / "zero_pp_rank_0_mp_rank_00_model_states.pt", change)
        assert "name other experts" in refusal(ckpt, tmp_path)

    @pytest.mark.parametrize("experts", [[0, 1], [2, 9], [-1, 3], [10**12, 3], [2, 2]])
    def test_an_expert_has_one_place(self, ckpt: Path, tmp_path: Path, experts: list[int]) -> None:
        def change(state: dict[str, Any]) -> None:
            state["ds_autoep_layers"][0]["expert_placement"]["ranks"][1]["experts"] = experts

        for path in ckpt.glob("*model_states.pt"):
            changed(path, change)
        with pytest.raises(MergeStreamError) as caught:
            merged(ckpt, tmp_path / "out")
        assert "experts" in caught.value.message
        assert caught.value.hint
