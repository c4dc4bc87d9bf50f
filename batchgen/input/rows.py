"""Row errors, row ids, chunks of rows and settings of vectors, shared by readers, request builder and validator.

Inside this package a problem of a row is an exception; it becomes the ``error`` of a row and never stops a job.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal
from itertools import chain, islice
from typing import Any, TypeVar
from uuid import UUID

from batchgen.config.job import InputSpec
from batchgen.core.errors import RowError, RowErrorCode
from batchgen.core.json_line import MAX_DEPTH, encode_json, is_too_deep
from batchgen.core.records import Request, Row

_T = TypeVar("_T")
_decode = json.JSONDecoder().decode
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
CHUNK_ROWS = 256
CHUNK_CHARS = 4 << 20  # a chunk of long rows ends earlier, since it is held in memory
SLOW_CHUNK_S = 2.0  # a chat template may take seconds per row, and a stop loses the chunk that it interrupts
Prepared = tuple[Row, Request | None]  # a row with its prompt and its request, or with an error


class RowProblem(Exception):
    """One row cannot become a request; ``error`` is what ``errors.jsonl`` will say."""

    def __init__(self, code: RowErrorCode, message: str) -> None:
        super().__init__(message)
        self.error = RowError(code, message)


_TYPE_NAMES = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
    bytes: "binary data (store it as a string)",
}


def is_null(value: object) -> bool:
    """Whether a cell is empty: null, or NaN, which pandas uses for null and Python writes into JSON Lines."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def type_name(value: object) -> str:
    """The type of a value from a row in words: "a number", "null"."""
    return _TYPE_NAMES.get(type(value), f"a {type(value).__name__}")


def wrong_type(what: str, value: object, expected: str) -> RowProblem:
    """The problem that ``value`` does not have the expected type; ``expected`` is a phrase such as "a string"."""
    return RowProblem(RowErrorCode.BAD_TYPE, f"{what} is {type_name(value)}, not {expected}")


def parse_json(text: str, max_depth: int = MAX_DEPTH) -> Any:
    """The value of JSON text, from a line or from a column that holds JSON.

    Stricter than Python's parser about values that could not be written out again, lenient with sloppy data: NaN and
    Infinity are floats, the last of duplicate keys wins. Raises RowProblem: bad_json if it is not JSON or too large
    (numbers of more than 4300 digits, ``max_depth`` levels), bad_encoding for escapes that do not form a character.
    """
    try:
        value = _decode(text)
    except json.JSONDecodeError as error:
        raise RowProblem(
            RowErrorCode.BAD_JSON, f"not valid JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1}"
        ) from error
    except RecursionError as error:
        raise _too_deep(max_depth) from error
    except ValueError as error:
        raise RowProblem(RowErrorCode.BAD_JSON, "a number has more than 4300 digits") from error
    if is_too_deep(value, text, max_depth):
        raise _too_deep(max_depth)
    if _SURROGATE.search(text):
        _refuse_lone_surrogates(value)
    return value


def _too_deep(max_depth: int) -> RowProblem:
    return RowProblem(RowErrorCode.BAD_JSON, f"nested more than {max_depth} levels deep")


