"""The pool among workers that die, hang, answer late or twice, join, leave and meet rows that end them.

Workers are played: a queue of what was sent to each and one of what it has sent, both delivered when chance will have
it. Rows' tokens are known beforehand, so that what is taken over can be held against them.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batchgen.core.records import Request, Result
from batchgen.executors.messages import HEARTBEAT_S, Answers, Grant
from batchgen.executors.pool import Pool

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
    to_it: deque[Grant] = field(default_factory=deque)
    from_it: deque[Answers] = field(default_factory=deque)
    waiting: dict[int, Request] = field(default_factory=dict)
    running: dict[int, int] = field(default_factory=dict)
    answers: list[Result] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)
    is_dead: bool = False
    is_hung: bool = False
    has_stopped: bool = False

    @property
    def works(self) -> bool:
        return not (self.is_dead or self.is_hung or self.has_stopped)

    def read(self) -> None:
        """Take the next grant in."""
        grant = self.to_it.popleft()
        for task in grant.tasks:
            assert task.key not in self.waiting and task.key not in self.running, "given twice"
            assert task.output_token_ids == tokens_of(task.key)[: len(task.output_token_ids)]
            self.waiting[task.key] = task
        self.returned += [key for key in grant.recall if self.waiting.pop(key, None) is not None]
        if grant.stop:
            self.tell(partials=True, stopped=True)
            self.has_stopped = True

    def step(self) -> None:
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
                self.answers.append(Result(key, 2, tokens_of(key)))

    def tell(self, *, partials: bool, stopped: bool = False, leaving: bool = False) -> None:
        told = {key: tokens_of(key)[:count] for key, count in self.running.items()} if partials else None
        self.from_it.append(Answers(tuple(self.answers), told, tuple(self.returned), None, stopped, leaving=leaving))
        self.answers, self.returned = [], []


class Storm(RuleBasedStateMachine):
    """Any order of events; at the end all goes well, and every row must have been answered once."""

    @initialize(
        num_rows=st.integers(0, 60), poison=st.frozensets(st.integers(0, 59), max_size=2), size=st.integers(1, 4)
    )
    def begin(self, num_rows: int, poison: frozenset[int], size: int) -> None:
        self.now = 0.0
        self.pool = Pool(patience_s=PATIENCE_S, clock=lambda: self.now)
        self.source = deque(Request(key, (key, key)) for key in range(num_rows))
        self.poison = poison & frozenset(range(num_rows))
        self.num_rows, self.size = num_rows, size
        self.workers: dict[str, PlayedWorker] = {}
        self.num_hired = 0
        self.answered: Counter[int] = Counter()
        self.losses: Counter[int] = Counter()
        self.lonely: Counter[int] = Counter()
        self.told: dict[int, int] = {}
        self.late: list[tuple[str, Answers]] = []

    # What the driver does

    @rule()
    def fill(self) -> None:
        room = self.pool.room
        self.pool.put(self.source.popleft() for _ in range(min(room, len(self.source))))

    @precondition(lambda self: not self.source)
    @rule()
    def end_of_source(self) -> None:
        self.pool.end_of_source()
        assert self.pool.room == 0

    @rule()
    def send(self) -> None:
        for name, grant in self.pool.grants().items():
            worker = self.workers[name]
            assert grant and not (grant.stop and grant.tasks)
            assert {task.key for task in grant.tasks}.isdisjoint(grant.recall)
            for task in grant.tasks:
                assert len(task.output_token_ids) >= self.told.get(task.key, 0), "tokens told before are lost"
            worker.to_it.append(grant)
            if grant.tasks:
                assert len(self.pool.workers[name].tasks) <= self.pool.workers[name].window

    @precondition(lambda self: any(worker.from_it for worker in self.workers.values()))
    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name, worker in self.workers.items() if worker.from_it]))
        self.hear_from(name, self.workers[name].from_it.popleft())

    def hear_from(self, name: str, answers: Answers) -> None:
        in_flight = self.pool.workers[name].tasks.keys()
        self.told |= {key: len(tokens) for key, tokens in (answers.partials or {}).items() if key in in_flight}
        self.answered.update(answer.key for answer in self.pool.heard(name, answers))
        self.late.append((name, answers))
        if answers.stopped:
            del self.workers[name]

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def hear_twice(self, data: st.DataObject) -> None:
        """What was heard once, from a worker that may be gone by now."""
        name, answers = data.draw(st.sampled_from(self.late))
        if not (answers.stopped or answers.returned):
            assert self.pool.heard(name, Answers(answers.finished, answers.partials)) == []

    @rule()
    def give_up_the_silent(self) -> None:
        for name in self.pool.silent():
            self.lose(name)

    def lose(self, name: str) -> None:
        worker = self.workers.pop(name)
        in_flight = list(self.pool.workers[name].tasks)
        if self.pool.workers[name].state != "leaving":
            self.losses.update(in_flight)
            self.lonely.update(in_flight if len(in_flight) == 1 else ())
        for task in self.pool.lose(name):
            assert self.lonely[task.key] >= 2, "convicted in company"
            self.answered[task.key] += 1
        self.late += [(name, answers) for answers in worker.from_it]

    # What happens to it

    @precondition(lambda self: len(self.workers) < 4)
    @rule()
    def hire(self) -> None:
        name = f"w{self.num_hired}"
        self.num_hired += 1
        self.workers[name] = PlayedWorker(name, self.size, self.poison)
        self.pool.join(name, self.size)

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.0, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), what=st.sampled_from(["read", "step", "step", "tell", "tell"]), partials=st.booleans())
    def work(self, data: st.DataObject, what: str, partials: bool) -> None:
        worker = data.draw(st.sampled_from(list(self.workers.values())))
        if not worker.works:
            return
        if what == "read" and worker.to_it:
            worker.read()
        elif what == "step":
            worker.step()
        elif what == "tell":
            worker.tell(partials=partials)

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), what=st.sampled_from(["dies", "hangs", "leaves", "is told to leave", "is noticed"]))
    def trouble(self, data: st.DataObject, what: str) -> None:
        name = data.draw(st.sampled_from(list(self.workers)))
        worker = self.workers[name]
        if what == "dies":
            worker.is_dead = True
        elif what == "hangs":
            worker.is_hung = True
        elif what == "leaves" and worker.works:
            worker.tell(partials=True, leaving=True)
        elif what == "is told to leave":
            self.pool.leave(name)
        elif what == "is noticed" and worker.is_dead:
            self.lose(name)

    # What must hold

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert all(count == 1 for count in self.answered.values())
        if self.pool.is_done:
            assert len(self.answered) == self.num_rows

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for _ in range(3000):
            if self.pool.is_done:
                break
            self.a_good_turn()
            self.holds()
        assert self.pool.is_done, "rows are left and nothing happens"
        assert self.answered.keys() == set(range(self.num_rows))
        self.now += 2 * HEARTBEAT_S
        self.send()
        assert sorted(self.pool.idle()) == sorted(n for n in self.workers if self.pool.workers[n].state == "running")

    def a_good_turn(self) -> None:
        """The driver's loop once, with workers that do as they should; hung ones stay so."""
        while len(self.workers) < 2:
            self.hire()
        self.now += HEARTBEAT_S
        for worker in list(self.workers.values()):
            while worker.works and worker.to_it:
                worker.read()
            if worker.works:
                worker.step()
            if worker.works:
                worker.tell(partials=False)
            while worker.name in self.workers and worker.from_it:
                self.hear_from(worker.name, worker.from_it.popleft())
            if worker.name in self.workers and worker.is_dead:
                self.lose(worker.name)
        self.give_up_the_silent()
        self.fill()
        if not self.source:
            self.end_of_source()
        self.send()


TestStorm = Storm.TestCase
TestStorm.settings = settings(max_examples=150, stateful_step_count=60)
