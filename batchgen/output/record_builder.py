"""Output records and error records of finished rows, in the shape that users' scripts read.

Pure functions from a row and its result to plain data, without any file.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields
from functools import lru_cache
from typing import Any

from batchgen.config.identity import fingerprint, limit_of, rng_key_of
from batchgen.config.job import JobSpec
from batchgen.config.record_fields import VECTOR_KEYS, kept_columns, url_of
from batchgen.core import structured
from batchgen.core.answers import find_answer
from batchgen.core.chat_rows import ASSISTANT, ChatRow
from batchgen.core.keys import INT32_MAX
from batchgen.core.logprobs import Logprobs, is_packed, packed, unpacked
from batchgen.core.records import Result, Row, Sample, SamplingParams, Timings
from batchgen.output.scores import packed_fields, perplexity, scored_fields, token_fields, vector_fields
from batchgen.text.answer import AnswerReader
from batchgen.text.call_notation import Offered
from batchgen.text.grammar_source import library
from batchgen.text.tokenizer import Tokenizer
from batchgen.text.tool_calls import offered_tools

_TIMINGS = tuple(item.name for item in fields(Timings))
# Before usage and timings.
_OF_SAMPLE = ("text", "reasoning", "tool_calls", "parsed", "extracted", "finish_reason", "complete")
_VECTOR = ("label", "score", "scores", "embedding", "embeddings")  # in the order of ``vector_fields``
_OF_CHAT = ("messages", "text", "finish_reason", "finish_reasons", "usage")
_OF_TOKENS = ("token_ids", "logprobs", "top_ids", "top_logprobs")  # of a sample, after timings
_OF_PROMPT = ("prompt_logprobs", "prompt_top_ids", "prompt_top_logprobs", "perplexity")
_NULLABLE = ("reasoning", "parsed")  # null is a value of these
_DIGITS = 6  # of times
_REUSED = {**asdict(Timings()), "reused": True}  # the timings of a row that was not computed
Fields = Mapping[str, Any]


class RecordBuilder:
    """Makes the records of one job. For a model without a ``tokenizer``, ids replace the text.

    ``labels`` are a classifier's; ``max_model_len`` limits prompt and answer together, and ``end_ids`` end answers.
    """

    def __init__(
        self,
        spec: JobSpec,
        tokenizer: Tokenizer | None,
        labels: Sequence[str] = (),
        max_model_len: int = INT32_MAX,
        end_ids: Collection[int] = (),
    ) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._answers = AnswerReader(tokenizer, spec.output.parse) if tokenizer else None
        self._labels = labels
        self._end_ids = sorted(end_ids)
        self.max_model_len = max_model_len

    def result(self, row: Row, result: Result) -> dict[str, Any]:
        """The output record of a row; a row without an id has its index as the id.

        ``docs/records.md`` describes the fields, whose order is fixed; fields that were not asked for are left out.
        Fields of a sample are the first sample's, and ``samples`` holds all if there are several.
        ``JobSpec.packs_logprobs`` makes log-probabilities packed arrays, with the ids of their tokens.
        ``vector_fields`` ([embed]) or ``scored_fields`` ([classify]) replace the text and the fields made from it. A
        chat that was generated again has ``messages`` and ``finish_reasons``; its text is the last answer. A kept
        column named like a field is ``input_<name>``.
        """
        params, fingerprint = row.params, self.fingerprint(row)
        if result.vector or params.labels:
            vector = (
                scored_fields(result.label_scores(params), params.labels)
                if params.labels
                else vector_fields(result, self._spec.embed.pooling, self._labels)
            )
            fields = _head(row, fingerprint) | vector
            return self._of_vector(row, fields, result.num_prompt_tokens, _timings(result.timings))
        if isinstance(row, ChatRow):
            return self._of_chat(row, result, fingerprint)
        offered = self._offered(row)
        samples = [self._sample(sample, row, offered) for sample in result.samples]
        usage = {
            "prompt_tokens": result.num_prompt_tokens,
            "completion_tokens": result.num_generated_tokens,
            **self._thought(row, result),
        }
        prompt: dict[str, Any] = {}
        if result.prompt_logprobs is not None:
            prompt = self._prompt_of(row) | self._logprobs(result.prompt_logprobs, "prompt_")
            prompt["perplexity"] = perplexity(result.prompt_logprobs)
        return _of_text(_head(row, fingerprint), samples, usage, _timings(result.timings)) | prompt | self._kept(row)

    def _logprobs(self, tokens: Logprobs, prefix: str = "") -> dict[str, Any]:
        if self._spec.packs_logprobs:
            return packed_fields(tokens, prefix)
        return {f"{prefix}logprobs": token_fields(tokens, self._tokenizer)}

    def _prompt_of(self, row: Row) -> dict[str, Any]:
        """Fields of a prompt with packed log-probabilities: its tokens and, if known, a mask of the assistant's."""
        if not self._spec.packs_logprobs:
            return {}
        count = len(row.prompt_token_ids)
        fields = {"prompt_token_ids": packed("int32", array("i", row.prompt_token_ids).tobytes(), count)}
        if row.answers is not None:
            mask = bytearray(count)
            for start, end in row.answers:
                mask[start:end] = b"\1" * (end - start)
            fields["assistant_mask"] = packed("bool", bytes(mask), count)
        return fields

    def fingerprint(self, row: Row) -> str:
        limit, tokens = limit_of(row.params, len(row.prompt_token_ids), self.max_model_len), row.prompt_token_ids
        facts = self._facts_of(row)
        if isinstance(row, ChatRow):  # its prompts hold its answers
            facts, tokens = f"{facts} {row.digest} {row.params.max_tokens} {self.max_model_len}", ()
        return fingerprint(rng_key_of(row.id, row.index), row.params, tokens, limit, facts)

    def _facts_of(self, row: Row) -> str:
        """Facts that decide the result of a row in addition to its prompt, sampling values and the model's files."""
        params, names = row.params, set[str]()
        if self._tokenizer is None or not self._spec.generates or params.labels:
            return ""
        if params.thinking_token_budget is not None or "reasoning" in self._spec.output.parse:
            names = {"closing", "thinks"}
        offered = self._offered(row)  # calls are parsed by the names and types of its tools
        if offered is not None:
            names = {"closing", "thinks", "tools"}
        version = str(library().__version__) if params.structured_outputs else ""
        facts = self._tokenizer.answer_facts.used(names) if names else ""
        return f"{version} {self._end_ids} {facts} {offered and sorted(offered.items())}"

    def reused(self, row: Row, fingerprint: str, earlier: Mapping[str, Any]) -> dict[str, Any] | None:
        """The output record of a row, as ``result`` makes it, from an ``earlier`` record with that ``fingerprint``.

        None if ``earlier`` lacks fields that this job asks for. Columns are taken from ``row``. Raises KeyError or
        TypeError if ``earlier`` was not written by a run.
        """
        params = row.params
        if isinstance(row, ChatRow):
            taken = {name: earlier[name] for name in _OF_CHAT}
            taken |= self._answer(taken) | {"timings": _REUSED}
            return {**_head(row, fingerprint), **taken, **self._kept(row)}
        if not self._spec.generates:
            vector = {name: earlier[name] for name in _VECTOR if name in earlier}
            tokens = earlier["usage"]["prompt_tokens"]
            return self._of_vector(row, _head(row, fingerprint) | vector, tokens, _REUSED) if vector else None
        has_tools = self._finds_calls(row)
        taken_samples = [self._taken(sample, params, has_tools) for sample in earlier.get("samples") or [earlier]]
        samples = [sample for sample in taken_samples if sample is not None]
        prompt = self._taken_of_prompt(earlier, row)
        if len(samples) < len(taken_samples) or prompt is None:
            return None
        counts = ["prompt_tokens", "completion_tokens"]
        counts += [] if params.thinking_token_budget is None else ["reasoning_tokens"]
        usage = {name: earlier["usage"][name] for name in counts}
        return _of_text(_head(row, fingerprint), samples, usage, _REUSED) | prompt | self._kept(row)

    def _taken_of_prompt(self, earlier: Mapping[str, Any], row: Row) -> dict[str, Any] | None:
        """The prompt's log-probabilities if the row asks for them; None if ``earlier`` lacks them in the job's form."""
        if row.params.prompt_logprobs is None:
            return {}
        logprobs = earlier.get("prompt_logprobs")
        if logprobs is None or is_packed(logprobs) != self._spec.packs_logprobs:
            return None
        return self._prompt_of(row) | {name: earlier[name] for name in _OF_PROMPT if name in earlier}

    def _of_chat(self, row: ChatRow, result: Result, fingerprint: str) -> dict[str, Any]:
        """The record of a row whose chat was generated again: its messages, and why each turn ended."""
        said = [turn.message | ({"reasoning_content": turn.reasoning} if turn.reasoning else {}) for turn in row.turns]
        messages = row.messages_before(said)
        while messages[-1]["role"] != ASSISTANT:  # messages of turns that were not reached
            messages.pop()
        last = {"text": row.turns[-1].text}
        usage = {"prompt_tokens": result.num_prompt_tokens, "completion_tokens": result.num_generated_tokens}
        if row.params.thinking_token_budget is not None:
            usage["reasoning_tokens"] = sum(turn.num_thoughts for turn in row.turns)
        return {
            **_head(row, fingerprint),
            "messages": [*self._spec.input.system_before(messages), *messages],
            **last,
            **self._answer(last),
            "finish_reason": str(row.turns[-1].finish_reason),
            "finish_reasons": [str(turn.finish_reason) for turn in row.turns],
            "usage": usage,
            "timings": _timings(result.timings),
            **self._kept(row),
        }

    def _thought(self, row: Row, result: Result) -> dict[str, int]:
        """The number of thinking tokens in all samples, if the row has a thinking budget."""
        budget = row.params.thinking_token_budget
        if budget is None or self._answers is None:
            return {}
        counts = (self._answers.num_thoughts(sample, row.prompt_token_ids, budget) for sample in result.samples)
        return {"reasoning_tokens": sum(counts)}

    def _finds_calls(self, row: Row) -> bool:
        return self._answers is not None and self._answers.finds_calls and self._spec.parses_tools(row.columns)

    def _offered(self, row: Row) -> Offered | None:
        """The tools that a row offers; None if calls are not looked for in its answer."""
        if not self._finds_calls(row):
            return None
        request = row.columns["body"] if self._spec.input.is_batch_line(row.columns) else row.columns
        return offered_tools(request.get("tools"))

    def _taken(self, sample: Mapping[str, Any], params: SamplingParams, has_tools: bool) -> dict[str, Any] | None:
        """The fields of a sample that this job asks for; None if one is missing."""
        output, has_text = self._spec.output, self._tokenizer is not None
        packs = self._spec.packs_logprobs and params.logprobs is not None
        wanted = {
            "text": has_text,
            "reasoning": has_text and "reasoning" in output.parse,
            "tool_calls": has_tools,
            "parsed": has_text and "json" in output.parse,
            "finish_reason": True,
            "complete": bool(params.structured_outputs) or (has_tools and sample.get("complete") is not None),
            "token_ids": output.token_ids or not has_text or packs,
            "logprobs": params.logprobs is not None,
            "top_ids": packs and bool(params.logprobs),
            "top_logprobs": packs and bool(params.logprobs),
        }
        if params.logprobs is not None and is_packed(sample.get("logprobs")) != packs:
            return None
        names = [name for name, is_wanted in wanted.items() if is_wanted]
        is_whole = all(sample.get(name) is not None or (name in _NULLABLE and name in sample) for name in names)
        if not has_tools and sample.get("tool_calls") is not None:
            return None  # its text lacks them
        taken = {name: sample[name] for name in names if name in sample}
        return taken | self._answer(taken) if is_whole else None

    def _of_vector(self, row: Row, fields: dict[str, Any], num_tokens: int, timings: Fields) -> dict[str, Any]:
        if self._spec.output.format != "parquet":
            fields = unpacked(fields, VECTOR_KEYS)
        usage = {"prompt_tokens": num_tokens, "completion_tokens": 0}
        return {**fields, "usage": usage, "timings": timings, **self._kept(row)}

    def error(self, row: Row) -> dict[str, Any]:
        """The error record of a failed row: enough to find it, to see why it failed, and to run it again.

        Its id is null if the job names an id column and the row's id cannot be read.
        """
        assert row.error is not None, "a row that can run has no error record"
        return {
            "id": row.index if row.id is None and self._spec.input.id is None else row.id,
            "index": row.index,
            "source": row.source,
            "line": row.line,
            "code": str(row.error.code),
            "message": row.error.message,
            "row": row.columns if row.text is None else row.text,
        }

    def _kept(self, row: Row) -> dict[str, Any]:
        spec, columns = self._spec, row.columns
        kept = {field: columns[name] for name, field in kept_columns(spec, columns).items()}
        if spec.output.format == "openai-batch" and spec.input.is_batch_line(columns):
            body = columns["body"]
            kept["url"] = url_of(columns)  # says which kind of answer was asked for
            if encoding := body.get("encoding_format"):
                kept["encoding_format"] = encoding
            if isinstance(model := body.get("model"), str):
                kept.setdefault("model", model)
        return kept

    def _answer(self, sample: Mapping[str, Any]) -> dict[str, str | None]:
        """The answer in the text of a sample, if the job asks for it."""
        if not (rule := self._spec.eval.extract) or "text" not in sample:
            return {}
        return {"extracted": find_answer(rule, sample["text"])}

    def _sample(self, sample: Sample, row: Row, offered: Offered | None) -> dict[str, Any]:
        shaped: dict[str, Any] = {}
        if self._answers is not None:
            after = _marker(row.params.structured_outputs)
            shaped = self._answers.fields(sample, row.prompt_token_ids, offered=offered, after=after)
        is_complete = shaped.pop("complete", sample.is_complete)
        shaped["finish_reason"] = str(sample.finish_reason)
        if is_complete is not None:
            shaped["complete"] = is_complete
        packs = self._spec.packs_logprobs and sample.logprobs is not None
        if self._spec.output.token_ids or self._tokenizer is None or packs:
            shaped["token_ids"] = list(sample.token_ids)
        if sample.logprobs is not None:
            shaped |= self._logprobs(sample.logprobs)
        return shaped | self._answer(shaped)


