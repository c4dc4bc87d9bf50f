"""Worker as the pool sees it: its rows in flight, how many of them it should have, and its counters for the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from batchgen.executors.messages import HEARTBEAT_S, Task

_LOOK_AHEAD = 8  # times max_num_seqs, shared by all workers: what one engine alone keeps waiting


@dataclass(slots=True)
class Member:
    """What the pool knows of a worker, and its counters.

    ``state`` is "running", "quarantine" (its one row is a suspect), "leaving" (told to stop), "left" or "lost".
    ``num_rows`` were answered by it first. ``num_given_back`` were in flight when it was lost or left
    before the run stopped, and ``num_tokens_taken_over`` of their tokens need not be generated again.
    """

    name: str
    max_num_seqs: int
    joined_at: float
    heard_at: float
    state: str = "running"
    num_rows: int = 0
    num_output_tokens: int = 0
    num_given_back: int = 0
    num_tokens_taken_over: int = 0
    ended_at: float | None = None
    tasks: dict[int, Task] = field(default_factory=dict)  # in flight, in the order of their grants
    recalled: set[int] = field(default_factory=set)  # of these, asked back once: given back or begun
    margin: int = 1  # rows that should wait in it
    slack: int = 0  # of these, what may be missing, so that grants are long runs
    num_struck: int = 0  # of the tasks, those that were in flight at a loss
    round_at: float = 0.0
    round_rows: int = 0
    most_in_a_round: float = 0.0

    @property
    def window(self) -> int:
        """The most rows in flight."""
        return self.max_num_seqs + self.margin

    def count(self, num_finished: int, now: float) -> None:
        """Book answered rows, and learn how many can finish between two messages: the peak, which fades slowly."""
        self.num_rows += num_finished
        self.round_rows += num_finished
        if now - self.round_at >= HEARTBEAT_S:
            self.most_in_a_round = max(self.round_rows, 0.98 * self.most_in_a_round)
            self.round_rows, self.round_at = 0, now

    def set_margin(self, num_workers: int) -> int:
        """Rows to keep waiting: as many as finish before more can come, and some to choose from. Returns the change."""
        before = self.margin
        shared = _LOOK_AHEAD * self.max_num_seqs // num_workers
        urgent = 2 * round(self.most_in_a_round)
        self.margin = max(urgent, shared, self.max_num_seqs // 8, 2)
        self.slack = (self.margin - urgent) // 2
        return self.margin - before

    def recall(self, most: int) -> tuple[int, ...]:
        """Up to so many keys of the rows that it got last and has not been asked for."""
        unasked = (key for key in reversed(self.tasks) if key not in self.recalled)
        keys = tuple(islice(unasked, max(0, most)))
        self.recalled.update(keys)
        return keys


def even_shares(members: Sequence[Member], num_waiting: int) -> dict[str, int]:
    """How many rows each would have if theirs and those that wait for them were shared out evenly."""
    num_slots = sum(member.max_num_seqs for member in members)
    num_rows = num_waiting + sum(len(member.tasks) for member in members)
    return {member.name: -(-num_rows * member.max_num_seqs // num_slots) for member in members}


def recall_surplus(members: Sequence[Member], num_waiting: int) -> dict[str, tuple[int, ...]]:
    """Keys to ask back from those with more than their share, as many as others have free slots for."""
    shares = even_shares(members, num_waiting)
    surplus = {member.name: len(member.tasks) - shares[member.name] for member in members}
    free = sum(max(0, min(-surplus[m.name], m.max_num_seqs - len(m.tasks))) for m in members)
    recalls = {}
    for member in sorted(members, key=lambda m: -surplus[m.name]):
        if keys := member.recall(min(free, surplus[member.name])):
            recalls[member.name] = keys
            free -= len(keys)
    return recalls
