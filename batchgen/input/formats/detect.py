"""Which format a file has, when the job does not say: by its first bytes, then its name, then its first line."""

from __future__ import annotations

from pathlib import Path

from batchgen.core.errors import UsageError
from batchgen.input.formats.text_stream import open_text

_COMPRESSED = frozenset({".gz", ".zst", ".zstd"})
_BY_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".txt": "text", ".text": "text"}
_CSV_REMEDY = "convert it to JSON Lines, or give 'hf:FOLDER' where FOLDER holds it alone"
_REMEDIES = {
    ".csv": _CSV_REMEDY,
    ".tsv": _CSV_REMEDY,
    ".bz2": "recompress it with gzip or zstd",
    ".xz": "recompress it with gzip or zstd",
    ".zip": "unpack it",
    ".tar": "unpack it",
    ".arrow": "give the folder that datasets saved it in",
}
_PARQUET_MAGIC = b"PAR1"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_HEAD_BYTES = 1 << 16


def resolve_format(path: Path, given: str) -> str:
    """The format to read a file with: ``jsonl``, ``parquet`` or ``text``; ``given`` is the job's, perhaps ``auto``.

    Raises UsageError with a remedy when the content contradicts ``given`` or is of no known format, and
    ``OSError`` when the file cannot be read.
    """
    with path.open("rb") as file:
        is_parquet = file.read(4) == _PARQUET_MAGIC
    if given == "parquet" or (given == "auto" and is_parquet):
        return "parquet"
    if is_parquet:
        raise UsageError(f'{path} is a Parquet file and input.format = "{given}"; leave the format to "auto"')
    with open_text(path) as stream:
        head = stream.read(_HEAD_BYTES)
    if head.startswith(_UTF16_MARKS):
        raise UsageError(f"{path} is UTF-16 text; convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW_FILE")
    if given == "auto":
        return _detect(path, head)
    return "text" if given == "text" else "jsonl"


def _detect(path: Path, head: bytes) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    suffix = suffixes[-1] if suffixes else ""
    if suffix in _REMEDIES:
        raise UsageError(f"{path}: {suffix} files cannot be read; {_REMEDIES[suffix]}")
    if suffix in _BY_SUFFIX:
        return _BY_SUFFIX[suffix]
    first = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if first.startswith(b"{"):
        return "jsonl"
    if suffix == ".json":
        raise UsageError(f"{path} is not one JSON object a line; for an array: jq -c '.[]' FILE > NEW_FILE.jsonl")
    if b"\0" in head:
        raise UsageError(f"{path} looks like binary data; say in input.format what it is")
    return "text"
