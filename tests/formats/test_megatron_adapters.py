"""Adapters alone that Megatron-Bridge saved: peft's names and rows, and the scale from run_config.yaml."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
from safetensors.torch import load_file

from merge_stream.api import merge
from merge_stream.errors import CheckpointError, MergeStreamError
from merge_stream.options import LoraChoice, MergeOptions
from tests.cases.naive import assert_holds, numbered
from tests.formats.test_megatron_layouts import base_weights, merged
from tests.makers.megatron_files import STEP, Llama, llama, write_dist

Tensors = dict[str, torch.Tensor]


def adapter(of: Llama) -> tuple[Tensors, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """A on Megatron's fused modules, and (A, B) of each module of the repository, cut by hand."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=generator).float()

    state: Tensors = {}
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    at, there = "decoder.layers.0", "model.layers.0"
    sizes = {"self_attention.linear_qkv": (32, 16), "self_attention.linear_proj": (16, 16), "mlp.linear_fc1": (16, 16)}
    for module, (rows, columns) in sizes.items():
        a, b = made(2, columns), made(rows, 2)
        state |= {f"{at}.{module}.adapter.linear_{x}.weight": t for x, t in (("in", a), ("out", b))}
        if "qkv" in module:  # rows of a group: q q k v, 4 each
            groups = b.reshape(2, 4, 4, 2)
            for x, part in (("q", groups[:, :2]), ("k", groups[:, 2]), ("v", groups[:, 3])):
                factors[f"{there}.self_attn.{x}_proj"] = (a, part.reshape(-1, 2))
        elif "proj" in module:
            factors[f"{there}.self_attn.o_proj"] = (a, b)
        else:
            factors |= {f"{there}.mlp.gate_proj": (a, b[:8]), f"{there}.mlp.up_proj": (a, b[8:])}
    assert of.hidden == 16
    return state, factors


@pytest.mark.parametrize("stacked", [False, True], ids=["layers", "stack of layers"])
def test_an_adapter_alone_is_folded_into_a_base_model(tmp_path: pathlib.Path, stacked: bool) -> None:
    """W + alpha / r * B @ A of each module of the repository, by torch."""
    of = Llama()
    state, factors = adapter(of)
    if stacked:
        state = {name.replace("layers.0.", "layers."): tensor[None] for name, tensor in state.items()}
    write_dist(tmp_path, state, of.config)
    base_weights(tmp_path, llama(of))
    report = merged(tmp_path, lora=LoraChoice(alpha=4), verify=True)
    assert any("3 adapters of Megatron-Bridge are 6 of llama" in note for note in report.notes)
    wanted = llama(of)
    for module, (a, b) in factors.items():
        wanted[f"{module}.weight"] += 4 / 2 * (b @ a)
    assert_holds(tmp_path / "out", wanted)


def test_an_adapter_alone_is_written_as_pefts(tmp_path: pathlib.Path) -> None:
    of = Llama()
    state, factors = adapter(of)
    write_dist(tmp_path, state, of.config)
    merged(tmp_path, lora=LoraChoice("keep", alpha=4))
    (path,) = (tmp_path / "out").rglob("adapter_model.safetensors")
    found = load_file(path)
    wanted = {}
    for module, pair in factors.items():
        wanted |= {f"base_model.model.{module}.lora_{x}.weight": t for x, t in zip("AB", pair, strict=True)}
    assert sorted(found) == sorted(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    config = json.loads((path.parent / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 4)


def test_the_scale_of_an_adapter_is_asked_for(tmp_path: pathlib.Path) -> None:
    of = Llama()
    write_dist(tmp_path, adapter(of)[0], of.config)
    base_weights(tmp_path, llama(of))
    with pytest.raises(CheckpointError, match="lora_alpha is nowhere beside them"):
        merged(tmp_path)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("decoder.layers.0.mlp.linear_fc1.adapter.adapter_up.linear_in.weight", (2, 16), "of a kind that is not known"),
        ("decoder.layers.0.mlp.experts.linear_fc1.adapter.linear_in.weight", (2, 16), "of a kind that is not known"),
        ("decoder.layers.0.mlp.linear_fc2.adapter.linear_in.weight", (2, 16), "linear_out.weight is missing"),
        ("decoder.layers.0.mlp.linear_fc1.weight", (16, 16), "and weights beside them"),
    ],
)
def test_other_adapters_are_refused(tmp_path: pathlib.Path, name: str, shape: tuple[int, ...], said: str) -> None:
    of = Llama()
    write_dist(tmp_path, adapter(of)[0] | {name: numbered(*shape)}, of.config)
    base_weights(tmp_path, llama(of))
    with pytest.raises(MergeStreamError, match=said) as caught:
        merged(tmp_path, lora=LoraChoice(alpha=4) if "beside" not in said else LoraChoice())
    assert caught.value.hint


