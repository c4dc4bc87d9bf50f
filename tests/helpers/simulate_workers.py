"""A job on many workers played out without any: how busy they are kept, and what a loss or a slow driver costs.

The dispatcher is the real one. A worker's step costs a fixed time and a time per token, its speed is a little its own,
and messages take their time. Start-up is not in it.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from batchgen.workers.dispatcher import RowDispatcher
from batchgen.workers.messages import HEARTBEAT_S, Assignment, WorkerUpdate


@dataclass(frozen=True, slots=True)
class Row:
    """A stand-in for a row: tokens of its prompt and of its whole answer."""

    key: int
    prompt: int
    output: int
    output_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of worker: seconds of a step and of each of its tokens, sequences at once, tokens in a step."""

    fixed_s: float
    token_s: float
    max_num_seqs: int
    max_tokens: int

    def ideal_s(self, rows: list[Row]) -> float:
        """Seconds for the rows on one worker of speed 1 if every step had ``max_num_seqs`` sequences."""
        tokens, steps = sum(row.prompt + row.output - 1 for row in rows), sum(row.output for row in rows)
        return tokens * self.token_s + steps / self.max_num_seqs * self.fixed_s


CPU = Kind(0.016, 0.0015, 128, 256)
GPU = Kind(0.004, 8e-6, 512, 4096)  # assumed


@dataclass(frozen=True)
class Scene:
    """What is simulated. ``latency_s`` is a message's way; ``mtbf_s`` a worker's mean time to its loss.

    A loss is noticed after 0.3 s and replaced after ``replaced_s``. ``driver_row_s`` is the driver's time per row.
    """

    kind: Kind
    num_workers: int
    num_rows: int
    spread: float = 0.1
    latency_s: float = 0.125
    mtbf_s: float = math.inf
    replaced_s: float = 45.0
    driver_row_s: float = 0.0
    speeds: tuple[float, ...] = ()
    partials_s: float = 5.0
    seed: int = 0


@dataclass
class Played:
    """What came of it. ``idle_s`` is by worker: how long before the end it had its last row."""

    seconds: float = 0.0
    efficiency: float = 0.0
    num_steps: int = 0
    num_answers: int = 0
    num_losses: int = 0
    most_in_flight: int = 0
    idle_s: dict[str, float] = field(default_factory=dict)


class SimWorker:
    """An engine with continuous batching in simulated time: a step's sequences each gain a token."""

    def __init__(self, name: str, kind: Kind, speed: float) -> None:
        self.name, self.kind, self.speed = name, kind, speed
        self.waiting: dict[int, Row] = {}
        self.running: list[tuple[int, int]] = []  # heap: step after which it ends, key
        self.begun: dict[int, tuple[Row, int]] = {}  # with the step before its first token
        self.step = 0
        self.debt = 0  # prompt tokens of begun rows that are not computed
        self.finished: list[Row] = []
        self.num_prefilled = self.num_decoded = 0
        self.is_stepping = self.is_gone = False
        self.ended_at = 0.0

    def take(self, assignment: Assignment) -> None:
        self.waiting |= {task.key: cast(Row, task) for task in assignment.tasks}

    def begin_step(self) -> float:
        """Seconds of the next step, 0 if there is nothing to do."""
        num_decode = len(self.running)
        budget = self.kind.max_tokens - num_decode
        while self.waiting and len(self.running) < self.kind.max_num_seqs and self.debt < budget:
            row = self.waiting.pop(next(iter(self.waiting)))
            done = len(row.output_token_ids)
            heapq.heappush(self.running, (self.step + row.output - done, row.key))
            self.begun[row.key] = (row, self.step - done)
            self.debt += row.prompt + done
        if not self.running:
            return 0.0
        prefill = min(self.debt, budget)
        self.debt -= prefill
        self.num_prefilled += prefill
        self.num_decoded += num_decode
        return (self.kind.fixed_s + self.kind.token_s * (num_decode + prefill)) / self.speed

    def end_step(self, now: float) -> None:
        self.step += 1
        while self.running and self.running[0][0] <= self.step:
            _, key = heapq.heappop(self.running)
            self.finished.append(self.begun.pop(key)[0])
            self.ended_at = now

    def answers(self, partials: bool) -> WorkerUpdate:
        told = {key: (0,) * (self.step - first) for key, (_, first) in self.begun.items()} if partials else None
        stats = {"num_prefill_tokens": self.num_prefilled, "num_output_tokens": self.num_decoded}
        answers = WorkerUpdate(cast(Any, tuple(self.finished)), told, stats, progress=self.step)
        self.finished = []
        return answers


