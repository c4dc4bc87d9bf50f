"""``job.json``: the job of a run directory's outputs, or of one of its journals, and its comparison with other jobs.

Plain data is compared; keys declare whether they change outputs (``JobSpec.output_keys``).
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from batchgen.config.job import JobSpec
from batchgen.config.load import job_from_dict
from batchgen.config.output import OutputSpec
from batchgen.core.errors import UsageError
from batchgen.core.json_line import encode_json, is_count
from batchgen.core.keys import keys_of
from batchgen.core.numerics import Numerics
from batchgen.core.units import WHOLE, Shard, shortened
from batchgen.core.version import RESULTS, build

RECORD_VERSION = 9  # of job.json, a job's keys, the fields of a record and the journal's lines
FORM = ("format", "logprobs_dtype")  # keys of [output] by which the same results are written in another form
_MISSING = "(not there)"
_UNSET = "(not set)"
_SHOWN_CHARS = 60
_SHOWN_BEFORE = 16  # characters before the first difference
_SHOWN_LINES = 20
_DIGEST = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{56}\b")  # a SHA-256; its first digits are shown


@dataclass(frozen=True)
class Manifest:
    """The resolved job and what it ran on.

    Attributes:
        job, output_keys: ``JobSpec.to_dict()`` and ``JobSpec.output_keys()``.
        fingerprints: what identifies the ``input``, the ``model`` and the ``code``.
        num_rows: input rows over all shards, once all are in the journal.
        taken: whether the journal has all rows kept from earlier results.
        num_good: rows that can run, if they were counted when rows were kept.
        created_at: when the folder was begun, in ISO 8601 with the local offset; updates inherit it.
        rendered_at: the time that chat templates print: the reused rows' time, or else ``created_at``.
        parts: digests of the merged shards.
        files: files of a finished job, by name with ``bytes`` and ``sha256``.
        journal: the folder that ``files`` were written from.
        file_states: ``Digests.to_plain()``, so that unchanged files are not read again; it is not compared.
        version: ``RECORD_VERSION`` or an earlier one, whose rows are not reused.
        batchgen: the build that wrote it, "" before 0.2.0.
    """

    job: dict[str, Any]
    output_keys: dict[str, Any]
    fingerprints: dict[str, Any] = field(default_factory=dict)
    shard: Shard = WHOLE
    num_rows: int | None = None
    taken: bool = False
    num_good: int | None = None
    created_at: str = ""
    rendered_at: datetime | None = None
    parts: list[str] = field(default_factory=list)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    journal: str = ""
    file_states: dict[str, Any] = field(default_factory=dict)
    version: int = RECORD_VERSION
    batchgen: str = field(default_factory=build)

    def to_bytes(self) -> bytes:
        plain = json.loads(encode_json({"version": 0, "batchgen": "", **asdict(self), "shard": astuple(self.shard)}))
        return json.dumps(plain, indent=2, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Read ``job.json``, written by this or an earlier version. Raises ValueError naming what is wrong with it."""
        try:
            data = json.loads(content)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        version = data.get("version") if isinstance(data, dict) else None
        if not is_count(version):
            raise ValueError("it has no record version")
        if version > RECORD_VERSION:
            raise ValueError(f"a later batchgen wrote it (record version {version}, this one writes {RECORD_VERSION})")
        names = {item.name for item in fields(cls)}
        if version < RECORD_VERSION:
            data = {"batchgen": "", **{name: value for name, value in data.items() if name in names}}
        if wrong := {"job", "output_keys"} - data.keys() or data.keys() - names:
            raise ValueError(f"it has other keys than a job.json ({', '.join(sorted(wrong))})")
        if not _is_shard(data.get("shard", [1, 1])):
            raise ValueError("shard is not [i, n] with 1 <= i <= n")
        data["shard"] = Shard(*data.get("shard", ()))
        try:
            at = [datetime.fromisoformat(text) for name in ("rendered_at", "created_at") if (text := data.get(name))]
        except (TypeError, ValueError):
            raise ValueError("created_at or rendered_at is not a date and time") from None
        data["rendered_at"] = at[0] if at else None
        manifest = cls(**data)
        manifest._check()
        return manifest

    @property
    def numerics(self) -> Numerics | None:
        """The numerics of the rows; None until they are known."""
        plain = self.fingerprints.get("numerics")
        return None if plain is None else Numerics.of(plain)

    def with_numerics(self, numerics: Numerics) -> Manifest:
        return replace(self, fingerprints={**self.fingerprints, "numerics": numerics.plain})

    def after(self, begun: Manifest) -> Manifest:
        """This manifest with the numerics to expect after the job ``begun``, known before the weights are loaded."""
        numerics = begun.numerics
        return self if numerics is None else self.with_numerics(numerics.in_job(begun.job, self.job))

    @property
    def num_files(self) -> int:
        return len(self.fingerprints.get("input", {}).get("files", ()))

    def spec(self, path: Path) -> JobSpec:
        """The job of this ``job.json`` at ``path``. Raises UsageError if it was edited or is of another version."""
        try:
            return job_from_dict(self.job, path)
        except UsageError as error:
            if self.fingerprints.get("code") == {"results": RESULTS}:
                raise UsageError(f"{error}; was it edited?") from None
            remedy = "run its job file with --update or --overwrite, or read its outputs as they are"
            raise UsageError(f"{path.parent} was begun by another version of batchgen: {remedy} ({error})") from None

    def _check(self) -> None:
        """Raises ValueError naming the first key whose value has an impossible shape."""
        for name in ("job", "output_keys", "fingerprints", "file_states", "files"):
            _check_object(name, getattr(self, name))
        for key, value in self.job.items():
            _check_object(f"job.{key}", value)
        for key in ("input", "model", "numerics"):
            _check_object(f"fingerprints.{key}", self.fingerprints.get(key, {}))
        _check_object("fingerprints.input.types", self.fingerprints.get("input", {}).get("types", {}))
        files = self.fingerprints.get("input", {}).get("files", [])
        if not isinstance(files, list) or not all(isinstance(file, dict) for file in files):
            raise ValueError("fingerprints.input.files is not a list of objects")
        if not all(is_count(file.get("bytes", 0)) for file in files):
            raise ValueError("fingerprints.input.files has a file whose bytes are not a number")
        signs = [file.get("delimiter", ",") for file in files]
        if not all(isinstance(sign, str) and len(sign) == 1 and sign not in '"\r\n\0' for sign in signs):
            raise ValueError("fingerprints.input.files has a file whose delimiter is not a character")
        kind = keys_of(OutputSpec)["format"].kind
        if self.job.get("output", {}).get("format") not in kind.choices:
            raise ValueError(f"job.output.format must be one of {kind.metavar}")
        for name in ("num_rows", "num_good"):
            if not ((number := getattr(self, name)) is None or is_count(number)):
                raise ValueError(f"{name} is not a number of rows")
        if not all(isinstance(item, dict) and {"bytes", "sha256"} <= item.keys() for item in self.files.values()):
            raise ValueError("files has one without bytes and sha256")
        if not isinstance(self.journal, str):
            raise ValueError("journal is not the name of a folder")


