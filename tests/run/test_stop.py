"""A request to stop reaches the work at whatever moment it comes, raises nowhere else, and cannot be sat out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from run_helpers import ENVIRONMENT, JobMaker, quiet, rows_of, until_delivered

from batchgen.core.units import parse_clock
from batchgen.output.lock import RunLock
from batchgen.output.rundir import RunDir
from batchgen.run import stop
from batchgen.run.progress import Progress
from batchgen.run.stop import Limits, Stopper, StopRequested, signals_afterwards

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def send(number: int) -> None:
    """A signal to this process, handled by the time it returns."""
    os.kill(os.getpid(), number)
    time.sleep(0.01)


@pytest.fixture
def stopper() -> Stopper:
    return Stopper(Limits())


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_outside_interruptible_work_only_sets_the_reason(stopper: Stopper, number: signal.Signals) -> None:
    with stopper.listening():
        send(number)
        assert stopper.reason == number.name
        with pytest.raises(StopRequested), stopper.interruptible():
            raise AssertionError("work began though a stop was asked for")


def test_a_signal_interrupts_interruptible_work_once(stopper: Stopper) -> None:
    with stopper.listening():
        with pytest.raises(StopRequested), stopper.interruptible():
            try:
                send(signal.SIGTERM)
            finally:
                send(signal.SIGTERM)  # while it is tidied up
        send(signal.SIGTERM)
    assert stopper.reason == "SIGTERM"


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_torch_is_imported_interrupts_once_it_is(stopper: Stopper, number: signal.Signals) -> None:
    """Raised in the middle, it would end the process by SIGABRT."""
    has_ended = False
    with stopper.listening(), pytest.raises(StopRequested), stopper.interruptible():
        with signals_afterwards():
            send(number)
            has_ended = True
        raise AssertionError("work went on though a stop was asked for")
    assert has_ended
    assert stopper.reason == number.name


def test_a_signal_while_work_drains_lets_it_drain(stopper: Stopper) -> None:
    stops: list[str] = []
    with stopper.listening(), stopper.interruptible(), stopper.drain_with(lambda: stops.append("stop")):
        send(signal.SIGTERM)
        assert stops == ["stop"]
    assert stopper.requested


@pytest.mark.parametrize("drains", [True, False])
def test_a_request_of_another_thread_reaches_the_main_thread(stopper: Stopper, drains: bool) -> None:
    stops: list[str] = []

    def work() -> None:
        thread = threading.Thread(target=stopper.request, args=("deadline",))
        thread.start()
        thread.join()
        time.sleep(0.01)

    with stopper.listening():
        if drains:
            with stopper.interruptible(), stopper.drain_with(lambda: stops.append("stop")):
                work()
            assert stops == ["stop"]
        else:
            with pytest.raises(StopRequested), stopper.interruptible():
                work()
    assert stopper.reason == "deadline"


def test_a_signal_starts_no_thread_and_leaves_none(stopper: Stopper) -> None:
    before = threading.active_count()
    with stopper.listening():
        listening = threading.active_count()
        send(signal.SIGTERM)
        assert threading.active_count() == listening
    assert threading.active_count() == before


def test_a_request_outside_the_main_thread_does_not_put_the_process_on_a_clock(stopper: Stopper) -> None:
    before = threading.active_count()

    def work() -> None:
        with stopper.listening(), stopper.interruptible(), stopper.drain_with(lambda: None):
            stopper.request("deadline")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert stopper.requested
    assert threading.active_count() == before


def test_handlers_and_wakeup_are_the_callers_again_afterwards(stopper: Stopper) -> None:
    handlers = [signal.getsignal(number) for number in SIGNALS]
    read, write = os.pipe()
    os.set_blocking(write, False)
    previous = signal.set_wakeup_fd(write)
    try:
        with stopper.listening():
            assert signal.getsignal(signal.SIGTERM) not in handlers
        assert signal.set_wakeup_fd(previous) == write
    finally:
        os.close(read)
        os.close(write)
    assert [signal.getsignal(number) for number in SIGNALS] == handlers


@pytest.mark.parametrize("moment", [(RunDir, "create"), (RunLock, "__init__"), (Progress, "__exit__")])
def test_a_signal_at_the_edges_of_a_run_is_no_crash_and_frees_the_lock(
    job: JobMaker, monkeypatch: pytest.MonkeyPatch, moment: tuple[Any, str]
) -> None:
    job.write(rows_of(5))
    where, name = moment
    real = getattr(where, name)

    def signalled(*args: Any) -> Any:
        send(signal.SIGTERM)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(where, name, signalled)
        outcome = job.run(options=quiet())
    assert outcome.exit_code == (0 if name == "__exit__" else 75)
    assert RunDir(job.output).holder() is None
    assert job.run().exit_code == 0
    assert len(job.outputs()) == 5


STUCK = """
import hashlib, sys
from batchgen.run import stop
stop.DRAIN_S = float(sys.argv[1])
with stop.Stopper(stop.Limits()).listening():
    print("in", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 2_000_000_000)  # C code that looks at no signal for minutes
