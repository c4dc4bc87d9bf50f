"""The scheduler run without a model, to test scheduling policies.

Generated tokens are placeholders, and output lengths are given. Everything else is as in a real run: look-ahead,
packing into steps, KV memory, the prefix cache and preemption.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from batchgen.core.records import Request
from batchgen.engine.schedule import Schedule
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sequence import RequestState, Sequence

_PLACEHOLDER = 0  # the id of every generated token


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes: tokens, rows of logits, and positions that its tokens attend to."""

    tokens: int
    logits: int
    attended: int

    @classmethod
    def of(cls, schedule: Schedule) -> StepWork:
        """The work of a schedule that is not booked yet."""
        return cls(schedule.num_tokens, len(schedule.completing), schedule.num_attended())


def simulate(
    scheduler: Scheduler, requests: Iterable[tuple[Request, int]], look_ahead: int
) -> Iterator[tuple[StepWork, list[Sequence]]]:
    """Run (request, output length) pairs to their end; yields the work of each step and the sequences it finished.

    At most ``look_ahead`` requests wait at once. A request that could never run is left out, as in the engine.
    """
    source, lengths = iter(requests), dict[int, int]()
    while True:
        while len(scheduler.waiting) < look_ahead and (pulled := next(source, None)) is not None:
            request, lengths[request.key] = pulled
            for sequence in RequestState(request).sequences:
                if scheduler.refusal(sequence) is None:
                    scheduler.add(sequence)
        if not scheduler.has_work:
            return
        schedule = scheduler.schedule()
        work = StepWork.of(schedule)
        ended = advance(scheduler, schedule, lambda s: s.num_output_tokens >= lengths[s.request.key])
        yield work, ended


def advance(scheduler: Scheduler, schedule: Schedule, ends: Callable[[Sequence], bool]) -> list[Sequence]:
    """Book a schedule and append a token where one is due; finishes the sequences that ``ends`` names, returns them."""
    completing, _ = schedule.completing, schedule.starts
    scheduler.on_launched(schedule)
    finished = []
    for sequence in completing:
        sequence.token_ids.append(_PLACEHOLDER)
    scheduler.on_tokens_known(schedule)
    for sequence in completing:
        if ends(sequence):
            scheduler.finish(sequence)
            finished.append(sequence)
    return finished
