"""Output formats by the name that ``output.format`` gives them. A new one is a module and an entry here."""

from __future__ import annotations

from batchgen.core.errors import UsageError
from batchgen.output.formats.jsonl import OutputFormat
from batchgen.output.formats.openai_batch import OpenAIBatchFormat

__all__ = ["OutputFormat", "output_format"]


def output_format(name: str, *, model: str = "", chat: bool = True) -> OutputFormat:
    """The format of ``output.format``; ``model`` and ``chat`` shape OpenAI responses. Raises UsageError if unknown."""
    if name == "jsonl":
        return OutputFormat()
    if name == "openai-batch":
        return OpenAIBatchFormat(model, chat)
    if name == "parquet":
        from batchgen.output.formats.parquet import ParquetFormat  # pyarrow, where it is needed

        return ParquetFormat()
    raise UsageError(f'output.format = "{name}": must be one of jsonl, parquet, openai-batch')
