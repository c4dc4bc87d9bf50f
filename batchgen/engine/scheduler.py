"""Scheduler: decides how many tokens each sequence advances in a step. Plain Python; imports no torch.

There are no phases: a sequence owes the tokens that are not cached, and a step pays part of each debt within the token
budget. Prompts, chunks, single tokens and recomputation after a preemption are one loop over owed tokens. When blocks
run out, ``_make_room`` preempts the sequence that was admitted last, and admits none in that step.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable

from batchgen.core.errors import RowError
from batchgen.engine.admission import OutputLengths, PromptTrend, WaitingQueue, peak_tokens
from batchgen.engine.block_pool import BlockPool, extend_digests
from batchgen.engine.config import SchedulerConfig
from batchgen.engine.drafts import Drafter
from batchgen.engine.refusals import most_tokens, too_long
from batchgen.engine.schedule import Schedule
from batchgen.engine.sequence import Sequence

# Share of a forecast peak that must fit. Each row kept waiting makes steps less full, which costs more than an
# occasional preemption: at 0.95 about 2 % of the tokens of a job five times the pool are computed twice.
_CAUTION = 0.95
_MAX_DEFERRED = 64  # waiting sequences passed over in a step because the prefix they share is being computed
_BATCH_SHARE = 8  # a batch of waiting sequences is admitted once one in so many of the running ones has left


class Scheduler:
    """Owns the sequences, the KV blocks and the convolution slots."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.waiting = WaitingQueue(config.longest_first)
        self.running: list[Sequence] = []  # in order of admission
        self.lengths = OutputLengths()
        self.trend = PromptTrend()
        self.num_preemptions = 0
        self.num_queried_tokens = 0  # of fresh sequences, when they were admitted
        self.num_cached_tokens = 0  # taken over from the prefix cache by fresh sequences
        self.num_recomputed_tokens = 0
        self.drafter = Drafter(config.max_drafts) if config.max_drafts else None
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._is_full = False  # admission last ended for want of slots or memory
        self._num_left = 0  # sequences that have finished since
        self._most_blocks_running = 0  # if every running sequence were at its longest and shared nothing
        self._promised: dict[bytes, Sequence] = {}  # blocks of prompts that a running sequence is computing

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def refusal(self, sequence: Sequence) -> RowError | None:
        """Why a sequence can never be run to its end, or None; to be asked before it is added."""
        return too_long(sequence, self.config)

    def _most_tokens(self, sequence: Sequence) -> int:
        return most_tokens(sequence, self.config.max_model_len)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence without a ``refusal``."""
        if self.config.prefix_caching:
            extend_digests(sequence.digests, sequence.token_ids, self.config.block_size)
        self.waiting.push(sequence)

    def schedule(self) -> Schedule:
        """Choose the next step's work and allocate its blocks and slots.

        Sequences that owe one token come first, then those partly computed, then waiting ones, up to the token budget.
        While there is work at least one sequence advances, unless all await their last token.
        """
        budget = self.config.max_num_batched_tokens
        preemptions_before = self.num_preemptions
        size = self.config.block_size
        single = [
            s
            for s in self.running
            if (
                s.num_computed_tokens < s.max_state_tokens  # else nothing follows the token that is pending
                if s.num_pending
                else len(s.token_ids) - s.num_computed_tokens == 1
            )
        ]
        counts = dict.fromkeys(single[:budget], 1)
        later = single[budget:]  # then those that owe more; in order of admission within each
        if len(single) < len(self.running):
            later += [s for s in self.running if not s.num_pending and s.num_owed > 1]
        budget -= len(counts)
        for sequence in [s for s in counts if not s.num_computed_tokens % size]:  # the others' blocks have room
            if sequence.conv_slot is not None:  # not preempted in this step
                budget += sum(counts.pop(victim, 0) for victim in self._make_room(sequence, 1))
        for sequence in later:
            if not budget or sequence.conv_slot is None:
                continue
            count = min(sequence.num_owed, budget)
            budget += sum(counts.pop(victim, 0) for victim in self._make_room(sequence, count))
            if sequence.conv_slot is not None:
                counts[sequence] = count
                budget -= count
        resumed = self._admit(counts, budget) if self.num_preemptions == preemptions_before else []
        return Schedule(tuple(counts.items()), tuple(resumed), self._draft(counts))

    def _draft(self, counts: dict[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        """Drafts for a step in which each sequence advances by one token, as far as they pay and blocks are free."""
        drafter = self.drafter
        room = drafter.room(len(counts)) if drafter is not None else 0
        room = min(room, self.config.max_num_batched_tokens - len(counts))
        if drafter is None or room <= 0 or any(count > 1 for count in counts.values()):
            return {}
        drafts, num_free = {}, self.pool.num_free - len(self.running)
        for sequence in [s for s in counts if s.may_draft]:
            most = min(room // len(counts), sequence.max_new_tokens - 1)
            most = min(most, self.config.max_model_len - sequence.num_tokens - 1)
            found = sequence.fitting(drafter.propose(sequence, most)) if most > 0 else ()
            missing = self._blocks_missing(sequence, 1 + len(found))
            if found and missing <= num_free:
                drafts[sequence] = found
                num_free -= missing
        if not drafts or not drafter.pays(len(counts), drafts):
            return {}
        for sequence, found in drafts.items():
            sequence.block_table.extend(self.pool.allocate(self._blocks_missing(sequence, 1 + len(found))))
        return drafts

    def _admit(self, counts: dict[Sequence, int], budget: int) -> list[Sequence]:
        """Admit waiting sequences within budget, slots and memory; returns those that start behind a cached prefix."""
        resumed: list[Sequence] = []
        deferred: list[Sequence] = []
        if not budget or self._gathers():
            return resumed
        while budget and self.waiting and self._free_slots and len(deferred) < _MAX_DEFERRED:
            sequence = self.waiting.peek()
            prefix = self.pool.find(self._usable_digests(sequence))
            if self._is_promised(sequence, len(prefix)):
                deferred.append(self.waiting.pop())
                continue
            if self.running and not self._has_room(sequence, prefix):
                break
            self._start(self.waiting.pop(), prefix)
            if prefix:
                resumed.append(sequence)
            count = min(sequence.num_owed, budget)
            sequence.block_table.extend(self.pool.allocate(self._blocks_missing(sequence, count)))
            counts[sequence] = count
            budget -= count
        self._is_full = budget > 0 and len(self.waiting) > 0 and len(deferred) < _MAX_DEFERRED
        self._num_left = 0
        for sequence in deferred:
            self.waiting.put_back(sequence)
        return resumed

    def _gathers(self) -> bool:
        """Whether to wait until more sequences have left, so that fewer steps compute prompts beside single tokens.

        That ends once as many have left as make up for it, or their places make room for a whole step of prompts. Where
        fewer wait than that, the input is at its end.
        """
        if not (self.config.admits_in_batches and self._is_full and self.waiting):
            return False
        batch = (len(self.running) + self._num_left) // _BATCH_SHARE
        fills_step = self._num_left * self.waiting.peek().num_owed >= self.config.max_num_batched_tokens
        return self._num_left < min(batch, len(self.waiting)) and not fills_step

    def _usable_digests(self, sequence: Sequence) -> list[bytes]:
        return sequence.digests[: sequence.max_cached_tokens // self.config.block_size]

    def _is_promised(self, sequence: Sequence, num_found: int) -> bool:
        """Whether a running sequence is computing the next block of the prompt."""
        usable = self._usable_digests(sequence)
        return not sequence.num_preemptions and len(usable) > num_found and usable[num_found] in self._promised

    def _has_room(self, sequence: Sequence, prefix: list[int]) -> bool:
        """Whether admitting the sequence behind ``prefix`` leaves memory for those that run.

        All it owes must fit, not just this chunk, and each running sequence keeps the block it may need next: otherwise
        a newcomer would be preempted half prefilled and start over again and again.
        """
        pool = self.pool
        missing = self._blocks_needed(sequence.num_tokens) - len(prefix)
        room = pool.num_free - pool.num_unused(prefix)
        if missing > room - len(self.running):
            return False
        if not self.config.forecast_memory:
            return True
        if self._most_blocks_running + self._most_blocks(sequence) <= self.config.num_blocks:
            return True
        return _CAUTION * self._peak_blocks(sequence, prefix) <= self.config.num_blocks

    def _peak_blocks(self, newcomer: Sequence, prefix: list[int]) -> int:
        """Forecast of the most blocks held at once if ``newcomer`` runs too."""
        size = self.config.block_size
        own = [self.pool.num_sole(s.block_table) for s in self.running]  # shared blocks outlive their sequence
        shared = self.config.num_blocks - self.pool.num_free + self.pool.num_unused(prefix) - sum(own)
        held = [s.num_tokens - (len(s.block_table) - n) * size for s, n in zip(self.running, own, strict=True)]
        held.append(newcomer.num_tokens - len(prefix) * size)
        more = (self.lengths.expected_more(s) for s in (*self.running, newcomer))
        return shared + self._blocks_needed(peak_tokens(held, more, size))

    def _most_blocks(self, sequence: Sequence) -> int:
        return self._blocks_needed(self._most_tokens(sequence))

    def _blocks_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _start(self, sequence: Sequence, prefix: list[int]) -> None:
        """Give a sequence a slot and the cached blocks it begins with."""
        self.pool.share(prefix)
        sequence.block_table = array("i", prefix)
        self._most_blocks_running += self._most_blocks(sequence)
        sequence.max_state_tokens = self._most_tokens(sequence)
        sequence.num_computed_tokens = len(prefix) * self.config.block_size
        if sequence.num_preemptions:
            self.num_recomputed_tokens += max(0, sequence.max_computed_tokens - sequence.num_computed_tokens)
        else:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.num_queried_tokens += sequence.num_tokens
            self.num_cached_tokens += sequence.num_computed_tokens
        sequence.conv_slot = self._free_slots.pop()
        self.running.append(sequence)
        for digest in self._usable_digests(sequence)[len(prefix) :]:
            self._promised.setdefault(digest, sequence)
        if sequence.first_scheduled_at is None:
            sequence.first_scheduled_at = time.monotonic()

    def _blocks_missing(self, sequence: Sequence, count: int) -> int:
        """Blocks to add before ``count`` more tokens of the sequence can be computed."""
        return self._blocks_needed(sequence.num_computed_tokens + count) - len(sequence.block_table)

    def _make_room(self, sequence: Sequence, count: int) -> list[Sequence]:
        """Allocate blocks for ``count`` tokens; returns the sequences preempted for them, last admitted first.

        The sequence itself is among them if no later one is left: then it waits.
        """
        victims: list[Sequence] = []
        missing = self._blocks_missing(sequence, count)
        while missing > self.pool.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            victims.append(victim)
            if victim is sequence:
                return victims
        if missing:
            sequence.block_table.extend(self.pool.allocate(missing))
        return victims

    def _preempt(self, sequence: Sequence) -> None:
        sequence.max_computed_tokens = max(sequence.max_computed_tokens, sequence.num_computed_tokens)
        sequence.decoded_from = max(sequence.decoded_from, sequence.num_computed_tokens)
        self._release(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push_preempted(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Take back a running sequence's blocks and slot."""
        self.running.remove(sequence)
        self.pool.free(sequence.block_table)
        sequence.block_table = array("i")
        self._most_blocks_running -= self._most_blocks(sequence)
        for digest in sequence.digests:
            if self._promised.get(digest) is sequence:
                del self._promised[digest]
        assert sequence.conv_slot is not None
        self._free_slots.append(sequence.conv_slot)
        sequence.conv_slot = None
        sequence.num_rejected = 0

    def computed(self, schedule: Schedule) -> None:
        """Count the schedule's tokens as cached; to be called once their forward pass is launched."""
        size = self.config.block_size
        for sequence, count in schedule.entries:
            end = sequence.num_computed_tokens = sequence.num_computed_tokens + count
            sequence.num_rejected = 0
            if end % size < count and self.config.prefix_caching and schedule.num_steps == 1:
                self._label(sequence, (end - count) // size, end // size)

    def learned(self, schedule: Schedule) -> None:
        """Label the blocks that several steps have filled, now that their tokens are known."""
        size = self.config.block_size
        if schedule.num_steps == 1 or not self.config.prefix_caching:
            return
        for (sequence, count), start in zip(schedule.entries, schedule.starts, strict=True):
            if start % size + count >= size and sequence.conv_slot is not None:
                self._label(sequence, start // size, (start + count) // size)

    def judged(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Count accepted drafts of a running sequence as cached, and take back what was computed for the others."""
        self.computed(Schedule(((sequence, num_accepted),)))
        sequence.num_rejected = num_drafted - num_accepted
        needed = self._blocks_needed(sequence.num_computed_tokens)
        self.pool.free(sequence.block_table[needed:])
        del sequence.block_table[needed:]

    def _label(self, sequence: Sequence, first: int, end: int) -> None:
        """Label blocks that have become full, for other sequences and for this one after a preemption."""
        extend_digests(sequence.digests, sequence.token_ids, self.config.block_size)
        for block, digest in zip(sequence.block_table[first:end], sequence.digests[first:end], strict=True):
            self.pool.label(block, digest)
            self._promised.pop(digest, None)

    def finish(self, sequence: Sequence) -> None:
        """Remove a running or preempted sequence; its memory is free for the next step."""
        if self.drafter is not None and sequence.generates:
            self.drafter.finished(sequence)
        if sequence.generates:
            self.lengths.add(sequence.num_output_tokens)
            self.trend.add(sequence.num_prompt_tokens, sequence.num_output_tokens)
            self.waiting.put_longest_prompts_first(self.trend.is_rising)
        if sequence.conv_slot is None:
            self.waiting.drop_preempted(sequence)
        else:
            self._num_left += 1
            # An answer is rarely the prefix of another prompt: its blocks, likely still in cache, are reused first.
            self.pool.forget(sequence.block_table[sequence.num_prompt_tokens // self.config.block_size :])
            self._release(sequence)

    def unfinished(self) -> Iterable[Sequence]:
        yield from self.running
        yield from self.waiting

    def check(self) -> None:
        """Assert the invariants that hold between steps."""
        self.pool.check([block for s in self.running for block in s.block_table])
        slots = [s.conv_slot for s in self.running]
        assert None not in slots and len(set(slots)) == len(slots), "a conv slot is missing or shared"
        taken = [slot for slot in slots if slot is not None]
        assert sorted([*self._free_slots, *taken]) == list(range(self.config.max_num_seqs)), "a conv slot is lost"
        assert all(s in self.running for s in self._promised.values()), "a promised block whose sequence is not running"
        assert self._most_blocks_running == sum(map(self._most_blocks, self.running))
        for s in self.running:
            assert 0 <= s.num_computed_tokens < s.num_tokens, "a running sequence owes nothing"
            assert len(s.block_table) == -(-s.num_computed_tokens // self.config.block_size), "blocks do not fit tokens"
        for s in self.waiting:
            holds = s.block_table or s.conv_slot is not None or s.num_computed_tokens
            assert not holds, "a waiting sequence holds state"
            assert not s.num_pending, "a waiting sequence has a pending token"
