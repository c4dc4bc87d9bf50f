"""Sampler: from logits to the next token of each sequence, and to log-probabilities if they are asked for.

One uniform number per (seed, request key, sample, position): no token depends on slot, order, preemption or resume.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sequence_
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from batchgen.core.logprobs import Logprobs
from batchgen.core.records import SamplingParams
from batchgen.engine.observers import Constraints, HostTokenCounts, TokenRules
from batchgen.engine.overlap import DeviceTokenCounts, penalized_logits
from batchgen.engine.sequence import Sequence
from batchgen.kernels.inputs import upload
from batchgen.kernels.interface import Kernels, SamplingRows

_STEP, _FIRST, _SECOND = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_SIGN_BIT, _LOW_BITS = -(1 << 31), 0xFFFFFFFF
_MAX_LOGITS = 1 << 24  # scored together: what is computed on the way is about as large
_COLDEST, _HOTTEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    x = x + _STEP
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    x ^= x >> 31
    return x


def uniforms(seeds: ArrayLike, keys: ArrayLike, samples: ArrayLike, positions: ArrayLike) -> np.ndarray:
    """Numbers in [0, 1), float64 [num_rows], each a function of four int64 numbers; positions count output tokens."""
    bits = np.zeros(1, dtype=np.uint64)
    for column in (seeds, keys, samples, positions):
        bits = _mix(bits ^ np.asarray(column, dtype=np.int64).view(np.uint64))
    drawn: np.ndarray = (bits >> 11) * 2.0**-53
    return drawn


class StepLogprobs(NamedTuple):
    """``token_ids``, ``values`` [num_tokens], ``top_ids``, ``top_values`` [num_tokens, k]; types as in ``Logprobs``."""

    token_ids: np.ndarray
    values: np.ndarray
    top_ids: np.ndarray
    top_values: np.ndarray

    def part(self, start: int, count: int, num_top: int) -> Logprobs:
        """The log-probabilities of some tokens, with the ``num_top`` likeliest of each."""
        rows = slice(start, start + count)
        own, top_ids, top = self.values[rows], self.top_ids[rows, :num_top], self.top_values[rows, :num_top]
        ids = self.token_ids[rows].tobytes()
        return Logprobs(ids, own.tobytes(), top_ids.tobytes(), top.tobytes(), top_ids.shape[1])


def step_logprobs(kernels: Kernels, logits: Tensor, token_ids: Sequence_[int], num_top: int) -> StepLogprobs:
    """The log-probability of a token in each row of logits [num_tokens, vocab_size], and the likeliest tokens there.

    The id -1 says that a row is not finite. Apart from the result, memory does not grow with the rows.
    """
    max_rows = max(1, _MAX_LOGITS // logits.shape[1])
    parts = []
    for start in range(0, len(logits), max_rows):
        rows = logits[start : start + max_rows]
        columns = torch.tensor(token_ids[start : start + max_rows], device=logits.device).clamp(min=0)
        norm = kernels.logsumexp(rows)[:, None]
        own = rows.gather(1, columns[:, None]).float() - norm
        ids, top = likeliest(rows, num_top)
        parts.append([part.cpu().numpy() for part in (own[:, 0], ids.int(), top - norm)])
    return StepLogprobs(np.array(token_ids, np.int32), *map(np.concatenate, zip(*parts, strict=True)))


class TokenMask(NamedTuple):
    """Allowed tokens of some rows of logits: rows int64 [num_masked], bits int32 [num_masked, words]; on the device."""

    rows: Tensor
    bits: Tensor


class Sampler:
    """Chooses one token per row of logits, in vLLM's order of steps.

    Log-probabilities of the raw logits, the mask of constraints, ``allowed_token_ids``, ``bad_words``, ``min_tokens``,
    ``logit_bias``, penalties, temperature, min_p, top_k, top_p.
    """

    def __init__(self, kernels: Kernels, eos_token_ids: frozenset[int], num_slots: int = 0) -> None:
        """``num_slots``: slots whose tokens the device counts for penalties; 0 if ``Generation`` counts them."""
        self.kernels = kernels
        self.eos_token_ids = eos_token_ids
        self.seen = DeviceTokenCounts(num_slots) if num_slots else None
        self._wide = torch.empty(0)  # kept between steps: fresh memory would cost more than its use

    @torch.inference_mode()  # logits come from inference mode and may be written only inside it
    def sample(
        self,
        logits: Tensor,
        sequences: Sequence_[Sequence],
        mask: TokenMask | None = None,
        best: Tensor | None = None,
    ) -> Tensor:
        """Next token ids, int64 [num_seqs] on the logits' device; -1 if a row is not finite or no token is allowed.

        Logits [num_seqs, vocab_size] may be overwritten; ``mask`` forbids tokens. The first ids of ``best``, if known,
        are ``kernels.argmax_or_none`` of the logits; drawn ids replace them. The host waits for the device only if
        log-probabilities are asked for.
        """
        asking = [(i, s) for i, s in enumerate(sequences) if not s.generation.fast_path_until]
        reported = [i for i, s in asking if s.request.params.logprobs is not None]
        raw = logits[reported] if reported else None
        if mask is not None:
            self.kernels.mask(logits, mask.rows, mask.bits)
        token_ids = self._choose(logits, sequences, asking, best if mask is None else None)
        if raw is not None:
            wanted = [sequences[i].request.params.logprobs or 0 for i in reported]
            logprobs = step_logprobs(self.kernels, raw, token_ids[reported].tolist(), max(wanted))
            for row, (i, num_top) in enumerate(zip(reported, wanted, strict=True)):
                sequences[i].generation.logprobs.append(logprobs.part(row, 1, num_top))
        return token_ids

    def _choose(
        self, logits: Tensor, sequences: Sequence_[Sequence], asking: list[tuple[int, Sequence]], best: Tensor | None
    ) -> Tensor:
        """Choose a token per row; ``asking`` are the rows that ask for more than a draw, ``best`` as in ``sample``."""
        if not sequences:
            return torch.empty(0, dtype=torch.int64)
        if self._forbid(logits, asking):
            best = None
        biased = [(i, rules) for i, s in asking if (rules := s.generation.rules) is not None and len(rules.biases)]
        penalized = [(i, c, s.request.params) for i, s in asking if (c := s.generation.counts) is not None]
        counted = []
        if self.seen is not None:
            counted = [(i, s) for i, s in asking if s.request.params.has_penalties]
        if biased or penalized or counted:
            logits, best = self._widened(logits), None
        if biased:
            add_biases(logits, *zip(*biased, strict=True))
        if penalized:
            penalize(logits, *zip(*penalized, strict=True))
        if not counted or self.seen is None:
            return self._draw(logits, sequences, best)
        rows, owners = zip(*counted, strict=True)
        slots = self.seen.penalize(logits, rows, owners)
        ids = self._draw(logits, sequences, best)
        self.seen.add(slots, ids if len(rows) == len(ids) else ids[upload(torch.tensor(rows), ids.device)])
        return ids

    def _draw(self, logits: Tensor, sequences: Sequence_[Sequence], best: Tensor | None) -> Tensor:
        drawn = [i for i, s in enumerate(sequences) if s.request.params.temperature]
        if drawn and len(drawn) == len(sequences):
            return self.kernels.sample(logits, self._rows(sequences, logits.device))
        ids = self.kernels.argmax_or_none(logits) if best is None else best[: len(logits)]
        if drawn:
            chosen = upload(torch.tensor(drawn), logits.device)
            rows = self._rows([sequences[i] for i in drawn], logits.device)
            ids[chosen] = self.kernels.sample(logits[chosen], rows)
        return ids

    @torch.inference_mode()
    def score(self, logits: Tensor, scored: Sequence_[tuple[Sequence, range]]) -> None:
        """Store the log-probabilities of given tokens; logits [num_scored, vocab_size], a row per token in order."""
        if not scored:
            return
        tokens = [s.token_ids[i] for s, indexes in scored for i in indexes]
        parts = [(s.generation, *part) for s, indexes in scored for part in s.generation.scored_parts(indexes)]
        logprobs, start = step_logprobs(self.kernels, logits, tokens, max(num_top for *_, num_top in parts)), 0
        for generation, count, num_top in parts:
            generation.add_scores(logprobs.part(start, count, num_top))
            start += count

    def _widened(self, logits: Tensor) -> Tensor:
        """A float32 copy, overwritten by the next one."""
        if logits.numel() > self._wide.numel():
            self._wide = torch.empty(logits.numel(), device=logits.device)
        return self._wide[: logits.numel()].view_as(logits).copy_(logits)

    def _forbid(self, logits: Tensor, asking: list[tuple[int, Sequence]]) -> bool:
        """Forbid end tokens before ``min_tokens``, and ends of bad words; returns whether any token is forbidden."""
        free = [(row, sequence) for row, sequence in asking if sequence.generation.closing is None]
        forbidden = [
            (row, token_id)
            for row, sequence in free
            if (min_tokens := sequence.request.params.min_tokens) and sequence.num_output_tokens < min_tokens
            for token_id in self.eos_token_ids.union(sequence.request.params.stop_token_ids)
            if 0 <= token_id < logits.shape[1]
        ]
        forbidden += [
            (row, token_id)
            for row, sequence in free
            if (rules := sequence.generation.rules) is not None and rules.endings
            for token_id in rules.endings_of(sequence.token_ids, sequence.num_output_tokens)
        ]
        if forbidden:
            rows, columns = upload(torch.tensor(forbidden).T.contiguous(), logits.device)
            logits[rows, columns] = -torch.inf
        return bool(forbidden)

    @staticmethod
    def _rows(sequences: Sequence_[Sequence], device: torch.device) -> SamplingRows:
        params = [s.request.params for s in sequences]
        names = [*map(id, params)]
        kinds = dict(zip(names, params, strict=True))  # most rows of a job have the same parameters
        numbers = dict(zip(kinds, range(len(kinds)), strict=True))
        kind_of = np.array([numbers[name] for name in names])

        def of_kinds(values: Iterable[float], dtype: type) -> np.ndarray:
            column: np.ndarray = np.array([*values], dtype=dtype)[kind_of]
            return column

        def uploaded(values: Iterable[float], dtype: type) -> Tensor:
            return upload(torch.from_numpy(of_kinds(values, dtype)), device)

        # Not ``num_output_tokens``, as calls for many rows take longer.
        positions = np.array([len(s.token_ids) - s.num_prompt_tokens for s in sequences])
        drawn = uniforms(
            of_kinds((p.seed for p in kinds.values()), np.int64),
            [s.request.key if s.request.rng_key is None else s.request.rng_key for s in sequences],
            [s.sample_index for s in sequences],
            positions,
        )
        return SamplingRows(
            temperature=uploaded((min(max(p.temperature, _COLDEST), _HOTTEST) for p in kinds.values()), np.float32),
            min_p=uploaded((p.min_p for p in kinds.values()), np.float32),
            top_k=uploaded((p.top_k for p in kinds.values()), np.int64),
            top_p=uploaded((p.top_p for p in kinds.values()), np.float64),
            uniform=upload(torch.from_numpy(drawn), device),
        )


def add_biases(logits: Tensor, rows: Sequence_[int], rules: Sequence_[TokenRules]) -> None:
    """Add each row's ``logit_bias``, in place, in ``rows`` of float32 logits [num_seqs, vocab_size]."""
    spread = np.repeat(np.array(rows, dtype=np.int64), [len(r.biases) for r in rules])
    columns = [spread, np.concatenate([r.biased_ids for r in rules]), np.concatenate([r.biases for r in rules])]
    row_ids, tokens, biases = (upload(torch.from_numpy(column), logits.device) for column in columns)
    logits[row_ids, tokens] += biases


