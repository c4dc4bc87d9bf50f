"""Where the chat template prints the date, rows of another day are reused too: the date is that of the earlier run."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from input_helpers import write_tokenizer
from run_helpers import JobMaker, rows_of

from batchgen.config.job import JobSpec
from batchgen.run import job as job_module

DATED = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}:"


class Days:
    """Runs of one job on given days, each with the rows of those before reused."""

    def __init__(self, job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.job, self.monkeypatch = job, monkeypatch
        write_tokenizer(job.folder / "tokenizer", chat_template=DATED)

    def spec(self, day: int, *reuse: int) -> JobSpec:
        folders = [str(self.job.folder / f"day{other}") for other in reuse]
        self.job.output = self.job.folder / f"day{day}"
        output = {"path": str(self.job.output), "reuse": folders}
        return self.job.spec(model={"tokenizer": str(self.job.folder / "tokenizer")}, output=output)

    def run(self, day: int, *reuse: int, num_rows: int) -> int:
        """How many rows were computed."""

        class Clock(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:
                return datetime(2026, 5, day, 12, tzinfo=tz or UTC)

        self.monkeypatch.setattr(job_module, "datetime", Clock)
        self.job.write(rows_of(num_rows))
        assert self.job.run(self.spec(day, *reuse)).exit_code == 0
        assert self.manifest(day)["created_at"].startswith(f"2026-05-{day:02}")
        return sum(engine.num_started for engine in self.job.engines)

    def manifest(self, day: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.job.folder / f"day{day}" / "job.json").read_bytes())
        return found


@pytest.fixture
def days(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> Days:
    return Days(job, monkeypatch)


def test_rows_of_another_day_are_reused_and_new_ones_print_its_date(days: Days) -> None:
    assert days.run(1, num_rows=4) == 4
    assert days.run(2, 1, num_rows=6) == 2
    assert days.run(3, 2, num_rows=7) == 1
    assert [days.manifest(day)["rendered_at"][:10] for day in (1, 2, 3)] == ["2026-05-01"] * 3
    assert days.run(4, num_rows=7) == 7  # nothing is reused: today's date


def test_a_resume_prints_the_date_of_the_run_that_was_reused(days: Days) -> None:
    days.run(1, num_rows=2)
    days.run(2, 1, num_rows=4)
    before = days.job.outputs()
    days.monkeypatch.undo()
    Path(days.job.output / "outputs.jsonl").unlink()
    assert days.job.run(days.spec(2, 1)).exit_code == 0
    assert days.job.outputs() == before
    assert days.manifest(2)["rendered_at"].startswith("2026-05-01")
