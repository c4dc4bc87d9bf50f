"""The input formats by name, and the choice for a file: by its first bytes, then its name, then its first line."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from batchgen.config.job import InputSpec
from batchgen.core.addresses import scheme_of
from batchgen.core.errors import UsageError
from batchgen.core.model_files import LFS_POINTER
from batchgen.input.formats import InputFile
from batchgen.input.formats.delimited import DelimitedFile
from batchgen.input.formats.hf import DatasetFile
from batchgen.input.formats.lines import LinesFile, parse_jsonl, parse_text
from batchgen.input.formats.parquet import ParquetFile
from batchgen.input.formats.text_stream import foreign_compression, open_text
from batchgen.input.input_bytes import InputBytes, LocalFile, RemoteFile


@dataclass(frozen=True, slots=True)
class Format:
    """A format of files: the function that opens a file for a job, and suffixes of file names."""

    open: Callable[[InputBytes, InputSpec], InputFile]
    suffixes: tuple[str, ...]


FORMATS = {
    "jsonl": Format(lambda content, _: LinesFile(content, parse_jsonl), (".jsonl", ".ndjson")),
    "text": Format(lambda content, _: LinesFile(content, parse_text), (".txt", ".text")),
    "csv": Format(lambda content, spec: DelimitedFile(content, spec.delimiter), (".csv", ".tsv")),
    "parquet": Format(ParquetFile, (".parquet",)),
}

_COMPRESSED = frozenset({".gz", ".zst", ".zstd"})
_WORKBOOKS = frozenset({".xlsx", ".xlsm", ".xls"})
_REMEDIES = {
    ".bz2": "recompress it with gzip or zstd",
    ".xz": "recompress it with gzip or zstd",
    ".zip": "unpack it",
    ".tar": "unpack it",
    ".arrow": "give the folder that datasets saved it in",
}
_PARQUET_MAGIC = b"PAR1"
_WIDE_MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
# For text without a byte order mark: which of four bytes are mostly zero (0), and which rarely (1).
_WIDE_ZEROS = {"UTF-16LE": "1010", "UTF-16BE": "0101", "UTF-32LE": "1?00", "UTF-32BE": "00?1"}
_HEAD_BYTES = 1 << 16
_TAR_AT = 257  # offset of a tar archive's magic bytes
_PROBE_BYTES = 1 << 10  # enough to find the zeros of text with two bytes per character


def open_file(item: Path | str, spec: InputSpec) -> InputFile:
    """Open one file, or a dataset (an ``hf:`` name or a folder); a string may also be an address.

    Raises UsageError with a remedy if it cannot be read, or its format contradicts the job's ``format`` or is unknown;
    RemoteError if its server cannot be reached.
    """
    if isinstance(item, str) and scheme_of(item):
        return _open_bytes(RemoteFile(item, spec.encoding or ""), spec)
    if isinstance(item, str) or item.is_dir():
        return DatasetFile(str(item), spec)
    if not item.is_file():
        raise UsageError(f"input {item} is not a regular file; pipe it to standard input and name it -")
    try:
        return _open_bytes(LocalFile(item, spec.encoding or ""), spec)
    except OSError as error:
        raise UsageError(f"cannot read input {item}: {error.strerror or error}") from error


def _open_bytes(content: InputBytes, spec: InputSpec) -> InputFile:
    return FORMATS[_resolve(content, spec.format, spec.delimiter)].open(content, spec)


def _resolve(content: InputBytes, name: str, delimiter: str | None) -> str:
    with content.open() as file:
        magic = file.read(4)
    is_parquet = magic == _PARQUET_MAGIC
    if magic == b"PARE":
        raise UsageError(f"{content.name} is an encrypted Parquet file, which cannot be read: decrypt it first")
    if name == "parquet" or (name == "auto" and is_parquet):
        return "parquet"
    if is_parquet:
        raise UsageError(f'{content.name} is a Parquet file and input.format = "{name}"; leave the format to "auto"')
    if not _WORKBOOKS.isdisjoint(suffix.lower() for suffix in content.suffixes[-1:]):
        raise UsageError(f"{content.name} is an Excel workbook: save it as CSV")
    if packed := foreign_compression(content):
        remedy = "unpack it" if packed in ("zip", "7-Zip") else "recompress it with gzip or zstd"
        raise UsageError(f"{content.name} is compressed by {packed}, which cannot be read; {remedy}")
    head = _read_head(content)
    _refuse_as_text(content.name, head)
    if name == "hf":
        raise UsageError(f'{content.name} is a file and input.format = "hf"; leave the format to "auto"')
    resolved = name if name in FORMATS else "jsonl"  # OpenAI Batch lines
    if name == "auto":
        resolved = "csv" if delimiter else _detect(content, head)
    if resolved in ("csv", "text") and not content.encoding:
        _refuse_other_encoding(content.name, head)
    if resolved != "csv" and b"\r" in head.rstrip() and b"\n" not in head:  # a table's header reports this itself
        lines = f"the lines of {content.name} end with CR alone"
        raise UsageError(f"{lines}; convert it: tr '\\r' '\\n' < FILE > NEW_FILE")
    if resolved == "jsonl" and (program := _unrolling(head)):
        what = "JSON over several lines or an array, not JSON Lines, one object per line"
        raise UsageError(f"{content.name} is {what}: jq -c {program} FILE > NEW_FILE.jsonl")
    return resolved


def _read_head(content: InputBytes) -> bytes:
    """The first bytes of a file's text. Raises UsageError if its encoding needs a byte order mark that is missing.

    UTF-16 and UTF-32 need the mark, unless their name states the byte order.
    """
    try:
        with open_text(content) as stream:
            return stream.read(_HEAD_BYTES)
    except UnicodeError:
        remedy = f'"{content.encoding}-le" or "{content.encoding}-be"'
        raise UsageError(f"{content.name} has no mark of its byte order: give {remedy} as its encoding") from None


def _refuse_as_text(name: str, head: bytes) -> None:
    """Raises UsageError for UTF-16 or UTF-32, a tar archive or a Git LFS pointer: its lines might pass as rows."""
    if encoding := _wide_encoding(head).lower():
        raise UsageError(
            f'{name} is {encoding[:6].upper()} text: give input.encoding = "{encoding}" (--encoding {encoding})'
        )
    if head[_TAR_AT : _TAR_AT + 5] == b"ustar":
        raise UsageError(f"{name} is a tar archive, which cannot be read; unpack it")
    if head.startswith(LFS_POINTER):
        raise UsageError(f"{name} is a pointer of Git LFS and not the file; fetch it with git lfs pull")


def _wide_encoding(head: bytes) -> str:
    """UTF-16 or UTF-32, recognized by a byte order mark or by zero bytes; empty for other text."""
    if encoding := next((name for mark, name in _WIDE_MARKS.items() if head.startswith(mark)), ""):
        return encoding
    probe = head[:_PROBE_BYTES]
    num_chars = len(probe) // 4
    zeros = [probe[offset::4].count(0) for offset in range(4)] if num_chars else [0] * 4
    shown = ["0" if count > 0.8 * num_chars else "1" if count < 0.2 * num_chars else "-" for count in zeros]
    for name, pattern in _WIDE_ZEROS.items():
        if all(wanted in ("?", sign) for wanted, sign in zip(pattern, shown, strict=True)):
            with suppress(UnicodeDecodeError):
                probe[: 4 * num_chars].decode(name, "strict" if "32" in name else "ignore")
                return name
    return ""


def _refuse_other_encoding(name: str, head: bytes) -> None:
    """Raises UsageError if all lines beyond ASCII are not UTF-8 but cp1252, the usual other encoding.

    One such line after the first, or fewer than one line in twenty, are left to the reader, which makes error rows.
    """
    lines = head.split(b"\n")[: -1 if len(head) == _HEAD_BYTES else None]
    others = [(number, _signs_of_cp1252(line)) for number, line in enumerate(lines, 1) if not line.isascii()]
    is_single = len(others) == 1 < others[0][0] if others else True
    if is_single or not all(signs for _, signs in others) or 20 * len(others) < len(lines):
        return
    (number, signs), remedy = others[0], 'input.encoding = "cp1252" (--encoding cp1252)'
    raise UsageError(f"{name}, line {number}, is not UTF-8: give {remedy} if it has {signs[0]!r} there, or another one")


def _signs_of_cp1252(line: bytes) -> str:
    """The non-ASCII characters of a line that is cp1252 and not UTF-8; "" for other lines."""
    try:
        line.decode()
        return ""
    except UnicodeDecodeError:
        text = line.decode("cp1252", errors="replace")
    return "" if "\ufffd" in text else "".join(sign for sign in text if not sign.isascii())


def _unrolling(head: bytes) -> str:
    """A jq program that converts the file to JSON lines, or "" if it already has one value per line.

    A single bad line among possible rows is left to the reader, which makes it an error row.
    """
    lines = [line.strip() for line in head.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
    first, second, third = (*lines[:3], b"", b"", b"")[:3]
    if first.replace(b" ", b"") in (b"{", b"[{"):  # a key follows, or this is a damaged row
        is_spread = second.startswith(b'"')
    elif first == b"[":
        is_spread = second.startswith(b"{") and (second == b"{" or second.endswith(b",") or third == b"]")
    elif first.startswith(b"[") and first[1:].lstrip().startswith(b"{"):
        is_spread = first.endswith(b",") or not second or second.startswith(b"[")
    else:
        is_spread = False
    if not is_spread:
        return ""
    return "'.[]'" if first.startswith(b"[") else "."


def _detect(content: InputBytes, head: bytes) -> str:
    suffixes = [suffix.lower() for suffix in content.suffixes]
    while suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    suffix = suffixes[-1] if suffixes else ""
    for name, form in FORMATS.items():
        if suffix in form.suffixes:
            return name
    if suffix in _REMEDIES:
        raise UsageError(f"{content.name}: {suffix} files cannot be read; {_REMEDIES[suffix]}")
    first = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if first.startswith(b"{"):
        return "jsonl"
    if suffix == ".json":
        raise UsageError(
            f"{content.name} is not JSON Lines, one object per line; an array: jq -c '.[]' FILE > NEW_FILE.jsonl"
        )
    if b"\0" in head:
        raise UsageError(f"{content.name} looks like binary data; say in input.format what it is")
    return "text"
