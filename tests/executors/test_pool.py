"""The pool alone: every row is answered once, whatever becomes of the workers."""

from __future__ import annotations

import pytest

from batchgen.core.records import Request, Result, SamplingParams
from batchgen.executors.messages import HEARTBEAT_S, Answers, Grant
from batchgen.executors.pool import Pool
from batchgen.executors.strikes import Strikes


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def rows(*keys: int) -> list[Request]:
    return [Request(key, (key, key)) for key in keys]


def done(*keys: int) -> Answers:
    return Answers(finished=tuple(Result(key, 2) for key in keys))


def keys_of(grant: Grant) -> list[int]:
    return [task.key for task in grant.tasks]


def test_grants_are_runs_of_the_source_and_bounded_by_the_window() -> None:
    pool = Pool(clock=Clock())
    for name in "ab":
        pool.join(name, 2)
    room = pool.room
    pool.put(rows(*range(room)))
    given = {name: keys_of(grant) for name, grant in pool.grants().items()}
    assert given == {"a": list(range(10)), "b": list(range(10, 20))}
    assert pool.room < room and not pool.grants()
    pool.check()


def test_the_rows_of_a_lost_worker_come_first_with_the_tokens_last_told() -> None:
    pool = Pool(clock=Clock())
    pool.join("a", 4)
    pool.put(rows(*range(100)))
    given = keys_of(pool.grants()["a"])
    for partials in ({0: (7, 8), 1: (9,)}, {0: (7,)}):
        pool.heard("a", Answers(partials=partials))
        assert pool.unfinished() == {0: (7, 8), 1: (9,)}
    assert pool.lose("a") == []
    assert pool.unfinished() == {0: (7, 8), 1: (9,)}
    pool.join("b", 8)
    grant = pool.grants()["b"]
    assert keys_of(grant)[0] == 0 and set(keys_of(grant)) > {given[-1] + 1}
    assert grant.tasks[0].output_token_ids == (7, 8)
    assert pool.num_tokens_taken_over == 3
    pool.check()


def test_the_first_answer_wins_and_the_dead_are_not_heard() -> None:
    pool = Pool(clock=Clock())
    pool.join("a", 2)
    pool.put(rows(0, 1))
    pool.end_of_source()
    pool.grants()
    assert [answer.key for answer in pool.heard("a", done(0))] == [0]
    assert pool.heard("a", done(0)) == []
    pool.heard("a", Answers(partials={0: (1,), 1: ()}))
    assert pool.unfinished() == {}
    pool.check()
    pool.lose("a")
    assert pool.heard("a", done(1)) == [] and not pool.is_done
    pool.join("b", 2)
    assert keys_of(pool.grants()["b"]) == [1]
    assert [answer.key for answer in pool.heard("b", done(1))] == [1]
    assert pool.is_done and pool.idle() == ["b"]
    pool.check()


def turn(pool: Pool, clock: Clock, poison: frozenset[int], *, slots: int = 4) -> list[int]:
    """Workers run what they were given, all at once, and those with a poison row die; the keys of what is answered."""
    clock.now += HEARTBEAT_S
    answered = []
    for name, grant in pool.grants().items():
        assert not grant.recall or not grant.tasks
        in_flight = set(pool.workers[name].tasks)
        if in_flight & poison:
            answered += [task.key for task in pool.lose(name)]
            pool.join(f"{name}'", slots)
        else:
            answered += [answer.key for answer in pool.heard(name, done(*sorted(in_flight)))]
        pool.check()
    return answered


@pytest.mark.parametrize("num_workers", [1, 2, 5])
@pytest.mark.parametrize("poison", [frozenset({0}), frozenset({37}), frozenset({99})])
def test_a_row_that_ends_each_worker_is_convicted_after_four(num_workers: int, poison: frozenset[int]) -> None:
    clock = Clock()
    pool = Pool(clock=clock)
    for number in range(num_workers):
        pool.join(f"w{number}", 4)
    pool.put(rows(*range(100)))
    pool.end_of_source()
    answered: list[int] = []
    while not pool.is_done:
        answered += turn(pool, clock, poison)
    assert sorted(answered) == list(range(100))
    assert sum(worker.state == "lost" for worker in pool.workers.values()) == 4


