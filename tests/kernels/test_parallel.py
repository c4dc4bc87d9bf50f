"""Work is shared out so that every item is done once, whoever does it, whoever is late, and launch after launch."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from run_helpers import ENVIRONMENT
from torch import Tensor

from batchgen.kernels.cpu import parallel
from batchgen.kernels.cpu.compiled import simd
from batchgen.kernels.cpu.compiled.entry import kernel
from batchgen.kernels.cpu.compiled.thread_pool import next_item, worker_number
from batchgen.kernels.cpu.kernel_specs import KernelSpec
from batchgen.kernels.cpu.layout import ARGS, NUM_ITEMS
from batchgen.kernels.cpu.parallel import CAPTURE, GrowingProgram, Kernel, Launched, Pool, scratch
from batchgen.kernels.cpu.recording import Program

pytestmark = pytest.mark.usefixtures("threads_as_before")


@simd.jit
def count(args: Any) -> None:
    """Counts, for each item and for each worker, how often it came."""
    worker = worker_number(args)
    done, workers = simd.pointer(args[ARGS], simd.F32), simd.pointer(args[ARGS + 1], simd.F32)
    workers[worker] += 1
    item = next_item(args, worker)
    while item < args[NUM_ITEMS]:
        done[item] += 1
        item = next_item(args, worker)


@kernel(row=simd.F32, before=simd.F32)
def add_up(item: int, row: Any, before: Any, rounds: int, size: int) -> None:
    """Item i of a row becomes i more than the sum of the row before, after some rounds of waiting."""
    for _ in range(rounds * (item % 3)):
        simd.pause()
    total = 0.0
    for i in range(size):
        total += before[i]
    row[item] = total % 97 + item


COUNT = Kernel(KernelSpec(__name__, "count", {"float32": ()}))
ADD_UP = Kernel(KernelSpec(__name__, "add_up", {"float32": ()}))


def until(is_so: Callable[[], bool]) -> None:
    """Wait for something that another thread does."""
    give_up_at = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < give_up_at, "it never came"


def use(patch: pytest.MonkeyPatch, pool: Pool, num_cpus: int = 4) -> None:
    """Let a pool of its own, on a machine of so many processors, do what is launched."""
    patch.setattr(parallel, "num_usable_cpus", lambda: num_cpus)
    patch.setattr("batchgen.kernels.cpu.recording.pool", lambda: pool)
    patch.setattr(parallel, "pool", lambda: pool)


@pytest.fixture
def fresh_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    yield lambda: use(monkeypatch, Pool())
    monkeypatch.undo()


@pytest.fixture
def started(fresh_pool: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the threads that a fresh pool starts, each of which ends at once."""
    numbers: list[int] = []
    monkeypatch.setattr(Pool, "_serve", lambda _, number: numbers.append(number))
    fresh_pool()
    return numbers


@settings(max_examples=60, deadline=None)
@given(items=st.integers(0, 40), num_threads=st.integers(1, 4), ranges=st.none() | st.integers(1, 7))
def test_every_item_is_done_once_and_workers_have_numbers_of_their_own(
    items: int, num_threads: int, ranges: int | None
) -> None:
    torch.set_num_threads(num_threads)
    done, workers = torch.zeros(41), torch.zeros(5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "num_usable_cpus", lambda: 4)
        COUNT.launch(torch.float32, items, done.data_ptr(), workers.data_ptr(), num_ranges=ranges)
    assert done[:items].eq(1).all()
    assert not done[items:].any()
    assert workers.max() <= 1
    assert not workers[min(items, num_threads) :].any(), "there is scratch memory for no more"
    assert bool(workers.any()) == (items > 0)


def launch_all(rows: Tensor, rounds: int, launches: list[Launched] | GrowingProgram) -> Tensor:
    """Add launches of ``add_up``, each from a row to the next; the rows."""
    CAPTURE.launches = launches
    try:
        for row, before in zip(rows[1:], rows, strict=False):
            ADD_UP.launch(torch.float32, len(row), row.data_ptr(), before.data_ptr(), rounds, len(row))
    finally:
        CAPTURE.launches = None
    return rows


def program_of(rows: Tensor, rounds: int) -> Program:
    launches: list[Launched] = []
    launch_all(rows, rounds, launches)
    return Program(launches)


def expected(rows: Tensor) -> Tensor:
    """What ``add_up`` makes of the first row."""
    found = [rows[0]]
    for _ in rows[1:]:
        found.append(found[-1].sum() % 97 + torch.arange(rows.shape[1]))
    return torch.stack(found)


