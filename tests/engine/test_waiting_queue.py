"""The order in which waiting sequences are admitted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine.group import Group
from batchgen.engine.sequence import Sequence
from batchgen.engine.waiting import WaitingQueue
from batchgen.records import Request, SamplingParams


def sequence(key: int, max_tokens: int = 10, output: int = 0) -> Sequence:
    return Group(Request(key, (1, 2), SamplingParams(max_tokens=max_tokens), tuple(range(output)))).sequences[0]


def drained(queue: WaitingQueue) -> list[int]:
    keys = []
    while queue:
        head = queue.peek()
        assert queue.pop() is head
        keys.append(head.request.key)
    return keys


def test_the_longest_expected_comes_first_and_equals_in_order_of_arrival() -> None:
    queue = WaitingQueue()
    for key, max_tokens in enumerate([5, 9, 5, 9, 1]):
        queue.push(sequence(key, max_tokens))
    assert drained(queue) == [1, 3, 0, 2, 4]


def test_what_a_resumed_sequence_already_has_does_not_count_as_expected() -> None:
    queue = WaitingQueue()
    queue.push(sequence(0, max_tokens=20, output=15))
    queue.push(sequence(1, max_tokens=10))
    assert drained(queue) == [1, 0]


def test_preempted_sequences_come_before_fresh_ones_the_first_admitted_first() -> None:
    queue = WaitingQueue()
    queue.push(sequence(0, max_tokens=100))
    for key in (3, 2, 1):  # preemption takes the last admitted first
        queue.push_preempted(sequence(key))
    assert [s.request.key for s in queue] == [1, 2, 3, 0]
    assert drained(queue) == [1, 2, 3, 0]


@given(st.lists(st.integers(1, 4), max_size=30))
def test_no_sequence_is_lost(lengths: list[int]) -> None:
    queue = WaitingQueue()
    for key, length in enumerate(lengths):
        queue.push(sequence(key, length))
    assert len(queue) == len(lengths)
    assert sorted(s.request.key for s in queue) == list(range(len(lengths)))
    assert drained(queue) == sorted(range(len(lengths)), key=lambda key: (-lengths[key], key))
