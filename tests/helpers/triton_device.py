"""The CUDA kernels wherever tests run: on a GPU if there is one, else on Triton's interpreter over CPU tensors.

``OnDevice`` takes and gives CPU tensors, so that what tests the other back ends tests this one too. The interpreter
(``tests/conftest.py`` asks for it) runs each program in Python, a few hundred a second: shapes are kept tiny. Four
things it does unlike any device are mended here: it cuts a float32 to bfloat16 instead of rounding it, takes an integer
for the bits of a bfloat16, multiplies matrices of bfloat16 by their bits, and leaves products to the machine's BLAS, of
which some (OpenBLAS for AVX2) add up a row in an order that depends on where in the tile it stands. Here all rows of a
tile add up alike, so what is left of a difference is the kernels' own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from reference_kernels import key_columns
from torch import Tensor

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", torch.cuda.current_device()) if HAS_GPU else torch.device("cpu")

# Interpreters before 3.7 loop over no range that is known at run time only, with numpy 2.4 and later.
pytest.importorskip(
    "triton",
    minversion=None if HAS_GPU else "3.7",
    reason="the CUDA kernels are written in Triton, of which no version (without a GPU none from 3.7 on) is installed",
)

import triton.language as tl  # noqa: E402  # what follows imports Triton
from tiny_model import packed_keys  # noqa: E402
from triton.runtime import interpreter  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle  # noqa: E402

from batchgen.kernels.cuda import rows  # noqa: E402
from batchgen.kernels.cuda.backend import CudaKernels  # noqa: E402
from batchgen.kernels.inputs import ConvState, KVCache, ModelInput  # noqa: E402
from batchgen.kernels.interface import Heads, Linear, Router, Routing, SamplingRows  # noqa: E402

assert HAS_GPU or type(rows.rms_norm).__name__ == "InterpretedFunction", "Triton was imported by another test"


def _mend(builder: type[Any]) -> None:
    cast = builder.cast_impl

    def rounded_cast(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar.is_int() and target.scalar == tl.bfloat16:
            source = cast(self, source, tl.float32)
        result = cast(self, source, target)
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            bits = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16).numpy()
            result.data = bits.view(np.uint16)
        return result

    def dot_in_order(self: Any, a: Any, b: Any, total: Any, *_: Any) -> Any:
        rows, columns = (cast(self, x, total.dtype.scalar).data for x in (a, b))  # [..., m, k], [..., k, n]
        data = total.data.copy()
        for k in range(rows.shape[-1]):
            data += rows[..., :, k, None] * columns[..., None, k, :]
        return TensorHandle(data, total.dtype.scalar)

    builder.cast_impl, builder.create_dot = rounded_cast, dot_in_order


def _called(function: Any, *args: Any, **named: Any) -> Any:
    """Call a function of a kernel; patch the language once per module: in each call it takes a third of the time."""
    names = function.fn.__globals__
    if id(names) not in _PATCHED:
        _PATCHED[id(names)] = interpreter._patch_lang(function.fn)
    return function.rewrite()(*args, **named)


_PATCHED: dict[int, Any] = {}
if not HAS_GPU:
    _mend(InterpreterBuilder)
    InterpretedFunction.__call__ = _called


class OnDevice:
    """``CudaKernels`` between CPU tensors."""

    name = "cuda"

    def __init__(self, *, batch_invariant: bool = True, weights: str = "auto") -> None:
        device = DEVICE if HAS_GPU else None
        self.kernels = CudaKernels(device, batch_invariant=batch_invariant, weights=weights)
        self.variant = self.kernels.variant

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        linear = self.kernels.linear(weight.to(DEVICE), None if bias is None else bias.to(DEVICE))

        def call(x: Tensor, residual: Tensor | None = None) -> Tensor:
            return linear(x.to(DEVICE), None if residual is None else residual.to(DEVICE)).cpu()

        return call

    def router(self, routing: Routing) -> Router:
        bias = None if routing.bias is None else routing.bias.to(DEVICE)
        choose = self.kernels.router(replace(routing, weight=routing.weight.to(DEVICE), bias=bias))

        def call(x: Tensor) -> tuple[Tensor, Tensor]:
            ids, weights = choose(x.to(DEVICE))
            return ids.cpu(), weights.cpu()

        return call

    def experts(self, weights: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Callable[..., Tensor]:
        experts = self.kernels.experts((a.to(DEVICE), b.to(DEVICE), c.to(DEVICE)) for a, b, c in weights)
        return lambda *inputs: experts(*(part.to(DEVICE) for part in inputs)).cpu()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        added = None if residual is None else residual.to(DEVICE)
        return self.kernels.rms_norm(x.to(DEVICE), weight.to(DEVICE), eps, added).cpu()

    def add_and_norm(
        self, linear: Linear, x: Tensor, residual: Tensor, weight: Tensor, eps: float, post: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``linear`` is one of ``kernels``, which this wraps."""
        moved = None if post is None else post.to(DEVICE)
        h, normed = self.kernels.add_and_norm(linear, x.to(DEVICE), residual.to(DEVICE), weight.to(DEVICE), eps, moved)
        return h.cpu(), normed.cpu()

    def swiglu(self, gate_up: Tensor, is_gelu: bool = False) -> Tensor:
        return self.kernels.swiglu(gate_up.to(DEVICE), is_gelu).cpu()

    def rope_and_cache(self, qkv: Tensor, heads: Heads, rotary: Tensor, inputs: ModelInput, cache: KVCache) -> Tensor:
        moved = self._moved(cache)
        norms = {
            name: weight.to(DEVICE) for name in ("q_norm", "k_norm") if (weight := getattr(heads, name)) is not None
        }
        q = self.kernels.rope_and_cache(
            qkv.to(DEVICE), replace(heads, **norms), rotary.to(DEVICE), inputs.to(DEVICE), moved
        )
        cache.keys.copy_(packed_keys(moved.keys[:, :, 0].transpose(2, 3), cache.keys.shape[4]))
        cache.values.copy_(moved.values)
        if cache.scales is not None and moved.scales is not None:
            cache.scales.copy_(moved.scales)
        return q.cpu()

    @staticmethod
    def _moved(cache: KVCache) -> KVCache:
        """The cache as this device lays it out."""
        keys = key_columns(cache, torch.arange(len(cache.keys))).transpose(2, 3)[:, :, None].contiguous().to(DEVICE)
        scales = None if cache.scales is None else cache.scales.to(DEVICE)
        return replace(cache, keys=keys, values=cache.values.to(DEVICE), scales=scales)

    def attention(self, q: Tensor, qkv: Tensor, heads: Heads, inputs: ModelInput, cache: KVCache) -> Tensor:
        moved = self._moved(cache)
        return self.kernels.attention(q.to(DEVICE), qkv.to(DEVICE), heads, inputs.to(DEVICE), moved).cpu()

    def short_conv(self, bcx: Tensor, weight: Tensor, bias: Tensor, state: ConvState, inputs: ModelInput) -> Tensor:
        moved = replace(state, slots=state.slots.to(DEVICE), blocks=state.blocks.to(DEVICE))
        out = self.kernels.short_conv(bcx.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE), moved, inputs.to(DEVICE))
        state.slots.copy_(moved.slots)
        state.blocks.copy_(moved.blocks)
        return out.cpu()

    def argmax(self, logits: Tensor) -> Tensor:
        return self.kernels.argmax(logits.to(DEVICE)).cpu()

    def argmax_or_none(self, logits: Tensor) -> Tensor:
        return self.kernels.argmax_or_none(logits.to(DEVICE)).cpu()

    def logsumexp(self, logits: Tensor) -> Tensor:
        return self.kernels.logsumexp(logits.to(DEVICE)).cpu()

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        moved = logits.to(DEVICE)
        self.kernels.mask(moved, rows.to(DEVICE), bits.to(DEVICE))
        logits.copy_(moved)

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        columns = {name: getattr(rows, name).to(DEVICE) for name in rows.__slots__}
        return self.kernels.sample(logits.to(DEVICE), SamplingRows(**columns)).cpu()
