"""Files in which a row is a line: JSON Lines and plain text, which differ only in how a line is parsed.

A cursor holds a byte offset in the decompressed text and the number of lines before it: reading can start anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from batchgen.core.errors import RowErrorCode, UsageError
from batchgen.core.json_line import MAX_DEPTH
from batchgen.core.records import Cursor, Row
from batchgen.input.formats import Rows, StoredFile, Wanted
from batchgen.input.formats.text_stream import damage, open_text
from batchgen.input.input_bytes import InputBytes
from batchgen.input.rows import RowProblem, parse_json, wrong_type

MAX_LINE_BYTES = 256 << 20  # bounds the memory a line takes; a longer one is an error row
BOM = b"\xef\xbb\xbf"
SHOWN_BYTES = 1000  # of a line too long to keep


def decode_utf8(line: bytes, name: str = "the line") -> str:
    """The text of a line. Raises RowProblem bad_encoding, naming the byte and the line."""
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        message = f"not UTF-8: {error.reason} at byte {error.start + 1} of {name}"
        raise RowProblem(RowErrorCode.BAD_ENCODING, message) from error


def parse_jsonl(line: bytes, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """The columns in one line of JSON Lines.

    Raises RowProblem: bad_encoding for bytes that are not UTF-8, bad_type for JSON that is not an object, and as
    ``parse_json`` does.
    """
    value = parse_json(decode_utf8(line), max_depth)
    if not isinstance(value, dict):
        raise wrong_type("the line", value, "a JSON object")
    return value


def parse_text(line: bytes) -> dict[str, Any]:
    """A line of plain text as column ``text``, without its line end but with the white space around it."""
    return {"text": decode_utf8(line.removesuffix(b"\n").removesuffix(b"\r"))}


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is a row: bytes, 1-based number, offset after it, error; of a table ``num_lines`` and ``cells``."""

    content: bytes
    number: int
    end: int
    problem: RowProblem | None = None
    is_torn: bool = False
    num_lines: int = 1
    cells: Sequence[str] = ()


class LinesFile(StoredFile):
    """A text file, plain or compressed. ``parse`` turns a line into columns or raises RowProblem.

    Lines end with LF or CRLF; blank lines are numbered but are not rows; a byte order mark is dropped. A truncated or
    corrupt compressed file gives the rows before the damage and one ``bad_encoding`` row; long lines are ``too_long``.
    """

    def __init__(self, content: InputBytes, parse: Callable[[bytes], dict[str, Any]]) -> None:
        super().__init__(content)
        self._parse = parse

    def lines(self, stream: BinaryIO, at: Cursor) -> Iterator[Line]:
        """The lines that are rows; ``stream`` comes from ``open_text`` and begins at the cursor ``at``."""
        return _lines(stream, at.offset, at.row)

    def columns(self, line: Line) -> dict[str, Any]:
        """Columns of a line. Raises RowProblem."""
        return self._parse(line.content)

    def read(self, at: Cursor, stop: int | None, wanted: Wanted | None) -> Rows:
        """As in ``InputFile``; ``at.offset`` is a byte of the text, where a row begins."""
        index = at.index
        if stop is not None and index >= stop:
            return index
        try:
            with open_text(self.content, at.offset) as stream:
                for line in self.lines(stream, at):
                    if wanted is None or wanted(index):
                        yield self._row(line, index, at.file)
                    index += 1
                    if index == stop:
                        break
        except OSError as error:
            raise UsageError(f"cannot read {self.content.name}: {error.strerror or error}") from error
        return index

    def _row(self, line: Line, index: int, file: int) -> Row:
        source = self.content.name
        num_lines = line.number + line.num_lines - 1
        after = Cursor(file + 1, 0, 0, index + 1) if line.is_torn else Cursor(file, line.end, num_lines, index + 1)
        try:
            if line.problem:
                raise line.problem
            return Row(index, source, line.number, self.columns(line), after)
        except RowProblem as problem:
            text = line.content.decode(errors="backslashreplace").rstrip("\r\n")
            return Row(index, source, line.number, {}, after, error=problem.error, text=text)


def _lines(stream: BinaryIO, offset: int, number: int) -> Iterator[Line]:
    """The lines of ``stream`` that are rows; ``offset`` bytes and ``number`` lines precede it."""
    torn = b""
    while content := stream.readline(MAX_LINE_BYTES):
        is_whole = content.endswith(b"\n")
        if not is_whole and damage(stream):
            torn = content
            break
        is_huge = not is_whole and len(content) == MAX_LINE_BYTES
        is_first = offset == 0
        number += 1
        offset += len(content)
        if is_first:
            content = content.removeprefix(BOM)
        if is_huge:
            offset += _skip_line(stream)
            problem = RowProblem(RowErrorCode.TOO_LONG, f"the line has more than {MAX_LINE_BYTES} bytes")
            yield Line(content[:SHOWN_BYTES], number, offset, problem)
        elif content and not content.isspace():
            yield Line(content, number, offset)
    if reason := damage(stream):
        yield torn_line(torn, number + 1, offset, reason)


def torn_line(content: bytes, number: int, offset: int, reason: str) -> Line:
    """The row in place of the unreadable rest of a damaged compressed file."""
    message = f"the compressed file is damaged here, the rest of it is unreadable: {reason}"
    return Line(content, number, offset, RowProblem(RowErrorCode.BAD_ENCODING, message), is_torn=True)


def _skip_line(stream: BinaryIO) -> int:
    """Read to the end of the line without keeping it; returns the number of bytes."""
    size = 0
    while content := stream.readline(1 << 20):
        size += len(content)
        if content.endswith(b"\n"):
            break
    return size
