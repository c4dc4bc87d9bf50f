"""How CUDA graphs are recorded and ended, on a stand-in for ``torch.cuda``: what GPUs do with them only GPUs show."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.engine.graphs import CaptureFailed, CudaRecorder, unowned

DEVICE = torch.device("cuda", 0)


class Stream:
    """A stream that nothing runs on."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device

    def wait_stream(self, other: Stream) -> None:
        assert other is not self


class FakeCuda:
    """Replaces the parts of ``torch.cuda`` that record graphs; ``log`` has what happened, in order.

    A replay calls nothing.
    """

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


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def ones(count: int = 3) -> Tensor:
    return torch.ones(count)


def test_all_recordings_share_a_stream_and_a_pool_and_nothing_waits_between_them(cuda: FakeCuda) -> None:
    recorder = CudaRecorder(DEVICE)
    modes: list[str | None] = []

    def work() -> Tensor:
        assert cuda.current is recorder.stream
        modes.append(cuda.capturing)
        return ones()

    _replays = [recorder.record(work) for _ in range(3)]
    assert modes == [None, "thread_local"] * 3, "each is run before it is captured"
    assert set(cuda.captures) == {(recorder.stream, recorder.pool)} and len(cuda.captures) == 3
    assert cuda.current is not recorder.stream
    assert not cuda.log


def test_recordings_end_together_and_after_the_device_is_done(cuda: FakeCuda) -> None:
    other, recorder = CudaRecorder(DEVICE), CudaRecorder(DEVICE)
    kept, _ = other.record(ones)[1], other.record(ones)
    replays = [recorder.record(ones)[1] for _ in range(3)]
    del recorder, replays[0], replays[0]
    replays[0]()
    assert cuda.log == ["replay"], "one is left, so all are"
    replays.clear()
    assert cuda.log == ["replay", "synchronize", *["destroy"] * 3], "those of another engine stay"
    kept()


def test_a_result_leaves_its_memory_to_the_next_recording(cuda: FakeCuda) -> None:
    made = weakref.WeakSet[Tensor]()

    def work() -> Tensor:
        made.add(result := ones())
        return result

    result, replay = CudaRecorder(DEVICE).record(work)
    assert not made
    assert replay() is result
    base = torch.arange(6.0).view(2, 3)
    alias = unowned(base)
    base[1, 2] = 9
    assert torch.equal(alias, base) and alias.data_ptr() == base.data_ptr()


def failing(cuda: FakeCuda, message: str, kind: type[Exception] = RuntimeError) -> Callable[[], Tensor]:
    def work() -> Tensor:
        if cuda.capturing:
            raise kind(message)
        return ones()

    return work


class TritonError(Exception):
    """Triton's own derive from no other, as this one."""


@pytest.mark.parametrize("kind", [TritonError, AssertionError, ImportError])
def test_any_error_of_a_capture_is_a_failure_to_record(cuda: FakeCuda, kind: type[Exception]) -> None:
    with pytest.raises(CaptureFailed, match=r"^out of resource: shared memory, Required: 262152$"):
        CudaRecorder(DEVICE).record(failing(cuda, "out of resource: shared memory, Required: 262152", kind))


def test_a_capture_that_fails_is_ended_and_told_by_its_first_line(cuda: FakeCuda) -> None:
    recorder = CudaRecorder(DEVICE)
    with pytest.raises(CaptureFailed, match=r"^operation not permitted$"):
        recorder.record(failing(cuda, "operation not permitted\nCompile with TORCH_USE_CUDA_DSA"))
    assert cuda.capturing is None and cuda.current is not recorder.stream
    _, replay = recorder.record(ones)
    replay()


def test_memory_that_runs_out_in_a_capture_is_no_failure_to_record(cuda: FakeCuda) -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        CudaRecorder(DEVICE).record(failing(cuda, "CUDA out of memory. Tried to allocate 2.00 GiB."))
