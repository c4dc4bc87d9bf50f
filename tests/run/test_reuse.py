"""Rows of earlier runs are taken over where a fresh run would give the same bytes, and nowhere else."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
import tracemalloc
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from run_helpers import JobMaker, Shell, finish, quiet, read_lines, rows_of, start, updating, without_timings

from batchgen.core.errors import LockedError, UsageError
from batchgen.output.earlier_rows import EarlierRows
from batchgen.output.journal import Journal
from batchgen.run.invocation import RunOptions
from batchgen.run.merge import merge
from batchgen.run.outcome import Outcome
from batchgen.run.status import read_status, render_status

Rows = list[dict[str, Any]]
CREATED = re.compile('"created": [0-9]+, ')  # when the run was begun


def computed(job: JobMaker) -> int:
    """How many rows the last run computed."""
    return sum(engine.num_started for engine in job.engines)


def second(job: JobMaker, rows: Rows, options: RunOptions | None = None, **sections: Any) -> Outcome:
    """Run the job over other rows in a folder of its own, with the rows of its first run reused."""
    job.write(rows)
    output = {"path": str(job.folder / "second"), "reuse": [str(job.output)], **sections.pop("output", {})}
    return job.run(job.spec(output=output, **sections), options)


def outputs_of(folder: Path) -> Rows:
    return without_timings(next(folder.glob("outputs.*")))


def assert_as_fresh(job: JobMaker, **sections: Any) -> None:
    """The second run's files are those of a run that reuses nothing, timings aside; its rows were just written."""
    assert outputs_of(job.folder / "second") == job.elsewhere("fresh", job.spec(**sections))
    files = [job.folder / name / "outputs.jsonl" for name in ("second", "fresh")]
    if files[0].exists():  # the order of keys too
        lines = [path.read_text().splitlines() for path in files]
        texts = [[CREATED.sub("", line.partition('"timings"')[0]) for line in found] for found in lines]
        assert texts[0] == texts[1]


