"""Publication of a finished run's files: to a folder of an object store, or as a commit to a dataset on the Hub.

``batchgen.json`` beside them says whose files they are, so that nothing else is ever replaced, and what they hold, so
that publishing again copies only what is missing or differs. It says ``"complete": true`` once all files are there;
the outputs are the last of them to appear. A kill at any moment leaves a destination that the next attempt completes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from batchgen.core.errors import UsageError
from batchgen.core.fingerprint import file_digest
from batchgen.core.storage import storage_errors
from batchgen.core.version import __version__
from batchgen.output.bucket import Bucket
from batchgen.output.hub import HubDataset
from batchgen.output.manifest import Manifest
from batchgen.output.rundir import RunDir

MARKER = "batchgen.json"
_UNKNOWN = {"bytes": 0, "sha256": "", "version": ""}  # of a file that is being replaced


@dataclass(frozen=True)
class Marker:
    """The content of ``batchgen.json``; ``files`` maps names to bytes, sha256, and the version the store gave them.

    ``created_at`` and ``fingerprint`` tell runs apart; ``finished_at`` tells the states of one run's outputs apart.
    """

    created_at: str
    fingerprint: str
    finished_at: str = ""
    complete: bool = False
    files: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    def is_of(self, other: Marker) -> bool:
        """Whether both are of one run."""
        return (self.created_at, self.fingerprint) == (other.created_at, other.fingerprint)

    def to_bytes(self) -> bytes:
        return json.dumps({"batchgen": __version__, **asdict(self)}, indent=2).encode() + b"\n"

    @classmethod
    def from_bytes(cls, content: bytes) -> Marker | None:
        """The marker, None for what is none."""
        try:
            data = json.loads(content)
            del data["batchgen"]
            marker = cls(**data)
            is_sound = all({"bytes", "sha256", "version"} <= state.keys() for state in marker.files.values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        return marker if is_sound else None


def open_destination(address: str) -> Bucket | HubDataset:
    """The folder or dataset that ``output.publish`` names."""
    return HubDataset(address) if address.lower().startswith("hf:") else Bucket(address)


class Publication:
    """The files of one run at their destination. Raises RemoteError for what the store refuses."""

    def __init__(self, to: Bucket | HubDataset, run_dir: RunDir, manifest: Manifest) -> None:
        self._to = to
        self._run_dir = run_dir
        self._manifest = manifest
        self._marker = Marker(*identity(manifest))

    def claim(self, *, overwrite: bool) -> None:
        """Before anything is run: see that the destination can be written and holds no other run's files.

        Those that ``overwrite`` permits to replace are noted there, so that a resume may replace them too. Raises
        UsageError.
        """
        self._to.prepare()
        found = self._found(overwrite=overwrite) or self._marker
        if not found.complete and (found.files or not isinstance(self._to, HubDataset)):  # a commit is kept for ever
            self._to.write(MARKER, found.to_bytes())
            self._to.commit("Begin a run of batchgen")

    def publish(self, *, with_manifest: bool = False) -> str:
        """Copy what is not there yet. Returns what was done, in words.

        Raises UsageError if the destination has become another run's.
        """
        to, report = self._to, _read_report(self._run_dir)
        to.prepare()
        marker = replace(self._marker, finished_at=str(report.get("finished_at", "")))
        before = self._found(overwrite=False) or marker
        if before.complete and before.finished_at > marker.finished_at:
            return f"{to.address} is left as it is: it holds a later state of this run"
        paths = {path.name: path for path in self._run_dir.finished_files(with_manifest=with_manifest)}
        states = {name: _state(path) for name, path in paths.items()}
        new = [name for name, state in states.items() if not self._is_there(name, state, before.files.get(name))]
        gone = sorted(before.files.keys() - states.keys())
        if before.complete and not new and not gone:
            return f"already published to {to.address}"
        to.write(MARKER, replace(marker, files={**dict.fromkeys(states, _UNKNOWN), **before.files}).to_bytes())
        for name in new:
            to.upload(name, paths[name])
        to.remove(gone)
        if isinstance(to, HubDataset):
            to.describe(self._manifest, report, [*paths][-1])
        for name, state in states.items():
            entry = to.entry(name)
            state["version"] = entry.version if entry is not None else ""
        to.write(MARKER, replace(marker, files=states, complete=True).to_bytes())
        to.commit("Publish a finished run of batchgen")
        return f"published to {to.address}"

    def _is_there(self, name: str, state: dict[str, Any], published: Mapping[str, Any] | None) -> bool:
        """Whether the destination has the file as it is here."""
        entry = self._to.entry(name)
        if published is None or entry is None or published["sha256"] != state["sha256"]:
            return False
        return entry.size == state["bytes"] and published["version"] in ("", entry.version)

    def _found(self, *, overwrite: bool) -> Marker | None:
        """What this run has at the destination, or may replace there; None where nothing is.

        A marker of another run that has published nothing is the rest of a run that was never finished.
        """
        content = self._to.read(MARKER)
        marker = None if content is None else Marker.from_bytes(content)
        if marker is not None and marker.is_of(self._marker):
            return marker
        there = [name for name in self._run_dir.finished_names if self._to.entry(name) is not None]
        if content is not None and marker is None:
            there.append(MARKER)
        if not there:
            return None
        if not overwrite:
            whose = f" of another run, begun {marker.created_at}" if marker else ""
            raise UsageError(
                f"{self._to.address} holds {there[0]}{whose}: it is not replaced; choose another folder, remove it "
                "there, or start a new run with --overwrite"
            )
        return replace(self._marker, files=dict.fromkeys(there, _UNKNOWN))


def identity(manifest: Manifest) -> tuple[str, str]:
    """When a run was begun and a digest of what it computes: equal for all its invocations."""
    plain = json.loads(manifest.to_bytes())
    what = [plain["output_keys"], plain["shard"], *(plain["fingerprints"].get(key) for key in ("input", "model"))]
    return manifest.created_at, sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _read_report(run_dir: RunDir) -> dict[str, Any]:
    """The content of ``report.json``, {} where it is none."""
    try:
        found = json.loads(run_dir.report.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _state(path: Path) -> dict[str, Any]:
    with storage_errors("read", path):
        return {"bytes": path.stat().st_size, "sha256": file_digest(path), "version": ""}
