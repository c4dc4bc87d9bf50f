"""The step loop: schedule, forward, sample, update. Pulls requests lazily and yields results as they finish.

Everything happens in the caller's thread, one step at a time; the only thing that may come from outside is ``stop``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import torch

from batchgen.engine.config import EngineConfig
from batchgen.engine.model_runner import ModelRunner
from batchgen.engine.sampler import Sampler
from batchgen.engine.scheduler import Schedule, Scheduler
from batchgen.engine.sequence import Sequence
from batchgen.engine.sizes import resolve
from batchgen.engine.stats import EngineStats
from batchgen.errors import RowError, RowErrorCode
from batchgen.model.lfm2 import Lfm2Model
from batchgen.records import Request, Result


class Engine:
    """Generates tokens for many requests at once with one model.

    Example:
        >>> engine = Engine(load_model("dummy:LFM2-350M"))
        >>> for result in engine.run([Request(key=0, prompt_token_ids=(1, 6, 708))]):
        ...     print(result.token_ids)
    """

    def __init__(
        self, model: Lfm2Model, config: EngineConfig | None = None, *, eos_token_ids: Iterable[int] | None = None
    ) -> None:
        """``eos_token_ids`` default to the model config's.

        Raises:
            UsageError: a size that cannot work.
        """
        config = config or EngineConfig()
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.config = resolve(config, model)
        self.look_ahead = config.look_ahead or 8 * self.config.max_num_seqs
        self.eos_token_ids = frozenset(model.config.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self.scheduler = Scheduler(self.config)
        self.runner = ModelRunner(model, self.config)
        self.sampler = Sampler(model.kernels, self.eos_token_ids)
        self.stats = EngineStats(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        self._stopping = False

    def run(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Results in order of completion; every request gets exactly one, unless ``stop`` is called.

        At most ``look_ahead`` requests are pulled before they can be admitted.
        """
        source = iter(requests)
        more = True
        while not self._stopping:
            while more and len(self.scheduler.waiting) < self.look_ahead:
                request = next(source, None)
                if request is None:
                    more = False
                    break
                refused = self.submit(request)
                if refused is not None:
                    yield refused
            if not self.scheduler.has_work:
                return
            yield from self.step()

    def submit(self, request: Request) -> Result | None:
        """Queue a request; a result at once if it can never run, or has nothing left to generate."""
        sequence = Sequence(request, time.monotonic())
        error = self._unknown_token(request) or self.scheduler.refusal(sequence)
        if error is not None:
            return sequence.result(error)
        if sequence.num_output_tokens:
            sequence.finish_reason = sequence.stop_reason(self.eos_token_ids, self.config.max_model_len)
            if sequence.is_finished:
                return sequence.result()
        self.scheduler.add(sequence)
        return None

    def _unknown_token(self, request: Request) -> RowError | None:
        known = self.runner.model.config.vocab_size
        for token in (*request.prompt_token_ids, *request.output_token_ids):
            if not 0 <= token < known:
                return RowError(RowErrorCode.BAD_PARAM, f"token id {token} is not among the model's {known}")
        return None

    def step(self) -> list[Result]:
        """Advance every scheduled sequence; the results of those that ended."""
        with self.stats.phase("schedule"):
            schedule = self.scheduler.schedule()
        completing = schedule.completing
        with self.stats.phase("forward"):
            logits = self.runner.run(schedule)
        with self.stats.phase("sample"):
            token_ids = self.sampler.sample(logits, completing) if completing else []
        with self.stats.phase("update"):
            self._count(schedule)
            self.scheduler.computed(schedule)
            return self._update(completing, token_ids)

    def stop(self) -> None:
        """Make ``run`` return after the step under way, for good; safe to call from a signal handler."""
        self._stopping = True

    def unfinished(self) -> dict[int, tuple[int, ...]]:
        """Tokens generated so far, by request key, of every sequence that has some and is not finished."""
        return {
            s.request.key: tuple(s.token_ids[s.num_prompt_tokens :])
            for s in self.scheduler.unfinished()
            if s.num_output_tokens
        }

    def _count(self, schedule: Schedule) -> None:
        stats = self.stats
        decode = 0
        for sequence, count in schedule.entries:
            done = sequence.num_computed_tokens
            decode += sequence.num_owed == 1 and sequence.num_output_tokens > 0
            stats.num_attended += count * done + count * (count + 1) // 2
            stats.num_kv_read += done + count
        pool = self.scheduler.pool
        kv_use = 1 - pool.num_free / pool.num_blocks
        stats.add_step(schedule.num_tokens - decode, decode, len(schedule.entries), kv_use)
        stats.num_preemptions = self.scheduler.num_preemptions
        stats.max_running = max(stats.max_running, len(self.scheduler.running))

    def _update(self, completing: list[Sequence], token_ids: list[int]) -> list[Result]:
        now = time.monotonic()
        results = []
        for sequence, token_id in zip(completing, token_ids, strict=True):
            error = None
            if token_id < 0:
                message = f"the model's logits after token {sequence.num_tokens} are not finite"
                error = RowError(RowErrorCode.INTERNAL, message)
            else:
                self.stats.num_output_tokens += 1
                sequence.append(token_id, now)
                sequence.finish_reason = sequence.stop_reason(self.eos_token_ids, self.config.max_model_len)
            if sequence.is_finished or error:
                sequence.finished_at = now
                self.scheduler.finish(sequence)
                results.append(sequence.result(error))
        return results
