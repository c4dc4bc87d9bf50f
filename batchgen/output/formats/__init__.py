"""Output formats by the name that ``output.format`` gives them. A new one is a module and an entry here."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from batchgen.config.job import InputSpec, JobSpec
from batchgen.core.errors import UsageError
from batchgen.output.formats.delimited import BOM, CsvFormat
from batchgen.output.formats.jsonl import OutputFormat
from batchgen.output.formats.openai_batch import OpenAIBatchFormat

__all__ = ["OutputFormat", "csv_format", "output_format"]


def output_format(spec: JobSpec, begun_at: datetime | None = None) -> OutputFormat:
    """The format of a job's outputs, of which some say when the run was begun. Raises UsageError if unknown."""
    name = spec.output.format
    if name == "jsonl":
        return OutputFormat()
    if name == "openai-batch":
        path = spec.model.path
        model = Path(path).name if Path(path).is_absolute() else path  # no one else's machine has that path
        return OpenAIBatchFormat(model, spec.input.chat, int(begun_at.timestamp()) if begun_at else 0)
    if name == "parquet":
        from batchgen.output.formats.parquet import ParquetFormat, fixed_types  # pyarrow, where it is needed

        return ParquetFormat(fixed_types(spec))
    if name == "csv":
        return csv_format(spec)
    raise UsageError(f'output.format = "{name}": must be one of jsonl, csv, parquet, openai-batch')


def csv_format(spec: JobSpec, columns: Sequence[str] = ()) -> CsvFormat:
    """The CSV of a job's outputs, with ``columns`` alone where they are given."""
    return CsvFormat(has_id=spec.input.id is not None, has_bom=_has_bom(spec.input), columns=columns)


def _has_bom(spec: InputSpec) -> bool:
    """Whether the input is a file of a spreadsheet, which reads UTF-8 by its mark alone: it has one, or is no UTF-8."""
    try:
        with Path(spec.path[0] if spec.path else "").open("rb") as file:
            return bool(spec.encoding) or file.read(3) == BOM.encode()
    except (OSError, ValueError):
        return bool(spec.encoding)
