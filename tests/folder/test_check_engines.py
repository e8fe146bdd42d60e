"""`check` on keys of config.json that engines believe: each fault in a folder that has it and one that has not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from merge_stream.verification.check import check_folder
from tests.folder.models import llama, llama_config, model_folder

BIAS = "model.layers.0.mlp.gate.e_score_correction_bias"
RIGHT = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def told(tmp_path: Path, extra: dict[str, torch.Tensor], **config: Any) -> dict[str, str]:
    folder = model_folder(tmp_path / "out", llama() | extra, llama_config(**config))
    rules = {"router", "shared-expert", "head-bias"}
    return {f.rule: f"{f.severity} {f.text} {f.hint}" for f in check_folder(folder).findings if f.rule in rules}


@pytest.mark.parametrize("key", ["topk_method", "scoring_func"])
def test_a_correction_bias_wants_its_router(tmp_path: Path, key: str) -> None:
    bias = {BIAS: torch.ones(4)}
    assert not told(tmp_path / "right", bias, model_type="deepseek_v3", **RIGHT)
    assert not told(tmp_path / "none", {}, model_type="deepseek_v3")
    found = told(tmp_path / "wrong", bias, model_type="deepseek_v3", **{k: v for k, v in RIGHT.items() if k != key})
    assert f"error {key} is None" in found["router"]
    assert f'set "{key}": "{RIGHT[key]}"' in found["router"]


def test_a_left_over_shared_expert(tmp_path: Path) -> None:
    found = told(tmp_path / "wrong", {}, model_type="qwen3_moe", shared_expert_intermediate_size=64)
    assert "error shared_expert_intermediate_size is 64" in found["shared-expert"]
    assert not told(tmp_path / "right", {}, model_type="qwen3_moe", shared_expert_intermediate_size=0)


def test_the_bias_of_a_phimoe_head(tmp_path: Path) -> None:
    assert "warning" in told(tmp_path / "a", {"lm_head.bias": torch.ones(16)}, model_type="phimoe")["head-bias"]
    assert not told(tmp_path / "b", {}, model_type="phimoe")
