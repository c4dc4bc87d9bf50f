"""LFM2: gated short convolutions and grouped-query attention in one stack, over a ragged batch.

    h += mix(operator_norm(h));  h += feed_forward(ffn_norm(h));  then embedding_norm and the output projection

where ``mix`` is a short convolution or attention, by layer. The modules hold weights and call kernels; state comes
in as an argument and no batch is remembered. Facts of the architecture: arXiv:2511.23404 and the checkpoints' configs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels.inputs import ConvState, KVCache, ModelInput
from batchgen.kernels.interface import Kernels, Linear, QKNorm
from batchgen.model.config import ATTENTION, ModelConfig
from batchgen.model.state import StateCache
from batchgen.model.weights import TensorSource


class FeedForward:
    """SwiGLU: ``w2(silu(w1 x) * w3 x)``."""

    def __init__(self, source: TensorSource, prefix: str, config: ModelConfig, kernels: Kernels) -> None:
        shape = (config.ff_dim, config.hidden_size)
        gate = source.take(f"{prefix}.w1.weight", shape)
        up = source.take(f"{prefix}.w3.weight", shape)
        self.gate_up = kernels.gated_linear(gate, up)
        self.down = kernels.linear(source.take(f"{prefix}.w2.weight", shape[::-1]))

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """X and residual [num_tokens, hidden_size]."""
        return self.down(self.gate_up(x), residual)


class ShortConv:
    """``out_proj(C * conv(B * x))`` where in_proj gives B, C and x; carries its last inputs between steps."""

    def __init__(self, source: TensorSource, prefix: str, config: ModelConfig, kernels: Kernels) -> None:
        width, taps = config.hidden_size, config.conv_l_cache

        def projection(name: str, out_features: int) -> Linear:
            weight = source.take(f"{prefix}.{name}.weight", (out_features, width))
            bias = source.take(f"{prefix}.{name}.bias", (out_features,)).clone() if config.conv_bias else None
            return kernels.linear(weight, bias)

        self.kernels = kernels
        self.in_proj = projection("in_proj", 3 * width)
        self.out_proj = projection("out_proj", width)
        weight = source.take(f"{prefix}.conv.weight", (width, 1, taps))
        self.weight = weight.squeeze(1).T.float().contiguous()
        bias = source.take(f"{prefix}.conv.bias", (width,)) if config.conv_bias else torch.zeros(width)
        self.bias = bias.float().to(weight.device).clone()

    def __call__(self, x: Tensor, residual: Tensor, state: ConvState, inputs: ModelInput) -> Tensor:
        """X and residual [num_tokens, hidden_size]; ``state`` is updated."""
        mixed = self.kernels.short_conv(self.in_proj(x), self.weight, self.bias, state, inputs)
        return self.out_proj(mixed, residual)


class Attention:
    """Grouped-query attention with per-head norms on queries and keys, before the rotary embedding."""

    def __init__(self, source: TensorSource, prefix: str, config: ModelConfig, kernels: Kernels) -> None:
        h, d = config.hidden_size, config.head_dim
        q = source.take(f"{prefix}.q_proj.weight", (config.num_heads * d, h))
        k = source.take(f"{prefix}.k_proj.weight", (config.num_kv_heads * d, h))
        v = source.take(f"{prefix}.v_proj.weight", (config.num_kv_heads * d, h))
        self.kernels = kernels
        self.head_dim = d
        self.qkv = kernels.linear(torch.cat((q, k, v)))
        self.out_proj = kernels.linear(source.take(f"{prefix}.out_proj.weight", (h, config.num_heads * d)))
        q_norm = source.take(f"{prefix}.q_layernorm.weight", (d,)).clone()
        k_norm = source.take(f"{prefix}.k_layernorm.weight", (d,)).clone()
        self.norms = QKNorm(q_norm, k_norm, config.norm_eps, config.num_heads)

    def queries(self, x: Tensor, cache: KVCache, inputs: ModelInput, rotary: Tensor) -> Tensor:
        """What ``attend`` takes, for x [num_tokens, hidden_size]; keys and values go into ``cache``."""
        return self.kernels.rope_and_cache(self.qkv(x), self.norms, rotary, inputs, cache)

    def attend(self, q: Tensor, residual: Tensor, cache: KVCache, inputs: ModelInput) -> Tensor:
        """Queries, and residual [num_tokens, hidden_size], of all tokens in ``inputs``."""
        return self.out_proj(self.kernels.attention(q, cache, inputs, self.head_dim), residual)


class Layer:
    """One block: a mixer and a feed-forward, each behind a norm, each added to the stream."""

    def __init__(self, source: TensorSource, index: int, config: ModelConfig, kernels: Kernels) -> None:
        prefix = f"model.layers.{index}"
        self.kernels = kernels
        self.eps = config.norm_eps
        self.mixer: Attention | ShortConv
        if config.layer_types[index] == ATTENTION:
            self.mixer = Attention(source, f"{prefix}.self_attn", config, kernels)
        else:
            self.mixer = ShortConv(source, f"{prefix}.conv", config, kernels)
        self.feed_forward = FeedForward(source, f"{prefix}.feed_forward", config, kernels)
        self.operator_norm = source.take(f"{prefix}.operator_norm.weight", (config.hidden_size,)).clone()
        self.ffn_norm = source.take(f"{prefix}.ffn_norm.weight", (config.hidden_size,)).clone()

    def feed(self, h: Tensor) -> Tensor:
        """The second half of the block."""
        return self.feed_forward(self.kernels.rms_norm(h, self.ffn_norm, self.eps), h)


class Rotary:
    """Cosines and sines of every position so far needed, float32 [2, positions, head_dim / 2].

    Angles are float32 (position times theta**(-2i / head_dim)), as the reference computes them; their cosine is
    taken in float64, so that an entry never depends on how many were computed with it.
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


