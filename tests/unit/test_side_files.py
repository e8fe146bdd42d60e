"""Files beside the weights: all that belong to the model, byte for byte, and nothing else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from merge_stream.errors import SourceChangedError
from merge_stream.output.side_files import SidePlan, copy_side_files, list_folder, plan_side_files


def folder(path: Path, *names: str, text: str = "") -> Path:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text or f"content of {name}")
    return path


def plan_of(checkpoint: Path, base: Path | None = None) -> SidePlan:
    return plan_side_files([list_folder(str(checkpoint))], list_folder(str(base)) if base else None)


def names(plan: SidePlan) -> set[str]:
    return {file.name for file in plan.files}


KEPT = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "modeling_custom.py",
    "configuration_custom.py",
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
    "USE_POLICY.md",
    "README.md",
    "1_Pooling/config.json",
]

LEFT = [
    "config.json",
    "pytorch_model.bin",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "consolidated.00.pth",
    "consolidated.safetensors",
    "params.json",
    "model.gguf",
    "model.onnx",
    "training_args.bin",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state_0.pth",
    "trainer_state.json",
    "model_world_size_4_rank_0.pt",
    "fsdp_config.json",
    "lora_train_meta.json",
    "__0_0.distcp",
    ".metadata",
    ".gitattributes",
    ".git/config",
    "original/params.json",
    "original/tokenizer.model",
    "latest_checkpointed_iteration.txt",
    "zero_to_fp32.py",
    "adapter_config.json",
    "lora_adapter/adapter_config.json",
    "events.out.tfevents.1",
]


def test_cases_129_130_131_model_files_are_kept_and_the_rest_is_left(tmp_path: Path) -> None:
    assert names(plan_of(folder(tmp_path, *KEPT, *LEFT))) == set(KEPT)


def test_case_129_copies_are_byte_equal(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", *KEPT)
    (source / "generation_config.json").write_bytes(b'{"eos_token_id": [151643, 151645]}\r\n\xff')
    (source / "big.txt").write_bytes(os.urandom(3_000_001))
    into = tmp_path / "out"
    into.mkdir()
    copied = copy_side_files(plan_of(source), str(into))
    assert set(copied) == {*KEPT, "big.txt"}
    for name in copied:
        assert (into / name).read_bytes() == (source / name).read_bytes()


def test_modes_are_those_of_the_umask(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", "tokenizer.json")
    (source / "tokenizer.json").chmod(0o600)
    (tmp_path / "out").mkdir()
    before = os.umask(0o027)
    try:
        copy_side_files(plan_of(source), str(tmp_path / "out"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out/tokenizer.json").stat().st_mode) == 0o640


def test_links_to_files_are_followed_and_to_folders_not(tmp_path: Path) -> None:
    blobs = folder(tmp_path / "models--a--b/blobs", "abc", text="the tokenizer")
    secret = folder(tmp_path / "secret", "key.txt")
    snapshot = tmp_path / "models--a--b/snapshots/main"
    snapshot.mkdir(parents=True)
    (snapshot / "NOTICE").symlink_to(secret / "key.txt")  # would carry any file of the user's to the Hub
    (snapshot / "tokenizer.json").symlink_to(blobs / "abc")
    (snapshot / "additional_chat_templates").symlink_to(tmp_path / "secret")
    (snapshot / "gone.json").symlink_to(tmp_path / "nowhere")
    os.mkfifo(snapshot / "pipe.json")
    plan = plan_of(snapshot)
    assert names(plan) == {"tokenizer.json"}
    (tmp_path / "out").mkdir()
    copy_side_files(plan, str(tmp_path / "out"))
    assert not (tmp_path / "out/tokenizer.json").is_symlink()
    assert (tmp_path / "out/tokenizer.json").read_text() == "the tokenizer"


def test_case_133_checkpoint_first_and_what_it_lacks_from_the_base(tmp_path: Path) -> None:
    own = folder(tmp_path / "own", "generation_config.json", "processor_config.json", text="own")
    base = folder(tmp_path / "base", "generation_config.json", "tokenizer.json", "LICENSE", "README.md", text="base")
    plan = plan_of(own, base)
    assert {f.name: f.origin for f in plan.files} == {
        "generation_config.json": "checkpoint",
        "processor_config.json": "checkpoint",
        "tokenizer.json": "base model",
        "LICENSE": "base model",
    }
    assert "LICENSE, tokenizer.json" in plan.notes[0]


def test_tokenizers_are_never_mixed(tmp_path: Path) -> None:
    own = folder(tmp_path / "own", "tokenizer.json", "tokenizer_config.json")
    base = folder(tmp_path / "base", "vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja", "LICENSE")
    assert names(plan_of(own, base)) == {"tokenizer.json", "tokenizer_config.json", "LICENSE"}


def test_a_template_alone_is_no_tokenizer(tmp_path: Path) -> None:
    own = folder(tmp_path / "own", "chat_template.jinja", text="own")
    base = folder(tmp_path / "base", "tokenizer.json", "chat_template.jinja", text="base")
    plan = plan_of(own, base)
    assert {f.name: f.origin for f in plan.files} == {
        "chat_template.jinja": "checkpoint",
        "tokenizer.json": "base model",
    }


def test_settings_of_quantized_weights_only_go_with_them(tmp_path: Path) -> None:
    plan = plan_of(folder(tmp_path, "hf_quant_config.json", "tokenizer.json"))
    assert names(plan) == {"tokenizer.json"}
    assert names(plan.for_quantized()) == {"tokenizer.json", "hf_quant_config.json"}


def test_what_is_too_large_is_left_out_and_told(tmp_path: Path) -> None:
    folder(tmp_path, "tokenizer.json")
    with open(tmp_path / "corpus.txt", "wb") as file:
        file.truncate(300_000_000)
    plan = plan_of(tmp_path)
    assert names(plan) == {"tokenizer.json"}
    assert "corpus.txt" in plan.notes[0]
    assert "300 MB" in plan.notes[0]


def test_a_file_that_changed_since_the_plan_is_an_error(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", "tokenizer.json")
    plan = plan_of(source)
    (source / "tokenizer.json").write_text("longer than it was when planned")
    (tmp_path / "out").mkdir()
    with pytest.raises(SourceChangedError, match=r"tokenizer\.json"):
        copy_side_files(plan, str(tmp_path / "out"))