def changed(rows: Rows, num: int, rng: random.Random) -> tuple[Rows, int, set[str]]:
    """The rows of the next night, shuffled, how many of them have other prompts, and which have a lower limit."""
    gone, edited, longer = num // 100, num // 200, num // 50
    kept = rng.sample(rows, num - gone)
    kept = [{**row, "answer": f"seen {i}"} for i, row in enumerate(kept)]  # a kept column, no part of the prompt
    for row in kept[:edited]:
        row["question"] += " Edited."
    for row in kept[edited : edited + longer]:
        row["sampling"] = {"max_tokens": 15}
    added = [{"id": f"new-{i}", "question": f"And {i}?", "answer": ""} for i in range(num // 50)]
    rows = [*kept, *added]
    rng.shuffle(rows)
    return rows, edited + len(added), {row["id"] for row in rows if "sampling" in row}


def length_of(row: dict[str, Any]) -> int:
    """The generated tokens of a row of outputs."""
    found = row["response"]["body"] if "response" in row else row
    return int(found["usage"]["completion_tokens"])


def test_three_thousand_rows(job: JobMaker) -> None:
    rows = rows_of(3_000)
    job.write(rows)
    job.run()
    lengths = {row["id"]: length_of(row) for row in outputs_of(job.output)}
    rows, num_changed, limited = changed(rows, 3_000, random.Random(6))
    num_changed += sum(lengths[name] > 15 for name in limited)
    outcome = second(job, rows)
    assert computed(job) == num_changed
    assert f"{len(rows):,} rows done, {len(rows) - num_changed:,} of them kept" in outcome.lines
    report = outcome.report
    assert report is not None
    new = [row for row in read_lines(job.folder / "second" / "outputs.jsonl") if not row["timings"].get("reused")]
    tokens = sum(row["usage"]["completion_tokens"] for row in new)
    assert report["tokens"]["completion"] - report["reused"]["completion"] == tokens
    assert report["tokens_per_s"]["completion"] == pytest.approx(tokens / report["wall_s"], rel=0.01)
    assert report["computed_tokens"] < report["tokens"]["total"] / 10
    assert "kept)" in render_status(read_status(job.folder / "second"))
    assert_as_fresh(job)


@pytest.mark.slow
def test_many_rows_are_found_in_little_memory(job: JobMaker) -> None:
    job.write(rows_of(1))
    job.run()
    (record,) = read_lines(job.output / "outputs.jsonl")
    names = [f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}{number:016x}" for number in range(250_000)]
    with (job.output / "outputs.jsonl").open("w") as file:
        for record["fingerprint"] in names:
            file.write(json.dumps(record) + "\n")
    tracemalloc.start()
    try:
        with closing(EarlierRows()) as rows:
            rows.add(job.output / "outputs.jsonl")
            rows.seal()
            for name in random.Random(8).sample(names, 2_500):
                assert [found["fingerprint"] for found in rows.find(name)] == [name]
        assert tracemalloc.get_traced_memory()[1] < 25 << 20
    finally:
        tracemalloc.stop()


MANIFEST_CHANGES = {
    "model": lambda found: found["fingerprints"]["model"].update({"model.safetensors": "0" * 64}),
    "adapter": lambda found: found["fingerprints"]["model"].update({"adapter": {"adapter_config.json": "0" * 64}}),
    "dtype": lambda found: found["fingerprints"]["numerics"].update({"dtype": "float32"}),
    "kernels": lambda found: found["fingerprints"]["numerics"].update({"kernels": "avx9"}),
    "results": lambda found: found["fingerprints"]["code"].update({"results": 0}),
    "record version": lambda found: found.update({"version": 1}),
}


@pytest.mark.parametrize("what", MANIFEST_CHANGES)
def test_a_run_that_computes_otherwise_gives_no_row_and_it_says_why(
    job: JobMaker, capfd: pytest.CaptureFixture[str], what: str
) -> None:
    job.write(rows_of(10))
    job.run()
    manifest = json.loads((job.output / "job.json").read_bytes())
    MANIFEST_CHANGES[what](manifest)
    (job.output / "job.json").write_text(json.dumps(manifest))
    second(job, rows_of(10), RunOptions())
    said = capfd.readouterr().err
    (line,) = [line for line in said.splitlines() if "can be kept" in line]
    assert what in line
    assert computed(job) == 10


def test_another_schema_reuses_nothing_and_the_run_says_so(job: JobMaker, capfd: pytest.CaptureFixture[str]) -> None:
    job.write(rows_of(10))
    job.run(job.spec(sampling={"structured_outputs": {"json_object": True}}))
    second(job, rows_of(10), RunOptions(), sampling={"structured_outputs": {"choice": ["a", "b"]}})
    assert computed(job) == 10
    assert "the job has changed: sampling.structured_outputs" in capfd.readouterr().err


def test_failed_and_bad_rows_are_not_reused(job: JobMaker) -> None:
    job.write([*rows_of(10), {"id": "bad"}])
    job.run(fails=frozenset({2, 5}))
    second(job, [*rows_of(10), {"id": "bad"}])
    assert computed(job) == 2
    assert len(outputs_of(job.folder / "second")) == 10


def test_rows_come_from_unfinished_runs_and_from_several(job: JobMaker) -> None:
    job.write(rows_of(60))
    job.run(options=quiet(max_total_tokens=300))
    num_done = read_status(job.output)["rows"]["done"]
    job.write(rows_of(60)[40:])
    job.elsewhere("other")
    both = {"reuse": [str(job.output), str(job.folder / "other"), str(job.folder / "second")]}
    second(job, rows_of(60), output=both)
    assert 0 < num_done <= 60 - computed(job) - 20 + num_done
    assert computed(job) <= 60 - max(num_done, 20)
    assert_as_fresh(job)
    job.elsewhere("third", job.spec(output={"reuse": [str(job.folder / "second")]}))  # rows that were reused already
    assert computed(job) == 0


def test_a_folder_that_is_no_run_or_in_use_is_refused_before_anything_is_written(job: JobMaker) -> None:
    job.write(rows_of(3))
    spec = job.spec(output={"path": str(job.folder / "second"), "reuse": [str(job.folder)]})
    with pytest.raises(UsageError, match=r"reuse.*no job\.json"):
        job.run(spec)
    assert not (job.folder / "second").exists()
    process = start(["run", job.toml()], step_s=600.0)
    while not (job.output / "journal").exists():
        time.sleep(0.02)
    with pytest.raises(LockedError, match="in use by"):  # the input stays as it is, or the process would end
        job.run(job.spec(output={"path": str(job.folder / "second"), "reuse": [str(job.output)]}))
    assert not (job.folder / "second").exists()
    process.kill()
    finish(process)


@pytest.mark.parametrize("spelling", ["same", "relative", "link", "one of two", "through another folder"])
def test_a_run_that_is_overwritten_cannot_be_reused_and_keeps_its_rows(
    job: JobMaker, spelling: str, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    job.write(rows_of(6))
    job.run()
    monkeypatch.chdir(job.folder)
    (job.folder / "link").symlink_to(job.output)
    (job.folder / "two").mkdir()
    spellings = {
        "same": ["out"],
        "relative": [f"../{job.folder.name}/out/"],
        "link": ["link"],
        "one of two": ["two", "out"],
        "through another folder": ["two/../out"],
    }
    reuse = [flag for folder in spellings[spelling] for flag in ("--reuse", folder)]
    before = (job.output / "outputs.jsonl").read_bytes()
    for command in ("run", "plan"):
        assert "would drop the rows of" in shell(command, job.toml(), "--overwrite", *reuse, code=2).err
    assert (job.output / "outputs.jsonl").read_bytes() == before


def test_merged_rows_are_reused(job: JobMaker) -> None:
    job.write(rows_of(10))
    merge(job.shards(), job.output)
    for part in (parts := [job.folder / "again1", job.folder / "again2"]):
        second(job, rows_of(10), quiet(shard=(int(part.name[-1]), 2)), output={"path": str(part)})
        assert computed(job) == 0
    merge(parts, job.folder / "second")
    assert_as_fresh(job)


@pytest.mark.parametrize("removed", ["journal", "journal/*/*.seg"])
def test_a_table_whose_journal_was_removed_gives_no_row(
    job: JobMaker, capfd: pytest.CaptureFixture[str], removed: str
) -> None:
    job.write(rows_of(5))
    job.run(job.spec(output={"format": "csv"}))
    for path in job.output.glob(removed):
        path.unlink() if path.is_file() else shutil.rmtree(path)
    second(job, rows_of(5), RunOptions())
    assert f"no row of {job.output} can be kept: its rows in {job.output}/journal are gone" in capfd.readouterr().err
    assert computed(job) == 5


def test_outputs_that_were_edited_give_no_row(job: JobMaker, capfd: pytest.CaptureFixture[str]) -> None:
    job.write(rows_of(5))
    job.run()
    with (job.output / "outputs.jsonl").open("a") as file:
        file.write("\n")
    second(job, rows_of(5), RunOptions())
    assert "outputs.jsonl can be kept: it was edited or removed" in capfd.readouterr().err
    assert computed(job) == 5
    assert_as_fresh(job)
    job.write(rows_of(8))
    job.run(options=updating(max_total_tokens=1))  # has begun to replace no file
    second(job, rows_of(6), RunOptions(update=True))
    assert "outputs.jsonl can be kept: it was edited or removed" in capfd.readouterr().err


def test_answers_to_continue_are_taken_over_up_to_a_number_of_tokens(job: JobMaker) -> None:
    job.write(rows_of(5))
    shorter, longer = (
        job.spec(output={"token_ids": True}, sampling={"max_tokens": limit, "ignore_eos": True}) for limit in (4, 8)
    )
    job.run(shorter)
    with pytest.MonkeyPatch.context() as patch:
        saved = list[int]()
        patch.setattr("batchgen.run.update._MAX_PARTIAL_TOKENS", 6)
        patch.setattr(Journal, "save_partials", lambda _, tokens: saved.append(len(tokens)))
        assert job.run(longer, updating()).exit_code == 0
    assert saved[0] == 2, "4 tokens are fewer than 6, 8 are not"


def test_a_run_between_two_jobs_is_refused(job: JobMaker) -> None:
    job.write(rows_of(5))
    job.run()
    job.write(rows_of(8))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("batchgen.run.job.write_report", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        job.run()
    with pytest.raises(UsageError, match="is between two jobs: run its job again first"):
        second(job, rows_of(8))
    job.run()
    second(job, rows_of(8))
    assert computed(job) == 0


def test_reuse_that_a_resume_names_is_taken_up(job: JobMaker) -> None:
    job.write(rows_of(60))
    job.run()
    path = {"path": str(job.folder / "second")}
    assert job.run(job.spec(output=path), quiet(max_total_tokens=100)).exit_code == 75
    second(job, rows_of(60))
    assert computed(job) == 0
    assert_as_fresh(job)
