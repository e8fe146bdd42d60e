"""A small whole model in two rank files, and what a run of the tool makes of it in this process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from merge_stream import cli
from merge_stream.engine import memory
from tests.cases.naive import assert_holds
from tests.folder.models import llama, llama_config
from tests.makers.dtensor import Spread, write_ranks

VOCAB, HIDDEN = 1200, 64
CONFIG = llama_config(
    vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, torch_dtype="float32", num_attention_heads=4
)
WORDS = ("--max-shard-size", "300kB", "--max-mem", "8G")


@dataclasses.dataclass(frozen=True)
class Small:
    """The checkpoint `ckpt` of `tensors`; `merge` runs the tool on it."""

    ckpt: Path
    tensors: dict[str, torch.Tensor]

    def merge(self, out: Path, *words: str) -> int:
        """The exit code."""
        return cli.run(["merge", str(self.ckpt), str(out), *WORDS, *words])

    def assert_whole(self, out: Path) -> None:
        """OUT is the model, bit for bit, and nothing of the run is left beside it."""
        assert_holds(out, self.tensors)
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(self.tensors)
        assert json.loads((out / "config.json").read_text()) == CONFIG
        assert (out / "tokenizer.json").is_file()
        assert [p.name for p in out.parent.iterdir() if p.name.startswith(f"{out.name}.")] == []
        assert [p.name for p in out.iterdir() if p.name.startswith(".")] == []

    def assert_nothing_wrong(self, out: Path) -> None:
        """What a loader would take (config, index, all files it names) holds the right tensors, wherever it stands."""
        for folder in (out, Path(f"{out}.partial") / "model", out / ".merge-stream" / "model"):
            names = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
            if not {"config.json", "model.safetensors.index.json"} <= names:
                continue
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            if set(index["weight_map"].values()) <= names:
                assert_holds(folder, self.tensors)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """Not to be changed."""
    tensors = llama(vocab=VOCAB, hidden=HIDDEN, dtype=torch.float32)
    spread = {
        name: Spread(value, [Shard(k % 2 if value.ndim == 2 else 0)]) for k, (name, value) in enumerate(tensors.items())
    }
    ckpt = write_ranks(tmp_path_factory.mktemp("small") / "ckpt", (2,), spread, config=CONFIG)
    return Small(ckpt, tensors)


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of 32 kB, so that a small model has many."""
    monkeypatch.setattr(memory, "_SEGMENTS", (32 << 10, 16 << 10))


Reported = Callable[[], dict[str, Any]]


@pytest.fixture
def reported(capsys: pytest.CaptureFixture[str]) -> Iterator[Reported]:
    """The JSON report of the last run with --json."""

    def read() -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answer

    return iter([read]).__next__()
