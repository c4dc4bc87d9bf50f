"""Servers on the loopback that hold remote files: S3 (moto), the web, the Hub, Google Cloud Storage; and their faults.

``FileServer`` counts requests and does what its ``faults`` say to the next ones, which are about files' contents.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from input_helpers import source_of

from batchgen.core.file_digests import Digests
from batchgen.input.source import Source


class FileServer(ThreadingHTTPServer):
    """Files by path, with byte ranges, ETags and If-Match, at ``url``.

    ``faults`` are taken one for each request of a content: a status, "reset" (after half of the bytes), "slow" (no
    byte for ``slow_s``), "short" (fewer bytes than were said) or "ok". ``headers`` are left out or added by name.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.reset()

    def reset(self, *, keep_files: bool = False) -> None:
        """As new, perhaps with the files there are."""
        self.files: dict[str, bytes] = self.files if keep_files else {}
        self.faults: list[int | str] = []
        self.lasting: int | str | None = None
        self.slow_s = 2.0
        self.has_ranges = True
        self.headers: dict[str, str | None] = {}
        self.requests: list[tuple[str, str]] = []  # path and Range
        self.denies = False
        self.heeds_if_match = True

    def handle_error(self, *_: object) -> None:
        """A client that hangs up is no error here."""

    def next_fault(self) -> int | str:
        return self.faults.pop(0) if self.faults else self.lasting or "ok"


class _Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((path, self.headers.get("Range", "")))
        if self.server.denies:
            return self.answer(403, b"", {})
        if answer := self.special(urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)):
            return self.answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})
        content = self.content(path)
        if content is None:
            return self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        return self.give(content)

    do_HEAD = do_GET  # noqa: N815 - the name BaseHTTPRequestHandler looks for

    def special(self, path: str, query: dict[str, list[str]]) -> Any:
        """An answer of another kind than a file's content."""
        return None

    def content(self, path: str) -> bytes | None:
        return self.server.files.get(path[1:])

    def give(self, content: bytes) -> None:
        fault = self.server.next_fault() if self.command == "GET" else "ok"
        if isinstance(fault, int):
            code = {403: "ExpiredToken", 503: "SlowDown"}.get(fault, str(fault))
            return self.answer(fault, f"<Error><Code>{code}</Code><Message>hm</Message></Error>".encode(), {})
        headers = {"ETag": f'"{etag(content)}"', "Last-Modified": "Sun, 22 Nov 2026 00:00:00 GMT"}
        headers = {name: text for name, text in (headers | self.server.headers).items() if text is not None}
        if self.server.heeds_if_match and self.headers.get("If-Match") not in (None, headers.get("ETag")):
            return self.answer(412, b"", {})
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if match is None or not self.server.has_ranges:
            return self.answer(200, content, headers, fault)
        if int(match[1]) >= len(content):
            return self.answer(416, b"", {"Content-Range": f"bytes */{len(content)}"} | headers)
        start, end = int(match[1]), min(int(match[2]) + 1, len(content))
        headers = {"Content-Range": f"bytes {start}-{end - 1}/{len(content)}"} | headers
        return self.answer(206, content[start:end], headers, fault)

    def answer(self, status: int, body: bytes, headers: dict[str, str], fault: str = "ok") -> None:
        if fault == "slow":
            time.sleep(self.server.slow_s)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault in ("reset", "short"):
            body = body[: len(body) // 2]
            self.close_connection = True
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


class _HubHandler(_Handler):
    """As much of the Hub as files of datasets take; ``files`` are ``user/name/path``, the commit is all they hold."""

    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.server.files.items())).encode()).hexdigest()

    def special(self, path: str, query: dict[str, list[str]]) -> Any:
        match = re.fullmatch(r"/api/datasets/(\w+/\w+)(/revision/[\w%]+|/tree/[\w%]+(?:/(.*))?|/paths-info/\w+)?", path)
        if match is None:
            return None
        inside = {
            name.removeprefix(f"{match[1]}/"): content
            for name, content in self.server.files.items()
            if name.startswith(f"{match[1]}/")
        }
        entries: list[dict[str, Any]] = [
            {"type": "file", "path": name, "size": len(content), "oid": etag(content)}
            for name, content in inside.items()
        ]
        what = str(match[2] or "")
        if what.startswith("/tree/"):
            folder = f"{unquote(match[3])}/" if match[3] else ""
            within = [entry for entry in entries if entry["path"].startswith(folder)]
            if query.get("recursive", ["false"])[0].lower() == "true":
                return within
            files = [entry for entry in within if "/" not in entry["path"][len(folder) :]]
            folders = {folder + entry["path"][len(folder) :].split("/")[0] for entry in within if entry not in files}
            return [*files, *({"type": "directory", "path": name, "oid": "0" * 40} for name in sorted(folders))] or None
        if what.startswith("/paths-info/"):
            asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            return [entry for entry in entries if entry["path"] in asked["paths"]]
        names = [{"rfilename": name} for name in inside]
        return {"id": match[1], "sha": self.commit(), "siblings": names} if inside else None

    def do_POST(self) -> None:
        answer = self.special(urlsplit(self.path).path, {})
        self.answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def content(self, path: str) -> bytes | None:
        match = re.fullmatch(r"/datasets/(\w+/\w+)/resolve/(\w+)/(.*)", path)
        if match is None or match[2] not in ("main", self.commit()):
            return None
        return self.server.files.get(f"{match[1]}/{match[3]}")


