"""Odd names, limits of the system, ranks that contradict each other: words, never a traceback."""

from __future__ import annotations

import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys

import pytest
import torch
from torch.distributed.tensor import Shard

from tests.cli.tool import Ended, listing, tool
from tests.makers.dtensor import Spread, write_hub, write_ranks

STRICT = {"PYTHONIOENCODING": "utf-8:strict"}
ODD = os.fsdecode(b"odd\xff\x1b[31m")
SHOWN = "odd\\xff\\x1b[31m"


class TestNamesThatAreNoText:
    @pytest.fixture
    def odd(self, ckpt: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
        """The checkpoint in a folder with such a name, with such a side file."""
        folder = tmp_path / ODD
        shutil.copytree(ckpt, folder)
        (folder / "huggingface" / f"{ODD}.txt").write_text("x")
        return folder

    @pytest.mark.parametrize(
        "words",
        [
            "inspect CKPT",
            "merge CKPT OUT",
            pytest.param("plan CKPT OUT", marks=pytest.mark.slow),
            pytest.param("verify MODEL --against CKPT", marks=pytest.mark.slow),
            pytest.param("check CKPT", marks=pytest.mark.slow),
        ],
    )
    def test_they_are_shown_escaped(
        self, made: pathlib.Path, odd: pathlib.Path, tmp_path: pathlib.Path, words: str
    ) -> None:
        places = {"CKPT": odd, "OUT": tmp_path / f"{ODD}-out", "MODEL": made / "model"}
        for more in ([], ["--json"]):
            ended = tool(*(places.get(w, w) for w in words.split()), *more, env=STRICT)
            assert ended.code in {0, 3}, ended
            assert "Traceback" not in ended.err
            assert "\x1b" not in ended.out + ended.err
            if more:
                assert json.loads(ended.out)
                assert "\\udc" not in ended.out
            else:
                assert SHOWN in ended.out
            shutil.rmtree(places["OUT"], ignore_errors=True)

    def test_the_side_file_keeps_its_name(self, odd: pathlib.Path, tmp_path: pathlib.Path) -> None:
        assert tool(odd, tmp_path / "out", "-q").code == 0
        assert f"{ODD}.txt" in os.listdir(tmp_path / "out")

    def test_in_errors(self, odd: pathlib.Path, tmp_path: pathlib.Path) -> None:
        (odd / "model_world_size_2_rank_1.pt").unlink()
        tool(odd, tmp_path / "out", env=STRICT).refused(5, SHOWN, "missing ranks 1")

    def test_a_source_file(self, tmp_path: pathlib.Path) -> None:
        """Its name enters the fingerprint; the same command continues."""
        torch.save({"w": torch.arange(6.0)}, tmp_path / f"{ODD}.pt")
        words = [tmp_path / f"{ODD}.pt", tmp_path / "out", "--no-config", "--layout", "as-is"]
        assert tool("plan", *words, env=STRICT).code == 0
        assert tool(*words, env=STRICT).code == 0


class TestEmptyNames:
    @pytest.mark.parametrize(
        "words",
        [
            "merge CKPT OUT --base-model EMPTY",
            "merge EMPTY OUT",
            "merge CKPT EMPTY",
            "merge CKPT OUT --input EMPTY",
            "inspect CKPT --root EMPTY",
            "verify OUT --against EMPTY",
            "push OUT EMPTY",
        ],
    )
    def test_they_are_usage_errors(self, ckpt: pathlib.Path, tmp_path: pathlib.Path, words: str) -> None:
        places = {"CKPT": str(ckpt), "OUT": str(tmp_path / "out"), "EMPTY": ""}
        tool(*(places.get(w, w) for w in words.split())).refused(2, "an empty name", "--help")
        assert listing(tmp_path) == []


class TestRanksThatContradictEachOther:
    def test_two_files_of_one_rank(self, own_ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
        shutil.copy(own_ckpt / "model_world_size_2_rank_1.pt", own_ckpt / "model_world_size_2_rank_01.pt")
        tool(own_ckpt, tmp_path / "out").refused(5, "two files of rank 1", "rank_01.pt", "rank_1.pt", "remove the one")

    def test_another_type_on_one_rank(self, tmp_path: pathlib.Path) -> None:
        """It is the type that is wrong: nothing is missing."""
        for name, dtype in (("a", torch.float32), ("b", torch.bfloat16)):
            write_ranks(tmp_path / name, (2,), {"w": Spread(torch.zeros(4, 4).to(dtype), [Shard(0)])})
        shutil.copy(tmp_path / "b" / "model_world_size_2_rank_1.pt", tmp_path / "a")
        ended = tool(tmp_path / "a", tmp_path / "out", "--no-config")
        ended.refused(5, "w is not the same tensor on all ranks", "F32 [4, 4]", "BF16 [4, 4]", "on ranks 1")
        assert "missing" not in ended.err


def test_more_dims_than_a_loader_takes(tmp_path: pathlib.Path) -> None:
    """Refused when planned, not when the model is written."""
    torch.save({"w": torch.zeros([1] * 69 + [3])}, tmp_path / "model.pt")
    for command in ("plan", "merge"):
        ended = tool(command, tmp_path / "model.pt", tmp_path / "out", "--no-config", "--layout", "as-is")
        ended.refused(1, "w has 70 dims", "more than 64", "reshape it")
    assert listing(tmp_path) == ["model.pt"]


class TestLimitOfTheAddressSpace:
    @staticmethod
    def limited(kib: int, *words: str | os.PathLike[str]) -> Ended:
        """A run under `ulimit -v`."""

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_AS, (kib << 10, kib << 10))

        command = [sys.executable, "-m", "merge_stream", *map(os.fspath, words)]
        ended = subprocess.run(command, capture_output=True, check=False, text=True, timeout=60, preexec_fn=limit)
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    @pytest.mark.parametrize(
        "kib", [40_000, 90_000, 130_000, *(pytest.param(n, marks=pytest.mark.slow) for n in (70_000, 110_000, 150_000))]
    )
    def test_too_small_is_told_as_what_it_is(self, ckpt: pathlib.Path, tmp_path: pathlib.Path, kib: int) -> None:
        """While packages are loaded, when threads start, when slabs are mapped."""
        ended = self.limited(kib, ckpt, tmp_path / "out", "-q", "--workers", "4")
        if ended.code:
            ended.refused(4, "memory" if "gave" in ended.err else "address space", "ulimit -v")
            shutil.rmtree(tmp_path / "out.partial", ignore_errors=True)
            assert listing(tmp_path) == []
        else:
            assert kib > 110_000

    def test_what_the_hint_names_is_enough(self, ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
        assert "400000 is enough" in self.limited(60_000, ckpt, tmp_path / "out").err
        assert self.limited(400_000, ckpt, tmp_path / "out", "--workers", "16").code == 0


class TestPlanOfAnInterruptedRun:
    @staticmethod
    def begun(ckpt: pathlib.Path, out: pathlib.Path, stop_at: str, *words: str) -> None:
        """A run that ends without a word where `stop_at` is called."""
        program = f"import sys, os, merge_stream.steps as a; a.{stop_at} = lambda *_, **__: os._exit(9); "
        program += "from merge_stream.cli import run; sys.exit(run(sys.argv[1:]))"
        command = [sys.executable, "-c", program, str(ckpt), str(out), "-q", *words]
        assert subprocess.run(command, check=False).returncode == 9

    @pytest.mark.slow
    def test_it_tells_that_the_merge_would_continue(self, ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
        out = tmp_path / "out"
        self.begun(ckpt, out, "finalize")
        before = listing(tmp_path)
        planned = tool("plan", ckpt, out, "--json").json
        assert planned["resumed_nbytes"] == 20_800
        assert (
            f"the run that began in {out}.partial is continued: 20.8 kB of 20.8 kB (100 %) are done"
            in tool("plan", ckpt, out).out
        )
        ended = tool("plan", ckpt, out, "--restart")
        assert f"the interrupted run in {out}.partial is thrown away (--restart)" in ended.out
        assert listing(tmp_path) == before
        ended = tool(ckpt, out)
        assert "note: continuing the run that began in" in ended.err
        assert "warning" not in ended.err
        assert tool("plan", ckpt, tmp_path / "other").out.splitlines()[1].endswith("other is made")

    def test_it_is_refused_where_the_merge_is(self, ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
        """Another run holds OUT."""
        import fcntl

        self.begun(ckpt, tmp_path / "out", "finalize")
        with (tmp_path / "out.partial" / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for command in ("plan", "merge"):
                tool(command, ckpt, tmp_path / "out").refused(1, "another merge-stream", "wait for it to end")

    @pytest.mark.slow
    def test_a_finished_model_that_waits_for_its_move(self, ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
        """Told, and left for the merge to do."""
        out = tmp_path / "out"
        program = "import sys, os, merge_stream.output.place as p; p._rename = lambda *_: os._exit(9); "
        program += "from merge_stream.cli import run; sys.exit(run(sys.argv[1:]))"
        assert subprocess.run([sys.executable, "-c", program, str(ckpt), str(out), "-q"], check=False).returncode == 9
        before = listing(tmp_path)
        assert "a merge only moves it into place" in tool("plan", ckpt, out).out
        assert "finished another model" in tool("plan", ckpt, out, "--dtype", "bf16").out
        assert listing(tmp_path) == before
        ended = tool(ckpt, out)
        assert ended.code == 0
        assert "note: an earlier run was ended" in ended.err

    @pytest.mark.slow
    def test_its_side_files_are_those_of_the_merge(self, ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
        for more in ([], ["--no-model-card", "--max-shard-size", "9kB"], ["--no-config"]):
            planned = tool("plan", ckpt, tmp_path / "out", "--json", *more).json
            merged = tool(ckpt, tmp_path / "out", "--json", *more).json
            assert planned["side_files"] == merged["side_files"]
            assert {*merged["side_files"], *merged["files"]} == set(os.listdir(tmp_path / "out"))
            shutil.rmtree(tmp_path / "out")


def test_a_replaced_model_that_cannot_be_removed_is_told(ckpt: pathlib.Path, own_model: pathlib.Path) -> None:
    """OUT is whole; what is left of the old one is named."""
    program = "import sys, shutil, merge_stream.output.place as p; real = shutil.rmtree\n"
    program += "def rmtree(path):\n    if path.endswith('.old'): raise PermissionError(13, 'Permission denied')\n"
    program += "    real(path)\np.shutil.rmtree = rmtree\nfrom merge_stream.cli import run; sys.exit(run(sys.argv[1:]))"
    command = [sys.executable, "-c", program, str(ckpt), str(own_model), "--overwrite"]
    ended = subprocess.run(command, capture_output=True, check=False, text=True)
    assert ended.returncode == 0, ended.stderr
    assert f"note: the replaced model {own_model}.old could not be removed (Permission denied)" in ended.stdout
    assert sorted(os.listdir(own_model.parent)) == ["model", "model.old"]


def test_numbers_that_json_cannot_say_are_words(tmp_path: pathlib.Path) -> None:
    values = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([0.0, 1.0])}
    wrong = {"a": torch.tensor([float("inf"), 0.0]), "b": torch.tensor([1.0, float("nan")])}
    one, two = write_hub(tmp_path / "one", values), write_hub(tmp_path / "two", wrong)
    ended = tool("verify", two, "--against", one, "--json")
    assert ended.code == 3

    def refuse(word: str) -> None:
        raise AssertionError(word)

    answer = json.loads(ended.out, parse_constant=refuse)
    found = {d["name"]: (d["max_abs"], d["max_rel"]) for d in answer["differences"]}
    assert found["a"] == ("Infinity", "Infinity")
    assert found["b"][0] == "Infinity"


def test_names_with_line_breaks_and_escapes_are_shown_escaped_and_told_exactly_in_json(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "a\nerror: all is lost\x1b[2J [red]"
    folder.mkdir()
    (folder / "notes\nhint: \x1b]0;title\x07.txt").touch()
    ended = tool("inspect", folder, "--json")
    assert ended.code == 5
    assert str(folder) in ended.json["error"]
    told = ended.err.splitlines()
    assert [line.split(":")[0] for line in told if not line.startswith("  ")] == ["error", "hint"]
    assert r"a\x0aerror: all is lost\x1b[2J [red]" in told[0]
    assert r"notes\x0ahint: \x1b]0;title\x07.txt" in told[0]
    assert not any(ord(c) < 32 for line in told for c in line)
