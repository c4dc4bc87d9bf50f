"""Shape of a decoder-only language model of any family, and the sizes and costs that follow from it.

Families differ only in its values, read from ``config.json``. Does not import torch, so that planning can use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from batchgen.kernels.cpu.layout import TILE_STEP
from batchgen.kernels.processor import multiplies_bfloat16

ATTENTION = "full_attention"
CONV = "conv"
LANES = 16  # values per vector of the CPU kernels: keys and head_dim are padded to whole vectors
_KV_BYTES = {"bfloat16": (2, 0), "int8": (1, 4)}  # of a cached number, and of the scale of a position's key or value


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of some layers: base ``theta``; ``model.rope`` has the formula of each ``kind``.

    "proportional" rotates only ``rotated_share`` of the head, from its first pair on. Queries and keys are multiplied
    by ``scale``, and so scores by its square, for models that do not divide scores by the root of ``head_dim``.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_positions: int = 0
    rotated_share: float = 1.0
    scale: float = 1.0

    def scaled(self, by: float) -> Rope:
        """The same rotation, with queries and keys also multiplied by ``by``."""
        return replace(self, scale=self.scale * by)

    @property
    def num_positions(self) -> int:
        """Positions to which "yarn" stretches a context; 0 for the other kinds, whose files give them elsewhere."""
        return round(self.factor * self.original_positions) if self.kind == "yarn" else 0


NO_ROPE = Rope(1.0, "proportional", rotated_share=0.0)  # all cosines 1, all sines 0: nothing is rotated


@dataclass(frozen=True, slots=True)
class Experts:
    """A feed-forward of ``num_experts`` experts; each token uses the ``num_active`` ones with the highest scores.

    Scores are ``sigmoid`` or ``softmax`` of the router's float32 logits; with ``has_bias``, a bias counts for the
    choice only. Weights are scores times ``scale``, divided by (their sum + ``normalizer_eps``) if ``is_normalized``.
    """

    num_experts: int
    num_active: int
    ff_dim: int
    scores: str
    has_bias: bool = False
    is_normalized: bool = True
    normalizer_eps: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer: its mixer, ``"conv"`` or ``"full_attention"``, and its feed-forward, dense of ``ff_dim`` or experts.

    With a ``window``, a position attends to itself and the ``window - 1`` before it, and as many after it in a model
    that is not causal; 0: to all.
    """

    mixer: str
    ff_dim: int
    rope: Rope | None = None
    window: int = 0
    experts: Experts | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of one model, all derived sizes resolved.

    ``eos_token_ids`` end a generation. ``has_qk_norm``: queries and keys are normed per head; ``has_attention_gate``: a
    head's output is multiplied by the sigmoid of a gate; ``has_post_norms``: outputs of mixers and feed-forwards are
    normed; ``norm_offset``: added to the weights of norms; ``has_gelu``: feed-forwards are gated by gelu, not silu;
    ``biases``: roles of the modules that add one. Rows of the embedding are multiplied by ``embedding_scale``, in the
    model's dtype if ``rounds_embedding_scale``, and logits by ``logits_scale``. ``tensor_names``: by role of each
    tensor, its name in the checkpoint, without ``.weight``, with ``{layer}`` and ``{expert}``; ``module_names``: other
    names that transformers, and so adapters, use for parts of a module. Without ``is_causal``, each token sees its
    whole text. Without ``has_head`` the model gives its last hidden state, or the logits of ``labels``, of which
    ``scores`` are the "softmax", the "sigmoid", or the "logits" themselves. ``has_unexpected_head``: the output
    projection differs from the embedding, though ``config.json`` says that they are tied.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerShape, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position_embeddings: int
    tie_embedding: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    tensor_names: Mapping[str, str] = field(compare=False, repr=False)
    module_names: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    has_qk_norm: bool = True
    has_attention_gate: bool = False
    has_post_norms: bool = False
    norm_offset: float = 0.0
    has_gelu: bool = False
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False
    logits_scale: float = 1.0
    biases: tuple[str, ...] = ()
    conv_l_cache: int = 1  # taps of the short convolution
    is_gguf: bool = False
    has_adapter: bool = False
    is_causal: bool = True
    has_head: bool = True
    has_unexpected_head: bool = False
    unread_parts: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    scores: str = ""

    @property
    def saved_dtype(self) -> str:
        """The dtype of the checkpoint's numbers; "" for GGUF and with an adapter, as tensors get the model's dtype."""
        return "" if self.is_gguf or self.has_adapter else self.dtype

    def stored_name(self, module: str) -> str:
        for other, name in self.module_names.items():
            module = module.replace(other, name)
        return module

    @property
    def feed_forward(self) -> str:
        """The kind of the feed-forwards, except in the first layers: "dense" or "experts"."""
        return "experts" if any(layer.experts for layer in self.layers) else "dense"

    @property
    def parts(self) -> str:
        """Parts that need special kernels: "dense" or "experts", "scales" for factors, "tiles" if heads fill tiles."""
        scales = " scales" if (self.embedding_scale, self.logits_scale) != (1, 1) else ""
        return self.feed_forward + scales + ("" if self.head_dim % TILE_STEP else " tiles")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def layer_types(self) -> tuple[str, ...]:
        return tuple(layer.mixer for layer in self.layers)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embeddings of all layers, each once."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope))

    @property
    def ff_dim(self) -> int:
        """The largest feed-forward width that a token uses in one layer."""
        return max(map(_active_width, self.layers))

    @property
    def num_attention_layers(self) -> int:
        return self.layer_types.count(ATTENTION)

    @property
    def window(self) -> int:
        """The window of the layers that have one, the smallest if they differ; 0 if none has."""
        return min((layer.window for layer in self.layers if layer.window), default=0)

    @property
    def num_conv_layers(self) -> int:
        return self.layer_types.count(CONV)

    @property
    def num_tail_layers(self) -> int | None:
        """Layers after the last one with attention, which can skip some tokens; None for a model without attention."""
        return self.layer_types[::-1].index(ATTENTION) if ATTENTION in self.layer_types else None

    @property
    def tail_reach(self) -> int | None:
        """Tokens before a token (if not causal, also after it) that tail layers read; None without attention."""
        reach = self.conv_l_cache - 1 if self.is_causal else self.conv_l_cache // 2
        return None if self.num_tail_layers is None else self.num_tail_layers * reach

    @property
    def linear_params_per_token(self) -> int:
        """Weights of the linears that one token uses, except the output projection; each costs 2 FLOP."""
        return sum(map(self._params_per_token, self.layers))

    @property
    def linear_params(self) -> int:
        """Weights of all linears but the output projection."""
        met = sum(layer.experts.num_active * layer.experts.ff_dim for layer in self.layers if layer.experts)
        return self.linear_params_per_token + self.expert_params - 3 * self.hidden_size * met

    @property
    def expert_params(self) -> int:
        """Parameters of experts, which a step reads only if one of its tokens uses them."""
        experts = [layer.experts for layer in self.layers if layer.experts]
        return 3 * self.hidden_size * sum(some.num_experts * some.ff_dim for some in experts)

    def expected_experts(self, num_tokens: int) -> float:
        """The share of a layer's experts that ``num_tokens`` use, if each expert is equally likely for every token.

        This is an upper bound: tokens with similar choices use fewer. 0 for a model without experts.
        """
        shares = (some.num_active / some.num_experts for layer in self.layers if (some := layer.experts))
        return 1.0 - (1.0 - next(shares, 0.0)) ** num_tokens

    @property
    def tail_params_per_token(self) -> int:
        """Parameters per token after the last attention's keys and values, which only some tokens need."""
        if self.num_tail_layers is None:
            return 0
        tail = self.layers[self.num_layers - self.num_tail_layers - 1 :]
        keys_and_values = 2 * self.hidden_size * self.head_dim * self.num_kv_heads
        return sum(map(self._params_per_token, tail)) - keys_and_values

    @property
    def logits_params_per_token(self) -> int:
        """Weights of the output projection, which only tokens with logits need."""
        return (self.vocab_size if self.has_head else len(self.labels)) * self.hidden_size

    def _params_per_token(self, layer: LayerShape) -> int:
        """Weights of a layer's linears that one token uses; of experts, the router and the active ones."""
        heads = 2 * self.head_dim * (self.num_heads + self.num_kv_heads)
        gates = self.num_heads if self.has_attention_gate else 0
        mixer = 4 * self.hidden_size if layer.mixer == CONV else heads + gates
        num_experts = layer.experts.num_experts if layer.experts else 0
        return self.hidden_size * (mixer + 3 * _active_width(layer) + num_experts)

    def kv_block_bytes(self, block_size: int, itemsize: int, kv_cache_dtype: str = "auto") -> int:
        """Bytes of a block over all layers, with padding and convolution state; "auto" has ``itemsize`` per number."""
        lanes, (kv_itemsize, scale_bytes) = padded(block_size), _KV_BYTES.get(kv_cache_dtype, (itemsize, 0))
        per_head = padded(self.head_dim) * (lanes + block_size) * kv_itemsize + 2 * lanes * scale_bytes
        return self.num_attention_layers * self.num_kv_heads * per_head + self.conv_slot_bytes(itemsize)

    def kv_position_bytes(self, itemsize: int, kv_cache_dtype: str = "auto") -> int:
        """Bytes of the keys and values of one position over all layers, without padding."""
        kv_itemsize, scale_bytes = _KV_BYTES.get(kv_cache_dtype, (itemsize, 0))
        return 2 * self.num_attention_layers * self.num_kv_heads * (self.head_dim * kv_itemsize + scale_bytes)

    def conv_slot_bytes(self, itemsize: int) -> int:
        """Bytes of one sequence's convolution state over all layers."""
        return self.num_conv_layers * (self.conv_l_cache - 1) * self.hidden_size * itemsize

    def weight_bytes(self, dtype: str, weights: str = "auto", activations: str = "auto", *, is_cpu: bool) -> float:
        """Bytes of memory per linear weight, for a model that computes in ``dtype``.

        Integers have a scale of 2 bytes per 32 of them, or of 4 bytes per 128 if activations are integers too. Only
        CPUs keep integers, and bfloat16 weights in a float32 model; for GPUs they are widened.
        """
        if not is_cpu:
            return item_bytes(dtype)
        if weights == "int8":
            return 1 + (4 / 128 if activations == "int8" else 2 / 32)
        return item_bytes("bfloat16" if self.saved_dtype == "bfloat16" else dtype)

    def model_bytes(self, dtype: str, weights: str = "auto", activations: str = "auto", *, is_cpu: bool) -> int:
        """Bytes of all weights in memory. A tied table counts once, or twice if the embedding needs another form.

        The CPU cannot look up rows in integers, so it also keeps the table as floating-point numbers.
        """
        params = self.linear_params + self.logits_params_per_token
        is_shared = self.tie_embedding and self.has_head and not (is_cpu and weights == "int8")
        is_narrow = is_cpu and dtype == "float32" and self.saved_dtype == "bfloat16"
        bytes_per_value = item_bytes("bfloat16" if is_narrow else dtype)
        table = 0 if is_shared else self.vocab_size * self.hidden_size * bytes_per_value
        return round(params * self.weight_bytes(dtype, weights, activations, is_cpu=is_cpu)) + table

    def auto_dtype(self, *, is_cpu: bool) -> str:
        """The dtype of "auto": on the CPU bfloat16 if it multiplies that natively, elsewhere the checkpoint's."""
        if is_cpu:
            return "bfloat16" if multiplies_bfloat16() else "float32"
        return self.dtype


def _active_width(layer: LayerShape) -> int:
    """The feed-forward width of one layer that a token uses."""
    return layer.experts.num_active * layer.experts.ff_dim if layer.experts else layer.ff_dim


def item_bytes(dtype: str) -> int:
    """Bytes of one value."""
    return 2 if dtype in ("bfloat16", "float16") else 4


def padded(n: int) -> int:
    """``n`` rounded up to whole vectors of ``LANES`` values."""
    return -(-n // LANES) * LANES
