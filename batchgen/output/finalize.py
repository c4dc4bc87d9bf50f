"""Final files of a run: written from its journal, either complete or not at all, and read back.

Rows are read back from JSON only: ``outputs.jsonl`` or, with outputs of another format, the journal, which is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from batchgen.config.job import JobSpec
from batchgen.config.record_fields import packed_keys, record_keys
from batchgen.core.errors import BatchgenError, StorageError, UsageError
from batchgen.core.json_line import encode_json
from batchgen.core.logprobs import unpacked
from batchgen.core.storage import commit_staged, remove_file, staged_file
from batchgen.core.units import counted
from batchgen.output.formats import OutputFormat, read_lines, write_lines
from batchgen.output.formats.delimited import CsvFormat
from batchgen.output.formats.openai_batch import OpenAIBatchFormat
from batchgen.output.journal import Counts, Journal
from batchgen.output.manifest import Manifest
from batchgen.output.record_builder import check_record
from batchgen.output.rundir import JournalledJob, RunDir

IndexedRow = tuple[int, bytes]
EXACT_FORMAT = "jsonl"  # the outputs are the journal's records


class Rows:
    """Rows that can be iterated repeatedly; each time they are read again."""

    def __init__(self, read: Callable[[], Iterator[IndexedRow]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[bytes]:
        return (row for _, row in self._read())


def finalize(run_dir: RunDir, job: JournalledJob, spec: JobSpec, journal: Journal, *, num_rows: int) -> JournalledJob:
    """Write the outputs and failed rows of a job whose rows are all in its journal.

    ``num_rows`` counts the input's rows over all shards and is stored in the journal's ``job.json``, which is returned.
    ``errors.jsonl`` exists afterwards only if a row failed. Once the report is written too, call ``RunDir.finish``. A
    kill between these steps is harmless: until then the journal holds every row, and running again writes the same
    bytes. Raises BatchgenError if a row is missing, StorageError if the disk refuses.
    """
    journal.commit()
    if not journal.done.covers(num_rows):
        raise BatchgenError(
            f"{run_dir.path}: the input has {num_rows} rows, but the journal holds {len(journal.done)} and the first "
            f"unfinished one is row {journal.done.first_gap}; nothing was written"
        )
    if job.manifest.num_rows != num_rows:
        job = job._replace(manifest=replace(job.manifest, num_rows=num_rows))
        run_dir.write_job(job)
    form, output = output_format(spec, job.manifest), spec.output
    names = frozenset[str]() if output.format == "parquet" else packed_keys(spec)
    with staged_file(run_dir.outputs(output.format)) as file:
        form.write(file, Rows(lambda: _results(journal, form, names)))
    counts = _stage_errors(run_dir, form, journal)
    # Failed rows come first: a reader who sees these outputs also sees their ``errors.jsonl``.
    (commit_staged if counts.errors else remove_file)(run_dir.errors)
    commit_staged(run_dir.outputs(output.format))
    run_dir.remove_other_outputs(output.format)
    return job


def write_errors(run_dir: RunDir, job: JournalledJob, spec: JobSpec, journal: Journal) -> None:
    """Write ``errors.jsonl`` of an unfinished run: the rows that have failed so far. Raises StorageError."""
    _stage_errors(run_dir, output_format(spec, job.manifest), journal)
    commit_staged(run_dir.errors)


def read_errors(run_dir: RunDir) -> Iterator[IndexedRow]:
    """The lines of ``errors.jsonl`` with their indexes, if rows failed. Raises StorageError for a bad line."""
    return read_lines(run_dir.errors) if run_dir.errors.is_file() else iter(())


def read_records(run_dir: RunDir, spec: JobSpec) -> Iterator[tuple[int, dict[str, Any]]]:
    """The records of a finished run's outputs with their indexes, in the order of the outputs.

    Raises StorageError if they were edited, otherwise as ``read_rows``.
    """
    path = run_dir.outputs(spec.output.format)
    results = ((index, row) for index, kind, row in read_rows(run_dir, spec.output.format) if kind == "result")
    for index, row in results:
        try:
            record = dict(json.loads(row))
            check_record(record)
            yield index, record
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise StorageError(f"{path}: row {index} is not as it was written ({error!r}); was it edited?") from None


def read_rows(run_dir: RunDir, output_format: str) -> Iterator[tuple[int, Literal["result", "error"], bytes]]:
    """The rows of a finished run, from its outputs or the kept journal: index, kind and payload, the results first.

    Raises StorageError for a bad line and, once all lines are read, for a missing row; in ``outputs.jsonl`` and
    ``errors.jsonl`` also for a repeated or foreign one. Raises UsageError if ``outputs.jsonl``, or the journal that
    holds the rows, was removed.
    """
    if output_format == EXACT_FORMAT:
        yield from _lines(run_dir)
        return
    remedy = f"read {run_dir.outputs(output_format).name} itself, or run with"
    if (kept := run_dir.kept_job()) is None:
        problem = f"the records of {run_dir.path} were in {run_dir.journals}"
        raise UsageError(f"{problem}, which was removed or lacks its job.json: {remedy} --overwrite")
    num_rows, shard = kept.manifest.num_rows or 0, kept.manifest.shard
    with closing(Journal.read(kept.folder, shard)) as journal:
        if not journal.done.covers(num_rows):
            lost = f"{len(journal.done):,} of {len(shard.rows(num_rows)):,} rows can be read"
            raise StorageError(f"{kept.folder} is damaged: {lost}; {remedy} --update, which computes the others")
        yield from ((index, "result", journal.payload(index)) for index in journal.done.indexes(errors=False))
        yield from ((index, "error", journal.payload(index)) for index in journal.done.indexes(errors=True))


def _lines(run_dir: RunDir) -> Iterator[tuple[int, Literal["result", "error"], bytes]]:
    """``read_rows`` of a run that wrote JSON Lines; lines may have been edited, and ``errors.jsonl`` removed."""
    last, path, num_read = run_dir.read_manifest(), run_dir.outputs(EXACT_FORMAT), 0
    if not path.is_file():
        raise UsageError(f"{path} was removed: restore it, or run the job again, which computes all rows")
    own = last.shard.rows(last.num_rows or 0) if last is not None else range(0)
    seen = bytearray(len(own))
    kinds: dict[Literal["result", "error"], Iterator[IndexedRow]]
    kinds = {"result": read_lines(path), "error": read_errors(run_dir)}
    for kind, rows in kinds.items():
        for index, line in rows:
            num_read += 1
            if index in own:
                seen[own.index(index)] = True
            yield index, kind, line
    if last is None or not own:
        return
    num_wanted = len(own) if run_dir.errors.exists() or run_dir.errors.name not in last.files else sum(seen)
    is_whole = num_read == sum(seen) == num_wanted
    if not is_whole and not any(job.has_all_rows for job in run_dir.unfinished()):  # it may be that job's outputs
        lost = f"{counted(num_read, 'line')} with {sum(seen):,} of {len(own):,} rows"
        problem = f"{path} or {run_dir.errors.name} is not as its run wrote it"
        raise StorageError(f"{problem}: {lost}; restore it, or run with --update")


def _stage_errors(run_dir: RunDir, form: OutputFormat, journal: Journal) -> Counts:
    done = journal.done
    with staged_file(run_dir.errors) as file:
        write_lines(file, (form.error_row(journal.payload(index)) for index in done.indexes(errors=True)))
    return journal.counts


def _results(journal: Journal, form: OutputFormat, names: Set[str]) -> Iterator[IndexedRow]:
    """The rows of an outputs file; packed arrays in the fields ``names`` become lists."""
    for index in journal.done.indexes(errors=False):
        payload = journal.payload(index)
        if names and b'"base64":' in payload:  # it may be from before the format of an unfinished job was changed
            payload = encode_json(unpacked(json.loads(payload), names))
        yield index, form.result_row(payload)


def output_format(spec: JobSpec, manifest: Manifest) -> OutputFormat:
    """The format of a job's outputs; some formats contain the time when the run was begun."""
    name = spec.output.format
    if name == "jsonl":
        return OutputFormat()
    if name == "openai-batch":
        path = spec.model.path
        model = Path(path).name if Path(path).is_absolute() else path  # no one else's machine has that path
        begun_at = manifest.created_at
        created = int(datetime.fromisoformat(begun_at).timestamp()) if begun_at else 0
        return OpenAIBatchFormat(model, spec.input.is_templated, created, spec.input.id is not None)
    if name == "parquet":
        from batchgen.output.formats.parquet import ParquetFormat, carried_types, fixed_types  # they need pyarrow

        types = manifest.fingerprints.get("input", {}).get("types", {})
        return ParquetFormat(fixed_types(spec), carried_types(spec, types))
    return csv_format(spec, manifest)


def csv_format(spec: JobSpec, manifest: Manifest, columns: Sequence[str] = ()) -> CsvFormat:
    """The CSV format of a job's outputs, reduced to ``columns`` if they are given.

    It begins with a byte order mark, which spreadsheets look for, if an input file had one or was not UTF-8 when the
    job was begun. The delimiter is the input's, or a comma if the input's tables differ.
    """
    files = manifest.fingerprints.get("input", {}).get("files", [])
    delimiters = {file["delimiter"] for file in files if "delimiter" in file}
    return CsvFormat(
        has_id=spec.input.id is not None,
        has_bom=any(file.get("bom") for file in files) or bool(spec.input.encoding),
        delimiter=delimiters.pop() if len(delimiters) == 1 else ",",
        columns=columns,
        own=record_keys(spec),
    )
