"""Names of a journal's segments and random reads from them, with a bounded number of open files.

It reads single lines at known places and verifies them again; what the lines mean is the journal's business.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import BinaryIO

from batchgen.core.errors import StorageError
from batchgen.core.storage import storage_errors
from batchgen.output.segment import Line, decode_line

CHECK_DISK = "check the disk, then run again: what is damaged is done once more, all else is kept"
_MAX_OPEN = 64  # files; a journal of days has more segments than a process may open


def segment_path(folder: Path, number: int) -> Path:
    """The file of segment ``number``, counted from 1."""
    return folder / f"{number:06d}.seg"


def segment_number(path: Path) -> int:
    """The number in a segment's name."""
    return int(path.stem)


def segment_paths(folder: Path) -> list[Path]:
    """The segments of a journal in the order in which they were written; none if there is no journal."""
    return sorted((path for path in folder.glob("*.seg") if path.stem.isdecimal()), key=segment_number)


class SegmentReader:
    """Reads lines at given places of a journal's segments."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: OrderedDict[int, BinaryIO] = OrderedDict()  # least recently used first

    def read(self, segment: int, offset: int) -> Line:
        """The line at ``offset``, verified again. Raises StorageError if it no longer reads back."""
        with storage_errors("read", self._folder):
            file = self._file(segment)
            file.seek(offset)
            line = decode_line(file.readline(), offset)
        if line is None:
            path = segment_path(self._folder, segment)
            raise StorageError(f"{path}: the record at byte {offset} no longer matches its checksum; {CHECK_DISK}")
        return line

    def close(self) -> None:
        """Release all files."""
        while self._open:
            self._open.popitem()[1].close()

    def _file(self, segment: int) -> BinaryIO:
        if segment in self._open:
            self._open.move_to_end(segment)
            return self._open[segment]
        if len(self._open) >= _MAX_OPEN:
            self._open.popitem(last=False)[1].close()
        file = segment_path(self._folder, segment).open("rb", buffering=16 << 10)
        self._open[segment] = file
        return file
