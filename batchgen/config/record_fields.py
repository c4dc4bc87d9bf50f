"""Names of the fields of an output record, and which columns of a row stand beside them.

Fields of the record take precedence: a column of such a name is kept under another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchgen.config.job import JobSpec

RECORD_KEYS = frozenset(
    {"id", "index", "text", "reasoning", "finish_reason", "usage", "timings", "token_ids", "logprobs", "samples"}
    | {"choices", "prompt_logprobs", "perplexity", "complete", "parsed", "tool_calls", "extracted"}
)
VECTOR_KEYS = frozenset({"embedding", "embeddings", "label", "score", "scores"})  # with [embed]
_REQUEST = ("custom_id", "method", "url", "body")  # an OpenAI Batch request, of which only what is named is kept
# What a response in OpenAI's form says of its request, where RecordBuilder keeps it.
OF_REQUEST = ("url", "encoding_format", "model")


def record_keys(spec: JobSpec) -> frozenset[str]:
    """The fields that an output record of this job may have beside kept columns."""
    return RECORD_KEYS | VECTOR_KEYS if spec.embed.is_on else RECORD_KEYS


def expected_field(spec: JobSpec) -> str | None:
    """The field of an output record that holds ``eval.expected``."""
    name = spec.eval.expected
    return f"input_{name}" if name in record_keys(spec) else name


def kept_columns(spec: JobSpec, columns: Mapping[str, Any]) -> dict[str, str]:
    """The columns of a row that its record keeps, each with the name of its field there."""
    is_line = spec.input.is_batch_line(columns)
    taken = record_keys(spec)
    if spec.output.format == "openai-batch" and not is_line:
        taken |= frozenset(OF_REQUEST)
    if spec.input.columns == ("*",):
        left_out = {*(_REQUEST if is_line else ()), *(["id"] if spec.input.id == "id" else [])}
        names = [name for name in columns if name not in left_out or name == spec.eval.expected]
    else:
        wanted = dict.fromkeys(spec.input.columns)
        if spec.eval.expected is not None:
            wanted[spec.eval.expected] = None
        names = [name for name in wanted if name in columns]
    return {name: kept_name(name, columns, taken) for name in names}


def kept_name(name: str, columns: Mapping[str, Any], taken: frozenset[str] = RECORD_KEYS) -> str:
    """The name of a kept column in the output record, whose own fields have those that are ``taken``."""
    if name in taken:
        name = f"input_{name}"
        while name in columns:
            name = f"input_{name}"
    return name
