"""Whether the input has the columns that a job names, judged by its first rows.

A misspelt name would fail every row of a job, or leave its kept columns out of every record in silence: here it is
refused before the weights are loaded. A column that only some rows lack is the business of those rows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from typing import TypeGuard

from batchgen.config.job import SAMPLING_COLUMNS, InputSpec, JobSpec
from batchgen.config.sampling import PARAM_KEYS
from batchgen.core.errors import ResumeMismatch, UsageError
from batchgen.core.records import Record
from batchgen.core.units import shortened
from batchgen.input.rows import RowProblem, num_chars
from batchgen.input.source import Source
from batchgen.input.template import Template

HEAD_ROWS = 100
_HEAD_TRIED = 1000  # rows looked at, bad ones included, to find so many readable ones
_HEAD_CHARS = 4 << 20
_SHOWN_COLUMNS = 12
_SHOWN_CHARS = 40
_FIELD = re.compile(r"\{[^{}]+\}")


def check_columns(source: Source, spec: JobSpec, *, has_tokenizer: bool) -> None:
    """Look at the first rows of ``source``, of all shards.

    Raises UsageError where all of them lack a column that the job names, naming the key, the nearest column and those
    found; where the prompt's template names no column or cannot be rendered for any of them; or where the job names no
    prompt and none of them has one.
    """
    rows = list(_head(source))
    if not rows:
        return
    found = list(dict.fromkeys(name for row in rows for name in row.columns))
    among = "the first row does not have" if len(rows) == 1 else f"none of the first {len(rows)} rows has"
    for key, name in _named(spec):
        if name not in found:
            raise UsageError(f"{key} names column {name!r}, which {among}{_nearest(name, found)}; {_listed(found)}")
    _check_template(spec.input, rows)
    wanted = _prompt_columns(spec.input, has_tokenizer=has_tokenizer)
    if not wanted or any(_has_prompt(row, wanted, spec.input) for row in rows):
        return
    names = " or ".join(repr(name) for name in sorted(wanted))
    advice = "name one, as in input.prompt = '{question}'" if has_tokenizer else "the model has no tokenizer"
    raise UsageError(f"the job names no prompt, and {among} a column {names}: {advice}; {_listed(found)}")


def _check_template(where: InputSpec, rows: Sequence[Record]) -> None:
    """Raises UsageError for a template without columns, and for one that fails on every one of ``rows``."""
    if not _is_template(where.prompt) or where.format == "openai-batch":
        return
    template = Template.parse(where.prompt)
    said = f"input.prompt = {shortened(repr(where.prompt), _SHOWN_CHARS)}"
    if not template.columns:
        meant = _FIELD.search(template.render({}))
        raise UsageError(
            f"{said} names no column, so that every row would be the same prompt; {{{{ is a brace, write "
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
    raise UsageError(f"{said} cannot be filled in from {among}; {rows[0].source}:{rows[0].line}: {problems[0]}")


def check_taken_columns(source: Source, spec: JobSpec) -> None:
    """For a run begun by a build that took every column named like a sampling key as one, without being told to.

    Raises ResumeMismatch where the first rows of ``source`` have such columns and the job does not list them.
    """
    own = {spec.input.id, spec.input.messages, spec.input.prompt_token_ids, *_prompt_names(spec.input.prompt)}
    found = {name for row in _head(source) for name in row.columns}
    if taken := sorted(found & set(PARAM_KEYS) - own):
        raise ResumeMismatch(
            f"this run took its rows' columns {', '.join(taken)} as sampling values, which a job must ask for now: go "
            "on with --sampling-columns '*', or start anew with --overwrite"
        )


def _head(source: Source) -> Iterator[Record]:
    """The first readable rows."""
    size = num_readable = 0
    for tried, row in enumerate(source.read(), 1):
        if isinstance(row, Record):
            num_readable += 1
            yield row
        size += num_chars(row.columns if isinstance(row, Record) else row.raw)
        if num_readable == HEAD_ROWS or tried == _HEAD_TRIED or size > _HEAD_CHARS:
            return


def _named(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Every column that the job names, after the key that names it."""
    where = spec.input
    if where.id is not None:
        yield "input.id", where.id
    if where.format == "openai-batch":
        yield "input.format = 'openai-batch'", "body"
    else:
        for key in ("messages", "prompt_token_ids"):
            if name := getattr(where, key):
                yield f"input.{key}", name
        for name in _prompt_names(where.prompt):
            yield "input.prompt", name
    for name in where.keep_columns:
        if name != "*":
            yield "input.keep_columns", name
    if spec.output.expected is not None:
        yield "output.expected", spec.output.expected
    for name in spec.sampling_columns:
        if name != "*":
            yield SAMPLING_COLUMNS, name


def _prompt_names(prompt: str | None) -> list[str]:
    if not prompt:
        return []
    return sorted(Template.parse(prompt).columns) if _is_template(prompt) else [prompt]


def _is_template(prompt: str | None) -> TypeGuard[str]:
    """Whether it has braces; without any, it is a column's name."""
    return bool(set(prompt or "") & set("{}"))


def _prompt_columns(where: InputSpec, *, has_tokenizer: bool) -> set[str]:
    """Where a row's prompt may be if the job does not say; empty if it does. See ``RequestBuilder``."""
    if where.prompt or where.messages or where.prompt_token_ids or where.format == "openai-batch":
        return set()
    if not has_tokenizer:
        return {"prompt_token_ids"}
    return {"prompt_token_ids", "prompt"} | ({"messages"} if where.chat else set())


def _has_prompt(row: Record, wanted: set[str], where: InputSpec) -> bool:
    columns = row.columns.keys()
    return bool(wanted & columns) or where.is_batch_line(row.columns) or ("prompt" in wanted and columns == {"text"})


def _nearest(name: str, found: Collection[str]) -> str:
    close = get_close_matches(name, found, 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _listed(found: Collection[str]) -> str:
    shown = [shortened(repr(name), _SHOWN_CHARS) for name in list(found)[:_SHOWN_COLUMNS]]
    more = f" and {len(found) - len(shown):,} more" if len(found) > len(shown) else ""
    return f"columns found: {', '.join(shown) or 'none'}{more}"
