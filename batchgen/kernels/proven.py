"""Kernels that compute each operation twice, by a back end and by plain torch, and note where the two differ.

A small model that runs on them asks a back end all that the model at hand will ask it, on the machine at hand. What
differs by more than rounding, or fails, is plain torch's from then on, for that operation alone: see ``with_plain``. An
error of the driver that spoils the whole process, such as an address that does not exist, ends the proof as it would
end the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from batchgen.kernels.interface import (
    Embedding,
    GatedLinear,
    Kernels,
    Linear,
    Router,
    Routing,
    SamplingRows,
    SparseFeedForward,
    TwoStepGatedLinear,
)
from batchgen.kernels.plain import PlainKernels
from batchgen.kernels.reference import ReferenceKernels, rank, weigh

BATCH = "batch"  # in place of an operation: the promise that a row's bits depend on its own sequence alone
_OPERATIONS = ("take_rows", "rms_norm", "swiglu", "rope_and_cache", "attention", "short_conv", "scale", "mask")
_OF_LOGITS = ("argmax", "sample", "logsumexp")
_COMPOSED = ("attend", "argmax_or_none")  # of other operations, where a back end has no kernel of its own
_METHODS = {"embedding": "tied_embedding"}  # that are not called as their operation
# The argument that each changes, or that it could spoil.
_WRITTEN = {"rope_and_cache": 4, "attend": 4, "attention": 1, "short_conv": 3, "mask": 0, "scale": 0}
_CHOOSING = ("argmax", "sample", "router")
_PRODUCTS = ("linear", "gated_linear", "experts")
_ROUNDED_WITHIN = ("rope_and_cache", "attend")  # to the dtype of the model or of the cache, and then computed with
# The most that rows may differ, as a share of a row's length: some four times what rounding makes of it.
_TOLERANCES = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
_COARSEST = torch.bfloat16
_CHOICE_TOLERANCE = 1e-4  # of experts' scores, and of a draw from the border to another token
_MOST_WORDS = 200  # characters of an error


class ProvenKernels:
    """``Kernels`` that give what ``plain`` gives, and hold what ``fast`` gives against it; else they are as ``fast``.

    Attributes:
        faults: operations of ``fast`` that are not to be used, and why.
        counts: how often each operation was compared.
    """

    name = "proven"
    attend, argmax_or_none = Kernels.attend, Kernels.argmax_or_none

    def __init__(self, fast: Kernels, plain: PlainKernels) -> None:
        self.fast, self.plain = fast, plain
        self.faults: Mapping[str, str] = {}
        self.counts: Counter[str] = Counter()
        own = [name for name in _COMPOSED if getattr(type(fast), name) is not getattr(Kernels, name)]
        for name in (*_OPERATIONS, *_OF_LOGITS, *own):
            setattr(self, name, _Doubled(self, name, getattr(fast, name), getattr(plain, name)))
        self._fuses_norms = type(fast).add_and_norm is not Kernels.add_and_norm

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fast, name)

    def recorder(self) -> None:
        return None

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        linear: Linear = self._pair("linear", lambda kernels: kernels.linear(weight, bias))
        return linear

    def gated_linear(self, gate: Tensor, up: Tensor, is_gelu: bool = False) -> GatedLinear:
        if type(self.fast).gated_linear is ReferenceKernels.gated_linear:  # of two operations
            return TwoStepGatedLinear(self, gate, up, is_gelu)
        gated: GatedLinear = self._pair("gated_linear", lambda kernels: kernels.gated_linear(gate, up, is_gelu))
        return gated

    def tied_embedding(self, table: Tensor, dtype: torch.dtype) -> tuple[Embedding, Linear]:
        embedding: Embedding = self._pair("embedding", lambda kernels: kernels.tied_embedding(table, dtype)[0])
        return embedding, self.linear(table)

    def router(self, routing: Routing) -> Router:
        router: Router = self._pair("router", lambda kernels: kernels.router(routing))
        return router

    def experts(self, weights: Iterable[tuple[Tensor, Tensor, Tensor]]) -> SparseFeedForward:
        listed = list(weights)
        experts: SparseFeedForward = self._pair("experts", lambda kernels: kernels.experts(iter(listed)))
        return experts

    def add_and_norm(
        self, linear: Linear, x: Tensor, residual: Tensor, weight: Tensor, eps: float, post: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if not self._fuses_norms:
            return Kernels.add_and_norm(self, linear, x, residual, weight, eps, post)
        y = linear(x)

        def product(x: Tensor, residual: Tensor | None = None) -> Tensor:
            return y if residual is None else y + residual

        args = (product, x, residual, weight, eps, post)
        name, both = "add_and_norm", (self.fast.add_and_norm, self.plain.add_and_norm)
        result: tuple[Tensor, Tensor] = self.compare(name, *both, args, {})
        return result

    def _pair(self, name: str, make: Callable[[Kernels], Any]) -> Any:
        """Both forms of what is made of weights; the plain one alone where the other cannot be made."""
        plain = make(self.plain)
        try:
            return _Doubled(self, name, make(self.fast), plain)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a compiler or a driver; Triton's have no base of their own
            self._note(name, _words(error))
            return plain

    def compare(
        self, name: str, fast: Callable[..., Any], plain: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """The result of plain torch, which also goes on: an error of one operation must not show in the next."""
        place = _WRITTEN.get(name)
        before = None if place is None else _copied(args[place])
        expected = plain(*args, **kwargs)
        if name in self.faults:
            return expected
        again = args if place is None else (*args[:place], before, *args[place + 1 :])
        try:
            got = fast(*again, **kwargs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._note(name, _words(error))
            return expected
        self.counts[name] += 1
        if name == "short_conv" and not args[4].is_causal:  # whose state is of no use
            place = None
        pairs = _pairs(expected, got) + ([] if place is None else _pairs(args[place], before))
        if not self._agree(name, pairs, plain, args):
            share = f"by {max(_apart(*pair) for pair in pairs):.1%}"
            self._note(name, f"it differs from plain torch {'in choices' if name in _CHOOSING else share}")
        return expected

    def _note(self, name: str, why: str) -> None:
        self.faults = {**self.faults, name: why}

    def _agree(self, name: str, pairs: list[tuple[Tensor, Tensor]], plain: Any, args: tuple[Any, ...]) -> bool:
        if name == "sample":
            return _draws_agree(*pairs[0], *args)
        if name == "router":
            return _choices_agree([got for _, got in pairs], plain.linear(args[0].float()), plain.routing)
        within = [args[0].dtype] if name in _ROUNDED_WITHIN else []
        if name in _PRODUCTS and self.fast.activations == "int8":  # a last bit decides how an input is rounded
            within.append(_COARSEST)
        if name == "attend":  # with the numbers that it has just cached
            within += [_COARSEST if dtype is torch.int8 else dtype for dtype in (wanted.dtype for wanted, _ in pairs)]
        return all(
            _apart(wanted, got) <= max(_TOLERANCES.get(dtype, 0.0) for dtype in (wanted.dtype, *within))
            for wanted, got in pairs
        )


class _Doubled:
    """One operation in both forms; its attributes are those of the fast one."""

    def __init__(self, kernels: ProvenKernels, name: str, fast: Any, plain: Any) -> None:
        self._kernels, self._name, self._fast, self._plain = kernels, name, fast, plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._kernels.compare(self._name, self._fast, self._plain, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fast, name)


def with_plain(fast: Kernels, plain: PlainKernels, faults: Mapping[str, str], where: str) -> Kernels:
    """``fast`` with the methods of ``plain`` for what has ``faults``; the user is told, of the device ``where``."""
    for name in faults.keys() - {BATCH}:
        method = _METHODS.get(name, name)
        setattr(fast, method, getattr(plain, method))
    slower = [
        f"{name} is computed by plain torch on {where}, which is slower: {why}"
        for name, why in faults.items()
        if name != BATCH
    ]
    unordered = [f"tokens may depend on the batch on {where}: {faults[BATCH]}"] if BATCH in faults else []
    fast.faults, fast.notes = faults, (*fast.notes, *slower, *unordered)
    if faults and fast.name == "cpu":  # a recording holds kernels of its own alone
        fast.recorder = plain.recorder  # type: ignore[method-assign]  # of this instance
    return fast


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:_MOST_WORDS] or type(error).__name__


def _pairs(expected: Any, got: Any) -> list[tuple[Tensor, Tensor]]:
    """All tensors of two results or states, side by side."""
    if isinstance(expected, Tensor):
        return [(expected, got)]
    if expected is None or isinstance(expected, int):
        return []
    if not isinstance(expected, tuple):
        expected, got = (tuple(getattr(part, field.name) for field in fields(part)) for part in (expected, got))
    return [pair for parts in zip(expected, got, strict=True) for pair in _pairs(*parts)]


def _copied(part: Any) -> Any:
    """A tensor or a state in memory of its own."""
    if isinstance(part, Tensor):
        return part.clone()
    held = {field.name: getattr(part, field.name) for field in fields(part)}
    return replace(part, **{name: value.clone() for name, value in held.items() if isinstance(value, Tensor)})


def _apart(expected: Tensor, got: Tensor) -> float:
    """The largest difference of two rows as a share of the expected one's length.

    Of integers it is 1 where any differs, those of 8 bits by more than one; it is infinite for another shape or type,
    and where one number is not finite and the other not the same.
    """
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return torch.inf
    a, b = (x.double() if x.dtype in (torch.float32, torch.int64) else x.float() for x in (expected, got))
    gaps = (a - b).masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)
    if not gaps.any():
        return 0.0
    if not expected.dtype.is_floating_point:
        return float(gaps.abs().max() > (expected.dtype is torch.int8))
    if gaps.dim() == 5:  # keys, of which a position's dimensions may lie apart
        gaps, a = (x.transpose(2, 3).flatten(3) for x in (gaps, a))
    if gaps.dim() < 2:
        gaps, a = gaps[None], a[None]
    lengths = a.nan_to_num(0.0, 0.0, 0.0).norm(dim=-1).clamp(min=1e-30)
    return float((gaps.norm(dim=-1) / lengths).nan_to_num(torch.inf).max())


def _choices_agree(got: list[Tensor], logits: Tensor, routing: Routing) -> bool:
    """Whether these are experts with the largest scores, but for rounding, and their weights."""
    scores, ranks = rank(logits, routing)
    ids, weights = got[0].long(), got[1]
    if ids.shape != (len(logits), routing.num_active) or not ((ids >= 0) & (ids < ranks.shape[1])).all():
        return False
    least = ranks.gather(1, ids).amin(1)
    others = ranks.scatter(1, ids, -torch.inf).amax(1)
    is_best = bool((others <= least + _CHOICE_TOLERANCE).all() and (ids.diff(dim=1) > 0).all())
    return is_best and _apart(weigh(scores, ids, routing), weights) <= _CHOICE_TOLERANCE


def _draws_agree(expected: Tensor, got: Tensor, logits: Tensor, rows: SamplingRows) -> bool:
    """Whether all draws are the same, but those that a little more or less of any parameter would change."""
    if expected.shape != got.shape or torch.equal(expected, got):
        return expected.shape == got.shape
    is_settled = torch.ones_like(expected, dtype=torch.bool)
    for by in (-_CHOICE_TOLERANCE, _CHOICE_TOLERANCE):
        moved = SamplingRows(
            temperature=rows.temperature,
            min_p=(rows.min_p * (1 + by)).float(),
            top_k=rows.top_k,
            top_p=torch.where(rows.top_p < 1, (rows.top_p + by).clamp(0, 1), rows.top_p),
            uniform=(rows.uniform + by).clamp(0, 1 - 2**-53),
        )
        is_settled &= PlainKernels().sample(logits, moved) == expected
    return bool((got == expected)[is_settled].all())
