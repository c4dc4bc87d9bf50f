"""One version of a file in each kind of store, read by byte ranges: S3, Google Cloud Storage, the Hub, a web server.

S3 is asked for an ETag, Google Cloud Storage for a generation, the Hub for a commit. The web is read by the standard
library and not by fsspec, whose HTTP file system shows no version of an answer and takes one of any size. Proxies come
from the environment; no credentials are sent to web servers.
"""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from http.client import HTTPResponse
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from fsspec.spec import AbstractBufferedFile

from batchgen.core.errors import RemoteError, UsageError
from batchgen.core.version import __version__

TIMEOUT_S = 30.0  # without a byte
_BLOCK_BYTES = 4 << 20  # read ahead
_WHOLE_BYTES = 8 << 20  # of a file that is fetched whole for a part of it, where the server knows no ranges
_RANGE = re.compile(r"bytes (?:(\d{1,18})-\d{1,18}|\*)/(\d{1,18})")
_LOST = "its redirects loop, leave HTTP, or drop encryption; batchgen does not follow them"
_LEFT_AS_THEY_ARE = "%/:=&?~#+!$,;'@()*[]"


class PinnedFile(Protocol):
    """One version of one file; both methods raise the errors of the store's library (see ``core.remote.attempt``)."""

    def look(self) -> tuple[int, str]:
        """Size in bytes and version now, of which ``fetch`` gives bytes from here on. Raises FileNotFoundError."""

    def fetch(self, start: int, end: int) -> bytes:
        """The bytes of that version from ``start`` up to ``end``; fewer where the connection breaks off.

        Raises RemoteError of kind "changed", or an error with status 412, where the store has another version by now.
        """


class _StoreFile:
    """A file that an fsspec file system knows; its version is what ``mark`` names in the system's description."""

    mark: str

    def __init__(self, store: Any, path: str) -> None:
        self._store, self._path, self._version = store, path, ""

    def look(self) -> tuple[int, str]:
        info = self._store.info(self._path)
        if info["type"] != "file":
            raise FileNotFoundError(self._path)
        self._version = str(info[self.mark])
        return int(info["size"]), self._version


class S3File(_StoreFile):
    """An object of S3, or of a server that speaks its protocol."""

    mark = "ETag"

    def fetch(self, start: int, end: int) -> bytes:
        from fsspec.asyn import sync

        bucket, key, _ = self._store.split_path(self._path)
        part = f"bytes={start}-{end - 1}"
        answer = self._store.call_s3("get_object", Bucket=bucket, Key=key, Range=part, IfMatch=self._version)
        try:
            if answer.get("ETag") != self._version:  # not every server of the protocol heeds If-Match
                raise RemoteError(f"cannot read {self._path}: it is no longer the same version", "changed")
            if answer["ContentLength"] != end - start:  # before it is in memory
                raise ConnectionError(f"the server offers {answer['ContentLength']:,} bytes, not {end - start:,}")
            return bytes(sync(self._store.loop, answer["Body"].read))
        finally:
            answer["Body"].close()


class GsFile(_StoreFile):
    """An object of Google Cloud Storage."""

    mark = "generation"

    def fetch(self, start: int, end: int) -> bytes:
        return bytes(self._store.cat_file(self._path, start=start, end=end, generation=self._version))


class HubFile:
    """A file of a dataset on the Hub; its version is its blob id, so that a commit of other files changes nothing."""

    def __init__(self, store: Any, path: str) -> None:
        self._store, self._path, self._pinned = store, path, ""

    def look(self) -> tuple[int, str]:
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        self._store.invalidate_cache()
        where = self._store.resolve_path(self._path)
        api = HfApi()
        asked = {"repo_type": where.repo_type, "revision": where.revision, "timeout": TIMEOUT_S}
        commit = api.repo_info(where.repo_id, **asked).sha
        found = api.get_paths_info(where.repo_id, [where.path_in_repo], revision=commit, repo_type=where.repo_type)
        if not found or not isinstance(found[0], RepoFile):
            raise FileNotFoundError(self._path)
        self._pinned = f"datasets/{where.repo_id}@{commit}/{where.path_in_repo}"
        return int(found[0].size), str(found[0].blob_id)

    def fetch(self, start: int, end: int) -> bytes:
        return bytes(self._store.cat_file(self._pinned, start=start, end=end, cache_type="none"))