def test_rows_that_end_their_workers_are_judged_one_after_the_other() -> None:
    pool = Pool(clock=Clock())
    pool.put(rows(0, 1))
    pool.end_of_source()
    alone, convicted = [], []
    for number in range(6):
        name = f"w{number}"
        pool.join(name, 16)
        keys = keys_of(pool.grants()[name])
        is_alone = pool.workers[name].state == "quarantine"
        assert is_alone == (number >= 2) == (len(keys) == 1)
        alone += keys if is_alone else []
        convicted += [task.key for task in pool.lose(name)]
        pool.check()
    assert alone == [0, 0, 1, 1] and convicted == [0, 1]
    assert pool.is_done


def test_where_workers_go_by_chance_more_losses_are_asked_for() -> None:
    strikes = Strikes()
    strikes.add([1, 2], is_alone=False)
    strikes.add([10], is_alone=False)
    strikes.add([1], is_alone=False)
    assert not strikes.is_suspect(1)
    strikes.add([1], is_alone=False)
    assert strikes.is_suspect(1)
    for _ in range(2):
        strikes.add([1], is_alone=True)
        assert not strikes.is_convicted(1)
    strikes.add([1], is_alone=True)
    assert strikes.is_convicted(1)
    assert not strikes.is_suspect(2)
    for other in range(100, 104):
        strikes.add([other], is_alone=False)
    for _ in range(4):
        assert not strikes.is_convicted(1)
        strikes.add([1], is_alone=True)
    assert strikes.is_convicted(1)


def test_a_worker_that_dies_without_a_row_is_no_strike() -> None:
    pool = Pool(clock=Clock())
    for number in range(10):
        pool.join(f"w{number}", 4)
        pool.lose(f"w{number}")
    pool.join("a", 4)
    pool.put(rows(0))
    pool.end_of_source()
    pool.grants()
    pool.lose("a")
    pool.join("b", 4)
    pool.grants()
    assert pool.workers["b"].state == "running"


def test_few_rows_of_a_lost_worker_run_beside_each_other_and_fresh_ones_fill_up() -> None:
    """They alone are suspects if the next worker is lost too, and suspects are slow."""
    pool = Pool(clock=Clock())
    pool.join("a", 100)
    pool.put(rows(*range(pool.room)))
    pool.grants()
    pool.lose("a")
    pool.join("b", 100)
    keys = keys_of(pool.grants()["b"])
    assert keys == [*range(10), *range(900, 1700)]
    pool.check()
    pool.heard("b", done(*range(5)))
    pool.put(rows(*range(10_000, 10_000 + pool.room)))
    pool.heard("b", done(*keys[10:800]))
    assert keys_of(pool.grants()["b"])[:6] == [*range(10, 15), 10_000]


def test_a_leaving_worker_is_told_to_stop_and_its_rows_go_on_from_their_tokens() -> None:
    pool = Pool(clock=Clock())
    pool.join("a", 4)
    pool.put(rows(*range(3)))
    pool.end_of_source()
    pool.grants()
    pool.heard("a", Answers(leaving=True))
    pool.join("b", 4)
    assert pool.grants() == {"a": Grant(stop=True)}, "and is told so once"
    assert not pool.grants()
    first = pool.heard("a", Answers((Result(0, 2),), {1: (5, 6)}, stopped=True))
    assert [answer.key for answer in first] == [0]
    grant = pool.grants()["b"]
    assert [(task.key, task.output_token_ids) for task in grant.tasks] == [(1, (5, 6)), (2, ())]
    assert pool.workers["a"].state == "left" and pool.workers["b"].num_struck == 0
    pool.check()


