"""The dispatcher alone: every row is answered once, whatever becomes of the workers."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from batchgen.core.records import Request, Result
from batchgen.workers.dispatcher import RowDispatcher
from batchgen.workers.messages import HEARTBEAT_S, Assignment, WorkerUpdate
from batchgen.workers.worker_state import Liveness


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def rows(*keys: int) -> list[Request]:
    return [Request(key, (key, key)) for key in keys]


def put(dispatcher: RowDispatcher, tasks: Iterable[Request]) -> None:
    for task in tasks:
        dispatcher.put(task)


def begun(names: str, slots: int, num_rows: int, clock: Clock | None = None) -> RowDispatcher:
    """One whose workers have been given the rows of a source that has ended."""
    dispatcher = RowDispatcher(clock=clock or Clock())
    for name in names:
        dispatcher.join(name, slots)
    put(dispatcher, rows(*range(num_rows)))
    dispatcher.end_of_source()
    dispatcher.assignments()
    return dispatcher


def done(*keys: int) -> WorkerUpdate:
    return WorkerUpdate(finished=tuple(Result(key, 2) for key in keys))


def keys_of(assignment: Assignment) -> list[int]:
    return [task.key for task in assignment.tasks]


def test_leases_are_runs_of_the_source_and_few_rows_wait_in_a_worker() -> None:
    dispatcher = RowDispatcher(clock=Clock())
    for name in "ab":
        dispatcher.join(name, 8)
    room = dispatcher.room
    put(dispatcher, rows(*range(room)))
    given = {name: keys_of(assignment) for name, assignment in dispatcher.assignments().items()}
    assert given["a"][:8] == [0, 1, 2, 3, 8, 9, 10, 11] and given["b"][:8] == [4, 5, 6, 7, 12, 13, 14, 15]
    assert all(8 < len(keys) <= 8 + 8 for keys in given.values())
    assert dispatcher.room == sum(map(len, given.values())) and not dispatcher.assignments()
    dispatcher.check()


def test_a_lone_worker_has_many_rows_to_choose_among() -> None:
    alone, one_of_many = begun("a", 64, 2048), begun("abcdefghijklmnop", 64, 2048)
    assert alone.workers["a"].num_waiting >= 4 * 64 > 4 * one_of_many.workers["a"].num_waiting
    alone.check()


def test_more_rows_wait_in_a_worker_that_finishes_more_between_two_messages() -> None:
    dispatcher = begun("abcdefghijklmnop", 64, 2048, clock := Clock())
    before = dispatcher.workers["a"].num_waiting
    clock.now += HEARTBEAT_S
    dispatcher.on_update("a", done(*[*dispatcher.workers["a"].tasks][:60]))
    dispatcher.assignments()
    assert dispatcher.workers["a"].num_waiting >= 120 > before
    dispatcher.check()


def test_the_rows_of_a_lost_worker_come_first_with_the_tokens_last_told() -> None:
    dispatcher = RowDispatcher(clock=Clock())
    dispatcher.join("a", 4)
    put(dispatcher, rows(*range(100)))
    given = keys_of(dispatcher.assignments()["a"])
    for partials in ({0: (7, 8), 1: (9,)}, {0: (7,)}):
        dispatcher.on_update("a", WorkerUpdate(partials=partials))
        assert dispatcher.unfinished() == {0: (7, 8), 1: (9,)}
    assert dispatcher.on_lost("a") == []
    assert dispatcher.unfinished() == {0: (7, 8), 1: (9,)}
    dispatcher.join("b", 8)
    assignment = dispatcher.assignments()["b"]
    assert keys_of(assignment)[0] == 0 and set(keys_of(assignment)) > {given[-1] + 1}
    assert assignment.tasks[0].output_token_ids == (7, 8)
    dispatcher.check()


@pytest.mark.parametrize("num_workers", [1, 2, 5])
@pytest.mark.parametrize("poison", [frozenset({0}), frozenset({37}), frozenset({99}), frozenset({40, 41, 60})])
def test_rows_that_end_workers_are_found_by_halves_and_no_other_is_an_error(
    num_workers: int, poison: frozenset[int]
) -> None:
    clock = Clock()
    dispatcher = RowDispatcher(clock=clock)
    for number in range(num_workers):
        dispatcher.join(f"w{number}", 4)
    put(dispatcher, rows(*range(100)))
    dispatcher.end_of_source()
    answered: list[int] = []
    convicted: list[int] = []
    while not dispatcher.is_done:
        for name in dispatcher.assignments():
            clock.now += HEARTBEAT_S
            in_flight = set(dispatcher.workers[name].tasks)
            if in_flight & poison:
                convicted += [task.key for task in dispatcher.on_lost(name)]
                dispatcher.join(f"{name}'", 4)
            else:
                answered += [answer.key for answer in dispatcher.on_update(name, done(*sorted(in_flight)))]
            dispatcher.check()
    assert sorted(convicted) == sorted(poison) and sorted(answered) == sorted(set(range(100)) - poison)
    assert sum(name.count("'") for name in dispatcher.workers) <= 5 * len(poison), "losses"


def test_a_lease_runs_alone_after_a_second_loss_and_is_split_at_the_next_ones() -> None:
    dispatcher = RowDispatcher(clock=Clock())
    put(dispatcher, rows(*range(4)))
    dispatcher.end_of_source()
    given = []
    for number in range(6):
        name = f"w{number}"
        dispatcher.join(name, 16)
        given.append(keys_of(dispatcher.assignments()[name]))
        assert (dispatcher.workers[name].state == "isolated") == (number >= 2)
        assert dispatcher.on_lost(name) == []
        dispatcher.check()
    assert given[:2] == [[0, 1, 2, 3], [0, 1, 2, 3]], "in company"
    assert given[2:] == [[0, 1], [2], [3], [0]], "in turn"


def test_a_worker_that_dies_without_a_row_is_no_strike() -> None:
    dispatcher = RowDispatcher(clock=Clock())
    for number in range(10):
        dispatcher.join(f"w{number}", 4)
        dispatcher.on_lost(f"w{number}")
    dispatcher.join("a", 4)
    put(dispatcher, rows(0))
    dispatcher.end_of_source()
    dispatcher.assignments()
    dispatcher.on_lost("a")
    dispatcher.join("b", 4)
    dispatcher.assignments()
    assert dispatcher.workers["b"].state == "running"


def test_a_leaving_worker_is_told_to_stop_and_its_rows_go_on_from_their_tokens() -> None:
    dispatcher = begun("a", 4, 3)
    dispatcher.drain("a")
    dispatcher.join("b", 4)
    assert dispatcher.assignments() == {"a": Assignment(stop=True)}, "and is told so once"
    assert not dispatcher.assignments()
    first = dispatcher.on_update("a", WorkerUpdate((Result(0, 2),), {1: (5, 6)}, stopped=True))
    assert [answer.key for answer in first] == [0]
    assignment = dispatcher.assignments()["b"]
    assert [(task.key, task.output_token_ids) for task in assignment.tasks] == [(1, (5, 6)), (2, ())]
    assert [*dispatcher.workers] == ["b"]
    dispatcher.check()


def test_idle_workers_get_the_newest_open_rows_once_more_and_the_first_answer_counts() -> None:
    dispatcher = begun("ab", 4, 10, clock := Clock())
    held = {name: [*worker.tasks] for name, worker in dispatcher.workers.items()}
    assert held == {"a": [0, 1, 4, 5, 8], "b": [2, 3, 6, 7, 9]}
    clock.now += 10
    dispatcher.on_update("a", WorkerUpdate(partials={1: (5, 6)}))
    dispatcher.on_update("b", done(2, 3, 6, 7, 9))
    assert dispatcher.idle() == []
    assignment = dispatcher.assignments()["b"]
    assert [(task.key, task.output_token_ids) for task in assignment.tasks] == [(1, (5, 6)), (4, ()), (5, ()), (8, ())]
    dispatcher.check()
    assert [answer.key for answer in dispatcher.on_update("b", done(4, 5))] == [4, 5]
    assert dispatcher.on_update("a", done(4)) == [] and 4 not in dispatcher.workers["a"].tasks
    dispatcher.check()
    assert dispatcher.on_lost("a") == []
    dispatcher.check()
    assert keys_of(dispatcher.assignments()["b"]) == [0], "the lease that only the lost worker had"
    dispatcher.on_update("b", done(0, 1, 8))
    assert dispatcher.is_done and dispatcher.idle() == ["b"]
    dispatcher.check()


def test_backups_are_shared_out_evenly() -> None:
    dispatcher = begun("a", 8, 8, clock := Clock())
    for name in "bc":
        dispatcher.join(name, 8)
    clock.now += 1
    given = [keys_of(given) for given in dispatcher.assignments().values()]
    assert sorted(map(len, given)) == [4, 4] and sorted(given[0] + given[1]) == [*range(8)]
    dispatcher.check()


def test_a_last_row_runs_twice_and_a_third_worker_is_given_back() -> None:
    dispatcher = begun("ab", 4, 2, clock := Clock())
    dispatcher.join("c", 4)
    clock.now += 1
    dispatcher.on_update("a", done(0))
    assert dispatcher.idle() == []
    assert {name: keys_of(given) for name, given in dispatcher.assignments().items()} == {"a": [1]}
    assert dispatcher.idle() == ["c"]
    clock.now += 1
    assert not dispatcher.assignments()
    dispatcher.check()


def test_rows_with_a_strike_are_never_copied() -> None:
    dispatcher = begun("a", 4, 1, clock := Clock())
    dispatcher.on_lost("a")
    dispatcher.join("b", 4)
    dispatcher.assignments()
    dispatcher.join("c", 4)
    clock.now += 60
    assert dispatcher.workers["b"].tasks and not dispatcher.assignments()


def test_rows_are_bounded_by_their_characters_too() -> None:
    big = 10 << 20
    dispatcher = RowDispatcher(clock=Clock(), num_chars=lambda task: big)
    assert dispatcher.room == 256
    dispatcher.join("a", 64)
    key = 0
    while dispatcher.room:
        assert dispatcher.put(rows(key)[0]) == (not dispatcher.room)
        key += 1
    assert key == 7, "64 MiB a worker"
    assert keys_of(dispatcher.assignments()["a"]) == list(range(6))
    dispatcher.check()
    dispatcher.on_update("a", done(0, 1))
    assert dispatcher.room and keys_of(dispatcher.assignments()["a"]) == [6]
    dispatcher.check()
    huge = RowDispatcher(clock=Clock(), num_chars=lambda task: 1 << 30)
    huge.join("a", 64)
    assert huge.put(rows(0)[0])
    assert keys_of(huge.assignments()["a"]) == [0], "a row of any size runs, alone"


def test_silence_counts_for_workers_with_rows_and_not_while_the_driver_stands_still() -> None:
    clock = Clock()
    dispatcher, liveness = RowDispatcher(clock=clock), Liveness(10, clock=clock)
    for name in "ab":
        dispatcher.join(name, 2)
    for _ in range(3):
        clock.now += 4
        assert not liveness.unresponsive(dispatcher.workers.values())
    put(dispatcher, rows(*range(100)))
    dispatcher.assignments()
    clock.now += 4
    dispatcher.on_update("b", WorkerUpdate(progress=1))
    for _ in range(2):
        assert not liveness.unresponsive(dispatcher.workers.values())
        clock.now += 4
    assert [*liveness.unresponsive(dispatcher.workers.values())] == ["a"]
    dispatcher.on_update("a", WorkerUpdate(progress=1))
    clock.now += 100
    assert not liveness.unresponsive(dispatcher.workers.values())
    for _ in range(3):
        clock.now += 4
        silent = liveness.unresponsive(dispatcher.workers.values())
    assert [*silent] == ["a", "b"]


def test_a_worker_that_tells_of_no_step_for_too_long_is_silent_however_often_it_speaks() -> None:
    dispatcher = begun("a", 2, 8, clock := Clock())
    liveness = Liveness(10, clock=clock)
    for second in range(30):
        clock.now += 1
        dispatcher.on_update("a", WorkerUpdate(progress=min(second, 18), stats={"num_output_tokens": 1}))
        assert bool(liveness.unresponsive(dispatcher.workers.values())) == (second > 28)
    assert liveness.unresponsive(dispatcher.workers.values()) == {
        "a": "it has not finished a step in 10.0 s (--step-timeout)"
    }


def test_a_worker_may_load_for_longer_but_not_for_ever() -> None:
    clock = Clock()
    dispatcher, liveness = RowDispatcher(clock=clock), Liveness(10, 100, clock)
    loading = dict.fromkeys("ab", clock.now)
    told = []
    for _ in range(25):
        assert not liveness.unresponsive(dispatcher.workers.values(), loading)
        told += liveness.late(loading)
        clock.now += 4
    del loading["b"]
    clock.now += 4
    assert told == ["a", "b"], "each once"
    assert liveness.unresponsive(dispatcher.workers.values(), loading) == {
        "a": "it has not loaded the model in 1m 40s (--load-timeout)"
    }
    assert not liveness.unresponsive(dispatcher.workers.values())


def test_a_worker_that_was_told_to_stop_and_does_not_is_silent_without_rows_too() -> None:
    clock = Clock()
    dispatcher, liveness = RowDispatcher(clock=clock), Liveness(10, clock=clock)
    dispatcher.join("a", 2)
    clock.now += 100
    dispatcher.drain("a")
    dispatcher.assignments()
    for _ in range(3):
        assert not liveness.unresponsive(dispatcher.workers.values())
        clock.now += 4
    assert [*liveness.unresponsive(dispatcher.workers.values())] == ["a"]
    assert dispatcher.on_lost("a") == [] and not dispatcher.workers