"""


@pytest.mark.parametrize(("drain_s", "signals", "said"), [(0.1, 1, "with a step still under way"), (600, 2, "second")])
def test_code_that_looks_at_no_signal_cannot_hold_up_the_exit(drain_s: float, signals: int, said: str) -> None:
    command = [sys.executable, "-c", STUCK, str(drain_s)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=ENVIRONMENT, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "in\n"
        for _ in range(signals):
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            until_delivered(process, signal.SIGINT)
        try:
            _, stderr = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 75
    assert said in stderr


# ---------------------------------------------------------------- deadlines by the wall clock


NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


class WallClock(datetime):
    """A wall clock that starts at noon and can be set."""

    ahead = timedelta()
    began = 0.0

    @classmethod
    def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
        return NOON + cls.ahead + timedelta(seconds=time.monotonic() - cls.began)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> type[WallClock]:
    WallClock.ahead, WallClock.began = timedelta(), time.monotonic()
    monkeypatch.setattr(stop, "datetime", WallClock)
    return WallClock


@pytest.mark.usefixtures("clock")
def test_a_deadline_while_the_weights_load_stops_before_the_first_row(job: JobMaker) -> None:
    job.write(rows_of(5))
    outcome = job.run(options=quiet(deadline=NOON + timedelta(seconds=1)), on_load=lambda: time.sleep(60))
    assert outcome.exit_code == 75
    assert "deadline 12:00" in outcome.lines[0]
    assert job.run().exit_code == 0


def test_a_clock_set_forward_beyond_the_deadline_stops(clock: type[WallClock]) -> None:
    stopper = Stopper(Limits(deadline=NOON + timedelta(hours=1), max_runtime_s=3600))
    stopper.check_limits(0)
    assert not stopper.requested
    clock.ahead = timedelta(hours=2)
    stopper.check_limits(0)
    assert stopper.reason == "deadline 13:00"


def test_a_clock_set_back_moves_the_deadline_and_no_other_limit(clock: type[WallClock]) -> None:
    clock.ahead = timedelta(hours=-5)
    stopper = Stopper(Limits(deadline=NOON, max_runtime_s=0.01))
    time.sleep(0.02)
    stopper.check_limits(0)
    assert stopper.reason == "max runtime of 0.0 s"


def test_a_time_of_day_that_has_just_passed_is_tomorrows() -> None:
    now = datetime(2026, 3, 1, 5, 56).astimezone()
    assert parse_clock("05:55", now) == now + timedelta(hours=23, minutes=59)


def test_an_iso_deadline_is_taken_as_it_stands_even_if_it_has_passed() -> None:
    now = datetime(2026, 3, 1, 5, 56).astimezone()
    assert parse_clock("2026-03-01T05:55", now) == now - timedelta(minutes=1)
    assert parse_clock("2026-03-01T05:55+02:00", now) == datetime(2026, 3, 1, 3, 55, tzinfo=UTC)


@pytest.mark.parametrize("text", ["24:00", "0001-01-01T00:00", "9999-12-31T23:59-23:00", ""])
def test_a_deadline_that_is_no_instant_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a clock time"):
        parse_clock(text, datetime(2026, 3, 1, 5, 56).astimezone())
