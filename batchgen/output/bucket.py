"""A folder of an object store: files that appear there whole or not at all, and lists of what is there.

Each write is one PUT, or a multipart upload whose last request makes the object appear. What a file means is not known
here; ``publish`` decides on names and order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from batchgen.core.remote import STILL_S, RemoteError, attempt, open_store

T = TypeVar("T")
_CHUNK_BYTES = 16 << 20  # of a multipart upload
_MAX_CHUNKS = 9_000  # S3 takes 10,000
_AT_ONCE = 4  # chunks in memory
_SLOWEST = 128 << 10  # bytes a second of a connection on which a write does not count as stuck


class Entry(NamedTuple):
    """A file that is there: its size in bytes, and what changes with its content ("" where the store has no such)."""

    size: int
    version: str


class Bucket:
    """The files below ``address``, known by their names relative to it.

    What may pass is tried again. All methods raise RemoteError.
    """

    def __init__(self, address: str) -> None:
        from fsspec.implementations.dirfs import DirFileSystem

        self.address = address.rstrip("/")
        store, root = open_store(self.address)
        self._store: Any = DirFileSystem(root, store, skip_instance_cache=True)
        self._is_s3 = self.address.lower().startswith("s3:")

    def entry(self, name: str) -> Entry | None:
        """The file of that name, None if there is none."""
        info = self._if_present("look up", name, lambda: self._store.info(name))
        return _entry(info) if info is not None and info["type"] == "file" else None

    def read(self, name: str) -> bytes | None:
        """The content of a small file, None if there is none."""
        at_once = {"max_concurrency": 1} if self._is_s3 else {}  # which spares a look at its size
        content: bytes | None = self._if_present("read", name, lambda: self._store.cat_file(name, **at_once))
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a file."""
        limit_s = _limit_s(len(content))
        self._do("write", name, lambda: self._store.pipe_file(name, content, timeout=limit_s))

    def upload(self, name: str, path: Path) -> None:
        """Copy a local file there."""
        size = path.stat().st_size
        options: dict[str, Any] = {"chunksize": max(_CHUNK_BYTES, -(-size // _MAX_CHUNKS // (1 << 18)) << 18)}
        if self._is_s3:
            options["max_concurrency"] = _AT_ONCE
        self._do("write", name, lambda: self._store.put_file(str(path), name, timeout=_limit_s(size), **options))

    def remove(self, names: Sequence[str]) -> None:
        """Remove files; missing ones are passed over."""
        if names:
            self._if_present("remove", names[0], lambda: self._store.rm([*names]))

    def prepare(self) -> None:
        """Nothing is needed before files are written."""

    def commit(self, message: str) -> None:
        """Nothing is left to do: each file is there as soon as it is written."""

    def _do(self, doing: str, name: str, call: Callable[[], T]) -> T:
        return attempt(doing, f"{self.address}/{name}", call)

    def _if_present(self, doing: str, name: str, call: Callable[[], T]) -> T | None:
        try:
            return self._do(doing, name, call)
        except RemoteError as error:
            if error.kind != "missing":
                raise
            return None


def _limit_s(num_bytes: int) -> float:
    """Limit of a write in seconds; the libraries bound only the wait for an answer once all is sent."""
    return STILL_S + num_bytes / _SLOWEST


def _entry(info: dict[str, Any]) -> Entry:
    version = next((info[key] for key in ("ETag", "etag", "generation") if info.get(key)), "")
    return Entry(int(info["size"]), str(version))