def _head(row: Row, fingerprint: str) -> dict[str, Any]:
    return {"id": row.index if row.id is None else row.id, "index": row.index, "fingerprint": fingerprint}


def _of_text(head: Fields, samples: Sequence[Fields], usage: Fields, timings: Fields) -> dict[str, Any]:
    """The record of a row with text, up to ``samples``; fields of a sample are the first sample's."""
    first = samples[0]
    payload = {**head, **{name: first[name] for name in _OF_SAMPLE if name in first}, "usage": usage}
    payload |= {"timings": timings} | {name: first[name] for name in _OF_TOKENS if name in first}
    return payload | ({"samples": samples} if len(samples) > 1 else {})


def check_record(record: Mapping[str, Any]) -> None:
    """Raises KeyError, TypeError or ValueError if a record lacks fields that a report counts."""
    usage, timings = record["usage"], record["timings"]
    times = (value for name, value in timings.items() if name != "reused")
    sum([usage["prompt_tokens"], usage["completion_tokens"], *times])
    if "finish_reason" not in record and record.keys() & VECTOR_KEYS:
        return
    if not isinstance(record["finish_reason"], str) or not isinstance(record.get("text") or "", str):
        raise ValueError("its finish_reason or text is not a string")
    if not all(isinstance(sample, dict) for sample in record.get("samples") or ()):
        raise ValueError("its samples are not objects")


@lru_cache(maxsize=64)
def _marker(structured_outputs: str) -> str:
    return str(structured.parsed(structured_outputs).get("after", ""))


def _timings(timings: Timings) -> dict[str, Any]:
    return {name: round(getattr(timings, name), _DIGITS) for name in _TIMINGS}
