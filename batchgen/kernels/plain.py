"""The kernels in plain torch, vectorized over the sequences of a step: for devices without special kernels.

The order of additions is not fixed. Steps of one token per sequence can be recorded: all sizes come from shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels import interface
from batchgen.kernels.inputs import ConvState, KVCache, ModelInput, upload
from batchgen.kernels.torch_kernels import TorchKernels, add_up

_MAX_TOKENS = 256  # of a piece: the scores of all its tokens are in memory at once
_MAX_NUMBERS = {"cpu": 1 << 20}  # numbers in the keys or scores of one product: they stay in the processor's cache
_MAX_NUMBERS_ELSEWHERE = 1 << 26


class PaddedRows(NamedTuple):
    """Pieces of similar length, each with tokens of one sequence, padded to the longest.

    Attributes:
        tokens: int64 [rows, longest], which tokens of the step they are; padding repeats the first of its row.
        targets: int64 [rows, longest], where their results go; results of padding go after all others.
        sequences: int64 [rows].
        num_blocks: the most KV blocks that a token of a row attends to.
    """

    tokens: Tensor
    targets: Tensor
    sequences: Tensor
    num_blocks: int

    def in_parts(self, max_rows: int) -> Iterator[PaddedRows]:
        """The same, at most ``max_rows`` rows at a time, but at least one."""
        for start in range(0, len(self.tokens), max(max_rows, 1)):
            part = slice(start, start + max(max_rows, 1))
            yield PaddedRows(self.tokens[part], self.targets[part], self.sequences[part], self.num_blocks)


@dataclass(frozen=True, slots=True, eq=False)
class StepLayout:
    """Layout of a step's tokens, computed once for all layers.

    Attributes:
        rows: all tokens, each once, as attention takes them.
        reach: int32 [num_seqs], how many positions the tokens of each sequence see, if they are not causal.
        block_ends: int64, the tokens at the last position of a KV block; None if each sequence has one token, whose
            position the host does not know.
        num_seen: as in ``ModelInput`` if some tokens are unseen.
    """

    inputs: ModelInput
    block_size: int
    rows: list[PaddedRows]
    reach: Tensor
    block_ends: Tensor | None
    num_seen: Tensor | None = None

    @classmethod
    def of(cls, inputs: ModelInput, block_size: int, *, may_wait: bool) -> StepLayout:
        """Layout of a step; with ``may_wait`` the host asks for positions even if shapes are sufficient."""
        pieces = inputs.query_blocks
        reach = torch.zeros_like(inputs.conv_slots).index_copy_(0, pieces[:, 0].long(), pieces[:, 5])
        if inputs.num_tokens == inputs.num_seqs and not may_wait and inputs.unseen is None:
            each = torch.arange(inputs.num_tokens, device=reach.device)
            rows = PaddedRows(each[:, None], each[:, None], each, inputs.block_tables.shape[1])
            return cls(inputs, block_size, [rows], reach, None)
        starts, positions, seen = _on_host(inputs.cu_seqlens, inputs.positions, reach)
        needed = -(-(positions[starts[1:] - 1] + 1 if inputs.is_causal else seen) // block_size)
        rows_on_host = _padded_rows(starts, needed, len(positions))
        moved = [upload(torch.from_numpy(columns), reach.device) for columns, _ in rows_on_host]
        by_size = [
            PaddedRows(columns[0], columns[1], columns[2, :, 0], num_blocks)
            for columns, (_, num_blocks) in zip(moved, rows_on_host, strict=True)
        ]
        ends = torch.from_numpy(np.flatnonzero((positions + 1) % block_size == 0))
        num_seen = None if inputs.unseen is None else inputs.num_seen
        return cls(inputs, block_size, by_size, reach, upload(ends, reach.device), num_seen)


def _on_host(*tensors: Tensor) -> list[np.ndarray]:
    """Int32 tensors as arrays, fetched together: the only wait for the device."""
    joined = torch.cat(tensors).cpu().numpy()
    return np.split(joined, np.cumsum([len(tensor) for tensor in tensors])[:-1])


def _padded_rows(starts: np.ndarray, num_blocks: np.ndarray, num_tokens: int) -> list[tuple[np.ndarray, int]]:
    """Tokens, targets and sequences of ``PaddedRows``, int64 [3, rows, longest], and their ``num_blocks``."""
    by_size: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    bounds = zip(starts[:-1].tolist(), starts[1:].tolist(), num_blocks.tolist(), strict=True)
    for sequence, (start, end, blocks) in enumerate(bounds):
        for first in range(start, end, _MAX_TOKENS):
            count = min(end - first, _MAX_TOKENS)
            size = (
                ((count - 1).bit_length() + 1) // 2,
                (blocks - 1).bit_length(),
            )  # a factor of 4 in tokens, 2 in blocks
            by_size.setdefault(size, []).append((sequence, first, count))
    padded = []
    for pieces in by_size.values():
        sequences, firsts, counts = np.array(pieces).T[:, :, None]
        offsets = np.arange(counts.max())
        is_there = offsets < counts
        targets = np.where(is_there, firsts + offsets, num_tokens)
        columns = np.stack((np.where(is_there, targets, firsts), targets, sequences + 0 * offsets))
        padded.append((columns, int(num_blocks[sequences].max())))
    return padded


class PlainKernels(TorchKernels):
    """``Kernels`` by torch, all sequences at once; arguments as for ``TorchKernels``.

    ``why`` tells the user why faster kernels cannot be used. With ``may_wait``, the default on the CPU, the host may
    ask the device for the positions of single tokens, so that fewer unseen positions are computed.
    """

    name = "plain"

    def __init__(
        self,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        weights: str = "auto",
        activations: str = "auto",
        why: str = "",
        may_wait: bool | None = None,
    ) -> None:
        super().__init__(device, dtype, weights=weights, activations=activations)
        is_cpu = device is None or device.type == "cpu"
        self.may_wait = is_cpu if may_wait is None else may_wait
        note = f"device {str(device)!r}: {why}; plain torch computes, slower, and tokens may depend on the batch"
        self.notes = (note,) if why else ()
        self._layout: StepLayout | None = None
        self._taps: tuple[StepLayout, int, Tensor] | None = None

    def experts(self, weights: Iterable[tuple[Tensor, Tensor, Tensor]]) -> interface.SparseFeedForward:
        return SortedExperts([(self.gated_linear(gate, up), self.linear(down)) for gate, up, down in weights])

    def attention(self, q: Tensor, qkv: Tensor, heads: interface.Heads, inputs: ModelInput, cache: KVCache) -> Tensor:
        num_tokens, num_heads, _ = q.shape
        out = qkv.new_empty(num_tokens + 1, num_heads, heads.head_dim)
        layout = self._layout_of(inputs, cache.block_size)
        for rows in layout.rows:
            num_positions = rows.num_blocks * cache.block_size
            each = num_positions * max(cache.values.shape[1] * cache.width, num_heads * rows.tokens.shape[1])
            max_numbers = _MAX_NUMBERS.get(q.device.type, _MAX_NUMBERS_ELSEWHERE)
            for part in rows.in_parts(max_numbers // each):
                mixed = _attended(q, cache, layout, part, heads.window)[..., : heads.head_dim]
                if heads.is_gated:
                    mixed = mixed * qkv[part.tokens, -num_heads:, None].float().sigmoid()
                out[part.targets] = mixed.to(out.dtype)
        return out[:num_tokens].flatten(1)

    def short_conv(self, bcx: Tensor, weight: Tensor, bias: Tensor, state: ConvState, inputs: ModelInput) -> Tensor:
        taps, width = weight.shape
        b, c, x = bcx.chunk(3, -1)
        layout = self._layout_of(inputs, state.block_size)
        past = state.slots.index_select(0, inputs.conv_slots)
        seen = torch.cat((bcx.new_zeros(1, width), past.flatten(0, 1), b * x))
        indexes = self._tap_indexes(layout, taps)
        total = bias
        for tap in range(taps):
            total = total + seen[indexes[:, tap]].float() * weight[tap]
        if inputs.is_causal:
            _keep_inputs(seen, indexes[:, 1:], state, layout)
        return c * total.to(bcx.dtype)

    def _layout_of(self, inputs: ModelInput, block_size: int) -> StepLayout:
        """The layout of a step, the same in all layers except those that compute a subset."""
        layout = self._layout
        if layout is None or layout.inputs is not inputs or layout.block_size != block_size:
            layout = self._layout = StepLayout.of(inputs, block_size, may_wait=self.may_wait)
        return layout

    def _tap_indexes(self, layout: StepLayout, taps: int) -> Tensor:
        """Indexes of each token's taps, int64 [num_tokens, taps], among the rows that ``_tap_indexes`` below lists."""
        if self._taps is None or self._taps[0] is not layout or self._taps[1] != taps:
            self._taps = layout, taps, _tap_indexes(layout.inputs, taps)
        return self._taps[2]


