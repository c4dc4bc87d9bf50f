"""The step loop: schedule, forward, sample, update. Pulls requests lazily and yields results as they finish.

Everything happens in the caller's thread; only ``stop`` may be called from outside. On a GPU steps overlap: a step is
launched while the one before it still runs. Token ids go from step to step on the device and the host learns them one
step late; until then a sequence has a pending token. An end by length is known ahead. If an end token, a stop string
or a row that is not finite ends a sequence, the step under way computes one token too many, which is dropped on
arrival. The memory of an ended sequence is reused at once: later work on it is launched later, and the device keeps the
order of launches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import isfinite

import torch
from torch import Tensor

from batchgen.core.errors import RowError, RowErrorCode, TokenizerError
from batchgen.core.records import FinishReason, Request, Result
from batchgen.engine.batch import build_pending
from batchgen.engine.config import EngineConfig
from batchgen.engine.duplicates import Duplicates
from batchgen.engine.load import use_threads
from batchgen.engine.masks import build_mask
from batchgen.engine.model_runner import ModelRunner
from batchgen.engine.observers import Constraints, StopMatcher, TokenCounts, observers_for
from batchgen.engine.rules import rules_for
from batchgen.engine.sampler import Sampler
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sequence import Group, Schedule, Sequence
from batchgen.engine.sizes import resolve
from batchgen.engine.stats import EngineStats
from batchgen.kernels.interface import Kernels
from batchgen.model.decoder import Decoder

Wait = Callable[[], list[int]]
"""Returns the token ids of a step once they are on the host."""


def fetch_ids(token_ids: Tensor) -> Wait:
    """Begin to copy int64 ids to the host, behind all work launched so far; later launches are not waited for."""
    if token_ids.device.type != "cuda":
        return token_ids.tolist
    host = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
    host.copy_(token_ids, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    copied.record()

    def wait() -> list[int]:
        copied.synchronize()
        return host.tolist()

    return wait


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was launched: its schedule, whose tokens it samples, and their ids on the device."""

    schedule: Schedule
    sampled: list[Sequence]
    token_ids: Tensor
    wait: Wait


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
        fetch: Callable[[Tensor], Wait] = fetch_ids,
    ) -> None:
        """``stop_matcher`` makes the matcher of some stop strings, ``sampler`` the sampler for these end tokens;
        ``constraints`` makes what ``structured_outputs`` asks for.

        ``eos_token_ids`` default to the model config's. ``overlaps``: whether a step is launched before the last one is
        waited for, by default on a GPU alone, as a CPU has nothing to overlap with. ``fetch`` copies ids to the host.

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
        self.sampler = sampler(model.kernels, self.eos_token_ids)
        self.overlaps = model.device.type == "cuda" if overlaps is None else overlaps
        self.stats = EngineStats(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        self.duplicates = Duplicates()
        self._shares_duplicates = config.share_duplicates
        self._stop_matcher = stop_matcher
        self._constraints = constraints
        self._fetch = fetch
        self._in_flight: InFlight | None = None
        self._stopping = False

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
            if not self.scheduler.has_work:
                break
            yield from self.step()
        yield from self._collect()

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
        answers = []
        for sequence in group.sequences:
            if sequence.is_finished:  # by what an earlier run generated, or by forced tokens alone
                answers += self._end(sequence)
            else:
                self.scheduler.add(sequence)
        return answers[0] if answers else None

    def _unusable(self, request: Request) -> RowError | None:
        known = self.runner.model.config.vocab_size
        for tokens in filter(None, request.token_lists):
            for token in (min(tokens), max(tokens)):
                if not 0 <= token < known:
                    return RowError(RowErrorCode.BAD_PARAM, f"token id {token} is not among the model's {known}")
        for name, maker in (("stop", self._stop_matcher), ("structured_outputs", self._constraints)):
            if getattr(request.params, name) and maker is None:
                return RowError(RowErrorCode.BAD_PARAM, f"{name} needs a tokenizer, and this model has none")
        return None

    def _prepare(self, sequence: Sequence) -> None:
        """Set up what watches the sequence, and show it the tokens that an earlier run generated."""
        request = sequence.request
        sequence.observers = observers_for(request.params, self._stop_matcher)
        if request.params.has_penalties:
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

    def step(self) -> list[Result]:
        """Advance every scheduled sequence; the results that are complete.

        Where steps overlap, these are the results of the step before. A step with rows that need the host runs alone.
        """
        with self.stats.phase("schedule"):
            schedule = self.scheduler.schedule()
        if self.overlaps and not any(s.needs_host for s, _ in schedule.entries):
            launched = self._launch(schedule)
            results = self._collect()
            self._book(launched)
            return results
        results = self._collect()
        self._book(self._launch(_unfinished(schedule)))
        return results + self._collect()

    def _launch(self, schedule: Schedule) -> InFlight | None:
        """Set the device to work on a schedule, behind the step in flight; None without any work."""
        if not schedule.entries:
            return None
        sampled, before = schedule.completing, self._in_flight
        with self.stats.phase("forward"):
            pending = build_pending(schedule, before.sampled, before.token_ids) if before is not None else None
            logits = self.runner.run(schedule, pending)
        mask = None
        if any(s.constraint is not None or s.rules is not None for s in sampled):
            with self.stats.phase("mask"):  # on a GPU the forward pass runs meanwhile
                mask = build_mask(self._constraints, sampled, logits.shape[1], logits.device)
        with self.stats.phase("sample"):
            if len(logits) > len(sampled):  # first: given tokens stand before the new ones
                self.sampler.score(logits[len(sampled) :], schedule.scored)
            token_ids = self.sampler.sample(logits[: len(sampled)], sampled, mask)
            wait = self._fetch(token_ids)
        with self.stats.phase("update"):
            self._count(schedule, len(logits))
        return InFlight(schedule, sampled, token_ids, wait)

    def _book(self, launched: InFlight | None) -> None:
        """Make a launched step the one in flight: its tokens count as cached, and those it samples as pending."""
        self._in_flight = launched
        if launched is None:
            return
        with self.stats.phase("update"):
            for sequence in launched.sampled:
                sequence.num_pending = int(sequence.finished_at is None)
            self.scheduler.computed(_unfinished(launched.schedule))

    def _collect(self) -> list[Result]:
        """Wait for the step in flight and append its tokens; the results of the requests that end with them."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return []
        with self.stats.phase("forward"):
            token_ids = step.wait()
        with self.stats.phase("update"):
            ended = self._update((s, token) for s, token in zip(step.sampled, token_ids, strict=True) if s.num_pending)
            ended += [s for s, _ in step.schedule.entries if not s.generates and not s.num_owed]
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
        stats.num_attended += schedule.num_attended()
        if window := self.runner.model.config.window:
            stats.num_window_attended += schedule.num_attended(window)
            stats.num_window_read += sum(min(s.num_computed_tokens + n, window) for s, n in schedule.entries)
        stats.sum_experts += self.runner.model.config.expected_experts(schedule.num_tokens)
        decode = 0
        for sequence, count in schedule.entries:
            decode += sequence.num_decoded_in(count)
            stats.num_kv_read += sequence.num_computed_tokens + count
        pool = self.scheduler.pool
        kv_use = 1 - pool.num_free / pool.num_blocks
        stats.add_step(schedule.num_tokens - decode, decode, len(schedule.entries), kv_use)
        stats.num_preemptions = self.scheduler.num_preemptions
        stats.num_queried_tokens = self.scheduler.num_queried_tokens
        stats.num_cached_tokens = self.scheduler.num_cached_tokens
        stats.num_recomputed_tokens = self.scheduler.num_recomputed_tokens
        stats.max_running = max(stats.max_running, len(self.scheduler.running))

    def _update(self, sampled: Iterable[tuple[Sequence, int]]) -> list[Sequence]:
        """Append pending tokens; the sequences that end with them."""
        now = time.monotonic()
        ended = []
        for sequence, token_id in sampled:
            sequence.num_pending = 0
            if token_id < 0:
                self._fail(sequence, *sequence.no_token())
                ended.append(sequence)
                continue
            self.stats.num_output_tokens += 1
            sequence.append(token_id, now)
            self._judge(sequence)
            self._append_forced(sequence)
            if sequence.is_finished:
                ended.append(sequence)
        return ended

    def _judge(self, sequence: Sequence) -> None:
        """Decide whether the newest token ends the sequence."""
        try:
            sequence.finish_reason = sequence.stop_reason(self.eos_token_ids, self.config.max_model_len)
        except TokenizerError as error:  # no text to look for stop strings in
            self._fail(sequence, str(error))

    def _append_forced(self, sequence: Sequence) -> None:
        """Append the tokens that the constraint leaves no choice about; they are owed like any others."""
        while (token_id := sequence.next_forced) is not None:
            self.stats.num_output_tokens += 1
            self.stats.num_forced_tokens += 1
            sequence.token_ids.append(token_id)
            self._judge(sequence)
        if sequence.constraint is not None and sequence.constraint.error:
            self._fail(sequence, f"structured_outputs: {sequence.constraint.error}", RowErrorCode.BAD_PARAM)

    def _end(self, sequence: Sequence) -> list[Result]:
        """Remove a sequence that has ended; the results that are complete with it."""
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
    def _fail(sequence: Sequence, message: str, code: RowErrorCode = RowErrorCode.INTERNAL) -> None:
        """End a sequence, and its request with an error."""
        sequence.group.error = RowError(code, message)
        sequence.finish_reason = FinishReason.STOP


def _unfinished(schedule: Schedule) -> Schedule:
    """The schedule without the sequences that have ended since it was made."""
    entries = tuple([entry for entry in schedule.entries if entry[0].finished_at is None])
    return schedule if len(entries) == len(schedule.entries) else replace(schedule, entries=entries)
