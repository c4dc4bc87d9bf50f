"""Final files of a run, written from its journal: every row once, in order; a file appears whole or not at all.

The order of steps makes a kill at any moment harmless: ``job.json`` gets the number of rows; outputs and
``errors.jsonl`` are written beside their names and synced; then ``errors.jsonl`` is put in place; the outputs appear
last and mark the run as finished. Until then the journal holds every row and running again writes the same bytes; only
afterwards may the journal be removed. The disk needs room for the outputs beside the journal.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from itertools import chain
from operator import itemgetter
from typing import Any

from batchgen.config.job import JobSpec, OutputSpec
from batchgen.core.errors import BatchgenError, StorageError
from batchgen.core.storage import commit_staged, remove_file, staged_file
from batchgen.output.formats import OutputFormat, output_format
from batchgen.output.formats.jsonl import read_lines, write_lines
from batchgen.output.journal import Counts, Journal
from batchgen.output.record_builder import check_record
from batchgen.output.rundir import RunDir

IndexedRow = tuple[int, bytes]


class Rows:
    """Rows that can be iterated repeatedly, each time read anew; ``count`` is that of the last complete pass."""

    def __init__(self, read: Callable[[], Iterator[IndexedRow]]) -> None:
        self._read = read
        self.count = 0

    def __iter__(self) -> Iterator[bytes]:
        count = 0
        for _, row in self._read():
            yield row
            count += 1
        self.count = count


def finalize(run_dir: RunDir, spec: JobSpec, journal: Journal, *, num_rows: int) -> Counts:
    """Write the outputs and failed rows of a run whose rows are all in the journal; see the module for the order.

    ``num_rows`` counts the input's rows over all shards and is stored in ``job.json``. ``errors.jsonl`` exists
    afterwards only if a row failed. Once the report is written too, call ``journal.remove()``. Raises BatchgenError if
    a row is missing, StorageError if the disk refuses.
    """
    _refuse_gaps(run_dir, journal, num_rows)
    form, output = _form(run_dir, spec), spec.output
    manifest = run_dir.read_manifest()
    if manifest is not None and manifest.num_rows != num_rows:
        run_dir.write_manifest(replace(manifest, num_rows=num_rows))
    results = Rows(lambda: _results(journal, form, output.order))
    errors = Rows(lambda: _errors(journal, form))
    counts = stage(run_dir, output, form, results, errors)
    commit_errors(run_dir, counts)
    commit_staged(run_dir.outputs(output.format))
    return counts


def finalize_grown(run_dir: RunDir, spec: JobSpec, journal: Journal, *, num_rows: int) -> Counts:
    """Put the rows by which the input of a finished run has grown into its outputs and ``errors.jsonl``.

    A kill in between leaves a run that writes the same bytes when run again. Once the report is written too, store
    ``num_rows`` in ``job.json``, then call ``journal.remove()``. Raises as ``finalize``.
    """
    _refuse_gaps(run_dir, journal, num_rows)
    return _replace_outputs(run_dir, spec, journal, lambda: _all_errors(run_dir, journal, output_format(spec)))


def finalize_retry(run_dir: RunDir, spec: JobSpec, journal: Journal) -> Counts:
    """Put the rows of a retry's journal into the existing outputs; those that failed again stay in ``errors.jsonl``.

    The journal holds every failed row. The outputs are replaced first: a kill in between leaves rows in both files,
    never in none, and running the retry again (nothing is left to generate) writes the same bytes. Then call
    ``journal.remove()``. Raises StorageError.
    """
    journal.commit()
    return _replace_outputs(run_dir, spec, journal, lambda: _errors(journal, output_format(spec)))


def finalize_again(run_dir: RunDir, spec: JobSpec, journal: Journal) -> Counts:
    """Put the results of a journal in the place of those that the rows had; one that failed now keeps what it had.

    ``errors.jsonl`` stays as it is. Otherwise as ``finalize_retry``.
    """
    journal.commit()
    return _replace_outputs(run_dir, spec, journal, lambda: read_errors(run_dir), keeps_failed=True)


def _form(run_dir: RunDir, spec: JobSpec) -> OutputFormat:
    manifest = run_dir.read_manifest()
    return output_format(
        spec, datetime.fromisoformat(manifest.created_at) if manifest and manifest.created_at else None
    )


def _refuse_gaps(run_dir: RunDir, journal: Journal, num_rows: int) -> None:
    journal.commit()
    if not journal.done.covers(num_rows):
        raise BatchgenError(
            f"{run_dir.path}: the input has {num_rows} rows, but the journal holds {len(journal.done)} and the first "
            f"unfinished one is row {journal.done.first_gap}; nothing was written"
        )


def _replace_outputs(
    run_dir: RunDir,
    spec: JobSpec,
    journal: Journal,
    errors: Callable[[], Iterator[IndexedRow]],
    *,
    keeps_failed: bool = False,
) -> Counts:
    """Replace the outputs by the same with the journal's rows in them, and ``errors.jsonl``.

    ``keeps_failed``: a row that is an error in the journal keeps its place in the outputs.
    """
    form, output, done = _form(run_dir, spec), spec.output, journal.done

    def is_kept(index: int) -> bool:
        return index not in done or (keeps_failed and done.location(index).is_error)

    def results() -> Iterator[IndexedRow]:
        kept = (row for row in form.read(run_dir.outputs(output.format)) if is_kept(row[0]))
        return join([kept, _results(journal, form, output.order)], output.order)

    counts = stage(run_dir, output, form, Rows(results), Rows(errors))
    commit_staged(run_dir.outputs(output.format))
    commit_errors(run_dir, counts)
    return counts


def stage(run_dir: RunDir, output: OutputSpec, form: OutputFormat, results: Rows, errors: Rows) -> Counts:
    """Write both files beside their names, durably; nothing appears yet. Raises StorageError."""
    with staged_file(run_dir.outputs(output.format)) as file:
        form.write(file, results)
    with staged_file(run_dir.errors) as file:
        write_lines(file, errors)
    return Counts(results.count, errors.count)


def write_errors(run_dir: RunDir, spec: JobSpec, journal: Journal) -> None:
    """Write ``errors.jsonl`` of an unfinished run: the rows that have failed so far. Raises StorageError."""
    with staged_file(run_dir.errors) as file:
        write_lines(file, Rows(lambda: _all_errors(run_dir, journal, output_format(spec))))
    commit_staged(run_dir.errors)


def commit_errors(run_dir: RunDir, counts: Counts) -> None:
    """Put the staged ``errors.jsonl`` in place, or remove it and an earlier one where there are no errors."""
    (commit_staged if counts.errors else remove_file)(run_dir.errors)


def join(streams: list[Iterator[IndexedRow]], order: str) -> Iterator[IndexedRow]:
    """Streams of rows as one: by index if each is ascending and ``order`` is "input", else one after the other."""
    return heapq.merge(*streams, key=itemgetter(0)) if order == "input" else chain(*streams)


def read_errors(run_dir: RunDir) -> Iterator[IndexedRow]:
    """The lines of ``errors.jsonl`` with their indexes; none if no row failed. Raises StorageError for a bad line."""
    return read_lines(run_dir.errors) if run_dir.errors.is_file() else iter(())


def read_records(run_dir: RunDir, spec: JobSpec) -> Iterator[tuple[int, dict[str, Any]]]:
    """The records of a finished run's outputs with their indexes. Raises StorageError where they were edited."""
    form, path = output_format(spec), run_dir.outputs(spec.output.format)
    for index, row in form.read(path):
        try:
            record = form.record(row)
            check_record(record)
            yield index, record
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise StorageError(f"{path}: row {index} is not as it was written ({error!r}); was it edited?") from None


def _results(journal: Journal, form: OutputFormat, order: str) -> Iterator[IndexedRow]:
    indexes = journal.done.indexes(errors=False) if order == "input" else journal.completed()
    return ((index, form.result_row(journal.payload(index))) for index in indexes)


def _all_errors(run_dir: RunDir, journal: Journal, form: OutputFormat) -> Iterator[IndexedRow]:
    """The failed rows of the journal and, where it continues finished outputs, those of ``errors.jsonl`` too."""
    before = read_errors(run_dir) if run_dir.has_outputs() else iter(())
    return join([(row for row in before if row[0] not in journal.done), _errors(journal, form)], "input")


def _errors(journal: Journal, form: OutputFormat) -> Iterator[IndexedRow]:
    return ((index, form.error_row(journal.payload(index))) for index in journal.done.indexes(errors=True))
