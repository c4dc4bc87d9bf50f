"""Admission: the order of waiting sequences, and whether their prompts foretell their answers."""

from __future__ import annotations

import math
import statistics

from hypothesis import given
from hypothesis import strategies as st

from batchgen.core.records import Request, SamplingParams
from batchgen.engine.admission import PromptTrend, WaitingQueue
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


def prompted(key: int, prompt: int, family: str = "", max_tokens: int = 10) -> Sequence:
    """A sequence with a prompt of so many tokens, whose first block has the content ``family``."""
    made = RequestState(Request(key, (1,) * prompt, SamplingParams(max_tokens=max_tokens))).sequences[0]
    made.block_hashes = [family.encode()] if family else []
    return made


def test_among_equally_long_ones_the_longest_prompts_come_first_while_that_is_wanted() -> None:
    queue = WaitingQueue()
    for key, (prompt, max_tokens) in enumerate([(5, 10), (9, 10), (5, 10), (2, 20)]):
        queue.push(prompted(key, prompt, max_tokens=max_tokens))
    queue.put_longest_prompts_first(True)
    queue.push(prompted(4, 7))
    assert [queue.pop().request.key for _ in range(3)] == [3, 1, 4]
    queue.push(prompted(5, 8))
    queue.put_longest_prompts_first(False)
    assert drained(queue) == [0, 2, 5]


def test_longest_prompts_first_keeps_those_that_share_a_prefix_together() -> None:
    queue = WaitingQueue()
    queue.put_longest_prompts_first(True)
    for key, (prompt, family) in enumerate([(6, "a"), (7, "b"), (9, "a"), (4, "b"), (8, ""), (5, "a")]):
        queue.push(prompted(key, prompt, family))
    assert drained(queue) == [4, 1, 3, 2, 0, 5]


def test_without_longest_first_prompts_do_not_count_either() -> None:
    queue = WaitingQueue(longest_first=False)
    queue.put_longest_prompts_first(True)
    for key, prompt in enumerate([5, 9, 7]):
        queue.push(prompted(key, prompt))
    assert drained(queue) == [0, 1, 2]


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


def trend_of(ended: list[tuple[int, int]]) -> PromptTrend:
    trend = PromptTrend()
    for prompt, length in ended:
        trend.add(prompt, length)
    return trend


def test_a_trend_is_seen_once_enough_have_ended() -> None:
    ended = [(n, 3 * n) for n in range(32)]
    assert not trend_of(ended[:31]).is_rising
    assert trend_of(ended).is_rising


def test_a_trend_is_judged_anew_each_time_the_ended_have_doubled() -> None:
    ended = [(n, n) for n in range(32)] + [(n, 500 - n) for n in range(32)]
    assert trend_of(ended[:63]).is_rising
    assert not trend_of(ended).is_rising


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=32, max_size=32))
def test_a_trend_is_a_correlation_above_two_standard_errors(ended: list[tuple[int, int]]) -> None:
    prompts, lengths = zip(*ended, strict=True)
    varies = len(set(prompts)) > 1 and len(set(lengths)) > 1
    correlation = statistics.correlation(prompts, lengths) if varies else 0.0
    if abs(correlation - 2 / math.sqrt(32)) > 1e-9:
        assert trend_of(ended).is_rising == (correlation > 2 / math.sqrt(32))
