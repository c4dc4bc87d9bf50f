"""The kernels as loops over sequences and experts, written to be read: what all back ends are compared with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from batchgen.kernels import interface
from batchgen.kernels.inputs import ConvState, KVCache, ModelInput
from batchgen.kernels.plain import SortedExperts
from batchgen.kernels.torch_kernels import TorchKernels, add_up


def _sequences(inputs: ModelInput) -> Iterator[tuple[int, slice]]:
    bounds = inputs.cu_seqlens.tolist()
    for sequence, (start, end) in enumerate(pairwise(bounds)):
        yield sequence, slice(start, end)


def key_columns(cache: KVCache, blocks: Tensor) -> Tensor:
    """Keys of some blocks, unpacked: [len(blocks), num_kv_heads, width, lanes]."""
    return cache.keys[blocks].transpose(3, 4).flatten(2, 3)


class ExpertLoop(SortedExperts):
    """One expert after the other; the host looks up the rows of each."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor) -> Tensor:
        parts = x.new_empty(*ids.shape, x.shape[1])
        for expert, (gated, down) in enumerate(self._experts):
            row, place = (ids == expert).nonzero(as_tuple=True)
            if len(row):
                parts[row, place] = down(gated(x[row]))
        return add_up(parts, weights, residual)


class ReferenceKernels(TorchKernels):
    """``Kernels`` by torch, one sequence after the other."""

    name = "reference"

    def experts(self, weights: Iterable[tuple[Tensor, Tensor, Tensor]]) -> interface.SparseFeedForward:
        return ExpertLoop([(self.gated_linear(gate, up), self.linear(down)) for gate, up, down in weights])

    def attention(self, q: Tensor, qkv: Tensor, heads: interface.Heads, inputs: ModelInput, cache: KVCache) -> Tensor:
        num_heads, head_dim, window = heads.num_heads, heads.head_dim, heads.window
        group = num_heads // cache.keys.shape[1]
        out = qkv.new_empty(len(q), num_heads, head_dim)
        for sequence, tokens in _sequences(inputs):
            positions = inputs.positions[tokens]
            seen = inputs.num_seen[tokens]
            context = int(seen.max())
            first = max(int(positions[0]) + 1 - window, 0) if window else 0
            blocks = inputs.block_tables[sequence, : -(-context // cache.block_size)].long()
            keys, values = key_columns(cache, blocks).float(), cache.values[blocks].float()
            if cache.scales is not None:
                key_scales, value_scales = cache.scales[blocks].unbind(2)
                keys, values = keys * key_scales[:, :, None], values * value_scales[..., : cache.block_size, None]
            keys = keys[..., : cache.block_size].permute(1, 2, 0, 3).flatten(2)[..., first:context]
            values = values.transpose(0, 1).flatten(1, 2)[:, first:context]
            scores = q[tokens].transpose(0, 1) @ keys.repeat_interleave(group, 0)
            keys_at = torch.arange(first, context, device=q.device)
            visible = keys_at < seen[:, None]
            if window:
                visible &= (positions[:, None] - keys_at).abs() < window
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            mixed = weights @ values.repeat_interleave(group, 0)
            mixed = mixed.transpose(0, 1)[..., :head_dim]
            if heads.is_gated:
                mixed = mixed * qkv[tokens, -num_heads:, None].float().sigmoid()
            out[tokens] = mixed.to(out.dtype)
        return out.flatten(1)

    def short_conv(self, bcx: Tensor, weight: Tensor, bias: Tensor, state: ConvState, inputs: ModelInput) -> Tensor:
        b, c, x = bcx.chunk(3, -1)
        gated = b * x
        out = torch.empty_like(c)
        for sequence, tokens in _sequences(inputs):
            if not inputs.is_causal:
                column = functional.pad(gated[tokens].float(), (0, 0, len(weight) // 2, len(weight) // 2))
                mixed = (column.unfold(0, len(weight), 1) * weight.T).sum(-1) + bias
                out[tokens] = c[tokens] * mixed.to(bcx.dtype)
                continue
            slot = state.slots[int(inputs.conv_slots[sequence])]
            past = torch.zeros_like(slot) if inputs.positions[tokens][0] == 0 else slot
            # A sequence shorter than the window has zeros before its start, whatever the slot held.
            column = torch.cat((past, gated[tokens]))
            windows = column.float().unfold(0, len(weight), 1)  # [tokens, width, taps]
            mixed = (windows * weight.T).sum(-1) + bias
            out[tokens] = c[tokens] * mixed.to(bcx.dtype)
            ends = (inputs.positions[tokens] + 1) % state.block_size == 0  # of KV blocks
            blocks = inputs.slot_mapping[tokens][ends] // state.block_size
            state.blocks[blocks] = column[1:].unfold(0, len(past), 1).transpose(1, 2)[ends]
            slot.copy_(column[len(column) - len(slot) :])
        return out
