"""Requests before their admission: pulled ahead, refused if they can never run, and queued in order.

``Scheduler`` admits them while there are free slots and, according to ``forecast``, enough KV memory.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from batchgen.core.errors import RowError, RowErrorCode
from batchgen.core.records import Request, Result
from batchgen.engine.sequence import Sequence
from batchgen.engine.sizes import SchedulerConfig

_MAX_FOLLOWERS = 1 << 14
_MAX_AHEAD_BYTES = 1 << 29
_ROW_BYTES, _TOKEN_BYTES = 1000, 40  # of a request and its row in addition to the row's text, and for each prompt token
_FIRST = 1 << 62
_Order = tuple[int, int, int]


class LookAhead:
    """Source of the requests of a run, which pulls only as many as are needed.

    It bounds how many requests wait, for admission (``max_waiting``) or for an identical request's result, and the
    memory of all unfinished requests. Once that memory is exceeded, a request is pulled only if none waits.
    """

    def __init__(
        self,
        requests: Iterable[Request | None],
        max_waiting: int,
        waiting: WaitingQueue,
        num_followers: Callable[[], int],
    ) -> None:
        """``requests`` yields None if its next request needs a result first; it is asked again later."""
        self.is_exhausted = False
        self._source, self._max_waiting = iter(requests), max_waiting
        self._waiting, self._num_followers = waiting, num_followers
        self._bytes_of: dict[int, int] = {}  # by key
        self._num_bytes = 0

    def pull(self) -> Iterator[Request]:
        """Requests while there is room for them; at most ``max_waiting``, so that no step waits for long."""
        for _ in range(self._max_waiting):
            if not self._has_room:
                return
            try:
                request = next(self._source)
            except StopIteration:
                self.is_exhausted = True
                return
            if request is None:
                return
            size = request.num_row_chars + _ROW_BYTES + _TOKEN_BYTES * len(request.prompt_token_ids)
            self._bytes_of[request.key] = size
            self._num_bytes += size
            yield request

    def answered(self, result: Result) -> Result:
        """Note that a request has its result; returns the result."""
        self._num_bytes -= self._bytes_of.pop(result.key, 0)
        return result

    @property
    def _has_room(self) -> bool:
        num_waiting, num_followers = len(self._waiting), self._num_followers()
        if self._num_bytes >= _MAX_AHEAD_BYTES:
            return not num_waiting and not num_followers
        return num_waiting < self._max_waiting and num_followers < _MAX_FOLLOWERS


class WaitingQueue:
    """Queue of requests pulled from the input but not yet admitted, in order of admission.

    Preempted sequences come first, the others by arrival. ``longest_first`` prefers later turns of chats, whose prefix
    is cached, then rows that may get the most tokens in all turns, so that a job does not end with stragglers.
    """

    def __init__(self, longest_first: bool = True) -> None:
        self._longest_first = longest_first
        self._preempted: deque[Sequence] = deque()
        self._fresh: list[tuple[_Order, Sequence]] = []  # a heap
        self.deferred: list[tuple[_Order, Sequence]] = []
        self._arrivals = 0
        self._families: dict[bytes, tuple[int, int]] = {}  # by first block: the first arrival, and how many wait

    def __len__(self) -> int:
        return len(self._preempted) + len(self._fresh)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._preempted
        yield from (sequence for _, sequence in self._fresh)

    def push(self, sequence: Sequence) -> None:
        """Add a fresh sequence; its ``block_hashes`` identify sequences with the same prefix."""
        self._arrivals += 1
        name = _family(sequence)
        family, members = self._families.get(name, (self._arrivals, 0))
        if name:
            self._families[name] = (family, members + 1)
        order: _Order = (0, 0, self._arrivals)
        if self._longest_first:
            request = sequence.request
            num_tokens = max(sequence.max_new_tokens, 0) * (request.num_turns - request.turn)
            order = (-_FIRST if request.turn else -num_tokens, family, self._arrivals)
        heapq.heappush(self._fresh, (order, sequence))

    def push_preempted(self, sequence: Sequence) -> None:
        """Add a sequence that lost its state; the one admitted earliest comes back first."""
        self._preempted.appendleft(sequence)

    def drop_preempted(self, sequence: Sequence) -> None:
        """Remove a preempted sequence that turned out to have ended."""
        self._preempted.remove(sequence)

    def peek(self) -> Sequence:
        return self._preempted[0] if self._preempted else self._fresh[0][1]

    def pop(self) -> Sequence:
        if self._preempted:
            return self._preempted.popleft()
        _, sequence = heapq.heappop(self._fresh)
        self._leave_family(sequence)
        return sequence

    def defer(self) -> None:
        """Set the next, fresh sequence aside until ``restore``; it does not count as waiting."""
        self.deferred.append(heapq.heappop(self._fresh))

    def restore(self) -> None:
        """Return deferred sequences to their places."""
        for entry in self.deferred:
            heapq.heappush(self._fresh, entry)
        self.deferred.clear()

    def _leave_family(self, sequence: Sequence) -> None:
        if name := _family(sequence):
            family, members = self._families.pop(name)
            if members > 1:
                self._families[name] = (family, members - 1)


def _family(sequence: Sequence) -> bytes:
    return sequence.block_hashes[0] if sequence.block_hashes else b""


def too_long(sequence: Sequence, config: SchedulerConfig) -> RowError | None:
    """Error of a sequence that does not fit into the model's context or the pool, or None."""
    limit = config.max_model_len
    if not sequence.num_prompt_tokens:
        return RowError(RowErrorCode.EMPTY_PROMPT, "the prompt has no tokens")
    length = sequence.num_prompt_tokens if sequence.generates else sequence.num_tokens
    if length > limit - sequence.generates:
        what = "the prompt has" if sequence.generates else "prompt and label have"
        message = f"{what} {length} tokens; with max_model_len {limit} at most {limit - sequence.generates} fit"
        return RowError(RowErrorCode.TOO_LONG, message)
    needed = max_state_tokens(sequence, limit)
    if needed > config.max_num_tokens:
        message = (
            f"prompt and max_tokens need KV memory for {needed} tokens; "
            f"the pool holds {config.max_num_tokens}: raise kv_cache_memory or lower max_tokens"
        )
        return RowError(RowErrorCode.TOO_LONG, message)
    return None


def max_state_tokens(sequence: Sequence, max_model_len: int) -> int:
    """Most tokens whose state the sequence will ever hold: a generated last token is never computed."""
    if not sequence.generates:
        return sequence.num_tokens
    wanted = sequence.num_prompt_tokens + sequence.request.params.max_tokens
    return (wanted if wanted < max_model_len else max_model_len) - 1
