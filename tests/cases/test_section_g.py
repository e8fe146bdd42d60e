"""Section G: Megatron layouts. The numbers are those of the collection of cases."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from merge_stream import cli
from merge_stream.api import merge
from merge_stream.errors import CheckpointError, CorruptCheckpointError, MergeStreamError, UnsupportedError
from merge_stream.options import MergeOptions
from merge_stream.report import Report
from tests.cases.naive import assert_holds
from tests.formats.naive import DATA
from tests.formats.test_deepspeed import content
from tests.makers.megatron_files import Llama, fused, llama, tensor_part, write_dist, write_ranks

Tensors = dict[str, torch.Tensor]


def merged(folder: pathlib.Path, **options: Any) -> Report:
    return merge(folder / "ckpt", folder / "out", MergeOptions(base_model=str(folder / "hf"), **options))


def refused(folder: pathlib.Path, kind: type[MergeStreamError]) -> str:
    with pytest.raises(kind) as caught:
        merged(folder)
    assert not (folder / "out").exists()
    assert caught.value.hint
    return str(caught.value)


def cut(tensors: Tensors, ranks: int) -> dict[tuple[int, ...], Tensors]:
    """The state of each tensor-parallel rank."""
    return {
        (rank,): {name: tensor_part(name, tensor, rank, ranks) for name, tensor in tensors.items()}
        for rank in range(ranks)
    }


def arguments(of: Llama, **more: Any) -> dict[str, Any]:
    return {
        "num_attention_heads": of.heads,
        "num_query_groups": of.groups,
        "kv_channels": of.width,
        "swiglu": True,
        **more,
    }


# ---------------------------------------------------------------------------------------------------- 75, 76


@pytest.mark.parametrize("layout", ["dist", "ranks"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
def test_case_075_query_key_value_are_taken_apart_by_group(
    tmp_path: pathlib.Path, heads: int, groups: int, bias: bool, layout: str
) -> None:
    of = Llama(heads=heads, groups=groups, bias=bias, layers=2)
    tensors = llama(of)
    if layout == "dist":
        write_dist(tmp_path, fused(tensors, of), of.config)
    else:
        write_ranks(tmp_path, cut(fused(tensors, of), 1), arguments(of), of.config)
    merged(tmp_path)
    assert_holds(tmp_path / "out", tensors)


def test_case_075_the_rows_of_a_group_are_q_q_k_v(tmp_path: pathlib.Path) -> None:
    """By hand: 4 heads, 2 groups, rows of a number each; no maker has a say in what is expected."""
    of = Llama()
    fused_rows = fused(llama(of), of)
    fused_rows["decoder.layers.0.self_attention.linear_qkv.weight"] = (
        torch.arange(32, dtype=torch.float32).reshape(32, 1).expand(32, 16)
    )
    write_dist(tmp_path, fused_rows, of.config)
    merged(tmp_path)
    found = load_file(tmp_path / "out" / "model.safetensors")
    rows = {x: found[f"model.layers.0.self_attn.{x}_proj.weight"][:, 0].int().tolist() for x in "qkv"}
    assert rows == {
        "q": [*range(8), *range(16, 24)],
        "k": [*range(8, 12), *range(24, 28)],
        "v": [*range(12, 16), *range(28, 32)],
    }


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_case_076_a_rank_that_ends_inside_a_group(tmp_path: pathlib.Path, bias: bool) -> None:
    """8 heads, 2 groups, 4 ranks: each has a slice of the whole interleaved matrix."""
    of = Llama(heads=8, groups=2, hidden=32, bias=bias)
    tensors = llama(of)
    write_ranks(tmp_path, cut(fused(tensors, of), 4), arguments(of, tensor_model_parallel_size=4), of.config)
    merged(tmp_path)
    assert_holds(tmp_path / "out", tensors)


def repeated_groups(tensors: Tensors, of: Llama, ranks: int) -> dict[tuple[int, ...], Tensors]:
    """More ranks than groups: each has its query heads, and a copy of the key and the value of their group."""
    states = cut(fused(tensors, of), ranks)
    share, width = of.heads // ranks, of.width
    for rank in range(ranks):
        for leaf in ("weight", "bias") if of.bias else ("weight",):
            q, k, v = (tensors[f"model.layers.0.self_attn.{x}_proj.{leaf}"] for x in "qkv")
            group = rank * of.groups // ranks
            parts = [q[rank * share * width : (rank + 1) * share * width]]
            parts += [part[group * width : (group + 1) * width] for part in (k, v)]
            states[rank,][f"decoder.layers.0.self_attention.linear_qkv.{leaf}"] = torch.cat(parts)
    return states


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_case_076_key_and_value_repeated_on_the_ranks_of_a_group(tmp_path: pathlib.Path, bias: bool) -> None:
    of = Llama(heads=8, groups=2, hidden=32, bias=bias)
    tensors = llama(of)
    states = repeated_groups(tensors, of, 4)
    write_ranks(tmp_path, states, arguments(of, tensor_model_parallel_size=4), of.config)
    report = merged(tmp_path, check_replicas=True)
    assert not report.warnings
    assert_holds(tmp_path / "out", tensors)


def test_case_076_copies_of_a_group_that_differ_are_told(tmp_path: pathlib.Path) -> None:
    of = Llama(heads=8, groups=2, hidden=32)
    tensors = llama(of)
    states = repeated_groups(tensors, of, 4)
    states[3,]["decoder.layers.0.self_attention.linear_qkv.weight"][-1] += 2
    write_ranks(tmp_path, states, arguments(of, tensor_model_parallel_size=4), of.config)
    report = merged(tmp_path, check_replicas=True)
    assert any("linear_qkv" in warning and "max abs 2" in warning for warning in report.warnings)
    assert_holds(tmp_path / "out", tensors)


def test_case_076_rows_that_fit_neither_way_are_refused(tmp_path: pathlib.Path) -> None:
    of = Llama(heads=8, groups=2, hidden=32)
    states = cut(fused(llama(of), of), 4)
    for state in states.values():
        name = "decoder.layers.0.self_attention.linear_qkv.weight"
        state[name] = state[name][:-1].clone()
    write_ranks(tmp_path, states, arguments(of, tensor_model_parallel_size=4), of.config)
    assert "linear_qkv.weight has 44 rows" in refused(tmp_path, CheckpointError)


# ---------------------------------------------------------------------------------------------------- 77, 79


@pytest.mark.parametrize("leaf", ["weight", "bias"])
def test_case_077_gate_and_up_of_each_rank(tmp_path: pathlib.Path, leaf: str) -> None:
    """Ranks hold [g0; u0] and [g1; u1]."""
    of = Llama(mlp_bias=True)
    tensors = llama(of)
    here, there = "decoder.layers.0.mlp.linear_fc1", "model.layers.0.mlp"
    biases = {f"{there}.{x}_proj.bias": torch.arange(n, n + 8.0) for n, x in ((100, "gate"), (200, "up"))}
    biases[f"{there}.down_proj.bias"] = torch.arange(16.0)
    whole = fused(tensors, of) | {"decoder.layers.0.mlp.linear_fc2.bias": biases[f"{there}.down_proj.bias"]}
    whole[f"{here}.bias"] = torch.cat([biases[f"{there}.gate_proj.bias"], biases[f"{there}.up_proj.bias"]])
    states = cut(whole, 2)
    gate, up = ((tensors | biases)[f"{there}.{x}_proj.{leaf}"] for x in ("gate", "up"))
    assert torch.equal(states[0,][f"{here}.{leaf}"], torch.cat([gate[:4], up[:4]]))
    assert torch.equal(states[1,][f"{here}.{leaf}"], torch.cat([gate[4:], up[4:]]))
    write_ranks(tmp_path, states, arguments(of, tensor_model_parallel_size=2), of.config)
    merged(tmp_path)
    assert_holds(tmp_path / "out", tensors | biases)


def test_case_077_a_distributed_checkpoint_has_all_gates_first(tmp_path: pathlib.Path) -> None:
    of = Llama()
    tensors = llama(of)
    write_dist(tmp_path, fused(tensors, of), of.config, arguments(of, tensor_model_parallel_size=2))
    merged(tmp_path)
    assert_holds(tmp_path / "out", tensors)


def padded(tensors: Tensors, rows: int) -> Tensors:
    return {
        name: torch.cat([tensor, torch.full((rows - len(tensor), tensor.shape[1]), 7.0)])
        if name in {"embedding.word_embeddings.weight", "output_layer.weight"}
        else tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("layout", ["dist", "ranks"])
def test_case_079_rows_of_padding_are_cut_off_and_told(tmp_path: pathlib.Path, layout: str) -> None:
    of = Llama(vocabulary=1000)
    tensors = llama(of)
    whole = padded(fused(tensors, of), 1024)
    if layout == "dist":
        write_dist(tmp_path, whole, of.config)
    else:
        write_ranks(tmp_path, cut(whole, 2), arguments(of, tensor_model_parallel_size=2), of.config)
    report = merged(tmp_path)
    assert any("1024 rows are a vocabulary of 1000 with padding" in note for note in report.notes)
    assert_holds(tmp_path / "out", tensors)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 1000


def test_case_079_fewer_rows_than_the_config_says_are_refused(tmp_path: pathlib.Path) -> None:
    of = Llama(vocabulary=1000)
    write_dist(tmp_path, fused(llama(of), of), of.config | {"vocab_size": 1024})
    assert "1000 rows" in refused(tmp_path, CheckpointError)


MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "moe_intermediate_size": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


# ---------------------------------------------------------------------------------------------------- 81, 83


def stages(tensors: Tensors, counts: list[int]) -> list[Tensors]:
    """What each stage holds: layers with numbers of its own, embedding first, norm and head last."""
    made: list[Tensors] = []
    first = 0
    for stage, count in enumerate(counts):
        state: Tensors = {}
        for name, tensor in tensors.items():
            parts = name.split(".")
            parts = name.split(".")
            is_end = name.startswith("decoder.final") or parts[0] == "output_layer"
            if (parts[0] == "embedding" and stage == 0) or (is_end and stage == len(counts) - 1):
                state[name] = tensor
            elif parts[1] == "layers" and first <= int(parts[2]) < first + count:
                state[".".join(["decoder", "layers", str(int(parts[2]) - first), *parts[3:]])] = tensor
        made.append(state)
        first += count
    return made


@pytest.mark.parametrize("counts", [[2, 3, 2], [3, 4, 0], [0, 7, 0]], ids=str)
def test_case_081_uneven_pipeline_stages(tmp_path: pathlib.Path, counts: list[int]) -> None:
    """Layer numbers begin with 0 on each stage; a stage may hold none."""
    of = Llama(layers=7)
    tensors = llama(of)
    states = {(0, stage): state for stage, state in enumerate(stages(fused(tensors, of), counts))}
    write_ranks(tmp_path, states, arguments(of, pipeline_model_parallel_size=3), of.config)
    merged(tmp_path)
    assert_holds(tmp_path / "out", tensors)


@pytest.mark.parametrize("counts", [[2, 1, 2, 2], [1, 3, 2, 1]], ids=str)
def test_case_081_virtual_stages(tmp_path: pathlib.Path, counts: list[int]) -> None:
    """Two pipeline ranks of two virtual stages: chunk 1 of rank 0 comes behind chunk 0 of rank 1."""
    of = Llama(layers=7)
    tensors = llama(of)
    chunks = stages(fused(tensors, of), counts)
    states = {(0, rank): [chunks[rank], chunks[2 + rank]] for rank in (0, 1)}
    sizes = arguments(of, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    write_ranks(tmp_path, states, sizes, of.config)
    merged(tmp_path)
    assert_holds(tmp_path / "out", tensors)


def test_case_081_a_stage_with_a_gap_in_its_numbers_is_refused(tmp_path: pathlib.Path) -> None:
    of = Llama(layers=7)
    states = {(0, stage): state for stage, state in enumerate(stages(fused(llama(of), of), [2, 3, 2]))}
    for name in [name for name in states[0, 1] if name.startswith("decoder.layers.1.")]:
        del states[0, 1][name]
    write_ranks(tmp_path, states, arguments(of, pipeline_model_parallel_size=3), of.config)
    assert "stage 1 holds layers [0, 2]" in refused(tmp_path, CorruptCheckpointError)


def mixture(of: Llama) -> tuple[Tensors, Tensors, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A Qwen3-MoE of one layer: its tensors, those of Megatron but the experts, (fc1, fc2) of each expert."""
    tensors, whole = llama(of), fused(llama(of), of)
    here, there = "decoder.layers.0", "model.layers.0"
    for name in ("gate_proj", "up_proj", "down_proj"):
        del tensors[f"{there}.mlp.{name}.weight"]
    whole[f"{here}.pre_mlp_layernorm.weight"] = whole.pop(f"{here}.mlp.linear_fc1.layer_norm_weight")
    del whole[f"{here}.mlp.linear_fc1.weight"], whole[f"{here}.mlp.linear_fc2.weight"]
    for x in "qk":
        norm = torch.arange(4.0) + 5000 * ("kq".index(x) + 1)
        tensors[f"{there}.self_attn.{x}_norm.weight"] = whole[f"{here}.self_attention.{x}_layernorm.weight"] = norm
    router = torch.arange(64.0).reshape(4, 16)
    tensors[f"{there}.mlp.gate.weight"] = whole[f"{here}.mlp.router.weight"] = router
    experts = []
    for e in range(4):
        gate, up, down = (torch.arange(128.0) + 10_000 + 1000 * (3 * e + k) for k in range(3))
        gate, up, down = gate.reshape(8, 16), up.reshape(8, 16), down.reshape(16, 8)
        for name, tensor in (("gate", gate), ("up", up), ("down", down)):
            tensors[f"{there}.mlp.experts.{e}.{name}_proj.weight"] = tensor
        experts.append((torch.cat([gate, up]), down))
    return tensors, whole, experts