class Simulation:
    """Events in order of simulated time, and the driver's loop around a dispatcher."""

    def __init__(self, scene: Scene, rows: list[Row]) -> None:
        self.scene, self.source, self.rng = scene, deque(rows), random.Random(scene.seed)
        self.now = 0.0
        self.dispatcher = RowDispatcher(clock=lambda: self.now)
        self.workers: dict[str, SimWorker] = {}
        self.inbox: list[Callable[[], int]] = []
        self.driver_free_at = 0.0
        self.is_awake = False
        self.played = Played()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), what))

    def play(self) -> Played:
        scene, rows = self.scene, list(self.source)
        for number in range(scene.num_workers):
            spread = self.rng.uniform(1 - scene.spread, 1 + scene.spread)
            self.launch(scene.speeds[number] if scene.speeds else spread)
        ideal = scene.kind.ideal_s(rows) / sum(worker.speed for worker in self.workers.values())
        while not self.dispatcher.is_done:
            self.now, _, what = heapq.heappop(self._events)
            what()
        self.played.seconds = self.now
        self.played.efficiency = ideal / self.now
        last = max(worker.ended_at for worker in self.workers.values())
        self.played.idle_s = {name: last - worker.ended_at for name, worker in self.workers.items()}
        return self.played

    def launch(self, speed: float) -> None:
        worker = SimWorker(f"w{len(self.workers)}", self.scene.kind, speed)
        self.workers[worker.name] = worker

        def join() -> int:
            self.dispatcher.join(worker.name, worker.kind.max_num_seqs)
            return 0

        self.tell(join)
        self.at(self.now + self.rng.uniform(0, HEARTBEAT_S), lambda: self.beat(worker, self.now))
        if self.scene.mtbf_s < math.inf:
            self.at(self.now + self.rng.expovariate(1 / self.scene.mtbf_s), lambda: self.kill(worker))

    def kill(self, worker: SimWorker) -> None:
        worker.is_gone = True
        self.played.num_losses += 1

        def lose() -> int:
            assert not self.dispatcher.on_lost(worker.name), "a row is poison for a chance loss"
            return 0

        self.at(self.now + 0.3, lambda: self.tell(lose))
        self.at(self.now + self.scene.replaced_s, lambda: self.launch(worker.speed))

    # The worker's side

    def beat(self, worker: SimWorker, told_at: float) -> None:
        if worker.is_gone:
            return
        has_losses = self.scene.mtbf_s < math.inf
        is_time = has_losses and self.now - told_at >= self.scene.partials_s
        answers = worker.answers(is_time)
        self.at(self.now + self.scene.latency_s, lambda: self.tell(lambda: self.hear(worker.name, answers)))
        self.at(self.now + HEARTBEAT_S, lambda: self.beat(worker, self.now if is_time else told_at))

    def deliver(self, worker: SimWorker, assignment: Assignment) -> None:
        worker.take(assignment)
        if not worker.is_stepping:
            self.step(worker)

    def step(self, worker: SimWorker) -> None:
        seconds = worker.begin_step()
        worker.is_stepping = seconds > 0
        if worker.is_stepping and not worker.is_gone:
            self.played.num_steps += 1

            def end() -> None:
                worker.end_step(self.now)
                self.step(worker)

            self.at(self.now + seconds, end)

    # The driver's side

    def tell(self, what: Callable[[], int]) -> None:
        self.inbox.append(what)
        if not self.is_awake:
            self.is_awake = True
            self.at(max(self.now + 0.01, self.driver_free_at), self.drive)

    def hear(self, name: str, answers: WorkerUpdate) -> int:
        first = self.dispatcher.on_update(name, answers)
        self.played.num_answers += len(first)
        return len(first)

    def drive(self) -> None:
        """One turn of the driver: hear all, fill up the backlog, give out."""
        self.is_awake = False
        inbox, self.inbox = self.inbox, []
        num_rows = sum(what() for what in inbox)
        if room := self.dispatcher.room:
            for _ in range(min(room, len(self.source))):
                self.dispatcher.put(cast(Any, self.source.popleft()))
            if not self.source:
                self.dispatcher.end_of_source()
        assignments = self.dispatcher.assignments()
        self.driver_free_at = self.now + num_rows * self.scene.driver_row_s
        num_in_flight = sum(len(worker.tasks) for worker in self.dispatcher.workers.values())
        self.played.most_in_flight = max(self.played.most_in_flight, num_in_flight)
        for name, assignment in assignments.items():
            worker = self.workers[name]
            if not worker.is_gone:
                self.at(self.driver_free_at + self.scene.latency_s, partial(self.deliver, worker, assignment))


def gsm8k_like(count: int, seed: int = 0) -> list[Row]:
    """Rows of about 69 tokens in and 102 out."""
    rng = random.Random(seed)

    def draw(median: float, sigma: float, least: int, most: int) -> int:
        return min(most, max(least, round(rng.lognormvariate(math.log(median), sigma))))

    return [Row(key, draw(64, 0.4, 20, 300), draw(91, 0.48, 20, 400)) for key in range(count)]


def heavy_tailed(count: int, seed: int = 0) -> list[Row]:
    """Rows whose answers are 250 tokens in the middle and up to 4,096."""
    rng = random.Random(seed)
    return [Row(key, 69, min(4096, max(8, round(rng.lognormvariate(math.log(250), 1.0))))) for key in range(count)]


def simulate(scene: Scene, rows: list[Row] | None = None) -> Played:
    """Play a scene to its end."""
    return Simulation(scene, rows if rows is not None else gsm8k_like(scene.num_rows, scene.seed)).play()
