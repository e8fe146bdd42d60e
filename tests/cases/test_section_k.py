"""Section K: the files beside the weights. The numbers are those of the collection of cases."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from merge_stream import cli
from tests.folder.models import checkpoint, config_of, llama, llama_config, merge, model_folder, tensors_of

GENERATION = '{\n  "eos_token_id": [151643,\t151645],\n  "temperature": 0.70,\n  "do_sample": true\n}'
PROCESSORS = {
    "preprocessor_config.json": '{"image_mean": [0.5,  0.5]}\n',
    "processor_config.json": "{ }",
    "video_preprocessor_config.json": '{"fps":2}',
    "chat_template.json": '{"chat_template": "old"}',
    "chat_template.jinja": "{% for m in messages %}\r\n{{ m }}{% endfor %}",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
}
CODE = {
    "modeling_x.py": "import sys\nsys.modules['merge_stream_ran_model_code'] = sys\nfrom .helper_x import y\n",
    "configuration_x.py": "raise RuntimeError('never imported')\n",
    "helper_x.py": "y = 1\n",
}


def test_case_129_generation_config_is_a_byte_copy(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "ckpt", llama(), llama_config(), {"generation_config.json": GENERATION})
    assert merge(source, tmp_path / "out", "--dtype", "fp32") == 0
    assert (tmp_path / "out" / "generation_config.json").read_bytes() == GENERATION.encode()


def test_case_129_from_the_base_where_the_checkpoint_has_none_and_never_made_up(tmp_path: Path) -> None:
    base = model_folder(tmp_path / "base", llama(), llama_config(), {"generation_config.json": GENERATION})
    source = checkpoint(tmp_path / "ckpt", llama(), llama_config())
    assert merge(source, tmp_path / "with_base", "--base-model", str(base)) == 0
    assert (tmp_path / "with_base" / "generation_config.json").read_bytes() == GENERATION.encode()
    assert merge(source, tmp_path / "alone") == 0
    assert not (tmp_path / "alone" / "generation_config.json").exists()


@pytest.mark.parametrize("origin", ["checkpoint", "base"])
def test_case_130_processors_and_templates_are_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], origin: str
) -> None:
    given = PROCESSORS | {"tokenizer.json": "{}", "LICENSE": "words", "NOTICE": "more", "USE_POLICY.md": "rules"}
    options: list[str] = []
    if origin == "base":
        base = model_folder(tmp_path / "base", llama(), llama_config(), given)
        options = ["--base-model", str(base)]
        source = checkpoint(tmp_path / "ckpt", llama())
    else:
        source = checkpoint(tmp_path / "ckpt", llama(), llama_config(), given)
    assert merge(source, tmp_path / "out", "--json", *options) == 0
    for name, text in given.items():
        with (tmp_path / "out" / name).open(newline="") as file:
            assert file.read() == text
    assert set(json.loads(capsys.readouterr().out)["side_files"]) == {*given, "config.json", "README.md"}


def test_case_130_a_processor_that_is_nowhere_is_told_before_the_merge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = llama_config(vision_config={"model_type": "x"}, model_type="llama")
    for name, files, wanted in (("bare", {}, True), ("whole", {"preprocessor_config.json": "{}"}, False)):
        assert cli.run(["plan", str(checkpoint(tmp_path / name, llama(), config, files)), "--json"]) == 0
        notes = json.loads(capsys.readouterr().out)["notes"]
        assert any("no preprocessor_config.json" in note for note in notes) is wanted


def test_case_131_code_is_copied_and_never_run(tmp_path: Path) -> None:
    config = llama_config(auto_map={"AutoModelForCausalLM": "modeling_x.X", "AutoConfig": "configuration_x.C"})
    source = checkpoint(tmp_path / "ckpt", llama(), config, CODE)
    assert merge(source, tmp_path / "out") == 0
    for name, text in CODE.items():
        assert (tmp_path / "out" / name).read_text() == text
    assert "merge_stream_ran_model_code" not in sys.modules
    assert config_of(tmp_path / "out") == config
    assert cli.run(["check", str(tmp_path / "out")]) == 0
    (tmp_path / "out" / "modeling_x.py").unlink()
    assert cli.run(["check", str(tmp_path / "out")]) == 3


def test_case_133_the_config_is_the_checkpoints_own(tmp_path: Path) -> None:
    base = model_folder(tmp_path / "base", llama(vocab=16), llama_config(vocab_size=16), {"tokenizer.json": "{}"})
    own = llama_config(vocab_size=20, rope_theta=5e6)
    source = checkpoint(tmp_path / "ckpt", llama(vocab=20), own)
    assert merge(source, tmp_path / "out", "--base-model", str(base)) == 0
    assert config_of(tmp_path / "out") == own
    assert tensors_of(tmp_path / "out")["model.embed_tokens.weight"].shape == (20, 8)


def test_case_133_a_config_that_does_not_fit_the_shapes_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoint(tmp_path / "ckpt", llama(vocab=20), llama_config(vocab_size=16))
    assert merge(source, tmp_path / "out") == 5
    told = capsys.readouterr().err
    assert "has 20 rows" in told
    assert "vocab_size 16" in told
    base = model_folder(tmp_path / "base", llama(), llama_config())
    source = checkpoint(tmp_path / "bare", llama(vocab=20))
    assert merge(source, tmp_path / "out", "--base-model", str(base)) == 5
    assert "vocab_size" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_nothing_stale_is_left_beside_the_model(tmp_path: Path) -> None:
    """Weights, indexes and leavings of trainers are never taken over, nor are those of an OUT that is replaced."""
    stale = {
        "model-00001-of-00009.safetensors": "x",
        "model.safetensors.index.json": "{}",
        "pytorch_model.bin": "x",
        "consolidated.safetensors": "x",
        "optimizer.pt": "x",
        "training_args.bin": "x",
        "trainer_state.json": "{}",
        ".gitattributes": "x",
    }
    source = checkpoint(tmp_path / "ckpt", llama(), llama_config(), stale | {"tokenizer.json": "{}"})
    assert merge(source, tmp_path / "out", "--max-shard-size", "600") == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert merge(source, tmp_path / "out", "--overwrite") == 0
    there = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert there == ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt", "out"]


def test_files_are_readable_as_the_umask_says(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "ckpt", llama(), llama_config(), {"tokenizer.json": "{}"})
    (source / "huggingface" / "tokenizer.json").chmod(0o600)
    assert merge(source, tmp_path / "out") == 0
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "out").iterdir()} == {0o644}
    assert all(torch.isfinite(t).all() for t in tensors_of(tmp_path / "out").values())
