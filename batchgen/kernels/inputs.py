"""The tensors of one forward pass over a ragged batch: inputs that the engine builds, and the model's outputs.

All sequences' tokens are concatenated along one axis without padding; other tensors map them to sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

QUERY_BLOCK = 16  # most tokens in one work item of attention
MIN_SHARED = 256  # positions that are worth attending to for several sequences at once: a tile of the CPU's


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device, to a GPU from pinned memory, so that the host does not wait for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Inputs of one step: ``num_tokens`` tokens of ``num_seqs`` sequences.

    Attributes:
        token_ids: int64 [num_tokens].
        positions: int32 [num_tokens], each token's place in its own sequence.
        cu_seqlens: int32 [num_seqs + 1], where each sequence's tokens start; the last is num_tokens.
        slot_mapping: int64 [num_tokens], block * block_size + offset: where a token's keys and values go.
        block_tables: int32 [num_seqs, max_blocks], the blocks of each sequence in order; 0 beyond its end.
        conv_slots: int32 [num_seqs], each sequence's row of convolution state.
        query_blocks: int32 [num_blocks, 6] of (sequence, first token, count, place, shared, reach): the tokens in
            pieces of at most ``QUERY_BLOCK`` that belong to one sequence. Pieces with consecutive places from 0 on
            belong to sequences that share the KV blocks of their first ``shared`` positions, so that a back end may
            read these once; together they hold at most ``QUERY_BLOCK`` tokens. A token attends to the positions up to
            its own, or to the first ``reach`` if that is not 0.
        logits_indices: int64 [num_logits], the tokens whose logits are needed.
        subset: the tokens that the last layers still compute; None if they compute all.
        is_causal: whether a token sees the tokens up to itself; if not, its whole text, which is then in one step.
        unseen: int64 [num_unseen], tokens that others do not attend to, with zero as inputs of convolutions; or None.
        num_alone: the first ``num_alone`` tokens are the only ones of their sequences in this step. They are also the
            first of ``subset``. Back ends may ignore it.
        pending: tokens whose ids only the device knows, or None; ``token_ids`` has placeholders for them.
    """

    token_ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    conv_slots: Tensor
    query_blocks: Tensor
    logits_indices: Tensor
    subset: LogitsSubset | None
    is_causal: bool = True
    unseen: Tensor | None = None
    num_alone: int = 0
    pending: PendingTokens | None = None

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()

    @property
    def num_seqs(self) -> int:
        return self.conv_slots.numel()

    @property
    def num_seen(self) -> Tensor:
        """Positions, counted from the first on, that each token attends to without a window; int32 [num_tokens]."""
        seen = self.positions + 1
        for _, first, count, _, _, reach in self.query_blocks.tolist():
            if reach:
                seen[first : first + count] = reach
        return seen

    @property
    def is_decode(self) -> bool:
        """Whether each sequence has one token, which attends to those before it, and all logits are wanted."""
        is_single = self.is_causal and self.num_tokens == self.num_seqs
        return is_single and torch.equal(self.logits_indices, torch.arange(self.num_tokens))

    def to(self, device: torch.device) -> ModelInput:
        if device.type == "cpu":
            return self
        subset = self.subset and LogitsSubset(upload(self.subset.rows, device), self.subset.inputs.to(device))
        fields = {name: getattr(self, name) for name in self.__slots__}
        moved: dict[str, Any] = {n: upload(field, device) for n, field in fields.items() if isinstance(field, Tensor)}
        return replace(self, **moved, subset=subset)


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Ids of tokens that the last step sampled, passed on to this step without leaving the device.

    Attributes:
        token_ids: int64 [num_sampled] on the device, -1 for a row of logits that is not finite.
        rows, targets: int64 [num_pending] on the host, which ids and for which tokens of this step; None: all in order.
    """

    token_ids: Tensor
    rows: Tensor | None = None
    targets: Tensor | None = None

    @torch.inference_mode()
    def into(self, token_ids: Tensor) -> None:
        """Write the ids into ``token_ids``, in launch order; -1 becomes 0, as it must not index the embeddings."""
        if self.rows is None or self.targets is None:
            torch.clamp(self.token_ids, min=0, out=token_ids[: len(self.token_ids)])
            return
        rows, targets = upload(torch.stack((self.rows, self.targets)), token_ids.device)
        token_ids[targets] = self.token_ids[rows].clamp(min=0)


class StepOutput(NamedTuple):
    """Result of a step: logits [num_rows, vocab_size], and maybe ``argmax_ids``.

    These are int64 [num_rows] on the device, the likeliest token of each row, -1 for a row that is not finite. The next
    step overwrites both.
    """

    logits: Tensor
    argmax_ids: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LogitsSubset:
    """The tokens that the last layers still have to compute, because logits or a state depend on them.

    Attributes:
        rows: int64 [num_kept], which tokens of the step they are, in order.
        inputs: the same step with these tokens alone. A sequence's tokens may have gaps, but not within a piece of
            ``query_blocks``; needed tokens do not depend on others across a gap.
    """

    rows: Tensor
    inputs: ModelInput


def query_blocks(
    sequences: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    positions: np.ndarray,
    tables: np.ndarray,
    size: int,
    reach: np.ndarray | None = None,
) -> Tensor:
    """``ModelInput.query_blocks`` of runs of neighbouring tokens: ``starts[i]`` to ``ends[i]``, of ``sequences[i]``.

    ``positions`` are the positions of all tokens, ``tables`` the block tables of all sequences, with blocks of
    ``size``. With ``reach``, run i attends to the first ``reach[i]`` positions, or up to its own if that is 0.
    """
    run, first = np.arange(len(starts)), starts
    if len(positions) > len(starts):
        pieces = -(-(ends - starts) // QUERY_BLOCK)
        run = np.repeat(run, pieces)
        before = np.concatenate((np.zeros(1, np.int64), pieces.cumsum()[:-1]))
        first = starts[run] + (np.arange(len(run)) - before[run]) * QUERY_BLOCK
    blocks = np.zeros((len(run), 6), dtype=np.int32)
    blocks[:, 0], blocks[:, 1] = sequences[run], first
    blocks[:, 2] = np.minimum(ends[run] - first, QUERY_BLOCK)
    if reach is not None:
        blocks[:, 5] = reach[run]
        return torch.from_numpy(blocks)
    return torch.from_numpy(_share_prefixes(blocks, positions[first], tables, size))


def _share_prefixes(blocks: np.ndarray, past: np.ndarray, tables: np.ndarray, size: int) -> np.ndarray:
    """Query blocks, sorted so that those that share ``MIN_SHARED`` positions come first, next to each other.

    ``past`` is the number of positions before each block. Only the ids of KV blocks are compared. Comparing the last of
    the shared blocks is enough to see that no two sequences share.
    """
    few = np.flatnonzero((past >= MIN_SHARED) & (blocks[:, 2] <= QUERY_BLOCK // 2))
    last = np.sort(tables[blocks[few, 0], (MIN_SHARED - 1) // size] if len(few) else few)
    if not (last[1:] == last[:-1]).any():
        return blocks
    owned = [tables[sequence].tobytes() for sequence in blocks[few, 0]]
    ordered = few[sorted(range(len(few)), key=owned.__getitem__)]  # equal prefixes become neighbours
    own = tables[blocks[ordered, 0]]
    differs = np.pad(own[1:] != own[:-1], ((0, 0), (0, 1)), constant_values=True)
    common = np.minimum(differs.argmax(axis=1) * size, np.minimum(past[ordered[1:]], past[ordered[:-1]]))
    groups: list[list[int]] = [[int(ordered[0])]]
    shared, counts = [0], blocks[:, 2].tolist()
    for row, reach in zip(ordered[1:].tolist(), common.tolist(), strict=True):
        group, num_common = groups[-1], min(shared[-1] or reach, reach)
        is_worth_it = num_common >= MIN_SHARED and max(shared[-1], reach) <= 2 * num_common
        if is_worth_it and sum(counts[member] for member in (*group, row)) <= QUERY_BLOCK:
            group.append(row)
            shared[-1] = num_common
        else:
            groups.append([row])
            shared.append(0)
    for group, reach in zip(groups, shared, strict=True):
        blocks[group, 3], blocks[group, 4] = np.arange(len(group)), reach
    order = [row for group in groups if len(group) > 1 for row in group]
    return np.concatenate((blocks[order], np.delete(blocks, order, axis=0)))


def build_subset(inputs: ModelInput, block_size: int, reach: int) -> LogitsSubset | None:
    """The tokens of CPU ``inputs`` that must still be computed after the last attention; None if all must.

    The convolutions after the last attention reach back ``reach`` tokens in all. Logits need their token and ``reach``
    before it; states at the end of a chunk or KV block need the last ``reach``. At least one token of each sequence
    stays. If a token sees its whole text, the convolutions reach as far ahead, and no state is kept.
    """
    if inputs.num_tokens == inputs.num_seqs:
        return None
    positions, cu_seqlens, logits = (t.numpy() for t in (inputs.positions, inputs.cu_seqlens, inputs.logits_indices))
    sequences = np.repeat(np.arange(inputs.num_seqs), np.diff(cu_seqlens))
    changes = np.zeros(inputs.num_tokens + 1, dtype=np.int64)  # token by token, in how many wanted tokens need it
    needs, ahead = [(logits, reach + 1)], 0 if inputs.is_causal else reach
    if inputs.is_causal:
        borders = np.flatnonzero((positions + 1) % block_size == 0)
        needs += [(borders, reach), (cu_seqlens[1:] - 1, max(reach, 1))]
    for wanted, count in needs:
        np.add.at(changes, np.maximum(wanted + 1 - count, cu_seqlens[sequences[wanted]]), 1)
        np.add.at(changes, np.minimum(wanted + 1 + ahead, cu_seqlens[sequences[wanted] + 1]), -1)
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
        query_blocks=query_blocks(
            sequences[rows[starts]],
            starts,
            np.append(starts[1:], len(rows)),
            positions[rows],
            inputs.block_tables.numpy(),
            block_size,
            None if inputs.is_causal else np.diff(cu_seqlens)[sequences[rows[starts]]],
        ),
        logits_indices=torch.from_numpy(np.searchsorted(rows, logits)),
        subset=None,
        is_causal=inputs.is_causal,
        num_alone=inputs.num_alone,
    )
    return LogitsSubset(kept, narrowed)


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of one attention layer.

    Attributes:
        keys: [num_blocks, num_kv_heads, width / pack, lanes, pack]: ``pack`` (see ``key_pack``) dimensions of a
            position lie side by side; on the CPU few, so that neighbouring positions fill a vector.
        values: [num_blocks, num_kv_heads, block_size, width].
        block_size: positions per block; ``lanes`` is this rounded up to 16, ``width`` is head_dim rounded up.
        scales: float32 [num_blocks, num_kv_heads, 2, lanes], the factors of a position's integer keys and values; None
            if keys and values are floating-point numbers.
    """

    keys: Tensor
    values: Tensor
    block_size: int
    scales: Tensor | None = None

    @property
    def lanes(self) -> int:
        return self.keys.shape[3]

    @property
    def width(self) -> int:
        return self.values.shape[3]


@dataclass(frozen=True, slots=True)
class ConvState:
    """The last inputs of one short convolution, oldest first; blocks have them so that a prefix can be taken over.

    Attributes:
        slots: [num_slots, conv_L_cache - 1, hidden_size], the inputs of each running sequence.
        blocks: [num_blocks or 0, conv_L_cache - 1, hidden_size], the inputs at the end of each KV block.
        block_size: positions per KV block.
    """

    slots: Tensor
    blocks: Tensor
    block_size: int
