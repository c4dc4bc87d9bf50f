"""A folder of an object store or of a dataset on the Hub, in which files appear complete or not at all.

A write is one PUT, a multipart upload whose last request makes the object appear, or a commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from batchgen.core.addresses import scheme_of
from batchgen.core.remote import STILL_S, RemoteError, attempt, open_store

T = TypeVar("T")
_CHUNK_BYTES = 16 << 20  # of a multipart upload
_MAX_CHUNKS = 9_000  # S3 takes 10,000
_AT_ONCE = 4  # chunks in memory
_SLOWEST = 128 << 10  # bytes a second of a connection on which a write does not count as stuck


class Entry(NamedTuple):
    """An existing file: its size in bytes, and its version, which changes with its content ("" if unknown)."""

    size: int
    version: str


class Bucket:
    """The files below ``address``, by relative names. Methods retry transient errors, and raise RemoteError."""

    def __init__(self, address: str) -> None:
        from fsspec.implementations.dirfs import DirFileSystem

        self.address = address.rstrip("/")
        self._scheme = scheme_of(address)
        store, root = open_store(self.address)
        if self._scheme == "hf":
            attempt("create", self.address, lambda: _create_dataset(root))
        self._store: Any = DirFileSystem(root, store, skip_instance_cache=True)

    def entry(self, name: str) -> Entry | None:
        """The file of that name, None if it does not exist."""
        self._store.invalidate_cache()
        info = self._if_present("look up", name, lambda: self._store.info(name))
        return _entry(info) if info is not None and info["type"] == "file" else None

    def read(self, name: str) -> bytes | None:
        """The content of a small file, None if it does not exist."""
        at_once = {"max_concurrency": 1} if self._scheme == "s3" else {}  # which spares a look at its size
        content: bytes | None = self._if_present("read", name, lambda: self._store.cat_file(name, **at_once))
        return content

    def write(self, name: str, content: bytes) -> None:
        options = self._options(len(content))
        self._do("write", name, lambda: self._store.pipe_file(name, content, **options))

    def upload(self, name: str, path: Path) -> None:
        size = path.stat().st_size
        options = self._options(size)
        if self._scheme != "hf":
            options["chunksize"] = max(_CHUNK_BYTES, -(-size // _MAX_CHUNKS // (1 << 18)) << 18)
        if self._scheme == "s3":
            options["max_concurrency"] = _AT_ONCE
        self._do("write", name, lambda: self._store.put_file(str(path), name, **options))

    def remove(self, names: Sequence[str]) -> None:
        """Remove files; missing ones are ignored."""
        for name in names:
            self._if_present("remove", name, partial(self._store.rm_file, name))

    def _options(self, num_bytes: int) -> dict[str, Any]:
        """Options of a write. The stores' libraries limit only the wait for an answer after all is sent."""
        return {} if self._scheme == "hf" else {"timeout": STILL_S + num_bytes / _SLOWEST}

    def _do(self, doing: str, name: str, call: Callable[[], T]) -> T:
        return attempt(doing, f"{self.address}/{name}", call)

    def _if_present(self, doing: str, name: str, call: Callable[[], T]) -> T | None:
        try:
            return self._do(doing, name, call)
        except RemoteError as error:
            if error.kind != "missing":
                raise
            return None


def _create_dataset(path: str) -> None:
    from huggingface_hub import HfApi

    repo_id = "/".join(path.split("/")[1:3])
    HfApi().create_repo(repo_id, repo_type="dataset", private=True, exist_ok=True)


def _entry(info: dict[str, Any]) -> Entry:
    version = next((info[key] for key in ("ETag", "etag", "generation") if info.get(key)), "")
    return Entry(int(info["size"]), str(version))
