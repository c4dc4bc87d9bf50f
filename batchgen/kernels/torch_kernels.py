"""Kernels in plain torch that treat each row separately, shared by ``plain`` and ``cuda``.

Attention, the short convolution and experts, which look at several rows, are left to these back ends.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from batchgen.kernels import interface
from batchgen.kernels.inputs import KVCache, ModelInput
from batchgen.kernels.processor import processor_variant
from batchgen.kernels.quantize import Int8Weight, quantize_rotated, quantize_rows, stored


class Int8Linear:
    """``Linear`` of integers by integers: exact within a group of inputs, whatever the order of additions.

    The weight is from ``quantize_rotated``. Group by group, the integer sum times both scales is added to the total;
    then the bias, then the residual. Each operation rounds once to float32, and the result to the type of x.
    """

    def __init__(self, weight: Int8Weight, bias: Tensor | None) -> None:
        groups = weight.values.float().view(len(weight.values), -1, weight.group)
        self.groups = groups.permute(1, 2, 0).contiguous()
        self.scales = weight.scales.float()
        self.bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        values, scales = quantize_rows(x)
        total = torch.zeros(len(x), len(self.scales), device=x.device)
        for i, group in enumerate(self.groups):
            sums = values[:, i] @ group  # below 2**24, so that float32 holds every partial sum
            total = total + scales[:, i, None] * self.scales[:, i] * sums
        for term in (self.bias, residual):
            if term is not None:
                total = total + term.float()
        return total.to(x.dtype)


class TwoStepGatedLinear:
    """``GatedLinear`` of back ends that multiply first and then gate."""

    def __init__(self, kernels: TorchKernels, gate: Tensor, up: Tensor, is_gelu: bool) -> None:
        self.linear = kernels.linear(torch.cat((gate, up)))
        self._swiglu = kernels.swiglu
        self._is_gelu = is_gelu

    def __call__(self, x: Tensor) -> Tensor:
        return self._swiglu(self.linear(x), self._is_gelu)


class TorchRouter:
    """``Router`` by torch; ``linear`` is the product with the router's weight, in float32."""

    def __init__(self, routing: interface.Routing, linear: interface.Linear) -> None:
        self.routing = routing
        self.linear = linear

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return choose(self.linear(x.float()), self.routing)


def choose(logits: Tensor, routing: interface.Routing) -> tuple[Tensor, Tensor]:
    """``Router`` for float32 logits [rows, num_experts]."""
    scores, ranks = rank(logits, routing)
    # Sorted, not by ``topk``, which leaves the order of equals open.
    ranked = ranks.sort(dim=-1, descending=True, stable=True).indices
    ids = ranked[:, : routing.num_active].sort(-1).values
    return ids.int(), weigh(scores, ids, routing)


def rank(logits: Tensor, routing: interface.Routing) -> tuple[Tensor, Tensor]:
    """The scores of experts, and numbers without NaN, the largest of which are chosen; both [rows, num_experts]."""
    scores = logits.softmax(-1) if routing.is_softmax else logits.sigmoid()
    ranks = scores if routing.bias is None else scores + routing.bias
    return scores, ranks.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def weigh(scores: Tensor, ids: Tensor, routing: interface.Routing) -> Tensor:
    """The weights of chosen experts, int64 ids [rows, num_active]."""
    weights = scores.gather(-1, ids)
    if routing.is_normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.normalizer_eps)
    return weights * routing.scale


def add_up(parts: Tensor, weights: Tensor, residual: Tensor) -> Tensor:
    """``residual`` and the weighted parts [rows, num_active, width], added one after the other in float32."""
    total = torch.zeros_like(residual, dtype=torch.float32)
    for choice in range(parts.shape[1]):
        total = total + weights[:, choice, None] * parts[:, choice].float()
    return (total + residual.float()).to(residual.dtype)