# ------------------------------------------------------------------------------- the scale from run_config.yaml

RUN = """\
checkpoint:
  save: /results
  alpha: 99
model:
  alpha: 7
peft:
  _target_: megatron.bridge.peft.lora.LoRA
  a2a_experimental: false
  alpha: 4
  dim: 2
  dropout: 0.0
  lora_dtype: null
  target_modules:
  - linear_qkv
  - linear_proj
scheduler:
  alpha: 3
"""
"""As `yaml.safe_dump` writes it: keys in order of the alphabet, items of lists as far in as their key (PyYAML 6)."""


@pytest.mark.parametrize("given", ["", STEP], ids=["run", "iteration"])
def test_the_scale_is_read_from_run_config_yaml(given: str, tmp_path: pathlib.Path) -> None:
    of = Llama()
    state, factors = adapter(of)
    write_dist(tmp_path, state, of.config)
    (tmp_path / "ckpt" / STEP / "run_config.yaml").write_text(RUN)
    base_weights(tmp_path, llama(of))
    merge(tmp_path / "ckpt" / given, tmp_path / "out", MergeOptions(base_model=str(tmp_path / "hf")))
    wanted = llama(of)
    for module, (a, b) in factors.items():
        wanted[f"{module}.weight"] += 4 / 2 * (b @ a)
    assert_holds(tmp_path / "out", wanted)


@pytest.mark.parametrize(
    ("old", "new", "alpha", "said"),
    [
        ("  alpha: 4", "  alpha: 4", 8, "--lora-alpha 8 contradicts run_config.yaml, which says 4"),
        ("lora.LoRA", "dora.DoRA", None, "run_config.yaml says peft_type dora.DoRA"),
        ("  alpha: 4", "  alpha: many", None, "peft.alpha is 'many', wanted a number"),
        ("  alpha: 4\n", "", None, "lora_alpha is nowhere beside them"),
        (RUN[RUN.index("peft:") : RUN.index("sched")], "peft: null\n", None, "lora_alpha is nowhere beside them"),
        ("  dim: 2", "  dim: 16", None, "16"),
    ],
)
def test_what_run_config_yaml_says_is_never_guessed(
    old: str, new: str, alpha: float | None, said: str, tmp_path: pathlib.Path
) -> None:
    of = Llama()
    write_dist(tmp_path, adapter(of)[0], of.config)
    assert old in RUN
    (tmp_path / "ckpt" / STEP / "run_config.yaml").write_text(RUN.replace(old, new))
    base_weights(tmp_path, llama(of))
    with pytest.raises(MergeStreamError) as caught:
        merged(tmp_path, lora=LoraChoice(alpha=alpha))
    assert said in str(caught.value)
    assert caught.value.hint
    assert not (tmp_path / "out").exists()


def test_heads_of_another_config_are_refused(tmp_path: pathlib.Path) -> None:
    """The rows of B are as many, and would be cut at other heads."""
    of = Llama()
    write_dist(
        tmp_path, adapter(of)[0], of.config | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    )
    text = "model:\n  kv_channels: 4\n  num_attention_heads: 4\n  num_query_groups: 2\n"
    (tmp_path / "ckpt" / STEP / "run_config.yaml").write_text(text)
    with pytest.raises(
        CheckpointError, match="4 queries and 2 groups of 4 by the trainer's arguments, 2 queries and 1"
    ):
        merged(tmp_path, lora=LoraChoice("keep", alpha=4))
