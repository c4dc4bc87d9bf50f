"""``job.json``: the job a run directory was begun with, and whether another job may resume it.

Plain data is compared: which keys change outputs is declared with the keys (``JobSpec.output_keys``), and the
fingerprints of an input or a model are made where those are read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from datetime import datetime
from typing import Any

from batchgen.config.job import SAMPLING_COLUMNS, OutputSpec, changes_outputs, is_default, record_keys_of
from batchgen.core.json_line import encode_json
from batchgen.core.records import WHOLE, Shard
from batchgen.core.units import shortened

KERNELS = "kernels"  # key of fingerprints["numerics"]; runs of earlier builds lack it
_VERSION = 1  # of the run directory's layout, the journal's lines included
_MAX_COUNT = 2**62
_MISSING = "(not there)"
_UNSET = "(not set)"
_SHOWN_CHARS = 60
_SHOWN_BEFORE = 16  # characters before the first difference
_SHOWN_LINES = 20
_DIGEST = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{56}\b")  # a SHA-256; its first digits are shown


@dataclass(frozen=True)
class Manifest:
    """The resolved job and what it ran on.

    ``job`` is ``JobSpec.to_dict()``, ``output_keys`` is ``JobSpec.output_keys()``; ``fingerprints`` identify the
    input, the model and the code (keys ``input``, ``model``, ``code``). ``num_rows`` is the number of input rows over
    all shards, known once the input was read to its end. ``created_at`` is when the run was begun, in ISO 8601 with the
    offset of its place: the time that a chat template prints, however often the run is resumed. ``file_states`` is
    ``Digests.to_plain()``, which lets the next invocation skip reading unchanged files; it identifies nothing.
    """

    job: dict[str, Any]
    output_keys: dict[str, Any]
    fingerprints: dict[str, Any] = field(default_factory=dict)
    shard: Shard = WHOLE
    num_rows: int | None = None
    created_at: str = ""
    file_states: dict[str, Any] = field(default_factory=dict)

    @property
    def begun_at(self) -> datetime | None:
        """``created_at``, if it is known."""
        return datetime.fromisoformat(self.created_at) if self.created_at else None

    @property
    def record_keys(self) -> frozenset[str]:
        """The fields of this run's output records."""
        return record_keys_of(self.output_keys)

    def continuing(self, begun: Manifest) -> Manifest:
        """This manifest as that of a run which ``begun`` began, whose build decided which keys it has and which not."""
        known = begun.output_keys.keys() | {SAMPLING_COLUMNS}
        output_keys = {key: value for key, value in self.output_keys.items() if key in known}
        output_keys |= {key: value for key, value in begun.output_keys.items() if not changes_outputs(key)}
        return replace(self, output_keys=output_keys, created_at=begun.created_at, num_rows=begun.num_rows)

    def to_bytes(self) -> bytes:
        """The content of ``job.json``."""
        plain = json.loads(encode_json({"version": _VERSION, **asdict(self), "shard": astuple(self.shard)}))
        return json.dumps(plain, indent=2, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Read ``job.json`` back. Raises ValueError naming what is wrong with it."""
        try:
            data = json.loads(content)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if not isinstance(data, dict) or "version" not in data:
            raise ValueError(f"it is not a job.json of layout version {_VERSION}")
        if (version := data.pop("version")) != _VERSION:
            raise ValueError(f"another batchgen wrote it, in layout version {version!r}, and this one reads {_VERSION}")
        if not _is_shard(data.get("shard", [1, 1])):
            raise ValueError("shard is not [i, n] with 1 <= i <= n")
        data["shard"] = Shard(*data.get("shard", ()))
        try:
            manifest = cls(**data)
        except TypeError as error:
            raise ValueError(f"its keys are not those of a job.json ({error})") from None
        manifest._check()
        return manifest

    def _check(self) -> None:
        """Raises ValueError naming the first key whose value is of another shape than was written."""
        for name in ("job", "output_keys", "fingerprints", "file_states"):
            _check_object(name, getattr(self, name))
        for key, value in self.job.items():
            _check_object(f"job.{key}", value)
        for key in ("input", "model", "numerics"):
            _check_object(f"fingerprints.{key}", self.fingerprints.get(key, {}))
        output = self.job.get("output", {})
        for item in fields(OutputSpec):
            if item.name in ("format", "order") and output.get(item.name) not in item.metadata["kind"].choices:
                raise ValueError(f"job.output.{item.name} must be one of {item.metadata['kind'].metavar}")
        if self.num_rows is not None and not _is_count(self.num_rows):
            raise ValueError("num_rows is no number of rows")
        try:
            datetime.fromisoformat(self.created_at or "2026-01-01")
        except (TypeError, ValueError):
            raise ValueError("created_at is no date and time") from None


def _check_object(key: str, value: object) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{key} is no object")


def _is_shard(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2 or not all(map(_is_count, value)):
        return False
    return bool(1 <= value[0] <= value[1])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_COUNT


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a job differs from the one a directory was begun with, one line per difference."""

    refused: tuple[str, ...]  # these change outputs
    allowed: tuple[str, ...]


def compare(old: Manifest, new: Manifest) -> Comparison:
    """What changed between the manifest on disk and a job that wants to resume; it may if ``refused`` is empty.

    A key that one of them lacks, because an earlier version knew no such key, counts as having its default; kernels
    that one of them does not name may be any. One that changed outputs in an earlier version only is ``allowed``.
    ``sampling.columns`` is an exception: before it existed, every column named like a sampling key was one. Whether
    rows have such columns is unknown here, so that this difference is ``allowed``, which is reported.
    """
    old, new = (_judged_here(manifest) for manifest in (old, new))
    if not (kernels_of(old) and kernels_of(new)):
        old, new = with_kernels(old, None), with_kernels(new, None)
    values = new.output_keys | old.output_keys
    unjudged = {SAMPLING_COLUMNS} & (new.output_keys.keys() - old.output_keys.keys())
    implied = {key for key in new.output_keys.keys() ^ old.output_keys.keys() if is_default(key, values[key])}

    def binding(manifest: Manifest) -> dict[str, Any]:
        known = {key: value for key, value in manifest.output_keys.items() if key not in implied | unjudged}
        return {"": known, **manifest.fingerprints, "shard": str(manifest.shard)}

    jobs = [{key: ["*"] for key in unjudged} | _flat(manifest.job) for manifest in (old, new)]
    bound = (old.output_keys.keys() | new.output_keys.keys()) - unjudged
    bound |= {key for key in jobs[0].keys() ^ jobs[1].keys() if is_default(key, (jobs[0] | jobs[1])[key])}
    loose = [{key: value for key, value in job.items() if key not in bound} for job in jobs]
    return Comparison(differences(binding(old), binding(new)), differences(*loose))


def _judged_here(manifest: Manifest) -> Manifest:
    """The manifest without keys that change no outputs in this build, though they did in the one that wrote it."""
    kept = {key: value for key, value in manifest.output_keys.items() if changes_outputs(key)}
    return replace(manifest, output_keys=kept)


def kernels_of(manifest: Manifest) -> str | None:
    """The kernel set that a run was computed with, or several joined by ``mix_kernels``; None where unknown."""
    found = manifest.fingerprints.get("numerics", {}).get(KERNELS)
    return None if found is None else str(found)


def with_kernels(manifest: Manifest, kernels: str | None) -> Manifest:
    """The manifest with another name for its kernels, or with none."""
    if "numerics" not in manifest.fingerprints:
        return manifest
    numerics = {key: value for key, value in manifest.fingerprints["numerics"].items() if key != KERNELS}
    named = {} if kernels is None else {KERNELS: kernels}
    return replace(manifest, fingerprints={**manifest.fingerprints, "numerics": numerics | named})


def mix_kernels(*kernels: str) -> str:
    """The names of all kernel sets that a run's rows come from, each once."""
    return " + ".join(dict.fromkeys(name for names in kernels for name in names.split(" + ")))


def differences(old_tree: Mapping[str, Any], new_tree: Mapping[str, Any]) -> tuple[str, ...]:
    """The differences between two trees of plain data, one line each."""
    old, new = _flat(old_tree), _flat(new_tree)
    keys = [*old, *(key for key in new if key not in old)]
    changed = [key for key in keys if key not in old or key not in new or old[key] != new[key]]
    lines = []
    for key in changed[:_SHOWN_LINES]:
        was, now = _shown(_text(old, key), _text(new, key))
        lines.append(f"{key}{_file_of(key, old, new)}: was {was}, now {now}")
    more = [f"and {len(changed) - len(lines):,} more"] if len(changed) > len(lines) else []
    return (*lines, *more)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings, in lists too, as one with keys like ``a.b[0].c``; values as after a round trip through JSON."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix and key else prefix or key
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, name)
        elif isinstance(value, list | tuple) and value and all(isinstance(item, Mapping) and item for item in value):
            for i, item in enumerate(value):
                flat |= _flat(item, f"{name}[{i}]")
        else:
            flat[name] = json.loads(encode_json(value))
    return flat


def _file_of(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The name of the file that a key such as ``input.files[0].sha256`` is about, where it is the same in both."""
    item, bracket, name = key.rpartition("].")
    name_key = f"{item}].file"
    if not bracket or name == "file" or old.get(name_key) is None or old[name_key] != new.get(name_key):
        return ""
    return f" ({shortened(str(old[name_key]), _SHOWN_CHARS)})"


def _text(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    if value is None:
        return _UNSET if key in values else _MISSING
    is_json = isinstance(value, str) and value.startswith('{"')
    return _DIGEST.sub(r"\1...", value if is_json else json.dumps(value, ensure_ascii=False))


def _shown(*texts: str) -> list[str]:
    """Texts that differ, briefly: long ones that begin alike from a little before the difference on."""
    common = os.path.commonprefix(texts)  # noqa: RUF071 - of characters is what is wanted, of any text
    start = len(common) - _SHOWN_BEFORE if max(map(len, texts)) > _SHOWN_CHARS else 0
    return [shortened(f"…{text[start:]}" if start > 0 else text, _SHOWN_CHARS) for text in texts]
