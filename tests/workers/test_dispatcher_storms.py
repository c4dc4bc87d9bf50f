"""The dispatcher among workers that die, hang, answer late or twice, join, leave and meet rows that end them.

Workers are played: a queue of what was sent to each and one of what it has sent, both delivered when chance will have
it. Rows' tokens are known beforehand, so that what is taken over can be held against them.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from repeats import nightly, slow
from simulate_workers import CPU, GPU, Kind, Scene, gsm8k_like, heavy_tailed, simulate

from batchgen.core.records import Request, Result, Sample
from batchgen.workers.dispatcher import RowDispatcher
from batchgen.workers.messages import HEARTBEAT_S, Assignment, WorkerUpdate
from batchgen.workers.worker_state import Liveness

PATIENCE_S = 5.0


def tokens_of(key: int) -> tuple[int, ...]:
    """The whole answer to a row: 1 to 7 tokens."""
    return tuple(range(10 * key, 10 * key + 1 + key * 5 % 7))


@dataclass
class PlayedWorker:
    """An engine of few slots; ``running`` has the number of tokens by key. A poison row ends it with its last token."""

    name: str
    max_num_seqs: int
    poison: frozenset[int]
    to_it: deque[Assignment] = field(default_factory=deque)
    from_it: deque[WorkerUpdate] = field(default_factory=deque)
    waiting: dict[int, Request] = field(default_factory=dict)
    running: dict[int, int] = field(default_factory=dict)
    answers: list[Result] = field(default_factory=list)
    is_dead: bool = False
    is_silent: bool = False
    is_stuck: bool = False  # in a step: it speaks all the same
    num_steps: int = 0
    has_stopped: bool = False

    @property
    def works(self) -> bool:
        return not (self.is_dead or self.is_silent or self.is_stuck or self.has_stopped)

    def read(self) -> None:
        """Take the next assignment in."""
        assignment = self.to_it.popleft()
        for task in assignment.tasks:
            assert task.key not in self.waiting and task.key not in self.running, "given twice"
            assert task.output_token_ids == tokens_of(task.key)[: len(task.output_token_ids)]
            self.waiting[task.key] = task
        if assignment.stop:
            self.tell(partials=True, stopped=True)
            self.has_stopped = True

    def step(self) -> None:
        self.num_steps += 1
        while self.waiting and len(self.running) < self.max_num_seqs:
            task = self.waiting.pop(next(iter(self.waiting)))
            self.running[task.key] = len(task.output_token_ids)
        for key in list(self.running):
            self.running[key] += 1
            if self.running[key] >= len(tokens_of(key)):
                if key in self.poison:
                    self.is_dead = True
                    return
                del self.running[key]
                self.answers.append(Result(key, 2, (Sample(tokens_of(key)),)))

    def tell(self, *, partials: bool, stopped: bool = False) -> None:
        told = {key: tokens_of(key)[:count] for key, count in self.running.items()} if partials else None
        stats = {"num_output_tokens": self.num_steps}
        self.from_it.append(WorkerUpdate(tuple(self.answers), told, stats, stopped, progress=self.num_steps))
        self.answers = []


class Storm(RuleBasedStateMachine):
    """Any order of events; at the end all goes well, and every row must have been answered once."""

    @initialize(
        num_rows=st.integers(0, 60), poison=st.frozensets(st.integers(0, 59), max_size=2), size=st.integers(1, 4)
    )
    def begin(self, num_rows: int, poison: frozenset[int], size: int) -> None:
        self.now = 0.0
        self.dispatcher = RowDispatcher(clock=lambda: self.now, num_chars=lambda task: task.key << 20)
        self.liveness = Liveness(PATIENCE_S, clock=lambda: self.now)
        self.source = deque(Request(key, (key, key)) for key in range(num_rows))
        self.poison = poison & frozenset(range(num_rows))
        self.num_rows, self.size = num_rows, size
        self.workers: dict[str, PlayedWorker] = {}
        self.num_hired = 0
        self.answered: Counter[int] = Counter()
        self.losses: Counter[int] = Counter()
        self.lonely: Counter[int] = Counter()
        self.told: dict[int, int] = {}
        self.late: list[tuple[str, WorkerUpdate]] = []

    # What the driver does

    @rule()
    def fill(self) -> None:
        room = self.dispatcher.room
        for _ in range(min(room, len(self.source))):
            self.dispatcher.put(self.source.popleft())

    @precondition(lambda self: not self.source)
    @rule()
    def end_of_source(self) -> None:
        self.dispatcher.end_of_source()
        assert self.dispatcher.room == 0

    @rule()
    def send(self) -> None:
        for name, assignment in self.dispatcher.assignments().items():
            worker = self.workers[name]
            assert assignment.stop != bool(assignment.tasks)
            for task in assignment.tasks:
                assert len(task.output_token_ids) >= self.told.get(task.key, 0), "tokens told before are lost"
            worker.to_it.append(assignment)
            if assignment.tasks:
                given = self.dispatcher.workers[name]
                num_ahead = given.num_ahead(len(self.dispatcher.workers))
                assert given.num_waiting < num_ahead + (given.max_num_seqs + 1) // 2

    @precondition(lambda self: any(worker.from_it for worker in self.workers.values()))
    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name, worker in self.workers.items() if worker.from_it]))
        self.hear_from(name, self.workers[name].from_it.popleft())

    def hear_from(self, name: str, answers: WorkerUpdate) -> None:
        known = self.dispatcher.workers.get(name)
        in_flight = known.tasks.keys() if known else set()
        self.told |= {key: len(tokens) for key, tokens in (answers.partials or {}).items() if key in in_flight}
        self.answered.update(answer.key for answer in self.dispatcher.on_update(name, answers))
        self.late.append((name, answers))
        if answers.stopped:
            del self.workers[name]

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def hear_twice(self, data: st.DataObject) -> None:
        """What was heard once, from a worker that may be gone by now."""
        name, answers = data.draw(st.sampled_from(self.late))
        if not answers.stopped:
            assert self.dispatcher.on_update(name, WorkerUpdate(answers.finished, answers.partials)) == []

    @rule()
    def give_up_the_silent(self) -> None:
        for name in self.liveness.unresponsive(self.dispatcher.workers.values()):
            self.on_lost(name)

    def on_lost(self, name: str) -> None:
        worker = self.workers.pop(name)
        in_flight = list(self.dispatcher.workers[name].tasks)
        if self.dispatcher.workers[name].state != "leaving":
            self.losses.update(in_flight)
            self.lonely.update(in_flight if len(in_flight) == 1 else ())
        for task in self.dispatcher.on_lost(name):
            assert self.lonely[task.key] >= 2, "poison in company"
            self.answered[task.key] += 1
        self.late += [(name, answers) for answers in worker.from_it]

    # What happens to it

    @precondition(lambda self: len(self.workers) < 4)
    @rule()
    def launch(self) -> None:
        name = f"w{self.num_hired}"
        self.num_hired += 1
        self.workers[name] = PlayedWorker(name, self.size, self.poison)
        self.dispatcher.join(name, self.size)

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.0, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), what=st.sampled_from(["read", "step", "step", "tell", "tell"]), partials=st.booleans())
    def work(self, data: st.DataObject, what: str, partials: bool) -> None:
        worker = data.draw(st.sampled_from(list(self.workers.values())))
        if worker.is_stuck and what == "tell":
            worker.tell(partials=partials)
        if not worker.works:
            return
        if what == "read" and worker.to_it:
            worker.read()
        elif what == "step":
            worker.step()
        elif what == "tell":
            worker.tell(partials=partials)

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), what=st.sampled_from(["dies", "is silent", "is stuck", "is told to leave", "is noticed"]))
    def trouble(self, data: st.DataObject, what: str) -> None:
        name = data.draw(st.sampled_from(list(self.workers)))
        worker = self.workers[name]
        if what == "dies":
            worker.is_dead = True
        elif what == "is silent":
            worker.is_silent = True
        elif what == "is stuck":
            worker.is_stuck = True
        elif what == "is told to leave":
            self.dispatcher.drain(name)
        elif what == "is noticed" and worker.is_dead:
            self.on_lost(name)

    # What must hold

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "dispatcher"):
            return
        self.dispatcher.check()
        assert all(count == 1 for count in self.answered.values())
        if self.dispatcher.is_done:
            assert len(self.answered) == self.num_rows

    def teardown(self) -> None:
        if not hasattr(self, "dispatcher"):
            return
        for _ in range(3000):
            if self.dispatcher.is_done:
                break
            self.a_good_turn()
            self.holds()
        assert self.dispatcher.is_done, "rows are left and nothing happens"
        assert self.answered.keys() == set(range(self.num_rows))
        self.now += 2 * HEARTBEAT_S
        self.send()
        assert sorted(self.dispatcher.idle()) == sorted(
            n for n, w in self.dispatcher.workers.items() if w.state == "running"
        )

    def a_good_turn(self) -> None:
        """The driver's loop once, with workers that do as they should; hung ones stay so."""
        while len(self.workers) < 2:
            self.launch()
        self.now += HEARTBEAT_S
        for worker in list(self.workers.values()):
            while worker.works and worker.to_it:
                worker.read()
            if worker.works:
                worker.step()
            if worker.works or worker.is_stuck:
                worker.tell(partials=False)
            while worker.name in self.workers and worker.from_it:
                self.hear_from(worker.name, worker.from_it.popleft())
            if worker.name in self.workers and worker.is_dead:
                self.on_lost(worker.name)
        self.give_up_the_silent()
        self.fill()
        if not self.source:
            self.end_of_source()
        self.send()


