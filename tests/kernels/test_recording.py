"""Recorded launches do again what they did, on what their memory then holds."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from batchgen.kernels.cpu.backend import CpuKernels
from batchgen.kernels.cpu.parallel import empty
from batchgen.kernels.cpu.recording import Memory, Recorder

KERNELS = CpuKernels()
WEIGHT = torch.linspace(0.5, 1.5, 48)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def work_on(x: Tensor, rows: Tensor) -> Callable[[], Tensor]:
    """A chain of kernels in which results are dropped as soon as the next is there."""

    def work() -> Tensor:
        h = KERNELS.rms_norm(x, WEIGHT, 1e-5)
        for _ in range(4):
            h = KERNELS.rms_norm(h, WEIGHT, 1e-5)
        return KERNELS.take_rows(h, rows)

    return work


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.usefixtures("threads_as_before")
def test_a_replay_gives_what_running_anew_would(recorder: Recorder, threads: int) -> None:
    torch.set_num_threads(threads)
    x, rows = torch.randn(50, 48), torch.tensor([3, 0, 49, 3])
    work = work_on(x, rows)
    first, replay = recorder.record(work)
    assert torch.equal(first, work())
    for _ in range(5):
        x.copy_(torch.randn(50, 48))
        rows.copy_(torch.randint(50, (4,)))
        assert torch.equal(replay(), work())


def test_what_runs_once_gives_the_same_and_leaves_no_memory(recorder: Recorder) -> None:
    for num_rows in (7, 640, 3):
        work = work_on(torch.randn(num_rows, 48), torch.arange(num_rows))
        assert torch.equal(recorder.run(work), work())
    assert not recorder._memory._buffers
    assert not recorder.run(work_on(torch.randn(5, 48), torch.arange(0))).numel()


def test_recordings_share_memory_and_do_not_disturb_each_other(recorder: Recorder) -> None:
    cases = []
    for num_rows in (7, 64, 3):
        x, rows = torch.randn(num_rows, 48), torch.arange(num_rows)
        cases.append((work_on(x, rows), recorder.record(work_on(x, rows))[1]))
    for work, replay in cases * 2:
        assert torch.equal(replay(), work())
    assert len(recorder._memory._buffers) <= 2, "a result and what it is made of, for all recordings together"


def test_launches_of_other_threads_are_run_and_not_recorded(recorder: Recorder) -> None:
    x, rows = torch.randn(20, 48), torch.arange(20)
    found = []

    def work() -> Tensor:
        other = threading.Thread(target=lambda: found.append(work_on(x, rows)()))
        other.start()
        other.join()
        return work_on(x, rows)()

    result, _ = recorder.record(work)
    assert torch.equal(found[0], result)


def test_after_an_error_in_the_work_kernels_run_at_once_again(recorder: Recorder) -> None:
    def work() -> Tensor:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        recorder.record(work)
    assert torch.equal(KERNELS.take_rows(WEIGHT[None], torch.tensor([0])), WEIGHT[None])


def test_a_buffer_is_given_on_only_when_its_tensor_is_dropped() -> None:
    memory = Memory()
    a = memory.empty((4, 8), torch.float32)
    b = memory.empty((100_000,), torch.bfloat16)
    assert a.data_ptr() != b.data_ptr()
    at = a.data_ptr()
    assert memory.empty((2, 2), torch.float32).data_ptr() not in (at, b.data_ptr())
    del a
    assert memory.empty((2, 2), torch.int64).data_ptr() == at
    del b
    assert memory.empty((3, 1), torch.float32).data_ptr() == at, "the smallest that is large enough"


def test_without_a_recording_results_have_memory_of_their_own() -> None:
    results = [empty((5, 3), torch.float32) for _ in range(3)]
    assert len({r.data_ptr() for r in results}) == 3
    assert results[0].shape == (5, 3)