def _check_object(key: str, value: object) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{key} is not an object")


def _is_shard(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2 or not all(map(is_count, value)):
        return False
    return bool(1 <= value[0] <= value[1])


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between a job and the job that a directory was begun with, one line each."""

    refused: tuple[str, ...]  # these change outputs
    allowed: tuple[str, ...]


def compare(old: Manifest, new: Manifest) -> Comparison:
    """The differences between the manifest on disk and a job; the job may resume it if ``refused`` is empty."""
    bound, loose = [], []
    for manifest in (old, new):
        facts = {"record version": manifest.version, "": manifest.output_keys, **manifest.fingerprints}
        bound.append({**facts, "shard": str(manifest.shard)})
        loose.append({key: value for key, value in _flat(manifest.job).items() if key not in manifest.output_keys})
    return Comparison(differences(*bound), differences(*loose))


def differences(old_tree: Mapping[str, Any], new_tree: Mapping[str, Any]) -> tuple[str, ...]:
    """The differences between two trees of plain data, one line each."""
    old, new = _flat(old_tree), _flat(new_tree)
    keys = [*old, *(key for key in new if key not in old)]
    changed = [key for key in keys if key not in old or key not in new or old[key] != new[key]]
    lines = []
    for key in changed[:_SHOWN_LINES]:
        was, now = _shown(_text(old, key), _text(new, key))
        lines.append(f"{key}: was {was}, now {now}")
    more = [f"and {len(changed) - len(lines):,} more"] if len(changed) > len(lines) else []
    return (*lines, *more)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings and lists as one mapping with keys like ``a.b[0].c``; values as after a round trip through JSON.

    Files are keyed by name and compared in order, so that a missing file is the only difference.
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix and key else prefix or key
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, name)
        elif isinstance(value, list | tuple) and value and all(isinstance(item, Mapping) and item for item in value):
            files, counts = [item["file"] for item in value if "file" in item], Counter[str]()
            for i, item in enumerate(value):
                label = str(item.get("file", i))
                counts[label] += 1
                label = label if counts[label] == 1 else f"{label} ({counts[label]})"
                flat |= _flat({key: part for key, part in item.items() if key != "file"}, f"{name}[{label}]")
            flat |= {f"{name}.order": files} if files else {}
        else:
            flat[name] = json.loads(encode_json(value))
    return flat


def _text(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    if value is None:
        return _UNSET if key in values else _MISSING
    is_json = isinstance(value, str) and value.startswith('{"')
    return _DIGEST.sub(r"\1...", value if is_json else json.dumps(value, ensure_ascii=False))


def _shown(*texts: str) -> list[str]:
    """Two different texts in short form; long ones with a common beginning are cut shortly before the difference."""
    common = os.path.commonprefix(texts)  # noqa: RUF071 - of characters is what is wanted, of any text
    start = len(common) - _SHOWN_BEFORE if max(map(len, texts)) > _SHOWN_CHARS else 0
    return [shortened(f"…{text[start:]}" if start > 0 else text, _SHOWN_CHARS) for text in texts]
