"""What is drafted: from the row's own tokens, from rows that have ended, and what its constraint and its past allow."""

from __future__ import annotations

from structured import Lists, listed

from batchgen.core.records import Request, SamplingParams
from batchgen.engine.drafts import Drafter
from batchgen.engine.sequence import Group, Sequence


def sequence_of(*prompt: int) -> Sequence:
    return Group(Request(0, prompt, SamplingParams(max_tokens=40))).sequences[0]


def test_a_text_that_repeats_itself_is_drafted_from_its_own_tokens() -> None:
    drafter, sequence = Drafter(), sequence_of(1, 2, 3, 4, 5, 9, 2, 3)
    assert drafter.propose(sequence, 3) == (4, 5, 9)
    sequence.token_ids += [7, 7, 7]
    assert drafter.propose(sequence, 4) == (7, 7, 7)
    sequence.token_ids += [100]
    assert drafter.propose(sequence, 4) == ()


def test_rows_alike_are_drafted_from_those_that_have_ended() -> None:
    drafter, ended = Drafter(), sequence_of(1, 2, 50)
    ended.token_ids += [60, 61, 62, 63, 64, 65]
    drafter.finished(ended)
    other = sequence_of(1, 3, 50)
    other.token_ids += [61, 62]
    assert drafter.propose(other, 3) == (63, 64, 65)


def test_drafts_end_before_a_token_that_the_constraint_forbids() -> None:
    drafter, sequence = Drafter(), sequence_of(1, 2, 3, 4, 5, 9, 2, 3)
    sequence.constraint = Lists().begin(listed([[4, 6], [5, 6], [7, 8], [9]]), ())
    assert sequence.fitting(drafter.propose(sequence, 3)) == (4, 5)
    sequence.constraint = Lists().begin(listed([[4, 6], [5, 6], [9], [2, 3]]), ())
    assert sequence.fitting(drafter.propose(sequence, 3)) == (4, 5, 9)
    sequence.constraint = Lists().begin(listed([[6, 7]]), ())
    assert sequence.fitting(drafter.propose(sequence, 3)) == ()


def test_a_sequence_whose_drafts_are_wrong_pauses() -> None:
    drafter, sequence = Drafter(), sequence_of(4, 5, 6, 4, 5)
    for _ in range(20):
        if not (drafts := drafter.propose(sequence, 2)):
            break
        drafter.book(sequence, len(drafts), 0)
    else:
        raise AssertionError("it never pauses")
    sequence.token_ids += [4, 5] * 20
    assert drafter.propose(sequence, 3) == (4,)


def test_steps_are_drafted_where_their_own_times_say_that_it_pays() -> None:
    sequence = sequence_of(4, 5, 6, 4, 5)

    def decided(plain_s: float, drafted_s: float, hits: float) -> list[bool]:
        drafter = Drafter()
        drafts = {sequence: drafter.propose(sequence, 3)}
        assert not drafter.pays(1, drafts)  # before it is known what a plain step takes
        for _ in range(3):
            drafter.time(1, plain_s)
        for _ in range(3):
            assert drafter.pays(1, drafts)  # before it is known what these take
            drafter.time(4, drafted_s)
        assert sequence.lookup is not None
        sequence.lookup.hits = hits
        return [drafter.pays(1, drafts) for _ in range(200)]

    assert len(Drafter().propose(sequence, 3)) == 3
    for answers, expected in (
        (decided(1.0, 2.0, 0.5), True),
        (decided(1.0, 3.0, 0.5), False),
        (decided(1, 1, 0), False),
    ):
        assert answers.count(expected) == 198 and answers[0] == expected
