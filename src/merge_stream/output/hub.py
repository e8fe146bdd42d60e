"""The Hub: a finished folder goes up, by the Hub's own client.

    prepare_push   before a merge: client, connection, token and names are right, in a second or two
    push_folder    repository -> branch -> README? -> upload

The client (`huggingface_hub`, the extra `hub`) is imported here and in `hub_base` only. Retries and
resume are its own: it skips what the repository already holds, so the same push again continues.
Whatever fails, the folder on disk is whole, and the error says how to go on. No message
ever holds a token.

What the repository has is kept, with two exceptions: weight files of an older model (they would stand
beside the new ones as if they belonged to it), and a README that merge-stream wrote itself.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from merge_stream.errors import HubError, InterruptedRunError, MergeStreamError, UsageError
from merge_stream.output.model_card import CARD_NAME, is_own_card

if TYPE_CHECKING:
    from huggingface_hub import HfApi

__all__ = ["PushTarget", "Pushed", "client", "looks_like_hub_name", "prepare_push", "push_folder", "speaking_clearly"]

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[\w./-]+)?")
_REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}")
_SECRET = re.compile(r"(hf_|api_org_)[A-Za-z0-9]{6,}|(?<=Bearer )[^\s'\"]+")
_STALE = ["model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json"]
_NOT_MODEL = ["*.partial", "*.partial/*", ".merge-stream/*", "*.lock", "*.tmp"]


@dataclass(frozen=True, slots=True)
class PushTarget:
    """Where a folder goes: `repo` is ORG/NAME (or NAME, in the token's own namespace)."""

    repo: str
    private: bool = False
    revision: str | None = None
    create_pr: bool = False
    commit_message: str | None = None

    def command(self, folder: str) -> str:
        """The command that uploads `folder` there."""
        words = ["merge-stream", "push", folder, self.repo]
        words += ["--private"] * self.private + ["--create-pr"] * self.create_pr
        words += ["--revision", self.revision] if self.revision else []
        words += ["--commit-message", self.commit_message] if self.commit_message else []
        return shlex.join(words)


@dataclass(frozen=True, slots=True)
class Pushed:
    """What came of an upload; `pull_request` is a URL or ""."""

    repo: str
    url: str
    commit: str
    pull_request: str = ""
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "repo": self.repo,
            "url": self.url,
            "commit": self.commit,
            "pull_request": self.pull_request,
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """For a person."""
        where = f"  pull request {self.pull_request}" if self.pull_request else f"  commit {self.commit}"
        return [f"uploaded to {self.url}", where, *(f"  note: {note}" for note in self.notes)]


def looks_like_hub_name(text: str) -> bool:
    """True for ORG/NAME, also with @REVISION."""
    return _NAME.fullmatch(text) is not None


def client(purpose: str) -> HfApi:
    """The Hub's client, ready to speak; HubError when it is not installed or must stay offline."""
    try:
        import huggingface_hub
        from huggingface_hub import constants
    except ImportError as error:
        msg = f"{purpose} needs the package huggingface_hub, which is not installed"
        raise HubError(msg, hint="pip install 'merge-stream[hub]'") from error
    if constants.HF_HUB_OFFLINE:
        msg = f"{purpose} needs the Hub, and HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set"
        raise HubError(msg, hint="unset it, or do this on a machine with a connection")
    return huggingface_hub.HfApi(library_name="merge-stream", library_version=version("merge-stream"))


def prepare_push(target: PushTarget, folder: str | None = None) -> None:
    """Refuse now what would be refused after hours: no client, no connection, no or a wrong token, a wrong name.

    `folder` is the finished model; None before the merge that writes it, when nothing is there that could be pushed.
    """
    if target.create_pr and target.revision not in {None, "main"}:
        msg = f"--create-pr and --revision {target.revision} cannot go together: a pull request is made against main"
        raise UsageError(msg, hint="leave one of them out")
    if not _REPOSITORY.fullmatch(target.repo):
        msg = f"{target.repo!r} is no name of a repository on the Hub"
        raise UsageError(msg, hint="it is ORG/NAME, for example my-org/my-model")
    api = client("uploading")
    from huggingface_hub import get_token

    if not get_token():
        msg = f"uploading to {target.repo} needs a token of the Hub, and there is none"
        raise HubError(msg, hint="set HF_TOKEN to a token with write access, or run `hf auth login`")
    again = f"then: {target.command(folder)}" if folder is not None else "then run the same command again"
    with speaking_clearly(f"before uploading to {target.repo}", again):
        api.whoami()


def push_folder(folder: str | os.PathLike[str], target: PushTarget, *, quiet: bool = False) -> Pushed:
    """Upload a finished model folder. The same call again continues an upload that failed."""
    path = os.fspath(folder)
    again = f"{path} is whole; go on with: {target.command(path)}"
    prepare_push(target, path)
    api = client("uploading")
    notes: list[str] = []
    with speaking_clearly(f"the upload of {path} to {target.repo} failed", again, quiet=quiet, notes=notes):
        repo = api.create_repo(target.repo, private=True if target.private else None, exist_ok=True).repo_id
        if target.private and api.model_info(repo).private is False:
            msg = f"{repo} is there already and is public, but --private was given: nothing was uploaded"
            raise HubError(msg, hint="make it private in its settings on the Hub, or choose another name")
        if target.revision not in {None, "main"} and not str(target.revision).startswith("refs/"):
            api.create_branch(repo, branch=str(target.revision), exist_ok=True)
        skipped = list(_NOT_MODEL)
        if _keeps_own_readme(api, repo, target, path):
            skipped.append(CARD_NAME)
            notes.append(f"{repo} has a {CARD_NAME} of its own, which is kept")
        done = api.upload_folder(
            repo_id=repo,
            folder_path=path,
            revision=target.revision,
            create_pr=target.create_pr,
            commit_message=target.commit_message or f"Upload model with merge-stream {version('merge-stream')}",
            ignore_patterns=skipped,
            delete_patterns=_STALE,
        )
        pull_request = done.pr_url or ""
        url = f"{api.endpoint}/{repo}" + (f"/tree/{target.revision}" if target.revision else "")
        commit = done.oid
    return Pushed(repo, url, commit, pull_request, tuple(notes))


@contextmanager
def speaking_clearly(failed: str, hint: str, *, quiet: bool = True, notes: list[str] | None = None) -> Iterator[None]:
    """Turn whatever the client raises into one HubError without secrets; its warnings become notes."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    silent = quiet or not sys.stderr.isatty() or bool(os.environ.get("NO_COLOR"))
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if silent:
                disable_progress_bars()
                logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
            yield
        if notes is not None:
            notes += [clean(_first_line(str(w.message))) for w in said if issubclass(w.category, UserWarning)]
    except InterruptedRunError as error:
        raise InterruptedRunError(error.message, hint=hint) from None
    except MergeStreamError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a foreign client raises, the user is told how to go on
        reason, advice = _reason(error)
        raise HubError(f"{failed}: {reason}", hint=f"{advice}; {hint}" if advice else hint) from None


def clean(text: str) -> str:
    """The text without anything that is, or looks like, a token."""
    import huggingface_hub

    for secret in {huggingface_hub.get_token(), os.environ.get("HF_TOKEN", "").strip()}:
        if secret:
            text = text.replace(secret, "***")
    return _SECRET.sub("***", text)


def _keeps_own_readme(api: HfApi, repo: str, target: PushTarget, folder: str) -> bool:
    """True when the repository has a README that somebody wrote, and ours is only the card."""
    try:
        with open(os.path.join(folder, CARD_NAME), encoding="utf-8", errors="replace") as file:
            if not is_own_card(file.read()):
                return False
    except FileNotFoundError:
        return False
    revision = None if target.create_pr else target.revision
    if CARD_NAME not in api.list_repo_files(repo, revision=revision):
        return False
    import tempfile

    with tempfile.TemporaryDirectory(prefix="merge-stream-") as scratch:
        path = api.hf_hub_download(repo, CARD_NAME, revision=revision, local_dir=scratch)
        with open(path, encoding="utf-8", errors="replace") as file:
            return not is_own_card(file.read())


def _reason(error: BaseException) -> tuple[str, str]:
    """(what happened, what to do) of a client's exception; the innermost answer of the server decides."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    for link in chain:
        status = getattr(getattr(link, "response", None), "status_code", None)
        if isinstance(status, int):
            told = clean(_first_line(str(getattr(link, "server_message", "") or "")))
            return f"the Hub answered {status}" + (f" ({told})" if told else ""), _advice(status, type(link).__name__)
    names = {type(link).__name__ for link in chain}
    if names & {"ConnectError", "ConnectTimeout", "ConnectionError", "ConnectionRefusedError", "gaierror"}:
        return "the Hub could not be reached", "check the network, and HF_ENDPOINT where it is set"
    if any("Timeout" in name for name in names):
        return "the Hub did not answer in time", "check the network"
    return f"{type(error).__name__}: {clean(_first_line(str(error)))}", ""


def _advice(status: int, kind: str) -> str:
    if status == 401:
        return "check HF_TOKEN (it is wrong, expired, or lacks access), or run `hf auth login`"
    if status == 403:
        return "the token may not do this: it needs write access to that repository or organisation"
    if status == 404:
        what = "revision" if kind == "RevisionNotFoundError" else "repository"
        return f"the {what} is not there, or the token has no access to it"
    if status == 429:
        return "the Hub limits the rate: wait some minutes"
    if status >= 500:
        return "the Hub has a problem: try again later"
    return ""


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else ""
