"""Workloads of a benchmark: real prompts or made-up ones, from a file, by name or by shape.

``hide_lengths`` hides the lengths of answers from the engine, as a real job does not know them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from batchgen.config.job import InputSpec
from batchgen.core.errors import RowError, RowErrorCode, UsageError
from batchgen.core.keys import INT32_MAX
from batchgen.core.records import Request, Row, SamplingParams
from batchgen.input.rows import prepared

if TYPE_CHECKING:
    from batchgen.text.tokenizer import Tokenizer

_FIRST_TOKEN = 8  # below lie the special tokens


@dataclass(frozen=True, slots=True)
class LengthRange:
    """A length, or a range from which lengths are drawn uniformly, both ends included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, flag: str) -> LengthRange:
        """From ``"128"`` or ``"100:1024"``. Raises UsageError for anything else."""
        low, _, high = text.partition(":")
        try:
            lengths = cls(int(low), int(high or low))
        except ValueError:
            raise UsageError(f"{flag} {text!r}: expected a length such as 128 or a range such as 100:1024") from None
        if not 1 <= lengths.low <= lengths.high:
            raise UsageError(f"{flag} {text!r}: lengths start at 1 and do not fall")
        return lengths


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a made-up workload."""

    num_requests: int
    inputs: LengthRange
    outputs: LengthRange

    def requests(self, vocab_size: int) -> list[Request]:
        """Prompts of random tokens with forced output lengths; the same for the same shape."""
        rng = random.Random(0)
        requests = []
        for key in range(self.num_requests):
            length = rng.randint(self.inputs.low, self.inputs.high)
            prompt = tuple(rng.randrange(_FIRST_TOKEN, vocab_size) for _ in range(length))
            params = SamplingParams(max_tokens=rng.randint(self.outputs.low, self.outputs.high), ignore_eos=True)
            requests.append(Request(key, prompt, params))
        return requests


def nano_vllm(vocab_size: int) -> list[Request]:
    """The workload of nano-vllm's bench.py, draw by draw: 256 requests of 100 to 1,024 tokens in and out.

    142,827 tokens in and 133,966 out. Ids beyond a smaller vocabulary wrap around.
    """
    rng = random.Random(0)
    lengths, prompts = LengthRange(100, 1024), []
    for _ in range(256):
        num_tokens = rng.randint(lengths.low, lengths.high)
        prompts.append(tuple(rng.randint(0, 10_000) % vocab_size for _ in range(num_tokens)))
    limits = [rng.randint(lengths.low, lengths.high) for _ in prompts]
    return [
        Request(key, prompt, SamplingParams(temperature=0.6, max_tokens=max_tokens, ignore_eos=True))
        for key, (prompt, max_tokens) in enumerate(zip(prompts, limits, strict=True))
    ]


NAMED = {"nano-vllm": nano_vllm}


def from_file(
    path: Path, default: SamplingParams, *, limit: int | None = None, tokenizer: Tokenizer | None = None
) -> list[Request]:
    """Requests of a JSONL file as a job reads it, perhaps with ``max_tokens``. Raises UsageError for a bad row."""
    from batchgen.input.requests import RequestBuilder
    from batchgen.input.source import open_source

    spec = InputSpec(path=(str(path),), format="jsonl", limit=limit)
    builder = RequestBuilder(spec, default, tokenizer, max_model_len=INT32_MAX, vocab_size=INT32_MAX)
    requests: list[Request] = []
    for row, request in prepared(map(_limited, open_source(spec).read()), builder.build):
        if row.error is not None:
            raise UsageError(f"{path}, line {row.line}: {row.error.message}")
        requests += [request] if request else []
    if not requests:
        raise UsageError(f"--workload {path}: holds no request")
    return requests


def _limited(row: Row) -> Row:
    """The row with its column ``max_tokens`` moved to its sampling values."""
    max_tokens = row.columns.get("max_tokens")
    return row if max_tokens is None else replace(row, columns={**row.columns, "sampling": {"max_tokens": max_tokens}})


def as_texts(requests: list[Request], pooling: str) -> list[Request]:
    """The same prompts as requests for vectors."""
    return [replace(request, params=SamplingParams(max_tokens=0), pooling=pooling) for request in requests]


def hide_lengths(requests: list[Request]) -> list[Request]:
    """The same requests with the largest ``max_tokens`` for all; ``EndAfter`` ends each at its own length.

    The length is passed as the request's stop string, which the engine does not read, so that neither admission nor the
    memory forecast knows it.
    """
    max_tokens = max(request.params.max_tokens for request in requests)
    hidden = []
    for request in requests:
        length = request.params.max_tokens
        params = replace(request.params, max_tokens=max_tokens, stop=(str(length),)) if length > 0 else request.params
        hidden.append(replace(request, params=params))
    return hidden


class EndAfter:
    """Stop matcher that reads its stop string as a number, and ends the answer after that many tokens."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        (self._stop,) = stop
        self._left = int(self._stop)

    def push(self, token_id: int) -> str | None:
        """Count a token; returns the stop string for the last one."""
        self._left -= 1
        return None if self._left else self._stop


def error_message(error: RowError, requests: list[Request]) -> str:
    """The message of a failed request, with a hint if hidden lengths may have caused it."""
    is_of_length = error.code == RowErrorCode.TOO_LONG and any(request.params.stop for request in requests)
    hint = " (all rows have the largest max_tokens here; --lengths known gives each its own)" if is_of_length else ""
    return error.message + hint
