"""DeepSpeed: real checkpoints give the trainer's own weights, and what contradicts itself is refused by name."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from merge_stream import cli
from merge_stream.containers.safetensors_file import read_header
from merge_stream.errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    CorruptCheckpointError,
    IncompleteShardsError,
    MergeStreamError,
    TruncatedFileError,
    UnsupportedError,
    UsageError,
)
from merge_stream.formats.deepspeed import MEMBER
from merge_stream.options import MergeOptions, OpenOptions
from merge_stream.storage.local import LocalTree
from tests.cases.naive import NAMES_AS_THEY_ARE, assert_holds, merged, numbered
from tests.formats.naive import DATA, opened
from tests.makers.zero_files import ZeroRun, write_zero

REAL = sorted(path.parent for path in DATA.glob("deepspeed*/*/check.json"))
BF16 = dataclasses.replace(NAMES_AS_THEY_ARE, dtype="bf16")
TENSORS = {"model.a": numbered(5), "model.b": numbered(7, 3, first=20)}


def runs() -> Iterator[tuple[Path, dict[str, object]]]:
    for case in REAL:
        for run in json.loads((case / "check.json").read_text())["runs"]:
            yield case, run


def content(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    found = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        for name, t in read_header(LocalTree.of([folder]), path.name).tensors.items():
            found[name] = (t.dtype.name, t.shape, data[t.offset : t.offset + t.nbytes])
    return found


@pytest.mark.parametrize(
    ("case", "run"), [pytest.param(c, r, id=f"{c.name} {' '.join(r.get('args', []))}") for c, r in runs()]
)
def test_real_checkpoints_give_the_trainers_own_weights(case: Path, run: dict[str, object], tmp_path: Path) -> None:
    """The truth is the live engine's weights: masters, or `module` for --weights module."""
    options = [str(argument) for argument in run.get("args", [])]
    if "base_model" in run:
        options += ["--base-model", str(case / str(run["base_model"]))]
    assert cli.run(["merge", str(case / "ckpt"), str(tmp_path / "out"), "-q", *options]) == 0
    wanted = {".": run["compare"]} if "compare" in run else {}
    for folder, name in {**wanted, **run.get("also", {})}.items():
        assert content(tmp_path / "out" / folder) == content(case / name)


@pytest.mark.parametrize(
    "case", [c for c in REAL if c.name.startswith("z2_") and "lora" not in c.name], ids=lambda c: c.name
)
def test_a_16_bit_output_is_the_module(case: Path, tmp_path: Path) -> None:
    """The cast master is the module's weight, bit for bit."""
    options = ["--base-model", str(case / "hf"), "--dtype", "bf16", "-q"]
    assert cli.run(["merge", str(case / "ckpt"), str(tmp_path / "out"), *options]) == 0
    assert content(tmp_path / "out") == content(case / "expected_module")


def test_a_16_bit_output_reads_the_16_bit_weights(tmp_path: Path) -> None:
    """Half the bytes of the masters, and samples of both to prove that they belong together."""
    weights = {"model.w": numbered(600, 400)}
    report = merged(write_zero(tmp_path / "ckpt", ZeroRun([weights])), tmp_path / "out", BF16)
    assert_holds(tmp_path / "out", {"model.w": weights["model.w"].to(torch.bfloat16)})
    assert report.read_nbytes <= 1.5 * 2 * 600 * 400


def test_inspect_tells_the_layout() -> None:
    catalog = opened(MEMBER, DATA / "deepspeed" / "z2_bf16_multigroup_w3" / "ckpt")
    facts = catalog.facts
    assert (facts["ZeRO stage"], facts["data-parallel ranks"], facts["optimizer groups"]) == (2, 3, 2)
    assert (facts["tag"], facts["trainer"]) == ("global_step2", "DeepSpeed 0.19.8")
    tensor = opened(MEMBER, DATA / "deepspeed" / "tp2_z0_w2" / "ckpt")
    assert tensor.facts["tensor-parallel ranks"] == 2


def test_moments_are_never_read(tmp_path: Path) -> None:
    """A third of the optimizer files is masters; at most 1.2 times their bytes are read."""
    weights = {"model.w": numbered(1200, 1000)}
    report = merged(write_zero(tmp_path / "ckpt", ZeroRun([weights], dtype=torch.float32)), tmp_path / "out")
    assert report.read_nbytes <= 1.2 * 4 * 1200 * 1000


