"""What an engine finds out while it runs is told to the user, as what it knows once it is loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest
from run_helpers import JobMaker, rows_of
from stub_engine import stub_factory

from batchgen.config.job import JobSpec
from batchgen.run.backend import Backend
from batchgen.run.invocation import RunOptions
from batchgen.run.job import run_job
from batchgen.run.loader import ModelInfo

EARLY, LATE = "known once it is loaded", "steps could not be recorded, so they take longer"


def test_notes_of_a_running_engine_are_told_once_each(job: JobMaker, capsys: pytest.CaptureFixture[str]) -> None:
    notes = [EARLY]

    def factory(spec: JobSpec, model: ModelInfo) -> Backend:
        return replace(
            stub_factory(before_step=lambda _: notes.extend([LATE][len(notes) - 1 :]))(spec, model), notes=notes
        )

    job.write(rows_of(3))
    assert run_job(job.spec(), RunOptions(), engine_factory=factory).exit_code == 0
    said = capsys.readouterr().err
    assert (said.count(EARLY), said.count(LATE)) == (1, 1)
    assert said.index(EARLY) < said.index(LATE)
