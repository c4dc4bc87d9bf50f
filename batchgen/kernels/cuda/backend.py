"""The CUDA back end: torch tensors in, Triton kernels on their memory, torch tensors out.

It never waits for the device: grids follow from shapes that the host knows, so that a CUDA graph can capture a step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
from torch import Tensor

from batchgen.kernels.cuda import rope_conv, rows, sampling, tuning
from batchgen.kernels.cuda.attention import attend
from batchgen.kernels.cuda.experts import StackedExperts
from batchgen.kernels.cuda.linear import CublasLinear, FixedOrderLinear
from batchgen.kernels.cuda.tiles import SplitCounters, num_tiles, power_of_two
from batchgen.kernels.inputs import ConvState, KVCache, ModelInput
from batchgen.kernels.interface import Heads, Linear, Router, Routing, SamplingRows, SparseFeedForward
from batchgen.kernels.quantize import stored
from batchgen.kernels.torch_kernels import TorchKernels, TorchRouter

_FUSED = {"enable_fp_fusion": True}  # the compiler's default; Triton 3.9 warns if it is not stated


class CudaKernels(TorchKernels):
    """``Kernels`` for NVIDIA GPUs, in bfloat16, float16 and float32; other operations are plain torch.

    With ``batch_invariant`` a token's bits depend only on its sequence. Otherwise cuBLAS chooses a kernel by the number
    of rows, and a prompt's tiles are taller than a single token's: a token may round differently in a prompt.
    """

    name = "cuda"

    def __init__(
        self, device: torch.device | None = None, *, batch_invariant: bool = True, weights: str = "auto"
    ) -> None:
        """``device``, if given, becomes the current device, on which Triton launches: one device per process.

        From now on, torch sums products in this process in float32: by default it may round partial sums.
        """
        if device is not None and device.index is not None:  # a device without an index is the current one
            torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        super().__init__(device, weights=weights)
        self.batch_invariant = batch_invariant
        self._counters = SplitCounters()

    @property
    def variant(self) -> str:
        """The variant names the GPU if cuBLAS chooses kernels by it; Triton only compiles for the architecture."""
        if not torch.cuda.is_available():
            return "cuda-interpreted" if self.batch_invariant else "cuda-interpreted-cublas"
        major, minor = torch.cuda.get_device_capability(self._device)
        gpu = [] if self.batch_invariant else ["cublas", *torch.cuda.get_device_name(self._device).split()]
        return "-".join([f"cuda-sm{major}{minor}", *gpu, f"triton{triton.__version__}", f"torch{torch.__version__}"])

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        weight = stored(weight, self.weights, weight.dtype)
        return FixedOrderLinear(weight, bias, self._counters) if self.batch_invariant else CublasLinear(weight, bias)

    def router(self, routing: Routing) -> Router:
        return TorchRouter(routing, FixedOrderLinear(routing.weight, None, self._counters))

    def experts(self, weights: Iterable[tuple[Tensor, Tensor, Tensor]]) -> SparseFeedForward:
        return StackedExperts(weights, self)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        out = torch.empty_like(x)
        num_rows, width = x.shape
        rows.rms_norm[(num_rows,)](x, weight, residual, out, width, eps, BLOCK=power_of_two(width), **rows.WRITTEN_OUT)
        return out

    def add_and_norm(
        self, linear: Linear, x: Tensor, residual: Tensor, weight: Tensor, eps: float, post: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        y = linear(x)
        sums, out = torch.empty_like(residual), torch.empty_like(residual)
        num_rows, width = y.shape
        tensors = (y, post, residual, weight, sums, out)
        rows.add_and_norm[(num_rows,)](*tensors, width, eps, BLOCK=power_of_two(width), **rows.WRITTEN_OUT)
        return sums, out

    def swiglu(self, gate_up: Tensor, is_gelu: bool = False) -> Tensor:
        if is_gelu:  # computed by torch: it does not have a kernel yet
            return super().swiglu(gate_up, is_gelu)
        num_rows, width = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(num_rows, width)
        grid = (num_rows, -(-width // rows.SWIGLU_BLOCK))
        rows.swiglu[grid](gate_up, out, width, BLOCK=rows.SWIGLU_BLOCK, **_FUSED)
        return out

    def rope_and_cache(self, qkv: Tensor, heads: Heads, rotary: Tensor, inputs: ModelInput, cache: KVCache) -> Tensor:
        num_kv_heads, half = cache.keys.shape[1], heads.head_dim // 2
        new = torch.empty if cache.width == heads.head_dim else torch.zeros
        q = new(len(qkv), heads.num_heads, cache.width, dtype=torch.float32, device=qkv.device)
        tensors = (heads.q_norm, heads.k_norm, rotary[0], rotary[1], inputs.positions, inputs.slot_mapping)
        written = (q, cache.keys, cache.values, cache.scales)
        sizes = (heads.eps, heads.head_dim**-0.5, heads.num_heads, num_kv_heads)
        layout = (cache.width, cache.block_size, cache.lanes, half, max(power_of_two(half), tuning.MIN_ROWS))
        powers = (power_of_two(heads.num_heads), power_of_two(num_kv_heads))
        rope_conv.rope_and_cache[(len(qkv),)](
            qkv, qkv.shape[1], (*tensors, *written), sizes, LAYOUT=layout, POWERS=powers, **_FUSED
        )
        return q

    def attention(self, q: Tensor, qkv: Tensor, heads: Heads, inputs: ModelInput, cache: KVCache) -> Tensor:
        out = qkv.new_empty(len(q), heads.num_heads * heads.head_dim)
        gates = qkv if heads.is_gated else None
        attend(q, cache, inputs, out, heads.window, gates, self._counters, self.batch_invariant)
        return out

    def short_conv(self, bcx: Tensor, weight: Tensor, bias: Tensor, state: ConvState, inputs: ModelInput) -> Tensor:
        taps, width = weight.shape
        out = bcx.new_empty(len(bcx), width)
        one_each = inputs.num_tokens == inputs.num_seqs
        tokens = max(rope_conv.CONV_TOKENS, taps)
        tiles = inputs.num_seqs if one_each else num_tiles(inputs.num_tokens, inputs.num_seqs, tokens)
        tensors = (
            *(bcx, weight, bias, state.slots, state.blocks, inputs.cu_seqlens, inputs.conv_slots),
            *(inputs.positions, inputs.slot_mapping, out),
        )
        rope_conv.short_conv[(tiles, triton.cdiv(width, rope_conv.CONV_CHANNELS.value))](
            *(tensors, inputs.num_seqs, width),
            BLOCK_SIZE=state.block_size,
            TAPS=taps,
            TOKENS=tokens,
            ONE_EACH=one_each,
            **_FUSED,
        )
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
