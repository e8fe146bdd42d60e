"""Commands, options, output channels and exit codes."""

from __future__ import annotations

import json
import os
import pathlib
import pty
import re
import resource
import shutil
import subprocess
import sys
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Replicate, Shard

from merge_stream.engine.joint_reads import SEEK
from tests.cli.tool import CONFIG, LLAMA, listing, tool
from tests.makers.dtensor import Spread, write_ranks

COMMANDS = ("merge", "inspect", "plan", "verify", "test")
OPTIONS = {
    "merge": "--input --format --root --mesh-dim-names --tp-first --base-model --dtype --layout --max-shard-size "
    "--no-config --check-replicas --strict --max-mem --workers --verify --overwrite --restart --json --quiet",
    "inspect": "--input --format --root --mesh-dim-names --tp-first --tensors --base-model --json",
    "plan": "--input --base-model --dtype --layout --max-shard-size --no-config --max-mem --workers --verify "
    "--overwrite --restart --json",
    "verify": "--against --atol --rtol --max-mem --workers --base-model --json --quiet",
}


class TestHelp:
    def test_the_commands_are_listed(self) -> None:
        ended = tool("--help")
        assert ended.code == 0
        for command in COMMANDS:
            assert re.search(rf"^  {command} ", ended.out, re.MULTILINE)
        assert "`merge-stream CKPT OUT` is short for" in ended.out
        assert ended.err == ""

    @pytest.mark.parametrize("command", OPTIONS)
    def test_the_options_are_explained(self, command: str) -> None:
        ended = tool(command, "-h")
        assert ended.code == 0
        for option in OPTIONS[command].split():
            assert re.search(rf"^  .*{option}\b", ended.out, re.MULTILINE), option
        assert "local-dir" not in ended.out, "verl's spellings are not advertised"

    def test_verls_own_command_shows_verls_options(self) -> None:
        ended = tool("test", "--help")
        for option in ("--backend NAME", "--local-dir CKPT", "--test-hf-dir REF", "--trust-remote-code"):
            assert re.search(rf"^  {option}\b", ended.out, re.MULTILINE), option
        assert "--target-dir" not in ended.out

    def test_without_arguments_the_help_is_shown(self) -> None:
        ended = tool()
        assert ended.code == 2
        assert ended.out == ""
        assert ended.err.startswith("Usage: merge-stream")

    def test_version(self) -> None:
        import merge_stream

        assert merge_stream.__version__ in tool("--version").out

    @pytest.mark.parametrize("words", [["--help"], ["inspect", "CKPT"], ["inspect", "CKPT", "--json"]], ids=" ".join)
    def test_start_is_quick_and_without_heavy_imports(
        self, ckpt: pathlib.Path, tmp_path: pathlib.Path, words: list[str]
    ) -> None:
        """Less than half a second of CPU; the best of a few, as the machine may be busy.

        As from the second start on: with the byte code of modules kept, wherever this process keeps its own.
        """
        kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        kept["PYTHONPYCACHEPREFIX"] = str(tmp_path)
        program = "import sys; from merge_stream.cli import run; code = run(sys.argv[1:]); "
        program += "print(sorted(m for m in ('torch', 'zarr', 'rich', 'safetensors') if m in sys.modules), "
        program += "file=sys.stderr); sys.exit(code)"
        command = [sys.executable, "-c", program, *(str(ckpt) if w == "CKPT" else w for w in words)]
        best = 1e9
        for _ in range(10):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            ended = subprocess.run(command, capture_output=True, check=True, text=True, env=kept)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            assert ended.stderr.splitlines()[-1] == "[]"
            if best < 0.5:
                break
        assert best < 0.5

    def test_a_merge_imports_no_torch(self, ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
        program = "import sys; from merge_stream.cli import run; code = run(sys.argv[1:]); "
        program += "sys.exit(code or sorted(m for m in ('torch', 'zarr') if m in sys.modules) or 0)"
        for dtype in ("keep", "bf16", "fp16"):
            words = ["merge", str(ckpt), str(tmp_path / dtype), "--dtype", dtype, "--verify", "-q"]
            subprocess.run([sys.executable, "-c", program, *words], check=True, timeout=60)


class TestWords:
    @pytest.mark.parametrize(
        "words",
        [
            "CKPT OUT --dtype bf16",
            "--dtype bf16 CKPT OUT",
            "-q --max-mem 6G merge CKPT --dtype bf16 OUT",
            *(
                pytest.param(words, marks=pytest.mark.slow)
                for words in (
                    "CKPT --dtype=bf16 OUT",
                    "merge CKPT OUT --dtype bf16",
                    "merge --dtype bf16 CKPT OUT",
                    "--dtype bf16 merge CKPT OUT",
                    "--max_mem 6G CKPT OUT --dtype bf16",
                    "--input CKPT --dtype bf16 OUT",
                    "--dtype bf16 -- CKPT OUT",
                )
            ),
        ],
    )
    def test_options_stand_anywhere(self, ckpt: pathlib.Path, tmp_path: pathlib.Path, words: str) -> None:
        places = {"CKPT": str(ckpt), "OUT": str(tmp_path / "out")}
        ended = tool(*(places.get(w, w) for w in words.split()))
        assert ended.code == 0, ended.err
        assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16

    @pytest.mark.parametrize(("word", "meant"), [("inspct", "inspect"), ("mrge", "merge"), ("verfy", "verify")])
    def test_a_typo_in_a_command_gets_a_suggestion(
        self, ckpt: pathlib.Path, tmp_path: pathlib.Path, word: str, meant: str
    ) -> None:
        for words in ([word, ckpt], [word, ckpt, tmp_path / "out"], ["-q", word, ckpt]):
            tool(*words).refused(2, f"no command `{word}`", f"did you mean `merge-stream {meant}`")
        assert listing(tmp_path) == []

    def test_a_folder_with_the_name_of_a_typo_is_a_checkpoint(self, own_ckpt: pathlib.Path) -> None:
        own_ckpt.rename(own_ckpt.parent / "tests")
        assert tool("tests", "out", cwd=own_ckpt.parent).code == 0

    @pytest.mark.parametrize(
        "words", [["CKPT"], ["merge"], ["merge", "CKPT"], ["CKPT", "a", "b"], ["plan"], ["inspect"]]
    )
    def test_a_wrong_number_of_paths_is_a_usage_error(
        self, ckpt: pathlib.Path, tmp_path: pathlib.Path, words: list[str]
    ) -> None:
        ended = tool(*(str(ckpt) if w == "CKPT" else w for w in words), cwd=tmp_path)
        assert ended.code == 2
        assert "error: " in ended.err
        assert "Traceback" not in ended.err
        assert listing(tmp_path) == []

    def test_verify_needs_a_reference(self, made: pathlib.Path) -> None:
        tool("verify", made / "model").refused(2, "--against", "merge-stream verify --help")


class TestChannels:
    def test_results_on_stdout_the_rest_on_stderr(self, ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
        ended = tool(ckpt, tmp_path / "out")
        assert f"wrote {tmp_path / 'out'}" in ended.out
        assert "peak memory" in ended.out
        assert ended.err.splitlines() == ["reading metadata", ended.err.splitlines()[1], "finishing"]
        assert re.fullmatch(r"merging: [\d.]+ kB", ended.err.splitlines()[1])

    def test_quiet(self, ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
        ended = tool(ckpt, tmp_path / "out", "-q")
        assert (ended.code, ended.out, ended.err) == (0, "", "")
        ended = tool(ckpt, tmp_path / "out", "-q")
        assert ended.err.startswith("error: ")

    def test_json_of_each_command(self, ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
        out = tmp_path / "out"
        planned = tool("plan", ckpt, out, "--json").json
        merged = tool("merge", ckpt, out, "--json").json
        inspected = tool("inspect", ckpt, "--json").json
        verified = tool("verify", out, "--against", ckpt, "--json").json
        assert all(answer["ok"] is True for answer in (planned, merged, inspected, verified))
        assert inspected["format"] == merged["format"] == planned["format"] == "fsdp"
        assert inspected["tensor_count"] == merged["tensors"] == verified["tensors"] == len(LLAMA)
        assert inspected["tensors"]["model.norm.weight"] == ["F32", [16], 2]

    @pytest.mark.parametrize(
        ("words", "code"),
        [
            (["merge", "CKPT", "OUT", "--dtyp", "bf16"], 2),
            (["merge", "CKPT"], 2),
            (["merge", "CKPT", "OUT", "--max-mem", "10M"], 4),
            (["merge", "nothing", "OUT"], 5),
            (["merge", "CKPT", "."], 1),
            (["inspect", "nothing"], 5),
            (["plan", "CKPT", "."], 1),
            (["verify", "nothing", "--against", "CKPT"], 5),
            (["mrge", "CKPT", "OUT"], 2),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
    )
    def test_json_of_errors(self, ckpt: pathlib.Path, tmp_path: pathlib.Path, words: list[str], code: int) -> None:
        """One object on stdout, the same words on stderr."""
        (tmp_path / "here").mkdir()
        (tmp_path / "here" / "file").write_text("x")
        places = {"CKPT": str(ckpt), "OUT": str(tmp_path / "out")}
        ended = tool(*(places.get(w, w) for w in words), "--json", cwd=tmp_path / "here")
        assert ended.code == code
        answer = ended.json
        assert (answer["ok"], answer["exit_code"]) == (False, code)
        assert f"error: {answer['error']}\n" in ended.err

    def test_a_bug_is_one_json_object_too(self, ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
        program = "import sys, merge_stream.api as a; a.merge = lambda *_, **__: 1 / 0; "
        program += "from merge_stream.cli import run; sys.exit(run(sys.argv[1:]))"
        command = [sys.executable, "-c", program, str(ckpt), str(tmp_path / "out"), "--json"]
        ended = subprocess.run(command, capture_output=True, check=False, text=True)
        assert ended.returncode == 1
        assert json.loads(ended.stdout)["ok"] is False
        assert "ZeroDivisionError" in ended.stderr
        assert "report" in ended.stderr

    def test_a_closed_pipe_is_no_traceback(self, ckpt: pathlib.Path) -> None:
        command = f"{sys.executable} -m merge_stream inspect {ckpt} --tensors | true"
        ended = subprocess.run(command, shell=True, capture_output=True, check=False, text=True)  # noqa: S602
        assert "Traceback" not in ended.stderr


class TestTerminal:
    @staticmethod
    def shown(words: list[str], **environment: str) -> tuple[int, str]:
        """(exit code, what a terminal shows)."""
        leader, follower = pty.openpty()
        text: list[bytes] = []

        def drain() -> None:
            try:
                while data := os.read(leader, 4096):
                    text.append(data)
            except OSError:
                pass

        reader = threading.Thread(target=drain)
        reader.start()
        inherited = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "TERM"}}
        ended = subprocess.run(
            [sys.executable, "-m", "merge_stream", *words],
            stdout=follower,
            stderr=follower,
            check=False,
            timeout=60,
            env={**inherited, "TERM": "xterm-256color", "COLUMNS": "130", **environment},
        )
        os.close(follower)
        reader.join()
        os.close(leader)
        return ended.returncode, b"".join(text).decode()

    def test_a_bar_with_bytes_rate_and_memory(self, ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
        code, text = self.shown([str(ckpt), str(tmp_path / "out"), "--max-mem", "300M"])
        assert code == 0
        assert "\x1b[" in text
        assert re.search(r"merging .*/s.*left.*memory .* of 300 MB", text)

    def test_no_color(self, ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
        code, text = self.shown([str(ckpt), str(tmp_path / "out")], NO_COLOR="1")
        assert code == 0
        assert not re.search(r"\x1b\[[\d;]*3\dm", text), "a colour"
        assert "merging" in text

    def test_a_dumb_terminal_gets_plain_lines(self, ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
        code, text = self.shown([str(ckpt), str(tmp_path / "out")], TERM="dumb")
        assert code == 0
        assert "\x1b" not in text

    def test_quiet(self, ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
        assert self.shown([str(ckpt), str(tmp_path / "out"), "-q"]) == (0, "")


class TestInspect:
    def test_what_it_tells(self, ckpt: pathlib.Path) -> None:
        ended = tool("inspect", ckpt)
        assert ended.code == 0
        for part in ("format      fsdp", "21 F32", "elements", "huggingface"):
            assert part in ended.out, part
        assert "lm_head.weight" not in ended.out
        assert "lm_head.weight  F32 [40, 16]  2 shards" in tool("inspect", ckpt, "--tensors").out

    def test_a_model_too(self, made: pathlib.Path) -> None:
        assert tool("inspect", made / "model", "--json").json["format"] == "hugging_face"


class TestPlan:
    @pytest.mark.parametrize(
        "more",
        [
            pytest.param([], marks=pytest.mark.slow),
            pytest.param(["--dtype", "bf16"], marks=pytest.mark.slow),
            ["--dtype", "fp16", "--max-shard-size", "10KB"],
        ],
    )
    def test_its_numbers_are_those_of_the_merge(
        self, ckpt: pathlib.Path, tmp_path: pathlib.Path, more: list[str]
    ) -> None:
        out = tmp_path / "out"
        planned = tool("plan", ckpt, out, "--json", *more).json
        assert listing(tmp_path) == []
        merged = tool("merge", ckpt, out, "--json", *more).json
        assert planned["output_files"] == {name: (out / name).stat().st_size for name in merged["files"]}
        # small parameters are read together with what lies between them (engine.joint_reads)
        assert 0 <= merged["read_nbytes"] - planned["read_nbytes"] < SEEK * planned["tensors"]
        assert planned["tensors"] == merged["tensors"]
        assert planned["fingerprint"] == merged["fingerprint"]
        assert (planned["workers"], planned["segment_nbytes"]) == (merged["workers"], merged["segment_nbytes"])
        assert abs(planned["peak_memory"] - merged["memory"]["projected"]) < 2_000_000
        weights = sum(planned["output_files"].values())
        assert merged["output_nbytes"] == weights
        assert weights <= planned["write_nbytes"] <= sum(p.stat().st_size for p in out.iterdir())

    def test_for_people(self, ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
        ended = tool("plan", ckpt, tmp_path / "out")
        for part in ("writes", "disk", "reads", "peak memory", "workers", "time", "coverage", "--dtype bf16"):
            assert part in ended.out, part

    def test_without_out(self, ckpt: pathlib.Path) -> None:
        assert tool("plan", ckpt).code == 0


class TestVerify:
    def test_equal(self, made: pathlib.Path) -> None:
        for against in ("ckpt", "model"):
            ended = tool("verify", made / "model", "--against", made / against)
            assert ended.code == 0
            assert ended.out.startswith("equal: ")

    def test_one_changed_element(self, made: pathlib.Path, own_model: pathlib.Path) -> None:
        """Name, index and largest error; exit 3."""
        name = "model.layers.1.mlp.up_proj.weight"
        _rewrite(own_model, lambda t: t[name].__setitem__((5, 7), t[name][5, 7] + 0.25))
        for against in ("ckpt", "model"):
            ended = tool("verify", own_model, "--against", made / against)
            assert ended.code == 3
            assert ended.out.startswith("NOT EQUAL")
            assert f"{name}: 1 of 384 elements differ, max abs 0.25" in ended.out
            assert "first at [5, 7]" in ended.out
            answer = tool("verify", own_model, "--against", made / against, "--json", "-q")
            assert answer.code == 3
            (difference,) = answer.json["differences"]
            assert (difference["name"], difference["first"]) == (name, [5, 7])
            assert difference["max_abs"] == pytest.approx(0.25)

    def test_tolerances(self, made: pathlib.Path, own_model: pathlib.Path) -> None:
        _rewrite(own_model, lambda t: t["model.norm.weight"].add_(1e-4))
        words = ("verify", own_model, "--against", made / "model")
        assert tool(*words).code == 3
        assert tool(*words, "--atol", "1e-5").code == 3
        assert tool(*words, "--atol", "1e-3").code == 0
        assert tool(*words, "--rtol", "100").code == 0

    def test_missing_and_extra_tensor(self, made: pathlib.Path, own_model: pathlib.Path) -> None:
        _rewrite(own_model, lambda t: t.__setitem__("model.extra.weight", t.pop("model.norm.weight")))
        for against in ("ckpt", "model"):
            ended = tool("verify", own_model, "--against", made / against)
            assert ended.code == 3
            assert "missing in the model (1): model.norm.weight" in ended.out
            assert "only in the model (1): model.extra.weight" in ended.out

    def test_another_shape(self, made: pathlib.Path, own_model: pathlib.Path) -> None:
        _rewrite(own_model, lambda t: t.__setitem__("lm_head.weight", t["lm_head.weight"].reshape(20, 32)))
        for against in ("ckpt", "model"):
            ended = tool("verify", own_model, "--against", made / against)
            assert ended.code == 3
            assert "lm_head.weight: shape [20, 32], wanted [40, 16]" in ended.out

    def test_another_type(self, made: pathlib.Path, own_model: pathlib.Path) -> None:
        """A cast model equals its checkpoint after the same cast, but not a model of another type."""
        _rewrite(own_model, lambda t: t.__setitem__("lm_head.weight", t["lm_head.weight"].bfloat16()))
        ended = tool("verify", own_model, "--against", made / "model")
        assert ended.code == 3
        assert "lm_head.weight: type BF16, wanted F32" in ended.out
        ended = tool("verify", own_model, "--against", made / "ckpt")
        assert ended.code == 0
        assert "1 tensors were compared after casting" in ended.out or "1 tensor was compared after" in ended.out

    def test_case_137_a_file_of_the_index_is_missing(self, ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
        """An interrupted copy: verify fails with the names."""
        model = tmp_path / "model"
        assert tool(ckpt, model, "--max-shard-size", "10KB", "-q").code == 0
        gone = sorted(model.glob("*.safetensors"))[1]
        gone.unlink()
        tool("verify", model, "--against", ckpt).refused(5, gone.name)

    def test_a_lost_index_is_found(self, ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
        model = tmp_path / "model"
        assert tool(ckpt, model, "--max-shard-size", "10KB", "-q").code == 0
        (model / "model.safetensors.index.json").unlink()
        ended = tool("verify", model, "--against", ckpt)
        assert ended.code in {0, 5}, ended
        assert "index" in ended.err + ended.out or ended.code == 0


def _rewrite(model: pathlib.Path, change: object) -> None:
    tensors = load_file(model / "model.safetensors")
    assert callable(change)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, model / "model.safetensors")


class TestDtype:
    @pytest.mark.parametrize(
        ("word", "dtype"),
        [("keep", torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
    )
    def test_values_are_those_of_torch(
        self, ckpt: pathlib.Path, tmp_path: pathlib.Path, word: str, dtype: torch.dtype
    ) -> None:
        assert tool(ckpt, tmp_path / "out", "--dtype", word, "--verify", "-q").code == 0
        found = load_file(tmp_path / "out" / "model.safetensors")
        assert sorted(found) == sorted(LLAMA)
        for name, tensor in LLAMA.items():
            assert torch.equal(found[name], tensor.to(dtype)), name

    def test_fp16_overflow_is_told(self, tmp_path: pathlib.Path) -> None:
        tensors = {**LLAMA, "model.norm.weight": LLAMA["model.norm.weight"].clone()}
        tensors["model.norm.weight"][3] = 1e6
        spread = {name: Spread(tensor, [Shard(0)]) for name, tensor in tensors.items()}
        written = write_ranks(tmp_path / "ckpt", (2,), spread, config=CONFIG)
        ended = tool(written, tmp_path / "out", "--dtype", "fp16")
        assert ended.code == 0
        assert "OVERFLOW: 1 finite value" in ended.out
        assert "model.norm.weight (1)" in ended.out

    def test_a_wide_source_gets_a_remark(self, ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
        assert "the source is fp32; --dtype bf16 would write" in tool(ckpt, tmp_path / "out").out


class TestReplicas:
    def test_strict(self, tmp_path: pathlib.Path) -> None:
        other = LLAMA["lm_head.weight"][:20] + 1e-3
        spread = {name: Spread(tensor, [Replicate(), Shard(0)]) for name, tensor in LLAMA.items()}
        changed = {2: {"lm_head.weight": other}}
        written = write_ranks(tmp_path / "ckpt", (2, 2), spread, names=("ddp", "fsdp"), config=CONFIG, changed=changed)
        ended = tool(written, tmp_path / "out", "--check-replicas")
        assert ended.code == 0
        assert "warning: replicas differ: lm_head.weight (copy in model_world_size_4_rank_2.pt)" in ended.err
        shutil.rmtree(tmp_path / "out")
        tool(written, tmp_path / "out", "--check-replicas", "--strict").refused(5, "replicas differ: lm_head.weight")
        assert os.listdir(tmp_path) == ["ckpt"]


class TestVerl:
    """verl 0.9.1: `python -m verl.model_merger merge --backend fsdp --local_dir ... --target_dir ...`."""

    def test_merge_gives_bf16(self, ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
        words = ("merge", "--backend", "fsdp", "--local_dir", ckpt, "--target_dir", tmp_path / "out")
        ended = tool(*words)
        assert ended.code == 0, ended.err
        found = load_file(tmp_path / "out" / "model.safetensors")
        assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in LLAMA.items())
        assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"

    def test_the_type_can_be_chosen(self, ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
        words = ("merge", "--backend", "fsdp", "--local_dir", ckpt, "--target_dir", tmp_path / "out")
        assert tool(*words, "--dtype", "keep").code == 0
        assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].dtype == torch.float32

    def test_the_target_is_tmp_by_default(self, ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
        assert tool("merge", "--backend", "fsdp", "--local_dir", ckpt, cwd=tmp_path).code == 0
        assert os.listdir(tmp_path) == ["tmp"]

    @pytest.mark.parametrize(
        "flag", ["use_cpu_initialization", "tie-word-embedding", "is-value-model", "trust-remote-code"]
    )
    def test_flags_without_a_meaning_are_explained(self, ckpt: pathlib.Path, tmp_path: pathlib.Path, flag: str) -> None:
        words = ("merge", "--backend", "fsdp", "--local_dir", ckpt, "--target_dir", tmp_path / "out", f"--{flag}")
        ended = tool(*words)
        assert ended.code == 0
        assert f"--{flag.replace('-', '_')} has no effect: " in ended.err

    def test_the_backend_is_found_out_in_any_case(self, ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
        words = ("merge", "--backend", "megatron", "--local_dir", ckpt, "--target_dir", tmp_path / "out")
        assert tool(*words).code == 0
        assert (tmp_path / "out" / "config.json").exists()

    def test_another_backend_is_a_usage_error(self, ckpt: pathlib.Path) -> None:
        assert tool("merge", "--backend", "deepspeed", "--local_dir", ckpt).code == 2

    def test_an_upload_is_never_just_ignored(self, ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
        words = ("merge", "--backend", "fsdp", "--local_dir", ckpt, "--target_dir", tmp_path / "out")
        ended = tool(*words, "--hf_upload_path", "me/model", env={"HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": "x"})
        assert ended.code == 1
        assert "Traceback" not in ended.err
        assert "error: " in ended.err

    def test_test_compares_with_a_reference(self, made: pathlib.Path, own_model: pathlib.Path) -> None:
        words = ("test", "--backend", "fsdp", "--local_dir", made / "ckpt", "--test_hf_dir")
        assert tool(*words, made / "model").code == 0
        _rewrite(own_model, lambda t: t["model.norm.weight"].add_(1))
        ended = tool(*words, own_model)
        assert ended.code == 3
        assert "model.norm.weight: 16 of 16 elements differ" in ended.out
        tool("test", "--local_dir", made / "ckpt").refused(2, "--test_hf_dir")

    def test_mixed_spellings_are_refused(self, ckpt: pathlib.Path, tmp_path: pathlib.Path) -> None:
        tool("merge", ckpt, tmp_path / "out", "--local_dir", ckpt).refused(2, "--local_dir", "CKPT OUT")