TestStorm = Storm.TestCase
TestStorm.settings = settings(max_examples=150, stateful_step_count=60)


# ---------------------------------------------------------------- efficiency in simulated time


def kept_busy(kind: Kind, num_workers: int, rows_each: int) -> float:
    return simulate(Scene(kind, num_workers, num_workers * rows_each)).efficiency


@pytest.mark.parametrize(
    ("kind", "num_workers", "rows_each", "least"),
    [
        (CPU, 1, 2048, 0.985),
        (CPU, 8, 2048, 0.98),
        (CPU, 16, 512, 0.945),
        (CPU, 32, 98, 0.70),  # fewer rows than slots: it is start and end alone
        slow(CPU, 64, 2048, 0.98),
        (GPU, 1, 8192, 0.92),
        (GPU, 8, 4096, 0.80),
    ],
)
def test_workers_are_kept_busy(kind: Kind, num_workers: int, rows_each: int, least: float) -> None:
    assert kept_busy(kind, num_workers, rows_each) > least


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "num_workers", "rows_each", "least"),
    [(CPU, 1024, 512, 0.92), (CPU, 1024, 98, 0.68), (GPU, 64, 16384, 0.93), (GPU, 1024, 2048, 0.64)],
)
def test_a_thousand_workers_are_kept_busy(kind: Kind, num_workers: int, rows_each: int, least: float) -> None:
    assert kept_busy(kind, num_workers, rows_each) > least


