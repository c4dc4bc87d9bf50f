"""Tables as text: CSV and TSV, read by the standard library's ``csv`` with a header and strict about quotes.

Records are found one at a time, since a cell may hold newlines; cells stay strings.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO

from batchgen.core.errors import NOT_READ, RowErrorCode, UsageError
from batchgen.core.file_digests import Digests
from batchgen.core.records import Cursor
from batchgen.core.units import counted, shown
from batchgen.input.formats import Rows, Wanted
from batchgen.input.formats.lines import BOM, MAX_LINE_BYTES, SHOWN_BYTES, Line, LinesFile, decode_utf8, torn_line
from batchgen.input.formats.text_stream import damage, open_text
from batchgen.input.input_bytes import InputBytes
from batchgen.input.rows import RowProblem

MAX_ROW_BYTES = MAX_LINE_BYTES // 4  # the reader keeps a cell in four bytes a character
MAX_ROW_LINES = 100_000  # a quote that is never closed takes all that follows, which is read line by line
_OTHER_DELIMITERS = "\t;|"
_SKIP_BYTES = 1 << 20
_SEPARATOR_LINE = re.compile(rb'(?:\xef\xbb\xbf)?"?sep=(.)"?\r?\n?', re.IGNORECASE)


class DelimitedFile(LinesFile):
    """A table as text, plain or compressed. The first record holds the names of the columns; empty lines are skipped.

    ``delimiter`` None is a tab in a ``.tsv`` file; in other files a comma, or, if the header has none, its tab,
    semicolon or bar. A row with more or fewer cells than the header, or text after a closing quote, is ``bad_type``;
    one of more than ``MAX_ROW_BYTES`` or ``MAX_ROW_LINES`` is ``too_long``; damage is as in ``LinesFile``. A column
    without a name is ``column_N``. Raises UsageError if the header is not a list of different names.
    """

    output_format = "csv"

    def __init__(self, content: InputBytes, delimiter: str | None) -> None:
        super().__init__(content, lambda line: {})
        self._delimiter = delimiter
        self._read_header()

    def fingerprint(self, digests: Digests) -> dict[str, Any]:
        """The fingerprint, with delimiter and byte order mark: a table of outputs has these too."""
        mark = {"bom": True} if self._has_bom else {}
        return super().fingerprint(digests) | {"delimiter": self._dialect.delimiter} | mark

    def read(self, at: Cursor, stop: int | None, wanted: Wanted | None) -> Rows:
        header = self._read_header()
        if not at.offset:
            at = Cursor(at.file, header.end, header.number + header.num_lines - 1, at.index)
        return (yield from super().read(at, stop, wanted))

    def lines(self, stream: BinaryIO, at: Cursor) -> Iterator[Line]:
        records = _records(stream, at.offset, at.row, self._dialect)
        return (line for line in records if line.cells or line.problem)

    def columns(self, line: Line) -> dict[str, Any]:
        if len(line.cells) != len(self._names):
            counts = f"{counted(len(line.cells), 'cell')}, and the header has {len(self._names)}"
            last = line.number + line.num_lines - 1
            lines = f", in lines {line.number:,} to {last:,}" if last > line.number else ""
            raise RowProblem(RowErrorCode.BAD_TYPE, f"the row has {counts}{lines}")
        return dict(zip(self._names, line.cells, strict=True))

    def _read_header(self) -> Line:
        """Find the delimiter and the names of the columns; returns the header's record."""
        csv.field_size_limit(max(csv.field_size_limit(), MAX_ROW_BYTES))  # this limit is the whole process's
        is_tsv = ".tsv" in (suffix.lower() for suffix in self.content.suffixes[-2:])
        self._dialect = _dialect(self._delimiter or ("\t" if is_tsv else ","))
        header, _ = self._first_records()
        self._has_bom = header.content.startswith(BOM)
        signs = "" if self._delimiter or is_tsv or b"," in header.content else _OTHER_DELIMITERS
        for sign in signs:
            if sign.encode() in header.content and (split := self._split_by(sign)):
                header = split
                break
        if header.problem:
            raise self._error(header, str(header.problem))
        if match := _SEPARATOR_LINE.fullmatch(header.content):
            sign = shown(match[1].decode(errors="replace"))
            remedy = "delete this line" if match[1] == b"\t" else f"delete this line and give --delimiter {sign}"
            raise self._error(header, f"Excel's mark of the delimiter: {remedy}")
        self._names = [name or f"column_{number}" for number, name in enumerate(header.cells, 1)]
        if repeated := [name for name, count in Counter(self._names).items() if count > 1]:
            raise self._error(header, f"two columns are named {shown(repeated[0])}: give each a name of its own")
        return header

    def _split_by(self, delimiter: str) -> Line | None:
        """The header, if ``delimiter`` gives it as many cells as the first row; it is then the file's delimiter."""
        before, self._dialect = self._dialect, _dialect(delimiter)
        header, row = self._first_records()
        if row is None or len(row.cells) == len(header.cells) > 1:
            return header
        self._dialect = before
        return None

    def _first_records(self) -> tuple[Line, Line | None]:
        """The header, and the first row if there is one. Raises UsageError if the file cannot be read."""
        try:
            with open_text(self.content) as stream:
                lines = self.lines(stream, Cursor(0, 0, 0, 0))
                return next(lines, Line(b"", 0, 0)), next(lines, None)
        except OSError as error:
            raise UsageError(f"cannot read {self.content.name}: {error.strerror or error}") from error

    def _error(self, header: Line, what: str) -> UsageError:
        return UsageError(f"{self.content.name}, line {header.number}, the header: {what}")


