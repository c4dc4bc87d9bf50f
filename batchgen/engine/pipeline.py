"""The step loop for a device that works beside the host: a step is launched while the one before it still runs.

Token ids go from step to step on the device; the host learns them one step late, in the one wait of a step. Until
then a sequence has a pending token. Whether it ends by length is known ahead; if an end token, a stop string or a
row that is not finite ends it, the step under way computes one token too many, which is dropped when it arrives. The
memory is given back at once: whatever is put there is launched later, and the device keeps the order of launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchgen.core.records import Request, Result
from batchgen.engine.batch import build_pending
from batchgen.engine.config import EngineConfig
from batchgen.engine.engine import Engine
from batchgen.engine.sequence import Schedule, Sequence, StopWatch
from batchgen.model.decoder import Decoder

Wait = Callable[[], list[int]]
Fetch = Callable[[Tensor], Wait]


def fetch_pinned(token_ids: Tensor) -> Wait:
    """Begin to copy int64 ids off a CUDA device, behind all work launched so far; what returns them once they are here.

    Later launches are not waited for.
    """
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
    """A step that was launched: whose tokens it samples, their ids on the device, and what waits for them."""

    sampled: list[Sequence]
    token_ids: Tensor
    wait: Wait


class PipelinedEngine(Engine):
    """An ``Engine`` that gives the device its next step before it asks for the results of the last.

    Steps whose rows need the host (penalties count what was generated, log-probabilities are put together there) run
    by themselves, as every step of ``Engine`` does.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig | None = None,
        *,
        eos_token_ids: Iterable[int] | None = None,
        stop_watch: Callable[[tuple[str, ...]], StopWatch] | None = None,
        fetch: Fetch = fetch_pinned,
    ) -> None:
        """As ``Engine``; ``fetch`` is how ids come from the device."""
        super().__init__(model, config, eos_token_ids=eos_token_ids, stop_watch=stop_watch)
        self._fetch = fetch
        self._in_flight: InFlight | None = None

    def run(self, requests: Iterable[Request]) -> Iterator[Result]:
        """As ``Engine.run``; what is under way when it ends or is stopped still counts."""
        yield from super().run(requests)
        yield from self._book()

    def step(self) -> list[Result]:
        """Launch the next step; the results of the requests that ended with the one before it."""
        with self.stats.phase("schedule"):
            schedule = self.scheduler.schedule()
        if _needs_host(schedule):
            results = self._book()
            schedule = _still_wanted(schedule)
            return results + (self._advance(schedule) if schedule.entries else [])
        launched = self._launch(schedule) if schedule.entries else None
        results = self._book()
        with self.stats.phase("update"):
            schedule = _still_wanted(schedule)
            for sequence in schedule.completing:
                sequence.num_pending = 1
            self.scheduler.computed(schedule)
        self._in_flight = launched
        return results

    def _launch(self, schedule: Schedule) -> InFlight:
        """Set the device to work on a schedule, behind the step in flight."""
        sampled, before = schedule.completing, self._in_flight
        with self.stats.phase("forward"):
            pending = build_pending(schedule, before.sampled, before.token_ids) if before is not None else None
            logits = self.runner.run(schedule, pending)
        with self.stats.phase("sample"):
            token_ids = self.sampler.choose(logits, sampled) if sampled else torch.empty(0, dtype=torch.int64)
            wait = self._fetch(token_ids)
        with self.stats.phase("update"):
            self._count(schedule, len(logits))
        return InFlight(sampled, token_ids, wait)

    def _book(self) -> list[Result]:
        """Wait for the step in flight and append its tokens; the results of the requests that end with them."""
        if self._in_flight is None:
            return []
        with self.stats.phase("forward"):
            token_ids = self._in_flight.wait()
        pending = [(s, i) for s, i in zip(self._in_flight.sampled, token_ids, strict=True) if s.num_pending]
        self._in_flight = None
        with self.stats.phase("update"):
            for sequence, _ in pending:
                sequence.num_pending = 0
            ended = self._update([s for s, _ in pending], [i for _, i in pending])
            return [result for sequence in ended for result in self._end(sequence)]


def _still_wanted(schedule: Schedule) -> Schedule:
    """The schedule without the sequences that have ended since it was made."""
    return replace(schedule, entries=tuple(entry for entry in schedule.entries if entry[0].finished_at is None))


def _needs_host(schedule: Schedule) -> bool:
    """Whether a row wants something of the step before to be on the host, or more of this one than an id."""
    return any(
        s.counts is not None or s.request.params.logprobs is not None or s.next_scored < s.end_scored or not s.generates
        for s, _ in schedule.entries
    )


def make_engine(
    model: Decoder,
    config: EngineConfig | None = None,
    *,
    eos_token_ids: Iterable[int] | None = None,
    stop_watch: Callable[[tuple[str, ...]], StopWatch] | None = None,
) -> Engine:
    """The engine for a model's device: on a GPU the pipelined one; on a CPU there is nobody to work meanwhile."""
    kind = PipelinedEngine if model.device.type == "cuda" else Engine
    return kind(model, config, eos_token_ids=eos_token_ids, stop_watch=stop_watch)
