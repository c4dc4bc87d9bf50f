"""The step loop: schedule, forward, sample, update. Pulls requests lazily and yields results as they finish.

Everything happens in the caller's thread; only ``stop`` may be called from outside. On a GPU steps overlap: a step is
launched while the one before it still runs. Token ids go from step to step on the device and the host learns them one
step late; until then a sequence has a pending token. An end by length is known ahead. If an end token, a stop string
or a row that is not finite ends a sequence, the step under way computes one token too many, which is dropped on
arrival. The memory of an ended sequence is reused at once: later work on it is launched later, and the device keeps the
order of launches. Where the host is slower than the device, a step is several of them: see ``bursts``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from math import isfinite

from torch import Tensor

from batchgen.core.errors import RowErrorCode, TokenizerError
from batchgen.core.machine import SMALLER_SIZES, memory_errors
from batchgen.core.records import FinishReason, Request, Result
from batchgen.engine.batch import Copy, build_pending, fetch_ids
from batchgen.engine.bursts import InFlight, Pace, launch_burst, lengthened
from batchgen.engine.config import EngineConfig
from batchgen.engine.drafts import Ahead, append_plain, common_length, rows_of
from batchgen.engine.duplicates import Duplicates
from batchgen.engine.load import use_threads
from batchgen.engine.masks import build_mask
from batchgen.engine.model_runner import ModelRunner
from batchgen.engine.observers import Constraints, StopMatcher, TokenCounts, observers_for
from batchgen.engine.refusals import unusable
from batchgen.engine.rules import rules_for
from batchgen.engine.sampler import Row, Sampler
from batchgen.engine.schedule import Schedule
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.seen import SeenTokens
from batchgen.engine.sequence import Group, Sequence
from batchgen.engine.sizes import resolve
from batchgen.engine.stats import EngineStats
from batchgen.kernels.interface import Kernels
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
        stop_matcher: Callable[[tuple[str, ...]], StopMatcher] | None = None,
        constraints: Constraints | None = None,
        sampler: Callable[[Kernels, frozenset[int]], Sampler] = Sampler,
        overlaps: bool | None = None,
        fetch: Callable[[Tensor], Copy] = fetch_ids,
    ) -> None:
        """``stop_matcher`` makes the matcher of some stop strings, ``sampler`` the sampler for these end tokens;
        ``constraints`` makes what ``structured_outputs`` asks for.

        ``eos_token_ids`` default to the model config's. ``overlaps``: whether a step is launched before the last one is
        waited for, by default on a GPU alone, as a CPU has nothing to overlap with. ``fetch`` copies ids to the host.

        Raises:
            UsageError: a size that cannot work.
        """
        config = config or EngineConfig()
        if config.threads is not None or model.device.type == "cuda":
            use_threads(config.threads or 1, model.config)  # the host of a GPU works on small tensors alone
        self.config = resolve(config, model)
        self.look_ahead = config.look_ahead or 8 * self.config.max_num_seqs
        self.eos_token_ids = frozenset(model.config.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self.scheduler = Scheduler(self.config)
        self.runner = ModelRunner(model, self.config)
        self.sampler = sampler(model.kernels, self.eos_token_ids)
        self.overlaps = model.device.type == "cuda" if overlaps is None else overlaps
        if self.overlaps:  # the next step is scheduled before it is known which drafts were right
            self.scheduler.drafter = None
            self.sampler.seen = SeenTokens(self.config.max_num_seqs)
        self.stats = EngineStats(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        self.duplicates, self._shares_duplicates = Duplicates(), config.share_duplicates
        self._stop_matcher, self._constraints = stop_matcher, constraints
        self._fetch, self._stopping = fetch, False
        self.pace = Pace()
        self.in_flight: InFlight | None = None

    @property
    def numerics(self) -> dict[str, str]:
        """What decides the tokens beside weights and requests: the model's, and ``kv_dtype`` where it is not "auto"."""
        kv_dtype = self.config.kv_dtype
        return self.runner.model.numerics | ({} if kv_dtype == "auto" else {"kv_dtype": kv_dtype})

    def run(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Results in order of completion; every request gets exactly one, unless ``stop`` is called.

        At most ``look_ahead`` requests are pulled before they can be admitted. A step in flight when the run ends or is
        stopped still counts.
        """
        source = iter(requests)
        more = True
        while not self._stopping:
            while more and len(self.scheduler.waiting) + self.duplicates.num_waiting < self.look_ahead:
                request = None if self._stopping else next(source, None)
                if request is None:
                    more = False
                    break
                answer = self.submit(request)
                if answer is not None:
                    yield answer
            if not self.has_work:
                break
            yield from self.step()
        yield from self.flush()

    def submit(self, request: Request) -> Result | None:
        """Queue a request; a result at once if it can never run, was answered before, or is done already."""
        group = Group(request)
        makers = {"stop": self._stop_matcher, "structured_outputs": self._constraints}
        group.error = unusable(request, self.runner.model.config.vocab_size, makers)
        group.error = group.error or next(filter(None, map(self.scheduler.refusal, group.sequences)), None)
        if group.error is not None:
            return group.result()
        if self._shares_duplicates:
            answer = self.duplicates.answered(group)
            self.stats.num_shared_requests = self.duplicates.num_shared
            if answer is not None or not self.duplicates.begin(group):
                return answer
        for sequence in group.sequences:
            self._prepare(sequence)
        answers = []
        for sequence in group.sequences:
            if sequence.is_finished:  # by what an earlier run generated, or by forced tokens alone
                answers += self._end(sequence)
            else:
                self.scheduler.add(sequence)
        return answers[0] if answers else None

    def _prepare(self, sequence: Sequence) -> None:
        """Set up what watches the sequence, and show it the tokens that an earlier run generated."""
        request = sequence.request
        sequence.observers = observers_for(request.params, self._stop_matcher)
        if request.params.has_penalties and not self.overlaps:
            sequence.counts = TokenCounts(request.prompt_token_ids)
            sequence.observers.append(sequence.counts)
        sequence.rules = rules_for(request.params, request.bad_words, self.runner.model.config.vocab_size)
        if request.params.structured_outputs and self._constraints is not None:
            sequence.constraint = self._constraints.begin(request.params.structured_outputs, request.prompt_token_ids)
        sequence.token_ids = sequence.token_ids[: len(sequence.token_ids) - len(request.output_token_ids)]
        for token_id in request.output_token_ids:
            sequence.token_ids.append(token_id)
            self._judge(sequence)
        self._append_forced(sequence)
        if sequence.constraint is not None:
            sequence.constraint.rest()

    @memory_errors("computing a step", SMALLER_SIZES)
    def step(self) -> list[Result]:
        """Advance every scheduled sequence; the results that are complete.

        Where steps overlap, these are the results of the step before. A step with rows that need the host runs alone.
        """
        with self.stats.phase("schedule"):
            schedule = self.scheduler.schedule()
        if self.overlaps and not any(s.needs_host for s, _ in schedule.entries if not s.plain_until):
            self.pace.judge(self.in_flight)
            launched = self._launch(lengthened(schedule, self.scheduler, self.pace.num_steps))
            results = self._collect()
            self._book(launched)
            return results
        results = self._collect()
        began_at = time.monotonic()
        self._book(self._launch(schedule.unended))
        results += self._collect()
        if self.scheduler.drafter is not None and schedule.is_single:
            self.scheduler.drafter.time(schedule.num_tokens + schedule.num_drafts, time.monotonic() - began_at)
        return results

    def _launch(self, schedule: Schedule) -> InFlight | None:
        """Set the device to work on a schedule, behind the step in flight; None without any work."""
        if not schedule.entries:
            return None
        sampled, before = rows_of(schedule), self.in_flight
        with self.stats.phase("forward"):
            pending = build_pending(schedule, before.sampled, before.token_ids) if before is not None else None
            if schedule.num_steps > 1:
                draws = self.sampler.draws(sampled, self.runner.model.device, schedule.num_steps)
                last, token_ids = launch_burst(self.runner, self.sampler.sample, schedule, draws, pending)
                launched, num_logits = InFlight(schedule, sampled, last, self._fetch(token_ids)), len(sampled)
            else:
                logits = self.runner.run(schedule, pending)
        if schedule.num_steps == 1:
            launched, num_logits = self._sample(schedule, sampled, logits), len(logits)
        with self.stats.phase("update"):
            self.stats.count(schedule, num_logits, self.scheduler, self.runner.model.config)
        return launched

    def _sample(self, schedule: Schedule, sampled: list[Sequence | Ahead], logits: Tensor) -> InFlight:
        """Choose the tokens of a single step, and score given ones."""
        mask = None
        if any(s.constraint is not None or s.rules is not None for s in sampled if not s.plain_until):
            with self.stats.phase("mask"):  # on a GPU the forward pass runs meanwhile
                mask = build_mask(self._constraints, sampled, logits.shape[1], logits.device)
        with self.stats.phase("sample"):
            if len(logits) > len(sampled):  # first: given tokens stand before the new ones
                self.sampler.score(logits[len(sampled) :], schedule.scored)
            token_ids = self.sampler.sample(logits[: len(sampled)], sampled, mask, self.runner.likeliest)
            return InFlight(schedule, sampled, token_ids, self._fetch(token_ids))

    def _book(self, launched: InFlight | None) -> None:
        """Make a launched step the one in flight: its tokens count as cached, and those it samples as pending."""
        self.in_flight = launched
        if launched is None:
            return
        with self.stats.phase("update"):
            for sequence, num_pending in launched.schedule.sampling:
                if sequence.finished_at is None:
                    sequence.num_pending = num_pending
            self.scheduler.computed(launched.schedule.unended)

    def _collect(self) -> list[Result]:
        """Wait for the step in flight and append its tokens; the results of the requests that end with them."""
        step, self.in_flight = self.in_flight, None
        if step is None:
            return []
        with self.stats.phase("forward"):
            token_ids = step.wait()
        with self.stats.phase("update"):
            ended = self._update(step, token_ids)
            for sequence in step.schedule.drafts:
                self._judge_drafts(sequence, step.schedule)
            ended += [s for s, _ in step.schedule.entries if not s.generates and not s.num_owed]
            results = [result for sequence in ended for result in self._end(sequence)]
            self.scheduler.learned(step.schedule)
            return results

    @property
    def max_num_seqs(self) -> int:
        """Most sequences that run at once."""
        return self.config.max_num_seqs

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would advance anything."""
        return self.scheduler.has_work

    def flush(self) -> list[Result]:
        """Wait for a step in flight, once there is no more work; the results that are complete with it."""
        return self._collect()

    def withdraw(self, keys: Collection[int]) -> list[int]:
        """Forget the requests of these that have not begun and that no other waits for; the keys of those forgotten."""
        waiting = {s.request.key: s.group for s in self.scheduler.waiting if s.request.key in keys}
        groups = [group for group in waiting.values() if group.is_untouched]
        self.scheduler.waiting.remove({sequence for group in groups for sequence in group.sequences})
        for group in groups:
            self.duplicates.forget(group)
        return [group.request.key for group in groups]

    def stop(self) -> None:
        """Make ``run`` return after the step under way, for good; safe to call from a signal handler."""
        self._stopping = True

    def unfinished(self) -> dict[int, tuple[int, ...]]:
        """Tokens generated so far, by request key, of every request that could go on from them."""
        tokens = {s.request.key: s.group.resumable_tokens for s in self.scheduler.unfinished()}
        return {key: generated for key, generated in tokens.items() if generated}

    def _update(self, step: InFlight, token_ids: list[tuple[int, ...]]) -> list[Sequence]:
        """Append pending tokens, and those behind drafts that were right; the sequences that end with them."""
        now, ended = time.monotonic(), list[Sequence]()
        left = append_plain(zip(step.sampled, token_ids, strict=True), step.schedule.num_steps)
        self.stats.num_output_tokens += step.schedule.num_steps * (len(step.sampled) - len(left))
        for row, found in left:
            if not row.num_pending:
                continue
            sequence = row.sequence if isinstance(row, Ahead) else row
            sequence.num_pending = 0
            for token_id in found:
                self._append(row, sequence, token_id, now)
                if sequence.is_finished:  # what comes behind was computed in vain
                    ended.append(sequence)
                    break
            else:
                if not sequence.plain_until:
                    sequence.mark_plain(self.eos_token_ids)
        return ended

    def _append(self, row: Row, sequence: Sequence, token_id: int, now: float) -> None:
        """Append a sampled token to the sequence of a row and judge it; -1 is none."""
        if token_id < 0:
            sequence.fail(*sequence.no_token())
            return
        self.stats.num_output_tokens += 1
        sequence.append(token_id, now)
        if isinstance(row, Ahead):
            sequence.logprobs += row.logprobs
            sequence.constraint = row.constraint  # the same, with what its mask has found
        self._judge(sequence)
        self._append_forced(sequence)

    def _judge(self, sequence: Sequence) -> None:
        """Decide whether the newest token ends the sequence."""
        try:
            sequence.finish_reason = sequence.stop_reason(self.eos_token_ids, self.config.max_model_len)
        except TokenizerError as error:  # no text to look for stop strings in
            sequence.fail(str(error))

    def _judge_drafts(self, sequence: Sequence, step: Schedule) -> None:
        """Keep the state of the drafts that were right; the sequence owes what came behind them."""
        assert self.scheduler.drafter is not None
        new = sequence.token_ids[sequence.num_computed_tokens :]
        num_drafted, num_accepted = len(step.drafts[sequence]), common_length(step.drafts[sequence], new[:-1])
        self.scheduler.drafter.book(sequence, num_drafted, num_accepted)
        self.stats.count_drafts(sequence, num_drafted, num_accepted, step=step, window=self.runner.model.config.window)
        if not sequence.is_finished:
            self.scheduler.judged(sequence, num_drafted, num_accepted)

    def _append_forced(self, sequence: Sequence) -> None:
        """Append the tokens that the constraint leaves no choice about; they are owed like any others."""
        while (token_id := sequence.next_forced) is not None:
            self.stats.num_output_tokens += 1
            self.stats.num_forced_tokens += 1
            sequence.token_ids.append(token_id)
            self._judge(sequence)
        if sequence.constraint is not None and sequence.constraint.error:
            sequence.fail(f"structured_outputs: {sequence.constraint.error}", RowErrorCode.BAD_PARAM)

    def _end(self, sequence: Sequence) -> list[Result]:
        """Remove a sequence that has ended; the results that are complete with it."""
        sequence.finished_at = time.monotonic()
        if not sequence.generates:
            sequence.finish_reason = FinishReason.STOP if sequence.request.choices else FinishReason.LENGTH
            sequence.first_token_at = sequence.finished_at
        if not all(isfinite(score.logprob) for score in (*sequence.scores, *sequence.logprobs)):
            sequence.fail("the model's logits over the given tokens are not finite")
        if sequence.first_scheduled_at is not None:
            self.scheduler.finish(sequence)
        if not sequence.group.is_finished:
            return []
        result = sequence.group.result()
        answers = [result, *self.duplicates.end(sequence.group, result)]
        self.stats.num_shared_requests = self.duplicates.num_shared
        return answers