def _attended(q: Tensor, cache: KVCache, layout: StepLayout, rows: PaddedRows, window: int) -> Tensor:
    """Attention of padded rows, float32 [rows, tokens, num_heads, width]."""
    inputs, size, num_kv_heads = layout.inputs, cache.block_size, cache.values.shape[1]
    positions, tables = inputs.positions[rows.tokens], inputs.block_tables[rows.sequences]
    columns = torch.arange(rows.num_blocks, device=q.device)[None]
    if window and inputs.is_causal and rows.tokens.shape[1] == 1:  # among several tokens, some may have been left out
        columns = (positions + 1 - window).clamp(min=0) // size + columns[:, : (window - 2) // size + 2]
    at = (columns[..., None] * size + torch.arange(size, device=q.device)).flatten(1)  # [rows or 1, positions]
    columns = columns.clamp(max=tables.shape[1] - 1).expand(len(tables), -1)  # later columns are not in use yet
    keys, values = _gathered(cache, tables.gather(1, columns).long())
    distances = positions[:, :, None] - at[:, None]  # [rows, tokens, positions]
    if layout.num_seen is not None:
        visible = at[:, None] < layout.num_seen[rows.tokens][:, :, None]
    elif inputs.is_causal:
        visible = distances >= 0
    else:
        visible = (at < layout.reach[rows.sequences][:, None])[:, None]
    if window:
        visible = visible & (distances.abs() < window)
    num_rows, num_tokens = rows.tokens.shape
    grouped = q[rows.tokens].view(num_rows, num_tokens, num_kv_heads, -1, q.shape[2]).permute(2, 0, 3, 1, 4)
    shape = (*grouped.shape[:4], -1)  # num_kv_heads, rows, query heads of each, tokens
    scores = (grouped.flatten(2, 3) @ keys.transpose(2, 3)).view(shape)
    weights = scores.masked_fill_(~visible[None, :, None], -torch.inf).softmax(-1)
    values.masked_fill_(~visible.any(1)[None, :, :, None], 0)  # zero times what has never been written may be NaN
    mixed = (weights.flatten(2, 3) @ values).view(shape)
    return mixed.permute(1, 3, 0, 2, 4).flatten(2, 3)