class WebFile:
    """The file at ``address``; its version is the ETag, or where there is none the time of the last change.

    Both methods raise what the network does, and RemoteError for an answer that cannot be used.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._url = quote(address, safe=_LEFT_AS_THEY_ARE)
        self._size, self._version = 0, ""

    def look(self) -> tuple[int, str]:
        """See ``PinnedFile.look``. Raises UsageError where the server tells no version."""
        try:
            with _open(self._url, {"Range": "bytes=0-0"}) as answer:
                headers: Message = answer.headers
        except urllib.error.HTTPError as error:
            if error.code != 416:  # no byte 0 in an empty file
                raise
            headers = error.headers
        size, version = _total(headers), _version(headers)
        if size is None or not version:
            raise UsageError(
                f"{self._address}: the server sends no {'size' if version else 'ETag or Last-Modified'}, so a changed "
                "file cannot be detected: download it to this machine first"
            )
        self._size, self._version = size, version
        return size, version

    def fetch(self, start: int, end: int) -> bytes:
        headers = {"Range": f"bytes={start}-{end - 1}"}
        if self._version.startswith('"'):  # no weak ETag may be asked for
            headers["If-Match"] = self._version
        with _open(self._url, headers) as answer:
            if (_version(answer.headers), _total(answer.headers)) != (self._version, self._size):
                raise RemoteError(f"cannot read {self._address}: it is no longer the same version", "changed")
            if answer.status == 206:
                part = _RANGE.match(answer.headers.get("Content-Range", ""))
                if part is None or part[1] is None or int(part[1]) != start:
                    raise RemoteError(f"cannot read {self._address}: the server gives another part than was asked for")
                return answer.read(end - start)
            if self._size > _WHOLE_BYTES:
                raise RemoteError(
                    f"cannot read {self._address}: the server does not support byte ranges: "
                    "download the file to this machine first"
                )
            return answer.read(end)[start:]


def _version(headers: Message) -> str:
    return str(headers.get("ETag") or headers.get("Last-Modified") or "")


def _total(headers: Message) -> int | None:
    """The size of the whole file, which an answer with a part of it tells too."""
    if part := _RANGE.match(headers.get("Content-Range", "")):
        return int(part[2])
    length = headers.get("Content-Length", "")
    return int(length) if re.fullmatch(r"\d{1,18}", length) and "Content-Range" not in headers else None


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Refuses to leave the web, or encryption."""

    def redirect_request(self, req: urllib.request.Request, *rest: Any) -> urllib.request.Request | None:
        scheme = urlsplit(rest[-1]).scheme.lower()
        if scheme != "https" and (scheme != "http" or req.type == "https"):
            return None  # an error of status 3xx
        return super().redirect_request(req, *rest)


def _open(url: str, headers: dict[str, str]) -> HTTPResponse:
    fixed = {"User-Agent": f"batchgen/{__version__}", "Accept-Encoding": "identity"}
    request = urllib.request.Request(url, headers=fixed | headers)
    try:
        answer: HTTPResponse = urllib.request.build_opener(_Redirects).open(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()
        if 300 <= error.code < 400:
            raise RemoteError(f"cannot read {url}: {_LOST}") from error
        raise
    return answer


class PinnedStream(AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no annotations
    """A seekable stream of a remote file, of which ``read`` gives a range of bytes; it holds one block."""

    def __init__(self, read: Callable[[int, int], bytes], num_bytes: int) -> None:
        self._read = read
        super().__init__(None, "", block_size=_BLOCK_BYTES, size=num_bytes)

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self._read(start, end)
