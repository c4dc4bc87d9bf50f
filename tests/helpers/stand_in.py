"""A stand-in for the model, for tests of the scheduler alone."""

from __future__ import annotations

from collections.abc import Callable

from batchgen.core.records import FinishReason
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sequence import Schedule, Sequence


def one_step(scheduler: Scheduler, ends: Callable[[Sequence], bool] = lambda s: False) -> Schedule:
    """One step of a model whose every token is 9; a sequence ends at max_tokens or when ``ends`` says so."""
    scheduler.check()
    schedule = scheduler.schedule()
    completing = schedule.completing
    scheduler.computed(schedule)
    for sequence in completing:
        sequence.append(9, 0.0)
        if sequence.max_new_tokens <= 0 or ends(sequence):
            sequence.finish_reason = FinishReason.LENGTH
            scheduler.finish(sequence)
    scheduler.check()
    return schedule
