"""The tensors of a step, built from its schedule by a pure function: nothing is cached, nothing else is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.schedule import Schedule
from batchgen.engine.sequence import Sequence
from batchgen.kernels.inputs import LogitsSubset, ModelInput, query_blocks, upload


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Ids of tokens that the step before sampled, passed on to this step without leaving the device.

    Attributes:
        token_ids: int64 [num_sampled] on the device, -1 for a row of logits that is not finite.
        rows: int64 [num_pending] on the host, which of them are wanted; None: they are this step's tokens in order.
        places: int64 [num_pending] on the host, where they go among this step's tokens; None as ``rows`` is.
    """

    token_ids: Tensor
    rows: Tensor | None = None
    places: Tensor | None = None

    @torch.inference_mode()
    def into(self, token_ids: Tensor) -> None:
        """Write the ids into ``token_ids``, in launch order; -1 becomes 0, as it must not index the embeddings."""
        if self.rows is None or self.places is None:
            torch.clamp(self.token_ids, min=0, out=token_ids[: len(self.token_ids)])
            return
        rows, places = upload(torch.stack((self.rows, self.places)), token_ids.device)
        token_ids[places] = self.token_ids[rows].clamp(min=0)


def build_pending(schedule: Schedule, sampled: Sequence_[object], token_ids: Tensor) -> PendingTokens | None:
    """The pending tokens of a schedule; None without any. ``token_ids`` has one row per owner in ``sampled``.

    A pending token is the only one that its sequence owes.
    """
    sequences = schedule.sequences
    pending = np.flatnonzero(schedule.pending)
    if not len(pending):
        return None
    rows = pending
    if sampled == sequences:
        if schedule.is_single and len(pending) == len(sequences):
            return PendingTokens(token_ids)
    else:
        row_of = dict(zip(sampled, range(len(sampled)), strict=True))
        rows = np.array([row_of[s] for s in sequences if s.num_pending])
    places = pending if schedule.is_single else np.cumsum(schedule.counts)[pending] - 1
    return PendingTokens(token_ids, torch.from_numpy(rows), torch.from_numpy(places))


def build_input(schedule: Schedule, block_size: int, tail_reach: int | None = None) -> ModelInput:
    """CPU tensors for one forward pass; see ``ModelInput`` for shapes, ``build_subset`` for ``tail_reach``.

    The scheduled tokens of a sequence are the first ``count`` it owes; a pending token is 0, see ``PendingTokens``. Of
    several decode steps this is the first; ``inputs_of`` makes the others.
    Logits are asked for the last token of each sequence in ``schedule.completing`` and for its drafts, then for the
    token before each in ``schedule.scored``.
    """
    sequences = schedule.sequences
    counts = np.array(schedule.counts if schedule.num_steps == 1 else [1] * len(sequences), dtype=np.int32)
    if schedule.drafts:
        counts += np.array([len(schedule.drafts.get(s, ())) for s in sequences], dtype=np.int32)
    starts = np.array(schedule.starts, dtype=np.int32)
    cu_seqlens = np.concatenate((np.zeros(1, np.int32), counts.cumsum(dtype=np.int32)))
    rows = np.repeat(np.arange(len(sequences)), counts)
    positions = np.arange(counts.sum(), dtype=np.int32) - (cu_seqlens[:-1] - starts)[rows]
    tables = _block_tables(sequences)
    slots = tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    inputs = ModelInput(
        token_ids=torch.from_numpy(np.array(_token_ids(schedule), dtype=np.int64)),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        slot_mapping=torch.from_numpy(slots),
        block_tables=torch.from_numpy(tables),
        conv_slots=torch.from_numpy(np.array([s.conv_slot for s in sequences], dtype=np.int32)),
        conv_rejected=torch.from_numpy(np.array([s.num_rejected for s in sequences], dtype=np.int32)),
        query_blocks=query_blocks(
            np.arange(len(sequences)), cu_seqlens[:-1], cu_seqlens[1:], positions, tables, block_size
        ),
        logits_indices=torch.from_numpy(_logits_indices(schedule, cu_seqlens)),
        subset=None,
    )
    return inputs if tail_reach is None else replace(inputs, subset=build_subset(inputs, block_size, tail_reach))


def inputs_of(schedule: Schedule, block_size: int) -> Iterator[ModelInput]:
    """The CPU tensors of each step of a burst, whose tokens are pending from the second on.

    They differ in positions, which go on up to the last that the sequence has a block for.
    """
    inputs = build_input(schedule, block_size)
    yield inputs
    rows, tables = np.arange(inputs.num_seqs), inputs.block_tables.numpy()
    starts = inputs.positions.numpy()
    most = np.array(schedule.counts, dtype=np.int32) - 1
    for step in range(1, schedule.num_steps):
        positions = starts + np.minimum(most, step)
        slots = tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
        nothing = torch.zeros_like(inputs.token_ids)
        now = torch.from_numpy(positions), torch.from_numpy(slots)
        yield replace(inputs, token_ids=nothing, positions=now[0], slot_mapping=now[1])


