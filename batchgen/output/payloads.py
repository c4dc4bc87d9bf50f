"""Output records and error records: the two kinds of line that finished rows become, in the shape users' scripts read.

Pure functions from a row and its result to plain data, without any file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, Protocol

from batchgen.config.job import RECORD_KEYS, JobSpec
from batchgen.core.records import BadRow, FinishReason, Record, Result, Sample, Timings, TokenLogprob, url_of
from batchgen.text.reasoning import Reasoning
from batchgen.text.stop_strings import cut_text

RowId = str | int | None
_TIMINGS = tuple(item.name for item in fields(Timings))
_DIGITS = 6  # of times and log-probabilities
_LEAST_MEAN = -700.0  # exp(709.8) is the largest float


class Decode(Protocol):
    """The text of token ids, as a tokenizer makes it."""

    def __call__(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class Payloads:
    """Makes the payloads of one job. ``decode`` is None for a model without a tokenizer: ids then replace the text.

    ``reasoning`` splits the texts of a job that asks for it; a text without reasoning has null in that field.
    """

    def __init__(self, spec: JobSpec, decode: Decode | None, reasoning: Reasoning | None = None) -> None:
        self._spec = spec
        self._decode = decode
        self._reasoning = reasoning

    def result(
        self,
        record: Record,
        row_id: RowId,
        result: Result,
        choices: tuple[str, ...] = (),
        prompt_end: Sequence[int] = (),
    ) -> dict[str, Any]:
        """The output record of a row; the index is the id of a row without one.

        The order is fixed and fields that were not asked for are left out: id, index, text, reasoning, finish_reason,
        usage, timings, token_ids, logprobs, samples, choices, prompt_logprobs, perplexity, kept columns. The text,
        reason, ids and log-probabilities are those of the first sample; ``samples`` holds all of several. A row whose
        ``choices`` were scored has the likeliest of them as its text. A kept column with the name of a field of the
        record is written as ``input_<name>``. ``prompt_end`` are the last tokens of the prompt.
        """
        is_open = self._reasoning is not None and self._reasoning.is_open(prompt_end)
        samples = [self._sample(sample, is_open=is_open) for sample in result.samples]
        first = samples[0]
        scored = [*zip(choices, result.choice_logprobs, strict=True)] if choices else []
        if scored:
            likeliest, _ = max(scored, key=lambda choice: choice[1])  # the first of equals
            first |= {"text": likeliest, "finish_reason": str(FinishReason.STOP)}
            first |= {"reasoning": None} if self._reasoning is not None else {}
        payload: dict[str, Any] = {"id": record.index if row_id is None else row_id, "index": record.index}
        payload |= {name: first[name] for name in ("text", "reasoning", "finish_reason") if name in first}
        payload["usage"] = {
            "prompt_tokens": result.num_prompt_tokens,
            "completion_tokens": result.num_completion_tokens,
        }
        payload["timings"] = {name: round(getattr(result.timings, name), _DIGITS) for name in _TIMINGS}
        payload |= {name: first[name] for name in ("token_ids", "logprobs") if name in first}
        if len(samples) > 1:
            payload["samples"] = samples
        if scored:
            payload["choices"] = [{"text": text, "logprob": _rounded(logprob)} for text, logprob in scored]
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

    def _sample(self, sample: Sample, *, is_open: bool) -> dict[str, Any]:
        shaped: dict[str, Any] = {}
        if self._decode is not None:
            shaped["text"] = text = (
                cut_text(self._decode, sample.token_ids, sample.stop)
                if sample.stop is not None
                else self._decode(sample.token_ids)
            )
            if self._reasoning is not None:
                reasoning, text = self._reasoning.split(sample.token_ids, text, is_open=is_open)
                shaped |= {"text": text, "reasoning": reasoning}
        shaped["finish_reason"] = str(sample.finish_reason)
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


def _rounded(logprob: float) -> float:
    return round(logprob, _DIGITS) + 0.0  # never -0.0


def _perplexity(tokens: Sequence[TokenLogprob]) -> float | None:
    """exp(-mean log-probability); None without tokens, or where it exceeds the largest float."""
    if not tokens:
        return None
    mean = math.fsum(token.logprob for token in tokens) / len(tokens)
    return round(math.exp(-mean), _DIGITS) if mean > _LEAST_MEAN else None


def kept_name(name: str, columns: dict[str, Any]) -> str:
    """The name of a kept column in the output record, whose own fields take precedence."""
    if name in RECORD_KEYS:
        name = f"input_{name}"
        while name in columns:
            name = f"input_{name}"
    return name
