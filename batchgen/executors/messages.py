"""Messages between the driver and its workers, and the two protocols behind which a kind of worker hides.

A task is a row on its way to a worker, such as a ``Pending`` one, and an answer what comes back for it. Messages are
frozen and can be pickled; driver and workers trust each other. What a worker runs on is unknown here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol


class Task(Protocol):
    """A row to be run, a frozen dataclass: ``key`` is its index, ``output_token_ids`` what is generated already."""

    @property
    def key(self) -> int: ...

    @property
    def output_token_ids(self) -> tuple[int, ...]: ...


class Answer(Protocol):
    """What came of a task."""

    @property
    def key(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Grant:
    """What the driver tells a worker.

    ``tasks`` are to be run, after those given before. ``recall`` are keys of tasks to be given back unless they have
    begun. With ``stop``, the worker ends the step under way and gives back all that it has.
    """

    tasks: tuple[Task, ...] = ()
    recall: tuple[int, ...] = ()
    stop: bool = False

    def __bool__(self) -> bool:
        return bool(self.tasks or self.recall or self.stop)


@dataclass(frozen=True, slots=True)
class Identity:
    """What must be equal between the workers of a run: its rows must not depend on which of them computed a row.

    ``weights`` are the digests of ``ModelInfo.fingerprint``, ``numerics`` those of ``Backend``.
    """

    weights: Mapping[str, Any]
    numerics: Mapping[str, str]
    version: str


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker is ready: its model is loaded and its kernels are compiled. ``place`` is the name of its machine."""

    identity: Identity
    max_num_seqs: int
    threads: int
    place: str = ""
    pid: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answers:
    """What a worker tells the driver, at least every ``HEARTBEAT_S``, so that its silence means something.

    ``finished`` are answers to tasks. ``partials`` are the tokens so far of tasks that are half done, by key; they
    replace those told before. ``returned`` are the keys of recalled tasks. ``stats`` is ``EngineStats.to_dict`` with
    the series' ``at`` as the age in seconds, None where it has not changed. With ``stopped`` all tasks but those
    finished are given back, and ``facts`` is that of ``Backend``. ``leaving`` says that the machine will soon be gone.
    """

    finished: tuple[Answer, ...] = ()
    partials: Mapping[int, tuple[int, ...]] | None = None
    returned: tuple[int, ...] = ()
    stats: Mapping[str, Any] | None = None
    stopped: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    leaving: bool = False

    def with_facts(self, facts: Mapping[str, Any]) -> Answers:
        """The same with ``facts``."""
        return replace(self, facts=facts)


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker has gone. An ``error`` is what it ended with, and what a process here would have ended with."""

    reason: str
    error: Exception | None = None


Event = Hello | Answers | Lost
HEARTBEAT_S = 0.25


class Seat(Protocol):
    """One worker as the driver sees it; ``name`` is unique in a run. No method blocks or raises."""

    name: str

    def send(self, grant: Grant) -> None:
        """Pass a grant on; one that cannot be delivered is dropped, and ``poll`` then tells of the loss."""

    def poll(self) -> list[Event]:
        """What has come since the last call: ``Hello`` first, and nothing after ``Lost``."""

    def close(self) -> None:
        """End the worker at once, whatever it does."""


class Crew(Protocol):
    """A kind of workers: hires them and waits for them."""

    num_wanted: tuple[int, int]  # the fewest and the most that a run should have; it begins with the first
    is_one_place: bool  # where one worker does not fit, another in its place would not either

    def hire(self) -> Seat | None:
        """Begin to start another worker; None where no more can be had now. Does not wait for it."""

    def wait(self, seats: Iterable[Seat], timeout_s: float) -> None:
        """Return when a seat may have an event, or after the timeout."""

    def close(self) -> None:
        """End all workers that are left."""
