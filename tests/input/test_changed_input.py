"""Inputs that change while they are run: noticed, never published, and no loss once they are what they were."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from input_helpers import jsonl, zstd
from repeats import slow
from run_helpers import JobMaker, rows_of, without_timings

from batchgen.config.job import JobSpec
from batchgen.core import file_digests
from batchgen.core.errors import InputError, UsageError
from batchgen.core.records import Row
from batchgen.input import rows as rows_module
from batchgen.input import source
from batchgen.input.rows import chunked
from batchgen.input.source import RowRange

CHUNK_ROWS = 48
NUM_ROWS = 2 * CHUNK_ROWS + 30  # three chunks, of which the first is all that is read when the first steps run
Rows = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "CHUNK_ROWS", CHUNK_ROWS)


def parquet(rows: Rows) -> bytes:
    """With row groups that an edit reaches."""
    sink = pa.BufferOutputStream()
    plain: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=50, **plain)
    return sink.getvalue().to_pybytes()


def arrow(rows: Rows) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=50)
    return sink.getvalue().to_pybytes()


FORMATS: dict[str, tuple[str, Callable[[Rows], bytes]]] = {
    "jsonl": ("input.jsonl", jsonl),
    "gzip": ("input.jsonl.gz", lambda rows: gzip.compress(jsonl(rows), mtime=0)),
    "zstd": ("input.jsonl.zst", lambda rows: zstd(jsonl(rows))),
    "text": ("input.txt", lambda rows: "".join(f"{row['question']}\n" for row in rows).encode()),
    "parquet": ("input.parquet", parquet),
    "saved dataset": ("saved/data-00000-of-00001.arrow", arrow),
}
every_format = pytest.mark.parametrize("form", [slow(name) if name in ("zstd", "text") else name for name in FORMATS])
MAIN_FORMATS = ["jsonl", slow("parquet")]
main_formats = pytest.mark.parametrize("form", MAIN_FORMATS)


class Changing:
    """A job over one input of ``NUM_ROWS`` rows, at whose file tests meddle while it runs."""

    def __init__(self, job: JobMaker, form: str) -> None:
        self.job = job
        name, self.encode = FORMATS[form]
        self.file = job.folder / name
        self.content = self.encode(rows_of(NUM_ROWS))
        if form == "saved dataset":
            import datasets

            datasets.Dataset.from_list(rows_of(NUM_ROWS)).save_to_disk(str(self.file.parent))
        self.file.write_bytes(self.content)
        self.input: dict[str, Any] = {"path": [str(self.file.parent if form == "saved dataset" else self.file)]}
        if form == "text":
            self.input |= {"prompt": "{text}"}

    def spec(self, output: str = "out") -> JobSpec:
        spec = self.job.spec(input=self.input, output={"path": str(self.job.folder / output)})
        return replace(spec, input=replace(spec.input, id=None)) if self.file.suffix == ".txt" else spec

    def run(self, meddle: Callable[[], object] | None = None, **stub: Any) -> int:
        """Run; ``meddle`` is called before the third step, when one chunk has been read."""

        def before_step(number: int) -> None:
            if number == 2 and meddle is not None:
                meddle()

        return self.job.run(self.spec(), before_step=before_step, **stub).exit_code

    def undisturbed(self) -> list[dict[str, Any]]:
        assert self.job.run(self.spec("reference")).exit_code == 0
        return without_timings(self.job.folder / "reference" / "outputs.jsonl")


def edited(content: bytes) -> bytes:
    """The last chunk's rows say something else, in as many bytes."""
    found = content.replace(b"What is 115 times", b"What is 999 times")
    assert found != content
    assert len(found) == len(content)
    return found


def replaced(file: Path, content: bytes) -> None:
    new = file.with_name("new")
    new.write_bytes(content)
    new.replace(file)