def _gathered(cache: KVCache, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """New copies of the keys and values in blocks [rows, n], float32 [num_kv_heads, rows, n * block_size, width]."""
    size = cache.block_size
    keys = cache.keys.transpose(0, 1)[:, blocks].transpose(-3, -2).flatten(-2)[..., :size, :].float()
    values = cache.values.transpose(0, 1)[:, blocks].float()
    if cache.scales is not None:
        of_keys, of_values = cache.scales.transpose(0, 1)[:, blocks][..., :size, None].unbind(3)
        keys, values = keys * of_keys, values * of_values
    return keys.flatten(2, 3), values.flatten(2, 3)


def _tap_indexes(inputs: ModelInput, taps: int) -> Tensor:
    """Each token's indexes into these rows: one of zeros, the states of the sequences in order, the step's inputs."""
    device, num_tokens, kept = inputs.positions.device, inputs.num_tokens, taps - 1
    sequences = torch.arange(inputs.num_seqs, device=device)
    if num_tokens > inputs.num_seqs:
        sequences = sequences.repeat_interleave(inputs.cu_seqlens.diff(), output_size=num_tokens)
    starts, ends = inputs.cu_seqlens[sequences].long(), inputs.cu_seqlens[sequences + 1]
    ahead = 0 if inputs.is_causal else taps // 2
    tokens = torch.arange(num_tokens, device=device)[:, None] + torch.arange(ahead - kept, ahead + 1, device=device)
    before = tokens - starts[:, None]  # negative for inputs of earlier steps
    in_state = 1 + (sequences[:, None] + 1) * kept + before
    has_state = (inputs.positions[starts] > 0)[:, None] & inputs.is_causal
    indexes = torch.where(before >= 0, 1 + inputs.num_seqs * kept + tokens, in_state * has_state)
    return indexes.masked_fill(tokens >= ends[:, None], 0)


def _keep_inputs(seen: Tensor, indexes: Tensor, state: ConvState, layout: StepLayout) -> None:
    """Write the last inputs of each sequence, and of each KV block that is complete; ``indexes`` are per token."""
    inputs, ends = layout.inputs, layout.block_ends
    blocks = inputs.slot_mapping // state.block_size
    state.slots[inputs.conv_slots.long()] = seen[indexes[inputs.cu_seqlens[1:].long() - 1]]
    if ends is not None:
        state.blocks[blocks[ends]] = seen[indexes[ends]]
    else:  # each token has its own block, and rewrites it unchanged unless it is the block's last
        is_end = (inputs.positions + 1) % state.block_size == 0
        state.blocks[blocks] = torch.where(is_end[:, None, None], seen[indexes], state.blocks[blocks])


class SortedExperts:
    """``SparseFeedForward`` by the linears of each expert; rows are sorted by expert, so that the host waits once."""

    def __init__(self, experts: list[tuple[interface.GatedLinear, interface.Linear]]) -> None:
        self._experts = experts

    @property
    def linears(self) -> list[tuple[interface.Linear, interface.Linear]]:
        return [(gated.linear, down) for gated, down in self._experts]

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor) -> Tensor:
        order = ids.flatten().argsort(stable=True)
        counts = (ids.flatten() == torch.arange(len(self._experts), device=ids.device)[:, None]).sum(1).tolist()
        inputs = torch.split(x.index_select(0, order // ids.shape[1]), counts)
        made = [down(gated(part)) for (gated, down), part in zip(self._experts, inputs, strict=True) if len(part)]
        parts = x.new_empty(len(order), residual.shape[1])
        parts[order] = torch.cat((parts[:0], *made))
        return add_up(parts.view(*ids.shape, residual.shape[1]), weights, residual)
