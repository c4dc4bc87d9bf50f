"""From the journal to the final files: every row once, in order, appearing whole or not at all.

The order of steps makes a kill at any moment harmless: all files are written beside their names and synced first; then
``job.json`` and ``errors.jsonl`` are put in place; the appearance of the outputs, last, is the mark of a finished run.
Until then the journal holds every row and running again writes the same bytes; only after it may the journal go.
It needs room on the disk for the outputs beside the journal. It asks neither how rows were made nor what they mean.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

from batchgen.data.files import publish, remove_file, staged_file
from batchgen.data.journal import Journal
from batchgen.data.output_formats import OutputFormat, output_format
from batchgen.data.output_formats.jsonl import read_lines, write_lines
from batchgen.data.rundir import RunDir
from batchgen.errors import BatchgenError
from batchgen.spec import OutputSpec

IndexedRow = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class OutputCounts:
    """Rows in the outputs and in ``errors.jsonl``."""

    results: int
    errors: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that can be iterated again and again, each time read afresh."""

    read: Callable[[], Iterator[IndexedRow]]

    def __iter__(self) -> Iterator[bytes]:
        return (row for _, row in self.read())


def finalize(
    run_dir: RunDir, output: OutputSpec, journal: Journal, *, num_rows: int, model: str = "", chat: bool = True
) -> OutputCounts:
    """Write the outputs and dead letters of a run whose rows are all in the journal; see the module for the order.

    ``num_rows`` counts the input's rows over all shards and goes into ``job.json``. ``model`` and ``chat`` shape
    OpenAI responses. ``errors.jsonl`` is written only if a row failed. Afterwards, and after the report is written,
    call ``journal.remove()``. Raises BatchgenError if a row is missing, StorageError if the disk refuses.
    """
    journal.commit()
    if journal.done.first_gap < num_rows or any(index >= num_rows for index in _beyond(journal, num_rows)):
        raise BatchgenError(
            f"{run_dir.path}: the journal holds {len(journal.done)} rows and row {journal.done.first_gap} is not one of "
            f"them, though the input has {num_rows}; nothing was written"
        )
    form = output_format(output.format, model=model, chat=chat)
    results = Rows(lambda: journal_results(journal, form, output.order))
    errors = Rows(lambda: journal_errors(journal, form))
    manifest = run_dir.read_manifest()
    if manifest is not None and manifest.num_rows != num_rows:
        run_dir.write_manifest(replace(manifest, num_rows=num_rows))
    counts = OutputCounts(journal.counts.results, journal.counts.errors)
    with staged_file(run_dir.outputs(output.format)) as file:
        form.write(file, results)
    if counts.errors:
        with staged_file(run_dir.errors) as file:
            write_lines(file, errors)
        publish(run_dir.errors)
    else:
        remove_file(run_dir.errors)
    publish(run_dir.outputs(output.format))
    return counts
