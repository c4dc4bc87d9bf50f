"""Dead letters: the failed rows in ``errors.jsonl``, read back after a person may have edited them.

Which rows failed is known from the outputs, so a line that is missing, there twice or of another row is refused before
anything is run. Only ``row`` decides what is run: ``id`` is read from the row again; ``code`` and ``message`` count
only where the row could never be read, or in a shard still has the id of another row. ``source`` and ``line`` are
recorded nowhere else; they locate the row and decide nothing, so they are not checked. It neither runs nor writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from batchgen.config.job import InputSpec
from batchgen.core.errors import RowError, RowErrorCode, StorageError, UsageError
from batchgen.core.json_line import MAX_DEPTH, encode_json, is_count
from batchgen.core.records import BadRow, Cursor, Record
from batchgen.core.shard import WHOLE, Shard
from batchgen.input.formats.lines import LinesFile, parse_jsonl
from batchgen.input.input_bytes import LocalFile
from batchgen.input.rows import RowProblem, bad_row, row_id

_SHOWN_ROWS = 5  # of many missing ones
_ADVICE = 'only "row" may be edited'
_DIGEST_BYTES = 8


@dataclass
class DeadLetters:
    """The dead letters in ``path`` of a finished run of ``shard`` over an input of ``num_rows`` rows.

    Call ``add_result`` for each row of the outputs, the file ``outputs``, before ``read``. ``may_have_result`` says
    whether a row with a result may still have a dead letter: a retry that was killed leaves such rows. ``where`` names
    the column of the id.
    """

    path: Path
    outputs: Path
    num_rows: int
    shard: Shard
    may_have_result: Callable[[int], bool]
    where: InputSpec

    def __post_init__(self) -> None:
        self._rows = self.shard.rows(self.num_rows)
        self._has_result = bytearray(len(self._rows))  # by position in _rows

    def add_result(self, index: int) -> None:
        """Take in a row of the outputs. Raises StorageError for one that is there twice or not a row of this run."""
        if index not in self._rows:
            raise StorageError(f"{self.outputs} holds row {index}, which is no row of this run; was it edited?")
        if self._has_result[self._rows.index(index)]:
            raise StorageError(f"{self.outputs} holds row {index} twice; was it edited?")
        self._has_result[self._rows.index(index)] = 1

    def read(self) -> Iterator[Record | BadRow]:
        """The failed rows, each once, in file order. Raises UsageError naming the line or the rows that are wrong.

        Each line is checked when it is read, and at the end that no row is missing. Blank lines are no rows.
        """
        seen = bytearray(len(self._rows))
        for letter in self._lines():
            row = self._row(letter)
            if row.index not in self._rows:
                raise self._error(letter, f"row {row.index} is no row of this run; {_ADVICE}")
            position = self._rows.index(row.index)
            if self._has_result[position] and not self.may_have_result(row.index):
                where = f"its result is in {self.outputs.name}"
                raise self._error(letter, f"row {row.index} has not failed, {where}; {_ADVICE}")
            if seen[position]:
                raise self._error(letter, f"row {row.index} is there twice; remove one of its lines")
            seen[position] = 1
            yield row
        self._refuse_missing(seen)

    def _lines(self) -> Iterator[Record]:
        if not self.path.is_file():
            return
        parse = partial(parse_jsonl, max_depth=MAX_DEPTH + 1)  # the row is one level down
        for line in LinesFile(LocalFile(self.path), parse).read(Cursor(0, 0, 0, 0), None, None):
            if isinstance(line, BadRow):
                raise self._error(line, f"{line.error.message}; {_ADVICE}")
            yield line

    def _row(self, letter: Record) -> Record | BadRow:
        """The row of one dead letter, to be run again if it could be read at all."""
        columns = letter.columns
        index, source, line = (columns.get(name) for name in ("index", "source", "line"))
        if not is_count(index) or not is_count(line) or not isinstance(source, str) or "row" not in columns:
            wrong = 'it must hold numbers "index" and "line", a text "source", and the "row"'
            raise self._error(letter, f"not a line as written: {wrong}; {_ADVICE}")
        content = columns["row"]
        digest = blake2b(encode_json(content), digest_size=_DIGEST_BYTES).digest()
        after = Cursor(0, int.from_bytes(digest), 0, index + 1)  # the text tells a row from one that was mended again
        if isinstance(content, str):  # of a line that was no JSON: a person may have mended it as text
            with suppress(RowProblem):
                content = parse_jsonl(content.encode())
        if not isinstance(content, dict):
            return BadRow(index, source, line, self._known_error(letter), content, after)
        row = Record(index, source, line, content, after)
        is_duplicate = self.shard != WHOLE and self._keeps_duplicate_id(letter, row)
        return bad_row(row, self._known_error(letter), self.where) if is_duplicate else row

    def _keeps_duplicate_id(self, letter: Record, row: Record) -> bool:
        """Whether a row failed for its id and still has it: in a shard, the row that had it first may be elsewhere."""
        if _error_of(letter).get("code") != RowErrorCode.DUPLICATE_ID:
            return False
        try:
            known = row_id(row, self.where)
        except RowProblem:
            return False
        known = row.index if known is None else known
        return letter.columns.get("custom_id", letter.columns.get("id")) in (known, str(known))

    def _known_error(self, letter: Record) -> RowError:
        found = _error_of(letter)
        try:
            return RowError(RowErrorCode(found["code"]), str(found["message"]))
        except (KeyError, ValueError) as error:
            raise self._error(letter, f'its "code" or "message" is not as written ({error!r})') from None

    def _refuse_missing(self, seen: bytearray) -> None:
        known = zip(self._rows, seen, self._has_result, strict=True)
        missing = (index for index, is_seen, has_result in known if not is_seen and not has_result)
        if shown := ", ".join(map(str, islice(missing, _SHOWN_ROWS))):
            num_more = sum(1 for _ in missing)
            more = f" and {num_more:,} more" if num_more else ""
            raise UsageError(
                f"{self.path} lacks the line of failed row {shown}{more}: put it back, or the row would be lost; a "
                "row that is to stay failed keeps its line"
            )

    def _error(self, line: Record | BadRow, what: str) -> UsageError:
        return UsageError(f"{self.path}, line {line.line}: {what}")


def _error_of(letter: Record) -> dict[str, Any]:
    """The object that holds a letter's code and message: an OpenAI error file nests them."""
    nested = letter.columns.get("error") or letter.columns
    return nested if isinstance(nested, dict) else {}