def _block_tables(sequences: Sequence_[Sequence]) -> np.ndarray:
    """The block tables as rows of one width, 0 beyond their ends, int32 [num_seqs, max_blocks]."""
    widths = np.array([len(s.block_table) for s in sequences])
    tables = np.zeros((len(sequences), widths.max()), dtype=np.int32)
    tables[np.arange(tables.shape[1]) < widths[:, None]] = np.frombuffer(
        b"".join([s.block_table for s in sequences]), dtype=np.int32
    )
    return tables


def _token_ids(schedule: Schedule) -> list[int]:
    if all(schedule.pending):
        return [0] * len(schedule.entries)
    if schedule.is_single and not schedule.drafts:
        places = zip(schedule.sequences, schedule.starts, strict=True)
        return [0 if s.num_pending else s.token_ids[place] for s, place in places]
    token_ids: list[int] = []
    for sequence, count in schedule.entries:
        first, end = sequence.num_computed_tokens, sequence.num_computed_tokens + count
        token_ids += [0] if sequence.num_pending else sequence.token_ids[first:end]
        token_ids += schedule.drafts.get(sequence, ())
    return token_ids


def _logits_indices(schedule: Schedule, cu_seqlens: np.ndarray) -> np.ndarray:
    if len(schedule.completing) == len(schedule.entries) and not (schedule.drafts or schedule.scored):
        return cu_seqlens[1:].astype(np.int64) - 1
    bounds = zip(schedule.entries, cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)
    last: list[int] = []
    before_scored: list[int] = []
    for (sequence, count), start, end in bounds:
        if sequence.completes(count):
            last += range(end - 1 - len(schedule.drafts.get(sequence, ())), end)
        before_scored += [start + i - 1 - sequence.num_computed_tokens for i in sequence.scored_in(count)]
    return np.array(last + before_scored, dtype=np.int64)


def build_subset(inputs: ModelInput, block_size: int, reach: int) -> LogitsSubset | None:
    """The tokens of CPU ``inputs`` that later results depend on after the last attention; None if all of them are.

    The convolutions behind the last attention reach back ``reach`` tokens in all. So logits need a token and ``reach``
    before it; the convolution state kept where a chunk or a KV block ends needs the last ``reach`` tokens. One token
    per sequence is kept in any case: kernels never see a sequence without tokens.
    """
    if inputs.num_tokens == inputs.num_seqs:
        return None
    positions, cu_seqlens, logits = (t.numpy() for t in (inputs.positions, inputs.cu_seqlens, inputs.logits_indices))
    sequences = np.repeat(np.arange(inputs.num_seqs), np.diff(cu_seqlens))
    changes = np.zeros(inputs.num_tokens + 1, dtype=np.int64)  # in the number of wanted tokens that need a token
    borders = np.flatnonzero((positions + 1) % block_size == 0)
    for wanted, count in ((logits, reach + 1), (borders, reach), (cu_seqlens[1:] - 1, max(reach, 1))):
        np.add.at(changes, np.maximum(wanted + 1 - count, cu_seqlens[sequences[wanted]]), 1)
        np.add.at(changes, wanted + 1, -1)
    rows = np.flatnonzero(changes[:-1].cumsum())
    if len(rows) == inputs.num_tokens:
        return None
    kept, bounds = torch.from_numpy(rows), np.searchsorted(rows, cu_seqlens)
    begins_run = np.diff(rows, prepend=-2) > 1
    begins_run[bounds[:-1]] = True
    starts = np.flatnonzero(begins_run)
    narrowed = ModelInput(
        token_ids=inputs.token_ids[kept],
        positions=inputs.positions[kept],
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        slot_mapping=inputs.slot_mapping[kept],
        block_tables=inputs.block_tables,
        conv_slots=inputs.conv_slots,
        conv_rejected=inputs.conv_rejected,
        query_blocks=query_blocks(
            sequences[rows[starts]],
            starts,
            np.append(starts[1:], len(rows)),
            positions[rows],
            inputs.block_tables.numpy(),
            block_size,
        ),
        logits_indices=torch.from_numpy(np.searchsorted(rows, logits)),
        subset=None,
    )
    return LogitsSubset(kept, narrowed)


@dataclass(frozen=True, slots=True)
class Copy:
    """Token ids on their way to the host: ``wait`` returns them, ``is_done`` whether the device has come so far."""

    wait: Callable[[], list[int]]
    is_done: Callable[[], bool] = lambda: True


def fetch_ids(token_ids: Tensor) -> Copy:
    """Begin to copy int64 ids to the host, behind all work launched so far; later launches are not waited for."""
    if token_ids.device.type != "cuda":
        return Copy(token_ids.tolist)
    host = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
    host.copy_(token_ids, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    copied.record()

    def wait() -> list[int]:
        copied.synchronize()
        return host.tolist()

    return Copy(wait, copied.query)