def test_two_workers_take_hardly_more_steps_than_one() -> None:
    rows = gsm8k_like(3000)
    alone, both = (simulate(Scene(CPU, number, 0, spread=0), rows).num_steps for number in (1, 2))
    assert alone < both < 1.3 * alone


def test_beside_a_slow_worker_none_is_idle_for_longer_than_that_ones_last_rows() -> None:
    rows = gsm8k_like(2048)
    played = simulate(Scene(CPU, 4, 0, speeds=(0.2, 1, 1, 1)), rows)
    longest = max(row.output for row in rows) * (CPU.fixed_s + CPU.token_s * CPU.max_num_seqs / 2) / 0.2
    assert max(played.idle_s.values()) < longest
    assert max(played.idle_s.values()) < 10, "the others help it to the end"


def test_rows_of_a_slow_worker_go_to_idle_ones() -> None:
    """Ten times slower, and so many rows for each that all are given out before the first is done."""
    assert simulate(Scene(CPU, 2, 512, speeds=(0.1, 1))).efficiency > 0.83
    assert simulate(Scene(CPU, 4, 2048, speeds=(0.2, 1, 1, 1))).efficiency > 0.88


def test_a_heavy_tail_costs_no_more_than_its_longest_rows() -> None:
    assert simulate(Scene(CPU, 8, 0), heavy_tailed(8 * 1024)).efficiency > 0.9


@pytest.mark.parametrize(
    ("num_workers", "mtbf_h", "num_seeds", "least"),
    [
        (8, 0.15, 1, 0.7),
        slow(64, 8.0, 1, 0.975),  # as of spot machines
        nightly(64, 0.8, 6, 0.94),
    ],
)
def test_losses_cost_little_and_no_row(num_workers: int, mtbf_h: float, num_seeds: int, least: float) -> None:
    total = 0.0
    for seed in range(num_seeds):
        scene = Scene(CPU, num_workers, num_workers * 2048, mtbf_s=3600 * mtbf_h, seed=seed)
        played = simulate(scene)
        assert played.num_losses > 0
        assert played.num_answers == scene.num_rows
        total += played.efficiency
    assert total / num_seeds > least


def test_when_workers_go_all_the_time_the_job_ends_all_the_same() -> None:
    scene = Scene(CPU, 8, 8 * 256, mtbf_s=60, replaced_s=5)
    played = simulate(scene)
    assert played.num_losses > 8
    assert played.num_answers == scene.num_rows
    assert simulate(Scene(CPU, 8, 8 * 256, mtbf_s=60, replaced_s=5, partials_s=1e9)).num_steps > played.num_steps


def test_a_slow_driver_is_the_only_thing_that_is_waited_for() -> None:
    scene = Scene(GPU, 16, 16 * 2048, driver_row_s=350e-6)
    played = simulate(scene)
    assert played.seconds < 1.15 * scene.num_rows * scene.driver_row_s
    assert played.most_in_flight < 16 * 2 * GPU.max_num_seqs
