"""Jobs with constrained rows, stopped and resumed with a changed schema or library."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from run_helpers import JobMaker, quiet, rows_of

from batchgen.config.job import JobSpec
from batchgen.core.errors import ResumeMismatch
from batchgen.text.grammar import Grammars

SCHEMA = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}}


def spec_of(job: JobMaker, schema: Any, name: str = "schema.json") -> JobSpec:
    path = job.folder / name
    path.write_text(json.dumps(schema, indent=1), encoding="utf-8")
    return job.spec(sampling={"structured_outputs": str(path)})


def test_a_changed_schema_refuses_the_resume_and_shows_where_it_differs(job: JobMaker) -> None:
    job.write(rows_of(30))
    assert job.run(spec_of(job, SCHEMA), quiet(max_total_tokens=300)).exit_code == 75
    with pytest.raises(ResumeMismatch) as refusal:
        job.run(spec_of(job, {**SCHEMA, "required": ["p1"]}))
    [line] = [line for line in str(refusal.value).splitlines() if "sampling" in line]
    assert line == (
        '  sampling.structured_outputs: was …ype": "string"}}}}, now …ype": "string"}}, "required": ["p1"]}}'
    )
    turned = dict(reversed(SCHEMA["properties"].items()))  # type: ignore[attr-defined]
    with pytest.raises(ResumeMismatch, match=r'was …properties": {"p0": .*…, now …properties": {"p499": '):
        job.run(spec_of(job, {**SCHEMA, "properties": turned}))
    with pytest.raises(ResumeMismatch, match=r'structured_outputs: was {"json": .*…, now ""'):
        job.run(job.spec())


def test_the_same_schema_from_another_file_goes_on_and_is_done(job: JobMaker) -> None:
    job.write(rows_of(30))
    assert job.run(spec_of(job, SCHEMA), quiet(max_total_tokens=300)).exit_code == 75
    assert job.run(spec_of(job, SCHEMA, "moved.json")).exit_code == 0
    Path(job.folder / "moved.json").unlink()
    again = job.run(job.spec(sampling={"structured_outputs": {"json": SCHEMA}}))
    assert again.exit_code == 0 and again.lines[0].startswith("already done")


def test_a_stop_waits_for_one_grammar_only_and_no_row_is_lost(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """By row 70 a chunk has 64 rows; their grammars may take minutes to compile."""
    compiled: list[str] = []

    def noting(_: Grammars, text: str) -> None:
        compiled.append(text)
        if len(compiled) == 70:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Grammars, "check", noting)
    rows = [{**row, "sampling": {"structured_outputs": {"regex": f"{i}"}}} for i, row in enumerate(rows_of(200))]
    job.write(rows)
    assert job.run(look_ahead=150).exit_code == 75
    assert len(compiled) == 70
    assert job.run().exit_code == 0
    assert [row["index"] for row in job.outputs()] == [*range(200)]


def test_a_run_goes_on_with_the_version_of_the_library_that_it_was_begun_with(job: JobMaker) -> None:
    job.write(rows_of(30))
    spec = job.spec(sampling={"structured_outputs": {"choice": ["a", "b"]}})
    old, new = ({"dtype": "float32", "llguidance": version} for version in ("1.8.0", "1.9.1"))
    assert job.run(spec, quiet(max_total_tokens=1), numerics=old).exit_code == 75
    with pytest.raises(ResumeMismatch) as refusal:
        job.run(spec, numerics=new)
    assert "float32, llguidance 1.9.1 gives other tokens than float32, llguidance 1.8.0" in str(refusal.value)
    assert "continue with llguidance==1.8.0; --update" in str(refusal.value)
    assert job.run(spec, numerics=old).exit_code == 0