def test_rows_that_have_not_begun_are_recalled_for_an_idle_worker() -> None:
    clock = Clock()
    pool = Pool(clock=clock)
    pool.join("a", 2)
    pool.put(rows(*range(8)))
    pool.end_of_source()
    assert keys_of(pool.grants()["a"]) == list(range(8))
    pool.join("b", 2)
    clock.now += 1
    assert pool.idle() == []
    assert pool.grants() == {"a": Grant(recall=(7, 6))}, "as many as the other has slots for, the last first"
    assert pool.idle() == []
    assert [answer.key for answer in pool.heard("a", Answers((Result(6, 2),), returned=(7,)))] == [6]
    assert keys_of(pool.grants()["b"]) == [7]
    clock.now += 1
    assert pool.grants() == {"a": Grant(recall=(5,))}, "none that it was asked for before"
    pool.heard("b", done(7))
    pool.heard("a", done(0, 1, 2, 3, 4))
    clock.now += 1
    pool.grants()
    assert pool.idle() == ["b"]
    pool.check()


def test_silence_counts_for_workers_with_rows_and_not_while_the_driver_stands_still() -> None:
    clock = Clock()
    pool = Pool(patience_s=10, clock=clock)
    for name in "ab":
        pool.join(name, 2)
    for _ in range(3):
        clock.now += 4
        assert pool.silent() == []
    pool.put(rows(*range(100)))
    pool.grants()
    clock.now += 4
    pool.heard("b", Answers())
    for _ in range(2):
        assert pool.silent() == []
        clock.now += 4
    assert pool.silent() == ["a"]
    pool.heard("a", Answers())
    clock.now += 100
    assert pool.silent() == []
    for _ in range(3):
        clock.now += 4
        silent = pool.silent()
    assert silent == ["a", "b"]


def test_a_worker_that_was_told_to_stop_and_does_not_is_silent_without_rows_too() -> None:
    clock = Clock()
    pool = Pool(patience_s=10, clock=clock)
    pool.join("a", 2)
    clock.now += 100
    pool.leave("a")
    pool.grants()
    for _ in range(3):
        assert pool.silent() == []
        clock.now += 4
    assert pool.silent() == ["a"]
    assert pool.lose("a") == [] and pool.workers["a"].state == "left"


def test_the_longest_expected_go_first_and_returned_rows_before_their_equals() -> None:
    pool = Pool(clock=Clock(), expected_tokens=lambda task: task.params.max_tokens)
    lengths = [5, 9, 5, 9, 5]
    pool.put(Request(key, (1,), SamplingParams(max_tokens=most)) for key, most in enumerate(lengths))
    pool.join("a", 8)
    assert keys_of(pool.grants()["a"]) == [1, 3, 0, 2, 4]
    pool.leave("a")
    pool.heard("a", Answers(stopped=True))
    pool.put([Request(5, (1,), SamplingParams(max_tokens=9))])
    pool.join("b", 8)
    assert keys_of(pool.grants()["b"]) == [1, 3, 5, 0, 2, 4]
    pool.check()


def test_a_window_grows_with_the_rows_that_finish_in_a_round() -> None:
    clock = Clock()
    pool = Pool(clock=clock)
    for number in range(64):
        pool.join(f"w{number}", 64)
    before = pool.workers["w0"].window
    for _ in range(3):
        pool.put(rows(*range(round(clock.now) * 10_000, round(clock.now) * 10_000 + pool.room)))
        pool.grants()
        clock.now += 1
        pool.heard("w0", done(*list(pool.workers["w0"].tasks)[:60]))
    assert pool.workers["w0"].window == 64 + 2 * 60 > before
    pool.check()


def test_the_first_rows_of_a_source_are_shared_out_evenly() -> None:
    """Else the workers that come last find that the first have begun them all."""
    pool = Pool(clock=Clock())
    for name in "abcd":
        pool.join(name, 100)
    pool.put(rows(*range(100)))
    assert {name: keys_of(grant) for name, grant in pool.grants().items()} == {
        name: list(range(25 * number, 25 * number + 25)) for number, name in enumerate("abcd")
    }
    pool.put(rows(*range(100, 104)))
    assert [len(grant.tasks) for grant in pool.grants().values()] == [1] * 4
    pool.check()
