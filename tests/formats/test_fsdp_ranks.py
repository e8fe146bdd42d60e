"""FSDP rank files: every fixture bit-equal, every trap refused or solved."""

from __future__ import annotations

import io
import json
import random
import shutil
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

from merge_stream.errors import (
    AmbiguousCheckpointError,
    CorruptCheckpointError,
    IncompleteShardsError,
    MergeStreamError,
    TruncatedFileError,
    UnsafePickleError,
    UnsupportedError,
    UsageError,
)
from merge_stream.formats.fsdp_ranks import MEMBER
from merge_stream.options import OpenOptions
from merge_stream.storage.local import LocalTree
from merge_stream.storage.memory import MemoryTree
from merge_stream.tensors.ref import Catalog
from tests.formats.dtensor_files import dtensor, save_ranks, tensor_mesh
from tests.formats.naive import SHARED, assert_equal, copied, fixture, opened, values

COPIED = [
    "fsdp/fsdp2_tp_2x2",
    "fsdp/verl_fsdp1_w3_nomesh_uneven",
    "fsdp/verl_fsdp2_w2_legacy",
    "fsdp/verl_fsdp2_w3_llama_uneven",
    "fsdp_old/torch-2.10.0-w4-fsdp2_tp_uneven",
    "fsdp_old/torch-2.3.1-w4-fsdp2_tp_uneven",
]
BAD = ("bad_missing_rank", "bad_zero_byte_file", "evil_pickle")
TP_FIRST = OpenOptions(tp_first=True)


def shared_cases() -> list[str]:
    """All fixtures with verl's rank files that lie in the shared folder."""
    found: list[str] = []
    for family in ("fsdp", "fsdp_old", "fsdp_tf4"):
        folders = [path.parent for path in sorted((SHARED / family).glob("*/check.json"))]
        found += [
            f"{family}/{folder.name}"
            for folder in folders
            if folder.name not in BAD and list(folder.glob("ckpt/model_world_size_*.pt"))
        ]
    return found


@pytest.mark.parametrize("name", sorted({*COPIED, *shared_cases()}))
def test_every_tensor_is_bit_equal_to_the_trainers(name: str) -> None:
    folder = fixture(name)
    catalog = opened(MEMBER, folder / "ckpt", options=TP_FIRST)
    expected = folder / "expected_state.safetensors"
    assert_equal(catalog, expected if expected.exists() else folder / "expected" / "model.safetensors")
    assert catalog.format == "fsdp"
    assert catalog.facts["torch"]
    assert catalog.metadata_nbytes > 0


def whole(catalog: Catalog, name: str) -> torch.Tensor:
    tensor = catalog.tensors[name]
    data, hits = values(catalog, tensor, tensor.shards)
    assert (hits == 1).all(), name
    return torch.from_numpy(np.frombuffer(data, tensor.dtype.numpy()).reshape(tensor.shape).copy())


def test_facts_tell_trainer_mesh_and_torch() -> None:
    facts = opened(MEMBER, fixture("fsdp/fsdp2_tp_2x2") / "ckpt").facts
    assert facts["device mesh"] == "2 x 2 (fsdp, tp), 2 (fsdp)"
    assert (facts["world size"], facts["ranks"], facts["FSDP"], facts["torch"]) == (4, "0-3", 2, ">= 2.13")
    relabelled = opened(MEMBER, fixture("fsdp/fsdp2_tp_2x2") / "ckpt", options=OpenOptions(mesh_dim_names=("dp", "mp")))
    assert relabelled.facts["device mesh"] == "2 x 2 (dp, mp), 2 (fsdp)"


