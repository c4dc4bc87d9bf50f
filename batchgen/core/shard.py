"""Shards: parts of one input, which separate runs compute and ``merge`` joins."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard ``number`` of ``count``, counted from 1: the rows with ``index % count == number - 1``.

    Raises ValueError for a number outside 1 to ``count``; its text completes "<flag> = <value>: ...".
    """

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise ValueError('must be "i/n" with 1 <= i <= n, such as "2/8"')

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> Shard:
        """``2/8``: the second of eight shards. Raises ValueError for any other text."""
        match = re.fullmatch(r"\s*(\d{1,18})\s*/\s*(\d{1,18})\s*", text)
        return cls(int(match[1]), int(match[2])) if match else cls(0, 0)

    def owns(self, index: int) -> bool:
        """Whether the row at ``index`` of the input belongs to this shard."""
        return index >= 0 and index % self.count == self.number - 1

    def rows(self, num_rows: int) -> range:
        """The indexes of this shard's rows among the first ``num_rows`` rows of the input."""
        return range(self.number - 1, num_rows, self.count)


WHOLE = Shard()  # the only shard of a job that is not divided