@pytest.mark.parametrize(("num_threads", "rounds"), [(1, 0), (2, 0), (3, 40), (4, 0), (2, 3000)])
@pytest.mark.usefixtures("threads_as_before")
def test_a_launch_begins_when_those_before_are_done(
    num_threads: int, rounds: int, fresh_pool: Callable[[], None]
) -> None:
    """Also on more threads than there are processors, and where they wait so long that they go to sleep."""
    fresh_pool()
    torch.set_num_threads(num_threads)
    rows = torch.zeros(12, 7)
    program = program_of(rows, rounds)
    for i in range(10 if rounds > 1000 else 200):
        rows.zero_()[0] = i % 5
        wanted = expected(rows)
        program.run()
        assert torch.equal(rows, wanted)
        rows[1:].zero_()
        parallel.pool().run_growing(lambda launches: launch_all(rows, rounds, launches))
        assert torch.equal(rows, wanted)


@pytest.mark.parametrize("most_launches", [5, 11, 4096])
def test_launches_run_while_more_are_added_and_are_done_even_after_an_error(
    most_launches: int, fresh_pool: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "_MAX_LAUNCHES", most_launches)
    fresh_pool()
    torch.set_num_threads(2)
    rows, more = torch.ones(12, 7), torch.ones(3, 7)
    wanted, done = expected(rows), 1 + 11 // parallel._LAUNCHES_AT_ONCE * parallel._LAUNCHES_AT_ONCE

    def work(launches: GrowingProgram) -> Tensor:
        launch_all(rows, 0, launches)
        until(lambda: torch.equal(rows[:done], wanted[:done]))
        launch_all(more, 0, launches)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        parallel.pool().run_growing(work)
    assert torch.equal(rows, wanted)
    assert torch.equal(more, expected(more))