def refused(folder: Path, tmp_path: Path, error: type[MergeStreamError], *words: str, **options: object) -> str:
    with pytest.raises(error) as caught:
        merged(folder, tmp_path / "out", opening=OpenOptions(**options))
    assert not (tmp_path / "out").exists()
    for word in words:
        assert word in caught.value.message
    assert caught.value.hint
    return caught.value.hint


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_of_different_steps_are_refused(tmp_path: Path, stage: int) -> None:
    """They load without any error elsewhere, and give a wrong model."""
    folder = write_zero(tmp_path / "ckpt", ZeroRun([TENSORS], stage=stage, steps=[7, 8]))
    refused(folder, tmp_path, CorruptCheckpointError, "is of step 8", "of step 7")


def test_masters_that_do_not_round_to_the_weights_are_refused(tmp_path: Path) -> None:
    """The order of the parameters differs from that of the flat vector: sizes alone do not show it."""
    folder = write_zero(tmp_path / "ckpt", ZeroRun([{"model.a": numbered(6), "model.b": numbered(6, first=40)}]))
    states = folder / "global_step7" / "mp_rank_00_model_states.pt"
    held = torch.load(states, weights_only=False)
    held["param_shapes"] = [dict(reversed(list(held["param_shapes"][0].items())))]
    torch.save(held, states)
    hint = refused(folder, tmp_path, CorruptCheckpointError, "do not round to", "model.")
    assert "--weights module" in hint


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mixed", ["ranks swapped", "a rank of another save"])
def test_files_that_changed_places_contradict_the_weights(tmp_path: Path, dtype: torch.dtype, mixed: str) -> None:
    """Sizes and steps are the same; the weights beside the masters are not."""
    weights = {"model.a": numbered(400, 30), "model.b": numbered(60, 8, first=50_000)}
    place = write_zero(tmp_path / "ckpt", ZeroRun([weights], ranks=4, dtype=dtype)) / "global_step7"
    first, second, *_ = sorted(place.glob("*optim_states.pt"))
    if mixed == "ranks swapped":
        other = first.read_bytes()
        first.write_bytes(second.read_bytes())
    else:
        moved = {name: tensor * 2 for name, tensor in weights.items()}
        run = write_zero(tmp_path / "other", ZeroRun([moved], ranks=4, dtype=dtype))
        other = (run / "global_step7" / second.name).read_bytes()
    second.write_bytes(other)
    refused(place, tmp_path, CorruptCheckpointError, "do not round to", "model.")


