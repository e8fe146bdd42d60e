"""Ten typical mistakes: each message says what is wrong, where, and what to do; nothing is left behind."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.cli.tool import as_mere_mortal, listing, tool
from tests.makers.dtensor import write_hub


def test_wrong_folder(made: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("x")
    ended = tool(tmp_path / "notes", tmp_path / "out").refused(5, str(tmp_path / "notes"), "it holds todo.txt")
    assert listing(tmp_path) == ["notes", "notes/todo.txt"]
    formats = ended.err[ended.err.index("hint: ") :].splitlines()[1:]  # one a line
    for name, word in (("fsdp", "model_world_size_"), ("dcp", ".metadata"), ("hugging_face", "safetensors")):
        assert any(line.split()[0] == name and word in line for line in formats), ended.err
    assert all(len(line) <= 130 for line in formats)
    ended = tool(tmp_path / "notes", tmp_path / "out", "--format", "dcp").refused(5, "is not a dcp checkpoint")
    assert [line.split()[0] for line in ended.err.splitlines()[-1:]] == ["dcp"]


def test_folder_that_is_not_there(tmp_path: pathlib.Path) -> None:
    tool(tmp_path / "nothing", tmp_path / "out").refused(5, f"{tmp_path / 'nothing'} is not there", "pass the folder")
    assert listing(tmp_path) == []


def test_the_huggingface_folder_instead_of_the_one_above(ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
    tool(ckpt / "huggingface", tmp_path / "out").refused(
        5, "config.json, tokenizer.json", "no weights", "one folder above", str(ckpt)
    )
    assert listing(tmp_path) == []


def test_parent_folder(ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """With one checkpoint below: taken and told. With two: listed, with a command that can be pasted."""
    run = tmp_path / "my run"
    shutil.copytree(ckpt, run / "global_step_10" / "actor")
    ended = tool(run, tmp_path / "out")
    assert ended.code == 0, ended.err
    assert "global_step_10/actor" in ended.out
    shutil.rmtree(tmp_path / "out")
    shutil.copytree(ckpt, run / "global_step_20" / "actor")
    ended = tool(run, tmp_path / "out").refused(5, "2 checkpoints", "global_step_10/actor", "global_step_20/actor")
    command = shlex.split(ended.err.splitlines()[-1])
    assert command[0] == "merge-stream"
    assert tool(*command[1:]).code == 0
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_missing_rank(own_ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (own_ckpt / "model_world_size_2_rank_1.pt").unlink()
    tool(own_ckpt, tmp_path / "out").refused(
        5, "model_world_size_2_rank_", str(own_ckpt), "have ranks 0, missing ranks 1", "--input"
    )
    assert os.listdir(tmp_path) == ["ckpt"]


@pytest.mark.parametrize(
    "keep", [pytest.param(0, marks=pytest.mark.slow), 10, pytest.param(2000, marks=pytest.mark.slow), -1]
)
def test_truncated_file(own_ckpt: pathlib.Path, tmp_path: pathlib.Path, keep: int) -> None:
    path = own_ckpt / "model_world_size_2_rank_1.pt"
    os.truncate(path, keep if keep >= 0 else path.stat().st_size + keep)
    tool(own_ckpt, tmp_path / "out").refused(5, str(path), "copy")
    assert os.listdir(tmp_path) == ["ckpt"]


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> pathlib.Path:
    """A file system of 256 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    return disk


@pytest.fixture
def unmounted(small_disk: pathlib.Path) -> object:
    yield small_disk
    subprocess.run(["umount", str(small_disk)], check=True)


def test_no_space(ckpt: pathlib.Path, tmp_path: pathlib.Path, unmounted: pathlib.Path) -> None:
    """Refused with both numbers before the first byte, by `plan` too."""
    source = write_hub(tmp_path / "source", {"w": _zeros(1_000_000)})
    for command in ("merge", "plan"):
        ended = tool(command, source, unmounted / "out", "--no-config", "--layout", "as-is")
        ended.refused(4, "262 kB free", "needs 4.0", "free some space")
    assert listing(unmounted) == []


