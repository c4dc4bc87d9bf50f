"""An S3 on the loopback, by moto, that fails where a test wants it to, and what is in its buckets.

Tests that import it are skipped without moto.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal
from unittest import mock

import pytest
from run_helpers import ENVIRONMENT

pytest.importorskip("moto.server", reason="moto, an S3 for tests, is not installed (pip install --group ci)")

import boto3  # moto brings these
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
Answer = int | Literal["break", "lose"]  # a status; no answer; or the request is done and the answer is lost


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        pass


class ObjectStore:
    """The server. ``fault`` is asked for each request, "PUT folder/name", and may return how it ends instead."""

    def __init__(self) -> None:
        self.fault: Callable[[str], Answer | None] = lambda request: None
        self.requests: list[str] = []
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True, request_handler=_Quiet)
        self.environment = CREDENTIALS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}"}
        self._client = boto3.client(
            "s3",
            endpoint_url=self.environment["AWS_ENDPOINT_URL"],
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        )
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._client.close()
        self._server.shutdown()
        self._server.server_close()

    def make_bucket(self, name: str) -> None:
        self._client.create_bucket(Bucket=name)

    def content(self, bucket: str) -> dict[str, bytes]:
        """All files of a bucket."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        names = [found["Key"] for page in pages for found in page.get("Contents", ())]
        return {name: self._client.get_object(Bucket=bucket, Key=name)["Body"].read() for name in names}

    def put(self, bucket: str, name: str, content: bytes) -> None:
        self._client.put_object(Bucket=bucket, Key=name, Body=content)

    def remove(self, bucket: str, name: str) -> None:
        self._client.delete_object(Bucket=bucket, Key=name)

    def uploads(self, bucket: str) -> int:
        """How many multipart uploads were begun and neither completed nor given up."""
        return len(self._client.list_multipart_uploads(Bucket=bucket).get("Uploads", ()))

    def _serve(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        is_own = "Boto3" in environ.get("HTTP_USER_AGENT", "") and "aiobotocore" not in environ["HTTP_USER_AGENT"]
        if is_own:  # the client of a test
            return self._app(environ, start_response)
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO'].lstrip('/')}"
        self.requests.append(request)
        fault = self.fault(request)
        if fault is None:
            return self._app(environ, start_response)
        if isinstance(fault, int):
            code = {403: "AccessDenied", 501: "NotImplemented", 503: "SlowDown"}.get(fault, "InternalError")
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(f"{fault} {code}", [("Content-Type", "application/xml")])
            if request.startswith("HEAD "):  # whose answer has no body; clients that are late would see one
                return []
            return [f"<Error><Code>{code}</Code><Message>{code}, by the test</Message></Error>".encode()]
        if fault == "lose":
            list(self._app(environ, lambda *args, **kwargs: None))
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        start_response("500 not sent", [])
        return []


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """A server whose address and credentials are in the environment, of processes started here too."""
    import s3fs

    store = ObjectStore()
    s3fs.S3FileSystem.clear_instance_cache()  # which knows an earlier server
    try:
        with mock.patch.dict(os.environ, store.environment), mock.patch.dict(ENVIRONMENT, store.environment):
            yield store
    finally:
        store.close()


@contextmanager
def bucket_of(store: ObjectStore, name: str) -> Iterator[str]:
    """A new bucket; no fault is left behind, and nothing waits before it tries again."""
    store.make_bucket(name)
    store.requests.clear()
    try:
        with mock.patch("batchgen.core.remote.WAITS_S", (0.0, 0.0)):
            yield name
    finally:
        store.fault = lambda request: None