class TestWhichFiles:
    """Sections D and E of the cases: 38, 50, 51, 52 and stale sets."""

    def test_missing_ranks_are_listed(self, tmp_path: Path) -> None:
        folder = copied("fsdp/fsdp2_tp_2x2", tmp_path)
        (folder / "model_world_size_4_rank_2.pt").unlink()
        with pytest.raises(IncompleteShardsError, match=r"have ranks 0-1, 3, missing ranks 2") as caught:
            opened(MEMBER, folder)
        assert "--input" in caught.value.hint

    def test_folders_of_two_nodes_are_overlaid(self, tmp_path: Path) -> None:
        one = copied("fsdp/fsdp2_tp_2x2", tmp_path)
        two = tmp_path / "node1"
        two.mkdir()
        for rank in (2, 3):
            (one / f"model_world_size_4_rank_{rank}.pt").rename(two / f"model_world_size_4_rank_{rank}.pt")
        assert_equal(opened(MEMBER, one, two), fixture("fsdp/fsdp2_tp_2x2") / "expected_state.safetensors")

    def test_stale_files_are_left_out_as_fsdp_config_says(self, tmp_path: Path) -> None:
        folder = copied("fsdp/fsdp2_tp_2x2", tmp_path)
        stale = fixture("fsdp/verl_fsdp2_w2_legacy") / "ckpt"
        for path in stale.glob("model_world_size_2*"):
            shutil.copy(path, folder)
        catalog = opened(MEMBER, folder)
        assert_equal(catalog, fixture("fsdp/fsdp2_tp_2x2") / "expected_state.safetensors")
        assert any("2 files of world size 2" in note for note in catalog.notes)

    def test_without_config_the_only_complete_set_is_taken(self, tmp_path: Path) -> None:
        folder = copied("fsdp/fsdp2_tp_2x2", tmp_path)
        (folder / "fsdp_config.json").unlink()
        shutil.copy(fixture("fsdp/verl_fsdp2_w2_legacy") / "ckpt/model_world_size_2_rank_0.pt", folder)
        catalog = opened(MEMBER, folder)
        assert catalog.facts["world size"] == 4
        assert any("only world size 4 is complete" in note for note in catalog.notes)
        shutil.copy(fixture("fsdp/verl_fsdp2_w2_legacy") / "ckpt/model_world_size_2_rank_1.pt", folder)
        with pytest.raises(AmbiguousCheckpointError, match="several complete sets"):
            opened(MEMBER, folder)
        (folder / "model_world_size_2_rank_1.pt").unlink()
        (folder / "model_world_size_4_rank_1.pt").unlink()
        with pytest.raises(IncompleteShardsError, match="no complete set"):
            opened(MEMBER, folder)

    @pytest.mark.parametrize("text", ['{"world_size": 8}', '{"world_size": "x"}', "[1]", "{", '{"world_size": 0}'])
    def test_contradicting_config_is_an_error(self, tmp_path: Path, text: str) -> None:
        folder = copied("fsdp/fsdp2_tp_2x2", tmp_path)
        (folder / "fsdp_config.json").write_text(text)
        with pytest.raises(CorruptCheckpointError, match=r"fsdp_config\.json"):
            opened(MEMBER, folder)

    def test_swapped_rank_files_are_found(self, tmp_path: Path) -> None:
        folder = copied("fsdp/verl_fsdp2_w2_legacy", tmp_path)
        a, b = (folder / f"model_world_size_2_rank_{rank}.pt" for rank in (0, 1))
        a.rename(tmp_path / "x")
        b.rename(a)
        (tmp_path / "x").rename(b)
        with pytest.raises(CorruptCheckpointError, match="named rank 0, but rank 1 wrote it"):
            opened(MEMBER, folder)

    def test_world_size_in_the_names_must_hold_the_mesh(self, tmp_path: Path) -> None:
        folder = tmp_path / "c"
        folder.mkdir()
        source = fixture("fsdp/fsdp2_tp_2x2") / "ckpt"
        for rank in (0, 1):
            shutil.copy(source / f"model_world_size_4_rank_{rank}.pt", folder / f"model_world_size_2_rank_{rank}.pt")
        with pytest.raises(IncompleteShardsError, match="missing ranks 2-3; the names say world size 2"):
            opened(MEMBER, folder)

    def test_rank_beyond_the_world_size(self, tmp_path: Path) -> None:
        folder = copied("fsdp/verl_fsdp2_w2_legacy", tmp_path)
        (folder / "model_world_size_2_rank_1.pt").rename(folder / "model_world_size_2_rank_5.pt")
        with pytest.raises(CorruptCheckpointError, match="not below the world size"):
            opened(MEMBER, folder)

    def test_accelerate_names(self, tmp_path: Path) -> None:
        """use_dcp=False: the world size stands in the tensors only."""
        source = fixture("fsdp/verl_fsdp1_w3_nomesh_uneven")
        for rank in range(3):
            name = f"pytorch_model_fsdp_0_rank{rank}.bin"
            shutil.copy(source / "ckpt" / f"model_world_size_3_rank_{rank}.pt", tmp_path / name)
        catalog = opened(MEMBER, tmp_path)
        assert_equal(catalog, source / "expected_state.safetensors")
        assert catalog.facts["trainer"] == "accelerate"
        (tmp_path / "pytorch_model_fsdp_0_rank2.bin").unlink()
        (tmp_path / "pytorch_model_fsdp_0_rank0.bin").rename(tmp_path / "pytorch_model_fsdp_0_rank2.bin")
        with pytest.raises(IncompleteShardsError, match="missing ranks 0"):
            opened(MEMBER, tmp_path)
        (tmp_path / "pytorch_model_fsdp_0_rank2.bin").rename(tmp_path / "pytorch_model_fsdp_0_rank0.bin")
        (tmp_path / "pytorch_model_fsdp_0_rank1.bin").unlink()
        with pytest.raises(IncompleteShardsError, match=r"shards of .* are in no file"):
            opened(MEMBER, tmp_path)

    def test_two_models_are_ambiguous(self, tmp_path: Path) -> None:
        for model in (0, 1):
            (tmp_path / f"pytorch_model_fsdp_{model}_rank0.bin").write_bytes(b"x")
        with pytest.raises(AmbiguousCheckpointError, match="2 models"):
            MEMBER.open(LocalTree.of([tmp_path]), OpenOptions())

    def test_other_folders_are_not_recognised(self, tmp_path: Path) -> None:
        (tmp_path / "optim_world_size_2_rank_0.pt").write_bytes(b"x")
        (tmp_path / "model.safetensors").write_bytes(b"x")
        assert MEMBER.detect(LocalTree.of([tmp_path])) is None


