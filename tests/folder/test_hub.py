"""Uploads to a stand-in of the Hub: what arrives, what a failure says, how it goes on, and that no token is shown."""

from __future__ import annotations

import builtins
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from merge_stream import cli
from merge_stream.errors import HubError, InterruptedRunError
from merge_stream.output.hub import PushTarget, clean, push_folder, speaking_clearly
from tests.folder.hub_server import TOKEN, Hub
from tests.folder.models import checkpoint, llama, llama_config, merge, model_folder, run_tool

SIDE = {"tokenizer.json": '{"model": {"type": "BPE", "vocab": {"a": 0}}}', "generation_config.json": "{}"}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "out", llama(), llama_config(), SIDE)


def test_push_uploads_the_whole_folder(hub: Hub, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["push", str(out), "me/model", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"]
    assert told["repo"] == "me/model"
    assert told["url"] == f"{hub.url}/me/model"
    assert hub.files("me/model") == {p.name: p.read_bytes() for p in out.iterdir()}
    assert not hub.repos["me/model"].private
    assert "merge-stream" in hub.repos["me/model"].commits[0]["summary"]


def test_merge_and_push_in_one_command(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(tmp_path / "ckpt", llama(), llama_config(), SIDE)
    assert merge(source, tmp_path / "out", "--push-to-hub", "org/model", "--private", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["pushed"]["repo"] == "org/model"
    assert any("all values were read back" in text for text in told["verified"])
    assert hub.repos["org/model"].private
    assert hub.files("org/model") == {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    assert {"README.md", "config.json", "model.safetensors", *SIDE} == set(hub.files("org/model"))


def test_verls_spelling_uploads(hub: Hub, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "ckpt", llama(), llama_config(), SIDE)
    words = ["merge", "--backend", "fsdp", "--local_dir", str(source), "--target_dir", str(tmp_path / "out")]
    assert cli.run([*words, "--hf_upload_path", "org/verl", "--private"]) == 0
    assert hub.repos["org/verl"].private
    assert "model.safetensors" in hub.files("org/verl")


def test_verls_private_alone_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(tmp_path / "ckpt", llama(), llama_config(), SIDE)
    words = ["merge", "--backend", "fsdp", "--local_dir", str(source), "--target_dir", str(tmp_path / "out")]
    assert cli.run([*words, "--private"]) == 0
    assert "--private has no effect" in capsys.readouterr().err


def test_pull_request(hub: Hub, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add("org/model", {"README.md": b"theirs"})
    assert cli.run(["push", str(out), "org/model", "--create-pr", "--commit-message", "From step 7"]) == 0
    assert f"{hub.url}/org/model/discussions/1" in capsys.readouterr().out
    assert hub.files("org/model") == {"README.md": b"theirs"}
    assert "model.safetensors" in hub.files("org/model", "refs/pr/1")
    assert hub.repos["org/model"].commits[0]["summary"] == "From step 7"


def test_revision_makes_the_branch(hub: Hub, out: Path) -> None:
    assert cli.run(["push", str(out), "me/model", "--revision", "step-100"]) == 0
    assert "model.safetensors" in hub.files("me/model", "step-100")
    assert "model.safetensors" not in hub.files("me/model")


def test_pushing_again_uploads_nothing_twice(hub: Hub, out: Path) -> None:
    assert cli.run(["push", str(out), "me/model"]) == 0
    before = len(hub.sent)
    assert cli.run(["push", str(out), "me/model"]) == 0
    assert not [path for method, path, _ in hub.sent[before:] if method == "PUT" or "/commit/" in path]


def test_weights_of_an_older_model_go_and_all_else_stays(hub: Hub, out: Path) -> None:
    old = {f"model-0000{n}-of-00002.safetensors": b"old" for n in (1, 2)}
    old |= {"model.safetensors.index.json": b"{}", "notes.txt": b"mine", "adapter_model.safetensors": b"other"}
    old["models/theirs.safetensors"] = b"kept"
    hub.add("me/model", old)
    assert cli.run(["push", str(out), "me/model"]) == 0
    there = hub.files("me/model")
    assert sorted(n for n in there if n.startswith("model")) == ["model.safetensors", "models/theirs.safetensors"]
    assert there["notes.txt"] == b"mine"
    assert there["adapter_model.safetensors"] == b"other"


def test_a_readme_that_somebody_wrote_is_kept(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(tmp_path / "ckpt", llama(), llama_config(), SIDE)
    assert merge(source, tmp_path / "out") == 0
    card = (tmp_path / "out" / "README.md").read_bytes()
    hub.add("me/model", {"README.md": b"# My words\n"})
    assert cli.run(["push", str(tmp_path / "out"), "me/model"]) == 0
    assert hub.files("me/model")["README.md"] == b"# My words\n"
    assert "README.md of its own" in capsys.readouterr().out
    hub.files("me/model")["README.md"] = card + b"older\n"
    assert cli.run(["push", str(tmp_path / "out"), "me/model"]) == 0
    assert hub.files("me/model")["README.md"] == card


def test_private_is_never_a_public_repository(hub: Hub, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add("me/model", {})
    assert cli.run(["push", str(out), "me/model", "--private"]) == 1
    assert "is public" in capsys.readouterr().err
    assert hub.files("me/model") == {}


@pytest.mark.parametrize(
    ("method", "pattern", "status", "words"),
    [
        ("GET", "whoami", 401, "HF_TOKEN"),
        ("PUT", "/lfs/", 500, "try again later"),
        pytest.param("POST", "repos/create", 403, "write access", marks=pytest.mark.slow),
        pytest.param("POST", "preupload", 404, "not there, or the token has no access", marks=pytest.mark.slow),
        pytest.param("POST", "/commit/", 500, "try again later", marks=pytest.mark.slow),
        pytest.param("POST", "objects/batch", 429, "wait some minutes", marks=pytest.mark.slow),
    ],
)
def test_a_failing_upload_says_how_to_go_on_and_leaves_out_alone(  # noqa: PLR0917 - one fault each
    hub: Hub, out: Path, capsys: pytest.CaptureFixture[str], method: str, pattern: str, status: int, words: str
) -> None:
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    hub.fail(method, pattern, status)
    assert cli.run(["push", str(out), "me/model"]) == 1
    told = capsys.readouterr()
    assert f"the Hub answered {status}" in told.err
    assert words in told.err
    assert f"merge-stream push {out} me/model" in told.err
    assert TOKEN not in told.err + told.out
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    hub.faults.clear()
    assert cli.run(["push", str(out), "me/model"]) == 0
    assert hub.files("me/model") == before


def test_an_upload_continues_where_it_failed(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(tmp_path / "ckpt", llama(3), llama_config(num_hidden_layers=3), SIDE)
    out = tmp_path / "out"
    hub.fail("PUT", "/lfs/", 500, after=2)
    assert merge(source, out, "--max-shard-size", "500", "--push-to-hub", "me/model", "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert "merge-stream push" in told["hint"]
    stored = len(hub.objects)
    assert stored == 2
    hub.faults.clear()
    hub.sent.clear()
    assert cli.run(["push", str(out), "me/model"]) == 0
    weights = list(out.glob("*.safetensors"))
    assert len([1 for method, _, _ in hub.sent if method == "PUT"]) == len(weights) - stored
    assert hub.files("me/model") == {p.name: p.read_bytes() for p in out.iterdir()}


def test_what_would_fail_later_fails_before_the_merge(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoint(tmp_path / "ckpt", llama(), llama_config(), SIDE)
    hub.token = TOKEN[::-1]
    assert merge(source, tmp_path / "out", "--push-to-hub", "me/model") == 1
    told = capsys.readouterr().err
    assert "401" in told
    assert "then run the same command again" in told  # there is no OUT that could be pushed
    monkeypatch.delenv("HF_TOKEN")
    assert merge(source, tmp_path / "out", "--push-to-hub", "me/model") == 1
    assert "hf auth login" in capsys.readouterr().err
    assert merge(source, tmp_path / "out", "--push-to-hub", "no/such/name") == 2
    assert merge(source, tmp_path / "out", "--push-to-hub", "me/m", "--create-pr", "--revision", "dev") == 2
    assert merge(source, tmp_path / "out", "--private") == 2
    assert "--push-to-hub" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("out")) == []


def test_without_the_extra(out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "huggingface_hub":
            raise ModuleNotFoundError(name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert cli.run(["push", str(out), "me/model"]) == 1
    assert "pip install 'merge-stream[hub]'" in capsys.readouterr().err


def test_broken_folder_is_not_uploaded(hub: Hub, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (out / "model.safetensors").open("r+b") as file:
        file.truncate(300)
    assert cli.run(["push", str(out), "me/model"]) == 3
    assert "nothing was uploaded" in capsys.readouterr().err
    assert hub.repos == {}


def test_tool_itself_against_the_stand_in(hub: Hub, out: Path, tmp_path: Path) -> None:
    env = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
    done = run_tool("push", str(out), "me/model", **env)
    assert done.returncode == 0, done.stderr
    assert hub.files("me/model") == {p.name: p.read_bytes() for p in out.iterdir()}
    offline = run_tool("push", str(out), "me/model", **env, HF_HUB_OFFLINE="1")
    assert offline.returncode == 1
    assert "HF_HUB_OFFLINE" in offline.stderr
    away = run_tool("push", str(out), "me/model", **{**env, "HF_ENDPOINT": "http://127.0.0.1:9"})
    assert away.returncode == 1
    assert "could not be reached" in away.stderr
    assert "merge-stream push" in away.stderr
    wrong = "hf_" + "wrong" * 6
    refused = run_tool("push", str(out), "me/model", **{**env, "HF_TOKEN": wrong})
    assert refused.returncode == 1
    for run in (done, offline, away, refused):
        assert TOKEN not in run.stdout + run.stderr
        assert wrong not in run.stdout + run.stderr
        assert "Traceback" not in run.stderr


def test_the_command_that_is_told_can_be_pasted() -> None:
    target = PushTarget("me/model", private=True, revision="v 2", commit_message="it's done")
    told = target.command("my folder")
    assert shlex.split(told) == [
        *("merge-stream", "push", "my folder", "me/model", "--private", "--revision", "v 2"),
        *("--commit-message", "it's done"),
    ]


def test_no_message_holds_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "odd-secret-without-prefix")
    text = clean("Illegal header value b'Bearer odd-secret-without-prefix' hf_abcdefgh12345678 Bearer xyz")
    assert "odd-secret" not in text
    assert "hf_abc" not in text
    assert "xyz" not in text


def test_error_of_the_api_names_the_command(hub: Hub, out: Path) -> None:
    hub.fail("POST", "/commit/", 403)
    with pytest.raises(HubError) as caught:
        push_folder(out, PushTarget("me/model", revision="dev"))
    assert f"merge-stream push {out} me/model --revision dev" in caught.value.hint


def test_an_interrupted_upload_says_how_to_go_on() -> None:
    with pytest.raises(InterruptedRunError) as caught, speaking_clearly("the upload failed", "merge-stream push OUT R"):
        raise InterruptedRunError("stopped by SIGINT", hint="the same command continues it")
    assert caught.value.hint == "merge-stream push OUT R"
    assert caught.value.exit_code == 130


def test_out_that_is_there_can_still_be_pushed(
    hub: Hub, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The merge of before the failure: it is not done again, the hint leads on."""
    source = checkpoint(tmp_path / "ckpt", llama(), llama_config(), SIDE)
    assert merge(source, out, "--push-to-hub", "me/model", "--private") == 1
    assert f"merge-stream push {out} me/model --private" in capsys.readouterr().err
    assert hub.repos == {}
