"""Output formats by the name that ``output.format`` gives them. A new one is a module and an entry here."""

from __future__ import annotations

from batchgen.config.job import JobSpec
from batchgen.core.errors import UsageError
from batchgen.output.formats.jsonl import OutputFormat
from batchgen.output.formats.openai_batch import OpenAIBatchFormat

__all__ = ["OutputFormat", "output_format"]


def output_format(spec: JobSpec) -> OutputFormat:
    """The format of a job's outputs. Raises UsageError if unknown."""
    name = spec.output.format
    if name == "jsonl":
        return OutputFormat()
    if name == "openai-batch":
        return OpenAIBatchFormat(spec.model.path, spec.input.chat)
    if name == "parquet":
        from batchgen.output.formats.parquet import ParquetFormat, fixed_types  # pyarrow, where it is needed

        return ParquetFormat(fixed_types(spec))
    raise UsageError(f'output.format = "{name}": must be one of jsonl, parquet, openai-batch')