@pytest.mark.parametrize(
    ("tensor", "expert", "expert_tensor"),
    [(4, 2, 2), (2, 2, 1), (2, 4, 1), (4, 2, 1), (2, 2, 2), (1, 4, 1), (4, 1, 2), (4, 1, 1), (4, 4, 1)],
    ids=str,
)
@pytest.mark.parametrize("spelling", ["grouped", "sequential"])
def test_case_083_experts_over_expert_and_expert_tensor_ranks(
    tmp_path: pathlib.Path, tensor: int, expert: int, expert_tensor: int, spelling: str
) -> None:
    """The processes of a job of the smallest size that has all of them; each writes a file by its ranks."""
    of = Llama(**MIXTURE)
    tensors, whole, experts = mixture(of)
    states: dict[tuple[int, ...], Tensors] = {}
    processes: dict[tuple[int, ...], int] = {}
    for process in range(max(tensor, expert * expert_tensor)):
        at, e_rank, part = process % tensor, process // expert_tensor % expert, process % expert_tensor
        state = {name: tensor_part(name, value, at, tensor) for name, value in whole.items()}
        local = 4 // expert
        for k in range(local):
            for n, value in enumerate(experts[e_rank * local + k]):
                name = f"linear_fc{n + 1}.weight{k}" if spelling == "grouped" else f"local_experts.{k}.linear_fc{n + 1}"
                name = f"decoder.layers.0.mlp.experts.{name}" + (".weight" if spelling == "sequential" else "")
                state[name] = tensor_part(f"linear_fc{n + 1}.weight", value, part, expert_tensor)
        states[(at, e_rank) if expert > 1 else (at,)] = state
        processes[(at, e_rank) if expert > 1 else (at,)] = process
    sizes = {
        "tensor_model_parallel_size": tensor,
        "expert_model_parallel_size": expert,
        "expert_tensor_parallel_size": expert_tensor,
        "num_experts": 4,
    }
    write_ranks(tmp_path, states, arguments(of, **sizes), of.config, processes)
    report = merged(tmp_path, check_replicas=True)
    assert not report.warnings
    assert_holds(tmp_path / "out", tensors)


