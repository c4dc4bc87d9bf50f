"""The tensors of a step, built from its schedule by a pure function: nothing is cached, nothing else is read."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import torch

from batchgen.engine.schedule import Schedule
from batchgen.kernels.inputs import ModelInput, query_blocks
from batchgen.model.subset import build_subset


def build_input(
    schedule: Schedule, block_size: int, tail_reach: int | None = None, *, is_causal: bool = True
) -> ModelInput:
    """Tensors on the host for one forward pass; see ``ModelInput`` for shapes, ``build_subset`` for ``tail_reach``.

    The scheduled tokens of a sequence are the first ``count`` it owes.
    Logits are asked for the last token of each sequence in ``schedule.completing``, then for the token before each in
    ``schedule.scored``.
    """
    sequences = schedule.sequences
    counts = np.array(schedule.counts, dtype=np.int32)
    starts = np.array(schedule.starts, dtype=np.int32)
    cu_seqlens = np.concatenate((np.zeros(1, np.int32), counts.cumsum(dtype=np.int32)))
    rows = np.repeat(np.arange(len(sequences)), counts)
    positions = np.arange(counts.sum(), dtype=np.int32) - (cu_seqlens[:-1] - starts)[rows]
    tables = _block_tables([s.block_table for s in sequences])
    slots = tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    inputs = ModelInput(
        token_ids=torch.from_numpy(np.array(_token_ids(schedule), dtype=np.int64)),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        slot_mapping=torch.from_numpy(slots),
        block_tables=torch.from_numpy(tables),
        conv_slots=torch.from_numpy(np.array([s.conv_slot for s in sequences], dtype=np.int32)),
        query_blocks=query_blocks(
            *(np.arange(len(sequences)), cu_seqlens[:-1], cu_seqlens[1:], positions, tables, block_size),
            None if is_causal else counts,
        ),
        logits_indices=torch.from_numpy(_logits_indices(schedule, cu_seqlens)),
        subset=None,
        is_causal=is_causal,
        num_alone=int((counts == 1).cumprod().sum()) if is_causal else 0,
        pending=schedule.pending,
    )
    return inputs if tail_reach is None else replace(inputs, subset=build_subset(inputs, block_size, tail_reach))


def _block_tables(of_each: list[array[int]]) -> np.ndarray:
    """The block tables as rows of one width, 0 beyond their ends, int32 [num_seqs, max_blocks]."""
    widths = np.array([*map(len, of_each)])
    tables = np.zeros((len(of_each), widths.max()), dtype=np.int32)
    tables[np.arange(tables.shape[1]) < widths[:, None]] = np.frombuffer(b"".join(of_each), dtype=np.int32)
    return tables


def _token_ids(schedule: Schedule) -> list[int]:
    if schedule.is_single:
        places = zip(schedule.sequences, schedule.starts, strict=True)
        return [s.token_ids[place] for s, place in places]
    token_ids: list[int] = []
    for sequence, count in schedule.entries.items():
        first, end = sequence.num_computed_tokens, sequence.num_computed_tokens + count
        token_ids += sequence.token_ids[first:end]
    return token_ids


def _logits_indices(schedule: Schedule, cu_seqlens: np.ndarray) -> np.ndarray:
    if len(schedule.completing) == len(schedule.entries) and not schedule.scored:
        return cu_seqlens[1:].astype(np.int64) - 1
    bounds = zip(schedule.entries.items(), cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)
    last: list[int] = []
    before_scored: list[int] = []
    for (sequence, count), start, end in bounds:
        if sequence.completes(count):
            last.append(end - 1)
        before_scored += [start + i - 1 - sequence.num_computed_tokens for i in sequence.scored_in(count)]
    return np.array(last + before_scored, dtype=np.int64)
