"""Section M: where the tool runs, and what it must not run. The numbers are those of the collection of cases."""

from __future__ import annotations

import argparse
import ast
import os
import pickle
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Shard

import merge_stream
from merge_stream import cli
from merge_stream.containers.pickle_reader import Recorder, read_pickle
from tests.cases.naive import assert_holds, merged, numbered
from tests.folder.models import checkpoint, llama, llama_config
from tests.makers.dtensor import Spread, write_bin, write_dcp, write_ranks

PLAIN = ("--no-config", "--layout", "as-is")
WEIGHT = numbered(6, 4)


def test_case_147_and_156_no_trainer_no_transformers_no_gpu_library_is_needed(tmp_path: Path) -> None:
    """None of them can be imported here: torch neither."""
    source = write_ranks(tmp_path / "ckpt", (2,), {"model.w": Spread(WEIGHT, [Shard(0)])})
    program = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'torch', 'transformers', 'megatron', 'transformer_engine', 'triton',\n"
        "            'apex', 'deepspeed', 'accelerate', 'peft', 'verl', 'colossalai', 'zarr', 'huggingface_hub'}:\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from merge_stream.__main__ import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", program, "merge", str(source), str(tmp_path / "out"), *PLAIN, "--dtype", "bf16"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, capture_output=True, check=False, text=True, timeout=60, env=env)
    assert ended.returncode == 0, ended.stderr
    assert_holds(tmp_path / "out", {"model.w": WEIGHT.bfloat16()})


def absent_class(monkeypatch: pytest.MonkeyPatch) -> bytes:
    module = types.ModuleType("a_trainer_that_is_not_here")
    made = type("Arguments", (), {"__module__": module.__name__, "__qualname__": "Arguments"})
    module.Arguments = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    args = made()
    args.__dict__.update(num_layers=28, hidden_size=4096, extra={"a": [1, 2]})
    data = pickle.dumps({"args": args, "iteration": 500})
    monkeypatch.delitem(sys.modules, module.__name__)
    return data


def test_case_148_records_of_unknown_classes_are_plain_data(monkeypatch: pytest.MonkeyPatch) -> None:
    read, _, _ = read_pickle(absent_class(monkeypatch), "common.pt")
    assert isinstance(read, dict)
    args = read["args"]
    assert isinstance(args, Recorder)
    assert args.dotted == "a_trainer_that_is_not_here.Arguments"
    assert args.state == {"num_layers": 28, "hidden_size": 4096, "extra": {"a": [1, 2]}}
    assert read["iteration"] == 500


@pytest.mark.parametrize(
    "beside",
    [
        argparse.Namespace(lr=1e-4, layers=[1, 2]),
        np.float64(0.5),
        np.arange(3),
        np.dtype("float32"),
        Path("relative/path"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_case_149_what_weights_only_refuses_is_read(tmp_path: Path, beside: object) -> None:
    """Beside the weights of a full state dict; nothing of it is called."""
    path = tmp_path / "ckpt" / "pytorch_model.bin"
    path.parent.mkdir()
    torch.save({"model": {"model.w": WEIGHT}, "args": beside}, path)
    assert cli.run(["merge", str(path.parent), str(tmp_path / "out"), *PLAIN, "--root", "model", "-q"]) == 0
    assert_holds(tmp_path / "out", {"model.w": WEIGHT})


@pytest.mark.parametrize("spelling", ["torch.distributed._tensor", "torch.distributed.tensor"])
def test_case_151_old_and_new_paths_of_dtensor(tmp_path: Path, spelling: str) -> None:
    """Files of torch 2.1 to 2.13 as they are: tests/formats/test_fsdp_ranks.py."""
    source = write_ranks(tmp_path / "ckpt", (2,), {"model.w": Spread(WEIGHT, [Shard(0)])})
    for path in source.glob("*.pt"):
        respelled(path, spelling)
    merged(source, tmp_path / "out")
    assert_holds(tmp_path / "out", {"model.w": WEIGHT})


def respelled(path: Path, spelling: str) -> None:
    """Write the zip anew with other module names in its pickle."""
    with zipfile.ZipFile(path) as old:
        records = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for name, data in records.items():
            new.writestr(name, data.replace(b"ctorch.distributed.tensor", f"c{spelling}".encode()))


def test_case_153_files_of_the_old_form(tmp_path: Path) -> None:
    tensors = {"model.w": WEIGHT, "model.b": numbered(3).bfloat16()}
    merged(write_bin(tmp_path / "ckpt" / "pytorch_model.bin", tensors, legacy=True), tmp_path / "out")
    assert_holds(tmp_path / "out", tensors)


class Payload:
    """Makes a file when it is unpickled by Python's own unpickler."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize("where", ["rank file", ".metadata", "pytorch_model.bin", "old form"])
def test_case_154_no_code_of_a_checkpoint_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str) -> None:
    marker, folder = tmp_path / "ran", tmp_path / "ckpt"
    if where == "rank file":
        write_ranks(folder, (1,), {"model.w": WEIGHT})
        torch.save({"model.w": WEIGHT, "x": Payload(marker)}, folder / "model_world_size_1_rank_0.pt")
    elif where == ".metadata":
        write_dcp(folder, 2, {"model.w": WEIGHT})
        (folder / ".metadata").write_bytes(pickle.dumps([Payload(marker)]))
    else:
        folder.mkdir()
        torch.save(
            {"model.w": WEIGHT, "x": Payload(marker)},
            folder / "pytorch_model.bin",
            _use_new_zipfile_serialization=where != "old form",
        )
    for command in ("inspect", "plan", "merge"):
        words = [str(tmp_path / "out")] if command != "inspect" else []
        more = PLAIN if command != "inspect" else ()
        assert cli.run([command, str(folder), *words, *more]) == 5
        assert "posix.mkdir" in capsys.readouterr().err
        assert not marker.exists()
        assert not (tmp_path / "out").exists()


def test_case_154_nothing_of_ours_loads_a_pickle() -> None:
    """Only the reader that runs nothing imports `pickle`, and nobody calls a loader of torch, numpy or joblib."""
    root = Path(merge_stream.__file__).parent
    loaders = {"load", "loads", "Unpickler"}
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in loaders and isinstance(node.value, ast.Name):
                allowed = node.value.id == "json" or path.name.startswith("pickle_")
                assert allowed or node.value.id not in {"pickle", "torch", "np", "numpy", "dill", "joblib"}, path


@pytest.mark.parametrize("device", ["cuda:3", "npu:0", "xpu", "hpu:1"])
def test_case_158_where_a_tensor_lived_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(torch.serialization, "location_tag", lambda _storage: device)
    tensors = llama()
    source = checkpoint(tmp_path / "ckpt", tensors, llama_config())
    assert cli.run(["merge", str(source), str(tmp_path / "out"), "-q"]) == 0
    assert_holds(tmp_path / "out", tensors)
