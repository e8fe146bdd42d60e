"""Stacks of layers and experts are larger than the bound: only pieces of them are ever in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.makers.megatron_stack import Sizes, write_stacks
from tests.memory.test_triple import run


@pytest.mark.memory
@pytest.mark.slow
def test_a_stack_of_four_times_the_bound(tmp_path: Path) -> None:
    sizes = Sizes(layers=4, experts=32, inner=512, hidden=1024)
    assert sizes.largest_nbytes > 2.5 * 100e6
    tensors = write_stacks(tmp_path, sizes)
    words = ["merge", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--base-model", str(tmp_path / "hf")]
    found = run(tmp_path, *words, "--max-mem", "100M", "--json")
    found.assert_triple(100_000_000)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as out:
        fc1 = tensors["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
        fc2 = tensors["decoder.layers.mlp.experts.experts.linear_fc2.weight"]
        for layer, expert in ((0, 0), (1, 31), (3, 17)):
            at = f"model.layers.{layer}.mlp.experts.{expert}"
            assert torch.equal(out.get_tensor(f"{at}.gate_proj.weight"), fc1[layer, expert, :512])
            assert torch.equal(out.get_tensor(f"{at}.up_proj.weight"), fc1[layer, expert, 512:])
            assert torch.equal(out.get_tensor(f"{at}.down_proj.weight"), fc2[layer, expert])