def _refuse_lone_surrogates(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        message = "a lone surrogate (half of an escaped character such as \\ud83d) is not a text"
        raise RowProblem(RowErrorCode.BAD_ENCODING, message) from error


def with_id(row: Row, spec: InputSpec) -> Row:
    """The row with its own id: from the column ``spec.id``, or ``custom_id`` of an OpenAI Batch line, or None.

    It need not be unique. A whole float becomes an integer, and a UUID, a decimal, a date or a time becomes text. A row
    whose column is missing or holds another value gets an error.
    """
    name = spec.id or ("custom_id" if spec.is_batch_line(row.columns) else None)
    if name is None or row.error is not None:
        return row
    if name not in row.columns:
        return row.failed(RowError(RowErrorCode.MISSING_COLUMN, f"no column {name!r} (the row's id)"))
    value = row.columns[name]
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # pandas stores an integer column with gaps as floats
    elif isinstance(value, UUID | Decimal | date):
        value = json.loads(encode_json(value))  # the text that a kept column has
    if isinstance(value, bool) or not isinstance(value, str | int):
        return row.failed(wrong_type(f"column {name!r} (the row's id)", value, "a string or an integer").error)
    return replace(row, id=value)


def chunked(rows: Iterable[Row], max_rows: Callable[[], int] = lambda: CHUNK_ROWS) -> Iterator[list[Row]]:
    """Rows in lists of at most ``max_rows()`` rows, shorter if the rows hold much text."""
    return bounded(rows, row_chars, CHUNK_CHARS, max_rows)


def next_size(size: int, took_s: float) -> int:
    """Number of rows to prepare at once, after ``size`` rows took ``took_s``: twice as many, but 1 if that was slow."""
    return min(2 * size, CHUNK_ROWS) if took_s < SLOW_CHUNK_S else 1


def prepared(rows: Iterable[Row], build: Callable[[list[Row]], Iterator[Prepared]]) -> Iterator[Prepared]:
    """The answers of ``build``, which gets ``rows`` in chunks; chunks are small until rows turn out to be quick.

    The first answer to a chunk takes longest, since a chunk is read and tokenized as a whole.
    """
    size, began_at = 1, time.monotonic()
    chunks = chunked(rows, lambda: size)
    while chunk := next(chunks, []):
        answers = build(chunk)
        first = [*islice(answers, 1)]
        size = next_size(size, time.monotonic() - began_at)
        yield from chain(first, answers)
        began_at = time.monotonic()


def bounded(
    items: Iterable[_T], chars: Callable[[_T], int], max_chars: int, max_items: Callable[[], int] = lambda: sys.maxsize
) -> Iterator[list[_T]]:
    """``items`` in lists that end once they hold ``max_items()`` items, or ``max_chars`` characters in all."""
    batch: list[_T] = []
    size = 0
    for item in items:
        batch.append(item)
        size += chars(item)
        if len(batch) >= max_items() or size >= max_chars:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def row_chars(row: Row) -> int:
    """About how much memory a row takes, in characters."""
    return num_chars(row.columns) + len(row.text or "")


def num_chars(value: object) -> int:
    """About how much memory a value takes, in characters."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(num_chars, value.values()))
    if isinstance(value, list):
        if value and isinstance(value[0], int):  # token ids
            return 8 * len(value)
        return sum(map(num_chars, value))
    return 8


@dataclass(frozen=True, slots=True)
class TokenSide:
    """``late_interaction.Side`` with token ids; ``marker`` is None and ``filled_to`` 0 if the side lacks them."""

    strips: bool
    marker: int | None
    filler: int
    filled_to: int
    attends: bool
    skipped: frozenset[int]

    def applied(self, token_ids: tuple[int, ...]) -> tuple[list[tuple[int, ...]], int]:
        """A text with its marker and filler, and how many tokens at its end the other tokens do not attend to."""
        if self.marker is not None:
            token_ids = (*token_ids[:1], self.marker, *token_ids[1:])
        added = (self.filler,) * (self.filled_to - len(token_ids))
        return [token_ids + added], 0 if self.attends else len(added)


@dataclass(frozen=True, slots=True)
class Embedded:
    """Settings that prepare texts for vectors: see ``Request.pooling`` and ``config.output.EmbedSpec``."""

    pooling: str
    prefix: str
    truncates: bool
    dimensions: int
    takes_lists: bool = True  # of texts, in one row
    side: TokenSide | None = None

    @property
    def cuts(self) -> bool:
        """Whether a text that fills the context may have been cut; False if a filler fills shorter texts up to it."""
        return self.truncates and not (self.side and self.side.filled_to)

    @property
    def num_markers(self) -> int:
        """The number of tokens that are put into each text after it has been cut."""
        return int(self.side is not None and self.side.marker is not None)

    def whole(self, text: str) -> str:
        """The text with its prefix."""
        text = self.prefix + text
        return text.strip() if self.side is not None and self.side.strips else text
