"""Names of the fields of an output record, and which columns of a row are kept next to them.

Fields of the record take precedence: a column with the same name is renamed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from batchgen.config.job import JobSpec
from batchgen.core.logprobs import PACKED_KEYS

RECORD_KEYS = frozenset(
    {"id", "index", "fingerprint", "text", "reasoning", "finish_reason", "usage", "timings"}
    | {"token_ids", "logprobs", "samples", "finish_reasons"}
    | {"prompt_logprobs", "perplexity", "complete", "parsed", "tool_calls", "extracted"}
)
VECTOR_KEYS = frozenset({"embedding", "embeddings", "label", "score", "scores"})  # if a job does not generate text
WITHOUT_TEXT = (RECORD_KEYS - {"text"}) | VECTOR_KEYS  # fields of such a job; an input column "text" keeps its name
_REQUEST = ("custom_id", "method", "url", "body")  # an OpenAI Batch request; kept only if named
# Fields of the request that a response in OpenAI's format repeats, under the names of RecordBuilder.
OF_REQUEST = ("url", "encoding_format", "model")
CHAT_URL, COMPLETION_URL, EMBEDDING_URL = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
_PREFIX = "input_"
_PREFIXES = re.compile(f"^(?:{_PREFIX})+")


def record_keys(spec: JobSpec) -> frozenset[str]:
    """The fields that an output record of this job may have in addition to kept columns."""
    if spec.input.regenerate:
        return RECORD_KEYS | {"messages"}
    return RECORD_KEYS | packed_keys(spec) if spec.generates else WITHOUT_TEXT


def packed_keys(spec: JobSpec) -> frozenset[str]:
    """The fields of a record of this job that may be packed arrays.

    Only these are unpacked: a kept column may be named like another field.
    """
    if not spec.generates:
        return PACKED_KEYS & VECTOR_KEYS
    return PACKED_KEYS - VECTOR_KEYS if spec.packs_logprobs else frozenset()


def kept_columns(spec: JobSpec, columns: Mapping[str, Any]) -> dict[str, str]:
    """The columns of a row that its record keeps, each with the name of its field there."""
    is_line = spec.input.is_batch_line(columns)
    taken = _taken(spec, is_line=is_line)
    if spec.input.columns == ("*",):
        left_out = {*(_REQUEST if is_line else ()), *(["id"] if spec.input.id == "id" else [])}
        names = [name for name in columns if name not in left_out or name == spec.eval.expected]
    else:
        wanted = dict.fromkeys(spec.input.columns)
        if spec.eval.expected is not None:
            wanted[spec.eval.expected] = None
        names = [name for name in wanted if name in columns]
    return {name: kept_name(name, columns, taken) for name in names}


def kept_name(name: str, columns: Iterable[str], taken: frozenset[str] = RECORD_KEYS) -> str:
    """The name of a kept column in the output record; names that are ``taken`` belong to the record's own fields.

    A taken name gets a prefix. If other columns already have the name with prefixes, they keep their names, and it gets
    one prefix more than the longest of them.
    """
    if name not in taken:
        return name
    return _PREFIX + max((column for column in columns if _PREFIXES.sub("", column) == name), key=len, default=name)


def columns_of(spec: JobSpec, record: Mapping[str, Any]) -> dict[str, Any]:
    """The kept columns of an output record by their names in the input, which ``kept_columns`` may have changed."""
    taken = _taken(spec, is_line="url" in record)
    fields = sorted((field for field in record if field.startswith(_PREFIX)), key=len)
    renamed = {name: field for field in fields if (name := _PREFIXES.sub("", field)) in taken}
    columns = {name: value for name, value in record.items() if name not in taken or name == spec.input.id}
    return columns | {name: columns.pop(field) for name, field in renamed.items()}


def _taken(spec: JobSpec, *, is_line: bool) -> frozenset[str]:
    """The names that kept columns cannot have; a response also has the fields of a request to OpenAI's Batch API."""
    is_renamed = spec.output.format == "openai-batch" and not is_line
    return record_keys(spec) | (frozenset(OF_REQUEST) if is_renamed else frozenset())


def url_of(columns: Mapping[str, Any]) -> Any:
    """The ``url`` of an OpenAI Batch request; if it is missing, the url that its body fits."""
    if "url" in columns:
        return columns["url"]
    body = columns.get("body")
    if isinstance(body, dict) and "input" in body:
        return EMBEDDING_URL
    is_completion = isinstance(body, dict) and "prompt" in body and "messages" not in body
    return COMPLETION_URL if is_completion else CHAT_URL
