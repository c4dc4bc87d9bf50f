"""Drafts: tokens that a sequence is likely to generate next, looked up in its own tokens and in what others generated.

A step computes drafts behind the token that a sequence owes, and samples after each. Kernels give a token the same bits
in a chunk and alone, and draws are keyed by position, so what is sampled does not depend on drafts: they only decide
how many positions are worth computing at once. A step keeps sampled tokens up to the first that is not the draft behind
it. Which drafts are made, and how many, may depend on the schedule and on the clock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from batchgen.core.records import Request, TokenLogprob
from batchgen.engine.lookup import Lookup, NGrams
from batchgen.engine.schedule import Schedule
from batchgen.engine.sequence import Sequence

if TYPE_CHECKING:
    from batchgen.engine.observers import Constraint, TokenCounts
    from batchgen.engine.rules import TokenRules

MAX_DRAFTS = 7  # per sequence and step
_LENGTHS = (1, 3, MAX_DRAFTS)  # few, since steps of a size that was met before need not be launched kernel by kernel
_MAX_ROWS = 16  # tokens of a step on a CPU: with more it is bound by arithmetic everywhere
_MAX_POOLED = 1 << 16  # tokens of finished outputs that are remembered
_NUM_TIMES = 8  # steps of a size whose shortest counts: others had to wait for the machine
_MIN_TIMES = 3  # steps of a size before it is judged: the first of a kind are slower
_GAIN = 1.02  # a step with drafts must promise so many times the tokens per second
_TRY_OTHER = 100  # steps after which the other way is tried once, since times change


class Drafter:
    """Makes the drafts of one engine, and decides from the times of its own steps whether they are worth it."""

    def __init__(self, max_drafts: int = MAX_DRAFTS) -> None:
        self.max_drafts = max_drafts
        self._others = NGrams([])
        self._step_s: dict[int, deque[float]] = {}  # by the step's tokens, all of them single ones or drafts
        self._num_asked: Counter[int] = Counter()

    def room(self, num_rows: int) -> int:
        """How many drafts a step of ``num_rows`` single tokens may have."""
        return max(0, min(_MAX_ROWS - num_rows, num_rows * self.max_drafts)) if num_rows else 0

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Up to ``most`` tokens that may follow those of a sequence."""
        tokens = sequence.token_ids
        lookup = sequence.lookup = sequence.lookup or Lookup(NGrams(tokens))
        if len(tokens) < lookup.pauses_until:
            return ()
        most = min(most, self.max_drafts, 1 + int(2 * lookup.accepted))
        found: Sequence_[int] = ()
        if (place := lookup.grams.find(tokens)) is not None:
            period = len(tokens) - place  # a text that repeats itself up to its end goes on with the drafts themselves
            found = [tokens[place + i % period] for i in range(most)]
        elif (place := self._others.find(tokens)) is not None:
            found = self._others.tokens[place : place + most]
        return tuple(found[: max((n for n in _LENGTHS if n <= len(found)), default=0)])

    def pays(self, num_rows: int, drafts: Mapping[Sequence, tuple[int, ...]]) -> bool:
        """Whether a step of so many sequences promises more tokens per second with drafts than without."""
        size = num_rows + sum(map(len, drafts.values()))
        without, with_them = self._step_s.get(num_rows, ()), self._step_s.get(size, ())
        if len(without) < _MIN_TIMES or len(with_them) < _MIN_TIMES:
            return len(without) >= _MIN_TIMES
        expected = sum(len(found) * s.lookup.hits for s, found in drafts.items() if s.lookup)
        pays = (num_rows + expected) / min(with_them) > _GAIN * num_rows / min(without)
        self._num_asked[size] += 1
        return pays != (self._num_asked[size] % _TRY_OTHER == 0)

    def book(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Learn how many drafts of a sequence a step accepted."""
        if sequence.lookup is not None:
            sequence.lookup.book(num_drafted, num_accepted, len(sequence.token_ids))

    def time(self, num_rows: int, step_s: float) -> None:
        """Learn how long a step took in which each sequence had one token and its drafts."""
        if num_rows <= _MAX_ROWS:
            self._step_s.setdefault(num_rows, deque(maxlen=_NUM_TIMES)).append(step_s)

    def finished(self, sequence: Sequence) -> None:
        """Remember what a sequence generated, for those like it."""
        if len(self._others.tokens) > _MAX_POOLED:
            self._others = NGrams([])
        self._others.tokens.extend(sequence.token_ids[sequence.num_prompt_tokens :][:_MAX_POOLED])
        sequence.lookup = None


@dataclass(slots=True, eq=False)
class Ahead:
    """A position behind one or more drafts, to the sampler a sequence like any other that is so far along.

    ``drafts`` are those up to there; ``logprobs`` takes the log-probability of what is sampled. ``counts`` and
    ``constraint`` are what those of the sequence become with the drafts.
    """

    sequence: Sequence
    drafts: tuple[int, ...]
    num_output_tokens: int
    counts: TokenCounts | None
    constraint: Constraint | None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    plain_until: ClassVar[int] = 0

    @classmethod
    def all_of(cls, sequence: Sequence, drafts: tuple[int, ...]) -> list[Ahead]:
        """The positions behind each of a sequence's drafts."""
        rows, counts, constraint = [], sequence.counts, sequence.constraint
        for n, draft in enumerate(drafts, 1):
            counts = counts and counts.followed_by(draft)
            constraint = constraint and constraint.followed_by(draft)
            rows.append(cls(sequence, drafts[:n], sequence.num_output_tokens + n, counts, constraint))
        return rows

    @property
    def request(self) -> Request:
        return self.sequence.request

    @property
    def sample_index(self) -> int:
        return self.sequence.sample_index

    @property
    def rules(self) -> TokenRules | None:
        return self.sequence.rules

    @property
    def token_ids(self) -> list[int]:
        return [*self.sequence.token_ids, *self.drafts]

    @property
    def num_pending(self) -> int:
        """1 once the sequence has come this far with the drafts, and goes on: here its next token is sampled."""
        sequence = self.sequence
        is_here = sequence.num_output_tokens == self.num_output_tokens and not sequence.is_finished
        return int(is_here and tuple(sequence.token_ids[-len(self.drafts) :]) == self.drafts)


def common_length(first: Sequence_[int], second: Sequence_[int]) -> int:
    """How many tokens two lists begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def rows_of(schedule: Schedule) -> list[Sequence | Ahead]:
    """What the rows of logits of a step are of, before those of ``schedule.scored``."""
    if not schedule.drafts:
        return [*schedule.completing]
    rows: list[Sequence | Ahead] = []
    for sequence in schedule.completing:
        rows += [sequence, *Ahead.all_of(sequence, schedule.drafts.get(sequence, ()))]
    return rows


def append_plain(
    sampled: Iterable[tuple[Sequence | Ahead, tuple[int, ...]]], num_each: int
) -> list[tuple[Sequence | Ahead, tuple[int, ...]]]:
    """Append the pending tokens that end nothing and that nothing watches; the others are left to be judged.

    Each row has as many tokens, ``num_each``, and either all of them are appended or none.
    """
    left = []
    for entry in sampled:
        row, token_ids = entry
        if (
            isinstance(row, Ahead)
            or not row.num_pending
            or len(row.token_ids) + num_each > row.plain_until
            or not row.end_ids.isdisjoint(token_ids)
        ):
            left.append(entry)
        else:
            row.num_pending = 0
            row.token_ids += token_ids
    return left