class _GcsHandler(_Handler):
    """As much of Google Cloud Storage as reading takes; ``files`` are ``bucket/name``, generations hang on contents."""

    def special(self, path: str, query: dict[str, list[str]]) -> Any:
        if query.get("alt") == ["media"]:
            return None
        match = re.fullmatch(r"/storage/v1/b/([^/]+)(?:/o(?:/([^/]+))?)?/?", path)
        if match is None:
            return None
        items = [self.described(name) for name in self.server.files if name.startswith(f"{match[1]}/")]
        if match[2]:
            name = f"{match[1]}/{unquote(match[2])}"
            return self.described(name) if name in self.server.files else None
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        items = [item for item in items if item["name"].startswith(prefix)]
        rest = {item["name"]: item["name"][len(prefix) :] for item in items}
        prefixes = {prefix + tail.split("/")[0] + "/" for tail in rest.values() if delimiter and "/" in tail}
        files = [item for item in items if not delimiter or "/" not in rest[item["name"]]]
        return {"kind": "storage#objects", "items": files, "prefixes": sorted(prefixes)}

    def described(self, name: str) -> dict[str, Any]:
        content = self.server.files[name]
        bucket, _, key = name.partition("/")
        return {
            "kind": "storage#object",
            "bucket": bucket,
            "name": key,
            "size": str(len(content)),
            "generation": generation(content),
            "etag": etag(content),
        }

    def content(self, path: str) -> bytes | None:
        match = re.fullmatch(r"/download/storage/v1/b/([^/]+)/o/(.+)", path)
        content = self.server.files.get(f"{match[1]}/{match[2]}") if match else None
        asked = parse_qs(urlsplit(self.path).query).get("generation")
        return None if content is None or asked not in (None, [generation(content)]) else content


def etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def generation(content: bytes) -> str:
    return str(int(etag(content)[:12], 16))


@contextmanager
def serving(kind: str) -> Iterator[FileServer]:
    """A server of ``kind`` "web", "s3" (single files), "hf" or "gs"."""
    server = FileServer()
    server.RequestHandlerClass = {"hf": _HubHandler, "gs": _GcsHandler}.get(kind, _Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Remote:
    """A place for remote files of one kind: ``put`` a content under a name, and read the address it returns."""

    def __init__(self, kind: str, url: str, server: FileServer | None, bucket: Any = None) -> None:
        self.kind = kind
        self.url = url
        self.server = server
        self._bucket = bucket

    def put(self, name: str, content: bytes) -> str:
        """The address of the file."""
        if self.server is None:
            self._bucket.put_object(Key=name, Body=content)
        else:
            self.server.files[f"{self._prefix}{name}"] = content
        return self.address(name)

    def remove(self, name: str) -> None:
        assert self.server is not None
        del self.server.files[f"{self._prefix}{name}"]

    def address(self, name: str) -> str:
        starts = {"web": f"{self.url}/", "hf": "hf://datasets/", "gs": "gs://"}
        return starts.get(self.kind, "s3://") + self._prefix + name

    @property
    def _prefix(self) -> str:
        return {"web": "", "hf": f"user/{BUCKET}/"}.get(self.kind, f"{BUCKET}/")


def server_of(place: Remote) -> FileServer:
    assert place.server is not None
    return place.server


def fingerprinted(address: str, **keys: Any) -> Source:
    source = source_of(address, **keys)
    source.fingerprint(Digests())
    return source


BUCKET = "rows"
CREDENTIALS = {"aws_access_key_id": "AKIAHUSH", "aws_secret_access_key": "hush"}


def settle(kind: str, url: str, patch: Any) -> None:
    """Lead the libraries of this process to a server; ``patch`` is pytest's monkeypatch."""
    import fsspec
    from huggingface_hub import constants

    for name, value in environment_of(kind, url).items():
        patch.setenv(name, value)
    hub = url if kind == "hf" else "http://127.0.0.1:1"
    patch.setattr(constants, "ENDPOINT", hub)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
    patch.setitem(fsspec.config.conf, "s3", {"endpoint_url": url})  # so that each server has its own client


@contextmanager
def remote_of(kind: str) -> Iterator[Remote]:
    """A place of ``kind`` "moto", "s3", "web", "hf" or "gs"; see ``environment_of`` for how it is reached."""
    if kind != "moto":
        with serving(kind) as server:
            yield Remote(kind, server.url, server)
        return
    pytest.importorskip("moto.server", reason="moto, an S3 for tests, is not installed (pip install --group ci)")
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    try:
        host, port = moto.get_host_and_port()
        url = f"http://{host}:{port}"
        bucket = boto3.resource("s3", endpoint_url=url, region_name="us-east-1", **CREDENTIALS).Bucket(BUCKET)
        bucket.create()
        yield Remote(kind, url, None, bucket)
    finally:
        moto.stop()


def environment_of(kind: str, url: str) -> dict[str, str]:
    """What leads the libraries of a fresh process to the server at ``url``, and to nothing beyond it."""
    aws = {name.upper(): value for name, value in CREDENTIALS.items()} | {"AWS_DEFAULT_REGION": "us-east-1"}
    aws |= {"AWS_ENDPOINT_URL": url, "AWS_EC2_METADATA_DISABLED": "true"}
    return {
        "s3": aws,
        "moto": aws,
        "hf": {"HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"},
        "gs": {"STORAGE_EMULATOR_HOST": url, "FSSPEC_GS_TOKEN": "anon", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"},
    }.get(kind, {})
