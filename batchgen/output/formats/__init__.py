"""Output formats by the name that ``output.format`` gives them. A new one is a module and an entry here."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from batchgen.config.job import JobSpec
from batchgen.config.record_fields import record_keys
from batchgen.core.errors import UsageError
from batchgen.output.formats.delimited import CsvFormat
from batchgen.output.formats.jsonl import OutputFormat
from batchgen.output.formats.openai_batch import OpenAIBatchFormat
from batchgen.output.manifest import Manifest

__all__ = ["OutputFormat", "csv_format", "output_format"]


def output_format(spec: JobSpec, manifest: Manifest) -> OutputFormat:
    """The format of a job's outputs; some formats contain the time when the run was begun. Raises UsageError."""
    name = spec.output.format
    if name == "jsonl":
        return OutputFormat()
    if name == "openai-batch":
        path = spec.model.path
        model = Path(path).name if Path(path).is_absolute() else path  # no one else's machine has that path
        begun_at = manifest.created_at
        created = int(datetime.fromisoformat(begun_at).timestamp()) if begun_at else 0
        return OpenAIBatchFormat(model, spec.input.is_templated, created, spec.input.id is not None)
    if name == "parquet":
        from batchgen.output.formats.parquet import ParquetFormat, carried_types, fixed_types  # they need pyarrow

        types = manifest.fingerprints.get("input", {}).get("types", {})
        return ParquetFormat(fixed_types(spec), carried_types(spec, types))
    if name == "csv":
        return csv_format(spec, manifest)
    raise UsageError(f'output.format = "{name}": must be one of jsonl, csv, parquet, openai-batch')


def csv_format(spec: JobSpec, manifest: Manifest, columns: Sequence[str] = ()) -> CsvFormat:
    """The CSV format of a job's outputs, reduced to ``columns`` if they are given.

    It begins with a mark of UTF-8, which spreadsheets look for, if a file of the input had one when the job was begun,
    or was not UTF-8. The delimiter is the input's, or a comma if the input's tables differ.
    """
    files = manifest.fingerprints.get("input", {}).get("files", [])
    delimiters = {file["delimiter"] for file in files if "delimiter" in file}
    return CsvFormat(
        has_id=spec.input.id is not None,
        has_bom=any(file.get("bom") for file in files) or bool(spec.input.encoding),
        delimiter=delimiters.pop() if len(delimiters) == 1 else ",",
        columns=columns,
        own=record_keys(spec),
    )
