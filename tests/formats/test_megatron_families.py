"""Every family: what Megatron-Bridge and mbridge make of a small model comes back as that model, byte for byte.

The Megatron side is in tests/data/megatron_bridges, made by the code of those projects
(tests/makers/megatron_bridges.py): their names, their merging of rows. Every element is its own number, so a name, row
or column out of place is seen.
"""

from __future__ import annotations

import base64
import json
import pathlib
import re
import zlib
from typing import Any

import numpy as np
import pytest
import torch

from merge_stream.api import merge
from merge_stream.architectures.megatron import megatron_families
from merge_stream.errors import CheckpointError, UnsupportedError
from merge_stream.options import MergeOptions
from tests.cases.naive import assert_holds
from tests.formats.naive import DATA
from tests.makers.megatron_exports import digest
from tests.makers.megatron_files import tensor_part, write_dist, write_ranks

FOLDER = DATA / "megatron_bridges"
MADE = sorted(FOLDER.glob("*bridge.json"))
Tensors = dict[str, torch.Tensor]


def opened(path: pathlib.Path) -> tuple[dict[str, Any], Tensors, Tensors, dict[str, list[str]]]:
    """config, the repository's tensors, Megatron's, further names of Megatron for the same."""
    document = json.loads(path.read_text())
    wanted = {
        name: torch.arange(first, first + int(torch.Size(shape).numel()), dtype=torch.float32).reshape(shape)
        for name, (first, shape) in document["hf"].items()
    }
    megatron = {}
    for name, (shape, packed) in document["megatron"].items():
        numbers = np.cumsum(np.frombuffer(zlib.decompress(base64.b64decode(packed)), "<i4"), dtype=np.int64)
        megatron[name] = torch.from_numpy(numbers.reshape(shape).astype(np.float32))
    if path.stem.startswith(("deepseek_v3.", "glm4_moe.")):  # the repositories hold both once more in MTP layers
        wanted["model.layers.2.embed_tokens.weight"] = wanted["model.embed_tokens.weight"]
        wanted["model.layers.2.shared_head.head.weight"] = wanted["lm_head.weight"]
    if path.stem == "mimo.mbridge":  # it does not exchange what Megatron joins the other way round than MiMo
        name = "model.mtp_layers.0.input_proj.weight"
        wanted[name] = torch.cat(wanted[name].chunk(2, 1)[::-1], 1)
    return document["config"], wanted, megatron, document["also"]


def sections(config: dict[str, Any]) -> dict[str, int]:
    """Rows of each part of a gated delta net's in_proj."""
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    heads = config["linear_num_value_heads"]
    return {"query": keys, "key": keys, "value": values, "z": values, "beta": heads, "alpha": heads}


def distributed(megatron: Tensors, config: dict[str, Any]) -> Tensors:
    """Keys of a distributed checkpoint: experts in stacks, parts of in_proj and conv1d by name, one name for MTP."""
    made: Tensors = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for full, tensor in megatron.items():
        name = full.replace(".mtp_model_layer.", ".transformer_layer.")
        expert = re.fullmatch(r"(.+\.mlp\.experts)\.(linear_fc\d\.\w+?)(\d+)", name)
        if expert:
            stacks.setdefault(f"{expert[1]}.experts.{expert[2]}", {})[int(expert[3])] = tensor
        elif name.endswith(("self_attention.in_proj.weight", "self_attention.conv1d.weight")):
            parts = sections(config)
            wanted = list(parts) if "in_proj" in name else ["query", "key", "value"]
            for part, rows in zip(wanted, tensor.split([parts[key] for key in wanted]), strict=True):
                made[f"{name}.{part}"] = rows
        else:
            made[name] = tensor
    return made | {name: torch.stack([parts[e] for e in sorted(parts)]) for name, parts in stacks.items()}


def merged(folder: pathlib.Path) -> None:
    merge(folder / "ckpt", folder / "out", MergeOptions(base_model=str(folder / "hf")))


