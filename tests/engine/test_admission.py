"""Admission: the order of waiting sequences."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.core.records import Request, SamplingParams
from batchgen.engine.admission import WaitingQueue
from batchgen.engine.sequence import RequestState, Sequence

# The content of the first block (none if ""), max_tokens, tokens of an earlier run, (turn, turns).
FRESH = st.tuples(
    st.sampled_from(["", "a", "b"]), st.integers(1, 3), st.integers(0, 2), st.sampled_from([(0, 1), (0, 2), (1, 2)])
)
ACTS = st.lists(FRESH | st.sampled_from(["pop", "preempt", "defer", "restore"]), min_size=10, max_size=40)


def sequence(key: int, family: str, max_tokens: int, given: int, turns: tuple[int, int]) -> Sequence:
    request = Request(
        key, (1, 2), SamplingParams(max_tokens=max_tokens), (9,) * given, turn=turns[0], num_turns=turns[1]
    )
    made = RequestState(request).sequences[0]
    made.block_hashes = [family.encode()] if family else []
    return made


@settings(max_examples=100)
@given(ACTS, st.booleans())
def test_sequences_come_in_the_order_of_the_definition_and_a_family_is_forgotten_with_its_last(
    acts: list[tuple[str, int, int, tuple[int, int]] | str], longest_first: bool
) -> None:
    """Preempted ones, the earliest admitted first; then later turns; then the most tokens that may come in all turns.

    Of equals, those that share a first block come after the first of them that waits. A stream of a million rows must
    leave nothing in memory.
    """
    queue = WaitingQueue(longest_first)
    running, preempted, aside = list[Sequence](), list[Sequence](), list[Sequence]()
    waiting: dict[Sequence, tuple[float, int, int]] = {}
    for key, act in enumerate(acts):
        ready = preempted or sorted(waiting.keys() - aside, key=lambda s: waiting[s])
        if not isinstance(act, str):
            made = sequence(key, *act)
            relatives = [order[1] for other, order in waiting.items() if other.block_hashes == made.block_hashes]
            rank = -math.inf if made.request.turn else -max(made.max_new_tokens, 0) * made.request.num_turns
            first = min(relatives, default=key) if act[0] else key
            waiting[made] = (rank, first, key) if longest_first else (0, 0, key)
            queue.push(made)
        elif act == "restore":
            queue.restore()
            aside.clear()
        elif act == "preempt" and running:  # the last admitted
            preempted.insert(0, running.pop())
            queue.push_preempted(preempted[0])
        elif act == "defer" and ready and not preempted:
            queue.defer()
            aside.append(ready[0])
        elif act == "pop" and ready:
            assert queue.peek() is ready[0] is queue.pop()
            running.append(ready[0])
            preempted = preempted[1:]
            waiting.pop(ready[0], None)
        assert len(queue) == len([*queue]) == len(preempted) + len(waiting) - len(aside)
    queue.restore()
    left = [queue.pop() for _ in range(len(queue))]
    assert left == [*preempted, *sorted(waiting, key=lambda s: waiting[s])]
    assert not queue._families
