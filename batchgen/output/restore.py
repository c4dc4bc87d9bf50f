"""Restoring a run from its mirror: which parts of the journal are there, and how a run directory gets what it lacks.

It writes to the run directory only. Who may take the run, and what is copied there, is ``mirror``'s business.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from batchgen.core.fingerprint import file_digest
from batchgen.core.remote import RemoteError
from batchgen.core.storage import commit_staged, remove_folder, staged_file, storage_errors, sync_folder, temporary_name
from batchgen.output.bucket import Bucket, Entry
from batchgen.output.rundir import OUTPUT_NAMES, RunDir
from batchgen.output.segments import segments

_NAME = re.compile(r"journal/([0-9a-f]{16})/(\d{6,9}-[0-9a-f]{8})\.(000\d{9})", re.ASCII)  # less than 1 GB


class Part(NamedTuple):
    """A copied part of a segment of some run: where it begins and ends there, and its name in the bucket."""

    run: str
    segment: str
    offset: int
    end: int
    name: str


def part_name(run: str, segment: str, offset: int) -> str:
    """The name of a part in the bucket."""
    return f"journal/{run}/{segment}.{offset:012d}"


def parts_in(files: Mapping[str, Entry]) -> list[Part]:
    """The parts of all segments among files that were found, by segment, in order."""
    found = []
    for name, entry in files.items():
        if match := _NAME.fullmatch(name):
            offset = int(match[3])
            found.append(Part(match[1], match[2], offset, offset + entry.size, name))
    return sorted(found)


def fetch_segments(bucket: Bucket, run_dir: RunDir, run: str) -> int:
    """Fetch the segments of the run that are not in its directory; their number."""
    journal = run_dir.journal
    here = {path.stem for path in segments(journal)}
    lacking: dict[str, list[Part]] = {}
    for part in parts_in(bucket.find("journal")):
        if part.run == run and part.segment not in here:
            lacking.setdefault(part.segment, []).append(part)
    if lacking:
        with storage_errors("write", journal):
            journal.mkdir(exist_ok=True)
            sync_folder(journal.parent)
        run_dir.forget_ids()  # which lacks those of rows that were read elsewhere
    for segment, parts in lacking.items():
        _fetch_segment(bucket, journal / f"{segment}.seg", parts)
    return len(lacking)


def _fetch_segment(bucket: Bucket, path: Path, parts: Iterable[Part]) -> None:
    """Put the parts of a segment together, each at its offset; what is lost between them becomes one bad line."""
    parts, end = [*parts], 0
    with staged_file(path) as file:
        for part, content in zip(parts, bucket.read_all([part.name for part in parts]), strict=True):
            if part.offset > end:
                file.seek(part.offset - 1)
                file.write(b"\n")
            file.seek(part.offset)
            file.write(content)
            end = max(end, part.end)
    commit_staged(path)


def fetch_finished(bucket: Bucket, run_dir: RunDir, digests: Mapping[str, str]) -> None:
    """Fetch the files of the finished run; a journal that is here is of an earlier state, and goes once all are.

    ``digests`` has the SHA-256 of each file that there is, "" where it is unknown. Raises RemoteError for another one.
    """
    names = [name for name in run_dir.finished_names if name in digests]
    for path in [run_dir.path / name for name in names]:
        temporary = temporary_name(path)
        bucket.download(path.name, temporary)
        if digests[path.name] not in ("", file_digest(temporary)):
            temporary.unlink()
            what = f"{bucket.address}/{path.name} is not what was written there; nothing of it is used"
            raise RemoteError(f"{what}: choose another output.mirror, or start anew with --overwrite")
        with storage_errors("write", path), temporary.open("rb") as file:
            os.fsync(file.fileno())
    for name in names:
        if name in OUTPUT_NAMES.values():
            remove_folder(run_dir.journal)
        commit_staged(run_dir.path / name)
