"""Output records and error records: the two kinds of line that finished rows become, in the shape users' scripts read.

Pure functions from a row and its result to plain data, without any file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any, Protocol

from batchgen.config.job import RECORD_KEYS, JobSpec
from batchgen.core import structured
from batchgen.core.json_line import json_value
from batchgen.core.records import (
    BadRow,
    FinishReason,
    Record,
    Result,
    Sample,
    SamplingParams,
    Timings,
    TokenLogprob,
    url_of,
)
from batchgen.text.reasoning import Reasoning
from batchgen.text.stop_strings import cut_text

RowId = str | int | None
_TIMINGS = tuple(item.name for item in fields(Timings))
_OF_SAMPLE = ("text", "reasoning", "parsed", "finish_reason", "complete")  # before usage and timings
_DIGITS = 6  # of times and log-probabilities
_LEAST_MEAN = -700.0  # exp(709.8) is the largest float


class Decode(Protocol):
    """The text of token ids, as a tokenizer makes it."""

    def __call__(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class RecordBuilder:
    """Makes the records of one job. ``decode`` is None for a model without a tokenizer: ids then replace the text.

    ``reasoning`` splits the texts of a job that asks for it; a text without reasoning has null in that field.
    ``text_behind`` is that of ``text.reasoning`` with the model's tokenizer.
    """

    def __init__(
        self,
        spec: JobSpec,
        decode: Decode | None,
        reasoning: Reasoning | None = None,
        text_behind: Callable[[str, Sequence[int], Sequence[int], str], str] | None = None,
    ) -> None:
        self._spec = spec
        self._decode = decode
        self._reasoning = reasoning
        self._text_behind = text_behind

    def result(
        self,
        record: Record,
        row_id: RowId,
        result: Result,
        params: SamplingParams = SamplingParams(),  # noqa: B008 - it is frozen
        prompt_token_ids: Sequence[int] = (),
    ) -> dict[str, Any]:
        """The output record of a row; the index is the id of a row without one.

        The order is fixed and fields that were not asked for are left out: id, index, text, reasoning, parsed,
        finish_reason, complete, usage, timings, token_ids, logprobs, samples, choices, prompt_logprobs, perplexity,
        kept columns. What a sample has is that of the first one; ``samples`` holds all of several. ``complete`` is
        whether the text fits its structured outputs. ``parsed`` is its JSON value, null where it has none or is not
        complete. A row whose ``choices`` were scored has the best of them as its text; ``choices`` holds each text,
        ``prob`` (softmax over the choices of the score that decides), ``logprob`` (the sum over its tokens) and
        ``mean_logprob`` (per token). A kept column with the name of a field of the record is written as
        ``input_<name>``.
        """
        is_open = self._reasoning is not None and self._reasoning.is_open(prompt_token_ids)
        samples = [self._sample(sample, params, prompt_token_ids, is_open=is_open) for sample in result.samples]
        first = samples[0]
        scores = result.choice_scores(params) if params.choices else ()
        if scores:
            best = params.choices[scores.index(max(scores))]
            first |= {"text": best, "finish_reason": str(FinishReason.STOP)}
            first |= {"reasoning": None} if self._reasoning is not None else {}
            first |= {"parsed": _json_or_none(best)} if self._spec.output.parse_json else {}
        payload: dict[str, Any] = {"id": record.index if row_id is None else row_id, "index": record.index}
        payload |= {name: first[name] for name in _OF_SAMPLE if name in first}
        payload["usage"] = {
            "prompt_tokens": result.num_prompt_tokens,
            "completion_tokens": result.num_completion_tokens,
        }
        payload["timings"] = {name: round(getattr(result.timings, name), _DIGITS) for name in _TIMINGS}
        payload |= {name: first[name] for name in ("token_ids", "logprobs") if name in first}
        if len(samples) > 1:
            payload["samples"] = samples
        if scores:
            found = zip(params.choices, _softmax(scores), result.choice_logprobs, result.choice_means, strict=True)
            payload["choices"] = [
                {"text": text, "prob": _rounded(prob), "logprob": _rounded(total), "mean_logprob": _rounded(mean)}
                for text, prob, total, mean in found
            ]
        if result.prompt_logprobs is not None:
            payload["prompt_logprobs"] = self._logprobs(result.prompt_logprobs)
            payload["perplexity"] = _perplexity(result.prompt_logprobs)
        return payload | self._kept(record)

    def error(self, row: BadRow) -> dict[str, Any]:
        """The error record of a failed row: enough to find it, to see why it failed, and to run it again.

        Its id is null where the job names an id column and the row has no readable one.
        """
        return {
            "id": row.index if row.id is None and self._spec.input.id is None else row.id,
            "index": row.index,
            "source": row.source,
            "line": row.line,
            "code": str(row.error.code),
            "message": row.error.message,
            "row": row.raw,
        }

    def _kept(self, record: Record) -> dict[str, Any]:
        columns, spec = record.columns, self._spec
        answers_batch = spec.output.format == "openai-batch" and spec.input.is_batch_line(columns)
        if answers_batch:
            columns = {**columns, "url": url_of(columns)}  # which kind of completion was asked for
        if spec.input.keep_columns == ("*",):
            names = [name for name in columns if name != spec.input.id or name != "id"]
        else:
            wanted = dict.fromkeys(spec.input.keep_columns)
            if spec.output.expected is not None:
                wanted[spec.output.expected] = None
            if answers_batch:
                wanted["url"] = None
            names = [name for name in wanted if name in columns]
        return {kept_name(name, columns): columns[name] for name in names}

    def _sample(
        self, sample: Sample, params: SamplingParams, prompt_token_ids: Sequence[int], *, is_open: bool
    ) -> dict[str, Any]:
        shaped: dict[str, Any] = {}
        if self._decode is not None:
            shaped["text"] = text = (
                cut_text(self._decode, sample.token_ids, sample.stop)
                if sample.stop is not None
                else self._decode(sample.token_ids)
            )
            whole = text
            if self._reasoning is not None:
                reasoning, text = self._reasoning.split(sample.token_ids, text, is_open=is_open)
                shaped |= {"text": text, "reasoning": reasoning}
            if self._spec.output.parse_json:
                marker = _marker(params.structured_outputs)
                if marker and self._text_behind:
                    text = self._text_behind(marker, prompt_token_ids, sample.token_ids, whole)
                shaped["parsed"] = None if sample.is_complete is False else _json_or_none(text)
        shaped["finish_reason"] = str(sample.finish_reason)
        if sample.is_complete is not None:
            shaped["complete"] = sample.is_complete
        if self._spec.output.token_ids or self._decode is None:
            shaped["token_ids"] = list(sample.token_ids)
        if sample.logprobs is not None:
            shaped["logprobs"] = self._logprobs(sample.logprobs)
        return shaped

    def _logprobs(self, tokens: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
        """An object per token: token_id, token, logprob, and in top_logprobs the same of the likeliest tokens there."""
        return [
            self._logprob(token.token_id, token.logprob) | {"top_logprobs": [self._logprob(*top) for top in token.top]}
            for token in tokens
        ]

    def _logprob(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = None if self._decode is None else self._decode([token_id], skip_special_tokens=False)
        return {"token_id": token_id, "token": text, "logprob": _rounded(logprob)}


@lru_cache(maxsize=64)
def _marker(structured_outputs: str) -> str:
    return str(structured.parsed(structured_outputs).get("after", ""))


def _json_or_none(text: str) -> Any:
    try:
        return json_value(text)
    except ValueError:
        return None


def _rounded(logprob: float) -> float:
    return round(logprob, _DIGITS) + 0.0  # never -0.0


def _softmax(scores: Sequence[float]) -> list[float]:
    most = max(scores)
    weights = [math.exp(score - most) for score in scores]
    return [weight / math.fsum(weights) for weight in weights]


def _perplexity(tokens: Sequence[TokenLogprob]) -> float | None:
    """exp(-mean log-probability); None without tokens, or where it exceeds the largest float."""
    if not tokens:
        return None
    mean = math.fsum(token.logprob for token in tokens) / len(tokens)
    return round(math.exp(-mean), _DIGITS) if mean > _LEAST_MEAN else None


def kept_name(name: str, columns: dict[str, Any], record_keys: frozenset[str] = RECORD_KEYS) -> str:
    """The name of a kept column in the output record, whose own fields take precedence."""
    if name in record_keys:
        name = f"input_{name}"
        while name in columns:
            name = f"input_{name}"
    return name
