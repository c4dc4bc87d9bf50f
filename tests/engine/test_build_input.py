"""From a schedule to tensors, against a twin in plain Python that is too slow to be wrong."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import sequence_at

from batchgen.engine.model_input import build_input
from batchgen.engine.schedule import Schedule
from batchgen.engine.sequence import Sequence
from batchgen.kernels.inputs import QUERY_BLOCK

DTYPES = {
    "token_ids": torch.int64,
    "positions": torch.int32,
    "cu_seqlens": torch.int32,
    "slot_mapping": torch.int64,
    "block_tables": torch.int32,
    "conv_slots": torch.int32,
    "query_blocks": torch.int32,
    "logits_indices": torch.int64,
}


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Schedule, int]:
    """Sequences anywhere in their lives, with distinct blocks in any order, and the block size."""
    block_size = draw(st.sampled_from([1, 2, 3, 5, 16, 32]))
    entries: list[tuple[Sequence, int]] = []
    lives = draw(
        st.lists(st.tuples(st.integers(0, 70), st.integers(1, 45), st.integers(0, 20)), min_size=1, max_size=6)
    )
    needed = [-(-(past + count) // block_size) for past, count, _ in lives]
    deck = draw(st.permutations(range(sum(needed))))
    slots = draw(st.permutations(range(len(lives))))
    for (past, count, later), blocks, slot in zip(lives, needed, slots, strict=True):
        tokens = [1000 * len(entries) + i for i in range(past + count + later)]
        entries.append((sequence_at(tokens, past, [deck.pop() for _ in range(blocks)], slot), count))
    return Schedule(dict(entries)), block_size


def twin(schedule: Schedule, block_size: int) -> dict[str, list[object]]:
    """Token by token."""
    fields: dict[str, list[object]] = {name: [] for name in DTYPES}
    fields["cu_seqlens"] = [0]
    most_blocks = max(len(sequence.block_table) for sequence in schedule.entries)
    token = 0
    for row, (sequence, count) in enumerate(schedule.entries.items()):
        for i in range(count):
            position = sequence.num_computed_tokens + i
            fields["token_ids"].append(sequence.token_ids[position])
            fields["positions"].append(position)
            block = sequence.block_table[position // block_size]
            fields["slot_mapping"].append(block * block_size + position % block_size)
            if i % QUERY_BLOCK == 0:
                fields["query_blocks"].append([row, token, min(QUERY_BLOCK, count - i), 0, 0, 0])
            token += 1
        fields["cu_seqlens"].append(token)
        padding = [0] * (most_blocks - len(sequence.block_table))
        fields["block_tables"].append([*sequence.block_table, *padding])
        fields["conv_slots"].append(sequence.conv_slot)
        if sequence.num_computed_tokens + count == len(sequence.token_ids):
            fields["logits_indices"].append(token - 1)
    return fields


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_inputs_equal_those_built_token_by_token_as_kernels_read_them(case: tuple[Schedule, int]) -> None:
    schedule, block_size = case
    expected = twin(schedule, block_size)
    inputs = build_input(schedule, block_size)
    for name, numbers in expected.items():
        tensor = getattr(inputs, name)
        assert (tensor.tolist(), tensor.dtype, tensor.is_contiguous()) == (numbers, DTYPES[name], True), name
    assert (inputs.num_tokens, inputs.num_seqs) == (schedule.num_tokens, len(schedule.entries))
    assert twin(schedule, block_size) == expected, "the sequences have changed"
