"""Decides how many tokens each sequence advances in a step. Plain Python; imports no torch.

There are no phases: a sequence owes the tokens that are not cached, and a step pays some of every debt within the
token budget. Prompts, chunks, single tokens and recomputation after a preemption are one loop over what is owed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from batchgen.engine.block_pool import BlockPool
from batchgen.engine.config import SchedulerConfig
from batchgen.engine.sequence import Sequence
from batchgen.engine.waiting import WaitingQueue
from batchgen.errors import RowError, RowErrorCode


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step's work: ordered (sequence, num_scheduled_tokens), every count at least 1."""

    entries: tuple[tuple[Sequence, int], ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(count for _, count in self.entries)

    @property
    def completing(self) -> list[Sequence]:
        """The sequences that will owe nothing after the step, so that their next token can be sampled."""
        return [sequence for sequence, count in self.entries if count == sequence.num_owed]


class Scheduler:
    """Owns the sequences, the KV blocks and the convolution slots."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # in order of admission
        self.num_preemptions = 0
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.running or self.waiting)

    def refusal(self, sequence: Sequence) -> RowError | None:
        """Why a sequence could never be run to its end, or None; asked before it is added."""
        limit = self.config.max_model_len
        if not sequence.num_tokens:
            return RowError(RowErrorCode.EMPTY_PROMPT, "the prompt has no tokens")
        if sequence.num_prompt_tokens >= limit:
            length = sequence.num_prompt_tokens
            message = f"the prompt has {length} tokens; with max_model_len {limit} at most {limit - 1} fit"
            return RowError(RowErrorCode.TOO_LONG, message)
        # The last token is never computed, so it needs no state.
        needed = min(sequence.num_prompt_tokens + sequence.request.params.max_tokens, limit) - 1
        if needed > self.config.max_num_tokens:
            message = (
                f"prompt and max_tokens need KV memory for {needed} tokens; "
                f"the pool holds {self.config.max_num_tokens}: raise kv_memory or lower max_tokens"
            )
            return RowError(RowErrorCode.TOO_LONG, message)
        return None

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that ``refusal`` has no objection to."""
        self.waiting.push(sequence)

    def schedule(self) -> Schedule:
        """Choose the next step's work and allot the blocks and slots it needs.

        Sequences that owe one token come first, then those partly computed, then waiting ones; never more tokens
        than the budget. At least one sequence advances as long as there is work.
        """
        counts: dict[Sequence, int] = {}
        budget = self.config.max_num_batched_tokens
        preemptions_before = self.num_preemptions
        by_debt = sorted(self.running, key=lambda s: s.num_owed > 1)  # stable: order of admission within each
        for sequence in by_debt:
            if budget == 0:
                break
            if sequence.conv_slot is None:  # preempted for an earlier one in this very step
                continue
            count = min(sequence.num_owed, budget)
            for victim in self._make_room(sequence, count):
                budget += counts.pop(victim, 0)
            if sequence.conv_slot is not None:
                counts[sequence] = count
                budget -= count
        if self.num_preemptions == preemptions_before:
            self._admit(counts, budget)
        return Schedule(tuple(counts.items()))

    def _admit(self, counts: dict[Sequence, int], budget: int) -> None:
        while budget and self.waiting and self._free_slots:
            sequence = self.waiting.peek()
            # All it owes must fit, not just this chunk, and every running sequence keeps the block it may need next:
            # a newcomer that is preempted half prefilled would start over again and again.
            room = self.pool.num_free - len(self.running)
            if self.running and self._blocks_missing(sequence, sequence.num_owed) > room:
                return
            count = min(sequence.num_owed, budget)
            self.waiting.pop()
            sequence.conv_slot = self._free_slots.pop()
            self.running.append(sequence)
            self._allot(sequence, count)
            if sequence.first_scheduled_at is None:
                sequence.first_scheduled_at = time.monotonic()
            counts[sequence] = count
            budget -= count

    def _blocks_missing(self, sequence: Sequence, count: int) -> int:
        """Blocks to add before ``count`` more tokens of the sequence can be computed."""
        total = -(-(sequence.num_computed_tokens + count) // self.config.block_size)
        return total - len(sequence.block_table)

    def _allot(self, sequence: Sequence, count: int) -> None:
        sequence.block_table += self.pool.allocate(self._blocks_missing(sequence, count))

    def _make_room(self, sequence: Sequence, count: int) -> list[Sequence]:
        """Allot blocks for ``count`` tokens, preempting the sequences admitted last; returns those.

        The sequence itself may be among them: then it was the last, and waits.
        """
        victims: list[Sequence] = []
        while self._blocks_missing(sequence, count) > self.pool.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            victims.append(victim)
            if victim is sequence:
                return victims
        self._allot(sequence, count)
        return victims

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push_preempted(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Take back a running sequence's blocks and slot."""
        self.running.remove(sequence)
        self.pool.free(sequence.block_table)
        sequence.block_table = []
        assert sequence.conv_slot is not None
        self._free_slots.append(sequence.conv_slot)
        sequence.conv_slot = None

    def computed(self, schedule: Schedule) -> None:
        """Book the schedule's tokens as cached; called once their forward pass is under way."""
        for sequence, count in schedule.entries:
            sequence.num_computed_tokens += count

    def finish(self, sequence: Sequence) -> None:
        """Let a running sequence go; its memory serves the next step."""
        self._release(sequence)

    def unfinished(self) -> Iterable[Sequence]:
        """Every sequence still under way, running ones first."""
        yield from self.running
        yield from self.waiting

    def check(self) -> None:
        """Assert the invariants that hold between steps."""
        self.pool.check([block for s in self.running for block in s.block_table])
        slots = [s.conv_slot for s in self.running]
        assert None not in slots and len(set(slots)) == len(slots), "a conv slot is missing or shared"
        assert sorted([*self._free_slots, *(s for s in slots if s is not None)]) == list(
            range(self.config.max_num_seqs)
        )
        for s in self.running:
            assert 0 <= s.num_computed_tokens < s.num_tokens, "a running sequence owes nothing"
            assert len(s.block_table) == -(-s.num_computed_tokens // self.config.block_size), "blocks do not fit tokens"
        for s in self.waiting:
            assert not s.block_table and s.conv_slot is None and s.num_computed_tokens == 0, "a waiting one holds state"
