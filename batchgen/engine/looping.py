"""Notices that a text goes round in circles, in constant time a token."""

from __future__ import annotations

from collections import deque

MAX_PERIOD = 64  # tokens of the longest run that counts as a loop


class LoopWatch:
    """Watches generated tokens for one and the same run of up to ``MAX_PERIOD`` tokens, ``max_repeats`` times over.

    For every period p it counts how many tokens in a row equal the one p places before. A run of p tokens has been
    there k times over once that count reaches (k - 1) * p.
    """

    __slots__ = ("_matches", "_max_repeats", "_recent")

    def __init__(self, max_repeats: int) -> None:
        self._max_repeats = max_repeats
        self._recent: deque[int] = deque(maxlen=MAX_PERIOD)  # the newest token first
        self._matches = [0] * MAX_PERIOD  # by period, from 1 on

    def push(self, token_id: int) -> bool:
        """Take in the next token; whether it completes a loop."""
        is_loop = False
        for place, earlier in enumerate(self._recent):
            if earlier != token_id:
                self._matches[place] = 0
                continue
            self._matches[place] += 1
            is_loop |= self._matches[place] >= (self._max_repeats - 1) * (place + 1)
        self._recent.appendleft(token_id)
        return is_loop
