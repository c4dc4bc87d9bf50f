"""Identical greedy requests, so that each is computed once: an answer is a function of prompt and parameters alone.

Requests equal to one under way wait for its result; recent results are remembered up to a fixed number of tokens.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b

from batchgen.core.records import Result, SamplingParams, Timings
from batchgen.engine.sequence import RequestState

MAX_REMEMBERED_TOKENS = 4_000_000  # 4 bytes each
_OVERHEAD_TOKENS = 150  # memory of a result without its tokens, in tokens
_SCORE_TOKENS = 8  # memory of the log-probability of a label, in tokens


class Duplicates:
    """The requests under way and recent results, by a digest of the request.

    ``num_waiting`` requests wait for the result of another one, ``num_shared`` have got a copy of it.
    """

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_shared = 0
        self._under_way: dict[bytes, RequestState] = {}
        self._finished: OrderedDict[bytes, tuple[Result, array[int]]] = OrderedDict()
        self._num_remembered_tokens = 0

    def answered(self, state: RequestState) -> Result | None:
        """The result of an identical finished request, under this request's key."""
        digest = _digest(state)
        finished = self._finished.get(digest) if digest is not None else None
        if finished is None:
            return None
        self.num_shared += 1
        result, tokens = finished
        sample = replace(result.first, token_ids=tuple(tokens))
        return replace(result, key=state.request.key, samples=(sample,))

    def begin(self, state: RequestState) -> bool:
        """Whether the request must be computed; if not, ``end`` of the identical request under way will answer it."""
        digest = _digest(state)
        leader = self._under_way.setdefault(digest, state) if digest is not None else state
        if leader is state:
            return True
        leader.followers.append((state.request.key, state.submitted_at))
        self.num_waiting += 1
        return False

    def end(self, state: RequestState, result: Result) -> list[Result]:
        """Take the result of a request; returns the results of the identical requests that waited for it."""
        if state.digest is None:
            return []
        del self._under_way[state.digest]
        if len(result.samples) == 1 and not (result.first.logprobs or result.prompt_logprobs):
            self._remember(state.digest, result)
        self.num_waiting -= len(state.followers)
        self.num_shared += len(state.followers)
        return [_copied(result, key, submitted_at) for key, submitted_at in state.followers]

    def _remember(self, digest: bytes, result: Result) -> None:
        timings = Timings(cached_tokens=result.num_prompt_tokens)
        sample = replace(result.first, token_ids=())
        tokens = array("i", result.first.token_ids)
        self._finished[digest] = replace(result, samples=(sample,), timings=timings), tokens
        self._num_remembered_tokens += _size(*self._finished[digest])
        while self._num_remembered_tokens > MAX_REMEMBERED_TOKENS:
            _, oldest = self._finished.popitem(last=False)
            self._num_remembered_tokens -= _size(*oldest)


def _copied(result: Result, key: int, submitted_at: float) -> Result:
    waited = time.monotonic() - submitted_at
    timings = Timings(queue_s=waited, ttft_s=waited, total_s=waited, cached_tokens=result.num_prompt_tokens)
    return replace(result, key=key, timings=timings)


def _size(result: Result, tokens: array[int]) -> int:
    """Approximate memory of a remembered result, in tokens."""
    numbers = len(result.vector) // tokens.itemsize
    return _OVERHEAD_TOKENS + len(tokens) + numbers + _SCORE_TOKENS * len(result.label_logprobs)


def _digest(state: RequestState) -> bytes | None:
    """Digest of all that decides a greedy answer, without an earlier run's tokens; None for sampled requests."""
    request = state.request
    if state.digest is None and request.params.is_greedy:
        tokens = array("i", request.prompt_token_ids).tobytes()
        labels = repr(
            (request.labels, request.bad_words, request.pooling, request.text_lengths, request.num_unseen)
        ).encode()
        state.digest = blake2b(_name(request.params) + labels + b"\0" + tokens, digest_size=16).digest()
    return state.digest


@lru_cache(maxsize=256)
def _name(params: SamplingParams) -> bytes:
    return repr(replace(params, seed=0)).encode()
