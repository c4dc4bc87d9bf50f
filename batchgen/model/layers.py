"""Parts of a decoder layer: attention, short convolution, feed-forward; weights by role, state as an argument.

Activations are [num_tokens, hidden_size]; ``linears`` lists what a token passes through, with the width of each input.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from batchgen.kernels.inputs import ConvState, KVCache, LogitsSubset, ModelInput
from batchgen.kernels.interface import Heads, Kernels, Linear, Routing
from batchgen.model.config import Experts, LayerShape, ModelConfig
from batchgen.model.weights import ROUTER_BIAS, TAPS, NamedTensors


class AddedLinear:
    """The last linear of a mixer or feed-forward; its product (normed in some families) is added to the residual."""

    def __init__(
        self, linear: Linear, post_norm: str, tensors: NamedTensors, config: ModelConfig, kernels: Kernels
    ) -> None:
        self.linear = linear
        self.kernels = kernels
        self.eps = config.norm_eps
        self.post_norm = tensors.norm(post_norm, config.hidden_size) if config.has_post_norms else None

    def __call__(self, x: Tensor, residual: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream with the product added, and its norm by the weights ``norm``."""
        return self.kernels.add_and_norm(self.linear, x, residual, norm, self.eps, self.post_norm)


class FeedForward:
    """SwiGLU: ``down(silu(gate x) * up x)``, or the same with gelu in place of silu."""

    def __init__(self, tensors: NamedTensors, shape: LayerShape, config: ModelConfig, kernels: Kernels) -> None:
        width, inner = config.hidden_size, shape.ff_dim
        if "gate_up" in config.tensor_names:  # gates before ups
            gate, up = tensors.take("gate_up", 2 * inner, width).chunk(2)
        else:
            gate, up = (tensors.take(role, inner, width) for role in ("gate", "up"))
        self.gate_up = kernels.gated_linear(gate, up, config.has_gelu)
        down = kernels.linear(tensors.take("down", width, inner))
        self.down = AddedLinear(down, "feed_forward_post_norm", tensors, config, kernels)
        self.linears = [(self.gate_up.linear, width), (down, inner)]

    def __call__(self, x: Tensor, residual: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        return self.down(self.gate_up(x), residual, norm)


class ExpertFeedForward:
    """Experts, of which a router chooses a few for each token."""

    def __init__(self, tensors: NamedTensors, experts: Experts, config: ModelConfig, kernels: Kernels) -> None:
        assert not config.has_post_norms, "the residual is added with the experts"
        width, count, exact = config.hidden_size, experts.num_experts, torch.float32
        self.kernels = kernels
        self.eps = config.norm_eps
        weight = tensors.take("router", count, width, dtype=exact)
        bias = None
        if experts.has_bias:  # its last bits decide between experts
            bias = tensors.take("router_bias", count, part="", init=ROUTER_BIAS, dtype=exact).clone()
        is_softmax, weighing = experts.scores == "softmax", (experts.normalizer_eps, experts.scale)
        routing = Routing(weight, bias, experts.num_active, is_softmax, experts.is_normalized, *weighing)
        self.route = kernels.router(routing)
        self.experts = kernels.experts(_expert_weights(tensors, experts, width))
        met = self.experts.linears[: experts.num_active]
        self.linears = [pair for gate_up, down in met for pair in ((gate_up, width), (down, experts.ff_dim))]

    def __call__(self, x: Tensor, residual: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        h = self.experts(x, *self.route(x), residual)
        return h, self.kernels.rms_norm(h, norm, self.eps)


def _expert_weights(tensors: NamedTensors, experts: Experts, width: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Gate, up and down of each expert; checkpoints store them one by one, or in one tensor, gates before ups."""
    count, inner = experts.num_experts, experts.ff_dim
    if tensors.holds("experts_gate_up", part=""):
        gates_and_ups = tensors.take("experts_gate_up", count, 2 * inner, width, part="")
        downs = tensors.take("experts_down", count, width, inner, part="")
        for gate_up, down in zip(gates_and_ups, downs, strict=True):
            yield gate_up[:inner], gate_up[inner:], down
        return
    for expert in range(count):
        of = tensors.of(expert=expert)
        gate, up = (of.take(role, inner, width) for role in ("expert_gate", "expert_up"))
        yield gate, up, of.take("expert_down", width, inner)


class ShortConv:
    """``conv_out(C * conv(B * x))`` where ``conv_in`` gives B, C and x; its last inputs are its state."""

    def __init__(self, tensors: NamedTensors, config: ModelConfig, kernels: Kernels) -> None:
        width = config.hidden_size

        def projection(role: str, out_features: int) -> Linear:
            return kernels.linear(tensors.take(role, out_features, width), tensors.biases((role, out_features)))

        self.kernels = kernels
        self.in_proj = projection("conv_in", 3 * width)
        out_proj = projection("conv_out", width)
        self.out_proj = AddedLinear(out_proj, "mixer_post_norm", tensors, config, kernels)
        self.linears = [(self.in_proj, width), (out_proj, width)]
        weight = tensors.take("conv", width, 1, config.conv_l_cache, init=TAPS)
        self.weight = weight.squeeze(1).T.float().contiguous()
        bias = tensors.biases(("conv", width))
        self.bias = torch.zeros(width, device=weight.device) if bias is None else bias.float()

    def mix(self, x: Tensor, state: ConvState, inputs: ModelInput) -> Tensor:
        """Compute the input of ``out_proj`` from ``x``, and update ``state``."""
        bcx = self.in_proj(x)
        if inputs.unseen is not None:
            bcx[inputs.unseen] = 0
        return self.kernels.short_conv(bcx, self.weight, self.bias, state, inputs)


class Attention:
    """Grouped-query attention.

    Families may add biases, a norm per head on queries and keys before the rotary embedding, a gate on each head's
    output, or a window of positions.
    """

    def __init__(self, tensors: NamedTensors, shape: LayerShape, config: ModelConfig, kernels: Kernels) -> None:
        width, d, kv_width = config.hidden_size, config.head_dim, config.num_kv_heads * config.head_dim
        parts = [("q", config.num_heads * d), ("k", kv_width), ("v", kv_width)]
        if config.has_attention_gate:
            parts.append(("attention_gate", config.num_heads))
        q_norm, k_norm = (tensors.norm(role, d) if config.has_qk_norm else None for role in ("q_norm", "k_norm"))
        self.kernels = kernels
        self.heads = Heads(
            config.num_heads, d, q_norm, k_norm, config.norm_eps, shape.window, is_gated=config.has_attention_gate
        )
        weights = torch.cat([tensors.take(role, rows, width) for role, rows in parts])
        self.qkv = kernels.linear(weights, tensors.biases(*parts))
        out_weight = tensors.take("attention_out", width, config.num_heads * d)
        out_proj = kernels.linear(out_weight, tensors.biases(("attention_out", width)))
        self.out_proj = AddedLinear(out_proj, "mixer_post_norm", tensors, config, kernels)
        self.linears = [(self.qkv, width), (out_proj, config.num_heads * d)]

    def mix(self, x: Tensor, cache: KVCache, inputs: ModelInput, rotary: Tensor, subset: LogitsSubset | None) -> Tensor:
        """Compute the input of ``out_proj``, for all tokens or those of ``subset``; writes all tokens to ``cache``."""
        return self.kernels.attend(self.qkv(x), self.heads, rotary, inputs, cache, subset)
