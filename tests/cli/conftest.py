"""A small checkpoint, and the model that a merge makes of it."""

from __future__ import annotations

import pathlib
import shutil

import pytest
from torch.distributed.tensor import Shard

from tests.cli.tool import CONFIG, LLAMA, tool
from tests.makers.dtensor import Spread, write_ranks


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """`ckpt` (rank files of two ranks) and `model` (merged); not to be changed."""
    folder = tmp_path_factory.mktemp("made")
    spread = {name: Spread(tensor, [Shard(0)]) for name, tensor in LLAMA.items()}
    write_ranks(folder / "ckpt", (2,), spread, config=CONFIG)
    ended = tool("merge", folder / "ckpt", folder / "model", "-q")
    assert ended.code == 0, ended.err
    return folder


@pytest.fixture
def ckpt(made: pathlib.Path) -> pathlib.Path:
    """The checkpoint; not to be changed."""
    return made / "ckpt"


@pytest.fixture
def own_ckpt(made: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy to be damaged."""
    return pathlib.Path(shutil.copytree(made / "ckpt", tmp_path / "ckpt"))


@pytest.fixture
def own_model(made: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy to be damaged."""
    return pathlib.Path(shutil.copytree(made / "model", tmp_path / "model"))
