"""A stand-in of the Hub on the loopback: what huggingface_hub 2.4 asks of it for uploads without xet and for reading.

    whoami, repos/create, branch, preupload, LFS batch, LFS object, validate-yaml, commit, revision, tree, resolve

`Hub.fail(...)` makes requests fail; `Hub.requests` lists what was asked.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_" + "LoopbackTokenOfTheTests" + "0" * 10


_git_hash = partial(hashlib.sha1, usedforsecurity=False)  # the Hub's names of commits and blobs


@dataclass
class Fault:
    """Answer `status` to the first `times` requests that match, after `after` that may pass."""

    method: str
    pattern: str
    status: int
    times: int = 1_000_000
    after: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    text: str = '{"error": "told to fail"}'


@dataclass
class Repo:
    private: bool = False
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    commits: list[dict[str, Any]] = field(default_factory=list)
    pulls: int = 0


class Hub:
    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.sent: list[tuple[str, str, bytes]] = []
        self.ranges: list[tuple[str, str | None, int]] = []
        self.faults: list[Fault] = []
        self.token = TOKEN
        self.url = ""
        self.lock = threading.Lock()

    def fail(self, method: str, pattern: str, status: int, **how: Any) -> None:
        self.faults.append(Fault(method, pattern, status, **how))

    def add(self, name: str, files: dict[str, bytes], *, private: bool = False) -> Repo:
        repo = self.repos[name] = Repo(private)
        repo.branches["main"] = dict(files)
        return repo

    def files(self, name: str, branch: str = "main") -> dict[str, bytes]:
        return self.repos[name].branches[branch]

    def fault(self, method: str, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.method == method and re.search(fault.pattern, path):
                if fault.after > 0:
                    fault.after -= 1
                elif fault.times > 0:
                    fault.times -= 1
                    return fault
        return None

    def sha(self, files: dict[str, bytes]) -> str:
        text = json.dumps({name: _git_hash(data).hexdigest() for name, data in sorted(files.items())})
        return _git_hash(text.encode()).hexdigest()


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        return

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        path, query = unquote(parts.path), parse_qs(parts.query)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = self._chunks()
        with self.hub.lock:
            self.hub.requests.append((self.command, path))
            self.hub.sent.append((self.command, path, body))
            fault = self.hub.fault(self.command, path)
            if fault is not None:
                self._send(fault.status, fault.text.encode(), fault.headers)
                return
            if not path.startswith("/lfs/") and self.headers.get("Authorization") not in {
                None,
                f"Bearer {self.hub.token}",
            }:
                text = {"X-Error-Message": "Invalid credentials in Authorization header"}
                self._send(401, b'{"error": "Invalid credentials in Authorization header"}', text)
                return
            for method, pattern, action in _ROUTES:
                match = re.fullmatch(pattern, path)
                if match and method == self.command.replace("HEAD", "GET"):
                    action(self, match, query, body)
                    return
        self._send(404, json.dumps({"error": f"no route {self.command} {path}"}).encode())

    do_GET = do_POST = do_PUT = do_HEAD = _answer  # noqa: N815 - the names that http.server calls

    def _chunks(self) -> bytes:
        data = b""
        while size := int(self.rfile.readline().strip() or b"0", 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _send(self, status: int, data: bytes = b"{}", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in ({"Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _json(self, value: object, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode())

    def _repo(self, name: str) -> Repo | None:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and self.headers.get("Authorization") is None):
            self._send(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
            return None
        return repo

    def _branch(self, repo: Repo, revision: str) -> dict[str, bytes] | None:
        for name, files in repo.branches.items():
            if revision in {name, self.hub.sha(files)}:
                return files
        self._send(404, b'{"error": "Revision not found"}', {"X-Error-Code": "RevisionNotFound"})
        return None

    def whoami(self, _match: re.Match[str], _query: dict[str, list[str]], _body: bytes) -> None:
        if self.headers.get("Authorization") is None:
            self._send(401, b'{"error": "no token"}')
        else:
            self._json({"name": "me", "type": "user", "auth": {"type": "access_token"}})

    def create(self, _match: re.Match[str], _query: dict[str, list[str]], body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        there = name in self.hub.repos
        if not there:
            self.hub.repos[name] = Repo(private=asked.get("visibility") == "private")
        self._json({"url": f"{self.hub.url}/{name}", "name": name}, 409 if there else 200)

    def branch(self, match: re.Match[str], _query: dict[str, list[str]], _body: bytes) -> None:
        repo = self._repo(match[1])
        if repo is not None:
            there = match[2] in repo.branches
            if not there:
                repo.branches[match[2]] = dict(repo.branches["main"])
            self._json({}, 409 if there else 201)

    def info(self, match: re.Match[str], query: dict[str, list[str]], _body: bytes) -> None:
        repo = self._repo(match[1])
        files = self._branch(repo, match[2] or "main") if repo is not None else None
        if repo is not None and files is not None:
            siblings = [{"rfilename": n} | ({"size": len(d)} if "blobs" in query else {}) for n, d in files.items()]
            sha = self.hub.sha(files)
            self._json({"id": match[1], "sha": sha, "private": repo.private, "siblings": siblings})

    def tree(self, match: re.Match[str], _query: dict[str, list[str]], _body: bytes) -> None:
        repo = self._repo(match[1])
        files = self._branch(repo, match[2]) if repo is not None else None
        if files is not None:
            entries = [
                {"type": "file", "path": n, "size": len(d), "oid": _git_hash(d).hexdigest()} for n, d in files.items()
            ]
            self._json(entries)

    def preupload(self, match: re.Match[str], _query: dict[str, list[str]], body: bytes) -> None:
        repo = self._repo(match[1])
        files = self._branch(repo, match[2]) if repo is not None else None
        if files is None:
            return
        told = []
        for file in json.loads(body)["files"]:
            big = file["path"].endswith((".safetensors", ".bin"))
            there = files.get(file["path"])
            oid = None
            if there is not None:
                blob = b"blob %d\0" % len(there) + there
                oid = hashlib.sha256(there).hexdigest() if big else _git_hash(blob).hexdigest()
            mode = "lfs" if big else "regular"
            told.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._json({"files": told})

    def batch(self, match: re.Match[str], _query: dict[str, list[str]], body: bytes) -> None:
        if self._repo(match[1]) is None:
            return
        told: list[dict[str, Any]] = []
        for wanted in json.loads(body)["objects"]:
            entry: dict[str, Any] = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.objects:
                entry["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}}
            told.append(entry)
        self._json({"transfer": "basic", "objects": told})

    def store(self, match: re.Match[str], _query: dict[str, list[str]], body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != match[1]:
            self._send(400, b'{"error": "hash differs"}')
            return
        self.hub.objects[match[1]] = body
        self._send(200)

    def validate(self, _match: re.Match[str], _query: dict[str, list[str]], _body: bytes) -> None:
        self._json({"errors": [], "warnings": []})

    def commit(self, match: re.Match[str], query: dict[str, list[str]], body: bytes) -> None:
        repo = self._repo(match[1])
        files = self._branch(repo, match[2]) if repo is not None else None
        if repo is None or files is None:
            return
        lines = [json.loads(line) for line in body.splitlines()]
        if query.get("create_pr"):
            repo.pulls += 1
            files = repo.branches[f"refs/pr/{repo.pulls}"] = dict(files)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                files.pop(value["path"], None)
        repo.commits.append(lines[0]["value"])
        oid = self.hub.sha(files)
        answer = {"commitUrl": f"{self.hub.url}/{match[1]}/commit/{oid}", "commitOid": oid, "pullRequestUrl": None}
        if query.get("create_pr"):
            answer["pullRequestUrl"] = f"{self.hub.url}/{match[1]}/discussions/{repo.pulls}"
        self._json(answer)

    def resolve(self, match: re.Match[str], _query: dict[str, list[str]], _body: bytes) -> None:
        repo = self._repo(match[1])
        files = self._branch(repo, match[2]) if repo is not None else None
        if files is None:
            return
        data = files.get(match[3])
        if data is None:
            self._send(404, b'{"error": "Entry not found"}', {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"ETag": f'"{_git_hash(data).hexdigest()}"', "X-Repo-Commit": self.hub.sha(files)}
        headers["Content-Type"] = "application/octet-stream"
        asked = self.headers.get("Range")
        status, part = 200, data
        if asked and (span := re.fullmatch(r"bytes=(\d+)-(\d*)", asked)):
            first, last = int(span[1]), min(int(span[2]) if span[2] else len(data) - 1, len(data) - 1)
            status, part = 206, data[first : last + 1]
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        if self.command == "GET":
            self.hub.ranges.append((match[3], asked, len(part)))
        self._send(status, part, headers)


_NAME = r"([\w.-]+/[\w.-]+)"
_Action = Callable[[_Handler, "re.Match[str]", dict[str, list[str]], bytes], None]
_ROUTES: tuple[tuple[str, str, _Action], ...] = (
    ("GET", "/api/whoami-v2", _Handler.whoami),
    ("POST", "/api/repos/create", _Handler.create),
    ("POST", "/api/validate-yaml", _Handler.validate),
    ("POST", rf"/api/models/{_NAME}/branch/(.+)", _Handler.branch),
    ("POST", rf"/api/models/{_NAME}/preupload/(.+)", _Handler.preupload),
    ("POST", rf"/api/models/{_NAME}/commit/(.+)", _Handler.commit),
    ("GET", rf"/api/models/{_NAME}/tree/([^/]+)/?", _Handler.tree),
    ("GET", rf"/api/models/{_NAME}(?:/revision/(.+))?", _Handler.info),
    ("POST", rf"/{_NAME}\.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", r"/lfs/([0-9a-f]{64})", _Handler.store),
    ("GET", rf"/{_NAME}/resolve/([^/]+)/(.+)", _Handler.resolve),
)


@contextlib.contextmanager
def hub_on_loopback() -> Iterator[Hub]:
    """A running stand-in."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