def _dialect(delimiter: str) -> Any:
    """The dialect as a ``csv`` reader has checked and converted it, for use by other readers."""
    return csv.reader((), delimiter=delimiter, strict=True).dialect


class _Lines:
    """The lines of one record, read when the parser needs them. Raises RowProblem if they are too long.

    Bytes that are not UTF-8 set ``problem`` and reach the reader as surrogates, which are neither delimiters nor
    quotes.
    """

    def __init__(self, stream: BinaryIO, number: int, is_first: bool) -> None:
        self.content = bytearray()
        self.num_lines = 0
        self.problem: RowProblem | None = None
        self.is_ended = False
        self._stream = stream
        self._number = number
        self._is_first = is_first

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._stream.readline(MAX_ROW_BYTES + 1 - len(self.content))
        self.is_ended = not line.endswith(b"\n")
        if not line:
            raise StopIteration
        self.content += line
        self.num_lines += 1
        if len(self.content) > MAX_ROW_BYTES:
            raise RowProblem(RowErrorCode.TOO_LONG, f"the row has more than {MAX_ROW_BYTES} bytes")
        if self.num_lines > MAX_ROW_LINES:
            raise RowProblem(RowErrorCode.TOO_LONG, f"the row has more than {MAX_ROW_LINES} lines")
        if self._is_first:
            line, self._is_first = line.removeprefix(BOM), False
        try:
            return decode_utf8(line, f"line {self._number + self.num_lines}")
        except RowProblem as problem:
            self.problem = self.problem or problem
            return line.decode(errors="surrogateescape")


def _records(stream: BinaryIO, offset: int, number: int, dialect: Any) -> Iterator[Line]:
    """All records of ``stream``, empty ones too; ``offset`` bytes and ``number`` lines precede it."""
    while True:
        lines = _Lines(stream, number, is_first=offset == 0)
        cells: list[str] = []
        num_skipped = shown_bytes = 0
        try:
            cells = next(csv.reader(lines, dialect), cells)
        except csv.Error as error:
            lines.problem = lines.problem or _broken(str(error), lines, number, dialect)
        except RowProblem as problem:
            num_skipped, shown_bytes = _skip_row(stream, lines), SHOWN_BYTES
            lines.problem = problem
            if (at := _last_quote(lines, number, dialect)) < number + lines.num_lines:
                why = f"{problem.error.message}; line {at:,}: is a quote never closed?"
                lines.problem = RowProblem(RowErrorCode.TOO_LONG, why + _unread(number + lines.num_lines - at))
        content = bytes(lines.content[:shown_bytes] if shown_bytes else lines.content)
        if lines.is_ended and (reason := damage(stream)):
            yield torn_line(content, number + 1, offset, reason)
            return
        if not content:
            return
        offset += len(lines.content) + num_skipped
        yield Line(content, number + 1, offset, lines.problem, num_lines=lines.num_lines, cells=cells)
        number += lines.num_lines


def _broken(reason: str, lines: _Lines, number: int, dialect: Any) -> RowProblem:
    """Error for a record that the reader refused, in terms of rows and cells."""
    last, at = number + lines.num_lines, _last_quote(lines, number, dialect)
    unread = _unread(last - at) if at < last else ""
    if reason.startswith("unexpected end"):
        return RowProblem(RowErrorCode.BAD_TYPE, f"line {at:,}: a quote is never closed{unread}")
    if reason.startswith("new-line"):
        return RowProblem(RowErrorCode.BAD_TYPE, f"a cell without quotes has a carriage return, in line {last}")
    what = f"a cell continues after its closing quote (a quote in a cell is written twice), in line {last}"
    begun = f"; it begins in line {at:,}{unread}" if unread else ""
    return RowProblem(RowErrorCode.BAD_TYPE, what + begun)


def _unread(num_lines: int) -> str:
    return f"; the {counted(num_lines, 'line')} after it {'was' if num_lines == 1 else 'were'} {NOT_READ}"


def _last_quote(lines: _Lines, number: int, dialect: Any) -> int:
    """The line where the last cell's quote opens, if the record breaks there; otherwise the record's last line."""
    sign = re.escape(dialect.delimiter)
    cell = re.compile(rf'(?:"[^"]*+(?:""[^"]*+)*+"|[^"{sign}\r\n][^{sign}\r\n]*+|)(?:{sign}|\r?\n)')
    text = lines.content.decode(errors="surrogateescape").removeprefix("\ufeff")
    end = 0
    while cell_match := cell.match(text, end):
        end = cell_match.end()
    return number + 1 + text.count("\n", 0, end)


def _skip_row(stream: BinaryIO, row: _Lines) -> int:
    """Read to the end of a row without keeping it: to the first line after which the number of quotes is even.

    Returns the number of bytes, and adds to the row's ``num_lines``.
    """
    size, line, num_quotes = 0, bytes(row.content[-1:]), row.content.count(b'"')
    while line and (num_quotes % 2 or not line.endswith(b"\n")):
        is_new_line, line = line.endswith(b"\n"), stream.readline(_SKIP_BYTES)
        row.num_lines += is_new_line and bool(line)
        size += len(line)
        num_quotes += line.count(b'"')
    return size
