"""The scheduler alone, without a model: its order, its limits, and that everything ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from repeats import share_of
from simulate import advance, one_step

from batchgen.core.errors import RowErrorCode
from batchgen.core.records import Request, SamplingParams
from batchgen.engine.schedule import Schedule
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sequence import RequestState, Sequence
from batchgen.engine.sizes import SchedulerConfig


def make(
    budget: int = 16,
    num_seqs: int = 4,
    block_size: int = 4,
    num_blocks: int = 100,
    max_model_len: int = 1000,
    policies: tuple[bool, bool, bool] = (False, True, False),
    *,
    in_batches: bool = False,
) -> Scheduler:
    """``policies`` are prefix caching, longest first and memory forecast: those whose effects a test is not about."""
    sizes = budget, num_seqs, block_size, num_blocks, max_model_len
    return Scheduler(SchedulerConfig(*sizes, *policies, admits_in_batches=in_batches))


def add(scheduler: Scheduler, key: int, prompt: int, max_tokens: int = 10, output: int = 0) -> Sequence:
    request = Request(key, tuple(range(100, 100 + prompt)), SamplingParams(max_tokens=max_tokens), (9,) * output)
    sequence = RequestState(request).sequences[0]
    assert scheduler.refusal(sequence) is None
    scheduler.add(sequence)
    return sequence


def keys_and_counts(schedule: Schedule) -> list[tuple[int, int]]:
    return [(sequence.request.key, count) for sequence, count in schedule.entries.items()]


def step(scheduler: Scheduler, ends: Callable[[Sequence], bool] = lambda s: False) -> list[tuple[int, int]]:
    return keys_and_counts(one_step(scheduler, ends))


def test_importing_the_scheduler_loads_no_torch() -> None:
    code = "import sys, batchgen.engine.scheduler; print({'torch', 'numba'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_sequence_admitted_last_is_preempted_and_comes_back_first() -> None:
    scheduler = make(budget=100, num_seqs=2, block_size=1, num_blocks=14)
    first = add(scheduler, 0, prompt=4, max_tokens=8)
    second = add(scheduler, 1, prompt=4, max_tokens=7)
    step(scheduler)
    add(scheduler, 2, prompt=1, max_tokens=9)  # longer expected, but behind a preempted one
    while not scheduler.num_preemptions:
        step(scheduler)
    assert second.num_preemptions == 1
    assert first.num_preemptions == 0
    assert (second.num_computed_tokens, [*second.block_table], second.conv_slot) == (0, [], None)
    assert second.num_owed == second.num_tokens, "it keeps its tokens and owes them all again"
    assert scheduler.waiting.peek() is second
    while scheduler.has_work:
        step(scheduler)
    assert (first.num_output_tokens, second.num_output_tokens) == (8, 7)


def test_a_newcomer_leaves_each_running_sequence_the_block_that_it_needs_next() -> None:
    scheduler = make(budget=100, block_size=1, num_blocks=10)
    add(scheduler, 0, prompt=4, max_tokens=5)
    step(scheduler)
    add(scheduler, 1, prompt=5, max_tokens=2)
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.num_preemptions == 0


def place(scheduler: Scheduler, key: int, prompt: int, computed: int) -> None:
    """Let a sequence run with so many tokens computed, in an order that today's admission would never make."""
    sequence = RequestState(Request(key, (1,) * prompt, SamplingParams(max_tokens=2))).sequences[0]
    scheduler._start(sequence, [])
    sequence.num_computed_tokens = computed
    sequence.block_table.extend(scheduler.pool.allocate(-(-computed // scheduler.config.block_size)))


def test_tokens_given_to_a_sequence_preempted_later_in_the_step_go_back_to_the_budget() -> None:
    scheduler = make(budget=8, block_size=1, num_blocks=25)
    place(scheduler, 0, prompt=16, computed=14)
    place(scheduler, 1, prompt=20, computed=3)
    place(scheduler, 2, prompt=7, computed=6)
    assert step(scheduler) == [(0, 2), (1, 6)]  # 2 had its token first, then lost its blocks to 0
    assert scheduler.num_preemptions == 1


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "numbers"),
    [(50, 1, ("50", "49")), (51, 5, ("51", "50", "49")), (30, 30, ("49", "40")), (41, 1, ("41", "40"))],
)
def test_what_never_fits_is_refused_with_both_numbers(prompt: int, max_tokens: int, numbers: tuple[str, ...]) -> None:
    scheduler = make(block_size=4, num_blocks=10, max_model_len=50)
    request = Request(0, (1,) * prompt, SamplingParams(max_tokens=max_tokens))
    error = scheduler.refusal(RequestState(request).sequences[0])
    assert error is not None
    assert error.code == RowErrorCode.TOO_LONG
    assert all(number in error.message for number in numbers)


def test_a_prompt_that_does_not_fit_beside_the_running_is_not_begun_again_and_again() -> None:
    """A long prompt and a long decode that together exceed the pool: one waits for the other, nobody starts over."""
    scheduler = make(budget=32, block_size=4, num_blocks=64, num_seqs=8)
    add(scheduler, 0, prompt=100, max_tokens=100)
    step(scheduler)
    add(scheduler, 1, prompt=225, max_tokens=4)
    computed = 0
    while scheduler.has_work:
        computed += sum(count for _, count in step(scheduler))
    assert scheduler.num_preemptions <= 2
    assert computed <= 2 * (100 + 100 + 225 + 4)


def full_of_batches(num_waiting: int, prompt: int = 2, **sizes: Any) -> Scheduler:
    """A scheduler that admits in batches, all of its 32 slots taken, with more sequences like those that run."""
    scheduler = make(num_seqs=32, num_blocks=4000, in_batches=True, **{"budget": 1000} | sizes)
    for key in range(32 + num_waiting):
        add(scheduler, key, prompt=prompt, max_tokens=60)
    while sum(s.num_owed == 1 for s in scheduler.running) < 32:
        step(scheduler)
    assert step(scheduler) == [(key, 1) for key in range(32)]
    return scheduler


def admitted_after(scheduler: Scheduler, *ended: int) -> int:
    """How many are admitted by the step behind the one in which these end."""
    step(scheduler, ends=lambda s: s.request.key in ended)
    return sum(count > 1 for _, count in step(scheduler))


def test_waiting_sequences_are_admitted_once_an_eighth_of_those_running_has_left() -> None:
    scheduler = full_of_batches(50)
    assert admitted_after(scheduler, 0) == 0
    assert admitted_after(scheduler, 1, 2) == 0
    assert admitted_after(scheduler, 3) == 4
    assert admitted_after(scheduler, 4, 5, 6) == 0, "it starts over"


def test_one_place_is_enough_at_the_end_of_the_input_or_for_a_step_full_of_prompts() -> None:
    assert admitted_after(full_of_batches(2), 0, 1) == 2
    assert admitted_after(full_of_batches(50, prompt=100, budget=200), 0, 1) == 2
    assert admitted_after(full_of_batches(50, prompt=100, budget=201), 0, 1) == 0


def test_nothing_is_held_back_while_places_are_free_or_nothing_runs() -> None:
    scheduler = full_of_batches(50)
    assert admitted_after(scheduler, *range(32)) == 32
    scheduler = make(budget=1000, num_seqs=32, in_batches=True)
    for key in range(20):
        add(scheduler, key, prompt=2, max_tokens=50)
        assert step(scheduler)[-1] == (key, 2)


def test_a_batch_is_an_eighth_of_what_memory_holds_where_that_is_less_than_the_slots() -> None:
    scheduler = make(budget=1000, num_seqs=512, num_blocks=80, in_batches=True, policies=(False, True, True))
    for key in range(60):
        add(scheduler, key, prompt=2, max_tokens=19)  # 20 tokens, 5 blocks: 16 sequences fill the pool
    step(scheduler)
    num_running = len(scheduler.running)
    assert 15 <= num_running <= 17
    assert admitted_after(scheduler, 0) == 0
    assert admitted_after(scheduler, 1) >= 1


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, steps and random endings in any order, under sizes down to one."""

    @initialize(
        budget=st.integers(1, 24),
        num_seqs=st.integers(1, 6),
        block_size=st.integers(1, 7),
        num_blocks=st.integers(1, 24),
        max_model_len=st.integers(2, 60),
        policies=st.tuples(st.booleans(), st.booleans(), st.booleans()),
        in_batches=st.booleans(),
    )
    def begin(self, **sizes: Any) -> None:
        self.scheduler = make(**sizes)
        self.added: list[Sequence] = []
        self.finished: list[Sequence] = []

    @rule(prompt=st.integers(1, 40), same=st.integers(0, 40), max_tokens=st.integers(1, 30), output=st.integers(0, 5))
    def arrive(self, prompt: int, same: int, max_tokens: int, output: int) -> None:
        config = self.scheduler.config
        output = min(output, max_tokens - 1, max(0, config.max_model_len - prompt - 1))
        key = len(self.added)
        tokens = tuple(1 if place < same else 10 + key for place in range(prompt))
        request = Request(key, tokens, SamplingParams(max_tokens=max_tokens), (9,) * output)
        sequence = RequestState(request).sequences[0]
        error = self.scheduler.refusal(sequence)
        needed = min(prompt + max_tokens, config.max_model_len) - 1
        fits = prompt < config.max_model_len and -(-needed // config.block_size) <= config.num_blocks
        assert (error is None) == fits
        if error is None:
            self.added.append(sequence)
            self.scheduler.add(sequence)

    @precondition(lambda self: self.scheduler.has_work)
    @rule(data=st.data(), steps=st.integers(1, 6))
    def run(self, data: st.DataObject, steps: int) -> None:
        for _ in range(steps):
            if self.scheduler.has_work:
                self.step(lambda s: data.draw(st.integers(0, 9)) == 0)

    def step(self, ends: Callable[[Sequence], bool]) -> None:
        scheduler, config = self.scheduler, self.scheduler.config
        before = list(scheduler.running)
        owed = {s: s.num_owed for s in before}
        schedule = scheduler.schedule()
        self.check_schedule(schedule, before, owed)
        self.finished += advance(
            scheduler, schedule, lambda s: s.max_new_tokens <= 0 or s.num_tokens >= config.max_model_len or ends(s)
        )
        scheduler.check()

    def check_schedule(self, schedule: Schedule, before: list[Sequence], owed: dict[Sequence, int]) -> None:
        scheduler, config = self.scheduler, self.scheduler.config
        counts = dict(schedule.entries)
        assert len(counts) == len(schedule.entries) > 0
        assert schedule.num_tokens <= config.max_num_batched_tokens
        assert all(1 <= count <= s.num_owed for s, count in counts.items())
        assert len(scheduler.running) <= config.max_num_seqs
        for s, count in counts.items():
            assert len(s.block_table) == -(-(s.num_computed_tokens + count) // config.block_size)
        # The victims were the last admitted, and nobody is let in while memory is short.
        kept = [s for s in before if s.conv_slot is not None]
        assert kept == before[: len(kept)]
        admitted = scheduler.running[len(kept) :]
        assert not (admitted and len(kept) < len(before))
        # Decode first, then the half prefilled, then the admitted, each in order of admission.
        assert list(counts) == [
            *(s for s in kept if owed[s] == 1 and s in counts),
            *(s for s in kept if owed[s] > 1 and s in counts),
            *admitted,
        ]
        # Who is left out or cut short is so because the budget is spent.
        if schedule.num_tokens < config.max_num_batched_tokens:
            assert all(counts.get(s) == s.num_owed for s in kept + admitted)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        bound = 10 + 20 * sum(s.num_tokens + s.max_new_tokens for s in self.added)
        steps = 0
        while self.scheduler.has_work:
            self.step(lambda s: False)
            steps += 1
            assert steps < bound, "some sequence never ends"
        assert sorted(s.request.key for s in self.finished) == list(range(len(self.added)))
        assert self.scheduler.pool.num_free == self.scheduler.config.num_blocks


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=75, stateful_step_count=30, deadline=None)


class LongSchedulerMachine(SchedulerMachine):
    pass


TestSchedulerMachineAtLength = pytest.mark.slow(LongSchedulerMachine.TestCase)
TestSchedulerMachineAtLength.settings = settings(max_examples=share_of(3000), stateful_step_count=60, deadline=None)
