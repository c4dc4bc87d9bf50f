"""Bursts: decode steps that are launched one behind the other and whose token ids are waited for once.

The host schedules, builds and books a burst as one step, so that a device with short steps does not run out of work.
Positions, slots and block tables of all its steps are known ahead, and token ids go from step to step on the device. A
row that meets an end token, or its last token, in the middle is computed to the end of the burst, and what comes behind
is dropped on arrival; others are admitted only then. How long a burst is may depend on the clock: tokens do not depend
on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from batchgen.engine.batch import Copy, PendingTokens, inputs_of
from batchgen.engine.drafts import Ahead
from batchgen.engine.schedule import Schedule
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sequence import Sequence
from batchgen.kernels.inputs import ModelInput

MAX_STEPS = 8
_ENDING_SHARE = 16  # at most one row in so many may come to its last token before the last step
_PATIENCE = 32  # schedules that found the device at work, after which shorter bursts are tried


@dataclass(frozen=True, slots=True)
class InFlight:
    """A schedule that was launched: whose tokens it samples, those of its last step on the device, and all of them.

    ``copy`` has the ids of step after step, a row of ``sampled`` each.
    """

    schedule: Schedule
    sampled: list[Sequence | Ahead]
    token_ids: Tensor
    copy: Copy

    def wait(self) -> list[tuple[int, ...]]:
        """The token ids of each row, one per step."""
        ids, num_rows = self.copy.wait(), len(self.sampled)
        return [*zip(*(ids[i : i + num_rows] for i in range(0, len(ids), num_rows)), strict=True)] if ids else []


class Runner(Protocol):
    """What of ``ModelRunner`` a burst needs."""

    block_size: int
    likeliest: Tensor | None

    def forward(self, inputs: ModelInput, pending: PendingTokens | None) -> Tensor: ...


def launch_burst(
    runner: Runner,
    sample: Callable[..., Tensor],
    schedule: Schedule,
    draws: Iterable[object],
    pending: PendingTokens | None,
) -> tuple[Tensor, Tensor]:
    """Token ids on the device: those of the last step, int64 [num_seqs], and those of each, one behind the other.

    ``sample`` is that of a ``Sampler``, whose ``draws`` of each step are given.
    """
    steps: list[Tensor] = []
    for inputs, drawn in zip(inputs_of(schedule, runner.block_size), draws, strict=True):
        logits = runner.forward(inputs, pending)
        token_ids = sample(logits, schedule.sequences, best=runner.likeliest, draws=drawn)
        steps.append(token_ids.clone())  # the next step may overwrite them
        pending = PendingTokens(token_ids)
    return token_ids, torch.cat(steps)


class Pace:
    """Chooses the length of bursts: the shortest with which the device does not run out of work.

    Longer ones compute more tokens in vain, behind end tokens that the host learns later.
    """

    def __init__(self) -> None:
        self.num_steps = 1
        self._num_busy = 0

    def judge(self, before: InFlight | None) -> None:
        """Learn from decode steps whether the device has done all that it was given, just before it is given more."""
        if before is not None and before.schedule.is_single:
            self.learn(before.copy.is_done())

    def learn(self, is_idle: bool) -> None:
        """Adapt to a device that was idle, or at work, when it was given more."""
        self._num_busy = 0 if is_idle else self._num_busy + 1
        if is_idle:
            self.num_steps = min(2 * self.num_steps, MAX_STEPS)
        elif self._num_busy == _PATIENCE:
            self.num_steps, self._num_busy = max(self.num_steps // 2, 1), 0


def lengthened(schedule: Schedule, scheduler: Scheduler, most: int) -> Schedule:
    """The schedule as a burst of at most ``most`` steps, with blocks for all of them; unchanged where it cannot be one.

    It can if each row owes one token, nothing watches what it generates, few are near their last token, and enough
    blocks are free. Called with the newest schedule, before anything of it is launched.
    """
    sequences, size = schedule.sequences, scheduler.config.block_size
    if most == 1 or not sequences or not schedule.is_single or schedule.resumed:
        return schedule
    if not all(s.plain_until for s in sequences) or len(schedule.completing) < len(sequences):
        return schedule
    left = [s.max_state_tokens - s.num_computed_tokens for s in sequences]
    num_steps = min(most, sorted(left)[len(left) // _ENDING_SHARE])
    entries = [(s, n if n < num_steps else num_steps) for s, n in zip(sequences, left, strict=True)]
    missing = [-(-(s.num_computed_tokens + n) // size) - len(s.block_table) for s, n in entries]
    if num_steps == 1 or sum(missing) > scheduler.pool.num_free:
        return schedule
    for sequence, num_blocks in zip(sequences, missing, strict=True):
        if num_blocks:
            sequence.block_table.extend(scheduler.pool.allocate(num_blocks))
    return replace(schedule, entries=tuple(entries), num_steps=num_steps)
