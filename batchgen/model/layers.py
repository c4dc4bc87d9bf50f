"""Parts of a decoder layer: attention, short convolution, feed-forward, and the rotary embedding's table.

Each part takes its weights by role and calls kernels; state comes in as an argument, and no batch is remembered. All
activations are [num_tokens, hidden_size]. ``linears`` lists a part's linears, each with the width of its input.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels.inputs import ConvState, KVCache, ModelInput
from batchgen.kernels.interface import Kernels, Linear, QKNorm
from batchgen.model.config import ModelConfig
from batchgen.model.weights import TAPS, NamedTensors


class FeedForward:
    """SwiGLU: ``down(silu(gate x) * up x)``."""

    def __init__(self, tensors: NamedTensors, config: ModelConfig, kernels: Kernels) -> None:
        width, inner = config.hidden_size, config.ff_dim
        gate, up = tensors.take("gate", inner, width), tensors.take("up", inner, width)
        self.gate_up = kernels.gated_linear(gate, up)
        self.down = kernels.linear(tensors.take("down", width, inner))
        self.linears = [(self.gate_up.linear, width), (self.down, inner)]

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.down(self.gate_up(x), residual)


class ShortConv:
    """``conv_out(C * conv(B * x))`` where ``conv_in`` gives B, C and x; its last inputs are its state."""

    def __init__(self, tensors: NamedTensors, config: ModelConfig, kernels: Kernels) -> None:
        width = config.hidden_size

        def projection(role: str, out_features: int) -> Linear:
            weight = tensors.take(role, out_features, width)
            bias = (
                tensors.take(role, out_features, part="bias").to(tensors.dtype, copy=True) if config.conv_bias else None
            )
            return kernels.linear(weight, bias)

        self.kernels = kernels
        self.in_proj = projection("conv_in", 3 * width)
        self.out_proj = projection("conv_out", width)
        self.linears = [(self.in_proj, width), (self.out_proj, width)]
        weight = tensors.take("conv", width, 1, config.conv_l_cache, init=TAPS)
        self.weight = weight.squeeze(1).T.float().contiguous()
        bias = tensors.take("conv", width, part="bias") if config.conv_bias else torch.zeros(width)
        self.bias = bias.float().to(weight.device).clone()

    def __call__(self, x: Tensor, residual: Tensor, state: ConvState, inputs: ModelInput) -> Tensor:
        """Updates ``state``."""
        mixed = self.kernels.short_conv(self.in_proj(x), self.weight, self.bias, state, inputs)
        return self.out_proj(mixed, residual)


class Attention:
    """Grouped-query attention with a norm per head on queries and keys, before the rotary embedding."""

    def __init__(self, tensors: NamedTensors, config: ModelConfig, kernels: Kernels) -> None:
        width, d, kv_width = config.hidden_size, config.head_dim, config.num_kv_heads * config.head_dim
        q = tensors.take("q", config.num_heads * d, width)
        k, v = tensors.take("k", kv_width, width), tensors.take("v", kv_width, width)
        self.kernels = kernels
        self.head_dim = d
        self.qkv = kernels.linear(torch.cat((q, k, v)))
        self.out_proj = kernels.linear(tensors.take("attention_out", width, config.num_heads * d))
        self.linears = [(self.qkv, width), (self.out_proj, config.num_heads * d)]
        self.norms = QKNorm(tensors.norm("q_norm", d), tensors.norm("k_norm", d), config.norm_eps, config.num_heads)

    def queries(self, x: Tensor, cache: KVCache, inputs: ModelInput, rotary: Tensor) -> Tensor:
        """The queries that ``attend`` takes; writes keys and values to ``cache``."""
        return self.kernels.rope_and_cache(self.qkv(x), self.norms, rotary, inputs, cache)

    def attend(self, q: Tensor, residual: Tensor, cache: KVCache, inputs: ModelInput) -> Tensor:
        mixed = self.kernels.attention(q, cache, inputs, self.head_dim, residual.dtype)
        return self.out_proj(mixed, residual)


class Rotary:
    """Cosines and sines of every position needed so far, float32 [2, positions, head_dim / 2].

    Angles are float32 (position times theta**(-2i / head_dim)), as in the reference; their cosine is taken in
    float64, so that an entry never depends on how many were computed with it.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        self.frequencies = (1.0 / config.rope_theta**exponents).numpy()
        self.device = device
        self.limit = config.max_position_embeddings
        self.table = torch.empty(2, 0, config.head_dim // 2)

    def upto(self, num_positions: int) -> Tensor:
        """The table with at least ``num_positions`` positions."""
        if num_positions > self.table.shape[1]:
            size = max(num_positions, min(self.limit, max(1024, 2 * num_positions)))
            angles = np.arange(size, dtype=np.float32)[:, None] * self.frequencies
            wide = angles.astype(np.float64)
            table = np.stack((np.cos(wide), np.sin(wide))).astype(np.float32)
            self.table = torch.from_numpy(table).to(self.device)
        return self.table