@pytest.mark.parametrize("told", [True, False], ids=["arguments", "none"])
def test_case_083_three_numbers_are_tensor_pipeline_and_expert_rank(tmp_path: pathlib.Path, told: bool) -> None:
    """mp_rank_TT_PPP_EEE of TP 2, PP 2, EP 2, ETP 1: on each stage a diagonal of the grid."""
    of = Llama(**MIXTURE)
    tensors, whole, experts = mixture(of)
    states: dict[tuple[int, ...], Tensors] = {}
    for rank in (0, 1):
        parts = {name: tensor_part(name, value, rank, 2) for name, value in whole.items()}
        ends = {"decoder.final_layernorm.weight", "output_layer.weight"}
        states[rank, 1, rank] = {name: parts.pop(name) for name in ends}
        for k in (0, 1):
            for n, value in enumerate(experts[2 * rank + k]):
                parts[f"decoder.layers.0.mlp.experts.linear_fc{n + 1}.weight{k}"] = value
        states[rank, 0, rank] = parts
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}
    sizes |= {"expert_tensor_parallel_size": 1, "num_experts": 4}
    write_ranks(tmp_path, states, arguments(of, **sizes) if told else {}, of.config)
    assert (tmp_path / "ckpt" / "iter_0000100" / "mp_rank_01_000_001").is_dir()
    report = merged(tmp_path, check_replicas=True)
    assert not report.warnings
    assert_holds(tmp_path / "out", tensors)


