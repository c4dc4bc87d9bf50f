"""Check of the columns that a job names against the first rows of its input, before the weights are loaded.

A misspelt name would fail every row, or silently leave kept columns out; a column that some rows lack is their error.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress

from batchgen.config.job import JobSpec
from batchgen.config.record_fields import kept_columns
from batchgen.config.sampling import in_object
from batchgen.core.errors import RowErrorCode, UsageError
from batchgen.core.keys import resembling
from batchgen.core.records import Row
from batchgen.core.units import shortened, shown
from batchgen.input.content import ContentFinder
from batchgen.input.openai_batch import REQUEST_FIELDS
from batchgen.input.rows import RowProblem, row_chars
from batchgen.input.template import Template

HEAD_ROWS = 100
_HEAD_TRIED = 1000  # most rows looked at, bad ones included, to find _HEAD_ROWS readable ones
_HEAD_CHARS = 4 << 20
_SHOWN_COLUMNS = 12
_SHOWN_CHARS = 40
_FIELD = re.compile(r"\{[^{}]+\}")


def check_columns(rows: Iterable[Row], spec: JobSpec, finder: ContentFinder) -> list[str]:
    """Look at the first of ``rows``, the rows of all shards. Returns lines that the user should read.

    Raises UsageError if there are many and none is JSON; if all lack a column that the job names; if the prompt's
    template does not name a column or fails for every row; if no row has a prompt and the job does not name one.
    """
    tried = list(_tried(rows))
    head = [row for row in tried if row.error is None]
    if not head:
        _refuse_other_format(tried)
        return []
    names = list(dict.fromkeys(name for row in head for name in row.columns))
    among = "the first row does not have" if len(head) == 1 else f"none of the first {len(head)} rows has"
    for key, name in _named(spec, finder):
        if name not in names:
            hint = resembling(name, names)
            outer, _, inner = name.partition(".")
            if inner and outer in names:
                hint = f" (a field of {outer!r} is written {{{outer}[{inner.replace('.', '][')}]}})"
            if name == spec.input.prompt and not hint:
                hint = " (a text needs a {column} in it)"
            raise UsageError(f"{key} names column {name!r}, which {among}{hint}; {_listed(names)}")
    if finder.template:
        _check_template(spec.input.prompt or "", finder.template, head)
    if not any(finder.may_have_prompt(row.columns) for row in head):
        wanted = " or ".join(map(repr, sorted(finder.prompt_columns)))
        has_tokenizer = "prompt" in finder.prompt_columns
        advice = "name one, as in input.prompt = '{question}'" if has_tokenizer else "the model has no tokenizer"
        raise UsageError(f"the job names no prompt, and {among} a column {wanted}: {advice}; {_listed(names)}")
    return [*_renamed(head, spec), *_other_data(head), *_other_form(head, spec), *_unread(head, spec)]


def _renamed(rows: Sequence[Row], spec: JobSpec) -> Iterator[str]:
    """A line that lists the columns that are kept under another name."""
    kept = {name: field for row in rows for name, field in kept_columns(spec, row.columns).items()}
    renamed = [f"{shown(name)} as {field}" for name, field in kept.items() if name != field]
    if renamed:
        more = f" and {len(renamed) - _SHOWN_COLUMNS:,} more" if len(renamed) > _SHOWN_COLUMNS else ""
        listed = f"{', '.join(renamed[:_SHOWN_COLUMNS])}{more}"
        remedy = "" if spec.input.id or "id" not in kept or kept["id"] == "id" else "; --id id makes it the record's id"
        yield f"these input columns clash with record fields and are renamed: {listed}{remedy}"


def _other_form(rows: Sequence[Row], spec: JobSpec) -> Iterator[str]:
    if spec.output.format != "openai-batch" and all(spec.input.is_batch_line(row.columns) for row in rows):
        yield "the rows are OpenAI Batch requests: --output-format openai-batch gives the answers in OpenAI's form"


def _other_data(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        with suppress(ValueError):
            if in_object(value := row.columns.get("sampling")) is None:
                yield f"the column 'sampling' holds plain data, not sampling values: {shown(value, _SHOWN_CHARS)}"
                return


def _unread(rows: Sequence[Row], spec: JobSpec) -> Iterator[str]:
    """A line about columns that are not read although OpenAI's API has fields of these names next to a chat."""
    chats = [row.columns for row in rows if not spec.input.is_batch_line(row.columns)]
    chats = [columns for columns in chats if columns.get(spec.input.messages or "messages") is not None]
    filled = (name for columns in chats for name, value in columns.items() if value is not None)
    names = [name for name in dict.fromkeys(filled) if name in REQUEST_FIELDS - spec.input.request_columns]
    if names and (spec.input.messages or not spec.input.is_mapped):
        listed = ", ".join(map(repr, names))
        remedy = "put them as an object into a column 'sampling', or make rows OpenAI Batch requests (custom_id, body)"
        yield f"columns of a request next to 'messages' are copied and not read: {listed}; {remedy}"


