"""The scheduler and shared prefixes, without a model: what is computed once, who waits for it, and for how long."""

from __future__ import annotations

from simulate import one_step

from batchgen.core.records import Request, SamplingParams
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sequence import RequestState, Sequence
from batchgen.engine.sizes import SchedulerConfig

STEM = tuple(range(100, 112))  # three blocks of four


def make(budget: int = 100, num_seqs: int = 8, num_blocks: int = 100, *, longest_first: bool = True) -> Scheduler:
    return Scheduler(SchedulerConfig(budget, num_seqs, 4, num_blocks, 1000, longest_first=longest_first))


def add(scheduler: Scheduler, key: int, prompt: tuple[int, ...], max_tokens: int = 3) -> Sequence:
    sequence = RequestState(Request(key, prompt, SamplingParams(max_tokens=max_tokens))).sequences[0]
    scheduler.add(sequence)
    return sequence


def step(scheduler: Scheduler) -> dict[int, int]:
    """Tokens computed by key."""
    schedule = one_step(scheduler)
    return {sequence.request.key: count for sequence, count in schedule.entries.items()}


def test_a_family_waits_one_step_for_its_common_beginning_and_computes_it_once() -> None:
    scheduler = make()
    for key in range(4):
        add(scheduler, key, (*STEM, 50 + key))
    assert step(scheduler) == {0: 13}
    assert step(scheduler) == {0: 1, 1: 1, 2: 1, 3: 1}
    assert scheduler.num_cached_tokens == 3 * 12


def test_others_are_admitted_while_a_family_waits() -> None:
    scheduler = make()
    add(scheduler, 0, (*STEM, 50))
    add(scheduler, 1, (*STEM, 51))
    add(scheduler, 2, (1, 2, 3))
    assert step(scheduler) == {0: 13, 2: 3}
    assert step(scheduler)[1] == 1


def test_a_beginning_computed_in_chunks_is_waited_for_to_its_end() -> None:
    scheduler = make(budget=5)
    add(scheduler, 0, (*STEM, 50), max_tokens=1)
    add(scheduler, 1, (*STEM, 51), max_tokens=1)
    computed = [step(scheduler) for _ in range(4)]
    assert [counts.get(1, 0) for counts in computed] == [0, 0, 0, 1]
    assert sum(sum(counts.values()) for counts in computed) == 13 + 1


def test_blocks_are_found_once_the_token_behind_the_prompt_is_known() -> None:
    scheduler = make(budget=8)
    first = add(scheduler, 0, (*STEM, 50))
    step(scheduler)
    assert scheduler.pool.find(first.block_hashes) == [], "two are full, but the prompt's logits may not be finite"
    step(scheduler)
    assert len(scheduler.pool.find(first.block_hashes)) == 3


def test_a_partly_common_beginning_is_shared_as_far_as_it_goes() -> None:
    scheduler = make()
    add(scheduler, 0, (*STEM, 50))
    add(scheduler, 1, (*STEM[:9], 60, 61, 62, 63))
    assert step(scheduler) == {0: 13}
    assert step(scheduler) == {0: 1, 1: 5}


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    """Its logits are wanted, so a prompt that is cached to its very end keeps its last block to compute."""
    scheduler = make()
    add(scheduler, 0, STEM)
    step(scheduler)
    add(scheduler, 1, STEM)
    assert step(scheduler) == {0: 1, 1: 4}


def test_what_has_finished_is_found_as_long_as_its_memory_is_not_needed() -> None:
    scheduler = make()
    add(scheduler, 0, (*STEM, 50), max_tokens=1)
    step(scheduler)
    assert not scheduler.has_work
    assert scheduler.pool.num_free == 100
    add(scheduler, 1, (*STEM, 51), max_tokens=1)
    assert step(scheduler) == {1: 1}


def test_what_was_generated_is_not_kept_and_its_memory_is_used_again_before_any_untouched() -> None:
    scheduler = make()
    first = add(scheduler, 0, STEM, max_tokens=10)
    table: list[int] = []
    while scheduler.has_work:
        step(scheduler)
        table = first.block_table or table
    second = add(scheduler, 1, (*STEM, 9, 9, 9, 9, 9, 9, 50))
    assert step(scheduler) == {1: 7}, "the prompt is found, the answer is not"
    assert set(second.block_table) <= set(table)


def test_an_answer_that_another_turn_follows_is_kept() -> None:
    scheduler = make()
    first = RequestState(Request(0, STEM, SamplingParams(max_tokens=10), turn=0, num_turns=2)).sequences[0]
    scheduler.add(first)
    while scheduler.has_work:
        step(scheduler)
    add(scheduler, 1, (*first.token_ids, 50))
    assert step(scheduler) == {1: 3}, "of 23 tokens, 20 are in full blocks"


def test_a_promise_ends_with_a_sequence_that_is_let_go() -> None:
    """Its owner finished half way through its prompt, as when a job stops a row: the next one computes the block."""
    scheduler = make(budget=5)
    owner = add(scheduler, 0, (*STEM, 50))
    add(scheduler, 1, (*STEM, 51))
    assert step(scheduler) == {0: 5}
    scheduler.finish(owner)
    scheduler.check()
    assert step(scheduler) == {1: 5}  # the first block was there, the second is its own to compute


def test_a_preempted_sequence_takes_up_its_own_blocks_again() -> None:
    scheduler = make()
    sequence = add(scheduler, 0, (*STEM, 50), max_tokens=9)
    step(scheduler)
    scheduler._preempt(sequence)
    assert step(scheduler) == {0: 2}  # the token after the last full block, and the one generated
    assert scheduler.num_recomputed_tokens == 1
    assert scheduler.num_cached_tokens == 0, "what it had itself is no hit"


def test_preempted_sequences_wait_for_no_beginning_and_come_back_before_a_fresh_one() -> None:
    """Their common beginning was emptied meanwhile; what waits for it is only ever a fresh sequence."""
    scheduler = make()
    first, second = add(scheduler, 0, (*STEM, 50), max_tokens=9), add(scheduler, 1, (*STEM, 51), max_tokens=9)
    step(scheduler)
    step(scheduler)
    add(scheduler, 2, (*STEM, 52))
    scheduler._preempt(second)
    scheduler._preempt(first)
    scheduler.pool.free(scheduler.pool.allocate(scheduler.pool.num_free))
    assert step(scheduler) == {0: 15, 1: 14}
    assert step(scheduler) == {0: 1, 1: 1, 2: 1}


def test_families_of_many_waiting_rows_do_not_hold_up_the_rest() -> None:
    """More rows wait for one beginning than are passed over in a step; they are admitted when it is there."""
    scheduler = make(num_seqs=200, num_blocks=1000, longest_first=False)
    for key in range(150):
        add(scheduler, key, (*STEM, 50 + key), max_tokens=1)
    assert step(scheduler) == {0: 13}
    computed = 13
    while scheduler.has_work:
        computed += sum(step(scheduler).values())
    assert computed == 12 + 150
