"""A checkpoint of every element type and of shapes that are cut differently, and its store."""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.tool import CONFIG, LLAMA, tool

WIDE, TALL = "wide.weight", "tall.weight"


def tensors() -> dict[str, torch.Tensor]:
    """0-d, empty, small, and of several chunks in the first and in a further dim; all types that a model has."""
    generator = torch.Generator().manual_seed(7)
    made = {
        WIDE: torch.randn((3, 2_000_003), generator=generator).to(torch.bfloat16),
        TALL: torch.randn((1201, 511), generator=generator),
        "deep.weight": torch.randn((2, 700, 600), generator=generator).to(torch.float16),
        "scalar": torch.tensor(7.25, dtype=torch.bfloat16),
        "empty": torch.empty((0, 5)),
        "counts": torch.arange(11, dtype=torch.int64),
        "mask": torch.tensor([True, False, True]),
        "double": torch.randn((3, 3), generator=generator, dtype=torch.float64),
    }
    for name in ("float8_e4m3fn", "float8_e5m2", "uint8", "int8", "int16", "int32"):
        bits = torch.randint(-100, 100, (4, 6), generator=generator, dtype=torch.int8)
        made[name] = bits.view(getattr(torch, name)) if "8" in name else bits.to(getattr(torch, name))
    return made


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder of the tensors alone; not to be changed."""
    folder = tmp_path_factory.mktemp("plain")
    save_file(tensors(), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def plain_store(plain: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Their store; not to be changed."""
    store = tmp_path_factory.mktemp("stores") / "plain"
    ended = tool("stage", plain, store, "--layout", "as-is", "--no-config", "-q")
    assert ended.code == 0, ended.err
    return store


@pytest.fixture
def own_store(plain_store: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy to be damaged."""
    return pathlib.Path(shutil.copytree(plain_store, tmp_path / "store"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A whole small model with config and tokenizer; not to be changed."""
    folder = tmp_path_factory.mktemp("llama")
    save_file(LLAMA, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder
