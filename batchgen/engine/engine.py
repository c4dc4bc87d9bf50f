"""The step loop: schedule, forward, sample, update. Pulls requests lazily and yields results as they finish.

Everything happens in the caller's thread; only ``stop`` may be called from another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from batchgen.config.job import EngineConfig
from batchgen.core.errors import UsageError
from batchgen.core.machine import SMALLER_SIZES, memory_errors
from batchgen.core.records import Request, Result
from batchgen.engine.admission import LookAhead
from batchgen.engine.duplicates import Duplicates
from batchgen.engine.generation import TextTools, unusable
from batchgen.engine.model_runner import ModelRunner
from batchgen.engine.overlap import Overlap
from batchgen.engine.sampler import Sampler, build_mask
from batchgen.engine.schedule import Schedule
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sequence import RequestState, Sequence
from batchgen.engine.sizes import SchedulerConfig, resolve, use_host_threads
from batchgen.engine.stats import EngineStats
from batchgen.kernels.interface import Kernels
from batchgen.model.decoder import Decoder

# A step that ended midway may have computed state without counting its tokens, or lost a result.
_INTERRUPTED = "an earlier step was interrupted and the engine's state is undefined; create a new engine"


class Engine:
    """Generates tokens for many requests at once with one model.

    Example:
        >>> engine = Engine(load_model("dummy:LFM2-350M"))
        >>> for result in engine.run([Request(key=0, prompt_token_ids=(1, 6, 708))]):
        ...     print(result.first.token_ids)
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig | None = None,
        *,
        eos_token_ids: Iterable[int] | None = None,
        text: TextTools | None = None,
        sampler: Callable[[Kernels, frozenset[int], int], Sampler] = Sampler,
        runner: Callable[[Decoder, SchedulerConfig], ModelRunner] = ModelRunner,
    ) -> None:
        """Rows may have ``stop`` and ``structured_outputs`` if ``text`` is given.

        ``eos_token_ids`` default to the model config's; ``sampler`` and ``runner`` create the engine's sampler and
        runner. Raises UsageError for a size that cannot work.
        """
        config = config or EngineConfig()
        use_host_threads(model, config.threads)
        self.config = resolve(config, model)
        self.look_ahead = config.look_ahead or 8 * self.config.max_num_seqs
        self.eos_token_ids = frozenset(model.config.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self.text = text or TextTools()
        self.scheduler = Scheduler(self.config)
        self.runner = runner(model, self.config)
        num_slots = self.config.max_num_seqs if self.runner.overlaps else 0
        self.sampler = sampler(model.kernels, self.eos_token_ids, num_slots)
        self.stats = EngineStats(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        self.duplicates, self._shares_duplicates = Duplicates(), config.share_duplicates
        self._stopping = self._is_midway = False
        self.overlap: Overlap | None = None
        if self.runner.overlaps:
            on_launched = self.scheduler.on_launched
            self.overlap = Overlap(self._compute, self.runner.fetch, on_launched, self._update)

    @property
    def numerics(self) -> dict[str, str]:
        """The model's numerics, and the cache's if not "auto"; with weights and requests they decide tokens."""
        kv_cache_dtype = self.config.kv_cache_dtype
        return self.runner.model.numerics | ({} if kv_cache_dtype == "auto" else {"kv_cache_dtype": kv_cache_dtype})

    @property
    def max_num_seqs(self) -> int:
        return self.config.max_num_seqs

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def run(self, requests: Iterable[Request | None]) -> Iterator[Result]:
        """Results in order of completion; every request gets exactly one, unless ``stop`` is called.

        Requests are pulled lazily, see ``LookAhead``; None means that the next one needs a result first. A step in
        flight when the run ends or is stopped still counts.
        """
        ahead = LookAhead(requests, self.look_ahead, self.scheduler.waiting, lambda: self.duplicates.num_waiting)
        while not self._stopping and (self.has_work or not ahead.is_exhausted):
            for request in ahead.pull():
                if (answer := self.submit(request)) is not None:
                    yield ahead.answered(answer)
                if self._stopping:
                    break
            if self.has_work:
                yield from map(ahead.answered, self.step())
        yield from self.flush()

    def submit(self, request: Request) -> Result | None:
        """Queue a request; returns its result at once if it can never run, was answered before, or is done already."""
        state, vocab_size = RequestState(request), self.runner.model.config.vocab_size
        refusals = (unusable(request, vocab_size, self.text), *map(self.scheduler.refusal, state.sequences))
        state.refusal = next(filter(None, refusals), None)
        if state.refusal is not None:
            return state.result()
        if self._shares_duplicates:
            answer = self.duplicates.answered(state)
            self.stats.num_shared_requests = self.duplicates.num_shared
            if answer is not None or not self.duplicates.begin(state):
                return answer
        answers: list[Result] = []
        ends = self.eos_token_ids, self.config.max_model_len
        for sequence in state.sequences:
            num_forced = sequence.generation.begin(self.text, vocab_size, *ends, counts=not self.runner.overlaps)
            self.stats.num_output_tokens += num_forced
            self.stats.num_forced_tokens += num_forced
        for sequence in state.sequences:
            if sequence.generation.is_finished:  # by an earlier run's tokens, or by forced tokens
                answers += self._end(sequence)
            else:
                self.scheduler.add(sequence)
        return answers[0] if answers else None

    @memory_errors("computing a step", SMALLER_SIZES)
    def step(self) -> list[Result]:
        """Advance every scheduled sequence and return the results that are complete.

        If steps overlap, these are the results of the previous step. Raises UsageError, as ``flush`` does, if Ctrl-C or
        an error has interrupted an earlier step.
        """
        with self._unless_torn():
            with self.stats.phase("schedule"):
                schedule = self.scheduler.schedule()
            if self.overlap is not None:
                return self.overlap.step(schedule)
            if not schedule.entries:
                return []
            token_ids = self._compute(schedule)
            self.scheduler.on_launched(schedule)
            return self._update(schedule, token_ids.tolist)

    def _compute(self, schedule: Schedule) -> Tensor:
        """Token ids, int64 [num_completing] on the device, to follow the sequences in ``schedule.completing``."""
        sampled, mask = schedule.completing, None
        with self.stats.phase("forward"):
            logits, argmax_ids = self.runner.run(schedule)
        if schedule.has_masks:
            with self.stats.phase("mask"):  # during the forward pass, if launches return before it is done
                mask = build_mask(self.text.constraints, sampled, logits.shape[1], logits.device)
        with self.stats.phase("sample"):
            if len(logits) > len(sampled):  # first, since given tokens come before new ones
                self.sampler.score(logits[len(sampled) :], schedule.scored)
            token_ids = self.sampler.sample(logits[: len(sampled)], sampled, mask, argmax_ids)
        with self.stats.phase("update"):
            self.stats.count(schedule, len(logits), self.scheduler, self.runner.model.config)
        return token_ids

    def _update(self, schedule: Schedule, wait: Callable[[], list[int]]) -> list[Result]:
        """Append the tokens that a step has sampled; returns the results of the requests that end with them."""
        with self.stats.phase("forward"):  # the rest of it, if steps overlap
            token_ids = wait()
        with self.stats.phase("update"):
            ended = self._append(schedule, token_ids)
            self.scheduler.on_tokens_known(schedule)
            return [result for sequence in ended for result in self._end(sequence)]

    def _append(self, schedule: Schedule, token_ids: list[int]) -> list[Sequence]:
        """Append the tokens that a step has sampled; returns the sequences that they end, or that are now scored."""
        now, ended, num_tokens = time.monotonic(), list[Sequence](), 0
        for sequence, token_id in zip(schedule.completing, token_ids, strict=True):
            generation = sequence.generation
            if generation.finish_reason is not None:  # before the step was done
                continue
            num_tokens += (count := generation.append(token_id, now))
            if count > 1:
                self.stats.num_forced_tokens += count - 1
            if generation.finish_reason is not None:
                ended.append(sequence)
            elif not generation.fast_path_until:
                generation.take_fast_path(sequence.max_state_tokens)
        self.stats.num_output_tokens += num_tokens
        ended += [s for s in schedule.sequences if not s.generates and not s.num_owed]
        for sequence in ended:
            sequence.generation.check_scores()
        return ended

    def _end(self, sequence: Sequence) -> list[Result]:
        """Remove a sequence that has ended; returns the results that are complete with it."""
        sequence.generation.end(time.monotonic())
        if sequence.first_scheduled_at is not None:
            self.scheduler.finish(sequence)
        if not sequence.state.is_finished:
            return []
        result = sequence.state.result()
        answers = [result, *self.duplicates.end(sequence.state, result)]
        self.stats.num_shared_requests = self.duplicates.num_shared
        return answers

    def flush(self) -> list[Result]:
        """Wait for a step in flight, once all work is launched; returns the results that are complete with it."""
        with self._unless_torn():
            return [] if self.overlap is None else self.overlap.flush()

    @contextmanager
    def _unless_torn(self) -> Iterator[None]:
        """Guard of a step: after an error or Ctrl-C within it, further steps are refused."""
        if self._is_midway:
            raise UsageError(_INTERRUPTED)
        self._is_midway = True
        yield
        self._is_midway = False

    def stop(self) -> None:
        """Make ``run`` return after the step under way, for good; safe to call from a signal handler."""
        self._stopping = True

    def unfinished(self) -> dict[int, tuple[int, ...]]:
        """Tokens generated so far, by request key, of every request that could continue from them."""
        tokens = {s: s.state.resumable_tokens for s in self.scheduler.unfinished()}
        for sequence in () if self.overlap is None else self.overlap.pending:
            tokens[sequence] = tokens[sequence][:-1]
        return {s.request.key: ids for s, ids in tokens.items() if ids}