@pytest.mark.parametrize("stage", [2, 3])
def test_a_missing_rank_is_named(tmp_path: Path, stage: int) -> None:
    folder = write_zero(tmp_path / "ckpt", ZeroRun([TENSORS], stage=stage, ranks=3))
    (folder / "global_step7" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    refused(folder, tmp_path, IncompleteShardsError, "ranks 0, 2 of 3", "ranks 1 are missing")


def test_stale_ranks_of_a_larger_run_are_refused(tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "ckpt", ZeroRun([TENSORS], ranks=2))
    place = folder / "global_step7"
    stale = (place / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").read_bytes()
    (place / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").write_bytes(stale)
    refused(folder, tmp_path, CorruptCheckpointError, "ranks 2, but the run had 2 ranks")


def test_without_optimizer_files_the_16_bit_weights_are_offered(tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "ckpt", ZeroRun([TENSORS]))
    for path in (folder / "global_step7").glob("*optim*"):
        path.unlink()
    hint = refused(folder, tmp_path, IncompleteShardsError, "no optimizer states")
    assert "--weights module" in hint
    merged(folder, tmp_path / "out", opening=OpenOptions(weights="module"))
    assert_holds(tmp_path / "out", {name: tensor.to(torch.bfloat16) for name, tensor in TENSORS.items()})


def test_stage_3_has_no_16_bit_weights(tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "ckpt", ZeroRun([TENSORS], stage=3))
    hint = refused(folder, tmp_path, UnsupportedError, "stage 3", weights="module")
    assert "--dtype bf16" in hint


def test_a_truncated_file_is_told(tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "ckpt", ZeroRun([TENSORS]))
    path = folder / "global_step7" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:-100])
    refused(folder, tmp_path, TruncatedFileError, path.name)


class TestExcludeFrozen:
    """What is left of a partly frozen model is no whole model: written alone, or refused in words."""

    CASE = DATA / "deepspeed" / "z3_bf16_frozen_w3"
    LEFT_OUT = OpenOptions(exclude_frozen=True)

    def options(self, **changed: object) -> MergeOptions:
        return dataclasses.replace(MergeOptions(base_model=str(self.CASE / "hf")), **changed)

    @pytest.mark.parametrize("layout", ["upstream", "as-is"])
    def test_a_config_would_describe_another_model(self, tmp_path: Path, layout: str) -> None:
        with pytest.raises(CheckpointError, match=r"leaves out 10 frozen parameters.* no whole model") as caught:
            merged(self.CASE / "ckpt", tmp_path / "out", self.options(layout=layout), opening=self.LEFT_OUT)
        assert "--no-config" in str(caught.value.hint)
        assert "--exclude-frozen" in str(caught.value.hint)
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("layout", ["upstream", "as-is"])
    @pytest.mark.parametrize("staging", ["direct", "zarr"])
    def test_the_trained_weights_alone(self, tmp_path: Path, layout: str, staging: str) -> None:
        options = self.options(layout=layout, staging=staging, write_config=False)
        report = merged(self.CASE / "ckpt", tmp_path / "out", options, opening=self.LEFT_OUT)
        whole = content(self.CASE / "expected")
        written = content(tmp_path / "out")
        assert written == {name: whole[name] for name in written}
        assert len(whole) - len(written) == 10
        assert staging == "zarr" or report.ignored["frozen parameters (--exclude-frozen)"] == 10

    def test_without_frozen_ones_it_changes_nothing(self, tmp_path: Path) -> None:
        folder = write_zero(tmp_path / "ckpt", ZeroRun([TENSORS]))
        merged(folder, tmp_path / "out", opening=self.LEFT_OUT)
        assert_holds(tmp_path / "out", TENSORS)


class TestTags:
    def two(self, tmp_path: Path) -> Path:
        for number in (1, 2):
            tensors = {name: tensor + number for name, tensor in TENSORS.items()}
            write_zero(tmp_path / "ckpt", ZeroRun([tensors], tag=f"global_step{number}"))
        return tmp_path / "ckpt"

    def test_latest_decides(self, tmp_path: Path) -> None:
        report = merged(self.two(tmp_path), tmp_path / "out")
        assert_holds(tmp_path / "out", {name: tensor + 2 for name, tensor in TENSORS.items()})
        assert any("other tags there: global_step1" in note for note in report.notes)

    def test_the_user_decides(self, tmp_path: Path) -> None:
        merged(self.two(tmp_path), tmp_path / "out", opening=OpenOptions(tag="global_step1"))
        assert_holds(tmp_path / "out", {name: tensor + 1 for name, tensor in TENSORS.items()})

    def test_the_folder_of_a_tag_is_a_checkpoint_too(self, tmp_path: Path) -> None:
        merged(self.two(tmp_path) / "global_step1", tmp_path / "out")
        assert_holds(tmp_path / "out", {name: tensor + 1 for name, tensor in TENSORS.items()})

    def test_without_latest_several_are_ambiguous(self, tmp_path: Path) -> None:
        folder = self.two(tmp_path)
        (folder / "latest").unlink()
        assert "--tag" in refused(folder, tmp_path, AmbiguousCheckpointError, "2 tags", "global_step1, global_step2")

    @pytest.mark.parametrize(
        ("content", "error"), [(b"global_step9", IncompleteShardsError), (b"\xff", CorruptCheckpointError)]
    )
    def test_latest_that_names_nothing(self, tmp_path: Path, content: bytes, error: type[MergeStreamError]) -> None:
        folder = self.two(tmp_path)
        (folder / "latest").write_bytes(content)
        assert "--tag" in refused(folder, tmp_path, error, "latest")

    def test_a_tag_that_is_not_there(self, tmp_path: Path) -> None:
        hint = refused(self.two(tmp_path), tmp_path, UsageError, "no tag 'x'", tag="x")
        assert "global_step1" in hint

    def test_means_nothing_elsewhere(self, tmp_path: Path) -> None:
        torch.save({"model.a": numbered(3)}, tmp_path / "model.pt")
        with pytest.raises(UsageError, match="--tag means nothing for a torch_full checkpoint"):
            merged(tmp_path, tmp_path / "out", opening=OpenOptions(tag="x"))


class TestWhatIsFrozen:
    """--exclude-frozen leaves out the same with either kind of weights, or says that nothing tells."""

    FROZEN: typing.ClassVar = {"model.f": numbered(3, 3, first=500)}

    @pytest.mark.parametrize("weights", ["master", "module"])
    @pytest.mark.parametrize("stage", [1, 2])
    def test_stage_1_lists_no_frozen_ones(self, tmp_path: Path, stage: int, weights: str) -> None:
        buffers = {"model.ids": torch.arange(4)}
        run = ZeroRun([TENSORS], stage=stage, frozen=self.FROZEN, buffers=buffers, shared={"model.tie": "model.a"})
        options = dataclasses.replace(NAMES_AS_THEY_ARE, write_config=False)
        opening = OpenOptions(weights=weights, exclude_frozen=True)
        merged(write_zero(tmp_path / "ckpt", run), tmp_path / "out", options, opening=opening)
        trained = {name: t if weights == "master" else t.bfloat16() for name, t in TENSORS.items()}
        assert set(content(tmp_path / "out")) == {*trained, "model.tie", "model.ids"}

    @pytest.mark.parametrize("weights", ["master", "module"])
    @pytest.mark.parametrize("case", ["pp2_z0_w2", "tp2_z0_w2"])
    def test_without_zero_the_moments_tell(self, tmp_path: Path, case: str, weights: str) -> None:
        """As many moments as weights: nothing was frozen. A pipeline's stages do not list their parameters."""
        opening = OpenOptions(weights=weights, exclude_frozen=True)
        folder = DATA / "deepspeed" / case / "ckpt"
        if case == "pp2_z0_w2":
            assert "--exclude-frozen" in refused(
                folder, tmp_path, UnsupportedError, "no file tells", weights=weights, exclude_frozen=True
            )
        else:
            merged(folder, tmp_path / "out", opening=opening)
            assert len(content(tmp_path / "out")) == len(content(DATA / "deepspeed" / case / "expected"))

    def test_without_an_optimizer_nothing_tells(self, tmp_path: Path) -> None:
        folder = write_zero(tmp_path / "ckpt", ZeroRun([TENSORS], frozen=self.FROZEN))
        path = folder / "global_step7" / "mp_rank_00_model_states.pt"
        held = torch.load(path, weights_only=False)
        torch.save({**held, "param_shapes": None, "frozen_param_shapes": None}, path)
        refused(folder, tmp_path, UnsupportedError, "no file tells", weights="module", exclude_frozen=True)


@pytest.mark.parametrize("run", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("weights", ["master", "module"])
@pytest.mark.parametrize("dtype", ["keep", "fp32", "bf16", "fp16"])
def test_either_kind_of_weights_in_every_type(tmp_path: Path, run: torch.dtype, weights: str, dtype: str) -> None:
    """Masters are rounded once, from fp32; weights of the module from the type of the run."""
    drawn = torch.Generator().manual_seed(4)
    values = {name: torch.randn(37, 5, generator=drawn) for name in ("model.a", "model.b")}
    frozen = {"model.f": torch.randn(11, generator=drawn).to(run).float()}
    folder = write_zero(tmp_path / "ckpt", ZeroRun([values], dtype=run, frozen=frozen))
    merged(
        folder,
        tmp_path / "out",
        dataclasses.replace(NAMES_AS_THEY_ARE, dtype=dtype),
        opening=OpenOptions(weights=weights),
    )
    held = torch.float32 if weights == "master" else run
    target = {"keep": held, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert_holds(tmp_path / "out", {n: t.to(held).to(target) for n, t in {**values, **frozen}.items()})


@pytest.mark.parametrize("root", [None, "_forward_module.model", "model"])
def test_names_of_lightning(tmp_path: Path, root: str | None) -> None:
    """`X.ckpt/checkpoint`: the strategy wraps the LightningModule, which holds the model."""
    held = {"model.embed_tokens.weight": numbered(5, 4), "model.norm.weight": numbered(4, first=30)}
    held["lm_head.weight"] = numbered(5, 4, first=50)
    run = ZeroRun([{f"_forward_module.model.{name}": t for name, t in held.items()}], stage=3, tag="checkpoint")
    folder = write_zero(tmp_path / "epoch=1.ckpt", run)
    merged(folder, tmp_path / "out", opening=OpenOptions(root=root))
    assert_holds(tmp_path / "out", held)
