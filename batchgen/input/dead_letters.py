"""``errors.jsonl`` as a person may have left it: held against the rows that have no result, and read back as rows.

Which rows failed is known from the outputs, so a line that is gone, there twice or of another row is refused before
anything is run. Only ``row`` counts for what is run: ``id`` is read from the row again, ``code`` and ``message`` only
stay where the row could never be read, or in a shard has the id of another row still. ``source`` and ``line`` are
recorded nowhere else; they say where to look and decide nothing, so they are taken as they stand. It neither runs nor
writes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

from batchgen.config.job import InputSpec
from batchgen.core.errors import RowError, RowErrorCode, StorageError, UsageError
from batchgen.core.records import WHOLE, BadRow, Cursor, Record, Shard
from batchgen.input.formats.jsonl import MAX_DEPTH, parse_jsonl
from batchgen.input.formats.lines import LinesFile
from batchgen.input.rows import RowProblem, bad_row, row_id

_SHOWN_ROWS = 5  # of many missing ones
_ADVICE = 'only "row" may be edited'


class DeadLetters:
    """The dead letters in ``path`` of a finished run of ``shard`` over an input of ``num_rows`` rows.

    ``outputs`` is named in errors. Take in the rows that have results first, then read. ``may_have_result`` says of a
    row with a result whether it may have a dead letter still: a retry that was killed leaves such rows. ``where`` says
    which column holds the id.
    """

    def __init__(
        self,
        path: Path,
        outputs: Path,
        num_rows: int,
        shard: Shard,
        may_have_result: Callable[[int], bool],
        where: InputSpec,
    ) -> None:
        self._path = path
        self._is_shard = shard != WHOLE
        self._where = where
        self._outputs = outputs
        self._ours = shard.rows(num_rows)
        self._has_result = bytearray(len(self._ours))
        self._may_have_result = may_have_result

    def add_result(self, index: int) -> None:
        """Take in a row of the outputs. Raises StorageError for one that is there twice or is none of this run's."""
        if index not in self._ours:
            raise StorageError(f"{self._outputs} holds row {index}, which is no row of this run; was it edited?")
        if self._has_result[self._ours.index(index)]:
            raise StorageError(f"{self._outputs} holds row {index} twice; was it edited?")
        self._has_result[self._ours.index(index)] = 1

    def read(self) -> Iterator[Record | BadRow]:
        """The failed rows, each once, in file order. Raises UsageError naming the line or the rows that are wrong.

        Lines are checked as they come, and at the end that no row is missing. Blank lines are no rows.
        """
        seen = bytearray(len(self._ours))
        for letter in self._lines():
            row = self._row(letter)
            position = self._position(row.index, letter.line)
            if seen[position]:
                raise self._error(letter.line, f"row {row.index} is there twice; remove one of its lines")
            seen[position] = 1
            yield row
        self._refuse_missing(seen)

    def _lines(self) -> Iterator[Record]:
        if not self._path.is_file():
            return
        parse = partial(parse_jsonl, max_depth=MAX_DEPTH + 1)  # the row lies one level down
        for line in LinesFile(self._path, parse).read(Cursor(0, 0, 0, 0), None, None):
            if isinstance(line, BadRow):
                raise self._error(line.line, f"{line.error.message}; {_ADVICE}")
            yield line

    def _position(self, index: int, line: int) -> int:
        """Where a row lies among those of the shard. Raises UsageError for one that has not failed."""
        if index not in self._ours:
            raise self._error(line, f"row {index} is no row of this run; {_ADVICE}")
        position = self._ours.index(index)
        if self._has_result[position] and not self._may_have_result(index):
            raise self._error(line, f"row {index} has not failed, its result is in {self._outputs.name}; {_ADVICE}")
        return position

    def _row(self, letter: Record) -> Record | BadRow:
        """The row of one dead letter, to be run again if it could be read at all."""
        columns = letter.columns
        index, source, line = (columns.get(name) for name in ("index", "source", "line"))
        if not _is_count(index) or not _is_count(line) or not isinstance(source, str) or "row" not in columns:
            wrong = 'it must hold numbers "index" and "line", a text "source", and the "row"'
            raise self._error(letter.line, f"not a dead letter as written: {wrong}; {_ADVICE}")
        after = Cursor(0, 0, 0, index + 1)
        if isinstance(columns["row"], dict):
            row = Record(index, source, line, columns["row"], after)
            is_duplicate = self._is_shard and self._keeps_duplicate_id(letter, row)
            return bad_row(row, self._known_error(letter), self._where) if is_duplicate else row
        return BadRow(index, source, line, self._known_error(letter), columns["row"], after)

    def _keeps_duplicate_id(self, letter: Record, row: Record) -> bool:
        """Whether a row failed for its id and has it still: in a shard, the row that had it first may be elsewhere."""
        columns = letter.columns
        error = columns.get("error") or columns
        if not isinstance(error, dict) or error.get("code") != RowErrorCode.DUPLICATE_ID:
            return False
        try:
            known = row_id(row, self._where)
        except RowProblem:
            return False
        known = row.index if known is None else known
        return columns.get("custom_id", columns.get("id")) in (known, str(known))  # a custom_id is always a text

    def _known_error(self, letter: Record) -> RowError:
        """Why a row could not be read. An OpenAI error file nests code and message."""
        found: Any = letter.columns.get("error") or letter.columns
        try:
            return RowError(RowErrorCode(found["code"]), str(found["message"]))
        except (KeyError, TypeError, ValueError) as error:
            raise self._error(letter.line, f'its "code" or "message" is not as written ({error!r})') from None

    def _refuse_missing(self, seen: bytearray) -> None:
        known = zip(self._ours, seen, self._has_result, strict=True)
        missing = (index for index, is_seen, has_result in known if not is_seen and not has_result)
        if shown := ", ".join(map(str, islice(missing, _SHOWN_ROWS))):
            num_more = sum(1 for _ in missing)
            more = f" and {num_more:,} more" if num_more else ""
            raise UsageError(
                f"{self._path} lacks the line of failed row {shown}{more}: put it back, or the row would be lost; a "
                "row that is to stay failed keeps its line"
            )

    def _error(self, line: int, what: str) -> UsageError:
        return UsageError(f"{self._path}, line {line}: {what}")


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