def _check_template(prompt: str, template: Template, rows: Sequence[Row]) -> None:
    """Raises UsageError for a template without columns, and for one that fails on every one of ``rows``."""
    key = f"input.prompt = {shortened(repr(prompt), _SHOWN_CHARS)}"
    if not template.columns:
        meant = _FIELD.search(template.render({}))
        raise UsageError(
            f"{key} has no column, so every row would get the same prompt; {{{{ is a literal brace: write "
            f"{shortened(meant[0], _SHOWN_CHARS) if meant else '{column}'}"
        )
    problems = []
    for row in rows:
        try:
            template.render(row.columns)
        except RowProblem as problem:
            problems.append(problem)
        else:
            return
    among = "the first row" if len(rows) == 1 else f"any of the first {len(rows)} rows"
    raise UsageError(f"{key} cannot be filled in from {among}; {rows[0].source}:{rows[0].line}: {problems[0]}")


def _refuse_other_format(rows: Sequence[Row]) -> None:
    """Raises UsageError if too many rows are not JSON for the input to be JSON Lines."""
    errors = [row.error for row in rows[:HEAD_ROWS] if row.error is not None]
    if len(errors) == HEAD_ROWS and {error.code for error in errors} == {RowErrorCode.BAD_JSON}:
        example = f"{rows[0].source}:{rows[0].line}: {errors[0].message}"
        raise UsageError(
            f"none of the first {HEAD_ROWS} rows is JSON ({example}); say in input.format what the file is, such as "
            '"text" for a prompt a line'
        )


def _tried(rows: Iterable[Row]) -> Iterator[Row]:
    """The first rows, until enough of them are readable."""
    size = num_readable = 0
    for tried, row in enumerate(rows, 1):
        num_readable += row.error is None
        yield row
        size += row_chars(row)
        if num_readable == HEAD_ROWS or tried == _HEAD_TRIED or size > _HEAD_CHARS:
            return


def _named(spec: JobSpec, finder: ContentFinder) -> Iterator[tuple[str, str]]:
    """(key, column) for every column that the job names."""
    if spec.input.id is not None:
        yield "input.id", spec.input.id
    yield from finder.named_columns()
    yield from (("input.columns", name) for name in spec.input.columns if name != "*")
    if spec.eval.expected is not None:
        yield "eval.expected", spec.eval.expected


def _listed(names: Collection[str]) -> str:
    shown = [shortened(repr(name), _SHOWN_CHARS) for name in list(names)[:_SHOWN_COLUMNS]]
    more = f" and {len(names) - len(shown):,} more" if len(names) > len(shown) else ""
    sign = "" if len(names) > 3 else next((sign for sign in ";|" if any(sign in name for name in names)), "")
    hint = f"; if {sign} separates them, give --delimiter '{sign}'" if sign else ""
    return f"columns found: {', '.join(shown) or 'none'}{more}{hint}"
