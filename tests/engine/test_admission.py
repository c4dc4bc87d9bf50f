"""Admission: the order of waiting sequences."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchgen.core.records import Request, SamplingParams
from batchgen.engine.admission import WaitingQueue
from batchgen.engine.sequence import RequestState, Sequence


def sequence(key: int, max_tokens: int = 10, output: int = 0) -> Sequence:
    return RequestState(Request(key, (1, 2), SamplingParams(max_tokens=max_tokens), tuple(range(output)))).sequences[0]


def drained(queue: WaitingQueue) -> list[int]:
    keys = []
    while queue:
        head = queue.peek()
        assert queue.pop() is head
        keys.append(head.request.key)
    return keys


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


def turn(key: int, number: int, count: int) -> Sequence:
    return RequestState(Request(key, (1, 2), SamplingParams(max_tokens=10), turn=number, num_turns=count)).sequences[0]


def test_later_turns_of_a_row_come_first_and_rows_with_more_turns_before_others() -> None:
    queue = WaitingQueue()
    for made in (sequence(0), turn(1, 0, 2), turn(2, 0, 3), turn(3, 2, 3), turn(4, 1, 4)):
        queue.push(made)
    assert drained(queue) == [3, 4, 2, 1, 0]


@given(st.lists(st.integers(1, 4), max_size=30))
def test_no_sequence_is_lost(lengths: list[int]) -> None:
    queue = WaitingQueue()
    for key, length in enumerate(lengths):
        queue.push(sequence(key, length))
    assert len(queue) == len(lengths)
    assert sorted(s.request.key for s in queue) == list(range(len(lengths)))
    assert drained(queue) == sorted(range(len(lengths)), key=lambda key: (-lengths[key], key))


def member(key: int, family: str, max_tokens: int = 10) -> Sequence:
    """A sequence whose first block has the content ``family``."""
    made = sequence(key, max_tokens)
    made.block_hashes = [family.encode()] if family else []
    return made


def test_those_that_share_a_prefix_come_together_behind_the_first_of_them_among_equally_long_ones() -> None:
    queue = WaitingQueue()
    for key, (family, max_tokens) in enumerate([("a", 5), ("b", 5), ("", 5), ("a", 5), ("b", 9), ("b", 5), ("a", 9)]):
        queue.push(member(key, family, max_tokens))
    assert drained(queue) == [6, 4, 0, 3, 1, 5, 2]


def test_those_set_aside_come_back_to_their_places() -> None:
    queue = WaitingQueue()
    for key, family in enumerate("abab"):
        queue.push(member(key, family))
    for _ in range(3):
        queue.defer()
    assert (len(queue.deferred), len(queue), queue.peek().request.key) == (3, 1, 3)
    queue.restore()
    queue.push(member(4, "a"))
    assert drained(queue) == [0, 2, 4, 1, 3]


def test_a_family_whose_last_member_was_set_aside_is_joined_by_later_ones() -> None:
    queue = WaitingQueue()
    queue.push(member(0, "a"))
    queue.push(member(1, "b"))
    queue.defer()
    queue.restore()
    queue.push(member(2, "a"))
    assert drained(queue) == [0, 2, 1]


def test_without_longest_first_only_the_arrival_counts() -> None:
    queue = WaitingQueue(longest_first=False)
    for key, (family, max_tokens) in enumerate([("a", 5), ("b", 9), ("a", 50), ("", 1)]):
        queue.push(member(key, family, max_tokens))
    queue.defer()
    queue.restore()
    assert drained(queue) == [0, 1, 2, 3]


ACTS = st.sampled_from(["push", "pop", "defer", "restore"])
OPERATIONS = st.lists(st.tuples(ACTS, st.sampled_from("abc-")), max_size=40)


@given(OPERATIONS, st.booleans())
def test_a_family_is_forgotten_with_its_last_member(operations: list[tuple[str, str]], longest_first: bool) -> None:
    """A stream of a million rows must leave nothing behind."""
    queue = WaitingQueue(longest_first)
    for key, (operation, family) in enumerate(operations):
        if operation == "push":
            queue.push(member(key, family.strip("-"), max_tokens=1 + key % 3))
        elif operation == "pop" and queue:
            queue.pop()
        elif operation == "defer" and queue:
            queue.defer()
        elif operation == "restore":
            queue.restore()
            assert queue._families.keys() == {s.block_hashes[0] for s in queue if s.block_hashes}
    queue.restore()
    drained(queue)
    assert not queue._families