def penalize(
    logits: Tensor, rows: Sequence_[int], counts: Sequence_[HostTokenCounts], params: Sequence_[SamplingParams]
) -> None:
    """Lower the logits of tokens seen before, in place, in ``rows`` of float32 logits [num_seqs, vocab_size]."""
    sizes = [len(c.ids) for c in counts]

    def spread(values: Sequence_[float], dtype: type = np.float32) -> Tensor:
        return upload(torch.from_numpy(np.repeat(np.array(values, dtype=dtype), sizes)), logits.device)

    row_ids = spread(rows, np.int64)
    columns = upload(torch.from_numpy(np.concatenate([c.ids for c in counts])), logits.device)
    times = upload(torch.from_numpy(np.concatenate([c.counts for c in counts])), logits.device)
    penalties = zip(*[(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params], strict=True)
    logits[row_ids, columns] = penalized_logits(logits[row_ids, columns], times, *map(spread, penalties))


def build_mask(
    constraints: Constraints | None, sequences: Sequence_[Sequence], vocab_size: int, device: torch.device
) -> TokenMask | None:
    """The token mask of ``sequences`` that are about to be sampled; None if none of them needs one."""
    closing = {row: token_id for row, s in enumerate(sequences) if (token_id := s.generation.closing) is not None}
    free = [(row, s.generation) for row, s in enumerate(sequences) if row not in closing]
    guided = {row: c for row, g in free if (c := g.constraint) and c.is_active}
    fixed = {row: g.rules.bits for row, g in free if g.rules is not None and g.rules.bits is not None}
    rows = [*guided, *(row for row in fixed if row not in guided), *closing]
    if not rows:
        return None
    bits = np.full((len(rows), -(-vocab_size // 32)), -1, dtype=np.int32)
    if guided and constraints is not None:
        constraints.fill([*guided.values()], bits[: len(guided)])
    for number, row in enumerate(rows):
        if row in fixed:
            bits[number] &= fixed[row]
        elif row in closing:
            bits[number] = 0
            bits.view(np.uint32)[number, closing[row] // 32] = 1 << closing[row] % 32
    return TokenMask(upload(torch.tensor(rows), device), upload(torch.from_numpy(bits), device))


def likeliest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids int64 and float32 logits [num_rows, k] of each row's k largest, in descending order, ties by ascending id.

    The k largest are in the k blocks with the largest maxima, so that one pass over a row leaves few logits to sort.
    """
    num_rows, width = logits.shape
    k = min(k, width)
    if k == 0:
        return logits.new_empty(num_rows, 0, dtype=torch.int64), logits.new_empty(num_rows, 0, dtype=torch.float32)
    candidates = ids = torch.arange(width, device=logits.device)
    values, size = logits, 1 << ((width // k).bit_length() // 2)  # size of a block: about the square root
    num_blocks = width // size
    if size > 1:
        maxima = logits[:, : num_blocks * size].reshape(num_rows, num_blocks, size).amax(2)
        blocks = _largest(maxima, ids[:num_blocks], k)
        inside = (blocks * size)[:, :, None] + ids[:size]
        rest = ids[num_blocks * size :].expand(num_rows, -1)
        candidates = torch.cat([inside.flatten(1), rest], dim=1)
        values = logits.gather(1, candidates)
    chosen = _largest(values, candidates, k)
    return chosen, logits.gather(1, chosen).float()


def _largest(values: Tensor, ids: Tensor, k: int) -> Tensor:
    """The ids of each row's k largest values [num_rows, n], in descending order, ties by ascending id.

    Value and id make one integer, which is smaller if the value is larger or the id is lower. A negative NaN comes
    last, any other NaN first.
    """
    bits = values.float().view(torch.int32)
    ordered = torch.where(bits < 0, _SIGN_BIT - bits, bits)  # -0.0 is 0
    keys = torch.sub(ids, ordered, alpha=1 << 32)
    return keys.topk(k, dim=1, largest=False).values & _LOW_BITS
