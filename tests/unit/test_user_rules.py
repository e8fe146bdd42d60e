"""A user's own table of names: what it makes, and every mistake in it told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from merge_stream import cli
from merge_stream.architectures.rules import convert
from merge_stream.architectures.user_rules import read_rules
from merge_stream.errors import UsageError
from tests.formats.naive import DATA

PIPELINE = """
[[rule]]
rename = "0.weight"
to = "model.embed_tokens.weight"

[[rule]]
rename = "3.weight"
to = "model.norm.weight"

[[rule]]
rename = "4.weight"
to = "lm_head.weight"

[[rule]]
rename = "{i}.{rest}"
to = "model.layers.{i-1}.{rest}"
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    return str(path)


def test_a_pipeline_gets_its_names_from_a_table(tmp_path: Path) -> None:
    case = DATA / "deepspeed" / "pp2_z0_w2"
    options = ["--rules", written(tmp_path, PIPELINE), "--no-config", "-q"]
    assert cli.run(["merge", str(case / "ckpt"), str(tmp_path / "out"), *options]) == 0
    wanted = load_file(case / "expected" / "model.safetensors")
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert wanted.keys() == got.keys()
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)


def test_every_kind_of_rule(tmp_path: Path) -> None:
    text = """
    [[rule]]
    concat = ["{at}.q", "{at}.k"]
    to = "{at}.qk"
    [[rule]]
    transpose = "{at}.turned"
    to = "{at}.straight"
    [[rule]]
    unstack = "{at}.stack"
    to = "{at}.{e}.single"
    [[rule]]
    split_experts = "{at}.experts"
    gate = "{at}.{e}.gate"
    up = "{at}.{e}.up"
    down = "{at}.{e}.down"
    [[rule]]
    drop = "{at}.gone"
    reason = "nobody needs it"
    [[rule]]
    rename = "a.{i}.{rest}"
    to = "layers.{i+1}.{rest}"
    """
    shapes = {
        "a.0.q": (4, 2), "a.0.k": (2, 2), "a.0.turned": (3, 5), "a.1.stack": (2, 3, 4), "a.1.gone": (1,),
        "b.experts.gate_up_proj": (1, 6, 2), "b.experts.down_proj": (1, 2, 3), "c": (7,),
    }  # fmt: skip
    converted = convert(read_rules(written(tmp_path, text)), shapes)
    assert converted.shapes == {
        "layers.1.qk": (6, 2), "layers.1.straight": (5, 3), "layers.2.0.single": (3, 4), "layers.2.1.single": (3, 4),
        "b.0.gate": (3, 2), "b.0.up": (3, 2), "b.0.down": (2, 3), "c": (7,),
    }  # fmt: skip
    assert converted.dropped == {"a.1.gone": "nobody needs it"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = [", "is no TOML"),
        ("x = 1", "must hold [[rule]] tables"),
        ("rule = 1", "must hold [[rule]] tables"),
        ("[[rule]]\nto = 'x'", "has none of rename"),
        ("[[rule]]\nrename = 'a'\ndrop = 'b'\nto = 'c'", "has rename, drop of"),
        ("[[rule]]\nrename = 'a'", "lacks 'to'"),
        ("[[rule]]\nrename = 'a'\nto = 'b'\naxis = 1", "has 'axis', which means nothing there"),
        ("[[rule]]\nrename = 'a'\nto = '{rest}'", "to has the hole {rest}"),
        ("[[rule]]\nrename = '{i-1}.a'\nto = '{i}.b'", "not in '{i-1}.a'"),
        ("[[rule]]\nrename = '{rest}.a'\nto = '{rest+1}.b'", "only {i} and {e} are numbers"),
        ("[[rule]]\nrename = '{i:[}.a'\nto = 'b'", "is no pattern"),
        ("[[rule]]\nrename = 3\nto = 'b'", "rename is 3"),
        ("[[rule]]\nconcat = ['a']\nto = 'b'", "concat is ['a']"),
        ("[[rule]]\ntranspose = 'a'\nto = 'b'\npermute = [0, 2]", "permute is [0, 2]"),
        ("rule = ['x']", "is no table"),
    ],
)
def test_mistakes_are_told_with_the_rule(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read_rules(path)
    assert words in caught.value.message
    assert path in caught.value.message
    assert caught.value.hint


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_rules(str(tmp_path / "none.toml"))


def test_a_number_below_zero_is_no_layer(tmp_path: Path) -> None:
    case = DATA / "deepspeed" / "pp2_z0_w2"
    path = written(tmp_path, "[[rule]]\nrename = '{i}.{rest}'\nto = 'model.layers.{i-1}.{rest}'")
    options = ["--rules", path, "--no-config", "-q"]
    assert cli.run(["merge", str(case / "ckpt"), str(tmp_path / "out"), *options]) == 5


def test_names_and_as_is_contradict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = DATA / "deepspeed" / "pp2_z0_w2"
    options = ["--rules", written(tmp_path, PIPELINE), "--no-config", "--layout", "as-is"]
    assert cli.run(["merge", str(case / "ckpt"), str(tmp_path / "out"), *options]) == 2
    assert "leave one of the two out" in capsys.readouterr().err
