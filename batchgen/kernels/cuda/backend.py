"""The CUDA back end: torch tensors in, Triton kernels on their memory, torch tensors out.

Nothing here waits for the device or reads from it: every grid follows from shapes that the host knows, so a
step can be captured in a CUDA graph. Kernels are compiled when first launched and kept in Triton's cache on disk.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
import triton
from torch import Tensor

from batchgen.kernels.cuda import mixers, rows, sampling, tuning
from batchgen.kernels.cuda.attention import PagedAttention
from batchgen.kernels.cuda.experts import StackedExperts
from batchgen.kernels.cuda.linear import (
    CublasLinear,
    FixedOrderLinear,
    FusedGatedLinear,
    PendingNorm,
    computed,
    norm_rows,
    operand,
)
from batchgen.kernels.cuda.tiles import Arrivals, num_tiles, power_of_two
from batchgen.kernels.experts import TorchRouter
from batchgen.kernels.inputs import ConvState, KVCache, ModelInput
from batchgen.kernels.interface import (
    Embedding,
    GatedLinear,
    Heads,
    Kernels,
    Linear,
    Normed,
    Router,
    Routing,
    SamplingRows,
    SparseFeedForward,
    TableEmbedding,
)
from batchgen.kernels.quantize import stored

_FUSED = {"enable_fp_fusion": True}  # as compilers do by default; Triton 3.9 warns where it is not said


def _joins(linear: Linear, inputs: ModelInput) -> TypeGuard[FixedOrderLinear]:
    """Whether a kernel for few rows computes a projection, in one part, together with what follows it."""
    is_plain = isinstance(linear, FixedOrderLinear) and linear.bias is None and linear.num_parts == 1
    return is_plain and inputs.num_tokens <= tuning.FEW_ROWS


def _cached_heads(
    heads: Heads, rotary: Tensor, inputs: ModelInput, cache: KVCache
) -> tuple[Tensor, tuple[Any, ...], tuple[Any, ...], tuple[int, ...]]:
    """Room for queries, and the arguments of kernels that write them, keys and values."""
    new = torch.empty if cache.width == heads.head_dim else torch.zeros
    q = new(inputs.num_tokens, heads.num_heads, cache.width, dtype=torch.float32, device=cache.keys.device)
    tensors = (heads.q_norm, heads.k_norm, rotary[0], rotary[1], inputs.positions, inputs.slot_mapping)
    sizes = (heads.eps, heads.head_dim**-0.5, heads.num_heads, cache.keys.shape[1])
    half = heads.head_dim // 2
    layout = (cache.width, cache.block_size, cache.lanes, half, max(power_of_two(half), tuning.LEAST_ROWS))
    return q, (*tensors, q, cache.keys, cache.values, cache.scales), sizes, layout


class CudaKernels(Kernels):
    """``Kernels`` for NVIDIA GPUs, in bfloat16, float16 and float32.

    With ``batch_invariant`` a token's bits depend on its own sequence alone: products add up in an order that their
    weight fixes, and steps that are joined for few rows round as they do alone. Without it cuBLAS may round a row
    differently with how many rows share its product, and a token computed as part of a prompt (a long chunk, or
    again after a preemption) differently from one computed by itself; see the package's docstring.
    """

    name = "cuda"
    activations = "auto"

    def __init__(
        self, device: torch.device | None = None, *, batch_invariant: bool = True, weights: str = "auto"
    ) -> None:
        """``device``, if given, becomes the current one, which is where Triton launches: one process, one device.

        Products of this process are summed in float32 from here on: partial sums of torch's default may be rounded.
        """
        if device is not None and device.index is not None:  # without one it is the current one already
            torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self.batch_invariant, self.weights = batch_invariant, weights
        self._linear = FixedOrderLinear if batch_invariant else CublasLinear
        self._device = device
        self._arrivals = Arrivals()

    @property
    def variant(self) -> str:
        """The GPU is named where cuBLAS picks its kernels by it; Triton compiles for the architecture alone."""
        if not torch.cuda.is_available():
            return "cuda-interpreted" if self.batch_invariant else "cuda-interpreted-cublas"
        major, minor = torch.cuda.get_device_capability(self._device)
        gpu = [] if self.batch_invariant else ["cublas", *torch.cuda.get_device_name(self._device).split()]
        return "-".join([f"cuda-sm{major}{minor}", *gpu, f"triton{triton.__version__}", f"torch{torch.__version__}"])

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        weight = stored(weight, self.weights, weight.dtype)
        return self._linear(weight, bias)

    def gated_linear(self, gate: Tensor, up: Tensor) -> GatedLinear:
        weight = stored(torch.cat((gate, up)), self.weights, gate.dtype)
        return FusedGatedLinear(self._linear(weight, None, num_parts=1), self.swiglu)

    def tied_embedding(self, table: Tensor, dtype: torch.dtype) -> tuple[Embedding, Linear]:
        return TableEmbedding(self, table, dtype), self.linear(table)

    def router(self, routing: Routing) -> Router:
        choose = TorchRouter(routing, FixedOrderLinear(routing.weight, None))
        return lambda x: choose(computed(x))

    def experts(self, weights: Iterable[tuple[Tensor, Tensor, Tensor]]) -> SparseFeedForward:
        return StackedExperts(weights, self)

    def recorder(self) -> None:
        return None

    def take_rows(self, x: Tensor, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return x.index_select(0, rows).to(dtype or x.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        return norm_rows(x, weight, eps, residual)

    def add_and_norm(
        self, linear: Linear, x: Tensor, residual: Tensor, weight: Tensor, eps: float, post: Tensor | None = None
    ) -> tuple[Tensor, Normed]:
        if isinstance(linear, FixedOrderLinear) and len(x) <= tuning.FEW_ROWS:
            y, squares = linear.few_rows(x, residual if post is None else None, self._arrivals)
            if post is None:
                return y, PendingNorm(y, squares, weight, eps)
        else:
            y = linear(x)
        sums, out = torch.empty_like(residual), torch.empty_like(residual)
        num_rows, width = y.shape
        block = max(power_of_two(width), tuning.PIECE.value)
        tensors = (y, post, residual, weight, sums, out)
        rows.add_and_norm[(num_rows,)](*tensors, width, eps, BLOCK=block, **rows.WRITTEN_OUT)
        return sums, out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        num_rows, width = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(num_rows, width)
        grid = (num_rows, -(-width // rows.SWIGLU_BLOCK))
        rows.swiglu[grid](gate_up, out, width, BLOCK=rows.SWIGLU_BLOCK, **_FUSED)
        return out

    def rope_and_cache(self, qkv: Tensor, heads: Heads, rotary: Tensor, inputs: ModelInput, cache: KVCache) -> Tensor:
        q, tensors, sizes, layout = _cached_heads(heads, rotary, inputs, cache)
        powers = (power_of_two(heads.num_heads), power_of_two(cache.keys.shape[1]))
        mixers.rope_and_cache[(len(qkv),)](qkv, qkv.shape[1], tensors, sizes, LAYOUT=layout, POWERS=powers, **_FUSED)
        return q

    def project_and_cache(
        self, linear: Linear, x: Normed, heads: Heads, rotary: Tensor, inputs: ModelInput, cache: KVCache
    ) -> tuple[Tensor, Tensor | None]:
        num_heads = heads.num_heads + 2 * cache.keys.shape[1]
        if not _joins(linear, inputs) or len(linear.weight) > num_heads * heads.head_dim:
            return super().project_and_cache(linear, x, heads, rotary, inputs, cache)
        taken, options = operand(x)
        q, tensors, sizes, layout = _cached_heads(heads, rotary, inputs, cache)
        mixers.project_and_cache[(num_heads, triton.cdiv(len(taken), tuning.BLOCK_M.value))](
            *(taken, linear.weight, tensors, sizes, *taken.shape), LAYOUT=layout, **options
        )
        return q, None

    def attention(
        self,
        q: Tensor,
        cache: KVCache,
        inputs: ModelInput,
        head_dim: int,
        dtype: torch.dtype,
        window: int = 0,
        gates: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty(len(q), q.shape[1] * head_dim, dtype=dtype, device=q.device)
        paged = PagedAttention(q, cache, inputs, out, window, gates, self.batch_invariant)
        paged.single_tokens(self._arrivals)
        if inputs.num_tokens > inputs.num_seqs:
            paged.prompts()
        return out

    def short_conv(self, bcx: Tensor, weight: Tensor, bias: Tensor, state: ConvState, inputs: ModelInput) -> Tensor:
        taps, width = weight.shape
        out = bcx.new_empty(len(bcx), width)
        one_each = inputs.num_tokens == inputs.num_seqs
        tokens = max(mixers.CONV_TOKENS, taps)
        tiles = inputs.num_seqs if one_each else num_tiles(inputs.num_tokens, inputs.num_seqs, tokens)
        tensors = (
            *(bcx, weight, bias, state.slots, state.blocks, inputs.cu_seqlens, inputs.conv_slots),
            inputs.conv_rejected,
            *(inputs.positions, inputs.slot_mapping, out),
        )
        mixers.short_conv[(tiles, triton.cdiv(width, mixers.CONV_CHANNELS.value))](
            *(tensors, inputs.num_seqs, width),
            BLOCK_SIZE=state.block_size,
            TAPS=taps,
            NUM_SPARE=state.num_spare,
            TOKENS=tokens,
            ONE_EACH=one_each,
            **_FUSED,
        )
        return out

    def project_and_convolve(
        self, linear: Linear, x: Normed, weight: Tensor, bias: Tensor, state: ConvState, inputs: ModelInput
    ) -> Tensor:
        taps, width = weight.shape
        if not _joins(linear, inputs) or inputs.num_tokens > inputs.num_seqs or taps < 2:
            return super().project_and_convolve(linear, x, weight, bias, state, inputs)
        taken, options = operand(x)
        out = torch.empty_like(taken)
        tensors = (weight, bias, state.slots, state.blocks, inputs.conv_slots, inputs.conv_rejected)
        grid = (triton.cdiv(width, tuning.CONV_N.value), triton.cdiv(len(taken), tuning.BLOCK_M.value))
        mixers.project_and_convolve[grid](
            *(taken, linear.weight, (*tensors, inputs.positions, inputs.slot_mapping, out), *taken.shape),
            STATE=(state.block_size, state.num_spare, taps, power_of_two(max(taps - 2, 1))),
            **options,
        )
        return out

    def argmax(self, logits: Tensor) -> Tensor:
        num_rows, width = logits.shape
        parts = -(-width // rows.ARGMAX_BLOCK)
        options = {"BLOCK": rows.ARGMAX_BLOCK, "num_warps": 8, **_FUSED}
        largest = torch.empty(num_rows, parts, dtype=torch.float32, device=logits.device)
        first = torch.empty(num_rows, parts, dtype=torch.int32, device=logits.device)
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        rows.argmax_parts[(num_rows, parts)](logits, largest, first, width, parts, **options)
        rows.argmax_of_parts[(num_rows,)](largest, first, out, parts, BLOCK=power_of_two(parts), **_FUSED)
        return out

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        grid = (len(rows), -(-logits.shape[1] // sampling.BLOCK.value))
        sampling.mask[grid](logits, rows, bits, logits.shape[1], bits.shape[1], **_FUSED)

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        sampling.sample[(len(logits),)](
            *(logits, rows.temperature, rows.min_p, rows.top_k, rows.top_p, rows.uniform, out, logits.shape[1]),
            num_warps=16,
            **_FUSED,
        )
        return out

    def logsumexp(self, logits: Tensor) -> Tensor:
        out = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        sampling.logsumexp[(len(logits),)](logits, out, logits.shape[1], num_warps=16, **_FUSED)
        return out
