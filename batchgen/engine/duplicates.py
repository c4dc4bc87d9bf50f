"""Identical greedy requests, so that each is computed once.

A greedy answer is a function of prompt and parameters alone. Requests equal to one under way wait for its result;
results of the recent past are remembered as far as a fixed number of tokens goes, so that memory stays bounded
however large the input is.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b

from batchgen.core.records import Request, Result, SamplingParams, Timings
from batchgen.engine.sequence import Group

MAX_REMEMBERED_TOKENS = 4_000_000  # 4 bytes each
_OVERHEAD_TOKENS = 150  # what a result takes beside its tokens, in tokens
_SCORE_TOKENS = 8  # what the log-probability of a choice takes, in tokens


class Duplicates:
    """Knows the requests under way and recent results, by what was asked.

    ``num_waiting`` requests wait for another's result, ``num_shared`` have been answered with one.
    """

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_shared = 0
        self._under_way: dict[bytes, Group] = {}
        self._finished: OrderedDict[bytes, tuple[Result, array[int]]] = OrderedDict()
        self._num_remembered_tokens = 0

    def answered(self, group: Group) -> Result | None:
        """The result of an identical request that has one, under this one's key."""
        digest = _digest_of(group)
        found = self._finished.get(digest) if digest is not None else None
        if found is None:
            return None
        self.num_shared += 1
        result, tokens = found
        return replace(result, key=group.request.key, token_ids=tuple(tokens))

    def begin(self, group: Group) -> bool:
        """Whether the request is to be computed; if not, ``end`` of an identical one under way will answer it."""
        digest = _digest_of(group)
        leader = self._under_way.setdefault(digest, group) if digest is not None else group
        if leader is group:
            return True
        leader.twins.append(group)
        self.num_waiting += 1
        return False

    def end(self, group: Group, result: Result) -> list[Result]:
        """A request has its result; those of the identical ones that waited for it."""
        if group.digest is None:
            return []
        del self._under_way[group.digest]
        if not (result.error or result.logprobs or result.prompt_logprobs or result.more_samples):
            self._remember(group.digest, result)
        self.num_waiting -= len(group.twins)
        self.num_shared += len(group.twins)
        return [twin.result_for_twin(result) for twin in group.twins]

    def _remember(self, digest: bytes, result: Result) -> None:
        timings = Timings(cached_tokens=result.num_prompt_tokens)
        self._finished[digest] = replace(result, token_ids=(), timings=timings), array("i", result.token_ids)
        self._num_remembered_tokens += _size(*self._finished[digest])
        while self._num_remembered_tokens > MAX_REMEMBERED_TOKENS:
            _, oldest = self._finished.popitem(last=False)
            self._num_remembered_tokens -= _size(*oldest)


def _size(result: Result, tokens: array[int]) -> int:
    """About the memory that a remembered result takes, in tokens."""
    return _OVERHEAD_TOKENS + len(tokens) + _SCORE_TOKENS * len(result.choice_logprobs)


def _digest_of(group: Group) -> bytes | None:
    """The group's digest, made when first asked for; None where chance has a part in the answer."""
    if group.digest is None and group.request.params.is_greedy:
        group.digest = _digest(group.request)
    return group.digest


def _digest(request: Request) -> bytes:
    """A name for all that decides a greedy answer.

    Tokens that an earlier run generated are no part of it: they are the beginning of that very answer.
    """
    tokens = array("i", request.prompt_token_ids).tobytes()
    choices = repr(request.choices).encode()
    return blake2b(_name(request.params) + choices + b"\0" + tokens, digest_size=16).digest()


@lru_cache(maxsize=256)
def _name(params: SamplingParams) -> bytes:
    return repr(replace(params, seed=0)).encode()
