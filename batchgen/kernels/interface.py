"""Interface of the kernels, the few operations in which a step spends its time: the model does not know its back end.

``torch_kernels`` has what ``plain`` and ``cuda`` compute with torch; ``cpu`` and ``cuda`` are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from batchgen.kernels.inputs import ConvState, KVCache, LogitsSubset, ModelInput


class Linear(Protocol):
    """A matrix product with a fixed weight [out_features, in_features]."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``x @ weight.T (+ bias) (+ residual)`` for x [rows, in_features]; [rows, out_features]."""


class GatedLinear(Protocol):
    """Two matrix products of one input; the first gates the second."""

    linear: Linear  # both products side by side; the back end decides the order of columns

    def __call__(self, x: Tensor) -> Tensor:
        """``silu(x @ gate.T) * (x @ up.T)`` for x [rows, in_features], or gelu for silu; [rows, out_features]."""


class Embedding(Protocol):
    """A table [vocab_size, width] for looking up rows."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        """The rows of ids, int64 [num_tokens], which are not checked; [num_tokens, width] in the model's dtype."""


class SparseFeedForward(Protocol):
    """Feed-forward of several experts; each row uses a few of them."""

    @property
    def linears(self) -> list[tuple[Linear, Linear]]:
        """The linears of each expert: the gated product, and the last one."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor) -> Tensor:
        """``residual`` plus a row's experts ``down(silu(gate x) * up x)`` times their weights; [rows, width].

        ids and weights [rows, num_active] are from a ``Router``. Each expert's output is rounded as any linear's; they
        are added in float32, in the order of ascending ids, then the residual, and the sum is rounded once.
        """


Router = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Takes x [rows, width]; gives int32 ids and float32 weights [rows, num_active] as ``Routing`` says."""


class Recorder(Protocol):
    """Records the kernels that a piece of work launches, to launch them again when only the contents of memory differ.

    All that the work computes must come from kernels. Since kernels run during the work or after it, the work must
    neither read their results nor change their inputs. Other memory that kernels read must outlive the recording.
    """

    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Tensor]]:
        """The result of ``work``, and a function that repeats it on the same memory.

        A result is valid until the next one of any recording.
        """


