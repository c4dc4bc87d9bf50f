"""``--deadline`` is what the wall clock shows, wherever a run is by then; all other times are measured."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest
from run_helpers import JobMaker, quiet, rows_of

from batchgen.core.units import parse_clock
from batchgen.run import stop
from batchgen.run.stop import Limits, Stopper

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
    outcome = job.run(options=quiet(deadline=NOON + timedelta(seconds=1)), load_s=60)
    assert outcome.exit_code == 75
    assert "deadline 12:00" in outcome.lines[0]
    assert job.run().exit_code == 0


@pytest.mark.usefixtures("clock")
def test_a_deadline_while_generating_keeps_what_is_finished(job: JobMaker) -> None:
    job.write(rows_of(400))
    outcome = job.run(options=quiet(deadline=NOON + timedelta(seconds=2)), step_s=0.05)
    assert outcome.exit_code == 75
    assert job.run().exit_code == 0
    resumed = job.outputs()
    job.output = job.folder / "whole"
    job.run()
    assert resumed == job.outputs()


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
