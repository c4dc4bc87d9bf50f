"""Workloads of a benchmark: requests of known lengths, from a file or made up.

A real job does not know how long its answers will be, so ``hide_lengths`` hides the lengths from the engine.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchgen.core.errors import RowError, RowErrorCode, UsageError
from batchgen.core.records import Request, SamplingParams

_FIRST_TOKEN = 8  # below lie the special tokens


@dataclass(frozen=True, slots=True)
class LengthRange:
    """A length, or a range from which lengths are drawn uniformly, both ends included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, flag: str) -> LengthRange:
        """From ``"128"`` or ``"100:1024"``.

        Raises:
            UsageError: anything else.
        """
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


def from_file(path: Path, *, ignore_eos: bool, limit: int | None = None) -> list[Request]:
    """Requests of a JSONL file: each row has ``prompt_token_ids`` and perhaps ``max_tokens``.

    Raises:
        UsageError: an unreadable file, a line that is no such row, or no row.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"--workload {path}: cannot be read ({error.strerror})") from None
    requests: list[Request] = []
    for number, line in enumerate(lines, 1):
        if len(requests) == limit:
            break
        if not line.strip():
            continue
        try:
            row: dict[str, Any] = json.loads(line)
            prompt = tuple(int(token) for token in row["prompt_token_ids"])
            max_tokens = int(row.get("max_tokens", SamplingParams().max_tokens))
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path}, line {number}: needs prompt_token_ids and max_tokens ({error!r})") from None
        requests.append(Request(number - 1, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)))
    if not requests:
        raise UsageError(f"--workload {path}: holds no request")
    return requests


def hide_lengths(requests: list[Request]) -> list[Request]:
    """The same requests with the largest ``max_tokens`` for all; ``EndAfter`` ends each at its own length.

    That length is the request's stop string, which the engine hands on unread, so that neither admission nor the
    memory forecast knows it.
    """
    most = max(request.params.max_tokens for request in requests)
    hidden = []
    for request in requests:
        length = request.params.max_tokens
        params = replace(request.params, max_tokens=most, stop=(str(length),)) if length > 0 else request.params
        hidden.append(replace(request, params=params))
    return hidden


class EndAfter:
    """Stop watch that ends an answer after as many tokens as its stop string says, for any tokens."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        (self._stop,) = stop
        self._left = int(self._stop)

    def push(self, token_id: int) -> str | None:
        """Count a token; the stop string after the last one."""
        self._left -= 1
        return None if self._left else self._stop


def error_message(error: RowError, requests: list[Request]) -> str:
    """The message of a failed request, with a hint if hidden lengths may have caused it."""
    is_of_length = error.code == RowErrorCode.TOO_LONG and any(request.params.stop for request in requests)
    hint = " (all rows have the largest max_tokens here; --lengths known gives each its own)" if is_of_length else ""
    return error.message + hint