@pytest.mark.parametrize("way", ["disk", "limit"])
def test_no_space_in_the_middle(tmp_path: pathlib.Path, request: pytest.FixtureRequest, way: str) -> None:
    """The disk fills up, or a limit of the process is met: resumable, no model appears, the message says why."""
    if way == "disk":
        folder = request.getfixturevalue("unmounted")
        before, words = [], ("free some space", "same command continues")
    else:
        folder = tmp_path / "limited"
        folder.mkdir()
        before, words = ["prlimit", "--fsize=200000"], ("ulimit -f", "same command continues")
    source = write_hub(tmp_path / "source", {"w": _zeros(1_000_000)})
    program = "import sys, merge_stream.steps as a; a.preflight = lambda *_: None; from merge_stream.cli import run; "
    command = [*before, sys.executable, "-c", program + "sys.exit(run(sys.argv[1:]))", "merge", str(source)]
    command += [str(folder / "out"), "--no-config", "--layout", "as-is"]
    ended = subprocess.run(command, capture_output=True, check=False, text=True, timeout=60)
    assert ended.returncode == 4, ended.stderr
    assert "Traceback" not in ended.stderr
    assert f"{folder / 'out'} could not be written" in ended.stderr
    for word in words:
        assert word in ended.stderr
    assert os.listdir(folder) == ["out.partial"]


def _zeros(count: int) -> object:
    import torch

    return torch.zeros(count)


def test_existing_out(ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("x")
    tool(ckpt, out).refused(1, f"{out} is there and holds 1 entr", "thesis.tex", "choose another OUT", "--overwrite")
    tool("plan", ckpt, out).refused(1, f"{out} is there")
    tool(ckpt, out, "--overwrite").refused(1, "would delete", "thesis.tex", "remove it yourself")
    assert listing(tmp_path) == ["out", "out/thesis.tex"]


def test_existing_model_is_replaced_on_request(ckpt: pathlib.Path, own_model: pathlib.Path) -> None:
    before = (own_model / "model.safetensors").read_bytes()
    (own_model / "model.safetensors").write_bytes(b"old")
    tool(ckpt, own_model).refused(1, "--overwrite")
    assert (own_model / "model.safetensors").read_bytes() == b"old"
    ended = tool(ckpt, own_model, "--overwrite")
    assert ended.code == 0, ended.err
    assert (own_model / "model.safetensors").read_bytes() == before
    assert os.listdir(own_model.parent) == ["model"]


def test_out_is_the_checkpoint(own_ckpt: pathlib.Path) -> None:
    before = listing(own_ckpt)
    tool(own_ckpt, own_ckpt).refused(2, "OUT is the input folder", "choose another folder")
    tool(own_ckpt, own_ckpt / "huggingface", "--overwrite").refused(2, "config and tokenizer", "choose another folder")
    tool(own_ckpt, own_ckpt.parent / "x.safetensors").refused(2, "OUT is a folder", "name a folder")
    assert listing(own_ckpt) == before


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--dtyp", "bf16"], "--dtype"),
        (["--max-memory", "1G"], "--max-mem"),
        (["--overwritte"], "--overwrite"),
        (["--max_shard_sise", "5GB"], "--max-shard-size"),
    ],
)
def test_typo_in_an_option(ckpt: pathlib.Path, tmp_path: pathlib.Path, words: list[str], meant: str) -> None:
    tool(ckpt, tmp_path / "out", *words).refused(2, meant, "merge-stream merge --help")
    assert listing(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--dtype", "bf17"], ["bf17", "'bf16'"]),
        (["--max-mem", "lots"], ["'lots' is not a size", "32G"]),
        (["--max-mem", "120%"], ["'120%' is not a share", "percentage"]),
        (["--max-shard-size", "5 pieces"], ["'5 pieces' is not a size", "5"]),
        (["--format", "fdsp"], ["no format 'fdsp'", "fsdp"]),
        (["--workers", "0"], ["--workers"]),
        (["--base-model", "nowhere"], ["nowhere is not there", "config.json"]),
    ],
)
def test_wrong_value_of_an_option(
    ckpt: pathlib.Path, tmp_path: pathlib.Path, words: list[str], parts: list[str]
) -> None:
    ended = tool(ckpt, tmp_path / "out", *words, cwd=tmp_path)
    assert ended.code in {2, 5}, ended
    ended.refused(ended.code, *parts)
    assert listing(tmp_path) == []


