"""Digests of whole records: with a change of any byte of one ``RESULTS`` goes up, or rows of both would be mixed.

Tokens are those of the sample model in float32, which are the same on every set of kernels; numbers that differ in
their last bits between them are given here. Not held: what other packages make of ids and grammars.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from chat_templates import SILENT, THINKING, TOOLS
from input_helpers import write_tokenizer
from run_helpers import MODEL, quiet, read_lines, text_model, write_lines
from tokenizers import AddedToken

from batchgen.config.job import JobSpec
from batchgen.config.load import load_job
from batchgen.core.json_line import encode_json
from batchgen.core.logprobs import Logprobs, TokenLogprob
from batchgen.core.records import Cursor, FinishReason, Result, Row, Sample, SamplingParams
from batchgen.core.version import RESULTS
from batchgen.output.record_builder import RecordBuilder
from batchgen.run.job import run_job
from batchgen.run.loader import read_model

# Of RESULTS and of the records of each kind. Where one differs and that is meant, raise RESULTS and write both anew.
GOLDEN = {
    "RESULTS": 6,
    "tokens": "a3c4fbdc6100cd65",
    "texts": "c9b1003a222983a9",
    "reasoning": "185eaae223a160f6",
    "tools": "474190e0726458e7",
    "vectors": "d314ee6ea6d37aa2",
}
QUESTIONS = MODEL.parent / "questions.jsonl"
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 2.0, "seed": 5},
    {"temperature": 1.5, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "n": 3},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.5, "ignore_eos": True},
    {"min_tokens": 6, "logit_bias": {"20": 3, "30": 2}},
    {"stop": ["e", "7"], "max_tokens": 9},
    {"bad_words": ["S", "1"], "temperature": 1.0},
    {"allowed_token_ids": [2, 7, *range(20, 60)], "max_tokens": 8},
    {"ignore_eos": True, "max_repeats": 3, "max_tokens": 60},
)
PROMPT = (1, 6, 20, 21, 22)
ROW = Row(
    3, "in.jsonl", 4, {"id": "r", "note": "naïve", "text": "kept"}, Cursor(0, 9, 0, 4), "r", prompt_token_ids=PROMPT
)


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    """A record without the times, and without the fingerprint, which only finds it again."""
    return {name: value for name, value in record.items() if name not in ("timings", "fingerprint")}


def ids_of(builder: Any, text: str) -> tuple[int, ...]:
    [found] = builder.encode_batch([text], add_special_tokens=False)
    assert not isinstance(found, Exception)
    return tuple(found)


def scored(ids: tuple[int, ...], num_top: int) -> Logprobs:
    """Log-probabilities of exact halves."""
    top = tuple((40 + rank, -0.5 - rank) for rank in range(num_top))
    return Logprobs.of(TokenLogprob(token, -0.25 - position / 2, top) for position, token in enumerate(ids))


class Records:
    """Makes the records of results with a model's tokenizer."""

    def __init__(self, tokenizer: Path, folder: Path, **sections: Any) -> None:
        flags = {"model": {"path": str(text_model()), "tokenizer": str(tokenizer)}, **sections}
        flags["input"] = {"path": str(QUESTIONS), "prompt": "{question}", "id": "id", "columns": "*"}
        flags["output"] = {"path": str(folder / "out"), **sections.get("output", {})}
        self.spec: JobSpec = load_job(None, flags)
        model = read_model(self.spec, datetime(2026, 5, 1, tzinfo=UTC))
        self.builder: RecordBuilder = model.record_builder(self.spec)
        self.tokenizer: Any = model.tokenizer

    def of(self, text: str, params: SamplingParams | None = None, row: Row = ROW, **fields: Any) -> dict[str, Any]:
        """The record of an answer."""
        sample, more = Sample(ids_of(self.tokenizer, text), FinishReason.STOP), fields.pop("more_samples", ())
        names = fields.keys() & {item.name for item in dataclasses.fields(Sample)}
        sample = replace(sample, **{name: fields.pop(name) for name in names})
        return self.made(Result(3, len(PROMPT), (sample, *more), **fields), params or SamplingParams(), row)

    def made(self, result: Result, params: SamplingParams, row: Row = ROW) -> dict[str, Any]:
        return self.builder.result(replace(row, params=params), result)


def tokens(folder: Path) -> Iterator[dict[str, Any]]:
    """What the sample model answers to questions, with sampling values of every kind."""
    questions = read_lines(QUESTIONS)[:30]
    rows = [row | {"sampling": SAMPLINGS[i % len(SAMPLINGS)]} for i, row in enumerate(questions)]
    path = write_lines(folder / "rows.jsonl", rows)
    flags: dict[str, dict[str, Any]] = {
        "model": {"path": str(MODEL), "dtype": "float32"},
        "input": {"path": str(path), "prompt": "{question}", "id": "id", "columns": ["task"]},
        "sampling": {"max_tokens": 24},
        "output": {"path": str(folder / "out"), "token_ids": True},
    }
    assert run_job(load_job(None, flags), quiet()).exit_code == 0
    yield from read_lines(folder / "out" / "outputs.jsonl")