class Decoder:
    """The whole network. ``forward`` is a function of its inputs and the state it is given."""

    def __init__(self, config: ModelConfig, source: TensorSource, kernels: Kernels) -> None:
        h = config.hidden_size
        self.config = config
        self.kernels = kernels
        self.embedding = source.take("model.embed_tokens.weight", (config.vocab_size, h))
        self.layers = [Layer(source, i, config, kernels) for i in range(config.num_layers)]
        self.last_attention = next((layer for layer in self.layers[::-1] if isinstance(layer.mixer, Attention)), None)
        self.final_norm = source.take("model.embedding_norm.weight", (h,)).clone()
        head = self.embedding if config.tie_embedding else source.take("lm_head.weight", (config.vocab_size, h))
        self.lm_head = kernels.linear(head)
        self.rotary = Rotary(config, self.embedding.device)
        source.finish()

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and activations."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.embedding.device

    @property
    def numerics(self) -> dict[str, str]:
        """``dtype`` and ``device`` by name, and ``kernels``, their ``variant``: other ones would give other tokens."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {"dtype": dtype, "device": self.device.type, "kernels": self.kernels.variant}

    @torch.inference_mode()
    def forward(self, inputs: ModelInput, state: StateCache, max_position: int) -> Tensor:
        """One step: computes ``inputs``' tokens, extends ``state``, returns logits [num_logits, vocab_size].

        ``max_position`` is the largest position in the batch. Tokens take part in a layer only as far as something
        needs them: up to the last attention's keys and values all do, then those of ``inputs.tail``, and in the last
        feed-forward those whose logits are wanted.
        """
        rotary = self.rotary.upto(max_position + 1)
        kv, conv = iter(state.kv), iter(state.conv)
        h = self.kernels.take_rows(self.embedding, inputs.token_ids)
        for layer in self.layers:
            x = self.kernels.rms_norm(h, layer.operator_norm, layer.eps)
            if isinstance(layer.mixer, Attention):
                cache = next(kv)
                q = layer.mixer.queries(x, cache, inputs, rotary)
                if layer is self.last_attention and inputs.tail is not None:
                    q, h = (self.kernels.take_rows(part, inputs.tail.rows) for part in (q, h))
                    inputs = inputs.tail.inputs
                h = layer.mixer.attend(q, h, cache, inputs)
            else:
                h = layer.mixer(x, h, next(conv), inputs)
            if layer is self.layers[-1]:
                h = self.kernels.take_rows(h, inputs.logits_indices)
            h = layer.feed(h)
        return self.lm_head(self.kernels.rms_norm(h, self.final_norm, self.config.norm_eps))