def to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 heads [..., head_dim] as int8 and their scales [...]; see ``Kernels.rope_and_cache``."""
    largest = x.abs().amax(-1)
    scales = torch.where(largest.isfinite(), largest / 127, torch.nan)
    return (x / scales[..., None]).nan_to_num(127.0).clamp(-127, 127).round().to(torch.int8), scales


class TorchKernels(interface.Kernels):
    """``Kernels`` by torch; ``device`` is where the model runs, the CPU by default; ``dtype`` as for ``CpuKernels``."""

    batch_invariant = False

    def __init__(
        self,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        weights: str = "auto",
        activations: str = "auto",
    ) -> None:
        self._device = device
        self._dtype = dtype
        self.weights, self.activations = weights, activations

    @property
    def variant(self) -> str:
        """A GPU that the model runs on is named, since its libraries compute the products."""
        if self._device is None or self._device.type == "cpu":
            return processor_variant("padded")
        if self._device.type != "cuda":
            return f"{processor_variant('padded')}-{self._device.type}"
        return "-".join((processor_variant("padded"), "cublas", *torch.cuda.get_device_name(self._device).split()))

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> interface.Linear:
        if self.activations == "int8":
            return Int8Linear(quantize_rotated(weight), bias)
        return interface.PlainLinear(stored(weight, self.weights, self._dtype or weight.dtype), bias)

    def gated_linear(self, gate: Tensor, up: Tensor, is_gelu: bool = False) -> interface.GatedLinear:
        return TwoStepGatedLinear(self, gate, up, is_gelu)

    def tied_embedding(self, table: Tensor, dtype: torch.dtype) -> tuple[interface.Embedding, interface.Linear]:
        return interface.TableEmbedding(self, table, dtype), self.linear(table)

    def router(self, routing: interface.Routing) -> interface.Router:
        return TorchRouter(routing, interface.PlainLinear(routing.weight, None))

    def take_rows(self, x: Tensor, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return x.index_select(0, rows).to(dtype or x.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        normed = (wide * scale).to(x.dtype) * weight
        return normed if residual is None else normed + residual

    def scale(self, x: Tensor, by: float) -> None:
        x.mul_(by)

    def swiglu(self, gate_up: Tensor, is_gelu: bool = False) -> Tensor:
        """silu(gate) * up for gate_up [rows, 2 * width]; [rows, width]. With ``is_gelu`` gelu by its tanh formula."""
        gate, up = gate_up.float().chunk(2, -1)
        gate = functional.gelu(gate, approximate="tanh") if is_gelu else functional.silu(gate)
        return (gate * up).to(gate_up.dtype)

    def rope_and_cache(
        self, qkv: Tensor, heads: interface.Heads, rotary: Tensor, inputs: ModelInput, cache: KVCache
    ) -> Tensor:
        head_dim, num_kv_heads, pack = heads.head_dim, cache.keys.shape[1], cache.keys.shape[4]
        counts = [heads.num_heads, num_kv_heads, num_kv_heads]
        q, k, v = torch.split(qkv[:, : sum(counts) * head_dim].view(len(qkv), -1, head_dim), counts, dim=1)
        cosine, sine = rotary[:, inputs.positions.long(), None, :]

        def normed_and_rotated(x: Tensor, weight: Tensor | None) -> Tensor:
            normed = x if weight is None else self.rms_norm(x, weight, heads.eps)
            a, b = normed.float().chunk(2, -1)
            return torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1)

        q, k = normed_and_rotated(q, heads.q_norm), normed_and_rotated(k, heads.k_norm)
        spoilt = ~(v if cache.scales is not None else v.to(cache.values.dtype)).isfinite().all(-1, keepdim=True)
        k, v = k.masked_fill(spoilt, torch.nan), v.masked_fill(spoilt, 0.0)
        block, offset = inputs.slot_mapping // cache.block_size, inputs.slot_mapping % cache.block_size
        if cache.scales is not None:
            (k, key_scales), (v, value_scales) = to_int8(k), to_int8(v.float())
            cache.scales[block, :, :, offset] = torch.stack((key_scales, value_scales), -1)
        dim = torch.arange(head_dim, device=k.device)
        keys = k.to(cache.keys.dtype).transpose(1, 2)  # [num_tokens, head_dim, num_kv_heads]
        cache.keys[block[:, None], :, dim // pack, offset[:, None], dim % pack] = keys
        cache.values[block, :, offset, :head_dim] = v.to(cache.values.dtype)
        return functional.pad(q * head_dim**-0.5, (0, cache.width - head_dim))

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1).masked_fill_(logits.isnan().any(-1), -1)

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        tokens = torch.arange(logits.shape[1], device=logits.device)
        is_allowed = (bits[:, tokens // 32] >> (tokens % 32)) & 1 == 1
        masked = logits[rows]
        logits[rows] = masked.masked_fill(~(is_allowed | masked.isnan()), -torch.inf)

    def sample(self, logits: Tensor, rows: interface.SamplingRows) -> Tensor:
        scaled = logits.float()
        scaled = (scaled - scaled.amax(-1, keepdim=True)) / rows.temperature[:, None]
        p = scaled.exp()
        p = p.masked_fill(p < rows.min_p[:, None], 0.0).double()
        descending = p.sort(-1, descending=True).values
        width = logits.shape[1]
        k = rows.top_k.masked_fill(rows.top_k == 0, width).clamp(max=width)
        p = p.masked_fill(p < descending.gather(-1, k[:, None] - 1), 0.0)
        descending = p.sort(-1, descending=True).values
        enough = descending.cumsum(-1) >= rows.top_p[:, None] * descending.sum(-1, keepdim=True)
        last = enough.int().argmax(-1, keepdim=True)
        is_on = (rows.top_p < 1)[:, None]
        p = p.masked_fill(is_on & (p < descending.gather(-1, last)), 0.0)
        cumulative = p.cumsum(-1)
        total = cumulative[:, -1:]
        drawn = (cumulative > rows.uniform[:, None] * total).int().argmax(-1)
        return drawn.masked_fill(~(total[:, 0] > 0), -1)

    def logsumexp(self, logits: Tensor) -> Tensor:
        return logits.float().logsumexp(-1)