def test_launches_are_done_even_if_ctrl_c_comes_as_they_are_to_be_waited_for(
    fresh_pool: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they write is freed next; and who catches it may launch."""
    end = GrowingProgram.end

    def interrupted(_: GrowingProgram) -> None:
        monkeypatch.setattr(GrowingProgram, "end", end)
        raise KeyboardInterrupt

    monkeypatch.setattr(GrowingProgram, "end", interrupted)
    fresh_pool()
    torch.set_num_threads(2)
    rows, more = torch.ones(30, 7), torch.ones(5, 7)
    program = program_of(more, 0)
    try:
        parallel.pool().run_growing(lambda launches: launch_all(rows, 3000, launches))
    except KeyboardInterrupt:
        assert torch.equal(rows, expected(rows))
        program.run()
    assert torch.equal(more, expected(more))
    assert GrowingProgram.end is end


def test_no_launch_waits_for_absent_threads(fresh_pool: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy core holds them up: here until they are let in; then they work in whatever is launched."""
    torch.set_num_threads(2)
    serve, gate, came = Pool._serve, threading.Event(), torch.zeros(2)

    def late(self: Pool, number: int) -> None:
        gate.wait()
        serve(self, number)

    monkeypatch.setattr(Pool, "_serve", late)
    fresh_pool()
    rows, done = torch.ones(5, 7), torch.zeros(50)
    program = program_of(rows, 0)
    program.run()
    COUNT.launch(torch.float32, 50, done.data_ptr(), came.data_ptr())
    assert torch.equal(rows, expected(rows))
    assert done.eq(1).all()
    assert came.tolist() == [1, 0]
    gate.set()
    until(lambda: (COUNT.launch(torch.float32, 50, done.data_ptr(), came.data_ptr()), came[1])[1] > 0)
    assert done.eq(done[0]).all()


def test_launches_are_counted_as_they_end() -> None:
    done, came = torch.zeros(50), torch.zeros(64)
    COUNT.launch(torch.float32, 50, done.data_ptr(), came.data_ptr())
    before = parallel.num_launches()
    for _ in range(3):
        COUNT.launch(torch.float32, 50, done.data_ptr(), came.data_ptr())
    assert parallel.num_launches() == before + 3


def test_a_launch_needs_no_thread_that_cannot_be_started_and_the_next_one_tries_again(
    started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(4)
    done = torch.zeros(2, 64)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        COUNT.launch(torch.float32, 64, done[0].data_ptr(), done[1].data_ptr())
    assert done[0].eq(1).all()
    COUNT.launch(torch.float32, 64, done[0].data_ptr(), done[1].data_ptr())
    until(lambda: len(started) == 3)
    assert sorted(started) == [1, 2, 3]


def test_there_are_no_more_threads_than_processors(started: list[int]) -> None:
    torch.set_num_threads(64)
    done = torch.zeros(2, 64)
    for _ in range(2):
        COUNT.launch(torch.float32, 64, done[0].data_ptr(), done[1].data_ptr())
    until(lambda: len(started) == 3)
    assert sorted(started) == [1, 2, 3]


def test_ctrl_c_while_a_thread_starts_leaves_each_number_to_one_thread(
    started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers with one number would share scratch memory and a range."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if len(started) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    torch.set_num_threads(4)
    done = torch.zeros(2, 9)
    with pytest.raises(KeyboardInterrupt):
        COUNT.launch(torch.float32, 9, done[0].data_ptr(), done[1].data_ptr())
    COUNT.launch(torch.float32, 9, done[0].data_ptr(), done[1].data_ptr())
    until(lambda: len(started) == 3)
    assert sorted(started) == [1, 2, 3]
    assert done[0].eq(1).all()


def test_threads_whose_first_launches_meet_have_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are kept under a pool's key: under another's all of its threads would be worker 0."""
    meet, make = threading.Barrier(3, timeout=60), Pool.__init__

    def slow(self: Pool) -> None:
        make(self)
        meet.wait()

    monkeypatch.setattr(Pool, "__init__", slow)
    monkeypatch.setattr(parallel, "_POOL", {})
    with ThreadPoolExecutor(3) as executor:
        found = list(executor.map(lambda _: parallel.pool().numbering, range(3)))
    assert set(found) == {parallel.pool().numbering}


def test_a_copy_of_the_process_starts_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with a number and scratch memory of its own, for what was recorded before too, though a launch ran."""
    monkeypatch.setattr(parallel, "num_usable_cpus", lambda: 2)
    torch.set_num_threads(2)
    rows, done, came = torch.ones(5, 7), torch.zeros(9), torch.zeros(2)
    program, (began, may_end) = program_of(rows, 3), (threading.Event(), threading.Event())

    def until_copied(_: GrowingProgram) -> Tensor:
        began.set()
        may_end.wait()
        return rows

    running = threading.Thread(target=parallel.pool().run_growing, args=(until_copied,))
    running.start()
    began.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what forks beside threads is asked for here
        child = os.fork()
    if not child:
        try:
            signal.alarm(30)
            program.run()
            while not came[1]:
                COUNT.launch(torch.float32, 9, done.data_ptr(), came.data_ptr())
            os._exit(0 if done.eq(done[0]).all() and torch.equal(rows, expected(rows)) else 1)
        finally:
            os._exit(2)
    status = os.waitpid(child, 0)[1]
    may_end.set()
    running.join()
    assert status == 0
    program.run()
    assert torch.equal(rows, expected(rows))


def test_threads_that_launch_at_once_take_turns() -> None:
    torch.set_num_threads(2)
    rows = torch.ones(8, 6, 7)
    programs = [program_of(each, 10) for each in rows]
    with ThreadPoolExecutor(4) as executor:
        for _ in range(20):
            list(executor.map(Program.run, programs))
    assert all(torch.equal(each, expected(each)) for each in rows)


def test_threads_that_ask_at_once_are_given_the_same_scratch() -> None:
    sizes = range(1000, 1200)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: [parallel.scratch(size) for size in sizes], range(4)))
    assert all(each == found[0] for each in found)
    assert found[0] == [scratch(size) for size in sizes], "what was given out once stays there"


@pytest.mark.breadth
def test_no_launch_begins_in_another_thread_once_the_process_ends() -> None:
    """Daemon threads outlive the memory that kernels write to."""
    code = (
        "import atexit, sys, threading\n"
        "def last():\n"
        "    found = []\n"
        "    thread = threading.Thread(target=lambda: found.append(parallel.LAUNCHING.acquire(timeout=0.2)))\n"
        "    thread.start(); thread.join()\n"
        "    print(found[0], parallel.LAUNCHING.acquire(blocking=False))\n"
        "atexit.register(last)\n"
        "from batchgen.kernels.cpu import parallel\n"
        "sys.exit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("False True\n", 3), done.stderr


def test_a_key_of_a_thread_may_be_as_wide_as_macos_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ctypes.CDLL(None)

    class Library:
        """The C library, whose keys take eight bytes."""

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def __getitem__(self, name: str) -> Any:
            return real[name]

        def pthread_key_create(self, key: Any, _: None) -> None:
            ctypes.cast(key, ctypes.POINTER(ctypes.c_uint64))[0] = (1 << 32) + 5

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library())
    assert Pool().numbering[1] == (1 << 32) + 5