CHANGES: dict[str, Callable[[Path, bytes], object]] = {
    "emptied": lambda file, content: os.truncate(file, 0),
    "cut": lambda file, content: os.truncate(file, len(content) // 2),
    "edited in place": lambda file, content: file.write_bytes(edited(content)),
    "appended to": lambda file, content: file.write_bytes(content + content[-40:]),
    "replaced": lambda file, content: replaced(file, edited(content)),
    "removed": lambda file, content: file.unlink(),
}


# ---------------------------------------------------------------- noticed


@pytest.mark.parametrize(
    "change", [slow(name) if name in ("cut", "appended to", "removed") else name for name in CHANGES]
)
@pytest.mark.parametrize("form", MAIN_FORMATS, ids=str)
def test_a_changed_input_stops_the_run_and_resumes_once_it_is_as_it_was(job: JobMaker, form: str, change: str) -> None:
    changing = Changing(job, form)
    expected = changing.undisturbed()
    with pytest.raises(InputError, match=changing.file.name) as caught:
        changing.run(lambda: CHANGES[change](changing.file, changing.content))
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert not list(job.output.glob("outputs.*"))
    assert [*(job.output / "journal").glob("*/job.json")]
    changing.file.write_bytes(changing.content)
    assert changing.run() == 0
    assert job.outputs() == expected


@every_format
@pytest.mark.parametrize("is_cut", [False, True])
def test_other_rows_of_the_same_number_and_a_file_cut_short_are_noticed_in_every_format(
    job: JobMaker, form: str, is_cut: bool
) -> None:
    changing = Changing(job, form)
    other = changing.encode([{**row, "question": row["question"][::-1]} for row in rows_of(NUM_ROWS)])
    with pytest.raises(InputError, match=changing.file.name):
        changing.run(lambda: changing.file.write_bytes(changing.content[:100] if is_cut else other))
    assert not (job.output / "outputs.jsonl").exists()


def test_a_change_after_the_last_row_was_read_is_noticed_too(job: JobMaker) -> None:
    job.write(rows_of(60))
    with pytest.raises(InputError, match=r"it had .* bytes and has 0 now"):
        job.run(before_step=lambda number: os.truncate(job.input, 0))
    assert not (job.output / "outputs.jsonl").exists()


def test_a_change_noticed_while_rows_are_counted_names_the_file(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    job.write(rows_of(60))
    pass_over = RowRange.pass_over
    monkeypatch.setattr(RowRange, "pass_over", lambda rows: (os.truncate(job.input, 10), pass_over(rows))[1])
    with pytest.raises(InputError, match=r"input\.jsonl"):
        job.run()


# ---------------------------------------------------------------- no change


@main_formats
def test_new_rights_of_a_file_are_no_change(job: JobMaker, form: str) -> None:
    changing = Changing(job, form)
    expected = changing.undisturbed()
    assert changing.run(lambda: changing.file.chmod(0o600)) == 0
    assert job.outputs() == expected


@main_formats
@pytest.mark.parametrize("is_touched", [True, False])
def test_a_file_that_is_touched_or_replaced_by_its_copy_stops_the_run_which_goes_on(
    job: JobMaker, form: str, is_touched: bool
) -> None:
    """An edit that was undone leaves no other trace, and rows may have been read meanwhile."""
    changing = Changing(job, form)
    expected = changing.undisturbed()
    with pytest.raises(InputError, match="was written to, or replaced"):
        changing.run(lambda: os.utime(changing.file) if is_touched else replaced(changing.file, changing.content))
    assert changing.run() == 0
    assert job.outputs() == expected


@main_formats
def test_no_row_is_taken_that_was_read_until_an_edit_was_undone(
    job: JobMaker, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing = Changing(job, form)
    rows = [{**row, "pad": "x" * 9000} for row in rows_of(NUM_ROWS)]  # more than is read ahead
    changing.content = changing.encode(rows)
    changing.file.write_bytes(changing.content)
    expected = changing.undisturbed()
    num_wrong = 0

    def meddling(rows: Iterator[Row]) -> Iterator[list[Row]]:
        nonlocal num_wrong
        chunks = chunked(rows)
        yield from islice(chunks, 1)
        if not num_wrong:
            changing.file.write_bytes(changing.content.replace(b"What is ", b"What's: "))
            chunk = next(chunks, [])
            num_wrong = sum("What's" in str(row.columns) for row in chunk if row.error is None)
            changing.file.write_bytes(changing.content)
            yield from [chunk] if chunk else []
        yield from chunks

    monkeypatch.setattr(source, "COUNT_BYTES", 0)  # rows are not counted, which would be another reading
    monkeypatch.setattr(source, "chunked", meddling)
    with pytest.raises(InputError):
        changing.run()
    assert num_wrong
    assert changing.run() == 0
    assert job.outputs() == expected


def test_a_file_that_changes_while_it_is_hashed_is_refused(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    job.write(rows_of(3))
    file_digest = file_digests.file_digest

    def changing(path: Path) -> str:
        digest = file_digest(path)
        if path == job.input:
            job.write(rows_of(4))
        return digest

    monkeypatch.setattr(file_digests, "file_digest", changing)
    with pytest.raises(UsageError, match=r"input\.jsonl changes while it is read; run again"):
        job.run()
    assert not job.output.exists()
