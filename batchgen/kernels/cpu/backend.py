"""The CPU back end: torch tensors in, compiled kernels on their memory, torch tensors out.

Kernels read addresses: ``address`` asserts that tensors are contiguous, and the callers' signatures fix their types.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels import interface
from batchgen.kernels.cpu import kernel_specs, layout
from batchgen.kernels.cpu import linear as linears
from batchgen.kernels.cpu.experts import PackedExperts, PackedRouter
from batchgen.kernels.cpu.layout import ITEMS_PER_WORKER, MAX_HEADS, ROWS_PER_ITEM
from batchgen.kernels.cpu.parallel import Kernel, address, empty, scratch
from batchgen.kernels.inputs import QUERY_BLOCK, ConvState, KVCache, LogitsSubset, ModelInput
from batchgen.kernels.interface import Heads
from batchgen.kernels.processor import matrix_unit_note, processor_variant

_TAKE_ROWS, _LOOKUP_PACKED = Kernel(kernel_specs.TAKE_ROWS), Kernel(kernel_specs.EMBEDDING_LOOKUP_PACKED)
_RMS_NORM, _SCALE = Kernel(kernel_specs.RMS_NORM), Kernel(kernel_specs.SCALE)
_ROPE_AND_CACHE, _SHORT_CONV = Kernel(kernel_specs.ROPE_AND_CACHE), Kernel(kernel_specs.SHORT_CONV)
_ARGMAX, _SAMPLE, _LOGSUMEXP = Kernel(kernel_specs.ARGMAX), Kernel(kernel_specs.SAMPLE), Kernel(kernel_specs.LOGSUMEXP)
_ATTENTION, _MASK = Kernel(kernel_specs.ATTENTION), Kernel(kernel_specs.MASK)
_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.int8: "int8"}
_CACHED = [  # dtypes of the model and of its cache
    *((dtype, kept) for dtype in (torch.bfloat16, torch.float32) for kept in (dtype, torch.int8)),
    (torch.float32, torch.bfloat16),
]
_ROPE_KINDS = {(dtype, kept): kernel_specs.cached_kind(_NAMES[dtype], _NAMES[kept]) for dtype, kept in _CACHED}
_ATTENTION_KINDS = {  # by these dtypes and by whether heads are multiples of ``TILE_STEP``
    (dtype, kept, is_whole): kernel_specs.attention_kind(_NAMES[dtype], _NAMES[kept], is_whole)
    for dtype, kept in _CACHED
    for is_whole in (False, True)
}


@lru_cache
def _bits(value: float) -> int:
    """A float32 argument as its bits."""
    return int(np.float32(value).view(np.int32))


def _address_of(tensor: Tensor | None) -> int:
    return 0 if tensor is None else address(tensor)


def _fields(cache: KVCache) -> tuple[int, ...]:
    """The words of a cache, in the order of ``compiled.entry.CACHE_FIELDS``."""
    addresses = address(cache.keys), address(cache.values), _address_of(cache.scales)
    return (*addresses, cache.keys.shape[1], cache.width, cache.block_size, cache.lanes, cache.keys.shape[4])


class Alone(NamedTuple):
    """Inputs from which attention makes queries, keys and values of ``num_alone`` tokens; see ``compiled.heads``."""

    qkv: Tensor
    heads: Heads
    rotary: Tensor

    def fields(self) -> tuple[int, ...]:
        """The words of ``compiled.heads.HEADS``, without its sizes, and of ``ROTARY``."""
        heads, norms = self.heads, (_address_of(self.heads.q_norm), _address_of(self.heads.k_norm))
        return (*norms, _bits(heads.eps), _bits(heads.head_dim**-0.5), *map(address, self.rotary))


_ALONE_WORDS = 12  # the number of these words and of the words of ``compiled.attention.ALONE``


def heads_of_an_item(num_blocks: int, num_kv_heads: int) -> int:
    """KV heads per item of attention: the most that leave each worker a share of every query block, or enough items."""
    workers = torch.get_num_threads()
    for heads in range(min(num_kv_heads, MAX_HEADS), 1, -1):
        shares = num_kv_heads // heads
        if not num_kv_heads % heads and (shares >= workers or num_blocks * shares >= ITEMS_PER_WORKER * workers):
            return heads
    return 1


class PackedEmbedding:
    """``Embedding`` whose table is the weight of a linear, read from the linear's panels.

    A row is spread over one cache line per pair of inputs, so reading it takes a few microseconds.
    """

    def __init__(self, head: linears.PackedLinear, dtype: torch.dtype) -> None:
        self.head = head
        self._dtype = dtype
        self._kind = dtype if head.packed.strips.dtype is dtype else "f32_of_bf16"

    def __call__(self, token_ids: Tensor) -> Tensor:
        out = empty((len(token_ids), self.head.inputs), self._dtype)
        addresses = (address(self.head.packed.strips), address(token_ids), address(out))
        side_by_side = 4 // self.head.packed.strips.element_size()
        _LOOKUP_PACKED.launch(self._kind, len(token_ids), *addresses, self.head.inputs, side_by_side)
        return out


class CpuKernels(interface.Kernels):
    """``Kernels`` for CPUs, for a model in ``dtype``, bfloat16 or float32; None is the dtype of the weights."""

    name = "cpu"

    def __init__(self, dtype: torch.dtype | None = None, *, weights: str = "auto", activations: str = "auto") -> None:
        self.weights, self.activations = weights, activations
        self._dtype = dtype
        self.notes = tuple(filter(None, (matrix_unit_note(),)))

    @property
    def variant(self) -> str:
        return processor_variant()

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> linears.PackedLinear:
        return linears.PackedLinear(weight, bias, self.weights, self.activations, self._dtype)

    def gated_linear(self, gate: Tensor, up: Tensor, is_gelu: bool = False) -> linears.PackedGatedLinear:
        return linears.PackedGatedLinear(gate, up, self.weights, self.activations, self._dtype, is_gelu=is_gelu)

    def tied_embedding(self, table: Tensor, dtype: torch.dtype) -> tuple[interface.Embedding, interface.Linear]:
        head = self.linear(table)
        if head.packed.kind in ("bf16", "f32"):
            return PackedEmbedding(head, dtype), head
        return interface.TableEmbedding(self, table, dtype), head

    def router(self, routing: interface.Routing) -> interface.Router:
        return PackedRouter(routing)

    def experts(self, weights: Iterable[tuple[Tensor, Tensor, Tensor]]) -> interface.SparseFeedForward:
        return PackedExperts([(self.gated_linear(gate, up), self.linear(down)) for gate, up, down in weights])

    def take_rows(self, x: Tensor, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        out = empty((len(rows), *x.shape[1:]), dtype or x.dtype)
        width = x.shape[1:].numel()
        kind = x.dtype if out.dtype is x.dtype else "f32_of_bf16"
        _TAKE_ROWS.launch(kind, len(rows), address(x), address(rows), address(out), width)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        num_rows, width = x.shape
        out = empty(x.shape, x.dtype)
        items = -(-num_rows // ROWS_PER_ITEM)
        addresses = (address(x), address(weight), address(out))
        _RMS_NORM.launch(x.dtype, items, *addresses, num_rows, width, _bits(eps), _address_of(residual))
        return out

    def scale(self, x: Tensor, by: float) -> None:
        num_rows, width = x.shape
        _SCALE.launch(x.dtype, -(-num_rows // ROWS_PER_ITEM), address(x), num_rows, width, _bits(by))

    def rope_and_cache(
        self, qkv: Tensor, heads: Heads, rotary: Tensor, inputs: ModelInput, cache: KVCache, first: int = 0
    ) -> Tensor:
        """As in ``Kernels``, but without the first ``first`` tokens."""
        width, num_tokens = cache.width, len(qkv)
        q = empty((num_tokens if first < num_tokens else 0, heads.num_heads, width), torch.float32)
        arguments = (
            *(address(qkv), qkv.shape[1], heads.num_heads, heads.head_dim, *Alone(qkv, heads, rotary).fields()),
            *map(address, (inputs.positions, inputs.slot_mapping, q)),
            *(*scratch(layout.heads_scratch_floats(width, layout.ROPE_TOKENS)), first, num_tokens, *_fields(cache)),
        )
        items = -(-(num_tokens - first) // layout.ROPE_TOKENS) * cache.keys.shape[1]
        _ROPE_AND_CACHE.launch(_ROPE_KINDS[qkv.dtype, cache.keys.dtype], items, *arguments)
        return q

    def attention(
        self, q: Tensor, qkv: Tensor, heads: Heads, inputs: ModelInput, cache: KVCache, alone: Alone | None = None
    ) -> Tensor:
        """As in ``Kernels``; if ``alone`` is given, it replaces ``q`` for the first ``inputs.num_alone`` tokens."""
        num_heads, num_kv_heads, width = heads.num_heads, cache.keys.shape[1], cache.width
        out, window = empty((inputs.num_tokens, num_heads * heads.head_dim), qkv.dtype), heads.window
        if window and not inputs.is_causal:
            window = 2 * window - 1  # positions seen
        most_rows = layout.attention_rows(QUERY_BLOCK * (num_heads // num_kv_heads))
        items = len(inputs.query_blocks) * num_kv_heads
        most_together = min(max(items // (ITEMS_PER_WORKER * torch.get_num_threads()), 1), QUERY_BLOCK)
        most_heads = heads_of_an_item(len(inputs.query_blocks), num_kv_heads)
        own_floats = layout.heads_scratch_floats(width, layout.MAX_WAITING)
        memory, part_bytes = scratch(own_floats + layout.attention_scratch_floats(width, most_rows))
        of_alone: tuple[int, ...] = (0,) * _ALONE_WORDS
        if alone is not None:
            rows = address(alone.qkv), alone.qkv.shape[1]
            of_alone = (*alone.fields(), inputs.num_alone, *rows, address(inputs.slot_mapping), memory, part_bytes)
        arguments = (
            *(address(q), *_fields(cache), address(inputs.query_blocks), address(inputs.positions)),
            *(address(inputs.block_tables), inputs.block_tables.shape[1]),
            *(num_heads, heads.head_dim, *of_alone),
            *(memory + 4 * own_floats, part_bytes, most_rows, window),
            *((address(qkv), qkv.shape[1]) if heads.is_gated else (0, 0)),
            *(most_together, most_heads, len(inputs.query_blocks), address(out)),
        )
        kind = _ATTENTION_KINDS[qkv.dtype, cache.keys.dtype, heads.head_dim % layout.TILE_STEP == 0]
        _ATTENTION.launch(kind, items // most_heads, *arguments)
        return out

    def attend(
        self, qkv: Tensor, heads: Heads, rotary: Tensor, inputs: ModelInput, cache: KVCache, subset: LogitsSubset | None
    ) -> Tensor:
        """As in ``Kernels``; attention makes the keys of sequences' only tokens, since it reads their blocks anyway."""
        q = self.rope_and_cache(qkv, heads, rotary, inputs, cache, inputs.num_alone)
        alone = Alone(qkv, heads, rotary)
        if subset is not None:
            q, inputs = self.take_rows(q, subset.rows), subset.inputs
            qkv = self.take_rows(qkv, subset.rows) if heads.is_gated else qkv
        return self.attention(q, qkv, heads, inputs, cache, alone)

    def short_conv(self, bcx: Tensor, weight: Tensor, bias: Tensor, state: ConvState, inputs: ModelInput) -> Tensor:
        taps, width = weight.shape
        out = empty((len(bcx), width), bcx.dtype)
        arguments = (
            *map(address, (bcx, weight, bias, state.slots, inputs.cu_seqlens, inputs.conv_slots)),
            *map(address, (inputs.positions, out)),
            *(width, taps, 0 if inputs.is_causal else taps // 2, *scratch(layout.conv_scratch_floats(taps, width))),
            *(address(state.blocks), address(inputs.slot_mapping), state.block_size),
        )
        _SHORT_CONV.launch(bcx.dtype, inputs.num_seqs, *arguments)
        return out

    def argmax(self, logits: Tensor) -> Tensor:
        out = torch.empty(len(logits), dtype=torch.int64)
        _ARGMAX.launch(logits.dtype, len(logits), address(logits), address(out), logits.shape[1])
        return out

    def logsumexp(self, logits: Tensor) -> Tensor:
        out = torch.empty(len(logits), dtype=torch.float32)
        _LOGSUMEXP.launch(logits.dtype, len(logits), address(logits), address(out), logits.shape[1])
        return out

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        addresses = (address(logits), address(rows), address(bits))
        _MASK.launch(logits.dtype, len(rows), *addresses, logits.shape[1], bits.shape[1])

    def sample(self, logits: Tensor, rows: interface.SamplingRows) -> Tensor:
        out = torch.empty(len(logits), dtype=torch.int64)
        width = logits.shape[1]
        memory = scratch(layout.sampling_scratch_bytes(width) // 4)
        columns = (rows.temperature, rows.min_p, rows.top_k, rows.top_p, rows.uniform)
        arguments = (*map(address, (logits, out, *columns)), *memory, width)
        _SAMPLE.launch(logits.dtype, len(logits), *arguments)
        return out
