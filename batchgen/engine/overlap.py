"""Overlapping steps: each is launched while the last one runs, if launches return before their work is done.

Until the host learns a token, its sequence ends with a placeholder; the rest of the engine need not know.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from batchgen.core.records import Result
from batchgen.engine.schedule import Schedule
from batchgen.engine.sequence import Sequence
from batchgen.kernels.inputs import PendingTokens, upload

_PLACEHOLDER = 0  # a token id of every model
_ROWS = 64  # penalized at a time: intermediate results are several times as large as their logits


@dataclass(frozen=True, slots=True)
class Launched:
    """A launched step: token ids of ``schedule.completing`` on the device, and ``wait`` for their copy on the host."""

    schedule: Schedule
    token_ids: Tensor
    wait: Callable[[], list[int]]

    def pending(self, schedule: Schedule) -> PendingTokens | None:
        """The tokens that this step samples and the next ``schedule`` computes, one per sequence."""
        sequences, sampled = schedule.sequences, self.schedule.completing
        if sampled == sequences:
            return PendingTokens(self.token_ids)
        row_of = dict(zip(sampled, range(len(sampled)), strict=True))
        rows = np.array([row_of.get(s, -1) for s in sequences])
        (pending,) = (rows >= 0).nonzero()
        if not len(pending):
            return None
        targets = np.cumsum(schedule.counts)[pending] - 1
        return PendingTokens(self.token_ids, torch.from_numpy(rows[pending]), torch.from_numpy(targets))


class Overlap:
    """The step in flight, and the sequences that end with a placeholder until its tokens are known.

    ``compute`` launches a schedule and returns its token ids on the device, ``fetch`` copies them to the host,
    ``on_launched`` counts its tokens as cached, ``update`` waits for the ids and returns the results they end.
    """

    def __init__(
        self,
        compute: Callable[[Schedule], Tensor],
        fetch: Callable[[Tensor], Callable[[], list[int]]],
        on_launched: Callable[[Schedule], None],
        update: Callable[[Schedule, Callable[[], list[int]]], list[Result]],
    ) -> None:
        self._compute, self._fetch, self._on_launched, self._update = compute, fetch, on_launched, update
        self.in_flight: Launched | None = None
        self.pending: set[Sequence] = set()

    def step(self, schedule: Schedule) -> list[Result]:
        """Launch a step; then wait for the tokens of the step that was in flight, and return its results.

        A step with sequences that need the host runs alone, and its own results are returned too.
        """
        if schedule.needs_host:
            results = self.flush()
            self._hold(self._launch(_without_ended(schedule)))
            return results + self.flush()
        launched = self._launch(schedule)
        results = self.flush()
        self._hold(launched)
        return results

    def flush(self) -> list[Result]:
        """Wait for a step in flight, if there is one; returns the results that are complete with its tokens.

        An end by length is known ahead. After another end the step has computed one token too many, which is dropped.
        Memory of ended sequences is reused at once: the device keeps the order of launches.
        """
        step, self.in_flight = self.in_flight, None
        if step is None:
            return []
        for sequence in self.pending:
            sequence.token_ids.pop()
        self.pending.clear()
        return self._update(step.schedule, step.wait)

    def _launch(self, schedule: Schedule) -> Launched | None:
        if not schedule.entries:
            return None
        if self.in_flight is not None:
            schedule = replace(schedule, pending=self.in_flight.pending(schedule))
        token_ids = self._compute(schedule)
        return Launched(schedule, token_ids, self._fetch(token_ids))

    def _hold(self, launched: Launched | None) -> None:
        self.in_flight = launched
        if launched is not None:
            self._on_launched(launched.schedule)
            self.pending.update(s for s in launched.schedule.completing if not s.generation.is_finished)
            for sequence in self.pending:
                sequence.token_ids.append(_PLACEHOLDER)


def _without_ended(schedule: Schedule) -> Schedule:
    return replace(schedule, entries={s: n for s, n in schedule.entries.items() if s.generation.finished_at is None})


def penalized_logits(logits: Tensor, times: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor) -> Tensor:
    """Penalized logits of seen tokens that were generated ``times`` times; arguments have one shape or broadcast.

    The repetition penalty divides positive logits and multiplies others (Keskar et al., CTRL, arXiv:1909.05858, 4.1);
    then ``frequency * times`` and, if ``times`` is not 0, ``presence`` are taken off, as OpenAI and vLLM define them.
    """
    lowered = torch.where(logits > 0, logits / repetition, logits * repetition)
    return lowered - frequency * times - presence * (times > 0)


class DeviceTokenCounts:
    """Counts of tokens by slot: 0 if never seen, 1 if in the prompt, plus 1 for each time it was generated.

    They are for penalized sequences, whose newest tokens the host learns too late. A row is set when its owner is first
    sampled. Rows are dense, which is fast on a device; on a CPU ``observers.HostTokenCounts`` gathers the distinct
    tokens.
    """

    def __init__(self, num_slots: int) -> None:
        self._times = torch.empty(num_slots, 0, dtype=torch.int32)  # [num_slots, vocab_size] from the first use on
        self._owners: list[Sequence | None] = [None] * num_slots
        self._num_known = [0] * num_slots  # tokens of the owner that are counted

    def penalize(self, logits: Tensor, rows: Sequence_[int], sequences: Sequence_[Sequence]) -> Tensor:
        """Lower logits by ``penalized_logits``; returns the slots of ``sequences``, int64 [num_penalized].

        Row ``rows[i]`` of the float32 logits [num_seqs, vocab_size] is for the next token of ``sequences[i]``.
        """
        if not self._times.numel():
            self._times = torch.zeros(len(self._owners), logits.shape[1], dtype=torch.int32, device=logits.device)
        slots = [self._counted(sequence) for sequence in sequences]
        indexes = upload(torch.tensor([rows, slots]), logits.device)
        row_ids, of_slots = indexes[0], indexes[1]
        params = [s.request.params for s in sequences]
        penalties = [[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params]
        columns = upload(torch.from_numpy(np.array(penalties, dtype=np.float32)), logits.device)
        for start in range(0, len(slots), _ROWS):
            part = slice(start, start + _ROWS)
            repetition, frequency, presence = columns[part].T.unsqueeze(2)
            times, before = self._times[of_slots[part]], logits[row_ids[part]]
            lowered = penalized_logits(before, (times - 1).clamp(min=0), repetition, frequency, presence)
            logits[row_ids[part]] = torch.where(times > 0, lowered, before)
        return of_slots

    def add(self, slots: Tensor, token_ids: Tensor) -> None:
        """Count tokens sampled for the sequences at ``slots``, which ``penalize`` returned; -1 ends a sequence."""
        ids = token_ids.clamp(min=0)
        times = self._times[slots, ids]
        self._times[slots, ids] = times + 1 + (times == 0)

    def _counted(self, sequence: Sequence) -> int:
        """The slot of a sequence that is about to be sampled, after counting all of its tokens there."""
        slot = sequence.conv_slot
        assert slot is not None
        if self._owners[slot] is not sequence or self._num_known[slot] != sequence.num_tokens:
            times = dict.fromkeys(sequence.request.prompt_token_ids, 1)
            for token_id in sequence.token_ids[sequence.num_prompt_tokens :]:
                times[token_id] = times.get(token_id, 1) + 1
            ids, counts = upload(torch.tensor([[*times], [*times.values()]]), self._times.device)
            self._times[slot] = 0
            self._times[slot, ids] = counts.int()
            self._owners[slot] = sequence
        self._num_known[slot] = sequence.num_tokens + 1  # with the one that is sampled now
        return slot
