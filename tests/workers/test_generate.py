"""One call from Python is the command over the same rows: what comes out, what a resume finds, what a signal leaves."""

from __future__ import annotations

import io
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from run_helpers import ENVIRONMENT, MODEL, JobMaker, rows_of, text_model, timeless, without_timings, write_lines
from stub_engine import StubEngine, stub_factory

import batchgen
from batchgen.cli.main import call
from batchgen.core.errors import BatchgenError

ROWS = rows_of(40)
NAN = float("nan")


def generated(rows: Any, engines: list[StubEngine] | None = None, **keys: Any) -> batchgen.Run:
    given = {"model": text_model(), "prompt": "{question}", "sampling": {"max_tokens": 16}, **keys}
    stub = given.pop("stub", {})
    given["input"] = {"chat_template": "none", **given.get("input", {})}
    return batchgen.generate(rows, engine_factory=stub_factory(engines, **stub), **given)


def records(run: batchgen.Run) -> list[dict[str, Any]]:
    return [*map(timeless, run.rows)]


def expected(folder: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the command writes of the rows in a file."""
    job = JobMaker(folder)
    job.write(rows)
    job.run(job.spec(input={"prompt": "{question}", "id": None, "columns": ["*"]}))
    return job.outputs()


def as_dataframe(rows: list[dict[str, Any]]) -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(rows, index=range(5, 5 + len(rows)))


def as_dataset(rows: list[dict[str, Any]]) -> Any:
    from datasets import Dataset

    shuffled = Dataset.from_list(rows[::-1])
    return shuffled.select(range(len(rows))[::-1])


KINDS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "list": list,
    "iterator": iter,
    "DataFrame": as_dataframe,
    "Dataset": as_dataset,
    "stream": lambda rows: as_dataset(rows).to_iterable_dataset(),
    "table": pa.Table.from_pylist,
    "batch": pa.RecordBatch.from_pylist,
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_kind_get_what_the_command_writes(kind: str, tmp_path: Path) -> None:
    run = generated(KINDS[kind](ROWS))
    assert records(run) == expected(tmp_path, ROWS)
    assert run.report["rows"] == {"total": 40, "done": 40, "failed": 0}
    assert run.errors == []
    assert run.path is None


def test_the_tokens_of_a_model_are_those_of_the_command(tmp_path: Path) -> None:
    texts = [f"{row['question']} Write it in words." for row in ROWS[:8]]
    path = write_lines(tmp_path / "rows.jsonl", ({"prompt": text} for text in texts))
    flags = ["--max-tokens", "12", "--temperature", "0.7", "--token-ids", "--columns", "*", "--quiet"]
    command = ["run", "--model", MODEL, "--input", path, "--output", tmp_path / "run", *flags]
    assert call([*map(str, command)]) == 0
    sampling = {"max_tokens": 12, "temperature": 0.7}
    of_texts = batchgen.generate(texts, model=MODEL, sampling=sampling, output={"token_ids": True}, input={})
    assert records(of_texts) == without_timings(tmp_path / "run" / "outputs.jsonl")
    chats = [[{"role": "user", "content": text}] for text in texts]
    of_chats = batchgen.generate(chats, model={"path": MODEL, "device": "cpu"}, sampling=sampling)
    assert [row["text"] for row in of_chats.rows] == [row["text"] for row in of_texts.rows]


def test_a_path_is_the_input_of_a_job(tmp_path: Path) -> None:
    wanted = expected(tmp_path, ROWS)
    found = generated(tmp_path / "input.jsonl", input={"columns": ["*"], "limit": 9})
    assert records(found) == wanted[:9]


def test_a_column_of_texts_is_a_list_of_them() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"text": [row["question"] for row in ROWS], "other": 1})
    wanted = [row["text"] for row in generated([*table["text"]], prompt=None).rows]
    for column in (table["text"], table["text"].astype(object), as_dataset(table.to_dict("records"))["text"]):
        assert [row["text"] for row in generated(column, prompt=None).rows] == wanted
    with pytest.raises(batchgen.UsageError, match="several columns of one name"):
        generated(pandas.concat([table, table], axis=1), prompt=None)


@pytest.mark.parametrize(
    ("value", "written"),
    [(float("nan"), None), ("NaT", None), ("date", "2026-05-01"), ([1.5, float("inf")], [1.5, None])],
)
def test_values_that_json_lacks_are_kept_as_text(value: Any, written: Any) -> None:
    pandas = pytest.importorskip("pandas")
    made = {"NaT": pandas.NaT, "date": pandas.Timestamp("2026-05-01").date()}
    value = made.get(value, value) if isinstance(value, str) else value
    table = pandas.DataFrame({"question": ["a", "b"], "mixed": ["text", value]})
    assert [row["mixed"] for row in generated(table).rows] == ["text", written]


def test_tables_have_the_columns_of_the_parquet_output(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    run = generated(ROWS, output={"path": tmp_path / "run", "format": "parquet"})
    table = pq.read_table(tmp_path / "run" / "outputs.parquet")
    assert run.to_arrow().equals(table)
    assert run.to_pandas().equals(table.to_pandas().set_index("index"))


def test_failed_rows_are_told_of_and_listed() -> None:
    rows = [*ROWS[:3], {"question": None}, {"other": 1}]
    with pytest.warns(UserWarning, match="2 of 5 rows failed"):
        run = generated(rows)
    assert [(row["index"], row["code"]) for row in run.errors] == [(3, "empty_prompt"), (4, "missing_column")]
    assert {row["source"] for row in run.errors} == {"memory"}
    assert [row["index"] for row in run.rows] == [0, 1, 2]
    assert repr(run).startswith("<Run: 3 rows done, 2 failed; ")


def test_a_column_of_the_answers_stands_beside_the_rows_that_were_given() -> None:
    """A failed row leaves a hole there, and no answer moves into it."""
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(ROWS[:6])
    table.loc[2, "question"] = None
    with pytest.warns(UserWarning, match="1 of 6 rows failed"):
        run = generated(table, sampling={"max_tokens": 16, "temperature": 1.0, "n": 2})
    found = run.to_pandas()
    assert (found.index.name, found.index.to_list()) == ("index", [0, 1, 3, 4, 5])
    table["answer"] = found["text"]
    wanted = {row["index"]: row["text"] for row in run.rows}
    assert table["answer"].isna().to_list() == [False, False, True, False, False, False]
    assert table["answer"].dropna().to_dict() == wanted


def test_a_column_named_like_a_sampling_key_is_kept_as_it_is() -> None:
    """In columns that are part of a request, objects lose what is null in them."""
    columns: list[Any] = [{"first": 1, "second": None}, {"first": None, "second": "b"}]
    run = generated(pa.table({"question": ["a", "b"], "labels": columns, "stop": columns}))
    assert [row["labels"] for row in run.rows] == [row["stop"] for row in run.rows] == columns


@pytest.mark.parametrize(
    ("labels", "is_told"),
    [([3, 1, 0], True), ([1, 2, 5], True), ([0, 1, 7], False), ([10, 20, 30], False), (["a", "b", "c"], False)],
)
def test_an_index_with_the_numbers_of_other_rows_is_told_of(labels: list[Any], is_told: bool) -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(ROWS[:3], index=labels)
    run = generated(table)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = run.to_pandas()
    assert all("df.iloc" in str(item.message) for item in told)
    assert bool(told) == is_told
    assert table.iloc[found.index]["question"].to_list() == found["question"].to_list()


def test_what_a_notebook_shows_of_a_run_has_its_time_speed_and_accuracy() -> None:
    run = generated(ROWS[:4], eval={"expected": "answer"})
    assert re.fullmatch(r"<Run: 4 rows done, 0 failed; [\d.]+ s, [\d,]+ tokens/s out, exact match 0\.0%>", repr(run)), (
        repr(run)
    )


def test_an_output_folder_is_resumed_found_done_and_extended(tmp_path: Path) -> None:
    engines: list[StubEngine] = []
    out, wanted = tmp_path / "run", expected(tmp_path, ROWS)
    with pytest.raises(batchgen.RunStopped, match=r"stopped \(max total tokens of 300\): \d+ of 40 rows finished"):
        generated(ROWS, output=out, quiet=True, max_total_tokens=300)
    assert records(generated(ROWS, engines, output=out)) == wanted
    assert engines[-1].num_pulled < 40
    again = generated(ROWS, engines, output=str(out))
    assert (records(again), len(engines), again.path) == (wanted, 1, out)
    grown = generated([*ROWS, {"question": "More?"}], engines, output=out)
    assert (records(grown)[:40], len(grown.rows), engines[-1].num_pulled) == (wanted, 41, 1)
    for fewer in ([], ROWS[:5]):
        with pytest.raises(batchgen.UsageError, match="of 41 results would be left"):
            generated(fewer, output=out)


@pytest.mark.parametrize("stub", [{}, {"crashes_at": 2}])
def test_without_an_output_folder_nothing_stays(stub: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    try:
        assert len(generated(ROWS, stub=stub).rows) == 40
    except RuntimeError:
        assert stub
    with pytest.raises(batchgen.RunStopped, match="nothing is kept without an output folder"):
        generated(ROWS, quiet=True, max_total_tokens=300)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("rows", "keys", "said"),
    [
        ({"a": 1}, {}, "rows is of type dict, not a list"),
        (5, {}, "rows is of type int, not a list"),
        ([1], {}, r"rows\[0\] is of type int"),
        (["a", b"c"], {"prompt": None}, r"rows\[1\] is of type bytes"),
        (pa.chunked_array([["a"]]), {}, r"rows\[0\] is of type StringScalar"),
        (["a"], {}, "names column 'question'.*columns found: 'prompt'"),
        (ROWS, {"max_new_tokens": 3}, r"unknown argument 'max_new_tokens'.*sampling.max_tokens"),
        (ROWS, {"max_runtime": "soon"}, "max_runtime = 'soon': must be a duration"),
        (ROWS, {"overwrite": "no"}, "overwrite = 'no': must be True or False"),
        (ROWS, {"quiet": 1}, "quiet = 1: must be True or False"),
        (ROWS, {"deadline": 55}, "deadline = 55: must be a clock time"),
        (ROWS, {"shard": 3}, "shard = 3: must be"),
        (ROWS, {"max_error_rate": -1}, "max_error_rate = -1: must be a share"),
        (ROWS, {"max_total_tokens": 0}, "max_total_tokens = 0: must be a whole number"),
        ({"a": ["x"], "b": []}, {}, "a dict of columns of several lengths"),
        (ROWS, {"engin": {}}, "unknown argument 'engin'.*engine"),
        (ROWS, {"promt": "x"}, "unknown argument 'promt'.*prompt"),
        (ROWS, {"sampling": {"temprature": 1}}, "generate: sampling.temprature: unknown key.*temperature"),
        (ROWS, {"engine": 5}, r"engine = 5: must be a section"),
        (ROWS, {"input": {"path": "x"}}, "rows are given as the first argument"),
        (ROWS, {"input": {"format": "text"}}, "a format of files"),
        ("no.jsonl", {}, "no input file"),
        (["a"], {"model": "/nowhere", "prompt": None}, "/nowhere"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_in_one_line(rows: Any, keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(batchgen.UsageError, match=said) as caught:
        generated(rows, output=tmp_path / "run", **keys)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def deep() -> dict[str, Any]:
    row: dict[str, Any] = {"question": "a"}
    row["self"] = row
    return row


@pytest.mark.parametrize(("row", "said"), [(deep(), ""), ({"question": "a", "n": 10**5000}, "limit")])
def test_a_row_that_json_cannot_hold_is_an_error_row(row: dict[str, Any], said: str) -> None:
    with pytest.warns(UserWarning, match="1 of 3 rows failed"):
        run = generated([ROWS[0], row, ROWS[1]])
    [error] = run.errors
    assert (error["index"], error["code"]) == (1, "bad_json")
    assert error["row"].startswith("rows[1] cannot be written as JSON") and said in error["row"]
    assert [record["index"] for record in run.rows] == [0, 2]


def holes(kind: str) -> Any:
    pandas = pytest.importorskip("pandas")
    texts: list[Any] = ["a", None, "b", NAN]
    kinds = {
        "list": lambda: texts,
        "iterator": lambda: iter(texts),
        "Series": lambda: pandas.Series(texts),
        "string": lambda: pandas.Series(texts, dtype="string"),
        "dates": lambda: ["a", pandas.NaT, "b", pandas.NA],
        "DataFrame": lambda: pandas.DataFrame({"prompt": texts}),
        "table": lambda: pa.table({"prompt": ["a", None, "b", None]}),
    }
    return kinds[kind]()


@pytest.mark.parametrize("kind", ["list", "iterator", "Series", "string", "dates", "DataFrame", "table"])
@pytest.mark.parametrize("prompt", [None, "prompt", "Say {prompt}"])
def test_a_missing_text_is_an_error_row_however_the_texts_come(kind: str, prompt: str | None) -> None:
    with pytest.warns(UserWarning, match="2 of 4 rows failed"):
        run = generated(holes(kind), prompt=prompt)
    assert [(error["index"], error["code"]) for error in run.errors] == [(1, "empty_prompt"), (3, "empty_prompt")]
    assert [record["index"] for record in run.rows] == [0, 2]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ConnectionError("lost"), ValueError("x")])
def test_an_error_of_the_rows_themselves_is_raised_as_it_is(error: Exception, tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield ROWS[0]
        raise error

    with pytest.raises(type(error)) as caught:
        generated(rows(), output=tmp_path / "run")
    assert caught.value is error
    assert not (tmp_path / "run").exists() or not [*(tmp_path / "run").glob("*spool*")]


class Bare:
    """A stream as programs put in the place of stderr."""

    def write(self, text: str) -> int:
        raise RuntimeError("no writing")


@pytest.mark.parametrize("kind", ["closed", "bare", "none"])
def test_progress_that_cannot_be_shown_is_no_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", {"closed": closed, "bare": Bare(), "none": None}[kind])
    assert len(generated(ROWS).rows) == 40


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_is_ignored_stays_ignored(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        assert len(generated(ROWS, stub=raising(number)).rows) == 40
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_no_thread_to_be_had_is_one_line_that_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(BatchgenError, match=r"cannot start a thread: raise the limit on processes .*ulimit -u"):
        generated(ROWS)


def raising(*numbers: signal.Signals) -> dict[str, Any]:
    """A stub engine that gets signals in its third step."""
    return {"before_step": lambda step: [signal.raise_signal(number) for number in numbers if step == 3]}


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """The SIGTERMs that the test's own handler has taken; SIGINT, which a shell's background jobs ignore, is not."""
    came: list[int] = []
    handlers = {signal.SIGTERM: lambda number, frame: came.append(number), signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield came
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_keeps_what_is_done_and_leaves_the_process_as_it_was(
    times: int, handled: list[int], tmp_path: Path
) -> None:
    wanted, handlers = expected(tmp_path, ROWS), [*map(signal.getsignal, signal.Signals)]
    with pytest.raises(
        KeyboardInterrupt, match=r"stopped \(SIGINT\): \d+ of 40 rows finished, \d+ half done and saved"
    ):
        generated(ROWS, output=tmp_path / "run", stub=raising(*[signal.SIGINT] * times))
    assert [*map(signal.getsignal, signal.Signals)] == handlers
    assert signal.set_wakeup_fd(-1) == -1
    engines: list[StubEngine] = []
    assert records(generated(ROWS, engines, output=tmp_path / "run")) == wanted
    assert engines[0].num_pulled <= 40
    with pytest.raises(KeyboardInterrupt):
        generated(ROWS, stub=raising(signal.SIGINT))
    assert handled == []


def test_a_signal_has_its_usual_effect_after_the_run_is_saved(handled: list[int], tmp_path: Path) -> None:
    with pytest.raises(batchgen.RunStopped, match=r"stopped \(SIGTERM\)"):
        generated(ROWS, output=tmp_path / "run", stub=raising(signal.SIGTERM))
    assert handled == [signal.SIGTERM]
    assert (tmp_path / "run" / "journal").is_dir()


def test_it_runs_in_a_thread() -> None:
    found: list[batchgen.Run] = []
    thread = threading.Thread(target=lambda: found.append(generated(ROWS)))
    thread.start()
    thread.join()
    assert len(found[0].rows) == 40


def test_nothing_is_printed_where_no_person_watches(capfd: pytest.CaptureFixture[str]) -> None:
    generated(ROWS)
    assert capfd.readouterr() == ("", "")


def test_a_notebook_has_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shell = types.SimpleNamespace(config={"IPKernelApp": {}})
    ipython = types.SimpleNamespace(get_ipython=lambda: shell, version_info=(9,))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    generated(ROWS, stub={"step_s": 0.03})
    assert "40 rows into" in (said := capsys.readouterr().err)
    assert re.search(r"\d+/40 rows +\d+%\|.*tok/s computed", said), "it counts rows"


def test_the_public_names_are_there_and_cost_no_torch() -> None:
    assert [name for name in batchgen.__all__ if not hasattr(batchgen, name)] == []
    kinds, missing = [BatchgenError], []
    for kind in kinds:
        kinds += kind.__subclasses__()
        missing += [] if kind.__name__ in batchgen.__all__ or kind.__module__ != "batchgen.core.errors" else [kind]
    assert missing == []
    code = "import sys, batchgen; batchgen.generate, batchgen.RunStopped; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=ENVIRONMENT)


def test_a_full_temporary_folder_is_named_and_nothing_is_promised_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def full(fd: int) -> None:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("batchgen.core.storage.sync_file", full)
    with pytest.raises(BatchgenError, match=rf"nothing is kept there: free some space in {tmp_path}, or .* TMPDIR$"):
        generated(ROWS)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(BatchgenError, match=r"no temporary folder: .*; name one in TMPDIR"):
        generated(ROWS)
