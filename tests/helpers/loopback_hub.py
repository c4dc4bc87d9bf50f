"""A Hub on the loopback with what publishing a dataset needs of its API: repositories, their files, and commits."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN, READ_TOKEN = "hf_writes", "hf_reads"
LARGE = 20_000  # bytes from which a file is uploaded before the commit


class Hub(ThreadingHTTPServer):
    """``repos`` maps names to files; ``commits`` holds the paths that each commit changed; ``fails`` answers 500."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.is_private: dict[str, bool] = {}
        self.commits: list[tuple[str, list[str]]] = []
        self.objects: dict[str, bytes] = {}  # uploaded, by SHA-256
        self.fails = ""  # part of the paths of requests that fail
        self.address = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        pass

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).split("/")
        if parts[1:3] != ["api", "datasets"]:
            self._answer_file()
        elif (files := self.server.repos.get("/".join(parts[3:5]))) is None:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif parts[5:6] == ["tree"]:
            self._json(_listing(files, "/".join(parts[7:])))
        else:
            self._json({"id": "/".join(parts[3:5]), "siblings": []})

    def do_HEAD(self) -> None:
        self._answer_file()

    def do_PUT(self) -> None:
        content = self._body()
        self.server.objects[hashlib.sha256(content).hexdigest()] = content
        self._send(200, b"")

    def do_POST(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self._body()
        token = self.headers.get("Authorization")
        if self.server.fails and self.server.fails in path:
            self._send(500, b"out of order")
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif token != f"Bearer {TOKEN}":
            self._send(403 if token == f"Bearer {READ_TOKEN}" else 401, b'{"error": "no right to write"}')
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path.endswith("/info/lfs/objects/batch"):
            self._batch(json.loads(body))
        else:
            self._act(path.split("/"), body)

    def _act(self, parts: list[str], body: bytes) -> None:
        """What is done to one repository."""
        repo, action = "/".join(parts[3:5]), parts[5]
        files = self.server.repos[repo]
        if action == "preupload":
            self._json({"files": [self._mode(file) for file in json.loads(body)["files"]]})
        elif action == "paths-info":
            paths = parse_qs(body.decode())["paths"]
            self._json([_info(files, path) for path in paths if path in files])
        else:
            self._commit(files, [json.loads(line) for line in body.splitlines()])
            self._json({"commitUrl": f"{self.server.address}/datasets/{repo}/commit/0", "commitOid": "0" * 40})

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted['organization']}/{wanted['name']}" if wanted.get("organization") else wanted["name"]
        is_new = name not in self.server.repos
        if is_new:
            self.server.repos[name] = {}
            self.server.is_private[name] = wanted.get("private", False) or wanted.get("visibility") == "private"
        self._json({"url": f"{self.server.address}/datasets/{name}"}, 200 if is_new else 409)

    def _mode(self, file: dict[str, Any]) -> dict[str, Any]:
        mode = "lfs" if file["size"] >= LARGE else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}

    def _batch(self, wanted: dict[str, Any]) -> None:
        self._json(
            {
                "transfer": "basic",
                "objects": [
                    {**item, "actions": {"upload": {"href": f"{self.server.address}/lfs/{item['oid']}"}}}
                    for item in wanted["objects"]
                ],
            }
        )

    def _commit(self, files: dict[str, bytes], lines: list[dict[str, Any]]) -> None:
        changed = []
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            changed += [value["path"]] if "path" in value else []
        self.server.commits.append((lines[0]["value"]["summary"], sorted(changed)))

    def _answer_file(self) -> None:
        path = unquote(urlsplit(self.path).path)
        name, _, file = path.partition("/resolve/main/")
        content = self.server.repos.get(name.removeprefix("/datasets/"), {}).get(file)
        if content is None:
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        digest = hashlib.sha1(content).hexdigest()
        return self._send(200, content, {"ETag": f'"{digest}"', "X-Repo-Commit": "0" * 40})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _json(self, value: object, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _info(files: dict[str, bytes], path: str) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(files[path]), "oid": hashlib.sha1(files[path]).hexdigest()}


def _listing(files: dict[str, bytes], folder: str) -> list[dict[str, Any]]:
    """The files and folders of one folder."""
    start = f"{folder}/" if folder else ""
    names = {path.removeprefix(start).partition("/")[0] for path in files if path.startswith(start)}
    folders = [name for name in names if start + name not in files]
    infos = [_info(files, start + name) for name in names if start + name in files]
    return [*infos, *({"type": "directory", "path": start + name, "oid": "0" * 40} for name in folders)]


@contextmanager
def loopback_hub() -> Iterator[Hub]:
    """A Hub that the library of this process takes for the real one, with a token that may write."""
    from huggingface_hub import constants

    hub = Hub()
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    settings: dict[str, Any] = {"ENDPOINT": hub.address, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
    template = f"{hub.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    try:
        with (
            mock.patch.multiple(constants, **settings, HUGGINGFACE_CO_URL_TEMPLATE=template),
            mock.patch.dict("os.environ", {"HF_TOKEN": TOKEN}),
        ):
            yield hub
    finally:
        hub.shutdown()
        hub.server_close()
