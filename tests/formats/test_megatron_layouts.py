"""Megatron's layouts and options: what is left out, what is taken instead, what cannot be told and is refused."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from merge_stream.api import merge
from merge_stream.errors import (
    CorruptCheckpointError,
    IncompleteShardsError,
    UnsupportedError,
    UsageError,
)
from merge_stream.options import MergeOptions, OpenOptions
from merge_stream.report import Report
from tests.cases.naive import assert_holds, numbered
from tests.cases.test_section_g import MIXTURE, arguments, cut, mixture, stages
from tests.formats.naive import DATA
from tests.formats.test_megatron_families import distributed, opened
from tests.makers.megatron_files import Llama, fused, llama, tensor_part, write_config, write_dist, write_ranks

Tensors = dict[str, torch.Tensor]


def merged(folder: pathlib.Path, opening: OpenOptions | None = None, base: str = "hf", **options: Any) -> Report:
    """Merge `folder`/ckpt into `folder`/out."""
    base_model = str(folder / base) if base else None
    return merge(folder / "ckpt", folder / "out", MergeOptions(base_model=base_model, **options), opening=opening)


# ------------------------------------------------------------------------------- layers of multi-token prediction


@pytest.mark.parametrize(
    ("family", "at"),
    [("deepseek_v3", ".layers.2."), ("glm4_moe", ".layers.2."), ("mimo", "mtp_"), ("qwen3_next", "mtp.")],
)
def test_prediction_layers_are_left_out_on_request(family: str, at: str, tmp_path: pathlib.Path) -> None:
    """They are counted, the config counts none any more, and all else is as it was."""
    config, wanted, megatron, _ = opened(DATA / "megatron_bridges" / f"{family}.megatron-bridge.json")
    write_dist(tmp_path, distributed(megatron, config), config)
    report = merged(tmp_path, OpenOptions(no_mtp=True))
    assert_holds(tmp_path / "out", {name: tensor for name, tensor in wanted.items() if at not in name})
    assert report.ignored["multi-token prediction (--no-mtp)"] > 5
    assert config["num_nextn_predict_layers"] == 1
    assert any("num_nextn_predict_layers set to 0" in note for note in report.notes)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == config | {"num_nextn_predict_layers": 0}


def test_without_prediction_layers_nothing_changes(tmp_path: pathlib.Path) -> None:
    of = Llama()
    write_dist(tmp_path, fused(llama(of), of), of.config)
    merged(tmp_path, OpenOptions(no_mtp=True))
    assert_holds(tmp_path / "out", llama(of))
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == of.config


def test_the_option_means_nothing_elsewhere(tmp_path: pathlib.Path) -> None:
    (tmp_path / "ckpt").mkdir()
    save_file(llama(Llama()), tmp_path / "ckpt" / "model.safetensors")
    write_config(tmp_path, Llama().config)
    with pytest.raises(UsageError, match="--no-mtp means nothing"):
        merged(tmp_path, OpenOptions(no_mtp=True))


# ------------------------------------------------------------------------------- a base model that has weights


def base_weights(folder: pathlib.Path, tensors: Tensors) -> None:
    plain = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(plain, folder / "hf" / "model.safetensors", {"format": "pt"})


def test_copies_for_prediction_layers_are_those_that_the_base_has(tmp_path: pathlib.Path) -> None:
    config, wanted, megatron, _ = opened(DATA / "megatron_bridges" / "deepseek_v3.megatron-bridge.json")
    write_dist(tmp_path, distributed(megatron, config), config)
    del wanted["model.layers.2.embed_tokens.weight"]
    base_weights(tmp_path, wanted)
    merged(tmp_path)
    assert_holds(tmp_path / "out", wanted)


def test_names_that_the_base_lacks_are_refused(tmp_path: pathlib.Path) -> None:
    of = Llama()
    write_dist(tmp_path, fused(llama(of), of), of.config)
    base_weights(tmp_path, {k: v for k, v in llama(of).items() if "up_proj" not in k})
    with pytest.raises(Exception, match=r"not in the base model: model.layers.0.mlp.up_proj.weight"):
        merged(tmp_path)


@pytest.mark.parametrize(("family", "method"), [("gpt_oss", "mxfp4"), ("deepseek_v3", "fp8")])
def test_a_quantized_base_model_has_the_names_but_not_the_form(
    family: str, method: str, tmp_path: pathlib.Path
) -> None:
    """What was trained is plain: the names are the base's without its packing, and config.json says nothing of it."""
    config, wanted, megatron, _ = opened(DATA / "megatron_bridges" / f"{family}.megatron-bridge.json")
    write_dist(tmp_path, distributed(megatron, config), config | {"quantization_config": {"quant_method": method}})
    base: Tensors = {}
    for name, tensor in wanted.items():
        if family == "gpt_oss" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            base |= {f"{name}_{x}": torch.zeros(4, 2, 1, 16, dtype=torch.uint8) for x in ("blocks", "scales")}
        elif family == "deepseek_v3" and "_proj.weight" in name:
            base |= {name: tensor.to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
        else:
            base[name] = tensor
    base_weights(tmp_path, base)
    merged(tmp_path)
    assert_holds(tmp_path / "out", wanted)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


# ------------------------------------------------------------------------------- fp32 masters


def test_flattened_masters_of_a_real_save(tmp_path: pathlib.Path) -> None:
    """Blocks of TP 2, ranges of DP 2 (core 0.12): each master rounds to the weight that stands beside it."""
    case = DATA / "megatron" / "td12_qwen2_optim_tp2_dp2"
    options = MergeOptions(base_model=str(case / "hf"), verify=True)
    merge(case / "ckpt", tmp_path / "out", options, opening=OpenOptions(weights="master"))
    found = load_file(tmp_path / "out" / "model.safetensors")
    wanted = load_file(case / "expected" / "model.safetensors")
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == torch.float32, name
        assert torch.equal(found[name].bfloat16(), tensor), name


def flat_blocks(tensor: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
    """[X/x, Y/y, x*y]: each block by itself, flat."""
    block = [n // k for n, k in zip(tensor.shape, grid, strict=True)]
    made = torch.empty(*grid, int(torch.Size(block).numel()))
    for at in torch.cartesian_prod(*map(torch.arange, grid)).reshape(-1, len(grid)).tolist():
        part = tensor[tuple(slice(i * n, (i + 1) * n) for i, n in zip(at, block, strict=True))]
        made[tuple(at)] = part.reshape(-1)
    return made


@pytest.mark.parametrize("prefix", ["", "chained_1."])
def test_flattened_masters_of_any_grid(tmp_path: pathlib.Path, prefix: str) -> None:
    of = Llama(torch_dtype="bfloat16")
    masters = {name: tensor + 0.25 for name, tensor in fused(llama(of), of).items()}
    state = {name: tensor.bfloat16() for name, tensor in masters.items()}
    for name, tensor in masters.items():
        grid = (1,) if tensor.dim() == 1 else (1, 4) if "linear_proj" in name else (4, 2) if "fc1" in name else (2, 1)
        state[f"{prefix}optimizer.state.fp32_param.{name}"] = flat_blocks(tensor, grid)
    write_dist(tmp_path, state, of.config)
    merged(tmp_path, OpenOptions(weights="master"))
    assert_holds(tmp_path / "out", {name: tensor + 0.25 for name, tensor in llama(of).items()})


def test_masters_of_another_step_are_refused(tmp_path: pathlib.Path) -> None:
    of = Llama(torch_dtype="bfloat16")
    weights = {name: tensor.bfloat16() for name, tensor in fused(llama(of), of).items()}
    masters = {f"optimizer.state.param.{name}": tensor.float() for name, tensor in weights.items()}
    masters["optimizer.state.param.decoder.final_layernorm.weight"] += 64
    write_dist(tmp_path, weights | masters, of.config)
    with pytest.raises(CorruptCheckpointError, match=r"do not round .*final_layernorm"):
        merged(tmp_path, OpenOptions(weights="master"))


@pytest.mark.parametrize(
    ("shape", "said"), [((3, 1, 128), "is no grid of flat blocks"), ((2, 1, 100), "is no grid of flat blocks")]
)
def test_masters_that_are_no_blocks_of_their_weight(tmp_path: pathlib.Path, shape: tuple[int, ...], said: str) -> None:
    of = Llama(torch_dtype="bfloat16")
    weights = {name: tensor.bfloat16() for name, tensor in fused(llama(of), of).items()}
    masters = {f"optimizer.state.param.{name}": tensor.float() for name, tensor in weights.items()}
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    del masters[f"optimizer.state.param.{name}"]
    masters[f"optimizer.state.fp32_param.{name}"] = torch.zeros(shape)
    write_dist(tmp_path, weights | masters, of.config)
    with pytest.raises(CorruptCheckpointError, match=said):
        merged(tmp_path, OpenOptions(weights="master"))


def test_masters_in_buffers_are_refused(tmp_path: pathlib.Path) -> None:
    of = Llama()
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.param"
    write_dist(tmp_path, fused(llama(of), of) | {bucket: numbered(64)}, of.config)
    with pytest.raises(UnsupportedError, match="in buffers without names"):
        merged(tmp_path, OpenOptions(weights="master"))


# ------------------------------------------------------------------------------- folders


def verl(folder: pathlib.Path, of: Llama, *, dist: bool, hub: bool) -> pathlib.Path:
    """Verl 0.9.1's folder of an actor: shards, or weights of Hugging Face, or both."""
    actor = folder / "ckpt" / "actor"
    if dist:
        write_dist(folder / "made", fused(llama(of), of), of.config)
        shutil.copytree(folder / "made" / "ckpt" / "iter_0000100", actor / "model" / "dist_ckpt")
    (actor / "model" / "huggingface").mkdir(parents=True)
    (actor / "model" / "huggingface" / "config.json").write_text(json.dumps(of.config))
    if hub:
        tensors = {name: tensor + 0.5 for name, tensor in llama(of).items()} if dist else llama(of)
        save_file(tensors, actor / "model" / "huggingface" / "model.safetensors", {"format": "pt"})
    (actor / "ckpt_contents.json").write_text('{"schema_version": 2, "framework": "megatron"}')
    return folder


def test_verl_folder_whose_model_is_one_of_hugging_face_already(tmp_path: pathlib.Path) -> None:
    """`use_dist_checkpointing=False`: there are no shards, and what is there is copied."""
    of = Llama()
    verl(tmp_path, of, dist=False, hub=True)
    report = merged(tmp_path, base="")
    assert report.format == "hugging_face"
    assert_holds(tmp_path / "out", llama(of))


def test_verl_folder_with_shards_and_a_model_of_hugging_face(tmp_path: pathlib.Path) -> None:
    """Both were saved: the shards are the checkpoint."""
    of = Llama()
    verl(tmp_path, of, dist=True, hub=True)
    report = merged(tmp_path, base="")
    assert report.format == "megatron"
    assert_holds(tmp_path / "out", llama(of))


@pytest.mark.parametrize("given", ["", "weights"])
def test_nemo_folder(tmp_path: pathlib.Path, given: str) -> None:
    """`weights/` with keys below `module.`, `context/` beside."""
    of = Llama()
    prefixed = {f"module.{name}": tensor for name, tensor in fused(llama(of), of).items()}
    write_dist(tmp_path / "made", prefixed, of.config)
    shutil.copytree(tmp_path / "made" / "ckpt" / "iter_0000100", tmp_path / "ckpt" / "weights")
    (tmp_path / "ckpt" / "context").mkdir()
    (tmp_path / "ckpt" / "context" / "model.yaml").write_text("_target_: nemo.collections.llm.LlamaModel\n")
    options = MergeOptions(base_model=str(tmp_path / "made" / "hf"))
    merge(tmp_path / "ckpt" / given, tmp_path / "out", options)
    assert_holds(tmp_path / "out", llama(of))


@pytest.mark.parametrize("tracker", [True, False])
def test_run_of_megatron_bridge(tmp_path: pathlib.Path, tracker: bool) -> None:
    """What stands beside the weights (train state, run_config.yaml, tokenizer, optimizer state) is left alone."""
    of = Llama()
    state = fused(llama(of), of)
    moments = {f"optimizer.state.exp_avg.{name}": tensor + 1 for name, tensor in state.items()}
    write_dist(tmp_path, state | moments, of.config)
    step = tmp_path / "ckpt" / "iter_0000100"
    for name in ("train_state.pt", "../latest_train_state.pt", "dataloader_state.pt"):
        torch.save({"step": torch.tensor(100)}, step / name)
    (step / "run_config.yaml").write_text("model:\n  layernorm_zero_centered_gamma: false\n  num_layers: 1\n")
    (step / "tokenizer").mkdir()
    (step / "tokenizer" / "tokenizer.json").write_text("{}")
    if not tracker:
        (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").unlink()
    report = merged(tmp_path)
    assert report.ignored["optimizer state"] == len(moments)
    assert_holds(tmp_path / "out", llama(of))


# ------------------------------------------------------------------------------- ranks and names


@pytest.mark.parametrize("told", [True, False], ids=["arguments", "none"])
def test_the_second_number_is_a_pipeline_stage(tmp_path: pathlib.Path, told: bool) -> None:
    of = Llama(layers=3)
    states = {(0, stage): state for stage, state in enumerate(stages(fused(llama(of), of), [1, 2]))}
    write_ranks(tmp_path, states, arguments(of, pipeline_model_parallel_size=2) if told else {}, of.config)
    merged(tmp_path)
    assert_holds(tmp_path / "out", llama(of))


def expert_states(of: Llama, tensor: int = 1) -> tuple[Tensors, Mapping[tuple[int, ...], Tensors]]:
    tensors, whole, experts = mixture(of)
    states = {}
    for rank in (0, 1):
        state = {name: tensor_part(name, value, 0, tensor) for name, value in whole.items()}
        for k in (0, 1):
            for n, value in enumerate(experts[2 * rank + k]):
                state[f"decoder.layers.0.mlp.experts.linear_fc{n + 1}.weight{k}"] = value
        states[0, rank] = state
    return tensors, states


@pytest.mark.parametrize("told", [True, False], ids=["arguments", "none"])
def test_the_second_number_is_an_expert_rank(tmp_path: pathlib.Path, told: bool) -> None:
    """Both files hold the embedding, which no two stages do."""
    of = Llama(**MIXTURE)
    tensors, states = expert_states(of)
    sizes = {"expert_model_parallel_size": 2, "num_experts": 4, "pipeline_model_parallel_size": 1}
    write_ranks(tmp_path, states, arguments(of, **sizes) if told else {}, of.config)
    report = merged(tmp_path, check_replicas=True)
    assert not report.warnings
    assert_holds(tmp_path / "out", tensors)


def test_tied_stages_are_no_expert_ranks(tmp_path: pathlib.Path) -> None:
    """The last stage of a tied model has a copy of the embedding, under the head's name."""
    of = Llama(layers=2, tie_word_embeddings=True)
    tensors = llama(of)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    states = {(0, stage): state for stage, state in enumerate(stages(fused(tensors, of), [1, 1]))}
    write_ranks(tmp_path, states, {}, of.config)
    merged(tmp_path)
    assert_holds(tmp_path / "out", {name: t for name, t in tensors.items() if name != "lm_head.weight"})


@pytest.mark.parametrize("told", [{"swiglu": False, "quick_geglu": True}, {"swiglu": False, "gated_linear_unit": True}])
def test_gates_of_another_kind_than_swiglu(tmp_path: pathlib.Path, told: dict[str, bool]) -> None:
    """`swiglu` alone does not tell: GeGLU has gates as well."""
    of = Llama()
    write_ranks(tmp_path, cut(fused(llama(of), of), 2), {"tensor_model_parallel_size": 2, **told}, of.config)
    merged(tmp_path)
    assert_holds(tmp_path / "out", llama(of))


@pytest.mark.parametrize(
    ("kind", "told", "said"),
    [
        ("llama", {"swiglu": False}, "say that linear_fc1 has no gates, and llama has gates"),
        ("nemotron", {"swiglu": True}, "say that linear_fc1 has gates, and nemotron has none"),
        ("nemotron", {}, "without arguments it is assumed that linear_fc1 has gates"),
    ],
)
def test_gates_that_contradict_the_family(tmp_path: pathlib.Path, kind: str, told: dict[str, bool], said: str) -> None:
    """Rows would be joined in another order, with the same shapes."""
    of = Llama(model_type=kind)
    write_ranks(tmp_path, cut(fused(llama(of), of), 2), {"tensor_model_parallel_size": 2, **told}, of.config)
    with pytest.raises(UnsupportedError, match=said):
        merged(tmp_path)


def hybrid(of: Llama, order: str) -> Tensors:
    """Layers of HybridModel: attention (*) and MLP (-) with numbers of their own, in the order of a pattern."""
    made: Tensors = {}
    places = {kind: [k for k, x in enumerate(order) if x == kind] for kind in "*-"}
    for name, tensor in fused(llama(of), of).items():
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str(places["*" if parts[3] == "self_attention" else "-"][int(parts[2])])
        made[".".join(parts).replace("decoder.final_layernorm", "decoder.final_norm")] = tensor
    return made


def test_layers_of_a_hybrid_model_are_pairs(tmp_path: pathlib.Path) -> None:
    of = Llama(layers=2)
    write_dist(tmp_path, hybrid(of, "*-*-"), of.config)
    merged(tmp_path)
    assert_holds(tmp_path / "out", llama(of))


@pytest.mark.parametrize("order", ["-*-*", "**--", "*--*"])
def test_a_hybrid_model_in_another_order_is_no_transformer(tmp_path: pathlib.Path, order: str) -> None:
    of = Llama(layers=2)
    write_dist(tmp_path, hybrid(of, order), of.config)
    with pytest.raises(UnsupportedError, match="no pairs of attention and MLP"):
        merged(tmp_path)


@pytest.mark.parametrize("half", ["w", "v"])
def test_half_of_a_gated_layer_is_missing(tmp_path: pathlib.Path, half: str) -> None:
    of = Llama()
    state = fused(llama(of), of)
    gate, up = state.pop("decoder.layers.0.mlp.linear_fc1.weight").chunk(2)
    state[f"decoder.layers.0.mlp.linear_fc1.weight_{half}"] = gate if half == "w" else up
    write_dist(tmp_path, state, of.config)
    other = {"w": "v", "v": "w"}[half]
    with pytest.raises(IncompleteShardsError, match=rf"linear_fc1.weight_{other} is missing"):
        merged(tmp_path)


def test_halves_of_a_gated_layer_are_one(tmp_path: pathlib.Path) -> None:
    of = Llama()
    state = fused(llama(of), of)
    gate, up = state.pop("decoder.layers.0.mlp.linear_fc1.weight").chunk(2)
    state |= {f"decoder.layers.0.mlp.linear_fc1.weight_{x}": part for x, part in (("w", gate), ("v", up))}
    write_dist(tmp_path, state, of.config)
    merged(tmp_path)
    assert_holds(tmp_path / "out", llama(of))


def test_a_part_of_a_delta_net_is_missing(tmp_path: pathlib.Path) -> None:
    config, _, megatron, _ = opened(DATA / "megatron_bridges" / "qwen3_next.megatron-bridge.json")
    state = distributed(megatron, config)
    del state["decoder.layers.0.self_attention.in_proj.weight.beta"]
    write_dist(tmp_path, state, config)
    with pytest.raises(IncompleteShardsError, match=r"in_proj.weight.beta is missing"):
        merged(tmp_path)


def test_ranks_of_an_unknown_packed_layer_are_refused(tmp_path: pathlib.Path) -> None:
    """Two tensor ranks, and a parameter that no rule knows."""
    of = Llama()
    states = cut(fused(llama(of), of), 2)
    for state in states.values():
        state["decoder.layers.0.mixer.in_proj.weight"] = numbered(4, 16)
    write_ranks(tmp_path, states, arguments(of, tensor_model_parallel_size=2), of.config)
    with pytest.raises(UnsupportedError, match=r"how decoder.layers.0.mixer.in_proj.weight is cut"):
        merged(tmp_path)


# ------------------------------------------------------------------------------- families that no table knows

TABLE = """
[[rule]]
split_qkv = "decoder.layers.{i}.self_attention.linear_qkv.{leaf}"
q = "layers.{i}.q.{leaf}"
k = "layers.{i}.k.{leaf}"
v = "layers.{i}.v.{leaf}"
heads = 4
groups = 2
width = 4

[[rule]]
split_halves = "decoder.layers.{i}.mlp.experts.linear_fc1.weight"
first = "layers.{i}.experts.{e}.gate"
second = "layers.{i}.experts.{e}.up"

[[rule]]
unstack = "decoder.layers.{i}.mlp.experts.linear_fc2.weight"
to = "layers.{i}.experts.{e}.down"

[[rule]]
split_halves = "decoder.layers.{i}.mlp.shared_experts.linear_fc1.weight"
first = "layers.{i}.gate"
second = "layers.{i}.up"

[[rule]]
rename = "decoder.layers.{i}.{rest}"
to = "layers.{i}.{rest}"
"""


def test_an_unknown_family_lists_names_and_a_table_of_ones_own_tells_them(tmp_path: pathlib.Path) -> None:
    of = Llama(**MIXTURE | {"model_type": "never_seen", "architectures": ["NeverSeenForCausalLM"]})
    tensors, whole, experts = mixture(of)
    for n in (1, 2):
        whole[f"decoder.layers.0.mlp.experts.experts.linear_fc{n}.weight"] = torch.stack([e[n - 1] for e in experts])
    whole["decoder.layers.0.mlp.shared_experts.linear_fc1.weight"] = numbered(6, 16)
    write_dist(tmp_path, whole, of.config)
    with pytest.raises(UnsupportedError, match=r"'never_seen'.* are not known.*decoder.layers.0") as caught:
        merged(tmp_path)
    assert "docs/adding.md" in str(caught.value.hint)
    assert "--rules" in str(caught.value.hint)
    (tmp_path / "table.toml").write_text(TABLE)
    merged(tmp_path, OpenOptions(rules=str(tmp_path / "table.toml")), write_config=False)
    found = load_file(tmp_path / "out" / "model.safetensors")
    at = "model.layers.0"
    for x in "qkv":
        assert torch.equal(found[f"layers.0.{x}.weight"], tensors[f"{at}.self_attn.{x}_proj.weight"])
    for e in range(4):
        for x in ("gate", "up", "down"):
            assert torch.equal(found[f"layers.0.experts.{e}.{x}"], tensors[f"{at}.mlp.experts.{e}.{x}_proj.weight"])
    assert torch.equal(torch.cat([found["layers.0.gate"], found["layers.0.up"]]), numbered(6, 16))
    assert torch.equal(found["layers.0.input_layernorm.weight"], tensors[f"{at}.input_layernorm.weight"])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [("groups = 2", "groups = 3", "no multiple"), ("heads = 4", "heads = 0", "heads is 0"), ("width = 4", "", "lacks")],
)
def test_a_table_that_cannot_be_meant(tmp_path: pathlib.Path, old: str, new: str, said: str) -> None:
    of = Llama()
    write_dist(tmp_path, fused(llama(of), of), of.config)
    (tmp_path / "table.toml").write_text(TABLE.replace(old, new))
    with pytest.raises(UsageError, match=said):
        merged(tmp_path, OpenOptions(rules=str(tmp_path / "table.toml")), write_config=False)


def test_a_rank_file_copied_over_another_is_refused(tmp_path: pathlib.Path) -> None:
    """Every shape fits, and the model would hold one rank's rows twice."""
    case = shutil.copytree(DATA / "megatron" / "legacy_llama_tp2_pp2", tmp_path / "case")
    first, second = sorted(case.rglob("mp_rank_0[01]_001/model_optim_rng.pt"))
    shutil.copyfile(first, second)
    with pytest.raises(CorruptCheckpointError, match="same file"):
        merge(case / "ckpt", tmp_path / "out", MergeOptions(base_model=str(case / "hf")))