def texts(folder: Path) -> Iterator[dict[str, Any]]:
    """Texts with what stands beside them: stop strings, samples, values of JSON, answers, log-probabilities."""
    plain = Records(MODEL, folder)
    yield plain.of("A naïve\n answer ")
    yield plain.of("so. Then", stop=".")
    yield plain.of("cut", finish_reason=FinishReason.LENGTH)
    other = Sample(ids_of(plain.tokenizer, "other"), FinishReason.LENGTH)
    yield plain.of("one", SamplingParams(n=2), more_samples=(other,))
    full = Records(MODEL, folder, output={"parse": ["json"], "token_ids": True}, eval={"extract": "last_number"})
    yield full.of('{"a": [1.50, "é"]} ', SamplingParams(structured_outputs='{"json_object":true}'), is_complete=True)
    yield full.of('{"a": ', SamplingParams(structured_outputs='{"json_object":true}'), is_complete=False)
    yield full.of("it is $1,234.50 or 7")
    ids = ids_of(plain.tokenizer, "sure é")
    yield plain.of("sure é", SamplingParams(logprobs=2), logprobs=scored(ids, 2))
    yield plain.of("x", SamplingParams(prompt_logprobs=1), prompt_logprobs=scored(PROMPT[1:], 1))
    labels = SamplingParams(labels=("yes", "no", "it is not"))
    sums, means = (-1.25, -2.5, -3.75), (-1.25, -1.25, -1.25)
    yield plain.of("yes", labels, label_logprobs=sums, label_means=means)
    yield plain.of("no", replace(labels, by="mean"), label_logprobs=sums, label_means=(-2.0, -0.5, -1.25))


def reasoning(folder: Path) -> Iterator[dict[str, Any]]:
    """Thoughts apart from the answer, whole and cut off."""
    thinking = Records(
        write_tokenizer(folder / "thinking", chat_template=THINKING), folder, output={"parse": ["reasoning"]}
    )
    yield thinking.of("<think>\nIt is a square, é.\n</think>\n\n9")
    yield thinking.of("<think>\nIt is a", finish_reason=FinishReason.LENGTH)
    yield thinking.of("9")


def tools(folder: Path) -> Iterator[dict[str, Any]]:
    """Calls of tools, whole and broken."""
    start, end = "<|tool_call_start|>", "<|tool_call_end|>"
    tokenizer = write_tokenizer(folder / "tools", chat_template=SILENT)
    backend = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    backend.add_tokens([AddedToken(start, special=True), AddedToken(end, special=True)])
    backend.save(str(tokenizer / "tokenizer.json"))
    records = Records(tokenizer, folder, output={"parse": ["tool_calls"]})
    row = replace(ROW, columns={**ROW.columns, "tools": TOOLS})
    yield records.of(f'So: {start}[weather(city="Zürich", days=[1, null])]{end}', row=row)
    yield records.of(f"{start}[weather(city=", row=row)
    yield records.of("No call.", row=row)


def vectors(folder: Path) -> Iterator[dict[str, Any]]:
    """A vector, those of all tokens, and those of two texts."""
    numbers = array("f", [0.1, -1 / 3, 1e-8, 123456.789]).tobytes()
    result = Result(3, 2, vector=numbers)
    several = replace(result, num_vectors=2)
    yield Records(MODEL, folder, embed={"pooling": "mean"}).made(result, SamplingParams())
    yield Records(MODEL, folder, embed={"pooling": "tokens"}).made(several, SamplingParams())
    yield Records(MODEL, folder, embed={"pooling": "mean"}).made(several, SamplingParams())
    labelled = RecordBuilder(Records(MODEL, folder, embed={"pooling": "cls"}).spec, None, labels=("a", "b", "c", "d"))
    yield labelled.result(replace(ROW, prompt_token_ids=()), result)


@pytest.mark.parametrize("kind", [tokens, texts, reasoning, tools, vectors], ids=lambda kind: kind.__name__)
def test_records_are_those_of_their_version(kind: Any, tmp_path: Path) -> None:
    found = b"".join(encode_json(timeless(record)) + b"\n" for record in kind(tmp_path))
    digest = blake2b(found, digest_size=8).hexdigest()
    expected = {"RESULTS": RESULTS, kind.__name__: digest}
    assert {name: GOLDEN.get(name) for name in expected} == expected, found.decode()
