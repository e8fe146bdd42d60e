"""A token of the Hub is in no message, report, log or traceback, whatever the client raises or says."""

from __future__ import annotations

import json
import logging
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from merge_stream import cli
from merge_stream.errors import HubError
from merge_stream.output.hub import clean, speaking_clearly
from merge_stream.output.hub_base import fetch_base

TOKEN = "hf_" + "Qx7" * 12


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)


RAISED: tuple[Callable[[], Exception], ...] = (
    lambda: RuntimeError(f"bad header: Authorization: Bearer {TOKEN}"),
    lambda: OSError(5, f"https://user:{TOKEN}@huggingface.co"),
    lambda: ValueError({"headers": {"authorization": f"Bearer {TOKEN}"}}),
    lambda: ConnectionError(f"token {TOKEN} refused"),
)


@pytest.mark.parametrize("make", RAISED, ids=range(len(RAISED)))
def test_what_the_client_raises_is_told_without_the_token(make: Callable[[], Exception]) -> None:
    with pytest.raises(HubError) as caught, speaking_clearly("upload failed", "again"):
        raise make()
    assert TOKEN not in str(caught.value)
    assert TOKEN not in repr(caught.value.args)
    assert TOKEN not in "".join(traceback.format_exception(caught.value))


def test_what_the_client_warns_and_logs_is_told_without_the_token(caplog: pytest.LogCaptureFixture) -> None:
    notes: list[str] = []
    with caplog.at_level(logging.DEBUG), speaking_clearly("upload failed", "again", notes=notes):
        warnings.warn(f"the token {TOKEN} is old", UserWarning, stacklevel=1)
    assert notes == ["the token *** is old"]
    assert TOKEN not in caplog.text


def test_a_token_of_somebody_else_is_hidden_too() -> None:
    other = "hf_" + "Ab3" * 12
    assert other not in clean(f"given as https://x:{other}@huggingface.co/api")


def test_a_base_model_that_cannot_be_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub

    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError(f"401 for Bearer {TOKEN}")

    for name in (
        "model_info",
        "repo_info",
        "list_repo_files",
        "hf_hub_download",
        "snapshot_download",
        "list_repo_tree",
    ):
        monkeypatch.setattr(huggingface_hub.HfApi, name, refuse, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(HubError) as caught:
        fetch_base("org/model")
    assert TOKEN not in "".join(traceback.format_exception(caught.value))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    for words in (["plan", str(tmp_path), "--base-model", "org/model", "--json"], ["push", str(tmp_path), "org/model"]):
        assert cli.run(words) != 0
        told = capsys.readouterr()
        assert TOKEN not in told.out + told.err
        assert not told.out or json.loads(told.out)
