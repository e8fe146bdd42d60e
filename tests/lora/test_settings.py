"""`read_settings`: what each source says of an adapter, and what is refused."""

from __future__ import annotations

import json
import math
import pathlib
import re
from typing import Any

import pytest

from merge_stream.architectures.lora_settings import LoraSettings, read_settings
from merge_stream.errors import CorruptCheckpointError, UnsupportedError, UsageError

VERL = {"peft_type": "LORA", "r": 4, "lora_alpha": 0}
CONFIG, META = "adapter_config.json", "lora_train_meta.json"


def read(folder: pathlib.Path, alpha: float | None = None, **files: object) -> LoraSettings | None:
    beside = {}
    for key, value in files.items():
        name = {"config": CONFIG, "inner": f"lora_adapter/{CONFIG}", "meta": META}[key]
        (folder / key).write_text(value if isinstance(value, str) else json.dumps(value))
        beside[name] = str(folder / key)
    return read_settings(beside, alpha)


@pytest.mark.parametrize("source", ["--lora-alpha", META])
def test_only_alpha_comes_from_another_source(source: str, tmp_path: pathlib.Path) -> None:
    said = {
        **VERL,
        "use_rslora": True,
        "use_dora": True,
        "fan_in_fan_out": True,
        "rank_pattern": {"k_proj": 2},
        "alpha_pattern": {"v_proj": 32},
        "init_lora_weights": "pissa",
        "target_modules": ["q_proj"],
    }
    meta = {"meta": {"r": 4, "lora_alpha": 16}} if source == META else {}
    got = read(tmp_path, None if meta else 16, config=said, **meta)
    assert got is not None
    assert (got.scale("a.q_proj", 4), got.scale("a.v_proj", 4)) == (8.0, 16.0)
    assert (got.dora, got.fan_in_fan_out, got.changes_base, got.rank_of("a.k_proj")) == (True, True, True, 2)
    assert CONFIG in got.origin
    assert source in got.origin
    assert got.config is not None
    assert json.loads(got.config) == {**said, "lora_alpha": 16}


def test_files_that_say_different_things_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"says r 4, .*says r 8"):
        read(tmp_path, config=VERL, meta={"r": 8, "lora_alpha": 16})
    with pytest.raises(CorruptCheckpointError, match="use_rslora"):
        read(tmp_path, inner=VERL, config={**VERL, "lora_alpha": 16, "use_rslora": True})


@pytest.mark.parametrize("alpha", [math.nan, math.inf, -math.inf, 1e308, True])
def test_option_that_is_no_finite_number_is_refused(alpha: float, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match="--lora-alpha"):
        read(tmp_path, alpha)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e308", "1e999", "true", "false", '"16"', "9" * 400])
@pytest.mark.parametrize("text", ['{"r": 4, "lora_alpha": %s}', '{"lora_alpha": 8, "alpha_pattern": {"q_proj": %s}}'])
def test_alpha_of_a_file_that_is_no_finite_number_is_refused(text: str, value: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(CorruptCheckpointError, match="not a readable"):
        read(tmp_path, config=text % value)


@pytest.mark.parametrize("rank", ["true", "Infinity", "4.5", "NaN"])
def test_rank_that_is_no_whole_number_is_refused(rank: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(CorruptCheckpointError, match="not a readable"):
        read(tmp_path, config=f'{{"lora_alpha": 8, "r": {rank}}}')


NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.12.mlp.up_proj",
    "xq_proj",
    "q_proj",
    "model.self_attnXq_proj",
]


@pytest.mark.parametrize(
    "key",
    [
        "q_proj",
        "self_attn.q_proj",
        r"^model\.layers\.0\.self_attn\.q_proj",
        r".*\.layers\.(0|1|12)\.(self_attn|mlp)\.(q_proj|up_proj)",
        r"layers\.\d+\.(mlp\.)?up_proj",
        r"layers.[0-9]{1,2}.(?:.*\.)?q_proj",
        r"(?!.*vision).*q_proj",
        "[]|(]|q_proj",
    ],
)
def test_patterns_match_as_in_peft(key: str, tmp_path: pathlib.Path) -> None:
    got: Any = read(tmp_path, config={"lora_alpha": 8, "r": 4, "rank_pattern": {key: 2}})
    for name in NAMES:
        assert got.rank_of(name) == (2 if re.match(rf"(.*\.)?({key})$", name) else 4)


@pytest.mark.parametrize("pattern", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize(
    ("key", "error"),
    [
        ("(", CorruptCheckpointError),
        ("a)|(b", CorruptCheckpointError),
        ("[", CorruptCheckpointError),
        ("*", CorruptCheckpointError),
        ("\\", CorruptCheckpointError),
        ("(?i)Q", CorruptCheckpointError),
        ("(.*.*.*.*.*.*)*x", UnsupportedError),
        ("(a+)+x", UnsupportedError),
        ("((a|a))*x", UnsupportedError),
        ("(a?){30}x", UnsupportedError),
        ("a?" * 30 + "x", UnsupportedError),
        ("(a|a)" * 30 + "x", UnsupportedError),
        (".*.*.*.*x", UnsupportedError),
        ("(?x:(a*) *)", UnsupportedError),
        ("(?P<a>b)", UnsupportedError),
        ("a{99999}", UnsupportedError),
    ],
)
def test_patterns_that_are_wrong_or_endless_are_refused(
    pattern: str, key: str, error: type[Exception], tmp_path: pathlib.Path
) -> None:
    with pytest.raises(error, match="regular expression"):
        read(tmp_path, config={"lora_alpha": 8, "r": 4, pattern: {key: 2}})
