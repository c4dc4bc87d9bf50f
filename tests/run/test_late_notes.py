"""What an engine finds out while it runs is told to the user, and compiling what it needs is no part of its speed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from run_helpers import JobMaker, rows_of

from batchgen.run.invocation import RunOptions
from batchgen.run.loader import load_engine, read_model
from batchgen.run.progress import Clock

EARLY, LATE = "known once it is loaded", "steps could not be recorded, so they take longer"


def test_notes_of_a_running_engine_are_told_once_each(job: JobMaker, capsys: pytest.CaptureFixture[str]) -> None:
    notes = [EARLY]
    job.write(rows_of(3))
    job.run(options=RunOptions(), notes=notes, before_step=lambda _: notes.extend([LATE][len(notes) - 1 :]))
    said = capsys.readouterr().err
    assert (said.count(EARLY), said.count(LATE)) == (1, 1)
    assert said.index(EARLY) < said.index(LATE)


def test_the_notes_of_a_loaded_engine_are_those_of_its_runner(job: JobMaker) -> None:
    """The list itself, to which a capture that fails later adds."""
    backend = load_engine(job.spec(), read_model(job.spec()))
    assert backend.notes is backend.engine.runner.notes


def test_compiling_counts_as_loading(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[str] = []
    compiled_for: list[str] = []

    @contextmanager
    def on(_: Clock, account: str) -> Iterator[None]:
        charged.append(account)
        yield
        charged.pop()

    monkeypatch.setattr(Clock, "on", on)
    job.write(rows_of(1))
    job.run(prepare=lambda: compiled_for.extend(charged[-1:]))
    assert compiled_for == ["load"]
