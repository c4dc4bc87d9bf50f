"""A run as its user sees it: every row once, resumed to the byte, refused before anything is written."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_helpers import MODEL, JobMaker, journal_of, quiet, read_lines, rows_of
from stub_engine import StubEngine

from batchgen.config.job import InputSpec, JobSpec, ModelSpec, OutputSpec
from batchgen.config.record_fields import OF_REQUEST, RECORD_KEYS, columns_of, kept_columns
from batchgen.core.errors import BatchgenError, ModelError, ResumeMismatch, UsageError
from batchgen.core.records import Cursor, Result, Row
from batchgen.core.units import WHOLE
from batchgen.input.ids import RowValidator
from batchgen.input.rows import CHUNK_CHARS, CHUNK_ROWS, chunked
from batchgen.output.journal import Journal
from batchgen.run import invocation
from batchgen.run import job as job_module
from batchgen.run.invocation import RunOptions
from batchgen.run.job import run_job
from batchgen.run.loaded_engine import LoadedEngine
from batchgen.run.outcome import short
from batchgen.run.reports import read_report
from batchgen.run.results import ResultSink
from batchgen.run.status import read_status, render_status
from batchgen.run.stop import Limits, Stopper, Watchdog


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


# ---------------------------------------------------------------- what comes out


def test_every_row_comes_out_once_and_in_order_as_a_record_of_the_documented_shape(job: JobMaker) -> None:
    job.write(rows_of(50))
    assert job.run(job.spec(input={"columns": []})).exit_code == 0
    assert [(row["id"], row["index"]) for row in job.outputs()] == [(f"q-{i}", i) for i in range(50)]
    record = read_lines(job.output / "outputs.jsonl")[0]
    assert list(record) == ["id", "index", "fingerprint", "text", "finish_reason", "usage", "timings"]
    assert isinstance(record["text"], str)
    assert record["finish_reason"] in {"stop", "length"}
    assert record["usage"].keys() == {"prompt_tokens", "completion_tokens"}
    assert record["timings"].keys() >= {"queue_s", "prefill_s", "decode_s", "ttft_s", "tpot_s", "total_s"}


def test_a_finished_run_directory_holds_just_the_documented_files(job: JobMaker) -> None:
    job.write([*rows_of(3), "no json"])
    job.run()
    assert {path.name for path in job.output.iterdir()} == {"outputs.jsonl", "errors.jsonl", "report.json", "job.json"}


def test_kept_columns_are_copied_and_the_expected_one_with_them(job: JobMaker) -> None:
    job.write([{**row, "topic": {"deep": [i]}} for i, row in enumerate(rows_of(3))])
    job.run(job.spec(input={"columns": ["topic"]}, eval={"expected": "answer"}))
    assert [(row["topic"], row["answer"]) for row in job.outputs()] == [({"deep": [i]}, str(i * i)) for i in range(3)]


def test_all_columns_are_kept_and_a_line_says_which_are_renamed_since_their_names_are_taken(
    job: JobMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write([{"id": "a", "question": "Why?", "text": "mine", "usage": 3}])
    job.run(options=RunOptions())
    (record,) = job.outputs()
    assert (record["id"], record["question"]) == ("a", "Why?")
    assert (record["input_text"], record["input_usage"]) == ("mine", 3)
    renamed = "clash with record fields and are renamed: 'text' as input_text, 'usage' as input_usage\n"
    assert capsys.readouterr().err.count(renamed) == 1
    job.run(job.spec(input={"columns": ["question"]}), RunOptions(overwrite=True))
    assert "kept as" not in capsys.readouterr().err


def test_a_line_says_how_an_id_that_is_renamed_becomes_that_of_the_record(
    job: JobMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write([{"id": "a", "question": "Why?"}])
    job.run(job.spec(input={"id": None}), RunOptions())
    assert "'id' as input_id; --id id makes it the record's id\n" in capsys.readouterr().err
    assert job.outputs()[0]["input_id"] == "a"


KEPT = sorted({*RECORD_KEYS, *OF_REQUEST, "topic"} - {"id"})


@given(st.sets(st.sampled_from([f"{'input_' * depth}{name}" for name in KEPT for depth in (1, 2, 3)])))
def test_kept_columns_never_collide_and_have_their_own_names_again(names: set[str]) -> None:
    columns = {name: f"its {name}" for name in names} | {name: f"its {name}" for name in KEPT}
    spec = JobSpec(ModelSpec("m"), InputSpec(("in.jsonl",)), output=OutputSpec(format="openai-batch"))
    kept = kept_columns(spec, columns)
    assert len(set(kept.values())) == len(kept)
    assert not RECORD_KEYS & set(kept.values())
    record = {**dict.fromkeys(RECORD_KEYS), **{field: columns[name] for name, field in kept.items()}}
    assert columns_of(spec, record) == columns


def test_rows_without_an_id_column_are_known_by_their_position(job: JobMaker) -> None:
    job.write([{"question": "a"}, {"question": "b"}])
    job.run(job.spec(input={"id": None}))
    assert [row["id"] for row in job.outputs()] == [0, 1]


def test_token_ids_are_added_on_request(job: JobMaker) -> None:
    job.write(rows_of(3))
    job.run(job.spec(output={"token_ids": True}))
    assert all(len(row["token_ids"]) == row["usage"]["completion_tokens"] for row in job.outputs())


def test_a_model_without_a_tokenizer_takes_ids_and_gives_ids(job: JobMaker) -> None:
    job.write([{"id": i, "ids": [1, 2, 3 + i]} for i in range(3)])
    job.run(job.spec(model={"path": "dummy:LFM2-350M"}, input={"prompt": None, "prompt_token_ids": "ids"}))
    assert all("text" not in row and row["token_ids"] for row in job.outputs())


def test_an_empty_input_is_a_job_of_no_rows(job: JobMaker) -> None:
    job.write([])
    assert job.run().exit_code == 0
    assert job.outputs() == []


def test_an_expected_column_named_as_a_field_of_the_record_is_compared_all_the_same(job: JobMaker) -> None:
    job.write([row | {"text": "nothing that is generated"} for row in rows_of(4)])
    report = job.run(job.spec(eval={"expected": "text"})).report
    assert report is not None
    assert (report["accuracy"]["correct"], report["accuracy"]["total"]) == (0, 4)


# ---------------------------------------------------------------- bad rows


def test_bad_rows_become_dead_letters_and_disturb_nobody(job: JobMaker, tmp_path: Path) -> None:
    good = rows_of(6)
    job.write([good[0], "{", good[1], {"id": "x"}, good[2], {**good[3], "sampling": {"temperature": -1}}])
    outcome = job.run()
    assert outcome.exit_code == 3
    assert [row["id"] for row in job.outputs()] == ["q-0", "q-1", "q-2"]
    letters = [(letter["index"], letter["line"], letter["id"], letter["code"]) for letter in job.errors()]
    assert letters == [(1, 2, None, "bad_json"), (3, 4, "x", "missing_column"), (5, 6, "q-3", "bad_param")]
    assert job.errors()[1]["row"] == {"id": "x"}


def test_the_first_of_two_rows_with_an_id_stays_also_if_it_fails(job: JobMaker) -> None:
    job.write([{"id": name, "question": "Why?"} for name in ("a", "b", "a", 1, "1")] + [{"id": "c"}, {"id": "c"}])
    job.run()
    assert [row["index"] for row in job.outputs()] == [0, 1, 3, 4]
    found = [(letter["index"], letter["code"]) for letter in job.errors()]
    assert found == [(2, "duplicate_id"), (5, "missing_column"), (6, "duplicate_id")]
    assert "row 0" in job.errors()[0]["message"]


def test_an_error_of_the_engine_is_a_dead_letter_with_its_row(job: JobMaker) -> None:
    job.write(rows_of(5))
    assert job.run(fails=frozenset({2})).exit_code == 3
    (letter,) = job.errors()
    assert (letter["index"], letter["code"], letter["row"]["id"]) == (2, "internal", "q-2")


def test_too_many_errors_stop_the_run_early(job: JobMaker) -> None:
    job.write([*rows_of(100), *["{"] * 100, *rows_of(1000)[200:]])
    outcome = job.run(options=quiet(max_error_rate=0.05))
    assert outcome.exit_code == 3
    assert not (job.output / "outputs.jsonl").exists()
    assert job.engines[0].num_pulled < 500
    failed = [letter["index"] for letter in job.errors()]
    assert len(failed) > 5
    assert failed == list(range(100, 100 + len(failed)))
    assert job.run(options=quiet(max_error_rate=0.5)).exit_code == 3
    assert len(job.outputs()) == 900


def test_a_finished_job_counts_its_failed_rows_each_time(job: JobMaker) -> None:
    job.write([*rows_of(3), "{", "{"])
    job.run()
    assert job.run().failures[0].startswith("2 rows failed: see ")
    (job.output / "errors.jsonl").unlink()
    (job.output / "report.json").unlink()
    assert "errors.jsonl no longer lists them; correct them in the input and run again" in job.run().failures[0]


def test_paths_in_messages_keep_their_slash_at_the_root_where_services_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert short(Path("/runs/errors.jsonl")) == "/runs/errors.jsonl"


def test_a_stop_by_errors_and_status_say_the_same(job: JobMaker) -> None:
    job.write([*rows_of(6), *["{"] * 8])
    limited = quiet(max_error_rate=0.07)
    for _ in range(2):  # run again: stopped again, before the weights are loaded
        outcome = job.run(options=limited)
        assert "8 of 14 rows read have failed, more than --max-error-rate 7% of the first 100" in outcome.lines[0]
        assert "--max-error-rate to continue" in outcome.lines[1]
        said = render_status(read_status(job.output))
        assert "8 of 14 rows read have failed" in said
        assert "--max-error-rate to continue" in said
        assert "run again" not in said
    assert job.engines == []
    assert job.run(options=quiet(max_error_rate=0.08)).exit_code == 3
    assert (len(job.outputs()), len(job.errors())) == (6, 8)


@pytest.mark.parametrize(("num_good", "num_bad"), [(0, 6), (3, 1)])
def test_few_errors_are_no_rate_and_a_run_of_failed_rows_is_over(job: JobMaker, num_good: int, num_bad: int) -> None:
    job.write([*rows_of(num_good), *["{"] * num_bad])
    assert job.run(options=quiet(max_error_rate=0.05)).exit_code == 3
    assert len(job.outputs()) == num_good


def test_a_stop_by_errors_may_take_longer_than_one_by_a_signal(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    alarms: list[str] = []
    monkeypatch.setattr(Watchdog, "alarm", lambda watchdog: alarms.append("alarm"))
    job.write([*["{"] * 300, *rows_of(300)])
    assert job.run(options=quiet(max_error_rate=0.01)).exit_code == 3
    assert not (job.output / "outputs.jsonl").exists()
    assert alarms == []


def test_a_signal_is_told_as_one_though_too_many_rows_have_failed(job: JobMaker) -> None:
    job.write(rows_of(200))
    options = quiet(max_error_rate=0.0, max_total_tokens=300)
    assert job.run(options=options, fails=frozenset({199})).exit_code == 75
    stopper = Stopper(Limits())
    stopper.request("SIGTERM")
    stopper.give_up("too many", "advice")
    assert (stopper.reason, stopper.exit_code) == ("SIGTERM", 75)


def test_a_resumed_run_takes_no_higher_error_rate_for_rows_still_under_way(job: JobMaker) -> None:
    job.write([*rows_of(300), *["{"] * 20, *rows_of(400)[320:]])
    options = quiet(max_error_rate=0.1, max_total_tokens=5000)
    assert job.run(options=options, look_ahead=400).exit_code == 75
    assert len(job.errors()) == 0  # only a stop by errors writes them before the end
    assert job.run(options=quiet(max_error_rate=0.1)).exit_code == 3
    assert len(job.outputs()) == 380


# ---------------------------------------------------------------- nothing of others is touched


@pytest.mark.parametrize("key", ["path", "tokenizer"])
def test_the_models_own_folder_is_no_place_for_a_run(job: JobMaker, tmp_path: Path, key: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    before = sorted(path.name for path in folder.iterdir())
    job.write(rows_of(2))
    with pytest.raises(UsageError, match="the model's own folder"):
        job.run(job.spec(model={key: str(folder)}, output={"path": str(folder)}))
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_model_among_the_runs_own_files_is_not_removed(job: JobMaker) -> None:
    job.write(rows_of(2))
    job.run()
    folder = job.output / "journal"
    shutil.copytree(MODEL, folder)
    with pytest.raises(UsageError, match=r"the model in .* would be removed"):
        job.run(job.spec(model={"path": str(folder)}), quiet(overwrite=True))
    assert (folder / "model.safetensors").exists()


@pytest.mark.parametrize("content", [b'{"my": "config"}', b"[model]\npath = 'x'\n"])
def test_a_job_json_that_no_run_wrote_is_not_overwritten(job: JobMaker, content: bytes) -> None:
    job.write(rows_of(2))
    (made(job.output) / "job.json").write_bytes(content)
    with pytest.raises(UsageError, match="was not written by a run"):
        job.run(options=quiet(overwrite=True))
    assert (job.output / "job.json").read_bytes() == content


@pytest.mark.parametrize(("name", "is_refused"), [("run.lock", True), ("journal", True), ("input.spool", False)])
def test_a_file_of_another_program_is_left_alone(job: JobMaker, name: str, is_refused: bool) -> None:
    job.write(rows_of(2))
    (made(job.output) / name).write_text("precious")
    said = pytest.raises(UsageError, match=rf"{name}.* choose another output\.path") if is_refused else nullcontext()
    with said:
        job.run()
    assert (job.output / name).read_text() == "precious"


# ---------------------------------------------------------------- interrupted and resumed


def interrupted(job: JobMaker, spec: JobSpec, num_tokens: int) -> None:
    """Stop the job after so many tokens."""
    outcome = job.run(spec, quiet(max_total_tokens=num_tokens))
    assert outcome.exit_code == 75, outcome
    stats = job.engines[0].stats
    assert num_tokens <= stats.num_prefill_tokens + stats.num_output_tokens < 1.2 * num_tokens
    assert not (job.output / "outputs.jsonl").exists()


def test_finished_rows_are_not_run_again_and_half_done_ones_go_on(job: JobMaker, tmp_path: Path) -> None:
    job.write(rows_of(60))
    job.elsewhere("reference")
    num_tokens = job.engines[0].stats.num_output_tokens
    spec = job.spec()
    interrupted(job, spec, 400)
    first = job.engines[0].stats.num_output_tokens
    num_finished = len(job.engines[0].running)
    assert num_finished
    job.run(spec)
    assert first + job.engines[0].stats.num_output_tokens == num_tokens
    assert job.engines[0].num_pulled < 60


def test_a_kill_after_all_was_written_leaves_no_progress_file(job: JobMaker) -> None:
    job.write(rows_of(60))
    interrupted(job, job.spec(), 100)
    left_over = (job.output / "progress.json").read_bytes()
    job.run()
    (job.output / "progress.json").write_bytes(left_over)
    assert job.run().exit_code == 0
    assert not (job.output / "progress.json").exists()


def test_a_user_sees_what_a_first_run_on_a_machine_waits_for(job: JobMaker, capsys: pytest.CaptureFixture[str]) -> None:
    said = ""

    def prepare() -> None:
        nonlocal said
        end = time.monotonic() + 30
        while "compiling kernels" not in said and time.monotonic() < end:
            time.sleep(0.02)
            said += capsys.readouterr().err

    job.write(rows_of(2))
    job.run(options=RunOptions(progress="json"), prepare=prepare)
    shown = [json.loads(line).get("phase") for line in said.splitlines()]
    assert shown[-1] == "compiling kernels for this machine, once"


def test_finished_rows_are_written_while_others_are_long_in_coming(job: JobMaker) -> None:
    job.write(rows_of(20))
    seen: list[int] = []

    class Slow(StubEngine):
        def run(self, requests: Any) -> Iterator[Result]:
            results = super().run(requests)
            yield from (next(results) for _ in range(3))
            while not seen:
                seen.extend(index for index in range(Journal.read(journal_of(job.output)).counts.results))
            yield from results

    run_job(job.spec(), quiet(), engine_factory=lambda spec, model: LoadedEngine(Slow(), {}, 1))
    assert len(seen) == 3


def test_overwrite_runs_a_finished_job_anew(job: JobMaker) -> None:
    job.write(rows_of(3))
    job.run()
    job.write(rows_of(5))
    job.run(options=quiet(overwrite=True))
    assert len(job.outputs()) == 5
    assert read_report(job_module.RunDir(job.output))["sessions"] == 1


def test_an_engine_that_crashes_leaves_a_run_that_resumes(job: JobMaker, tmp_path: Path) -> None:
    job.write(rows_of(60))
    expected = job.elsewhere("reference")

    with pytest.raises(RuntimeError):
        job.run(crashes_at=40)
    job.run()
    assert job.engines[0].num_pulled < 60
    assert job.outputs() == expected


def test_a_run_works_outside_the_main_thread(job: JobMaker) -> None:
    job.write(rows_of(5))
    thread = threading.Thread(target=job.run)
    thread.start()
    thread.join()
    assert len(job.outputs()) == 5


# ---------------------------------------------------------------- refused before anything is written


def unusable() -> None:
    raise ModelError("model.safetensors is corrupt")


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("input", "path", ["nowhere.jsonl"]),
        ("model", "path", "./nowhere"),
        ("model", "tokenizer", "./nowhere"),
        ("engine", "max_model_len", 10**9),
    ],
)
def test_a_job_that_cannot_run_leaves_no_trace(job: JobMaker, section: str, key: str, value: Any) -> None:
    job.write(rows_of(3))
    output = job.folder / "new" / "deep" / "out"
    with pytest.raises(UsageError):
        job.run(job.spec(**{section: {key: value}, "output": {"path": str(output)}}))
    assert not (job.folder / "new").exists()


def test_unusable_weights_leave_no_trace_and_do_not_cost_the_run_that_was_to_be_overwritten(job: JobMaker) -> None:
    job.write(rows_of(3))
    with pytest.raises(ModelError):
        job.run(on_load=unusable)
    assert not job.output.exists()
    job.run()
    with pytest.raises(ModelError):
        job.run(options=quiet(overwrite=True), on_load=unusable)
    assert len(job.outputs()) == 3


def test_an_input_that_the_run_would_replace_is_refused(job: JobMaker) -> None:
    job.write(rows_of(3))
    job.run()
    spec = job.spec(input={"path": [str(job.output / "outputs.jsonl")]})
    with pytest.raises(UsageError, match="would be overwritten"):
        job.run(spec, quiet(overwrite=True))
    assert len(job.outputs()) == 3


# ---------------------------------------------------------------- accuracy, shards, chunks


def test_accuracy_counts_exact_matches(job: JobMaker, tmp_path: Path) -> None:
    job.write(rows_of(4))
    texts = [row["text"] for row in job.elsewhere("reference")]
    answers = ["wrong", *(f" {text}\n" for text in texts[1:])]
    job.write([{**row, "answer": answer} for row, answer in zip(rows_of(4), answers, strict=True)])
    outcome = job.run(job.spec(eval={"expected": "answer"}))
    assert outcome.report is not None
    wanted = {"correct": 3, "total": 4, "exact_match": 0.75}
    assert outcome.report["accuracy"] == outcome.report["accuracy"] | wanted
    assert any("75.00%" in line for line in outcome.lines)


def test_another_shard_does_not_go_into_the_same_directory(job: JobMaker) -> None:
    job.write(rows_of(4))
    job.run(options=quiet(shard=(1, 2)))
    with pytest.raises(ResumeMismatch, match="shard"):
        job.run(options=quiet(shard=(2, 2)))


@pytest.mark.parametrize(("slow_s", "sizes"), [(1e9, [1, 2, 4, 8, 5]), (0.0, [1] * 20)], ids=["quick", "slow"])
def test_few_rows_are_read_at_once_until_they_prove_quick(
    slow_s: float, sizes: list[int], job: JobMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    build = RowValidator.build

    def noting(self: RowValidator, rows: list[Any]) -> Any:
        seen.append(len(rows))
        return build(self, rows)

    monkeypatch.setattr("batchgen.input.rows.SLOW_CHUNK_S", slow_s)
    monkeypatch.setattr(RowValidator, "build", noting)
    job.write(rows_of(20))
    assert job.run().exit_code == 0
    assert [size for size in seen if size] == sizes


@given(st.lists(st.integers(0, CHUNK_CHARS), max_size=20))
def test_chunks_hold_all_rows_in_order_and_no_more_than_fits(sizes: list[int]) -> None:
    rows = [Row(i, "f", i, {"x": "y" * size}, Cursor(0, 0, 0, i + 1)) for i, size in enumerate(sizes)]
    chunks = list(chunked(rows))
    assert [row for chunk in chunks for row in chunk] == rows
    for chunk in chunks:
        assert sum(sizes[row.index] for row in chunk[:-1]) < CHUNK_CHARS


def test_a_chunk_of_short_rows_is_bounded_by_their_number() -> None:
    rows: Iterator[Row] = (Row(i, "f", i, {"x": 1}, Cursor(0, 0, 0, i + 1)) for i in range(3 * CHUNK_ROWS))
    assert [len(chunk) for chunk in chunked(rows)] == [CHUNK_ROWS] * 3


def test_rows_for_workers_claim_their_ids_by_the_chunk(tmp_path: Path) -> None:
    sizes: list[int] = []

    def claim(rows: list[Row]) -> list[Row]:
        sizes.append(len(rows))
        return rows

    sink = ResultSink(Journal.open(tmp_path / "journal"), None, None, nullcontext)  # type: ignore[arg-type]
    validator = SimpleNamespace(claim=claim, shard=WHOLE)
    stream = invocation.RequestStream(sink, validator, Stopper(Limits()), nullcontext)  # type: ignore[arg-type]
    stream.gives_rows = True
    rows = (Row(i, "f", i, {"x": 1}, Cursor(0, 0, 0, i + 1)) for i in range(20_000))
    assert [task.key for task in stream.tasks(rows)] == list(range(20_000))
    assert max(sizes) == CHUNK_ROWS


def test_the_engine_is_fed_lazily(job: JobMaker) -> None:
    job.write(rows_of(5000))
    job.run(options=quiet(max_total_tokens=50))
    assert job.engines[0].num_pulled < 100


def test_a_result_for_a_row_nobody_asked_for_is_a_crash_not_a_row(job: JobMaker) -> None:
    job.write(rows_of(3))

    class Confused(StubEngine):
        def step(self) -> list[Result]:
            return [dataclasses.replace(result, key=99) for result in super().step()]

    with pytest.raises((KeyError, BatchgenError)):
        run_job(job.spec(), quiet(), engine_factory=lambda spec, model: LoadedEngine(Confused(), {}, 1))
    assert not (job.output / "outputs.jsonl").exists()


def test_a_run_needs_no_working_directory(job: JobMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job.write(rows_of(3))
    gone = made(tmp_path / "gone")
    monkeypatch.chdir(gone)
    gone.rmdir()
    outcome = job.run()
    assert outcome.exit_code == 0
    assert str(job.output) in outcome.lines[-1]
