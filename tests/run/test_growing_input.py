"""An input that only grew is gone on with, stopped or finished: its run ends as one over the whole input would."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from input_helpers import zstd
from run_helpers import JobMaker, finish, quiet, rows_of, start
from stub_engine import stub_factory

from batchgen.config.job import JobSpec
from batchgen.core.errors import ExitCode, ResumeMismatch, UsageError
from batchgen.core.shard import Shard
from batchgen.output.rundir import RunDir
from batchgen.run.invocation import Outcome, RunOptions
from batchgen.run.merge import merge
from batchgen.run.retry import retry_job
from batchgen.run.status import read_status

ROWS = rows_of(60)
LINES = [json.dumps(row).encode() + b"\n" for row in ROWS]
STOP = 150  # tokens, after which a night ends early


@pytest.fixture
def whole(tmp_path: Path) -> JobMaker:
    """A job of its own folder, for one run over the whole input."""
    folder = tmp_path / "whole"
    folder.mkdir()
    return JobMaker(folder)


def assert_equal(job: JobMaker, whole: JobMaker) -> None:
    """Both runs are finished and their files equal, times and paths aside."""
    assert not (job.output / "journal").exists()
    assert job.outputs() == whole.outputs()
    texts = [str(made.errors()).replace(str(made.folder), "") for made in (job, whole)]
    assert texts[0] == texts[1]
    manifests = [json.loads((made.output / "job.json").read_bytes()) for made in (job, whole)]
    assert manifests[0]["num_rows"] == manifests[1]["num_rows"] is not None
    assert manifests[0]["fingerprints"] == manifests[1]["fingerprints"]
    reports = [json.loads((made.output / "report.json").read_bytes()) for made in (job, whole)]
    for key in ("errors", "tokens", "finish_reasons"):
        assert reports[0][key] == reports[1][key]
    assert {"new": None, **reports[0]["rows"]} == {**reports[1]["rows"], "new": reports[0]["rows"].get("new")}


def computed(job: JobMaker) -> int:
    """The number of rows that the last run computed."""
    return sum(engine.num_started for engine in job.engines)


def test_nights_of_a_growing_file_with_stops_and_without_news_end_as_one_run(job: JobMaker, whole: JobMaker) -> None:
    codes = []
    for num_rows, limits in [(20, {}), (20, {}), (35, {"max_total_tokens": STOP}), (35, {}), (45, {})]:
        job.input.write_bytes(b"".join(LINES[:num_rows]))
        codes.append(job.run(options=quiet(**limits)).exit_code)
    job.input.write_bytes(b"".join(LINES[:50]))
    codes.append(job.run(options=quiet(max_total_tokens=20)).exit_code)
    job.input.write_bytes(b"".join(LINES))  # it grew again before the night before was finished
    codes.append(job.run().exit_code)
    assert codes == [0, 0, 75, 0, 0, 75, 0]
    whole.input.write_bytes(b"".join(LINES))
    whole.run()
    assert_equal(job, whole)


def kill(job: JobMaker, path: Path) -> None:
    """A night that ends by SIGKILL once it has journalled something, if there is something to journal."""
    process = start(["run", path], step_s=0.05)

    def size() -> int:
        return sum(file.stat().st_size for file in job.output.glob("journal/*.seg"))

    before = size()
    while process.poll() is None and size() == before:
        time.sleep(0.01)
    process.kill()
    finish(process)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "num_files"), [("jsonl", 5), ("csv", 1), ("jsonl.gz", 1), ("csv.gz", 5)])
def test_thirty_nights_of_growth_stops_and_kills_end_as_one_run(
    job: JobMaker, whole: JobMaker, form: str, num_files: int
) -> None:
    rng = random.Random(f"{form} {num_files}")
    lines = [*LINES, LINES[7], b"{\n", b"\n"]
    if form.startswith("csv"):
        lines = [b'q-%d,"What is\n%d, ""twice""?"\n' % (i, i) for i in range(60)] + [b"q-7,x\n", b"q-99\n", b"\r\n"]
    rng.shuffle(lines)
    content = b"".join(lines)
    cuts = sorted(rng.choices(range(1, len(content)), k=21))
    cuts += [content.index(b"\n", cut) + rng.randrange(2) for cut in cuts[::4]]
    news = [content[at:end] for at, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(content)], strict=True)]
    files = [job.folder / f"part-{number}.{form}" for number in range(num_files)]
    path = {"path": [str(job.folder / f"part-*.{form}")]}
    for night in range(30):
        if night % 10 not in (4, 7) and news:
            file = files[night * num_files // 30]
            new = news.pop(0)
            if not file.exists() and form.startswith("csv"):
                new = b"id,question\n" + new
            with file.open("ab") as stream:
                stream.write(gzip.compress(new) if form.endswith("gz") else new)
        if night % 3 == 1:
            kill(job, job.toml(input=path))
        else:
            limits = {"max_total_tokens": rng.randrange(1, 90)} if night % 3 == 2 else {}
            code = job.run(job.spec(input=path), quiet(**limits)).exit_code
            assert code in {*(ExitCode.OK, ExitCode.ROWS_FAILED), *([ExitCode.STOPPED] if limits else [])}
    job.run(job.spec(input=path))
    for file in files:
        shutil.copy(file, whole.folder)
    whole.run(whole.spec(input={"path": [str(whole.folder / f"part-*.{form}")]}))
    assert_equal(job, whole)
    rows = [*job.outputs(), *job.errors()]
    assert sorted(row["index"] for row in rows) == [*range(len(rows))]
    before = (job.output / "outputs.jsonl").read_bytes()
    old = rng.choice(files)
    damaged = bytearray(old.read_bytes())
    damaged[rng.randrange(len(damaged))] ^= 1
    old.write_bytes(damaged)
    with pytest.raises(ResumeMismatch, match=old.name):
        job.run(job.spec(input=path))
    assert (job.output / "outputs.jsonl").read_bytes() == before


MEMBERS: dict[str, Callable[[bytes], bytes]] = {"plain": bytes, "gzip": gzip.compress, "zstd": zstd}
stored = pytest.mark.parametrize("member", MEMBERS)


@stored
def test_a_night_computes_only_what_is_new_and_says_how_much(job: JobMaker, member: str) -> None:
    parts = [MEMBERS[member](b"".join(lines)) for lines in (LINES[:50], LINES[50:])]
    job.input.write_bytes(parts[0])
    job.run()
    job.input.write_bytes(b"".join(parts))
    outcome = job.run()
    assert computed(job) == 10
    assert outcome.lines[0] == "10 new rows; in all:"
    assert outcome.lines[1].startswith("60 rows done")
    assert outcome.report is not None
    assert outcome.report["rows"] == {"total": 60, "done": 60, "failed": 0, "new": 10}
    assert job.run().lines[0].startswith("already done")
    assert computed(job) == 0


def test_a_run_stopped_before_the_file_grew_goes_on_where_it_was(job: JobMaker, whole: JobMaker) -> None:
    job.input.write_bytes(b"".join(LINES[:40]))
    assert job.run(options=quiet(max_total_tokens=400)).exit_code == ExitCode.STOPPED
    num_done = read_status(job.output)["rows"]["done"]
    job.input.write_bytes(b"".join(LINES))
    job.run()
    assert 0 < num_done == 60 - computed(job)
    whole.input.write_bytes(b"".join(LINES))
    whole.run()
    assert_equal(job, whole)


CUTS = {
    "in mid-row": lambda content: content[: len(content) // 2],
    "before a newline": lambda content: content[: content.index(b"\n", len(content) // 2)],
    "behind a newline": lambda content: content[: content.index(b"\n", len(content) // 2) + 1],
}


@pytest.mark.parametrize("limits", [{}, {"max_total_tokens": 500}], ids=["finished", "stopped"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("form", ["jsonl", "text", "csv", "gzip", "members"])
def test_wherever_a_file_was_cut_its_run_ends_as_over_the_whole(
    job: JobMaker, whole: JobMaker, form: str, cut: str, limits: dict[str, Any]
) -> None:
    rows = [b"" if i % 9 == 4 else b"{" + b"\n" if i % 9 == 5 else line for i, line in enumerate(LINES)]
    texts = {
        "text": b"".join(b"%d lines\r\n" % i * (i + 1) for i in range(12)),
        "csv": b"id,question\n"
        + b"".join(b'%d,"a ""row"" of\n%d lines,\n"\n' % (i, i) for i in range(28))
        + b"28\n29,x\n",
    }
    content = texts.get(form, b"".join(rows))
    first = CUTS[cut](content)
    begun, grown = {
        "gzip": lambda: (
            gzip.compress(content, mtime=0)[: len(gzip.compress(content)) // 2],
            gzip.compress(content, mtime=0),
        ),
        "members": lambda: (
            gzip.compress(first, mtime=0),
            gzip.compress(first, mtime=0) + gzip.compress(content[len(first) :]),
        ),
    }.get(form, lambda: (first, content))()
    assert grown.startswith(begun)

    def spec(made: JobMaker) -> JobSpec:
        path = str(made.folder / f"input.{({'text': 'txt', 'csv': 'csv'}).get(form, 'jsonl')}")
        prompt = {"id": None, "prompt": "text"} if form == "text" else {}
        return made.spec(input={"path": [path], **prompt})

    for made, contents in ((job, (begun, grown)), (whole, (grown,))):
        for number, each in enumerate(contents):
            Path(spec(made).input.path[0]).write_bytes(each)
            made.run(spec(made), quiet(**limits if number + 1 < len(contents) else {}))
    assert_equal(job, whole)


def test_a_half_written_row_that_failed_is_run_once_it_is_whole(job: JobMaker) -> None:
    job.input.write_bytes(b"".join(LINES[:10])[:-20])
    assert job.run().exit_code == ExitCode.ROWS_FAILED
    assert [letter["code"] for letter in job.errors()] == ["bad_json"]
    job.input.write_bytes(b"".join(LINES[:12]))
    assert job.run().exit_code == ExitCode.OK
    assert [record["index"] for record in job.outputs()] == [*range(12)]
    assert not job.errors()


def test_failed_rows_of_earlier_nights_stay_and_can_be_retried(job: JobMaker) -> None:
    job.input.write_bytes(b"".join([LINES[0], b"{\n", *LINES[2:10]]))
    job.run()
    job.input.write_bytes(b"".join([LINES[0], b"{\n", *LINES[2:10], b"[]\n", *LINES[11:15]]))
    assert job.run().exit_code == ExitCode.ROWS_FAILED
    assert [letter["index"] for letter in job.errors()] == [1, 10]
    letters = [{**letter, "row": ROWS[letter["index"]]} for letter in job.errors()]
    (job.output / "errors.jsonl").write_text("".join(json.dumps(letter) + "\n" for letter in letters))
    assert retried(job).exit_code == ExitCode.OK
    assert [record["index"] for record in job.outputs()] == [*range(15)]
    job.input.write_bytes(b"".join([LINES[0], b"{\n", *LINES[2:10], b"[]\n", *LINES[11:20]]))
    assert job.run().exit_code == ExitCode.OK
    assert [record["index"] for record in job.outputs()] == [*range(20)]


def retried(job: JobMaker, **limits: Any) -> Outcome:
    return retry_job(job.output, quiet(**limits), {}, engine_factory=stub_factory(job.engines))


def test_failed_rows_of_earlier_nights_stay_where_a_night_gives_up(job: JobMaker) -> None:
    job.input.write_bytes(b"{\n" + b"".join(LINES[1:10]))
    job.run()
    job.input.write_bytes(b"{\n" + b"".join(LINES[1:10]) + b"{\n" * 20)
    options = RunOptions(max_error_rate=0.05, progress="quiet")
    assert job.run(options=options).exit_code == ExitCode.ROWS_FAILED
    assert [letter["index"] for letter in job.errors()][:2] == [0, 10]


def test_ids_are_unique_across_nights(job: JobMaker) -> None:
    job.input.write_bytes(b"".join(LINES[:10]))
    job.run()
    job.input.write_bytes(b"".join([*LINES[:10], LINES[3], LINES[10]]))
    job.run()
    assert [(letter["index"], letter["code"]) for letter in job.errors()] == [(10, "duplicate_id")]
    assert len(job.outputs()) == 11


@pytest.mark.parametrize("form", ["jsonl", "openai-batch"])
def test_an_id_that_a_retry_gave_a_row_is_unique_across_nights_too(job: JobMaker, form: str) -> None:
    spec = job.spec(output={"format": form})
    job.input.write_bytes(b"".join([*LINES[:9], LINES[3]]))
    job.run(spec)
    (letter,) = job.errors()
    letter["row"]["id"] = "q-10"
    (job.output / "errors.jsonl").write_text(json.dumps(letter) + "\n")
    assert retried(job).exit_code == ExitCode.OK
    job.input.write_bytes(b"".join([*LINES[:9], LINES[3], LINES[10], LINES[11]]))
    assert job.run(spec).exit_code == ExitCode.ROWS_FAILED
    assert ["duplicate_id" in json.dumps(letter) for letter in job.errors()] == [True]
    names = [record.get("custom_id", record["id"]) for record in job.outputs()]
    assert len(set(names)) == len(names) == 11


@stored
@pytest.mark.parametrize("missing", [b"", b"\n", b"\r\n", b"\r|\n"], ids=["whole", "cut", "before CRLF", "in CRLF"])
def test_what_a_retry_gave_the_last_row_stays_where_the_row_was_whole(
    job: JobMaker, member: str, missing: bytes
) -> None:
    first = b"".join([*LINES[:4], LINES[2]])
    *there, missing = missing.split(b"|")
    first = b"".join([first.rstrip(b"\n"), *there]) if missing else first
    parts = [MEMBERS[member](part) for part in (first, missing + LINES[5] + LINES[6])]
    job.input.write_bytes(parts[0])
    job.run()
    (letter,) = job.errors()
    letter["row"]["id"] = "mended"
    (job.output / "errors.jsonl").write_text(json.dumps(letter) + "\n")
    assert retried(job).exit_code == ExitCode.OK
    before = job.outputs()
    job.input.write_bytes(b"".join(parts))
    assert job.run().exit_code == ExitCode.OK
    assert computed(job) == 2
    assert job.outputs()[:5] == before
    assert [record["index"] for record in job.outputs()] == [*range(7)]


@pytest.mark.parametrize("kind", ["limit", "header", "blanks"])
def test_what_a_retry_gave_the_last_row_stays_where_no_row_was_cut(job: JobMaker, kind: str) -> None:
    """Behind the limit, in the header of a table that has no rows yet, or in blanks."""
    table = b"id,question\n"
    first = b"".join([*(line for row in ROWS[:3] for line in _cells(row)), b"q-9,\n"])
    parts = {
        "limit": {"a.csv": (table + first + b"".join(_cells(ROWS[5])) + b"q-6,Wh", b"at is 6?\n")},
        "header": {"a.csv": (table + first, b""), "b.csv": (b"id,que", b"stion\n")},
        "blanks": {"a.jsonl": (b"".join(LINES[:3]) + b'{"id": "q-9"}\n  ', LINES[5])},
    }[kind]
    for name, (begin, _) in parts.items():
        (job.folder / name).write_bytes(begin)
    paths = [str(job.folder / name) for name in parts]
    spec = job.spec(input={"path": paths, **({"limit": 4} if kind == "limit" else {})})
    assert job.run(spec).exit_code == ExitCode.ROWS_FAILED
    (letter,) = job.errors()
    letter["row"]["question"] = "What is 9?"
    (job.output / "errors.jsonl").write_text(json.dumps(letter) + "\n")
    assert retried(job).exit_code == ExitCode.OK
    before = job.outputs()
    for name, contents in parts.items():
        (job.folder / name).write_bytes(b"".join(contents))
    assert job.run(spec).exit_code == ExitCode.OK
    assert job.outputs()[:4] == before
    assert computed(job) == (kind == "blanks")


def _cells(row: dict[str, Any]) -> list[bytes]:
    return [f"{row['id']},{row['question']}\n".encode()]


def test_the_beginning_of_an_id_that_was_cut_is_free(job: JobMaker) -> None:
    path = job.folder / "input.csv"
    head = b"question,id\n" + b"".join(b"What is %d?,r%d\n" % (n, n) for n in range(6)) + b"Last,q1"
    path.write_bytes(head)
    spec = job.spec(input={"path": [str(path)]})
    assert job.run(spec, quiet(max_total_tokens=1)).exit_code == ExitCode.STOPPED
    path.write_bytes(head + b"5\nNext,q1\n")
    assert job.run(spec).exit_code == ExitCode.OK
    assert [record["id"] for record in job.outputs()][6:] == ["q15", "q1"]


def test_an_id_that_a_row_loses_as_it_runs_again_is_free(job: JobMaker) -> None:
    job.input.write_bytes(b"".join([*LINES[:4], LINES[2].rstrip()]))  # it goes on, so it runs again
    job.run()
    (letter,) = job.errors()
    letter["row"]["id"] = ROWS[5]["id"]
    (job.output / "errors.jsonl").write_text(json.dumps(letter) + "\n")
    assert retried(job).exit_code == ExitCode.OK
    job.input.write_bytes(b"".join([*LINES[:4], LINES[2].rstrip(), b"  \n", LINES[5]]))
    assert job.run().exit_code == ExitCode.ROWS_FAILED
    assert [(letter["index"], letter["code"]) for letter in job.errors()] == [(4, "duplicate_id")]
    assert [record["index"] for record in job.outputs()] == [0, 1, 2, 3, 5]


@pytest.mark.parametrize("limits", [{}, {"max_total_tokens": 100}], ids=["finished", "stopped"])
def test_files_that_a_pattern_gained_come_behind_wherever_sorted(job: JobMaker, limits: dict[str, Any]) -> None:
    spec = job.spec(input={"path": [str(job.folder / "part-*.jsonl")]})
    for name, rows in [("b", ROWS[:8]), ("c", ROWS[8:12])]:
        (job.folder / f"part-{name}.jsonl").write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    job.run(spec, quiet(**limits))
    (job.folder / "part-a.jsonl").write_bytes(b"".join(LINES[20:25]))
    with (job.folder / "part-c.jsonl").open("ab") as file:
        file.write(b"".join(LINES[12:15]))
    job.run(spec, quiet(max_total_tokens=40))
    (job.folder / "part-d.jsonl").write_bytes(b"".join(LINES[30:32]))
    job.run(spec)
    expected = [ROWS[i]["id"] for i in (*range(15), *range(20, 25), 30, 31)]
    assert [record["id"] for record in job.outputs()] == expected
    assert job.run(spec).lines[0].startswith("already done")


def test_a_folder_of_parquet_files_may_gain_some_but_none_may_change(job: JobMaker) -> None:
    folder = job.folder / "parts"
    folder.mkdir()
    spec = job.spec(input={"path": [str(folder)]})
    pq.write_table(pa.Table.from_pylist(ROWS[:10]), folder / "1.parquet")
    job.run(spec)
    pq.write_table(pa.Table.from_pylist(ROWS[10:15]), folder / "2.parquet")
    job.run(spec)
    assert [record["id"] for record in job.outputs()] == [row["id"] for row in ROWS[:15]]
    pq.write_table(pa.Table.from_pylist(ROWS[10:20]), folder / "2.parquet")
    with pytest.raises(ResumeMismatch, match=r"2\.parquet"):
        job.run(spec)


@pytest.mark.parametrize("limits", [{}, {"max_total_tokens": STOP}], ids=["finished", "stopped"])
def test_an_old_byte_that_changed_is_refused_by_name_and_costs_nothing(job: JobMaker, limits: dict[str, Any]) -> None:
    job.input.write_bytes(b"".join(LINES[:20]))
    job.run(options=quiet(**limits))
    job.input.write_bytes(b"".join(LINES).replace(b"What is 3", b"what is 3"))
    with pytest.raises(ResumeMismatch, match=r"input\.jsonl"):
        job.run()
    job.input.write_bytes(b"".join(LINES[:19]))
    with pytest.raises(ResumeMismatch, match=r"input\.jsonl"):
        job.run()
    job.input.write_bytes(b"".join(LINES))
    job.run()
    assert len(job.outputs()) == 60


def test_what_came_in_an_unfinished_night_may_not_change_either(job: JobMaker) -> None:
    job.input.write_bytes(b"".join(LINES[:10]))
    job.run()
    job.input.write_bytes(b"".join(LINES[:40]))
    assert job.run(options=quiet(max_total_tokens=STOP)).exit_code == ExitCode.STOPPED
    job.input.write_bytes(b"".join(LINES).replace(b"What is 20", b"what is 20"))
    with pytest.raises(ResumeMismatch, match=r"input\.jsonl"):
        job.run()


def test_only_the_last_of_several_files_may_grow(job: JobMaker) -> None:
    spec = job.spec(input={"path": [str(job.folder / "part-*.jsonl")]})
    for name, lines in [("a", LINES[:5]), ("b", LINES[5:9])]:
        (job.folder / f"part-{name}.jsonl").write_bytes(b"".join(lines))
    job.run(spec)
    (job.folder / "part-a.jsonl").write_bytes(b"".join([*LINES[:5], *LINES[20:25]]))
    said = r"part-a\.jsonl(.|\n)*may gain files, and the last of its text files lines"
    with pytest.raises(ResumeMismatch, match=said):
        job.run(spec)


def test_the_limit_holds_over_all_nights(job: JobMaker) -> None:
    spec = job.spec(input={"limit": 12})
    for num_rows in (10, 30, 60):
        job.input.write_bytes(b"".join(LINES[:num_rows]))
        job.run(spec)
    assert [record["index"] for record in job.outputs()] == [*range(12)]


@pytest.mark.parametrize("form", ["parquet", "openai-batch"])
def test_outputs_of_every_format_and_order_grow(job: JobMaker, form: str) -> None:
    spec = job.spec(output={"format": form, "order": "completion"}, input={"keep_columns": ["answer"]})
    for num_rows in (10, 30):
        job.input.write_bytes(b"".join(LINES[:num_rows]))
        job.run(spec)
    path = RunDir(job.output).outputs(form)
    records = pq.read_table(path).to_pylist() if form == "parquet" else path.read_text().splitlines()
    assert len(records) == 30


def test_shards_grow_each_and_merge_once_all_have(job: JobMaker, whole: JobMaker) -> None:
    def night(num_rows: int, *numbers: int) -> None:
        job.input.write_bytes(b"".join(LINES[:num_rows]))
        for number in numbers:
            spec = job.spec(output={"path": str(job.folder / f"part{number}")})
            job.run(spec, RunOptions(shard=Shard(number, 2), progress="quiet"))

    parts = [job.folder / "part1", job.folder / "part2"]
    night(21, 1, 2)
    night(60, 1)
    with pytest.raises(UsageError, match="not of one job"):
        merge(parts, job.output)
    night(60, 2)
    merge(parts, job.output)
    whole.input.write_bytes(b"".join(LINES))
    whole.run()
    assert job.outputs() == whole.outputs()


def test_standard_input_that_grew_is_gone_on_with(tmp_path: Path) -> None:
    job = JobMaker(tmp_path)
    arguments = ["run", str(job.toml()), "--input", "-", "-q"]
    for num_rows in (10, 25):
        job.input.write_bytes(b"".join(LINES[:num_rows]))
        assert finish(start(arguments, stdin=job.input)) == (0, "")
    assert [record["id"] for record in job.outputs()] == [row["id"] for row in ROWS[:25]]


def test_until_the_rows_behind_are_done_the_outputs_stay_and_the_run_counts_as_unfinished(job: JobMaker) -> None:
    job.input.write_bytes(b"".join(LINES[:20]))
    job.run()
    before = (job.output / "outputs.jsonl").read_bytes()
    job.input.write_bytes(b"".join(LINES))
    assert job.run(options=quiet(max_total_tokens=STOP)).exit_code == ExitCode.STOPPED
    assert (job.output / "outputs.jsonl").read_bytes() == before
    assert read_status(job.output)["state"] == "stopped"
    with pytest.raises(UsageError, match="not finished"):
        retried(job)


def test_an_interrupted_retry_comes_before_the_rows_behind(job: JobMaker) -> None:
    job.input.write_bytes(b"".join(LINES[:20]))
    job.run(fails=frozenset({0, 1, 2}))
    assert (job.output / "errors.jsonl").exists()
    assert retried(job, max_total_tokens=10).exit_code == ExitCode.STOPPED
    job.input.write_bytes(b"".join(LINES))
    with pytest.raises(UsageError, match="retry that was interrupted"):
        job.run()
    retried(job)
    job.run()
    assert len(job.outputs()) == 60


@pytest.mark.parametrize("grows_again", [False, True], ids=["finished", "stopped-as-it-grew-again"])
def test_where_the_outputs_of_a_grown_run_were_taken_away_all_rows_run_again(
    job: JobMaker, whole: JobMaker, grows_again: bool
) -> None:
    for num_rows in (20, 35):
        job.input.write_bytes(b"".join(LINES[:num_rows]))
        job.run()
    if grows_again:
        job.input.write_bytes(b"".join(LINES[:50]))
        assert job.run(options=quiet(max_total_tokens=20)).exit_code == ExitCode.STOPPED
    (job.output / "outputs.jsonl").unlink()
    assert job.run().exit_code == ExitCode.OK
    whole.input.write_bytes(job.input.read_bytes())
    whole.run()
    assert job.outputs() == whole.outputs()


@pytest.mark.parametrize(
    "files", [5, None, [1, 2], [{"file": "a", "sha256": "x"}], [{"file": "a", "sha256": "x", "bytes": -9}]]
)
def test_a_job_json_whose_input_is_of_another_shape_is_refused_in_one_line(job: JobMaker, files: object) -> None:
    job.input.write_bytes(b"".join(LINES[:3]))
    job.run()
    path = job.output / "job.json"
    content = json.loads(path.read_bytes())
    content["fingerprints"]["input"]["files"] = files
    path.write_text(json.dumps(content))
    with pytest.raises((UsageError, ResumeMismatch), match=r"job\.json.*fingerprints\.input\.files|was begun with"):
        job.run()


def test_of_files_of_one_name_the_one_that_goes_on_has_grown(job: JobMaker, whole: JobMaker) -> None:
    def day(number: int, lines: list[bytes]) -> None:
        for made in (job, whole):
            path = made.folder / f"day={number}" / "rows.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"".join(lines))

    day(1, LINES[:10])
    day(3, LINES[10:20])
    spec = job.spec(input={"path": [str(job.folder / "day=*/rows.jsonl")]})
    job.run(spec)
    day(3, LINES[10:30])
    day(2, LINES[30:])
    assert job.run(spec).exit_code == ExitCode.OK
    in_order = [str(whole.folder / f"day={number}" / "rows.jsonl") for number in (1, 3, 2)]
    whole.run(whole.spec(input={"path": in_order}))
    assert job.outputs() == whole.outputs()


def test_time_counts_once_where_a_kill_comes_behind_the_report(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    job.input.write_bytes(b"".join(LINES[:20]))
    job.run()
    job.input.write_bytes(b"".join(LINES))

    def killed(_: RunDir) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "remove_spool", killed)
        with pytest.raises(KeyboardInterrupt):
            job.run()
    report = json.loads((job.output / "report.json").read_bytes())
    again = job.run().report
    assert again is not None
    assert again["rows"] == report["rows"] == {"total": 60, "done": 60, "failed": 0, "new": 40}
    assert (report["sessions"], again["sessions"]) == (2, 3)
    assert again["engine"]["num_steps"] == report["engine"]["num_steps"]
