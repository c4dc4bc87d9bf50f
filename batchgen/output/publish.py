"""Publication of a finished run's files: to a folder of an object store, or of a dataset on the Hub.

There ``batchgen.json`` names the run, so that only its files are replaced; it is ``complete`` when all are copied.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from batchgen.core.addresses import scheme_of
from batchgen.core.errors import UsageError
from batchgen.core.file_digests import file_digest
from batchgen.core.remote import STILL_S, RemoteError, attempt, open_store
from batchgen.core.storage import storage_errors
from batchgen.core.version import __version__
from batchgen.output.manifest import Manifest
from batchgen.output.rundir import RunDir

T = TypeVar("T")
_CHUNK_BYTES = 16 << 20  # of a multipart upload
_MAX_CHUNKS = 9_000  # S3 takes 10,000
_AT_ONCE = 4  # chunks in memory
_SLOWEST = 128 << 10  # bytes a second of a connection on which a write does not count as stuck
PUBLISHED = "batchgen.json"
_UNKNOWN = {"bytes": 0, "sha256": "", "version": ""}  # of a file that is being replaced


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
        at_once = {"max_concurrency": 1} if self._scheme == "s3" else {}  # then its size need not be looked up
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
        """Options of a write: its timeout. The libraries only limit the wait for an answer once all is sent."""
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


@dataclass(frozen=True)
class PublishManifest:
    """The content of ``batchgen.json``; ``files`` maps names to bytes, sha256, and the store's version.

    ``created_at`` and ``shard`` identify the run directory, however often its job and input change.
    """

    created_at: str
    shard: str
    complete: bool = False
    files: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    def is_of(self, other: PublishManifest) -> bool:
        return (self.created_at, self.shard) == (other.created_at, other.shard)

    def to_bytes(self) -> bytes:
        return json.dumps({"batchgen": __version__, **asdict(self)}, indent=2).encode() + b"\n"

    @classmethod
    def read(cls, bucket: Bucket) -> PublishManifest | None:
        """The manifest at a destination, None if a run has not written one there. Raises RemoteError."""
        content = bucket.read(PUBLISHED) or b""
        try:
            data = json.loads(content)
            manifest = cls(*(data[key] for key in ("created_at", "shard", "complete", "files")))
            is_sound = all({"bytes", "sha256", "version"} <= state.keys() for state in manifest.files.values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        return manifest if is_sound else None


class Publication:
    """The files of one run directory at their destination. Raises RemoteError if the store refuses."""

    def __init__(self, to: Bucket, run_dir: RunDir, manifest: Manifest) -> None:
        self._to = to
        self._run_dir = run_dir
        self._own = PublishManifest(manifest.created_at, str(manifest.shard))

    def claim(self, *, overwrite: bool) -> None:
        """Check, before anything runs, that the destination is writable and does not hold another run's files.

        Files that ``overwrite`` permits to replace are noted there, so that a resume may replace them too. Raises
        UsageError.
        """
        begun = self._replaceable(overwrite=overwrite) or self._own
        if not begun.complete:
            self._to.write(PUBLISHED, begun.to_bytes())

    def publish(self) -> list[str]:
        """Copy files that are not there yet; returns what was done. Raises UsageError for another run's destination."""
        to, now = self._to, self._own
        before = self._replaceable(overwrite=False) or now
        paths = {path.name: path for path in self._run_dir.finished_files()}
        states = {name: _state(path) for name, path in paths.items()}
        new = [name for name, state in states.items() if not self._is_there(name, state, before.files.get(name))]
        gone = sorted(before.files.keys() - states.keys())
        if before.complete and not new and not gone:
            return [f"already published to {to.address}"]
        to.write(PUBLISHED, replace(now, files={**dict.fromkeys(states, _UNKNOWN), **before.files}).to_bytes())
        for name in new:
            to.upload(name, paths[name])
        to.remove(gone)
        for name, state in states.items():
            entry = to.entry(name)
            state["version"] = entry.version if entry is not None else ""
        to.write(PUBLISHED, replace(now, files=states, complete=True).to_bytes())
        return [f"published to {to.address}"]

    def _is_there(self, name: str, state: dict[str, Any], published: Mapping[str, Any] | None) -> bool:
        """Whether the destination has this file with the same content."""
        entry = self._to.entry(name)
        if published is None or entry is None or published["sha256"] != state["sha256"]:
            return False
        return entry.size == state["bytes"] and published["version"] in ("", entry.version)

    def _replaceable(self, *, overwrite: bool) -> PublishManifest | None:
        """The files at the destination that belong to this run or that it may replace; None if it is empty.

        The manifest of another run without files was left by an unfinished run, and may be replaced.
        """
        manifest = PublishManifest.read(self._to)
        if manifest is not None and manifest.is_of(self._own):
            return manifest
        names = (*self._run_dir.finished_names, *(() if manifest else (PUBLISHED,)))
        existing = [name for name in names if self._to.entry(name) is not None]
        if not existing:
            return None
        if not overwrite:
            whose = f" of another run, begun {manifest.created_at}" if manifest else ""
            raise UsageError(
                f"{self._to.address} holds {existing[0]}{whose}: it is not replaced; choose another folder, remove it "
                "there, or start a new run with --overwrite"
            )
        return replace(self._own, files=dict.fromkeys(existing, _UNKNOWN))


def _state(path: Path) -> dict[str, Any]:
    with storage_errors("read", path):
        return {"bytes": path.stat().st_size, "sha256": file_digest(path), "version": ""}