@pytest.mark.parametrize("path", MADE, ids=lambda path: path.stem)
def test_a_distributed_checkpoint_is_the_model_again(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    config, wanted, megatron, _ = opened(path)
    write_dist(tmp_path, distributed(megatron, config), config)
    merged(tmp_path)
    assert_holds(tmp_path / "out", wanted)


NOT_EXPORTED = {
    stem: {"model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"}
    for stem in ("deepseek_v3.megatron-bridge", "glm4_moe.megatron-bridge", "glm4_moe.mbridge")
}
"""Copies of embedding and head that the repositories have and those exports leave out."""


@pytest.mark.parametrize("path", MADE, ids=lambda path: path.stem)
def test_what_the_bridges_export_has_the_same_bytes(path: pathlib.Path) -> None:
    """Their own functions from Megatron to the repository give what the merges of these files must hold."""
    _, wanted, _, _ = opened(path)
    if path.stem == "mimo.mbridge":  # it exchanges the halves in neither direction
        name = "model.mtp_layers.0.input_proj.weight"
        wanted[name] = torch.cat(wanted[name].chunk(2, 1)[::-1], 1)
    kept = {name: tensor for name, tensor in wanted.items() if name not in NOT_EXPORTED.get(path.stem, ())}
    assert digest(kept) == json.loads((DATA / "megatron_exports.json").read_text())[path.stem]


def stacked_layers(state: Tensors) -> Tensors:
    """The homogeneous form of a distributed checkpoint: one key for all layers, which are the leading dim."""
    made: Tensors = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in state.items():
        match = re.fullmatch(r"((?:\w+_model\.)?decoder\.layers)\.(\d+)\.(.+)", name)
        if match:
            stacks.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
        else:
            made[name] = tensor
    return made | {name: torch.stack([parts[k] for k in sorted(parts)]) for name, parts in stacks.items()}


MIXED = ("deepseek", "kimi", "glm4_moe", "qwen3_next")
"""Families whose layers are not all alike: those have a key for each layer."""


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in MADE if not p.stem.startswith(MIXED)], ids=lambda path: path.stem)
def test_stacks_of_layers_are_the_model_again(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    config, wanted, megatron, _ = opened(path)
    state = stacked_layers(distributed(megatron, config))
    assert not any(re.match(r"(\w+_model\.)?decoder\.layers\.\d", name) for name in state)
    write_dist(tmp_path, state, config)
    merged(tmp_path)
    assert_holds(tmp_path / "out", wanted)


def rank_part(name: str, tensor: torch.Tensor, rank: int, config: dict[str, Any]) -> torch.Tensor:
    """What one of two tensor-parallel ranks holds, with Transformer Engine."""
    if re.search(r"gate_weight|expert_bias|_down_proj\.weight|patch_embed|pos_embed|^visual\.", name):
        return tensor.clone()
    if name.endswith(("in_proj.weight", "conv1d.weight")):
        parts = sections(config)
        wanted = list(parts.values()) if "in_proj" in name else list(parts.values())[:3]
        return torch.cat([part.chunk(2)[rank] for part in tensor.split(wanted)])
    if name.endswith("_layernorm.weight") and config["model_type"] == "minimax_m2" and re.search(r"\.[qk]_lay", name):
        return tensor.chunk(2)[rank].clone()
    if re.search(r"out_proj\.weight", name):
        return tensor.chunk(2, 1)[rank].clone()
    if re.search(r"linear_fc1\.(weight|bias)", name) and not is_gated(name, config):
        return tensor.chunk(2)[rank].clone()
    if ".linear_fc2.bias" in name:
        return tensor.clone()
    return tensor_part(name, tensor, rank, 2)


UNGATED = {"nemotron", "gpt_neox", "starcoder2"}
"""Families whose linear_fc1 is one matrix, which a tensor-parallel rank has rows of."""


def is_gated(name: str, config: dict[str, Any]) -> bool:
    """Of a tower, layers of mbridge's Qwen2.5-VL alone (`get_vision_model_config`, `MultimodalProjector`)."""
    if name.startswith("vision_model"):
        return config["model_type"] == "qwen2_5_vl" and ".decoder.layers." in name
    return config["model_type"] not in UNGATED


@pytest.mark.parametrize("path", MADE, ids=lambda path: path.stem)
def test_files_of_two_tensor_ranks_are_the_model_again(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    config, wanted, megatron, _ = opened(path)
    text = config.get("text_config") or config
    states = {
        (rank,): {name: rank_part(name, tensor, rank, config) for name, tensor in megatron.items()} for rank in (0, 1)
    }
    arguments = {
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
        "num_experts": 4,
        "swiglu": config["model_type"] not in UNGATED,
        "num_attention_heads": text["num_attention_heads"],
        "num_query_groups": text["num_key_value_heads"],
        "kv_channels": text.get("head_dim"),
        "qk_pos_emb_head_dim": text.get("qk_rope_head_dim"),
        **{key: text[key] for key in text if key.startswith("linear_") or key in {"q_lora_rank", "kv_lora_rank"}},
    }
    write_ranks(tmp_path, states, arguments, config)
    merged(tmp_path)
    assert_holds(tmp_path / "out", wanted)


def test_a_tower_of_no_known_kind_is_not_cut_by_guess(tmp_path: pathlib.Path) -> None:
    """Neither a merger nor a projection tells whether linear_fc1 of its layers has a gate."""
    config, _, megatron, _ = opened(FOLDER / "qwen3_vl.megatron-bridge.json")
    kept = {name: tensor for name, tensor in megatron.items() if ".merger." not in name}
    states = {(rank,): {name: rank_part(name, t, rank, config) for name, t in kept.items()} for rank in (0, 1)}
    write_ranks(tmp_path, states, {"tensor_model_parallel_size": 2, "swiglu": True}, config)
    with pytest.raises(UnsupportedError, match=r"vision_model\..*linear_fc1.* has a gate is not known"):
        merged(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in MADE if json.loads(p.read_text())["also"]], ids=lambda path: path.stem)
def test_further_names_of_the_table_mean_the_same(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The last name that Megatron-Bridge accepts for each tensor: local norms, sequential experts, MTP's old name."""
    config, wanted, megatron, also = opened(path)
    instead = {}
    for names in also.values():
        first = [name for name in names if name in megatron]
        last = [name for name in names if ".local_experts." not in name][-1]
        if first and not re.search(r"\d$", first[0]):
            instead[first[0]] = last
    renamed = {instead.get(name, name): tensor for name, tensor in megatron.items()}
    write_ranks(tmp_path, {(0,): renamed}, {"swiglu": config["model_type"] not in UNGATED}, config)
    merged(tmp_path)
    assert_holds(tmp_path / "out", wanted)


# ------------------------------------------------------- families that neither project has: Megatron's side by hand


def by_group(*parts: torch.Tensor, groups: int) -> torch.Tensor:
    """Rows of queries, keys and values, group by group."""
    return torch.cat([part.chunk(groups)[group] for group in range(groups) for part in parts])


def separate(hf: Tensors, at: str, leaf: str) -> torch.Tensor:
    return by_group(*(hf[f"{at}.self_attn.{x}_proj.{leaf}"] for x in "qkv"), groups=2)


def llama_like(hf: Tensors, at: str) -> Tensors:
    """What the layers with Llama's names share."""
    return {
        "self_attention.linear_proj.weight": hf[f"{at}.self_attn.o_proj.weight"],
        "mlp.linear_fc2.weight": hf[f"{at}.mlp.down_proj.weight"],
        "self_attention.linear_qkv.layer_norm_weight": hf[f"{at}.input_layernorm.weight"],
        "mlp.linear_fc1.layer_norm_weight": hf[f"{at}.post_attention_layernorm.weight"],
    }


def phi3(hf: Tensors, at: str) -> Tensors:
    q, k, v = hf[f"{at}.self_attn.qkv_proj.weight"].split([16, 8, 8])
    return llama_like(hf, at) | {
        "self_attention.linear_qkv.weight": by_group(q, k, v, groups=2),
        "mlp.linear_fc1.weight": hf[f"{at}.mlp.gate_up_proj.weight"],
    }


def seed_oss(hf: Tensors, at: str) -> Tensors:
    return llama_like(hf, at) | {
        "self_attention.linear_qkv.weight": separate(hf, at, "weight"),
        "self_attention.linear_qkv.bias": separate(hf, at, "bias"),
        "mlp.linear_fc1.weight": torch.cat([hf[f"{at}.mlp.{x}_proj.weight"] for x in ("gate", "up")]),
    }


def glm4(hf: Tensors, at: str) -> Tensors:
    return llama_like(hf, at) | {
        "self_attention.linear_qkv.weight": separate(hf, at, "weight"),
        "self_attention.linear_qkv.bias": separate(hf, at, "bias"),
        "mlp.linear_fc1.weight": hf[f"{at}.mlp.gate_up_proj.weight"],
        "post_self_attn_layernorm.weight": hf[f"{at}.post_self_attn_layernorm.weight"],
        "post_mlp_layernorm.weight": hf[f"{at}.post_mlp_layernorm.weight"],
    }


def gpt_neox(hf: Tensors, at: str) -> Tensors:
    """Each head's query, key and value stand together on both sides."""
    names = {
        "self_attention.linear_qkv.": "attention.query_key_value.",
        "self_attention.linear_proj.": "attention.dense.",
        "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
        "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
    }
    return {f"{here}{leaf}": hf[f"{at}.{there}{leaf}"] for here, there in names.items() for leaf in ("weight", "bias")}


def starcoder2(hf: Tensors, at: str) -> Tensors:
    """A bias wherever there is a weight."""
    names = {
        "self_attention.linear_proj.": "self_attn.o_proj.",
        "mlp.linear_fc1.": "mlp.c_fc.",
        "mlp.linear_fc2.": "mlp.c_proj.",
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
    }
    both = ("weight", "bias")
    made = {f"{here}{leaf}": hf[f"{at}.{there}{leaf}"] for here, there in names.items() for leaf in both}
    return made | {f"self_attention.linear_qkv.{leaf}": separate(hf, at, leaf) for leaf in both}


DERIVED = {"phi3": phi3, "seed_oss": seed_oss, "glm4": glm4, "gpt_neox": gpt_neox, "starcoder2": starcoder2}
"""Family -> what a layer of the repository (tensors, the layer's name) is below Megatron's `decoder.layers.N.`."""
ENDS = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "model.norm.bias": "decoder.final_layernorm.bias",
    "lm_head.weight": "output_layer.weight",
    "gpt_neox.embed_in.weight": "embedding.word_embeddings.weight",
    "gpt_neox.final_layer_norm.weight": "decoder.final_layernorm.weight",
    "gpt_neox.final_layer_norm.bias": "decoder.final_layernorm.bias",
    "embed_out.weight": "output_layer.weight",
}
"""What is no layer: names of the repository -> Megatron's."""


def derived(family: str) -> tuple[dict[str, Any], Tensors, Tensors]:
    config, wanted, _, _ = opened(FOLDER / f"{family}.transformers.json")
    made = {ENDS[name]: tensor for name, tensor in wanted.items() if ".layers." not in name}
    for layer in (0, 1):
        parts = DERIVED[family](wanted, f"{'gpt_neox' if family == 'gpt_neox' else 'model'}.layers.{layer}")
        made |= {f"decoder.layers.{layer}.{name}": tensor for name, tensor in parts.items()}
    return config, wanted, made


@pytest.mark.parametrize("layout", ["dist", "ranks"])
@pytest.mark.parametrize("family", DERIVED)
def test_a_family_of_no_bridge_is_the_model_again(family: str, layout: str, tmp_path: pathlib.Path) -> None:
    """Names and shapes of the repository are transformers' own."""
    config, wanted, megatron = derived(family)
    arguments = {"swiglu": family not in UNGATED, "tensor_model_parallel_size": 2}
    if family == "glm4":
        arguments |= {"rotary_interleaved": True, "rotary_percent": 0.5}
    if layout == "dist":
        write_dist(tmp_path, megatron, config, arguments)
    else:
        states = {
            (rank,): {name: rank_part(name, tensor, rank, config) for name, tensor in megatron.items()}
            for rank in (0, 1)
        }
        write_ranks(tmp_path, states, arguments, config)
    report = merge(tmp_path / "ckpt", tmp_path / "out", MergeOptions(base_model=str(tmp_path / "hf")))
    assert any("no Megatron checkpoint" in note for note in report.notes)
    assert_holds(tmp_path / "out", wanted)


def test_rotary_pairs_of_glm4_are_neighbours_on_both_sides(tmp_path: pathlib.Path) -> None:
    """Halves would have to be put in another order, which is not known for a part of a head."""
    config, _, megatron = derived("glm4")
    write_dist(tmp_path, megatron, config, {"rotary_interleaved": False})
    with pytest.raises(UnsupportedError, match="rotary pairs are halves, those of glm4 are neighbours"):
        merged(tmp_path)


def test_a_starcoder2_with_a_head_of_its_own_keeps_it(tmp_path: pathlib.Path) -> None:
    """NeMo ties nothing, whatever the config of the repository says: then both are written, and config.json told so."""
    config, wanted, megatron = derived("starcoder2")
    head = wanted["model.embed_tokens.weight"].flip(0)
    write_dist(tmp_path, megatron | {"output_layer.weight": head}, config)
    merged(tmp_path)
    assert_holds(tmp_path / "out", wanted | {"lm_head.weight": head})
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("told", [True, False])
def test_biases_of_a_starcoder2_are_as_its_config_says(told: bool, tmp_path: pathlib.Path) -> None:
    config, _, megatron = derived("starcoder2")
    left = {name: tensor for name, tensor in megatron.items() if not (told and name.endswith("linear_proj.bias"))}
    write_dist(tmp_path, left, config | {"use_bias": told})
    with pytest.raises(CheckpointError, match=rf"bias and \d+ more.* says use_bias {told}".lower()):
        merged(tmp_path)


def test_a_starcoder2_without_biases_keeps_those_of_its_norms(tmp_path: pathlib.Path) -> None:
    config, wanted, megatron = derived("starcoder2")
    left = {name: t for name, t in megatron.items() if "layer" in name.rsplit(".", 1)[-1] or not name.endswith(".bias")}
    left["decoder.final_layernorm.bias"] = megatron["decoder.final_layernorm.bias"]
    write_dist(tmp_path, left, config | {"use_bias": False})
    merged(tmp_path)
    assert_holds(tmp_path / "out", {n: t for n, t in wanted.items() if "norm" in n or not n.endswith(".bias")})


def test_the_table_of_the_docs_has_every_family() -> None:
    """And calls those derived by hand whose merge says so."""
    text = (pathlib.Path(__file__).parents[2] / "docs" / "architectures.md").read_text()
    rows = [line for line in text.split("## Megatron\n")[1].split("\n## ")[0].splitlines() if line.startswith("| ")][1:]
    told = {
        kind: "hand" in row.split("|")[2] for row in rows for kind in re.findall(r"`([a-z0-9_]+)`", row.split("|")[1])
    }
    assert told == {kind: not family.proof for kind, family in megatron_families().items()}