class Kernels(Protocol):
    """Operations of a back end. All tensors are contiguous; results are new tensors unless said otherwise.

    While a ``Recorder`` records or runs work, results are only valid at its end.
    """

    name: str
    weights: str  # of linears: "auto" as they are given, or "int8"; see ``quantize``
    activations: str  # inputs of linears: "auto" as they are given, or "int8"; see ``torch_kernels.Int8Linear``
    batch_invariant: bool = True  # whether a row's bits depend on its own sequence alone
    notes: tuple[str, ...] = ()  # what the user should know of this choice

    @property
    def variant(self) -> str:
        """Short text for what decides the bits of results, apart from inputs and dtype; complete after all linears.

        It is the same in every run on one kind of machine, and differs if results may differ in their last bits. The
        number of threads is not part of it, since bits must not depend on that.
        """

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """The product with a weight, laid out for this device; the original may be dropped."""

    def gated_linear(self, gate: Tensor, up: Tensor, is_gelu: bool = False) -> GatedLinear:
        """The gated product with two weights of one shape, by silu or gelu; the originals may be dropped."""

    def tied_embedding(self, table: Tensor, dtype: torch.dtype) -> tuple[Embedding, Linear]:
        """A table with rows in ``dtype``, and the linear with the same weight; stored once if possible."""

    def router(self, routing: Routing) -> Router:
        """The choice among experts."""

    def experts(self, weights: Iterable[tuple[Tensor, Tensor, Tensor]]) -> SparseFeedForward:
        """A feed-forward of experts with these weights (gate, up, down), laid out one after the other."""

    def take_rows(self, x: Tensor, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """``x[rows]`` for int64 indices [num_rows], which are not checked; ``dtype`` may turn bfloat16 into float32."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        """Rows of x [rows, width] over their root mean square, times weight [width], rounded; plus ``residual``."""

    def scale(self, x: Tensor, by: float) -> None:
        """Multiply all of x [rows, width] by a float32, in place, rounded."""

    def add_and_norm(
        self, linear: Linear, x: Tensor, residual: Tensor, weight: Tensor, eps: float, post: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``h = linear(x) + residual`` and ``rms_norm(h, weight, eps)``, at the end of each half of a layer.

        With weights ``post`` the product is normed before it is added.
        """
        h = linear(x, residual) if post is None else self.rms_norm(linear(x), post, eps, residual)
        return h, self.rms_norm(h, weight, eps)

    def rope_and_cache(self, qkv: Tensor, heads: Heads, rotary: Tensor, inputs: ModelInput, cache: KVCache) -> Tensor:
        """Norm and rotate queries and keys; write keys and values into ``cache`` (in place), rounded to its type.

        qkv is [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], or wider: what follows is not read. rotary is
        float32 [2, positions, head_dim / 2], cosines then sines. Returns the queries times head_dim**-0.5 as float32
        [num_tokens, num_heads, width], zero from head_dim to the cache's width. int8 holds ``round(x / scale)``, from
        -127 to 127: a scale is a 127th of the largest magnitude of the position's key (or value) in that head, NaN if
        one is not finite. If a value is not finite, the key is NaN and the value zero: tokens that attend to the
        position get NaN, other tokens of the tile multiply a finite value by zero.
        """

    def attention(self, q: Tensor, qkv: Tensor, heads: Heads, inputs: ModelInput, cache: KVCache) -> Tensor:
        """Attention of every token of ``rope_and_cache`` over cached positions, as ``query_blocks`` says.

        If tokens see their whole text, a window is the positions less than ``window`` away. A gated head's output is
        multiplied by the sigmoid of its logit in ``qkv``. Returns [num_tokens, num_heads * head_dim] in the same dtype.
        """

    def attend(
        self, qkv: Tensor, heads: Heads, rotary: Tensor, inputs: ModelInput, cache: KVCache, subset: LogitsSubset | None
    ) -> Tensor:
        """``rope_and_cache`` of all tokens, then ``attention`` of all, or of those in ``subset``."""
        q = self.rope_and_cache(qkv, heads, rotary, inputs, cache)
        if subset is not None:
            q, inputs = self.take_rows(q, subset.rows), subset.inputs
            qkv = self.take_rows(qkv, subset.rows) if heads.is_gated else qkv
        return self.attention(q, qkv, heads, inputs, cache)

    def short_conv(self, bcx: Tensor, weight: Tensor, bias: Tensor, state: ConvState, inputs: ModelInput) -> Tensor:
        """C * conv(B * x) per sequence for bcx [num_tokens, 3 * width]; float32 weight [taps, width], bias [width].

        Writes a sequence's last ``taps - 1`` inputs to its slot of ``state`` and, to each KV block that is full, the
        inputs at its end. If not causal, ``taps // 2`` taps lie after each token, and state is not used.
        """

    def argmax(self, logits: Tensor) -> Tensor:
        """Index of each row's first largest value, int64 [rows]; -1 for a row with a NaN."""

    def argmax_or_none(self, logits: Tensor) -> Tensor:
        """``argmax``, but -1 if all logits are -inf, since then even the first token is forbidden."""
        ids = self.argmax(logits)
        largest = logits.gather(1, ids.clamp(min=0)[:, None])[:, 0]
        return ids.masked_fill_(largest == -torch.inf, -1)

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """One token id per row drawn as ``SamplingRows`` says, int64 [rows]; -1 for a row that is not finite."""

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """Set forbidden logits [num_rows, vocab_size] to -inf in place, in ``rows`` (int64 [num_masked], no row twice).

        A token is forbidden if bit ``token % 32`` of word ``token // 32`` of its ``bits`` (int32 [num_masked,
        ceil(vocab_size / 32) or more]) is 0. A NaN stays, so that the row is still recognized as not finite.
        """

    def logsumexp(self, logits: Tensor) -> Tensor:
        """The logarithm of the sum of each row's exponentials, float32 [rows]; NaN or inf for a row not finite."""


class TableEmbedding:
    """``Embedding`` of a table in its own dtype, or in ``dtype`` if that is smaller."""

    def __init__(self, kernels: Kernels, table: Tensor, dtype: torch.dtype) -> None:
        self.table = table.to(dtype) if dtype.itemsize < table.itemsize else table
        self._take_rows = kernels.take_rows
        self._dtype = dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._take_rows(self.table, token_ids, self._dtype)


class PlainLinear:
    """``Linear`` by torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight.clone()  # the original may be a view of a mapped file, and would hold on to all of it
        self.bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.weight.dtype is not x.dtype:  # as a checkpoint stores it: see ``model.weights.stored_dtype``
            self.weight = self.weight.to(x.dtype)
        y = functional.linear(x, self.weight, self.bias)
        return y if residual is None else y + residual


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of each row's draw, all [rows].

    Probabilities are softmax(logits / temperature). ``min_p`` (float32) drops tokens below that share of the largest;
    ``top_k`` (int64, 0 = off) keeps the k largest and all that equal the last of them; ``top_p`` (float64) keeps the
    largest ones until their sum reaches that share of the rest, and all that equal the last. ``uniform`` (float64, in
    [0, 1)) picks from the cumulative distribution over token ids.
    """

    temperature: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    uniform: Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads of attention, and the RMS norm weights [head_dim] of its queries and keys if it norms them.

    A head attends to the last ``window`` positions, if that is not 0. If heads are gated, the last columns of ``qkv``
    are logits of gates, one per head.
    """

    num_heads: int
    head_dim: int
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    window: int = 0
    is_gated: bool = False


@dataclass(frozen=True, slots=True)
class Routing:
    """Choice of the ``num_active`` experts that a row uses, and the weights of their outputs; all of it in float32.

    Scores are softmax or sigmoid of the product with ``weight`` [num_experts, width]. The experts with the largest
    score plus ``bias`` [num_experts] are chosen (the lower id if equal, NaN last), and listed by ascending id. Weights
    are the scores, divided by (their sum + ``normalizer_eps``) if ``is_normalized``, times ``scale``.
    """

    weight: Tensor
    bias: Tensor | None
    num_active: int
    is_softmax: bool
    is_normalized: bool = True
    normalizer_eps: float = 0.0
    scale: float = 1.0