def test_case_083_a_part_of_the_grid_that_is_missing(tmp_path: pathlib.Path) -> None:
    """Of TP 4, EP 2, ETP 2 (four files), one is lost: no other file holds that half of those experts."""
    of = Llama(**MIXTURE)
    _, whole, experts = mixture(of)
    states: dict[tuple[int, ...], Tensors] = {}
    for process in range(4):
        state = {name: tensor_part(name, value, process, 4) for name, value in whole.items()}
        for k in (0, 1):
            for n, value in enumerate(experts[process // 2 * 2 + k]):
                name = f"decoder.layers.0.mlp.experts.linear_fc{n + 1}.weight{k}"
                state[name] = tensor_part(f"linear_fc{n + 1}.weight", value, process % 2, 2)
        states[process, process // 2] = state
    states[1, 1] = states.pop((1, 0))
    sizes = {
        "tensor_model_parallel_size": 4,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
        "num_experts": 4,
    }
    write_ranks(tmp_path, states, arguments(of, **sizes), of.config)
    assert "lacks" in refused(tmp_path, CheckpointError)


# ---------------------------------------------------------------------------------------------------- 84 to 92


DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
}


def delta_net(folder: pathlib.Path, told: dict[str, int]) -> None:
    """A Qwen3-Next of one delta net, packed on two tensor ranks; every row has a number of its own."""
    kind = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "layer_types": ["linear_attention"]}
    of = Llama(**DELTA_NET, **MIXTURE | kind)
    _, whole, experts = mixture(of)
    here, mlp = "decoder.layers.0.self_attention", "decoder.layers.0.mlp"
    for name in ("linear_qkv.weight", "linear_proj.weight", "q_layernorm.weight", "k_layernorm.weight"):
        del whole[f"{here}.{name}"]
    whole[f"{here}.in_proj.layer_norm_weight"] = whole.pop(f"{here}.linear_qkv.layer_norm_weight")
    for n in (0, 1):
        whole[f"{mlp}.shared_experts.linear_fc{n + 1}.weight"] = experts[0][n]
        whole |= {f"{mlp}.experts.linear_fc{n + 1}.weight{e}": expert[n] for e, expert in enumerate(experts)}
    states: dict[tuple[int, ...], Tensors] = {}
    for rank in (0, 1):
        state = {name: tensor_part(name, tensor, rank, 2) for name, tensor in whole.items()}
        packed = [SECTIONS[x][rank] for x in ("q", "k", "v", "z", "b", "a")]
        rows = torch.tensor([row for part in packed for row in part], dtype=torch.float32)
        state[f"{mlp}.shared_experts.gate_weight"] = torch.arange(16.0).reshape(1, 16)
        state[f"{here}.in_proj.weight"] = rows.reshape(-1, 1).expand(-1, 16).clone()
        state[f"{here}.conv1d.weight"] = rows[: sum(map(len, packed[:3]))].reshape(-1, 1, 1).expand(-1, 1, 4).clone()
        state[f"{here}.A_log"], state[f"{here}.dt_bias"] = torch.arange(2.0) + 2 * rank, torch.arange(2.0) + 2 * rank
        state[f"{here}.out_norm.weight"] = torch.arange(5.0)
        state[f"{here}.out_proj.weight"] = (torch.arange(320.0).reshape(16, 20))[:, rank * 10 : rank * 10 + 10].clone()
        states[rank,] = state
    write_ranks(folder, states, {"tensor_model_parallel_size": 2, "swiglu": True, **told}, of.config)


SECTIONS = {  # rows of each key head (q, k: 3) or of its two value heads (v, z: 10; b, a: 2) on ranks 0 and 1
    "q": ([100, 101, 102], [103, 104, 105]),
    "k": ([200, 201, 202], [203, 204, 205]),
    "v": (list(range(300, 310)), list(range(310, 320))),
    "z": (list(range(400, 410)), list(range(410, 420))),
    "b": ([500, 501], [502, 503]),
    "a": ([600, 601], [602, 603]),
}


def test_case_084_sections_of_a_delta_net_are_joined_one_by_one(tmp_path: pathlib.Path) -> None:
    """Each rank packs q, k, v, z, b, a; the repository has them head by head (in_proj) or joined (conv1d)."""
    delta_net(tmp_path, DELTA_NET)
    merged(tmp_path, write_config=False)
    found = load_file(tmp_path / "out" / "model.safetensors")
    at = "model.layers.0.linear_attn"
    head = [[*SECTIONS["q"][k], *SECTIONS["k"][k], *SECTIONS["v"][k], *SECTIONS["z"][k]] for k in (0, 1)]
    assert found[f"{at}.in_proj_qkvz.weight"][:, 0].int().tolist() == head[0] + head[1]
    assert found[f"{at}.in_proj_ba.weight"][:, 0].int().tolist() == [500, 501, 600, 601, 502, 503, 602, 603]
    joined = [row for x in "qkv" for rank in (0, 1) for row in SECTIONS[x][rank]]
    assert found[f"{at}.conv1d.weight"][:, 0, 0].int().tolist() == joined
    assert found[f"{at}.A_log"].tolist() == found[f"{at}.dt_bias"].tolist() == [0, 1, 2, 3]
    assert found[f"{at}.norm.weight"].tolist() == [1, 2, 3, 4, 5]  # stored less one
    assert torch.equal(found[f"{at}.out_proj.weight"], torch.arange(320.0).reshape(16, 20))


def test_case_084_a_packed_layer_of_unknown_sections_is_refused(tmp_path: pathlib.Path) -> None:
    delta_net(tmp_path, {})
    assert "is packed, and the arguments do not tell how" in refused(tmp_path, UnsupportedError)


def less_one(tensors: Tensors) -> Tensors:
    """Every norm is stored less one."""
    return {name: tensor - 1 if "norm" in name else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("where", ["common.pt", "common state", "verl", "Bridge", "ranks"])
def test_case_085_norms_stored_less_one(tmp_path: pathlib.Path, where: str) -> None:
    """`--apply-layernorm-1p` with a model whose norms are plain in the repository; told in five places."""
    of = Llama(layers=2, hidden=1032, heads=4, width=4)  # longer than the file of ones
    tensors, told = llama(of), {"apply_layernorm_1p": True}
    whole = less_one(fused(tensors, of))
    if where == "ranks":
        write_ranks(tmp_path, cut(whole, 2), arguments(of, tensor_model_parallel_size=2, **told), of.config)
    else:
        common = {"common state": arguments(of, **told)}.get(where)
        write_dist(tmp_path, whole, of.config, arguments(of, **told) if where == "common.pt" else None, common=common)
    if where == "verl":
        (tmp_path / "ckpt" / "transformer_config.json").write_text('{"layernorm_zero_centered_gamma": true}')
    if where == "Bridge":
        text = "model:\n  layernorm_zero_centered_gamma: true\n  rotary_interleaved: false\n"
        (tmp_path / "ckpt" / "iter_0000100" / "run_config.yaml").write_text(text)
    report = merged(tmp_path, verify=True)
    assert any("+1 in 5 norms" in note for note in report.notes)
    assert_holds(tmp_path / "out", tensors)


@pytest.mark.parametrize("told", [None, False, True], ids=["not told", "plain", "less one"])
@pytest.mark.parametrize("kind", ["gemma", "llama"])
def test_case_085_what_both_sides_mean_alike_is_left_alone(
    tmp_path: pathlib.Path, kind: str, told: bool | None
) -> None:
    """Gemma's repository has weights less one as well."""
    of = Llama(model_type=kind, architectures=[f"{kind.capitalize()}ForCausalLM"])
    tensors = llama(of)
    by = {"gemma": 0 if told is not False else -1, "llama": 1 if told else 0}[kind]
    write_dist(tmp_path, fused(tensors, of), of.config, arguments(of, apply_layernorm_1p=told))
    merged(tmp_path)
    wanted = {name: tensor + by if "norm" in name else tensor for name, tensor in tensors.items()}
    assert_holds(tmp_path / "out", wanted)


def test_case_085_ones_are_added_in_fp32(tmp_path: pathlib.Path) -> None:
    """A bf16 gamma of 2^-9 less one, more one: rounded once, to even, as torch does."""
    of = Llama(torch_dtype="bfloat16")
    tensors = {name: tensor.bfloat16() for name, tensor in llama(of).items()}
    whole = fused(tensors, of)
    gamma = torch.tensor([0.0, 2.0**-9, 3 * 2.0**-9, -(2.0**-9), 2.0**-8, -1.0, 1.0, 0.0078125] * 2).bfloat16()
    whole["decoder.final_layernorm.weight"] = gamma
    write_dist(tmp_path, whole, of.config, arguments(of, apply_layernorm_1p=True))
    merged(tmp_path, verify=True)
    plain = {name: (t.float() + 1).bfloat16() if "norm" in name else t for name, t in tensors.items()}
    plain["model.norm.weight"] = (gamma.float() + 1).bfloat16()
    assert_holds(tmp_path / "out", plain)


def test_case_086_norms_stand_in_their_places(tmp_path: pathlib.Path) -> None:
    """Two-norm families here; those of four norms are in tests/formats/test_megatron_families.py."""
    of = Llama(layers=2)
    tensors = llama(of)
    norms = [name for name in tensors if "norm" in name]
    assert len({tuple(tensors[name].tolist()) for name in norms}) == len(norms) == 5
    write_dist(tmp_path, fused(tensors, of), of.config)
    merged(tmp_path)
    assert_holds(tmp_path / "out", tensors)


@pytest.mark.parametrize("way", ["zarr", "stage", "crc", "quantized"])
def test_case_085_ones_are_added_on_every_way(tmp_path: pathlib.Path, way: str) -> None:
    """Through a staging store, with checksums of the sources, beside quantized weights; and `verify` adds them too."""
    of = Llama(hidden=64, width=16, inner=32, torch_dtype="bfloat16")
    tensors = {name: tensor.bfloat16() for name, tensor in llama(of).items()}
    write_dist(tmp_path, fused(tensors, of), of.config, arguments(of, apply_layernorm_1p=True))
    base = ["--base-model", str(tmp_path / "hf"), "-q"]
    ckpt, out, store = (str(tmp_path / name) for name in ("ckpt", "out", "store"))
    if way == "stage":
        assert cli.run(["stage", ckpt, store, *base]) == 0
        assert cli.run(["finalize", store, out, "-q"]) == 0
    else:
        more = {"zarr": ["--staging", "zarr"], "crc": ["--check-crc"], "quantized": ["--quantize", "fp8-dynamic"]}
        assert cli.run(["merge", ckpt, out, *base, *more[way]]) == 0
    wanted = {name: (t.float() + 1).bfloat16() if "norm" in name else t for name, t in tensors.items()}
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name in (name for name in wanted if way != "quantized" or "norm" in name):
        assert torch.equal(found[name], wanted[name]), name
    assert cli.run(["verify", out, "--against", ckpt, "--base-model", str(tmp_path / "hf"), "-q"]) == 0


def by_halves(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Rows of neighbours (0 and 1, 2 and 3 ...) to rows half a head apart, by hand."""
    order = [head + k for head in range(0, len(tensor), width) for part in (0, 1) for k in range(part, width, 2)]
    return tensor[order]


@pytest.mark.parametrize("layout", ["dist", "ranks"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_case_088_rotary_pairs_of_neighbours(tmp_path: pathlib.Path, bias: bool, layout: str) -> None:
    """`--rotary-interleaved`: the repository's pairs are half a head apart."""
    of = Llama(heads=2, groups=2, width=4, bias=bias)
    tensors = llama(of)
    told = arguments(of, rotary_interleaved=True, rotary_percent=1.0, position_embedding_type="rope")
    if layout == "dist":
        write_dist(tmp_path, fused(tensors, of), of.config, told)
    else:
        states = cut(fused(tensors, of), 2)
        write_ranks(tmp_path, states, told | {"tensor_model_parallel_size": 2}, of.config)
    report = merged(tmp_path)
    assert any("reordered" in note for note in report.notes)
    wanted = {
        name: by_halves(tensor, 4) if ".q_proj." in name or ".k_proj." in name else tensor
        for name, tensor in tensors.items()
    }
    assert by_halves(torch.arange(8), 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert_holds(tmp_path / "out", wanted)


def test_case_088_a_file_of_ones_own_is_the_option(tmp_path: pathlib.Path) -> None:
    """Where no arguments were kept, one line of transformer_config.json tells the flavour."""
    of = Llama(heads=2, groups=2, width=4)
    tensors = llama(of)
    write_dist(tmp_path, fused(tensors, of), of.config)
    (tmp_path / "ckpt" / "transformer_config.json").write_text('{"rotary_interleaved": true}')
    merged(tmp_path)
    turned = (".q_proj.", ".k_proj.")
    wanted = {n: by_halves(t, 4) if any(x in n for x in turned) else t for n, t in tensors.items()}
    assert_holds(tmp_path / "out", wanted)


@pytest.mark.parametrize("told", ["rotary_interleaved", "layernorm_zero_centered_gamma"])
def test_case_088_two_files_that_say_otherwise_are_refused(tmp_path: pathlib.Path, told: str) -> None:
    of = Llama()
    write_dist(tmp_path, fused(llama(of), of), of.config, arguments(of, **{told: False}))
    (tmp_path / "ckpt" / "transformer_config.json").write_text(json.dumps({told: True}))
    assert "by the trainer's arguments" in refused(tmp_path, CorruptCheckpointError)


def test_case_088_norms_of_heads_are_reordered_too(tmp_path: pathlib.Path) -> None:
    of = Llama(model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    tensors, whole = llama(of), fused(llama(of), of)
    for x in "qk":
        norm = torch.arange(4.0) + 5000 * ("kq".index(x) + 1)
        whole[f"decoder.layers.0.self_attention.{x}_layernorm.weight"] = norm
        tensors[f"model.layers.0.self_attn.{x}_norm.weight"] = by_halves(norm, 4)
        tensors[f"model.layers.0.self_attn.{x}_proj.weight"] = by_halves(
            tensors[f"model.layers.0.self_attn.{x}_proj.weight"], 4
        )
    write_dist(tmp_path, whole, of.config, arguments(of, rotary_interleaved=True))
    merged(tmp_path)
    assert_holds(tmp_path / "out", tensors)


def test_case_088_pairs_in_a_part_of_each_head_are_refused(tmp_path: pathlib.Path) -> None:
    of = Llama()
    write_dist(tmp_path, fused(llama(of), of), of.config, arguments(of, rotary_interleaved=True, rotary_percent=0.5))
    assert "neighbours in 0.5 of each head" in refused(tmp_path, UnsupportedError)


def test_case_090_uneven_pieces_of_megatron_fsdp(tmp_path: pathlib.Path) -> None:
    """A real save: dim 0 cut where a flat buffer ended, halves of fc1 under names of their own."""
    case = DATA / "megatron" / "fsdp_llama_dp2"
    options = ["--base-model", str(case / "hf"), "-q"]
    assert cli.run(["merge", str(case / "ckpt"), str(tmp_path / "out"), *options]) == 0
    assert content(tmp_path / "out") == content(case / "expected")


def drifted(of: Llama) -> tuple[Tensors, dict[tuple[int, ...], Tensors], str]:
    tensors = llama(of)
    states = cut(fused(tensors, of), 2)
    name = "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"
    states[1,][name] = states[1,][name] + 0.5
    return tensors, states, name


def test_case_092_norms_that_drifted_apart_are_rank_0s(tmp_path: pathlib.Path) -> None:
    of = Llama()
    tensors, states, _ = drifted(of)
    write_ranks(tmp_path, states, arguments(of, tensor_model_parallel_size=2), of.config)
    merged(tmp_path)
    assert_holds(tmp_path / "out", tensors)


def test_case_092_the_largest_difference_is_told(tmp_path: pathlib.Path) -> None:
    of = Llama()
    tensors, states, _ = drifted(of)
    write_ranks(tmp_path, states, arguments(of, tensor_model_parallel_size=2), of.config)
    report = merged(tmp_path, check_replicas=True)
    assert any("layer_norm" in warning and "max abs 0.5" in warning for warning in report.warnings)
    assert_holds(tmp_path / "out", tensors)


def test_case_092_strict_refuses_copies_that_differ(tmp_path: pathlib.Path) -> None:
    of = Llama()
    _, states, _ = drifted(of)
    write_ranks(tmp_path, states, arguments(of, tensor_model_parallel_size=2), of.config)
    with pytest.raises(MergeStreamError):
        merged(tmp_path, check_replicas=True, strict=True)
