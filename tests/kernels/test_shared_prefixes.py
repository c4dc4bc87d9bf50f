"""Sequences whose block tables begin alike attend to those blocks side by side: bit for bit as each by itself.

Caches are poisoned as in the other tests of attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, Case, KvDtype, Shape, attend_over, every_dtype, make_case, poisoned_cache
from tiny_model import sequence_at

from batchgen.engine.model_input import build_input
from batchgen.engine.schedule import Schedule
from batchgen.kernels.cpu import backend
from batchgen.kernels.cpu.backend import CpuKernels
from batchgen.kernels.inputs import MIN_SHARED, QUERY_BLOCK, ModelInput

# (num_heads, num_kv_heads, head_dim); many KV heads make many items, so that an item has many sequences
HEADS = [(3, 3, 16), (8, 8, 16), (16, 8, 16), (32, 8, 16), (24, 8, 8), (12, 4, 24), (5, 1, 40), (4, 2, 128)]
# (which sequence before it, how many of whose blocks it begins with, tokens of its own, how many of them in this step)
Life = tuple[int, int, int, int]


def tables_of(lives: Sequence[Life], block_size: int) -> tuple[list[list[int]], list[tuple[int, int]], int]:
    """Block tables, (tokens cached before, tokens of this step), and the number of blocks. Few may be taken over."""
    tables: list[list[int]] = []
    pieces: list[tuple[int, int]] = []
    deck = np.random.default_rng(0).permutation(10_000).tolist()
    for parent, taken, own, count in lives:
        full = pieces[parent % len(pieces)][0] // block_size if tables else 0
        table = tables[parent % len(tables)][: min(taken, full)] if tables else []
        total = len(table) * block_size + own
        pieces.append((total - min(count, own), min(count, own)))
        tables.append(table + [deck.pop() for _ in range(-(-total // block_size) - len(table))])
    numbers = {block: i for i, block in enumerate(sorted({block for table in tables for block in table}))}
    return [[numbers[block] for block in table] for table in tables], pieces, len(numbers) + 1


def inputs_of(tables: list[list[int]], pieces: list[tuple[int, int]], block_size: int) -> ModelInput:
    entries = [
        (sequence_at([9] * (past + count), past, table, row, key=row), count)
        for row, (table, (past, count)) in enumerate(zip(tables, pieces, strict=True))
    ]
    return build_input(Schedule(dict(entries)), block_size)


def shared_case(tables: list[list[int]], case: Case, block_size: int) -> Case:
    """The case with the same keys and values wherever two sequences have the same block."""
    for row, table in enumerate(tables):
        for index, block in enumerate(table):
            owner = next(other for other in tables if block in other)
            if owner is not table:
                part = slice(index * block_size, (index + 1) * block_size)
                case.keys[row][part] = case.keys[tables.index(owner)][part]
                case.values[row][part] = case.values[tables.index(owner)][part]
    return case


def alone(inputs: ModelInput) -> ModelInput:
    """The inputs as if each sequence had its blocks by itself."""
    blocks = inputs.query_blocks.clone()
    blocks[:, 3:] = 0
    return replace(inputs, query_blocks=blocks)


def groups_of(inputs: ModelInput) -> list[list[list[int]]]:
    groups: list[list[list[int]]] = []
    for row in inputs.query_blocks.tolist():
        if row[3]:
            assert row[3] == len(groups[-1]), "places count on"
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


lives = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 24), st.integers(1, 300), st.sampled_from([1, 1, 1, 2, 5, 40])),
    min_size=2,
    max_size=9,
)


@given(
    lives,
    st.sampled_from([16, 24, 32, 96]),
    st.sampled_from(HEADS),
    st.sampled_from(DTYPES),
    st.sampled_from([0, 0, 600, 100]),
    st.sampled_from([1, 2]),
)
@settings(max_examples=50, deadline=None)
@pytest.mark.usefixtures("threads_as_before")
def test_bits_are_those_of_each_sequence_by_itself(
    lives: list[Life],
    block_size: int,
    heads: Shape,
    dtypes: tuple[torch.dtype, torch.dtype | None],
    window: int,
    threads: int,
) -> None:
    torch.set_num_threads(threads)
    assert_as_alone(lives, block_size, heads, dtypes, window)


@pytest.mark.parametrize("heads", [(8, 8, 32), (6, 2, 64), (4, 1, 128)], ids=str)
@pytest.mark.usefixtures("attention_by_tiles")
def test_bits_by_tiles_are_those_of_each_sequence_by_itself(heads: Shape) -> None:
    lives = [(0, 16, own, count) for own, count in ((5, 1), (270, 1), (33, 1), (90, 3), (60, 40), (7, 1), (9, 1))]
    assert_as_alone(lives, 32, heads, (torch.bfloat16, None), 0)
    assert_as_alone(lives, 24, heads, (torch.bfloat16, None), 600)


def assert_as_alone(
    lives: list[Life], block_size: int, heads: Shape, dtypes: tuple[torch.dtype, KvDtype], window: int
) -> None:
    """Assert that sequences attend as by themselves; the first has 600 tokens, which others may begin with."""
    tables, pieces, num_blocks = tables_of([(0, 0, 600, 1), *lives], block_size)
    made = make_case(pieces, heads, dtypes[0], 7, dtypes[1], window, is_gated=window > 0)
    case, inputs = shared_case(tables, made, block_size), inputs_of(tables, pieces, block_size)
    cache = poisoned_cache(case, inputs, num_blocks, block_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "MAX_HEADS", 1)
        expected = attend_over(CpuKernels(), case, alone(inputs), cache)
    assert all(map(torch.equal, attend_over(CpuKernels(), case, inputs, cache), expected))


@given(lives, st.sampled_from([1, 16, 24, 32, 96, 300]))
def test_groups_hold_every_token_once_and_share_what_they_say(lives: list[Life], block_size: int) -> None:
    tables, pieces, _ = tables_of([(0, 0, 600, 1), *lives], block_size)
    inputs = inputs_of(tables, pieces, block_size)
    covered = [t for _, first, count, *_ in inputs.query_blocks.tolist() for t in range(first, first + count)]
    assert sorted(covered) == list(range(inputs.num_tokens))
    for group in groups_of(inputs):
        if len(group) > 1:
            assert sum(row[2] for row in group) <= QUERY_BLOCK
            (shared,) = {row[4] for row in group}
            assert shared >= MIN_SHARED
            assert all(inputs.positions[row[1]] >= shared for row in group)
            assert len({tuple(tables[row[0]][: -(-shared // block_size)]) for row in group}) == 1
        else:
            assert group[0][4] == 0


def test_what_most_share_is_found_in_any_order() -> None:
    """Documents of their own behind one system prompt: four sequences each, and one that shares with nobody."""
    few_shot = [(0, 0, 700, 1)] + [(0, 8, 600, 1)] * 2 + [(1, 26, 40, 1), (2, 26, 50, 1), (0, 20, 60, 1)] * 3
    tables, pieces, _ = tables_of([*few_shot, (0, 0, 500, 1)], 32)
    order = np.random.default_rng(1).permutation(len(tables)).tolist()
    inputs = inputs_of([tables[i] for i in order], [pieces[i] for i in order], 32)
    found = sorted((sorted(order[row[0]] for row in group), group[0][4]) for group in groups_of(inputs))
    assert found == [([0, 5, 8, 11], 640), ([1, 3, 6, 9], 832), ([2, 4, 7, 10], 832), ([12], 0)]


@every_dtype
def test_shared_blocks_are_read_through_the_first_table_alone(dtype: torch.dtype, kv_cache_dtype: KvDtype) -> None:
    """Tables of the others lead to poison there, so that a second reading would show."""
    tables, pieces, num_blocks = tables_of([(0, 0, 530, 1), *[(0, 16, own, 1) for own in (5, 270, 33, 1)]], 32)
    made = make_case(pieces, (16, 8, 16), dtype, 7, kv_cache_dtype)
    case, inputs = shared_case(tables, made, 32), inputs_of(tables, pieces, 32)
    cache = poisoned_cache(case, inputs, num_blocks, 32)
    expected = attend_over(CpuKernels(), case, inputs, cache)
    inputs.block_tables[inputs.query_blocks[1:, 0].long(), :16] = num_blocks - 1
    assert all(map(torch.equal, attend_over(CpuKernels(), case, inputs, cache), expected))


def test_what_one_sequence_adds_spoils_no_other() -> None:
    tables, pieces, num_blocks = tables_of([(0, 0, 540, 2), *[(0, 16, own, 3) for own in (5, 270, 33, 90)]], 32)
    case = shared_case(tables, make_case(pieces, (8, 8, 16), torch.bfloat16, 7), 32)
    inputs = inputs_of(tables, pieces, 32)
    clean = attend_over(CpuKernels(), case, inputs, poisoned_cache(case, inputs, num_blocks, 32))
    case.keys[2][-1], case.values[2][-1] = torch.nan, torch.inf
    dirty = attend_over(CpuKernels(), case, inputs, poisoned_cache(case, inputs, num_blocks, 32))
    for row in range(5):
        assert torch.equal(dirty[row], clean[row]) == (row != 2)
