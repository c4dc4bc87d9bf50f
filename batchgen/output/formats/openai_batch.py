"""Output and error files in the format of OpenAI's Batch API, for code that reads that format.

Shapes: https://platform.openai.com/docs/guides/batch. Everything but ``timings`` is derived from the row, so a resumed
run writes the same bytes: ids come from the row's index and ``created`` is 0. A kept ``url`` says per row whether a
chat or a text completion was asked for. Fields that OpenAI lacks are added beside its own, where readers of its format
ignore them: ``timings`` and ``kept_columns`` in the line; ``prompt_logprobs`` and ``perplexity`` in the body;
``reasoning_content``, where vLLM has it, and ``parsed``, where OpenAI's SDK has it, in the message of a chat or the
choice of a completion; ``complete``, ``token_ids``, scored ``choices`` (here ``scored_choices``) and, where OpenAI has
no such reason, ``stop_reason`` in a choice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from batchgen.config.job import RECORD_KEYS
from batchgen.core.json_line import encode_json
from batchgen.core.records import FinishReason
from batchgen.output.formats.jsonl import OutputFormat, index_of, read_lines


@dataclass(frozen=True, slots=True)
class OpenAIBatchFormat(OutputFormat):
    """``outputs.jsonl`` of batch responses. ``chat`` is the shape of rows that keep no ``url``."""

    model: str
    chat: bool

    def result_row(self, payload: bytes) -> bytes:
        """A batch response with status 200 and a completion as its body, followed by timings and kept columns."""
        found = json.loads(payload)
        record = {name: value for name, value in found.items() if name in RECORD_KEYS}
        kept = {name: value for name, value in found.items() if name not in RECORD_KEYS}
        index, url = record["index"], found.get("url")
        response = {"status_code": 200, "request_id": f"req_{index:012d}", "body": self._body(record, url)}
        line = {**_head(record), "response": response, "error": None, "timings": record["timings"]}
        return encode_json(line | ({"kept_columns": kept} if kept else {}))

    def error_row(self, payload: bytes) -> bytes:
        """A batch response without a body, followed by the other fields of the payload: index, source, line, row."""
        record = json.loads(payload)
        error = {"code": record.pop("code"), "message": record.pop("message")}
        head = _head(record)
        record.pop("id", None)
        return encode_json({**head, "response": None, "error": error, **record})

    def read(self, path: Path) -> Iterator[tuple[int, bytes]]:
        return read_lines(path, key="id")

    def record(self, row: bytes) -> dict[str, Any]:
        """What a report needs of the record: id (as text), index, text, finish_reason, usage, timings, kept columns.

        Also ``complete``, ``samples`` of several and scored ``choices``, as far as the record has them.
        """
        line = json.loads(row)
        body = line["response"]["body"]
        choice = body["choices"][0]
        samples = [_sample(choice) for choice in body["choices"]]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        return {
            "id": line["custom_id"],
            "index": index_of(line["id"]),
            "text": text or "",
            **samples[0],
            **({"samples": samples} if len(samples) > 1 else {}),
            **({"choices": choice["scored_choices"]} if "scored_choices" in choice else {}),
            "usage": {name: body["usage"][name] for name in ("prompt_tokens", "completion_tokens")},
            "timings": line["timings"],
            **line.get("kept_columns", {}),
        }

    def _body(self, record: Mapping[str, Any], url: object) -> dict[str, Any]:
        chat = self.chat if not isinstance(url, str) else url.rstrip("/").endswith("/chat/completions")
        usage = record["usage"]
        total = usage["prompt_tokens"] + usage["completion_tokens"]
        samples = record.get("samples") or [record]
        body = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{record['index']:012d}",
            "object": "chat.completion" if chat else "text_completion",
            "created": 0,
            "model": self.model,
            "choices": [_choice(i, sample, chat) for i, sample in enumerate(samples)],
            "usage": {**usage, "total_tokens": total},
        }
        return body | {name: record[name] for name in ("prompt_logprobs", "perplexity") if name in record}


def _sample(choice: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a sample that a report counts, from its choice."""
    reason = {"finish_reason": choice.get("stop_reason", choice["finish_reason"])}
    return reason | ({"complete": choice["complete"]} if "complete" in choice else {})


def _head(record: Mapping[str, Any]) -> dict[str, Any]:
    index, custom_id = record["index"], record.get("id")
    return {
        "id": f"batch_req_{index:012d}",
        "custom_id": str(index if custom_id is None else custom_id),
    }


def _choice(index: int, sample: Mapping[str, Any], chat: bool) -> dict[str, Any]:
    """A choice of the body, from a sample, or from the record of a row with a single one."""
    text, reason = sample.get("text"), sample["finish_reason"]
    choice: dict[str, Any] = {"index": index}
    more = {} if sample.get("reasoning") is None else {"reasoning_content": sample["reasoning"]}
    more |= {"parsed": sample["parsed"]} if "parsed" in sample else {}
    if chat:
        choice["message"] = {"role": "assistant", "content": text, **more}
    else:
        choice |= {"text": text or "", **more}
    logprobs = sample.get("logprobs")
    shape = _chat_logprobs if chat else _completion_logprobs
    choice |= {
        "logprobs": None if logprobs is None else shape(logprobs),
        "finish_reason": "stop" if reason == FinishReason.REPETITION else reason,  # OpenAI knows no such reason
    }
    if reason == FinishReason.REPETITION:
        choice["stop_reason"] = reason
    choice |= {name: sample[name] for name in ("complete", "token_ids") if name in sample}
    if "choices" in sample:
        choice["scored_choices"] = sample["choices"]
    return choice


def _chat_logprobs(tokens: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "content": [
            _chat_logprob(token) | {"top_logprobs": [_chat_logprob(top) for top in token["top_logprobs"]]}
            for token in tokens
        ]
    }


def _chat_logprob(token: Mapping[str, Any]) -> dict[str, Any]:
    """``bytes`` is null where the token is not a whole number of characters: its text does not tell them."""
    text = _token_text(token)
    return {"token": text, "logprob": token["logprob"], "bytes": None if "\ufffd" in text else [*text.encode()]}


def _completion_logprobs(tokens: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``text_offset`` counts the characters of the tokens before, each decoded by itself."""
    texts = [_token_text(token) for token in tokens]
    tops = [_by_text(token["top_logprobs"]) for token in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": [*accumulate(map(len, texts[:-1]), initial=0)] if texts else [],
    }


def _by_text(tops: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of tokens with the same text the likeliest counts, which is the one that comes first."""
    found: dict[str, float] = {}
    for top in tops:
        found.setdefault(_token_text(top), top["logprob"])
    return found


def _token_text(token: Mapping[str, Any]) -> str:
    """The text of a token; that of a model without a tokenizer is its id, as vLLM writes it then."""
    return f"token_id:{token['token_id']}" if token["token"] is None else str(token["token"])
