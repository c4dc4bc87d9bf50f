"""Shape of a decoder-only language model of any family, and the sizes and costs that follow from it.

The module of a family makes it from the checkpoint's ``config.json``. Imports no torch, so that planning can use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from batchgen.kernels.processor import has_matrix_unit, multiplies_bfloat16

ATTENTION = "full_attention"
CONV = "conv"
LANES = 16  # values per vector of the CPU kernels: keys and head_dim are padded to whole vectors
_KV_BYTES = {"bfloat16": (2, 0), "int8": (1, 4)}  # of a cached number, and of the scale of a position's key or value


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the matrices of a quantized checkpoint are stored; they are read back into the dtype of the model.

    ``group_sizes`` are the numbers of inputs that share a scale, None for all of an output's; ``block`` is the number
    of outputs and of inputs that do. ``zero_offset`` is added to stored zero points. ``has_activations``: the
    checkpoint quantizes activations too, which is not done here.
    """

    method: str
    bits: frozenset[int]
    group_sizes: frozenset[int | None]
    block: tuple[int, int] | None = None
    zero_offset: int = 0
    has_activations: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of one model, all derived sizes resolved.

    ``layer_types`` holds ``"conv"`` or ``"full_attention"`` per layer; ``ff_dim`` is the feed-forward width of the
    weights; ``eos_token_ids`` end a generation. ``tensor_names`` maps the role of each tensor to its name in the
    checkpoint, without ``.weight`` and with ``{layer}`` for the layer's index. Families without convolutions leave
    the fields ``conv_*`` as they are.
    """

    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ff_dim: int
    norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_embedding: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    tensor_names: Mapping[str, str] = field(compare=False, repr=False)
    conv_l_cache: int = 1  # taps of the short convolution
    conv_bias: bool = False
    quantization: Quantization | None = None
    is_gguf: bool = False

    @property
    def saved_dtype(self) -> str:
        """The dtype of the checkpoint's numbers; empty if they are quantized, and read back into that of the model."""
        return "" if self.quantization or self.is_gguf else self.dtype

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def num_attention_layers(self) -> int:
        return self.layer_types.count(ATTENTION)

    @property
    def num_conv_layers(self) -> int:
        return self.layer_types.count(CONV)

    @property
    def num_tail_layers(self) -> int | None:
        """Layers after the last one with attention; None if no layer has any."""
        return self.layer_types[::-1].index(ATTENTION) if ATTENTION in self.layer_types else None

    @property
    def tail_reach(self) -> int | None:
        """Number of earlier tokens that the layers after the last attention read; None if there is no attention."""
        return None if self.num_tail_layers is None else self.num_tail_layers * (self.conv_l_cache - 1)

    @property
    def linear_params_per_token(self) -> int:
        """Weights of all linears but the output projection; multiplying one token by one weight costs 2 FLOP."""
        conv, attention, feed_forward = self._layer_params()
        return self.num_conv_layers * conv + self.num_attention_layers * attention + self.num_layers * feed_forward

    @property
    def tail_params_per_token(self) -> int:
        """Those of them after the last attention's keys and values, which only some tokens need."""
        if self.num_tail_layers is None:
            return 0
        conv, _, feed_forward = self._layer_params()
        query_and_output = 2 * self.hidden_size * self.head_dim * self.num_heads
        return query_and_output + self.num_tail_layers * conv + (self.num_tail_layers + 1) * feed_forward

    @property
    def logits_params_per_token(self) -> int:
        """Weights of the output projection, which only tokens with logits need."""
        return self.vocab_size * self.hidden_size

    def _layer_params(self) -> tuple[int, int, int]:
        """Weights of one short convolution, one attention, one feed-forward."""
        h = self.hidden_size
        attention = 2 * h * self.head_dim * (self.num_heads + self.num_kv_heads)
        return 4 * h * h, attention, 3 * h * self.ff_dim

    def kv_block_bytes(self, block_size: int, itemsize: int, kv_dtype: str = "auto") -> int:
        """Bytes of one block over all layers, its padding and the convolution state at its end included.

        Values have ``itemsize`` bytes; keys and values too where ``kv_dtype`` is "auto".
        """
        lanes, (kv_itemsize, scale_bytes) = padded(block_size), _KV_BYTES.get(kv_dtype, (itemsize, 0))
        per_head = padded(self.head_dim) * (lanes + block_size) * kv_itemsize + 2 * lanes * scale_bytes
        return self.num_attention_layers * self.num_kv_heads * per_head + self.conv_slot_bytes(itemsize)

    def kv_position_bytes(self, itemsize: int, kv_dtype: str = "auto") -> int:
        """Bytes of the keys and values of one position over all layers, without padding."""
        kv_itemsize, scale_bytes = _KV_BYTES.get(kv_dtype, (itemsize, 0))
        return 2 * self.num_attention_layers * self.num_kv_heads * (self.head_dim * kv_itemsize + scale_bytes)

    def conv_slot_bytes(self, itemsize: int) -> int:
        """Bytes of one sequence's convolution state over all layers."""
        return self.num_conv_layers * (self.conv_l_cache - 1) * self.hidden_size * itemsize

    def weight_bytes(self, dtype: str, weights: str = "auto", activations: str = "auto", *, is_cpu: bool) -> float:
        """Bytes of memory per weight of the linears of a model that computes in ``dtype``.

        Integers have a scale of 2 bytes per 32 of them, or of 4 per 128 where activations are integers too. Only the
        CPU's own kernels keep integers, and bfloat16 weights under float32; other libraries get them widened.
        """
        is_library = dtype == "float16" or (dtype == "bfloat16" and activations == "auto" and has_matrix_unit())
        if not is_cpu or is_library:
            return item_bytes(dtype)
        if weights == "int8":
            return 1 + (4 / 128 if activations == "int8" else 2 / 32)
        return item_bytes("bfloat16" if self.saved_dtype == "bfloat16" else dtype)

    def model_bytes(self, dtype: str, weights: str = "auto", activations: str = "auto", *, is_cpu: bool) -> int:
        """Bytes of all weights in memory; an embedding table that is also the output projection counts as that."""
        params = self.linear_params_per_token + self.logits_params_per_token
        table = 0 if self.tie_embedding else self.logits_params_per_token * item_bytes(dtype)
        return round(params * self.weight_bytes(dtype, weights, activations, is_cpu=is_cpu)) + table

    def auto_dtype(self, *, is_cpu: bool) -> str:
        """What dtype "auto" means: on the CPU bfloat16 if it multiplies that natively, elsewhere the checkpoint's."""
        if is_cpu:
            return "bfloat16" if multiplies_bfloat16() else "float32"
        return self.dtype


def item_bytes(dtype: str) -> int:
    """Bytes of one value."""
    return 2 if dtype in ("bfloat16", "float16") else 4


def padded(n: int) -> int:
    """``n`` rounded up to whole vectors of ``LANES`` values."""
    return -(-n // LANES) * LANES
