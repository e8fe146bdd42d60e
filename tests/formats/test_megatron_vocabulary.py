"""Case 79: rows of padding are cut off; rows of tokens never are, whatever config.json says."""

from __future__ import annotations

import pathlib

import pytest
import torch

from merge_stream.api import merge
from merge_stream.errors import CheckpointError
from merge_stream.options import MergeOptions
from merge_stream.report import Report
from tests.cases.naive import assert_holds
from tests.cases.test_section_g import arguments, cut, padded
from tests.makers.megatron_files import STEP, Llama, fused, llama, write_dist, write_ranks

SIZES = {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 16}


def merged(folder: pathlib.Path) -> Report:
    return merge(folder / "ckpt", folder / "out", MergeOptions(base_model=str(folder / "hf")))


@pytest.mark.parametrize("layout", ["dist", "ranks"])
def test_a_config_with_fewer_tokens_than_the_trainer_had_is_refused(layout: str, tmp_path: pathlib.Path) -> None:
    """The arguments say 100 tokens, padded to 128; a config of 99 would lose the last."""
    of = Llama(vocabulary=100)
    whole = padded(fused(llama(of), of), 128)
    told, config = arguments(of, vocab_size=100, **SIZES), of.config | {"vocab_size": 99}
    if layout == "dist":
        write_dist(tmp_path, whole, config, told)
    else:
        write_ranks(tmp_path, cut(whole, 2), told, config)
    with pytest.raises(CheckpointError, match=r"vocabulary of 100 tokens, .* says vocab_size 99"):
        merged(tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("rows", "config"), [(20_000, 10_000), (8293, 100)])
def test_rows_beyond_any_padding_are_no_padding(rows: int, config: int, tmp_path: pathlib.Path) -> None:
    """Half of the rows: that is another model's config, also where no arguments are left to tell."""
    of = Llama(vocabulary=rows, hidden=2, heads=1, groups=1, width=2, inner=2)
    write_dist(tmp_path, fused(llama(of), of), of.config | {"vocab_size": config})
    with pytest.raises(CheckpointError, match=f"has {rows} rows, but .* says vocab_size {config}"):
        merged(tmp_path)


def test_more_padding_than_the_arguments_ask_for_is_told(tmp_path: pathlib.Path) -> None:
    """An earlier run on more ranks padded it: 1024 rows for 1000 tokens, and 16 x 1 would give 1008."""
    of = Llama(vocabulary=1000)
    whole = padded(fused(llama(of), of), 1024)
    write_dist(tmp_path, whole, of.config, arguments(of, make_vocab_size_divisible_by=16, tensor_model_parallel_size=1))
    told = [note for note in merged(tmp_path).notes if "padding" in note]
    assert len(told) == 1
    assert "pad to a multiple of 16" in told[0]
    assert_holds(tmp_path / "out", llama(of))


@pytest.mark.parametrize(("ranks", "told"), [(1, True), (2, False)])
def test_the_multiple_is_read_from_run_config_yaml(ranks: int, told: bool, tmp_path: pathlib.Path) -> None:
    """Megatron-Bridge 0.6.2: 24 rows for 10 tokens are padding to 16 x 2, and more than to 8 x 1."""
    of = Llama(vocabulary=10)
    whole = {**fused(llama(of), of)}
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        whole[name] = torch.cat([whole[name], torch.full((14, of.hidden), 7.0)])
    write_dist(tmp_path, whole, of.config)
    text = f"model:\n  make_vocab_size_divisible_by: {8 * ranks}\n  tensor_model_parallel_size: {ranks}\n"
    (tmp_path / "ckpt" / STEP / "run_config.yaml").write_text(text)
    assert any("pad to a multiple of 8" in note for note in merged(tmp_path).notes) == told
    assert_holds(tmp_path / "out", llama(of))
