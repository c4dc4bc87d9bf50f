"""Digests of prefixes: equal for equal tokens from the start on, and for nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine.prefix import extend_digests

TOKENS = st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 1), max_size=30)


def digests(token_ids: list[int], block_size: int) -> list[bytes]:
    found: list[bytes] = []
    extend_digests(found, token_ids, block_size)
    return found


@given(TOKENS, st.integers(1, 8))
def test_there_is_one_for_each_full_block(token_ids: list[int], block_size: int) -> None:
    assert len(digests(token_ids, block_size)) == len(token_ids) // block_size


@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12), st.integers(1, 4))
def test_two_are_equal_exactly_if_all_tokens_up_to_them_are(one: list[int], other: list[int], block_size: int) -> None:
    """Blocks of equal content in different places, or behind different ones, must not be taken for each other."""
    for i, mine in enumerate(digests(one, block_size), 1):
        for j, theirs in enumerate(digests(other, block_size), 1):
            assert (mine == theirs) == (one[: i * block_size] == other[: j * block_size])


@given(TOKENS, st.integers(1, 5), st.lists(st.integers(0, 30), max_size=5))
def test_extended_bit_by_bit_they_are_those_made_at_once(
    token_ids: list[int], block_size: int, stops: list[int]
) -> None:
    grown: list[bytes] = []
    for stop in [*sorted(stops), len(token_ids)]:
        extend_digests(grown, token_ids[:stop], block_size)
    assert grown == digests(token_ids, block_size)
