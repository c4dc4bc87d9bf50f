"""Output and error files in the format of OpenAI's Batch API: https://platform.openai.com/docs/guides/batch.

All except ``timings`` follows from the row and the run; fields unknown to OpenAI are added, since readers ignore them.
"""

from __future__ import annotations

import json
import struct
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from batchgen.config.record_fields import RECORD_KEYS, WITHOUT_TEXT
from batchgen.core.json_line import encode_json
from batchgen.core.records import FinishReason
from batchgen.output.formats import OutputFormat


@dataclass(frozen=True, slots=True)
class OpenAIBatchFormat(OutputFormat):
    """``outputs.jsonl`` of batch responses. ``chat`` says whether rows without a ``url`` are chats.

    ``model`` is used for requests that do not name a model; ``created`` is when the run was begun, in seconds since
    1970. With ``has_ids`` ids come from a column; otherwise an integer id is the row's index.
    """

    model: str
    chat: bool
    created: int = 0
    has_ids: bool = False

    def result_row(self, payload: bytes) -> bytes:
        """A batch response with status 200 and a completion as its body, followed by timings and kept columns."""
        fields = json.loads(payload)
        names = RECORD_KEYS if "finish_reason" in fields else WITHOUT_TEXT
        record = {name: value for name, value in fields.items() if name in names}
        kept = {name: value for name, value in fields.items() if name not in names}
        index = record["index"]
        response = {"status_code": 200, "request_id": f"req_{index:012d}", "body": self._body(record, kept)}
        line = {**_head(record), "response": response, "error": None, "timings": record["timings"]}
        return encode_json(line | ({"kept_columns": kept} if kept else {}))

    def error_row(self, payload: bytes) -> bytes:
        """A batch response without a body, followed by the other fields of the payload: index, source, line, row.

        If the id could not be read, ``custom_id`` is null, since the row's index may be another row's id.
        """
        record = json.loads(payload)
        error = {"code": record.pop("code"), "message": record.pop("message")}
        head = _head(record)
        if (row_id := record.pop("id", None)) is None or (isinstance(row_id, int) and not self.has_ids):
            head["custom_id"] = None
        return encode_json({**head, "response": None, "error": error, **record})

    def _body(self, record: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
        if "embedding" in record or "embeddings" in record:
            return self._embedding(record, kept)
        url = kept.get("url")
        chat = self.chat if not isinstance(url, str) else url.rstrip("/").endswith("/chat/completions")
        usage = dict(record["usage"])
        total = usage["prompt_tokens"] + usage["completion_tokens"]
        if (num_thought := usage.pop("reasoning_tokens", None)) is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": num_thought}
        samples = record.get("samples") or [record]
        body = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{record['index']:012d}",
            "object": "chat.completion" if chat else "text_completion",
            "created": self.created,
            "model": self._named(kept),
            "choices": [_choice(i, sample, chat, record["index"]) for i, sample in enumerate(samples)],
            "usage": {**usage, "total_tokens": total},
        }
        return body | {name: record[name] for name in ("prompt_logprobs", "perplexity") if name in record}

    def _named(self, kept: Mapping[str, Any]) -> str:
        name = kept.get("model")
        return name if isinstance(name, str) and name else self.model

    def _embedding(self, record: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
        """The body for one or several vectors; base64 holds little-endian float32 numbers."""
        vectors, count = record.get("embeddings") or [record["embedding"]], record["usage"]["prompt_tokens"]
        if kept.get("encoding_format") == "base64":
            vectors = [b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() for vector in vectors]
        data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": self._named(kept), "usage": usage}


def _head(record: Mapping[str, Any]) -> dict[str, str | None]:
    index, custom_id = record["index"], record.get("id")
    return {"id": f"batch_req_{index:012d}", "custom_id": str(index if custom_id is None else custom_id)}


def _choice(index: int, sample: Mapping[str, Any], chat: bool, row: int) -> dict[str, Any]:
    """A choice of the body, made from a sample, or from the record itself if it has a single sample."""
    text, reason, calls = sample.get("text"), sample["finish_reason"], sample.get("tool_calls")
    choice: dict[str, Any] = {"index": index}
    more = {} if sample.get("reasoning") is None else {"reasoning_content": sample["reasoning"]}
    more |= {name: sample[name] for name in ("parsed", "extracted") if name in sample}
    if chat:
        called = {"tool_calls": _tool_calls(calls, f"call_{row:012d}_{index}")} if calls else {}
        choice["message"] = {"role": "assistant", "content": (text or None) if calls else text, **called, **more}
        reason = "tool_calls" if calls and reason == FinishReason.STOP else reason
    else:
        choice |= {"text": text or "", **({"tool_calls": calls} if calls else {}), **more}
    logprobs = sample.get("logprobs")
    shape = _chat_logprobs if chat else _completion_logprobs
    choice |= {
        "logprobs": None if logprobs is None else shape(logprobs),
        "finish_reason": "stop" if reason == FinishReason.REPETITION else reason,  # OpenAI knows no such reason
    }
    if reason == FinishReason.REPETITION:
        choice["stop_reason"] = reason
    choice |= {name: sample[name] for name in ("complete", "token_ids") if name in sample}
    return choice


def _tool_calls(calls: Sequence[Mapping[str, Any]], head: str) -> list[dict[str, Any]]:
    return [
        {
            "id": f"{head}_{number}",
            "type": "function",
            "function": {"name": call["name"], "arguments": encode_json(call["arguments"]).decode()},
        }
        for number, call in enumerate(calls)
    ]


def _chat_logprobs(tokens: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "content": [
            _chat_logprob(token) | {"top_logprobs": [_chat_logprob(top) for top in token["top_logprobs"]]}
            for token in tokens
        ]
    }


def _chat_logprob(token: Mapping[str, Any]) -> dict[str, Any]:
    """A token's log-probability; ``bytes`` is null for part of a character if the record lacks the bytes."""
    text, content = _token_text(token), token.get("bytes")
    if content is None:
        return {"token": text, "logprob": token["logprob"], "bytes": None if "\ufffd" in text else [*text.encode()]}
    shown = bytes(content).decode(errors="backslashreplace")  # as OpenAI shows it
    return {"token": shown, "logprob": token["logprob"], "bytes": content}


def _completion_logprobs(tokens: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Log-probabilities of a completion; ``text_offset`` is the sum of the lengths of all earlier tokens' texts."""
    texts = [_token_text(token) for token in tokens]
    tops = [_by_text(token["top_logprobs"]) for token in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": [*accumulate(map(len, texts[:-1]), initial=0)] if texts else [],
    }


def _by_text(tops: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Log-probabilities by text; if tokens share a text, the first and likeliest counts."""
    logprobs: dict[str, float] = {}
    for top in tops:
        logprobs.setdefault(_token_text(top), top["logprob"])
    return logprobs


def _token_text(token: Mapping[str, Any]) -> str:
    """The text of a token; if the model has no tokenizer, its id as vLLM writes it."""
    return f"token_id:{token['token_id']}" if token["token"] is None else str(token["token"])