def with_changed_pickle(data: bytes, source: random.Random) -> bytes:
    """The zip with a few bytes of its data.pkl changed, checksums right again."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(buffer, "w") as target:
        for name in archive.namelist():
            content = bytearray(archive.read(name))
            if name.endswith("data.pkl"):
                for _ in range(source.randint(1, 3)):
                    at = source.randrange(min(len(content), 2500))
                    content[at] = source.choice((*b"}])N\x88K.hqrRbt\x85\x86\x81", content[at] ^ 1))
            target.writestr(name, bytes(content))
    return buffer.getvalue()


class TestDamagedFiles:
    def test_empty_and_cut(self, tmp_path: Path) -> None:
        folder = copied("fsdp/fsdp2_tp_2x2", tmp_path)
        path = folder / "model_world_size_4_rank_1.pt"
        data = path.read_bytes()
        for cut in (0, 3, 100, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:cut])
            with pytest.raises(TruncatedFileError, match=r"model_world_size_4_rank_1\.pt"):
                opened(MEMBER, folder)

    def test_evil_pickle_is_not_run(self, tmp_path: Path) -> None:
        folder = copied("fsdp/verl_fsdp2_w2_legacy", tmp_path)

        class Evil:
            def __reduce__(self) -> Any:
                import os

                return os.system, (f"touch {tmp_path}/pwned",)

        torch.save({"w": Evil()}, folder / "model_world_size_2_rank_1.pt")
        with pytest.raises(UnsafePickleError, match=r"rank_1\.pt: the pickle asks for posix\.system"):
            opened(MEMBER, folder)
        assert not (tmp_path / "pwned").exists()

    @pytest.mark.parametrize("seed", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (6, 7, 8, 9))])
    def test_mutated_pickles_give_our_errors_only(self, tmp_path: Path, seed: int) -> None:
        """200 rank files with one to three changed bytes in data.pkl: no other exception comes out."""
        source = random.Random(seed)
        folder = copied("fsdp_old/torch-2.10.0-w4-fsdp2_tp_uneven", tmp_path)
        contents = {path.name: path.read_bytes() for path in folder.glob("model*")}
        refused = 0
        for _ in range(200):
            name = source.choice(sorted(contents))
            mutant = with_changed_pickle(contents[name], source)
            try:
                MEMBER.open(MemoryTree(contents | {name: mutant}), OpenOptions())
            except MergeStreamError:
                refused += 1
        assert refused > 75

    def test_no_state_dict(self, tmp_path: Path) -> None:
        torch.save([1, 2], tmp_path / "model_world_size_1_rank_0.pt")
        with pytest.raises(CorruptCheckpointError, match="wanted a state dict"):
            opened(MEMBER, tmp_path)
        torch.save({"step": 3}, tmp_path / "model_world_size_1_rank_0.pt")
        with pytest.raises(IncompleteShardsError, match="no tensors"):
            opened(MEMBER, tmp_path)


class TestPlainTensors:
    def test_world_size_one(self, tmp_path: Path) -> None:
        """Case 38, with wrappers, noise, scalars and values that are no tensors."""
        state = OrderedDict(
            {
                "module._orig_mod.model.norm.weight": torch.nn.Parameter(torch.arange(4.0)),
                "model.scale": torch.tensor(2.5),
                "model.layers.0.attn._extra_state": b"xx",
                "lr_scheduler.last": 3,
                "model.flag": True,
            }
        )
        torch.save(state, tmp_path / "model_world_size_1_rank_0.pt")
        catalog = opened(MEMBER, tmp_path)
        assert set(catalog.tensors) == {"model.norm.weight", "model.scale"}
        assert torch.equal(whole(catalog, "model.norm.weight"), torch.arange(4.0))
        assert whole(catalog, "model.scale").item() == 2.5
        assert catalog.ignored == {"extra state": 1, "scheduler state": 1, "values that are no tensors": 1}

    def test_replicated_buffers_are_kept_once(self, tmp_path: Path) -> None:
        """Case 39: shapes (), [1] and [1152] on 8 ranks; the copies go to the replicas."""
        mesh = list(range(8))
        weight = torch.arange(24.0).reshape(8, 3)

        def state(rank: int) -> dict[str, Any]:
            sharded = dtensor(weight[rank : rank + 1], tensor_mesh(mesh), [Shard(0)], (8, 3))
            return {"w": sharded, "a": torch.tensor(1.0), "b": torch.ones(1), "c": torch.arange(1152.0)}

        catalog = opened(MEMBER, save_ranks(tmp_path, 8, state))
        assert torch.equal(whole(catalog, "w"), weight)
        for name, shape in (("a", ()), ("b", (1,)), ("c", (1152,))):
            tensor = catalog.tensors[name]
            assert tensor.shape == shape
            assert (len(tensor.shards), tensor.replicas is not None and len(tensor.replicas)) == (1, 7)
            assert tensor.shards.file[0] == 0
        assert not catalog.notes

    def test_copies_that_differ_are_told(self, tmp_path: Path) -> None:
        catalog = opened(MEMBER, save_ranks(tmp_path, 2, lambda rank: {"model.mean": torch.full((3,), float(rank))}))
        assert torch.equal(whole(catalog, "model.mean"), torch.zeros(3))
        assert any("model.mean" in note and "values differ between ranks" in note for note in catalog.notes)

    def test_different_shapes_are_an_error(self, tmp_path: Path) -> None:
        save_ranks(tmp_path, 2, lambda rank: {"w": torch.ones(3 + rank)})
        with pytest.raises(CorruptCheckpointError, match=r"w is not the same tensor on all ranks"):
            opened(MEMBER, tmp_path)

    def test_one_name_after_wrappers_are_stripped(self, tmp_path: Path) -> None:
        save_ranks(tmp_path, 1, lambda _: {"w": torch.ones(3), "_orig_mod.w": torch.ones(3)})
        with pytest.raises(CorruptCheckpointError, match="without wrapper prefixes"):
            opened(MEMBER, tmp_path)

    def test_nested_state_dict(self, tmp_path: Path) -> None:
        state = {"model": {"a.weight": torch.ones(3)}, "ema": {"a.weight": torch.zeros(3)}, "optimizer": {"x": 1}}
        save_ranks(tmp_path, 1, lambda _: state)
        assert torch.equal(whole(opened(MEMBER, tmp_path), "a.weight"), torch.ones(3))
        ema = opened(MEMBER, tmp_path, options=OpenOptions(root="ema"))
        assert torch.equal(whole(ema, "a.weight"), torch.zeros(3))
        with pytest.raises(UsageError, match="nothing"):
            opened(MEMBER, tmp_path, options=OpenOptions(root="nothing"))

    def test_unknown_tensor_class_is_named(self, tmp_path: Path) -> None:
        save_ranks(tmp_path, 1, lambda _: {"model.w": Foreign()})
        with pytest.raises(UnsupportedError, match=r"model\.w is a .*Foreign"):
            opened(MEMBER, tmp_path)

    def test_flat_parameters_are_explained(self, tmp_path: Path) -> None:
        """Case 48."""
        for name in ("_flat_param", "model.layers.0._flat_param", "_fsdp_wrapped_module.flat_param_0"):
            save_ranks(tmp_path, 1, lambda _, name=name: {name: torch.ones(3)})
            with pytest.raises(UnsupportedError, match="flat parameters") as caught:
                opened(MEMBER, tmp_path)
            assert "FULL_STATE_DICT" in caught.value.hint


class Foreign:
    """A class that is not there when the file is read."""


class TestMeshes:
    @pytest.mark.parametrize("names", [None, ("ddp", "fsdp"), ("hsdp_replicate", "hsdp_shard"), ("a", "b")])
    def test_hsdp_on_a_permuted_mesh(self, tmp_path: Path, names: tuple[str, ...] | None) -> None:
        """Case 42 and the mesh [[0, 2], [1, 3]]: the mesh decides, never the rank number or a name."""
        weight = torch.arange(15.0).reshape(5, 3)
        column = {0: 0, 2: 1, 1: 0, 3: 1}

        def state(rank: int) -> dict[str, Any]:
            local = weight[3 * column[rank] : 3 * column[rank] + 3]
            return {"w": dtensor(local, tensor_mesh([[0, 2], [1, 3]], names), [Replicate(), Shard(0)], (5, 3))}

        catalog = opened(MEMBER, save_ranks(tmp_path, 4, state))
        assert torch.equal(whole(catalog, "w"), weight)
        tensor = catalog.tensors["w"]
        assert [catalog.files[f].name[-4] for f in tensor.shards.file] == ["0", "2"]
        assert tensor.replicas is not None
        assert [catalog.files[f].name[-4] for f in tensor.replicas.file] == ["1", "3"]

    def test_three_dims_with_strided_shards(self, tmp_path: Path) -> None:
        """(replicate 2, fsdp 2, tp 2), tp first then fsdp, 7 rows: ceil pieces of ceil pieces."""
        weight = torch.arange(14.0).reshape(7, 2)
        grid = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]

        def state(rank: int) -> dict[str, Any]:
            fsdp, tp = rank // 2 % 2, rank % 2
            half = (weight[:4], weight[4:])[tp]
            local = (half[:2], half[2:])[fsdp]
            mesh = tensor_mesh(grid, ("r", "fsdp", "tp"))
            return {"w": dtensor(local, mesh, [Replicate(), _StridedShard(0, split_factor=2), Shard(0)], (7, 2))}

        catalog = opened(MEMBER, save_ranks(tmp_path, 8, state))
        assert torch.equal(whole(catalog, "w"), weight)
        assert len(catalog.tensors["w"].shards) == 4

    def test_wrong_order_is_caught_by_the_local_shapes(self, tmp_path: Path) -> None:
        weight = torch.arange(9.0)
        bounds = [0, 2, 3, 5, 6, 7, 8, 8, 9]

        def state(rank: int) -> dict[str, Any]:
            local = weight[bounds[rank] : bounds[rank + 1]]
            mesh = tensor_mesh([[0, 1], [2, 3], [4, 5], [6, 7]])
            return {"w": dtensor(local, mesh, [Shard(0), Shard(0)], (9,))}

        with pytest.raises(CorruptCheckpointError, match=r"rank \d holds .* but \[Shard\(0\), Shard\(0\)\] on 4 x 2"):
            opened(MEMBER, save_ranks(tmp_path, 8, state))

    def test_partial_is_refused(self, tmp_path: Path) -> None:
        """Case 49."""

        def state(rank: int) -> dict[str, Any]:
            return {"layer.w": dtensor(torch.ones(2), tensor_mesh([[0, 1], [2, 3]]), [Partial(), Shard(0)], (4,))}

        with pytest.raises(UnsupportedError, match=r"layer\.w has the placement Partial"):
            opened(MEMBER, save_ranks(tmp_path, 4, state))

    def test_tensor_missing_on_a_rank_of_its_mesh(self, tmp_path: Path) -> None:
        def state(rank: int) -> dict[str, Any]:
            shard = dtensor(torch.ones(2), tensor_mesh([0, 1]), [Shard(0)], (4,))
            return {"v": shard, "w": shard} if rank else {"v": shard}

        with pytest.raises(IncompleteShardsError, match="w is missing in the files of ranks 0"):
            opened(MEMBER, save_ranks(tmp_path, 2, state))

    def test_old_double_split_needs_the_option(self) -> None:
        folder = fixture("fsdp_old/torch-2.3.1-w4-fsdp2_tp_uneven") / "ckpt"
        with pytest.raises(UnsupportedError, match=r"torch before 2\.4") as caught:
            opened(MEMBER, folder)
        assert "--tp-first" in caught.value.hint

    def test_sharded_tensor_of_a_hybrid_group_has_replicas(self, tmp_path: Path) -> None:
        """FSDP1 HYBRID_SHARD without a device mesh: two groups write the same boxes."""
        source = fixture("fsdp/verl_fsdp1_w3_nomesh_uneven")
        for rank in range(6):
            target = tmp_path / f"model_world_size_6_rank_{rank}.pt"
            shutil.copy(source / "ckpt" / f"model_world_size_3_rank_{rank % 3}.pt", target)
        catalog = opened(MEMBER, tmp_path)
        assert_equal(catalog, source / "expected_state.safetensors")
        assert all(t.replicas is not None and len(t.replicas) == len(t.shards) for t in catalog.tensors.values())


class TestSeveralGroups:
    """One name on disjoint meshes: copies (norms under FSDP2 + TP) or slices (VeOmni's experts)."""

    def save(self, folder: Path, data: torch.Tensor, name: str, *, config: dict[str, Any] | None = None) -> Path:
        """`data` [ep, rows, ...]: slice e is sharded on its dim 1 (or 0) over ranks e and e + 2 of a 2 x 2 mesh."""

        def state(rank: int) -> dict[str, Any]:
            mesh = tensor_mesh([[0, 1], [2, 3]], ("ep_fsdp", "ep"))["ep_fsdp"]
            mine = data[rank % 2]
            dim = min(1, mine.dim() - 1)
            return {name: dtensor(mine.chunk(2, dim)[rank // 2], mesh, [Shard(dim)], mine.shape)}

        if config is not None:
            (folder / "huggingface").mkdir(parents=True, exist_ok=True)
            (folder / "huggingface" / "config.json").write_text(json.dumps(config))
        return save_ranks(folder, 4, state)

    @pytest.mark.parametrize("key", ["num_experts", "n_routed_experts", "num_local_experts"])
    def test_expert_slices_are_joined(self, tmp_path: Path, key: str) -> None:
        experts = torch.arange(4 * 6 * 5.0).reshape(2, 2, 6, 5)
        name = "model.layers.0.mlp.experts.gate_up_proj"
        catalog = opened(MEMBER, self.save(tmp_path, experts, name, config={"text_config": {key: 4}}))
        assert torch.equal(whole(catalog, name), experts.reshape(4, 6, 5))
        assert any("expert-parallel slices" in note for note in catalog.notes)

    def test_equal_groups_are_copies(self, tmp_path: Path) -> None:
        norm = torch.arange(6.0).expand(2, 6)
        catalog = opened(MEMBER, self.save(tmp_path, norm, "model.norm.weight"))
        assert torch.equal(whole(catalog, "model.norm.weight"), norm[0])
        replicas = catalog.tensors["model.norm.weight"].replicas
        assert replicas is not None
        assert len(replicas) == 2

    def test_equal_expert_groups_that_are_whole_are_copies(self, tmp_path: Path) -> None:
        experts = torch.arange(2 * 6 * 5.0).reshape(2, 6, 5).expand(2, 2, 6, 5)
        catalog = opened(MEMBER, self.save(tmp_path, experts, "mlp.experts.w", config={"num_experts": 2}))
        assert torch.equal(whole(catalog, "mlp.experts.w"), experts[0])

    def test_untrained_equal_slices_are_joined_because_of_their_shape(self, tmp_path: Path) -> None:
        experts = torch.zeros(2, 2, 6, 5)
        catalog = opened(MEMBER, self.save(tmp_path, experts, "mlp.experts.w", config={"num_experts": 4}))
        assert catalog.tensors["mlp.experts.w"].shape == (4, 6, 5)

    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            ("model.layers.0.mlp.shared_expert_gate.weight", (1, 8)),
            ("model.layers.0.mlp.shared_expert.down_proj.weight", (2, 8)),
            ("model.layers.0.mlp.experts.1.down_proj.weight", (2, 8)),
            ("model.layers.0.mlp.shared_experts.w1", (2, 4, 8)),
            ("model.layers.0.conv.weight", (2, 4, 8)),
        ],
    )
    @pytest.mark.parametrize("count", [2, 4])
    def test_equal_groups_of_what_is_no_stack_of_experts_are_copies(
        self, tmp_path: Path, name: str, shape: tuple[int, ...], count: int
    ) -> None:
        one = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        config = {"num_experts": count}
        catalog = opened(MEMBER, self.save(tmp_path, one.expand(2, *shape), name, config=config))
        assert torch.equal(whole(catalog, name), one)

    @pytest.mark.parametrize("name", ["model.layers.0.mlp.shared_experts.w1", "model.layers.0.conv.weight"])
    def test_differing_groups_of_what_is_no_stack_of_experts_are_refused(self, tmp_path: Path, name: str) -> None:
        rows = torch.arange(96.0).reshape(2, 2, 6, 4)
        with pytest.raises(UnsupportedError, match="2 different contents"):
            opened(MEMBER, self.save(tmp_path, rows, name, config={"num_experts": 4}))

    def test_biases_of_stacked_experts_are_joined(self, tmp_path: Path) -> None:
        name, rows = "model.layers.0.mlp.experts.down_proj_bias", torch.arange(16.0).reshape(2, 2, 4)
        catalog = opened(MEMBER, self.save(tmp_path, rows, name, config={"num_local_experts": 4}))
        assert torch.equal(whole(catalog, name), rows.reshape(4, 4))

    @pytest.mark.parametrize("config", [None, {}, {"num_experts": 3}, {"num_experts": 8}, {"num_experts": 2}])
    def test_otherwise_refused_naming_both_groups(self, tmp_path: Path, config: dict[str, Any] | None) -> None:
        experts = torch.arange(4 * 6 * 5.0).reshape(2, 2, 6, 5)
        with pytest.raises(UnsupportedError, match=r"ranks 0, 2; ranks 1, 3"):
            opened(MEMBER, self.save(tmp_path, experts, "mlp.experts.w", config=config))

    def test_differing_dense_tensors_are_refused(self, tmp_path: Path) -> None:
        rows = torch.arange(16.0).reshape(2, 8)
        with pytest.raises(UnsupportedError, match="2 different contents"):
            opened(MEMBER, self.save(tmp_path, rows, "model.norm.weight", config={"num_experts": 16}))

    def test_a_difference_in_the_last_byte_only(self, tmp_path: Path) -> None:
        """More than one piece of the streamed comparison, no checksums to go by (padded storages)."""
        big = torch.zeros(2, 2, 2, 300_000)
        big[1, -1, -1, -1] = 1
        torch.serialization.set_crc32_options(False)
        try:
            folder = self.save(tmp_path, big, "mlp.experts.w", config={"num_experts": 2})
        finally:
            torch.serialization.set_crc32_options(True)
        with pytest.raises(UnsupportedError, match="2 different contents"):
            opened(MEMBER, folder)

    def test_groups_of_different_shape_are_an_error(self, tmp_path: Path) -> None:
        def state(rank: int) -> dict[str, Any]:
            mesh = tensor_mesh([[0, 1], [2, 3]], ("a", "b"))["a"]
            return {"w": dtensor(torch.ones(1 + rank % 2), mesh, [Shard(0)], (2 + 2 * (rank % 2),))}

        with pytest.raises(CorruptCheckpointError, match="not the same tensor on all ranks"):
            opened(MEMBER, save_ranks(tmp_path, 4, state))
