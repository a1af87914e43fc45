"""A local server that speaks the parts of the Hugging Face Hub's HTTP API that pushing and reading need.

Repositories live in memory; a commit has all files of its time. `api/repos/create`, `preupload`, LFS (`basic`)
and `commit` write; `revision`, `tree`, `paths-info` and `resolve` read.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, final
from urllib.parse import unquote, urlsplit

TOKEN = "hf_test"


@final
class Repository:
    """A repository.

    Attributes:
        commits: The files of each commit, by its id; the last one is `main`.
        private: Readable with the token only.
    """

    def __init__(self, private: bool) -> None:
        self.private = private
        self.commits: dict[str, dict[str, bytes]] = {"0" * 40: {}}

    def files(self, revision: str) -> dict[str, bytes] | None:
        """The files of a revision; None if there is no such one."""
        return self.commits[list(self.commits)[-1]] if revision == "main" else self.commits.get(revision)


@final
class Hub:
    """The state of the server.

    Attributes:
        url: Its address, for HF_ENDPOINT.
        repositories: By `user/name`.
        lfs: Large files by their SHA-256.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.repositories: dict[str, Repository] = {}
        self.lfs: dict[str, bytes] = {}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(*found.groups())
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?", path):
            files = self._files(found[1], found[2])
            if files is not None:
                self._json([_entry(name, data) for name, data in files.items() if name.startswith(found[3] or "")])
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            if self._files(found[1], found[2] or "main") is not None:
                commits = self.hub.repositories[found[1]].commits
                self._json({"id": found[1], "modelId": found[1], "sha": found[2] or list(commits)[-1], "siblings": []})
        else:
            self._fail(404, "EntryNotFound")

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        data = self._body()
        oid = hashlib.sha256(data).hexdigest()
        assert self.path == f"/upload/{oid}"
        self.hub.lfs[oid] = data
        self._json({})

    def do_POST(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self._body()
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path != "/api/repos/create" and "paths-info" in path:
            return self._paths_info(path, body)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._fail(401, "Unauthorized")
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)", path):
            return self._preupload(json.loads(body))
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._lfs(json.loads(body))
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", path):
            return self._commit(found[1], body)
        return self._fail(404, "EntryNotFound")

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization'] or 'user'}/{asked['name']}"
        if not name.startswith("user/"):
            return self._fail(403, "Forbidden")
        status = 409 if name in self.hub.repositories else 200
        self.hub.repositories.setdefault(
            name, Repository(bool(asked.get("private") or asked.get("visibility") == "private"))
        )
        return self._json({"url": f"{self.hub.url}/{name}", "name": name, "id": name}, status)

    def _preupload(self, asked: dict[str, Any]) -> None:
        large = (".safetensors", ".onnx")
        files = [
            {"path": each["path"], "uploadMode": "lfs" if each["path"].endswith(large) else "regular"}
            for each in asked["files"]
        ]
        self._json({"files": [each | {"shouldIgnore": False} for each in files]})

    def _lfs(self, asked: dict[str, Any]) -> None:
        objects = [
            {
                "oid": each["oid"],
                "size": each["size"],
                "actions": {"upload": {"href": f"{self.hub.url}/upload/{each['oid']}"}},
            }
            for each in asked["objects"]
        ]
        self._json({"transfer": "basic", "objects": objects})

    def _commit(self, name: str, body: bytes) -> None:
        repository = self.hub.repositories[name]
        files = dict(repository.files("main") or {})
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.lfs[value["oid"]]
        oid = hashlib.sha1(body).hexdigest()
        repository.commits[oid] = files
        self._json({"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid, "success": True})

    def _paths_info(self, path: str, body: bytes) -> None:
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/paths-info/([^/]+)", path)
        assert found is not None, path
        files = self._files(found[1], found[2])
        if files is not None:
            asked = json.loads(body)["paths"]
            self._json(
                [_entry(name, files[name]) for name in ([asked] if isinstance(asked, str) else asked) if name in files]
            )

    def _files(self, name: str, revision: str) -> dict[str, bytes] | None:
        repository = self.hub.repositories.get(name)
        hidden = repository is not None and repository.private
        if repository is None or (hidden and self.headers.get("Authorization") != f"Bearer {TOKEN}"):
            self._fail(401, "RepoNotFound")
            return None
        files = repository.files(revision)
        if files is None:
            self._fail(404, "RevisionNotFound")
        return files

    def _file(self, name: str, revision: str, path: str) -> None:
        files = self._files(name, revision)
        if files is None:
            return None
        if path not in files:
            return self._fail(404, "EntryNotFound")
        data, status = files[path], 200
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            data, status = data[int(asked[1]) : int(asked[2] or len(data)) + 1], 206
        self._send(status, data, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": "0" * 40})
        return None

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _fail(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _entry(name: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


@contextmanager
def hub() -> Generator[Hub]:
    """A server, while the context is open."""
    handler = type("Handler", (_Handler,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        state = Hub(f"http://127.0.0.1:{server.server_address[1]}")
        handler.hub = state  # pyright: ignore[reportAttributeAccessIssue]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
