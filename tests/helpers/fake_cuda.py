"""A stand-in for ``torch.cuda``: streams and graphs that note what is asked of them, and replay by calling nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


class Stream:
    """A stream that nothing runs on."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device

    def wait_stream(self, other: Stream) -> None:
        assert other is not self


class FakeCuda:
    """Replaces the parts of ``torch.cuda`` that record graphs; ``log`` has what happened, in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.captures: list[tuple[Stream, Any]] = []  # the stream and pool of each
        self.current = Stream()
        self.capturing: str | None = None
        fake = self

        class Graph:
            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                assert fake.capturing is None
                fake.capturing = capture_error_mode
                fake.captures.append((fake.current, pool))

            def capture_end(self) -> None:
                assert fake.capturing is not None
                fake.capturing = None

            def replay(self) -> None:
                fake.log.append("replay")

            def __del__(self) -> None:
                fake.log.append("destroy")

        for name, value in {
            "Stream": Stream,
            "CUDAGraph": Graph,
            "stream": self.stream,
            "current_stream": lambda device=None: self.current,
            "graph_pool_handle": object,
            "synchronize": lambda device=None: self.log.append("synchronize"),
            "empty_cache": lambda: self.log.append("empty_cache"),
        }.items():
            patch.setattr(torch.cuda, name, value)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before