def test_too_small_max_mem(ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The message names a value, and that value works."""
    for command in ("merge", "plan"):
        ended = tool(command, ckpt, tmp_path / "out", "--max-mem", "10M").refused(
            4, "10.0 MB is too small", "--max-mem"
        )
    least = re.search(r"give --max-mem (\d+M) or more", ended.err)
    assert least is not None
    assert listing(tmp_path) == []
    assert tool(ckpt, tmp_path / "out", "--max-mem", least[1]).code == 0
    nearly = int(least[1].rstrip("M")) * 9 // 10
    tool("plan", ckpt, tmp_path / "other", "--max-mem", f"{nearly}M").refused(4, "too small")


@pytest.mark.parametrize("what", ["rank file", "folder", "config", "out"])
def test_unreadable(own_ckpt: pathlib.Path, tmp_path: pathlib.Path, what: str) -> None:
    place = tmp_path / "place"
    place.mkdir()
    path, mode = {
        "rank file": (own_ckpt / "model_world_size_2_rank_1.pt", 0),
        "folder": (own_ckpt, 0),
        "config": (own_ckpt / "huggingface" / "config.json", 0),
        "out": (place, 0o555),
    }[what]
    before = as_mere_mortal()
    if before and shutil.which(before[0]) is None:
        pytest.skip("root ignores file modes, and setpriv is not here")
    path.chmod(mode)
    try:
        ended = tool(own_ckpt, place / "out", before=before)
        ended.refused(ended.code, str(path), "write" if what == "out" else "permission")
    finally:
        path.chmod(0o755)
    assert ended.code in {1, 5}
    assert listing(place) == []


def test_empty_folder(tmp_path: pathlib.Path) -> None:
    (tmp_path / "empty").mkdir()
    tool(tmp_path / "empty", tmp_path / "out").refused(
        5, f"{tmp_path / 'empty'} is empty", "pass the folder that holds"
    )
    assert listing(tmp_path) == ["empty"]


def test_missing_config(own_ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Both ways out are named, and both work."""
    shutil.move(own_ckpt / "huggingface", tmp_path / "base")
    tool(own_ckpt, tmp_path / "out").refused(5, "no config.json", "--base-model DIR", "--no-config")
    assert tool(own_ckpt, tmp_path / "out", "--base-model", tmp_path / "base").code == 0
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert tool(own_ckpt, tmp_path / "bare", "--no-config").code == 0
    assert "config.json" not in os.listdir(tmp_path / "bare")


@pytest.mark.slow
def test_another_partial_folder(ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Begun with other options: refused by merge and plan with the difference, and --restart begins anew."""
    out = tmp_path / "out"
    stop = "import sys, merge_stream.steps as a; a.finalize = lambda *_, **__: sys.exit(9); "
    stop += "from merge_stream.cli import run; sys.exit(run(sys.argv[1:]))"
    begun = subprocess.run([sys.executable, "-c", stop, str(ckpt), str(out), "-q"], capture_output=True, check=False)
    assert begun.returncode == 9, begun.stderr
    for command in ("merge", "plan"):
        ended = tool(command, ckpt, out, "--dtype", "bf16")
        ended.refused(1, "out.partial belongs to another run", "--dtype was keep, now bf16", "--restart")
        assert tool(command, ckpt, out, "--dtype", "bf16", "--restart", "-q").code == 0
        if command == "merge":
            shutil.rmtree(out)
            subprocess.run([sys.executable, "-c", stop, str(ckpt), str(out), "-q"], capture_output=True, check=False)
