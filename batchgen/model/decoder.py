"""Decoder-only network over a ragged batch: ``h += mix(norm(h)); h += feed_forward(norm(h))`` per layer, norm and head.

``mix`` is attention or a short convolution. Families differ only in data, ``ModelConfig`` and tensor names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.kernels.inputs import ModelInput
from batchgen.kernels.interface import Embedding, Kernels, Linear, TableEmbedding
from batchgen.model.config import CONV, LayerShape, ModelConfig
from batchgen.model.layers import Attention, ExpertFeedForward, FeedForward, ShortConv
from batchgen.model.rope import Rotary
from batchgen.model.state import StateCache
from batchgen.model.weights import NamedTensors, TensorSource, untied


class Layer:
    """A mixer and a feed-forward, each after a norm, each added to the residual stream."""

    def __init__(self, tensors: NamedTensors, shape: LayerShape, config: ModelConfig, kernels: Kernels) -> None:
        self.mixer: Attention | ShortConv
        if shape.mixer == CONV:
            self.mixer = ShortConv(tensors, config, kernels)
        else:
            self.mixer = Attention(tensors, shape, config, kernels)
        self.feed_forward: FeedForward | ExpertFeedForward
        if shape.experts is None:
            self.feed_forward = FeedForward(tensors, shape, config, kernels)
        else:
            self.feed_forward = ExpertFeedForward(tensors, shape.experts, config, kernels)
        self.mixer_norm = tensors.norm("mixer_norm", config.hidden_size)
        self.feed_forward_norm = tensors.norm("feed_forward_norm", config.hidden_size)
        self.rope = config.ropes.index(shape.rope) if shape.rope else 0

    @property
    def linears(self) -> list[tuple[Linear, int]]:
        """All linears that a token passes through, each with the width of its input."""
        return self.mixer.linears + self.feed_forward.linears


class Decoder:
    """The whole network. ``forward`` is a function of its inputs and the state that it is given."""

    def __init__(self, config: ModelConfig, source: TensorSource, kernels: Kernels) -> None:
        tensors = NamedTensors(source, config)
        self.config = config = untied(config, tensors)
        self.kernels = kernels
        self.dtype = source.dtype  # of activations
        table = tensors.take("embedding", config.vocab_size, config.hidden_size)
        self.device = table.device
        self.embedding: Embedding
        self.lm_head: Linear | None = None
        if config.tie_embedding and config.has_head:
            self.embedding, self.lm_head = kernels.tied_embedding(table, self.dtype)
        else:
            self.embedding = TableEmbedding(kernels, table, self.dtype)
            if config.has_head:
                self.lm_head = kernels.linear(tensors.take("head", config.vocab_size, config.hidden_size))
            elif config.labels:
                self.lm_head = kernels.linear(source.take("score.weight", (len(config.labels), config.hidden_size)))
        self.layers = [Layer(tensors.of(layer=i), shape, config, kernels) for i, shape in enumerate(config.layers)]
        self.last_attention = next((layer for layer in self.layers[::-1] if isinstance(layer.mixer, Attention)), None)
        final_norm = tensors.norm("final_norm", config.hidden_size)
        self.norms = [*(layer.mixer_norm for layer in self.layers), final_norm]  # of layer inputs, then the last
        scale = torch.tensor(config.embedding_scale, dtype=self.dtype if config.rounds_embedding_scale else None)
        self.embedding_scale = float(scale)
        self.rotary = Rotary(config, self.device)
        source.finish("" if config.has_head else tensors.name("head"))

    @property
    def numerics(self) -> dict[str, str]:
        """``dtype``, ``device``, the variant of ``kernels``, and unusual settings: all that may change tokens."""
        dtype = str(self.dtype).removeprefix("torch.")
        integers = {"weights": self.kernels.weights, "activations": self.kernels.activations}
        named = {name: value for name, value in integers.items() if value != "auto"}
        named |= {"head": "untied"} if self.config.has_unexpected_head else {}  # earlier versions ignored it
        return {"dtype": dtype, "device": self.device.type, "kernels": self.kernels.variant, **named}

    @torch.inference_mode()
    def forward(self, inputs: ModelInput, state: StateCache, max_position: int) -> Tensor:
        """One step: computes the tokens of ``inputs``, extends ``state``, returns logits [num_logits, vocab_size].

        Without a head these are the normed hidden states [num_logits, hidden_size], or logits of labels. After the last
        attention's keys and values only the tokens of ``inputs.subset`` are computed, in the last feed-forward only
        those whose logits are wanted. ``max_position`` is the largest position in the batch.
        """
        tables = self.rotary.upto(max_position + 1)
        kv, conv = iter(state.kv), iter(state.conv)
        h = self._scaled(self.embedding(inputs.token_ids), self.embedding_scale)
        x = self.kernels.rms_norm(h, self.norms[0], self.config.norm_eps)
        for layer, next_norm in zip(self.layers, self.norms[1:], strict=True):
            if isinstance(layer.mixer, Attention):
                subset = inputs.subset if layer is self.last_attention else None
                mixed = layer.mixer.mix(x, next(kv), inputs, tables[layer.rope], subset)
                if subset is not None:
                    h, inputs = self.kernels.take_rows(h, subset.rows), subset.inputs
            else:
                mixed = layer.mixer.mix(x, next(conv), inputs)
            if layer is self.layers[-1]:
                mixed, h = (self.kernels.take_rows(part, inputs.logits_indices) for part in (mixed, h))
            h, x = layer.mixer.out_proj(mixed, h, layer.feed_forward_norm)
            h, x = layer.feed_forward(x, h, next_norm)
        x = x if self.lm_head is None else self.lm_head(x)
        return self._scaled(x, self.config.logits_scale if self.config.has_head else 1.0)

    def _scaled(self, x: Tensor, by: float) -> Tensor:
        """Numbers times a factor, if the family has one."""
        if by != 1:
            self.kernels.scale(x, by)
        return x
