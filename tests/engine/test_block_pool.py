"""The block pool: every block is free or held, once, after any sequence of calls."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.block_pool import BlockPool


def test_all_blocks_are_handed_out_once() -> None:
    pool = BlockPool(5)
    held = pool.allocate(2) + pool.allocate(3)
    assert sorted(held) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    pool.check(held)


def test_the_block_freed_first_in_a_table_is_reused_first() -> None:
    pool = BlockPool(8)
    held = pool.allocate(4)
    pool.free(held)
    assert pool.allocate(4) == held


def test_nothing_is_taken_when_too_few_are_free() -> None:
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="asked for 4 blocks, 3 are free"):
        pool.allocate(4)
    pool.check([])


def test_a_block_freed_twice_is_caught() -> None:
    pool = BlockPool(3)
    held = pool.allocate(1)
    pool.free(held)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(held)


@pytest.mark.parametrize("held", [[], [0, 1, 2], [0, 0], [3, 4]], ids=str)
def test_check_notices_what_is_lost_doubled_or_invented(held: list[int]) -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(2)) == [0, 1]
    with pytest.raises(AssertionError):
        pool.check(held)


@settings(max_examples=200, deadline=None)
@given(num_blocks=st.integers(0, 12), calls=st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40))
def test_free_and_held_make_the_total_after_any_calls(num_blocks: int, calls: list[tuple[bool, int]]) -> None:
    pool = BlockPool(num_blocks)
    held: list[int] = []
    for is_allocation, count in calls:
        if is_allocation:
            held += pool.allocate(min(count, pool.num_free))
        else:
            back, held = held[:count], held[count:]
            pool.free(back)
        pool.check(held)
        assert pool.num_free + len(held) == num_blocks
