"""The block pool: every block is free or held, after any sequence of calls, and content lives as long as it can."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batchgen.engine.block_pool import BlockPool, extend_block_hashes


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


class PoolMachine(RuleBasedStateMachine):
    """Sequences that come, share a prefix, fill blocks and leave, against a model that is a list and two dicts.

    The content of a block is the tuple of all tokens up to its end, as a digest stands for: a prompt is a string over
    a few letters, a block holds one letter.
    """

    @initialize(num_blocks=st.integers(1, 9))
    def begin(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.tables: list[tuple[str, list[int]]] = []  # of running sequences: text so far, blocks
        self.content: dict[int, str] = {}  # what a known block holds
        self.unused: list[int] = []  # known blocks that nobody holds, in the order in which they were let go
        self.found_again: set[int] = set()

    def held(self) -> list[int]:
        return [block for _, table in self.tables for block in table]

    @rule(text=st.text("ab", min_size=1, max_size=6))
    def arrive(self, text: str) -> None:
        found = self.pool.find([text[: n + 1].encode() for n in range(len(text))])
        known = {content: block for block, content in self.content.items()}
        expected = []
        for n in range(len(text)):
            if text[: n + 1] not in known:
                break
            expected.append(known[text[: n + 1]])
        assert found == expected, "content survives until its memory is needed, and no longer"
        held = self.held()
        assert self.pool.num_unused(found) == sum(block not in held for block in found)
        fresh = len(text) - len(found)
        if fresh > self.pool.num_free - self.pool.num_unused(found):
            return
        self.pool.share(found)
        self.found_again.update(found)
        self.unused = [block for block in self.unused if block not in found]
        taken = self.pool.allocate(fresh)
        self.note_taken(taken, held + found)
        self.tables.append((text, found + taken))
        for n in range(len(found), len(text)):
            self.label(found + taken, text, n)

    def note_taken(self, taken: list[int], held: list[int]) -> None:
        assert not set(taken) & set(held), "a block that somebody holds was handed out"
        evicted = [block for block in taken if block in self.content]
        for found_again in (self.found_again.__contains__, lambda block: block not in self.found_again):
            unused, gone = (list(filter(found_again, blocks)) for blocks in (self.unused, evicted))
            assert gone == unused[: len(gone)], "the one unused longest goes first"
        assert not evicted or taken[-len(evicted) :] == evicted, "blocks without content go before those with"
        self.unused = [block for block in self.unused if block not in evicted]
        for block in evicted:
            del self.content[block]
            self.found_again.discard(block)

    def label(self, table: list[int], text: str, n: int) -> None:
        self.pool.register(table[n], text[: n + 1].encode())
        if text[: n + 1] not in self.content.values():
            self.content[table[n]] = text[: n + 1]

    @precondition(lambda self: self.tables and self.pool.num_free)
    @rule(data=st.data(), letter=st.sampled_from("ab"), is_full=st.booleans())
    def grow(self, data: st.DataObject, letter: str, is_full: bool) -> None:
        """One more block, maybe never filled: then nobody may find it, nor what would follow."""
        place = data.draw(st.integers(0, len(self.tables) - 1))
        text, table = self.tables[place]
        if len(text) < len(table):
            return
        taken = self.pool.allocate(1)
        self.note_taken(taken, self.held())
        table += taken
        if is_full:
            self.tables[place] = (text + letter, table)
            self.label(table, text + letter, len(text))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        _, table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        forgotten = table[data.draw(st.integers(0, len(table))) :]
        self.pool.unregister(forgotten)
        for block in set(forgotten) - set(self.held()):
            self.content.pop(block, None)
            self.found_again.discard(block)
        self.pool.free(table)
        self.unused += [b for b in reversed(table) if b in self.content and b not in self.held()]

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check(self.held())
            assert self.pool.num_free == self.pool.num_blocks - len(set(self.held()))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


TOKENS = st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 1), max_size=30)


def digests(token_ids: list[int], block_size: int) -> list[bytes]:
    found: list[bytes] = []
    extend_block_hashes(found, token_ids, block_size)
    assert len(found) == len(token_ids) // block_size
    return found


@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12), st.integers(1, 4))
def test_two_are_equal_exactly_if_all_tokens_up_to_them_are(one: list[int], other: list[int], block_size: int) -> None:
    """Blocks of equal content in different places, or behind different ones, must not be taken for each other."""
    for i, mine in enumerate(digests(one, block_size), 1):
        for j, theirs in enumerate(digests(other, block_size), 1):
            assert (mine == theirs) == (one[: i * block_size] == other[: j * block_size])


@given(TOKENS, st.integers(1, 5), st.lists(st.integers(0, 30), max_size=5))
def test_extended_bit_by_bit_they_are_as_made_at_once(token_ids: list[int], block_size: int, stops: list[int]) -> None:
    grown: list[bytes] = []
    for stop in [*sorted(stops), len(token_ids)]:
        extend_block_hashes(grown, token_ids[:stop], block_size)
    assert grown == digests(token_ids, block_size)
