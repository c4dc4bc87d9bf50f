"""Reads the rows that a check runs: with the reader, templates and tokenizer of a run, but no bad row is let pass."""

from __future__ import annotations

from collections.abc import Callable

from batchgen.config.job import JobSpec
from batchgen.core.errors import UsageError
from batchgen.core.records import BadRow, Record, Request, SamplingParams
from batchgen.input.columns import check_columns
from batchgen.input.source import open_source
from batchgen.run.loader import ModelInfo
from batchgen.run.stdin import stdin_as_file

Write = Callable[[str], None]


def read_rows(spec: JobSpec, info: ModelInfo, params: SamplingParams) -> list[tuple[Record, Request]]:
    """The rows of a job's input, tokenized as a run would.

    Raises:
        UsageError: the input is unreadable, lacks a named column, has no rows, or has one that could not run.
    """
    with stdin_as_file(spec.input) as readable:
        builder = info.builder(readable, params)
        source = open_source(readable)
        check_columns(source.read(), spec, builder.finder)
        rows = []
        for row in source.read():
            found = row if isinstance(row, BadRow) else next(builder.build([row]))
            if isinstance(found, BadRow):
                raise UsageError(f"{found.source}:{found.line}: {found.error.code}: {found.error.message}")
            assert isinstance(row, Record)
            rows.append((row, found))
    if not rows:
        raise UsageError(f"--prompts {spec.input.path[0]}: holds no rows")
    return rows
