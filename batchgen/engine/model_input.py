"""The tensors of a step, built from its schedule by a pure function without other inputs or caches."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.schedule import Schedule
from batchgen.kernels.inputs import ModelInput, build_subset, query_blocks


def build_input(
    schedule: Schedule, block_size: int, tail_reach: int | None = None, *, is_causal: bool = True
) -> ModelInput:
    """Tensors on the host for one forward pass; see ``ModelInput`` for shapes, ``build_subset`` for ``tail_reach``.

    The scheduled tokens of a sequence are the first ``count`` that it owes. ``logits_indices`` has the last token of
    each sequence in ``schedule.completing``, then the token before each token in ``schedule.scored``.
    """
    sequences = schedule.sequences
    counts = np.array(schedule.counts, dtype=np.int32)
    starts = np.array(schedule.starts, dtype=np.int32)
    cu_seqlens = np.concatenate((np.zeros(1, np.int32), counts.cumsum(dtype=np.int32)))
    rows = np.repeat(np.arange(len(sequences)), counts)
    positions = np.arange(counts.sum(), dtype=np.int32) - (cu_seqlens[:-1] - starts)[rows]
    tables = _block_tables([s.block_table for s in sequences])
    slots = tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    runs, unseen = _runs(schedule, cu_seqlens, is_causal=is_causal)
    inputs = ModelInput(
        token_ids=torch.from_numpy(np.array(_token_ids(schedule), dtype=np.int64)),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        slot_mapping=torch.from_numpy(slots),
        block_tables=torch.from_numpy(tables),
        conv_slots=torch.from_numpy(np.array([s.conv_slot for s in sequences], dtype=np.int32)),
        query_blocks=query_blocks(*runs.bounds, positions, tables, block_size, runs.reach),
        logits_indices=torch.from_numpy(_logits_indices(schedule, cu_seqlens)),
        subset=None,
        is_causal=is_causal,
        unseen=unseen,
        num_alone=int((counts == 1).cumprod().sum()) if runs.reach is None else 0,
        pending=schedule.pending,
    )
    if tail_reach is None or unseen is not None:  # every token has a vector then
        return inputs
    return replace(inputs, subset=build_subset(inputs, block_size, tail_reach))


class _Runs(NamedTuple):
    """Runs of neighbouring tokens: the sequence, first token and end of each; and ``reach`` as in ``query_blocks``."""

    bounds: tuple[np.ndarray, np.ndarray, np.ndarray]
    reach: np.ndarray | None


def _runs(schedule: Schedule, cu_seqlens: np.ndarray, *, is_causal: bool) -> tuple[_Runs, Tensor | None]:
    """The runs of a step, with unseen tokens in separate runs, and the indexes of the unseen tokens."""
    sequences = schedule.sequences
    every, starts, ends = np.arange(len(sequences)), cu_seqlens[:-1], cu_seqlens[1:]
    if is_causal and not (sequences[0].request.pooling and any(s.request.num_unseen for s in sequences)):
        return _Runs((every, starts, ends), None), None
    seen = np.array([s.num_prompt_tokens - s.request.num_unseen for s in sequences], dtype=np.int32)
    borders = np.clip(starts + seen - np.array(schedule.starts, dtype=np.int32), starts, ends)
    tokens = [np.arange(border, end) for border, end in zip(borders.tolist(), ends.tolist(), strict=True)]
    unseen = np.concatenate(tokens) if (borders < ends).any() else None
    first = np.zeros_like(seen) if is_causal else seen
    parts = (np.repeat(every, 2), np.stack((starts, borders), 1).ravel(), np.stack((borders, ends), 1).ravel())
    reach, is_there = np.stack((first, seen), 1).ravel(), parts[1] < parts[2]
    bounds = parts[0][is_there], parts[1][is_there], parts[2][is_there]
    return _Runs(bounds, reach[is_there]), None if unseen is None else torch.from_numpy(unseen)


def _block_tables(of_each: list[array[int]]) -> np.ndarray:
    """The block tables as rows of one width, 0 beyond their ends, int32 [num_seqs, max_blocks]."""
    widths = np.array([*map(len, of_each)])
    tables = np.zeros((len(of_each), widths.max()), dtype=np.int32)
    tables[np.arange(tables.shape[1]) < widths[:, None]] = np.frombuffer(b"".join(of_each), dtype=np.int32)
    return tables


def _token_ids(schedule: Schedule) -> list[int]:
    if schedule.is_single:
        starts = zip(schedule.sequences, schedule.starts, strict=True)
        return [s.token_ids[start] for s, start in starts]
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
