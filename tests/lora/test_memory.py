"""Folding stays within the projection, whatever the rank and the width of the matrix."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest
import torch
from safetensors.torch import save_file

from merge_stream.testing.memory import measure

LAYER = "base_model.model.model.layers.0.mlp.down_proj."


@pytest.mark.memory
@pytest.mark.parametrize(("rank", "dora", "max_mem"), [(8, False, "110M"), (512, False, "110M"), (64, True, "140M")])
def test_peak_stays_below_the_projection(rank: int, dora: bool, max_mem: str, tmp_path: pathlib.Path) -> None:
    ckpt, wide = tmp_path / "ckpt", 53248
    ckpt.mkdir()
    tensors = {
        f"{LAYER}base_layer.weight": torch.ones(256, wide, dtype=torch.bfloat16),
        f"{LAYER}lora_A.default.weight": torch.ones(rank, wide),
        f"{LAYER}lora_B.default.weight": torch.ones(256, rank),
    }
    if dora:
        tensors[f"{LAYER}lora_magnitude_vector.default.weight"] = torch.ones(256)
    save_file(tensors, ckpt / "model.safetensors")
    (ckpt / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": 16, "use_dora": dora}))
    tool = [sys.executable, "-m", "merge_stream", "merge", str(ckpt), str(tmp_path / "out")]
    run = measure(
        [*tool, "--no-config", "--layout", "as-is", "--lora", "merge", "--json", "--workers", "2", "--max-mem", max_mem]
    )
    assert run.returncode == 0, run.stderr
    memory = json.loads(run.stdout)["memory"]
    assert run.peak <= memory["projected"] <= memory["allowed"]
