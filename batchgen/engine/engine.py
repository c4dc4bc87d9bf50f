"""The step loop: schedule, forward, sample, update. Pulls requests lazily and yields results as they finish.

Everything happens in the caller's thread, one step at a time; the only thing that may come from outside is ``stop``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from math import isfinite

from batchgen.core.errors import RowError, RowErrorCode, TokenizerError
from batchgen.core.records import FinishReason, Request, Result
from batchgen.engine.config import EngineConfig
from batchgen.engine.duplicates import Duplicates
from batchgen.engine.model_runner import ModelRunner
from batchgen.engine.penalties import TokenCounts
from batchgen.engine.sampler import Sampler
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sequence import Group, Schedule, Sequence, StopWatch
from batchgen.engine.sizes import resolve, use_threads
from batchgen.engine.stats import EngineStats
from batchgen.model.decoder import Decoder


class Engine:
    """Generates tokens for many requests at once with one model.

    Example:
        >>> engine = Engine(load_model("dummy:LFM2-350M"))
        >>> for result in engine.run([Request(key=0, prompt_token_ids=(1, 6, 708))]):
        ...     print(result.token_ids)
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig | None = None,
        *,
        eos_token_ids: Iterable[int] | None = None,
        stop_watch: Callable[[tuple[str, ...]], StopWatch] | None = None,
    ) -> None:
        """``eos_token_ids`` default to the model config's; ``stop_watch`` makes what looks for stop strings in text.

        Raises:
            UsageError: a size that cannot work.
        """
        config = config or EngineConfig()
        if config.threads is not None:
            use_threads(config.threads, model.config)
        self.config = resolve(config, model)
        self.look_ahead = config.look_ahead or 8 * self.config.max_num_seqs
        self.eos_token_ids = frozenset(model.config.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self.scheduler = Scheduler(self.config)
        self.runner = ModelRunner(model, self.config)
        self.sampler = Sampler(model.kernels, self.eos_token_ids)
        self.stats = EngineStats(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        self.duplicates = Duplicates()
        self._shares_duplicates = config.share_duplicates
        self._stop_watch = stop_watch
        self._stopping = False

    def run(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Results in order of completion; every request gets exactly one, unless ``stop`` is called.

        At most ``look_ahead`` requests are pulled before they can be admitted.
        """
        source = iter(requests)
        more = True
        while not self._stopping:
            while more and len(self.scheduler.waiting) + self.duplicates.num_waiting < self.look_ahead:
                request = next(source, None)
                if request is None:
                    more = False
                    break
                answer = self.submit(request)
                if answer is not None:
                    yield answer
            if not self.scheduler.has_work:
                return
            yield from self.step()

    def submit(self, request: Request) -> Result | None:
        """Queue a request; a result at once if it can never run, was answered before, or is done already."""
        group = Group(request)
        group.error = self._unusable(request) or next(filter(None, map(self.scheduler.refusal, group.sequences)), None)
        if group.error is not None:
            return group.result()
        if self._shares_duplicates:
            answer = self.duplicates.answered(group)
            self.stats.num_shared_requests = self.duplicates.num_shared
            if answer is not None or not self.duplicates.begin(group):
                return answer
        for sequence in group.sequences:
            self._prepare(sequence)
        if group.sequences[0].is_finished:  # by what an earlier run generated
            return self._end(group.sequences[0])[0]
        for sequence in group.sequences:
            self.scheduler.add(sequence)
        return None

    def _unusable(self, request: Request) -> RowError | None:
        known = self.runner.model.config.vocab_size
        for tokens in filter(None, (request.prompt_token_ids, request.output_token_ids, *request.choices)):
            for token in (min(tokens), max(tokens)):
                if not 0 <= token < known:
                    return RowError(RowErrorCode.BAD_PARAM, f"token id {token} is not among the model's {known}")
        if request.params.stop and self._stop_watch is None:
            return RowError(RowErrorCode.BAD_PARAM, "stop strings need a tokenizer, and this model has none")
        return None

    def _prepare(self, sequence: Sequence) -> None:
        """Set up what watches and counts the tokens, with those that an earlier run generated."""
        request = sequence.request
        if request.params.stop and self._stop_watch is not None:
            sequence.stop_watch = self._stop_watch(request.params.stop)
        if request.params.has_penalties:
            sequence.counts = TokenCounts(request.prompt_token_ids, request.output_token_ids)
        sequence.token_ids = sequence.token_ids[: len(sequence.token_ids) - len(request.output_token_ids)]
        for token_id in request.output_token_ids:
            sequence.token_ids.append(token_id)
            self._judge(sequence)

    def step(self) -> list[Result]:
        """Advance every scheduled sequence; the results of those that ended."""
        with self.stats.phase("schedule"):
            schedule = self.scheduler.schedule()
        return self._advance(schedule)

    def _advance(self, schedule: Schedule) -> list[Result]:
        completing, scored = schedule.completing, schedule.scored
        with self.stats.phase("forward"):
            logits = self.runner.run(schedule)
        with self.stats.phase("sample"):
            self.sampler.score(logits[len(completing) :], scored)  # first: given tokens stand before the new ones
            token_ids = self.sampler.sample(logits[: len(completing)], completing) if completing else []
        with self.stats.phase("update"):
            self._count(schedule, len(logits))
            self.scheduler.computed(schedule)
            ended = self._update(completing, token_ids)
            ended += [s for s, _ in schedule.entries if not s.generates and not s.num_owed]
            return [result for sequence in ended for result in self._end(sequence)]

    def stop(self) -> None:
        """Make ``run`` return after the step under way, for good; safe to call from a signal handler."""
        self._stopping = True

    def unfinished(self) -> dict[int, tuple[int, ...]]:
        """Tokens generated so far, by request key, of every request that could go on from them."""
        tokens = {s.request.key: s.group.resumable_tokens for s in self.scheduler.unfinished()}
        return {key: generated for key, generated in tokens.items() if generated}

    def _count(self, schedule: Schedule, num_logits: int) -> None:
        stats = self.stats
        stats.num_logits += num_logits
        stats.num_attended += schedule.num_attended
        decode = 0
        for sequence, count in schedule.entries:
            decode += sequence.num_owed == 1 and sequence.num_output_tokens > 0
            stats.num_kv_read += sequence.num_computed_tokens + count
        pool = self.scheduler.pool
        kv_use = 1 - pool.num_free / pool.num_blocks
        stats.add_step(schedule.num_tokens - decode, decode, len(schedule.entries), kv_use)
        stats.num_preemptions = self.scheduler.num_preemptions
        stats.num_queried_tokens = self.scheduler.num_queried_tokens
        stats.num_cached_tokens = self.scheduler.num_cached_tokens
        stats.num_recomputed_tokens = self.scheduler.num_recomputed_tokens
        stats.max_running = max(stats.max_running, len(self.scheduler.running))

    def _update(self, completing: list[Sequence], token_ids: list[int]) -> list[Sequence]:
        """Append the new tokens; the sequences that end with them."""
        now = time.monotonic()
        ended = []
        for sequence, token_id in zip(completing, token_ids, strict=True):
            if token_id < 0:
                self._fail(sequence, f"the model's logits after token {sequence.num_tokens} are not finite")
                ended.append(sequence)
                continue
            self.stats.num_output_tokens += 1
            sequence.append(token_id, now)
            self._judge(sequence)
            if sequence.is_finished:
                ended.append(sequence)
        return ended

    def _judge(self, sequence: Sequence) -> None:
        """Decide whether the newest token ends the sequence."""
        try:
            sequence.finish_reason = sequence.stop_reason(self.eos_token_ids, self.config.max_model_len)
        except TokenizerError as error:  # what stop strings are looked for in cannot be had
            self._fail(sequence, str(error))
            sequence.finish_reason = FinishReason.STOP

    def _end(self, sequence: Sequence) -> list[Result]:
        """Let a sequence go; the results that are complete with it."""
        sequence.finished_at = time.monotonic()
        if not sequence.generates:
            sequence.finish_reason = FinishReason.STOP if sequence.request.choices else FinishReason.LENGTH
            sequence.first_token_at = sequence.finished_at
        if not all(isfinite(score.logprob) for score in (*sequence.scores, *sequence.logprobs)):
            self._fail(sequence, "the model's logits over the given tokens are not finite")
        if sequence.first_scheduled_at is not None:
            self.scheduler.finish(sequence)
        if not sequence.group.is_finished:
            return []
        result = sequence.group.result()
        answers = [result, *self.duplicates.end(sequence.group, result)]
        self.stats.num_shared_requests = self.duplicates.num_shared
        return answers

    @staticmethod
    def _fail(sequence: Sequence, message: str) -> None:
        sequence.group.error = RowError(RowErrorCode.INTERNAL, message)
