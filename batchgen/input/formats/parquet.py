"""Parquet files, read one row group at a time.

A cursor's ``offset`` is the row group and its ``row`` the row inside it. Groups without a wanted row are not read.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.config.job import InputSpec
from batchgen.core.errors import UsageError
from batchgen.core.records import Cursor
from batchgen.core.units import one_line
from batchgen.input.formats import Rows, StoredFile, Wanted
from batchgen.input.formats.arrow import TableFile, Unreadable, batch_rows, check_names, is_lost_in_json
from batchgen.input.input_bytes import InputBytes

_FILE_ERRORS = (OSError, ValueError, pa.ArrowException)  # ValueError: names in the metadata that are not UTF-8
_BUFFER_BYTES = 1 << 20  # column chunks are read through a buffer of this size instead of whole


class ParquetFile(TableFile, StoredFile):
    """A Parquet file. Raises UsageError if it is not Parquet, cannot be opened, or has two columns of one name.

    Row groups (or pages of them) that cannot be decoded become one ``bad_encoding`` row for each row that the
    file's metadata promises there; the groups after them are read.
    """

    output_format = "parquet"

    def __init__(self, content: InputBytes, spec: InputSpec) -> None:
        super().__init__(content)
        self._name, self._spec = content.name, spec
        with self._open() as file:
            self._num_rows = int(file.metadata.num_rows)
            check_names(file.schema_arrow.names, content.name)
            self.types = {field.name: str(field.type) for field in file.schema_arrow if is_lost_in_json(field.type)}

    def _open(self) -> pq.ParquetFile:
        try:
            source = self.content.arrow_source()
            return pq.ParquetFile(source, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True)
        except _FILE_ERRORS as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
            raise UsageError(f"cannot read {self.content.name} as Parquet: {reason}") from error

    def read(self, at: Cursor, stop: int | None, wanted: Wanted | None) -> Rows:
        """As in ``InputFile``; ``at.offset`` is a row group and ``at.row`` a row in it."""
        index = at.index
        with self._open() as file:
            groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
            rows_before = sum(group.num_rows for group in groups[: at.offset])
            for number in range(at.offset, len(groups)):
                if stop is not None and index >= stop:
                    break
                num_rows = groups[number].num_rows
                first = min(at.row, num_rows) if number == at.offset else 0
                end = index + num_rows - first
                indexes = range(index, end if stop is None else min(end, stop))
                if indexes and (wanted is None or any(map(wanted, indexes))):
                    start = Cursor(at.file, number, first, index)
                    batches = _batches(file, number, first)
                    index = yield from self._read_batches(batches, start, stop, wanted, rows_before)
                else:
                    index = end
                rows_before += num_rows
        return index

    def num_rows(self) -> int | None:
        return self._num_rows


def _batches(file: pq.ParquetFile, group: int, first: int) -> Iterator[pa.RecordBatch | Unreadable]:
    """The rows of a row group, starting at ``first``; if some cannot be decoded, one ``Unreadable`` counts them."""
    metadata = file.metadata.row_group(group)
    passed = 0
    reason = "it has fewer rows than the file's metadata says"
    try:
        size = batch_rows(metadata.num_rows, metadata.total_byte_size)
        for batch in file.iter_batches(size, row_groups=[group], use_threads=False):
            if passed + batch.num_rows > first:
                yield batch.slice(max(0, first - passed), metadata.num_rows - max(first, passed))
            passed += batch.num_rows
    except _FILE_ERRORS as error:
        reason = one_line(error)
    if passed < metadata.num_rows:
        yield Unreadable(metadata.num_rows - max(passed, first), f"row group {group} is damaged here: {reason}")
