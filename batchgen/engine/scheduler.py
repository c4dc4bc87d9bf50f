"""Scheduler: decides how many tokens each sequence advances in a step. Plain Python; imports no torch.

There are no phases: prompts, chunks, single tokens and recomputation after preemption are one loop over owed tokens.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable

from batchgen.core.errors import RowError
from batchgen.engine.admission import WaitingQueue, max_state_tokens, too_long
from batchgen.engine.block_pool import BlockPool, extend_block_hashes
from batchgen.engine.forecast import MemoryForecast, OutputLengths
from batchgen.engine.schedule import Schedule
from batchgen.engine.sequence import Sequence
from batchgen.engine.sizes import SchedulerConfig

# Share of a forecast peak that must fit. Each row kept waiting makes steps less full, which costs more than an
# occasional preemption: at 0.95 about 2 % of the tokens of a job five times the pool are computed twice.
_CAUTION = 0.95
_MAX_DEFERRED = 64  # waiting sequences passed over in a step because the prefix they share is being computed
_BATCH_SHARE = 8  # a batch of waiting sequences is admitted once an eighth of the running ones has left


class Scheduler:
    """Owns the sequences, the KV blocks and the convolution slots."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.waiting = WaitingQueue(config.longest_first)
        self.running: list[Sequence] = []  # in order of admission
        self.lengths = OutputLengths()
        self._forecast = MemoryForecast(self.pool, self.lengths, config.block_size, config.max_num_seqs)
        self.num_preemptions = 0
        self.num_queried_tokens = 0  # of fresh sequences, when they were admitted
        self.num_cached_tokens = 0  # taken over from the prefix cache by fresh sequences
        self.num_recomputed_tokens = 0
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._admission_blocked = False  # admission last ended for want of slots or memory
        self._num_finished_since = 0  # sequences that have finished since admission last ended
        self._max_blocks_running = 0  # if every running sequence were at its longest and shared nothing
        self._being_computed: dict[bytes, Sequence] = {}  # blocks of prompts that a running sequence is computing

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def refusal(self, sequence: Sequence) -> RowError | None:
        """The error of a sequence that can never run to its end, or None. Call this before the sequence is added."""
        return too_long(sequence, self.config)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence without a ``refusal``."""
        if self.config.prefix_caching:
            extend_block_hashes(sequence.block_hashes, sequence.token_ids, self.config.block_size)
        self.waiting.push(sequence)

    def schedule(self) -> Schedule:
        """Choose the next step's work and allocate its blocks and slots.

        Sequences that owe one token come first, then partly computed ones, then waiting ones, up to the token budget.
        While there is work, at least one sequence advances, unless all wait for their last token.
        """
        budget = self.config.max_num_batched_tokens
        preemptions_before = self.num_preemptions
        size = self.config.block_size
        single = [
            s
            for s in self.running
            if s.num_computed_tokens == len(s.token_ids) - 1 and s.num_computed_tokens < s.max_state_tokens
        ]
        counts = dict.fromkeys(single[:budget], 1)
        later = single[budget:]  # then sequences that owe more; both parts in order of admission
        if len(single) < len(self.running):
            later += [s for s in self.running if len(s.token_ids) - s.num_computed_tokens > 1]
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
        return Schedule(counts, tuple(resumed))

    def _admit(self, counts: dict[Sequence, int], budget: int) -> list[Sequence]:
        """Admit waiting sequences within budget, slots and memory; returns those that start after a cached prefix."""
        resumed: list[Sequence] = []
        if not budget or self._waits_for_batch():
            return resumed
        waiting = self.waiting
        self._forecast.begin(self.running)
        while budget and waiting and self._free_slots and len(waiting.deferred) < _MAX_DEFERRED:
            sequence = waiting.peek()
            prefix = self.pool.find(self._usable_hashes(sequence))
            if self._is_being_computed(sequence, len(prefix)):
                waiting.defer()
                continue
            is_long = self.config.whole_prompts and sequence.num_owed > budget
            if self.running and (is_long or not self._has_room(sequence, prefix)):
                break
            self._start(waiting.pop(), prefix)
            if prefix:
                resumed.append(sequence)
            count = sequence.num_owed if is_long else min(sequence.num_owed, budget)
            sequence.block_table.extend(self.pool.allocate(self._blocks_missing(sequence, count)))
            self._forecast.add(sequence, prefix)
            counts[sequence] = count
            budget = max(budget - count, 0)
        self._admission_blocked = budget > 0 and len(waiting) > 0 and len(waiting.deferred) < _MAX_DEFERRED
        self._num_finished_since = 0
        waiting.restore()
        return resumed

    def _waits_for_batch(self) -> bool:
        """Whether to wait until more sequences have left, so that fewer steps mix prompts with single tokens.

        The wait ends when one of ``_BATCH_SHARE`` sequences has left, when all waiting ones fit into the free places,
        or when these can take a full step of prompts.
        """
        if not (self.config.admits_in_batches and self._admission_blocked and self.waiting):
            return False
        batch = (len(self.running) + self._num_finished_since) // _BATCH_SHARE
        fills_step = self._num_finished_since * self.waiting.peek().num_owed >= self.config.max_num_batched_tokens
        return self._num_finished_since < min(batch, len(self.waiting)) and not fills_step

    def _usable_hashes(self, sequence: Sequence) -> list[bytes]:
        return sequence.block_hashes[: sequence.max_cached_tokens // self.config.block_size]

    def _is_being_computed(self, sequence: Sequence, num_found: int) -> bool:
        """Whether a running sequence is computing the next block of the prompt."""
        usable = self._usable_hashes(sequence)
        return not sequence.num_preemptions and len(usable) > num_found and usable[num_found] in self._being_computed

    def _has_room(self, sequence: Sequence, prefix: list[int]) -> bool:
        """Whether admitting the sequence after its cached ``prefix`` leaves enough memory for the running ones.

        All owed tokens must fit, not just this chunk, and each running sequence keeps the block that it may need next:
        otherwise a newcomer would be preempted half prefilled and start over again and again.
        """
        pool = self.pool
        missing = self._blocks_needed(sequence.num_tokens) - len(prefix)
        room = pool.num_free - pool.num_unused(prefix)
        if missing > room - len(self.running):
            return False
        max_blocks = self._max_blocks_running + self._max_blocks(sequence)
        if not self.config.forecast_memory or max_blocks <= self.config.num_blocks:
            return True
        return _CAUTION * self._forecast.peak_blocks(sequence, prefix) <= self.config.num_blocks

    def _max_blocks(self, sequence: Sequence) -> int:
        return self._blocks_needed(max_state_tokens(sequence, self.config.max_model_len))

    def _blocks_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _start(self, sequence: Sequence, prefix: list[int]) -> None:
        """Give a sequence a slot and the cached blocks it begins with."""
        self.pool.share(prefix)
        sequence.block_table = array("i", prefix)
        self._max_blocks_running += self._max_blocks(sequence)
        sequence.max_state_tokens = max_state_tokens(sequence, self.config.max_model_len)
        sequence.num_computed_tokens = len(prefix) * self.config.block_size
        if sequence.num_preemptions:
            self.num_recomputed_tokens += max(0, sequence.max_computed_tokens - sequence.num_computed_tokens)
        else:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.num_queried_tokens += sequence.num_tokens
            self.num_cached_tokens += sequence.num_computed_tokens
        sequence.conv_slot = self._free_slots.pop()
        self.running.append(sequence)
        for block_hash in self._usable_hashes(sequence)[len(prefix) :]:
            self._being_computed.setdefault(block_hash, sequence)
        if sequence.first_scheduled_at is None:
            sequence.first_scheduled_at = time.monotonic()

    def _blocks_missing(self, sequence: Sequence, count: int) -> int:
        """Blocks to add before ``count`` more tokens of the sequence can be computed."""
        return self._blocks_needed(sequence.num_computed_tokens + count) - len(sequence.block_table)

    def _make_room(self, sequence: Sequence, count: int) -> list[Sequence]:
        """Allocate blocks for ``count`` tokens; returns the sequences preempted for them, last admitted first.

        If no later sequence is left, the sequence itself is preempted, and waits.
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
        self.running.remove(sequence)
        self.pool.free(sequence.block_table)
        sequence.block_table = array("i")
        self._max_blocks_running -= self._max_blocks(sequence)
        for block_hash in sequence.block_hashes:
            if self._being_computed.get(block_hash) is sequence:
                del self._being_computed[block_hash]
        assert sequence.conv_slot is not None
        self._free_slots.append(sequence.conv_slot)
        sequence.conv_slot = None

    def on_launched(self, schedule: Schedule) -> None:
        """Count the schedule's tokens as cached; to be called once their forward pass is launched."""
        for sequence, count in schedule.entries.items():
            sequence.num_computed_tokens += count

    def on_tokens_known(self, schedule: Schedule) -> None:
        """Register the blocks that a step has filled, so that other and preempted sequences can share them.

        Call it once the step's tokens are known, before ``finish`` of the sequences that end. A prompt's blocks are
        registered only when the token after it is known: if its logits are not finite, any of the blocks may be bad.
        """
        if not self.config.prefix_caching:
            return
        size, rows = self.config.block_size, zip(schedule.entries.items(), schedule.starts, strict=True)
        filled = [(s, start) for (s, n), start in rows if start % size + n >= size or start < s.decoded_from]
        completing = set(schedule.completing) if filled else ()
        for sequence, start in filled:
            is_known = sequence in completing or not (sequence.generates or sequence.num_owed)
            if is_known and sequence.conv_slot is not None and sequence.generation.error is None:
                self._register(sequence, 0 if start < sequence.decoded_from else start // size)

    def _register(self, sequence: Sequence, first: int) -> None:
        end = sequence.num_computed_tokens // self.config.block_size
        extend_block_hashes(sequence.block_hashes, sequence.token_ids, self.config.block_size)
        for block, block_hash in zip(sequence.block_table[first:end], sequence.block_hashes[first:end], strict=True):
            self.pool.register(block, block_hash)
            self._being_computed.pop(block_hash, None)

    def finish(self, sequence: Sequence) -> None:
        """Remove a running or preempted sequence; its memory is free for the next step."""
        if sequence.generates:
            self.lengths.add(sequence.num_output_tokens)
        if sequence.conv_slot is None:
            self.waiting.drop_preempted(sequence)
        else:
            self._num_finished_since += 1
            # An answer is rarely the prefix of another prompt: its blocks, likely still in cache, are reused first.
            if not sequence.request.has_next:
                self.pool.unregister(sequence.block_table[sequence.num_prompt_tokens // self.config.block_size :])
            self._release(sequence)

    def unfinished(self) -> Iterable[Sequence]:
        yield from self.running
        yield from self.waiting

    def check(self) -> None:
        """Assert that every slot and block is free or held by a running sequence, and that counts are right."""
        self.pool.check([block for s in self.running for block in s.block_table])
        slots = [s.conv_slot for s in self.running]
        assert None not in slots and len(set(slots)) == len(slots), "a conv slot is missing or shared"
        taken = [slot for slot in slots if slot is not None]
        assert sorted([*self._free_slots, *taken]) == list(range(self.config.max_num_seqs)), "a conv slot is lost"
        assert all(s in self.running for s in self._being_computed.values()), "computed by none that runs"
        assert self._max_blocks_running == sum(map(self._max_blocks, self.running))
        for s in self.running:
            assert 0 <= s.num_computed_tokens < s.num_tokens, "a running sequence owes nothing"
            assert len(s.block_table) == -(-s.num_computed_tokens // self.config.block_size), "blocks do not fit tokens"
        for s in self.waiting:
            holds = s.block_table or s.conv_slot is not None or s.num_computed_tokens
            assert not holds, "a waiting sequence holds state"
