"""What the engine counts while it runs: tokens, steps, seconds by kind of work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine was made.

    ``num_prefill_tokens`` counts prompt tokens and recomputed ones, ``num_decode_tokens`` the single tokens of
    sequences that owed just one; ``num_attended`` sums the positions every computed token looked at, and
    ``num_kv_read`` the cached positions every step's sequences had (each read at least once), so that a roofline
    can be drawn; ``phase_s`` sums seconds by phase of a step.
    """

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_output_tokens: int = 0
    num_attended: int = 0
    num_kv_read: int = 0
    num_preemptions: int = 0
    max_running: int = 0
    phase_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the enclosed work to a phase."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.phase_s[name] = self.phase_s.get(name, 0.0) + time.monotonic() - start

    def to_dict(self) -> dict[str, object]:
        """For a report."""
        return asdict(self)
