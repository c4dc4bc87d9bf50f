"""Counts of a running engine: tokens, steps, seconds per phase, and how full its steps were over time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from batchgen.engine.schedule import Schedule

if TYPE_CHECKING:
    from batchgen.engine.scheduler import Scheduler
    from batchgen.model.config import ModelConfig

MAX_POINTS = 1000


class Point(NamedTuple):
    """Successive steps, one or more, from ``at`` on (monotonic clock); ``sequences`` and ``kv_use`` are sums."""

    at: float
    span_s: float
    steps: int
    tokens: int
    prefill_tokens: int
    sequences: int
    kv_use: float

    def joined(self, after: Point) -> Point:
        return Point(self.at, *(mine + more for mine, more in zip(self[1:], after[1:], strict=True)))  # type: ignore[arg-type]  # columns keep their types


class StepSeries:
    """The steps over time as at most ``MAX_POINTS`` points; when these are full, neighbours are joined in pairs."""

    def __init__(self) -> None:
        self._points: list[Point] = []
        self._steps_per_point = 1

    def add(self, step: Point) -> None:
        if self._points and self._points[-1].steps < self._steps_per_point:
            self._points[-1] = self._points[-1].joined(step)
            return
        if len(self._points) == MAX_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [first.joined(second) for first, second in pairs]
            self._steps_per_point *= 2
        self._points.append(step)

    def to_columns(self) -> dict[str, list[float]]:
        """The points as columns, ``sequences`` and ``kv_use`` as means; may be asked from another thread."""
        points = list(self._points)
        columns: dict[str, list[float]] = {name: [getattr(p, name) for p in points] for name in Point._fields}
        columns["span_s"] = [round(p.span_s, 6) for p in points]
        for name in ("sequences", "kv_use"):
            columns[name] = [round(getattr(p, name) / p.steps, 4) for p in points]
        return columns


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine was made, and its limits ``max_num_seqs`` and ``max_num_batched_tokens``.

    Attributes:
        num_prefill_tokens: computed tokens of prompts, of earlier runs and after preemptions.
        num_decode_tokens: the other computed tokens, which this run generated, sampled or forced, including dropped
            ones.
        num_forced_tokens: output tokens that were not sampled, because a constraint forced them.
        num_logits: tokens whose logits were computed.
        num_attended: sum over computed tokens of the positions up to their own.
        num_kv_read: sum over steps of their sequences' cached positions, each read at least once.
        num_window_attended, num_window_read: the same, with at most the model's window of positions per token, or per
            sequence and step; 0 without a window.
        num_cached_tokens: tokens from the prefix cache, out of ``num_queried_tokens`` of admitted prompts.
        num_recomputed_tokens: tokens computed again after a preemption.
        num_shared_requests: requests answered with the result of an identical request.
        steps_s: seconds of all steps, without idle time.
        sequences_s, tokens_s, kv_use_s: sums over steps of sequences, tokens and the share of held blocks, each times
            the step's seconds; divided by ``steps_s`` they are means over time.
        sum_experts: sum over steps of the share of experts that their tokens are expected to use.
        forward_prefill_s: part of phase "forward" for prefill tokens, if a step's time is divided evenly by tokens.
        phase_s: seconds per phase of a step.
    """

    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_output_tokens: int = 0
    num_forced_tokens: int = 0
    num_logits: int = 0
    num_attended: int = 0
    num_kv_read: int = 0
    num_window_attended: int = 0
    num_window_read: int = 0
    num_preemptions: int = 0
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_shared_requests: int = 0
    max_running: int = 0
    steps_s: float = 0.0
    sequences_s: float = 0.0
    tokens_s: float = 0.0
    kv_use_s: float = 0.0
    sum_experts: float = 0.0
    max_kv_use: float = 0.0
    forward_prefill_s: float = 0.0
    phase_s: dict[str, float] = field(default_factory=dict)
    series: StepSeries = field(default_factory=StepSeries)
    _forward_s: float = 0.0
    _phases_s: float = 0.0
    _step_end: float | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the enclosed work to a phase."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.phase_s[name] = self.phase_s.get(name, 0.0) + time.monotonic() - start

    def count(self, schedule: Schedule, num_logits: int, scheduler: Scheduler, model: ModelConfig) -> None:
        """Count a schedule that has just been launched, before ``Scheduler.on_launched``."""
        attended = schedule.num_attended()
        self.num_logits += num_logits
        self.num_attended += attended
        if window := model.window:
            self.num_window_attended += schedule.num_attended(window)
            self.num_window_read += sum(min(s.num_computed_tokens + n, window) for s, n in schedule.entries.items())
        self.sum_experts += model.expected_experts(schedule.num_tokens)
        decode = schedule.num_decoded()
        self.num_kv_read += sum(schedule.starts) + schedule.num_tokens
        pool = scheduler.pool
        kv_use = 1 - pool.num_free / pool.num_blocks
        self.add_step(schedule.num_tokens - decode, decode, len(schedule.entries), kv_use)
        self.num_preemptions = scheduler.num_preemptions
        self.num_queried_tokens = scheduler.num_queried_tokens
        self.num_cached_tokens = scheduler.num_cached_tokens
        self.num_recomputed_tokens = scheduler.num_recomputed_tokens
        self.max_running = max(self.max_running, len(scheduler.running))

    def add_step(self, prefill_tokens: int, decode_tokens: int, sequences: int, kv_use: float) -> None:
        """Count a step whose forward pass has just been timed; ``kv_use`` is a share of the blocks."""
        tokens = prefill_tokens + decode_tokens
        forward_s = self.phase_s.get("forward", 0.0)
        step_s = forward_s - self._forward_s
        self._forward_s = forward_s
        phases_s = sum(self.phase_s.values())
        busy_s, self._phases_s = phases_s - self._phases_s, phases_s
        now = time.monotonic()
        began = now - step_s if self._step_end is None else self._step_end
        self._step_end = now
        self.num_steps += 1
        self.num_prefill_tokens += prefill_tokens
        self.num_decode_tokens += decode_tokens
        self.steps_s += busy_s
        self.sequences_s += busy_s * sequences
        self.tokens_s += busy_s * tokens
        self.kv_use_s += busy_s * kv_use
        self.max_kv_use = max(self.max_kv_use, kv_use)
        self.forward_prefill_s += step_s * prefill_tokens / max(tokens, 1)
        self.series.add(Point(began, now - began, 1, tokens, prefill_tokens, sequences, kv_use))

    def to_dict(self) -> dict[str, Any]:
        """For a report; ``series`` as columns."""
        return self.counts() | {"series": self.series.to_columns()}

    def counts(self) -> dict[str, Any]:
        """The totals without the series, which takes long to copy."""
        counts = {f.name: getattr(self, f.name) for f in fields(self) if f.name[0] != "_" and f.name != "series"}
        return counts | {"phase_s": dict(self.phase_s)}
