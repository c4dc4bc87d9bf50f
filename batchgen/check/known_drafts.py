"""Drafts that are right, wrong or missing by turns, for the proof that they change nothing."""

from __future__ import annotations

from collections.abc import Mapping

from batchgen.engine.drafts import Drafter
from batchgen.engine.sequence import Sequence


class KnownDrafts(Drafter):
    """Drafts the tokens that an earlier run generated for each request; by turns all, spoilt ones, none and a few."""

    def __init__(self, known: Mapping[int, tuple[int, ...]]) -> None:
        super().__init__()
        self._known = known
        self._turn = 0

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        self._turn += 1
        begin = sequence.num_output_tokens
        drafts = self._known[sequence.request.key][begin : begin + most]
        middle, wrong = len(drafts) // 2, sequence.token_ids[0]
        return (drafts, (*drafts[:middle], wrong, *drafts[middle + 1 :])[: len(drafts)], (), drafts[:2])[self._turn % 4]

    def pays(self, num_rows: int, drafts: object) -> bool:
        return True
