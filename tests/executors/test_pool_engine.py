"""The driver's loop between a pool and its crew, with seats that are played."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from batchgen.core.records import Request, Result
from batchgen.executors.engine import PoolEngine
from batchgen.executors.messages import Answers, Event, Grant, Hello, Identity, Seat
from batchgen.executors.pool import Pool

HELLO = Hello(Identity({}, {}, ""), max_num_seqs=1000, threads=1)


@dataclass
class PlayedSeat:
    """Answers each task at once, but for ``leaves_after`` ones: then its machine leaves, and it answers no more."""

    name: str
    leaves_after: int | None = None
    events: list[Event] = field(default_factory=lambda: [HELLO])
    held: list[int] = field(default_factory=list)
    is_closed: bool = False

    def send(self, grant: Grant) -> None:
        keys = [task.key for task in grant.tasks]
        if self.leaves_after is not None and len(keys) > self.leaves_after:
            self.held, keys = keys[self.leaves_after :], keys[: self.leaves_after]
            self.events.append(Answers(leaving=True))
        self.events.append(Answers(tuple(Result(key, 1) for key in keys), stopped=grant.stop))

    def poll(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def close(self) -> None:
        self.is_closed = True


class PlayedCrew:
    """Hires the seats that it is given; ``waits`` has the timeouts asked for, and the rows then in flight."""

    def __init__(self, seats: list[PlayedSeat], pool: Pool, num_wanted: int) -> None:
        self.is_one_place = True
        self.num_wanted = (1, num_wanted)
        self.waits: list[tuple[float, int]] = []
        self._seats = seats
        self._pool = pool

    def hire(self) -> Seat | None:
        return self._seats.pop(0) if self._seats else None

    def wait(self, seats: Iterable[Seat], timeout_s: float) -> None:
        self.waits.append((timeout_s, self._pool.num_in_flight))

    def close(self) -> None:
        pass


def engine_of(*seats: PlayedSeat, num_wanted: int = 1) -> tuple[PoolEngine, PlayedCrew]:
    pool = Pool()
    crew = PlayedCrew(list(seats), pool, num_wanted)
    engine = PoolEngine(crew, pool, lambda hello: "")
    engine.begin()
    return engine, crew


def tasks(count: int) -> list[Request]:
    return [Request(key, (key,)) for key in range(count)]


def test_windows_are_filled_without_a_wait() -> None:
    """Rows are read in small parts, so that a long part delays no worker; a wait after each would starve them."""
    engine, crew = engine_of(PlayedSeat("a"))
    crew.waits.clear()
    assert sorted(answer.key for answer in engine.run(tasks(5000))) == list(range(5000))
    while_reading = crew.waits[: 5000 // 256]
    assert {timeout_s for timeout_s, _ in while_reading} == {0.0}
    assert all(in_flight for _, in_flight in while_reading)


def test_a_worker_whose_machine_leaves_is_replaced_and_its_rows_go_on() -> None:
    leaver, other = PlayedSeat("a", leaves_after=10), PlayedSeat("b")
    engine, _ = engine_of(leaver, other)
    answers = [answer.key for answer in engine.run(tasks(100))]
    assert leaver.held == list(range(10, 100)) and leaver.is_closed
    assert sorted(answers) == list(range(100))


def test_a_worker_that_joins_while_the_run_ends_does_not_hold_it_up() -> None:
    first, late = PlayedSeat("a"), PlayedSeat("b", events=[])
    engine, crew = engine_of(first, late, num_wanted=2)
    first.send = lambda grant: late.events.append(HELLO) or PlayedSeat.send(first, grant)  # type: ignore[method-assign,func-returns-value]
    engine.stop()
    crew.waits.clear()
    assert not [*engine.run(tasks(3))]
    assert late.is_closed and len(crew.waits) < 3
