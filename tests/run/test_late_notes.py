"""What an engine finds out while it runs is told to the user, and compiling what it needs is no part of its speed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from run_helpers import JobMaker, rows_of
from stub_engine import stub_factory

from batchgen.config.job import JobSpec
from batchgen.run.backend import Backend
from batchgen.run.invocation import RunOptions
from batchgen.run.job import run_job
from batchgen.run.loader import ModelInfo, load_engine, read_model
from batchgen.run.progress import Clock

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

    def factory(spec: JobSpec, model: ModelInfo) -> Backend:
        return replace(stub_factory()(spec, model), prepare=lambda: compiled_for.extend(charged[-1:]))

    monkeypatch.setattr(Clock, "on", on)
    job.write(rows_of(1))
    assert run_job(job.spec(), RunOptions(), engine_factory=factory).exit_code == 0
    assert compiled_for == ["load"]
